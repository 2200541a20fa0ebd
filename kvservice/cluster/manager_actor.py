"""The manager as a Ray actor: it serves by gRPC, and sees to it that its workers are there."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any, Final

import ray

from kvservice.cluster.placement import Needs
from kvservice.cluster.serving import serve, where
from kvservice.cluster.state import ServiceOptions
from kvservice.cluster.worker_actor import WorkerActor, WorkerPlan
from kvservice.config import ManagerSettings
from kvservice.core.directory import WorkerState
from kvservice.runtime.manager import ManagerServer

NAMESPACE: Final = "kvservice"
MANAGER_NAME: Final = "kv-manager"
WORKER_PREFIX: Final = "kv-worker-"


class ManagerActor:
    """Serves from its construction on, and starts the workers that are not there.

    All actors are detached: workers outlive the manager. A restarted manager finds them by their
    names, and hears from them what they hold.
    """

    def __init__(self, options: ServiceOptions, needs: Needs, *, is_local: bool) -> None:
        """
        Args:
            needs: Of each worker.
            is_local: All workers are on this machine, so that their ports must differ.
        """
        logging.basicConfig(level=logging.INFO)
        self._options = options
        host, advertise_host = where(options.host)
        self._server = ManagerServer(
            ManagerSettings(
                host=host,
                port=options.port,
                advertise_host=advertise_host,
                metrics_port=options.metrics_port,
                workers_expected=options.num_workers,
            )
        )
        serve(self._server)
        self._workers = {
            plan.worker_id: _find_or_start(plan, needs)
            for plan in worker_plans(options, self._server.address, is_local=is_local)
        }

    def describe(self) -> dict[str, object]:
        """Return where it serves, for whom, and what it was started with."""
        return {
            "address": self._server.address,
            "metrics_address": self._server.metrics_address,
            "workers": list(self._workers),
            "options": asdict(self._options),
        }

    def stop(self) -> None:
        """Let calls in progress end, and serve no more."""
        self._server.stop()

    def num_alive_workers(self) -> int:
        """Return how many workers have registered and are alive."""
        views = self._server.manager.workers()
        return sum(view.state is WorkerState.ALIVE for view in views)


def worker_plans(
    options: ServiceOptions, manager_address: str, *, is_local: bool
) -> list[WorkerPlan]:
    """Return what each worker is to be. On one machine a stated port is the first worker's, and
    the others get the next ones."""

    def port(stated: int, index: int) -> int:
        return stated + index if stated and is_local else stated

    return [
        WorkerPlan(
            worker_id=f"{WORKER_PREFIX}{index}",
            memory_bytes=options.memory_bytes,
            device=options.device,
            host=options.host,
            port=port(options.worker_port, index),
            lane_port=port(options.lane_port, index),
            metrics_port=port(options.worker_metrics_port, index),
            manager_address=manager_address,
        )
        for index in range(options.num_workers)
    ]


def _find_or_start(plan: WorkerPlan, needs: Needs) -> Any:
    """Return the handle of a worker's actor. Does not wait for it."""
    return (
        ray.remote(WorkerActor)
        .options(
            name=plan.worker_id,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=needs.num_cpus,
            num_gpus=needs.num_gpus,
            resources=needs.resources,
            scheduling_strategy="SPREAD",
        )
        .remote(plan)
    )
