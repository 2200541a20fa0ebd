"""The manager as a Ray actor: it serves by gRPC, and sees to it that its workers are there."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Final

import ray

from kvservice.cluster.placement import Needs
from kvservice.cluster.serving import serve, where
from kvservice.cluster.state import ServiceOptions, WorkerGroup
from kvservice.cluster.worker_actor import WorkerActor, WorkerPlan
from kvservice.config import ManagerSettings
from kvservice.core.liveness import WorkerState
from kvservice.runtime import telemetry
from kvservice.runtime.manager import ManagerServer

NAMESPACE: Final = "kvservice"
MANAGER_NAME: Final = "kv-manager"

LOG = logging.getLogger(__name__)


class ManagerActor:
    """Serves from its construction on, and starts the workers that are not there.

    All actors are detached: workers outlive the manager. A restarted manager finds them by their
    names, and hears from them what they hold.
    """

    def __init__(
        self, options: ServiceOptions, needs: Mapping[str, Needs], *, is_local: bool
    ) -> None:
        """
        Args:
            needs: Of each worker, by the prefix of its group.
            is_local: All workers are on this machine, so that their ports must differ.
        """
        telemetry.start(
            "kvservice-manager", log_level=options.log_level, log_format=options.log_format
        )
        self._options = options
        self._needs = needs
        self._is_local = is_local
        host, advertise_host = where(options.host)
        self._server = ManagerServer(
            ManagerSettings(
                host=host,
                port=options.port,
                advertise_host=advertise_host,
                metrics_port=options.metrics_port,
                health_port=options.health_port,
                workers_expected=options.total_workers,
                security=options.security,
            )
        )
        serve(self._server)
        self._workers: dict[str, Any] = {}
        self._places: dict[str, str] = {}  # the hosts of workers, as last heard
        self._start_missing()

    def describe(self) -> dict[str, object]:
        """Return where it serves, for whom, and what it was started with."""
        return {
            "address": self._server.address,
            "metrics_address": self._server.metrics_address,
            "workers": list(self._workers),
            "options": asdict(self._options),
        }

    def scale(self, num_workers: int, num_gpu_workers: int) -> dict[str, object]:
        """Have so many workers, and return what `describe` does, and how many are `alive`.

        Missing ones are started. One too many is ended only if it serves nobody, as when its node
        has been taken away: which node goes is for others to choose. May be repeated.
        """
        self._options = replace(
            self._options, num_workers=num_workers, num_gpu_workers=num_gpu_workers
        )
        self._server.manager.workers_expected = self._options.total_workers
        for view in self._server.manager.workers():
            host = view.record.address.rpartition(":")[0].strip("[]")
            self._places[view.record.worker_id] = host
        for group in self._options.groups:
            self._end_surplus(group)
        self._start_missing()
        return {**self.describe(), "alive": self.num_alive_workers()}

    def stop(self) -> None:
        """Let calls in progress end, and serve no more."""
        self._server.stop()

    def num_alive_workers(self) -> int:
        """Return how many workers have registered and are alive."""
        views = self._server.manager.workers()
        return sum(view.state is WorkerState.ALIVE for view in views)

    def _start_missing(self) -> None:
        """Find or start workers until each group has its number. Does not wait for them."""
        names = set(_named_actors())
        for name in [name for name in self._workers if name not in names]:
            LOG.warning("%s did not start, was drained, or was ended", name)
            del self._workers[name]
        away = self._kept_away(names)
        plans = worker_plans(
            self._options, self._server.address, names | away, is_local=self._is_local
        )
        for plan in plans:
            if plan.worker_id not in self._workers and plan.worker_id not in away:
                needs = self._needs[_prefix(plan.worker_id)]
                self._workers[plan.worker_id] = _find_or_start(plan, needs)

    def _kept_away(self, names: set[str]) -> set[str]:
        """Return the workers that were drained and whose nodes are still there: what was told to
        leave a node is not started on it again. Those that nobody misses are forgotten.

        Args:
            names: Of the workers that Ray has.
        """
        manager = self._server.manager
        left = manager.left_workers() - names
        if not left:
            return set()
        for group in self._options.groups:
            present = [name for name in names if _prefix(name) == group.prefix]
            if len(present) >= group.num_workers:
                for name in [name for name in left if _prefix(name) == group.prefix]:
                    manager.forget_left(name)
                    left -= {name}
        hosts = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        return {name for name in left if self._places.get(name) in hosts}

    def _end_surplus(self, group: WorkerGroup) -> None:
        serving = {
            view.record.worker_id
            for view in self._server.manager.workers()
            if view.state in (WorkerState.ALIVE, WorkerState.DRAINING)
        }
        ours = [name for name in self._workers if _prefix(name) == group.prefix]
        num_surplus = max(0, len(ours) - group.num_workers)
        for name in [name for name in ours if name not in serving][:num_surplus]:
            LOG.info("ending %s, which serves nobody and is one too many", name)
            ray.kill(self._workers.pop(name), no_restart=True)


def worker_plans(
    options: ServiceOptions, manager_address: str, present: Iterable[str], *, is_local: bool
) -> list[WorkerPlan]:
    """Return what each worker is to be: those that are present, and in each group as many more as
    it lacks, with the lowest free numbers. On one machine a stated port is the first worker's, and
    the others get the next ones."""
    plans: list[WorkerPlan] = []

    def port(stated: int, index: int) -> int:
        return stated + index if stated and is_local else stated

    before = 0  # on one machine, workers of earlier groups
    for group in options.groups:
        for number in _numbers(group, present):
            index = before + number
            health = options.worker_health_port
            plans.append(
                WorkerPlan(
                    worker_id=f"{group.prefix}{number}",
                    budget=group.budget,
                    device=group.device,
                    host=options.host,
                    port=port(options.worker_port, index),
                    lane_port=port(options.lane_port, index),
                    metrics_port=port(options.worker_metrics_port, index),
                    health_port=None if health is None else port(health, index),
                    manager_address=options.manager_address or manager_address,
                    security=replace(options.security, token_file=None),
                    zero_freed_pages=options.zero_freed_pages,
                    log_level=options.log_level,
                    log_format=options.log_format,
                )
            )
        before += group.num_workers
    return plans


def _numbers(group: WorkerGroup, present: Iterable[str]) -> list[int]:
    """Return the numbers in the names of a group's workers, those to be started included."""
    numbers = {
        int(name.removeprefix(group.prefix)) for name in present if _prefix(name) == group.prefix
    }
    free = (number for number in range(len(numbers) + group.num_workers) if number not in numbers)
    return sorted([*numbers, *(next(free) for _ in range(group.num_workers - len(numbers)))])


def _prefix(worker_id: str) -> str:
    return worker_id.rstrip("0123456789")


def _named_actors() -> list[str]:
    """Return the names of the workers that Ray has."""
    return [
        found["name"]
        for found in ray.util.list_named_actors(all_namespaces=True)
        if found["namespace"] == NAMESPACE and found["name"] != MANAGER_NAME
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
