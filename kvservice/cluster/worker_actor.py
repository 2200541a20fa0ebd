"""A worker as a Ray actor: Ray starts it, and starts it again; all else goes by gRPC."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import ray

from kvservice.cluster.serving import serve, where
from kvservice.config import Budget, Security, WorkerSettings
from kvservice.runtime import telemetry


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What one worker is to be, wherever Ray puts it. Ports: 0 is any free one.

    budget: What its pages may take of what there is where it runs.
    host: Where to listen; None: at the address of the node.
    """

    worker_id: str
    budget: Budget
    device: str
    host: str | None
    port: int
    lane_port: int
    metrics_port: int
    health_port: int | None
    manager_address: str
    security: Security = field(default_factory=Security)
    zero_freed_pages: bool = False
    log_level: str = "info"
    log_format: str = "text"


class WorkerActor:
    """Serves from its construction on. A restart is a new incarnation, with nothing in it."""

    def __init__(self, plan: WorkerPlan) -> None:
        # Not above: those who only start the actor, the manager too, do without torch.
        from kvservice.runtime.worker import WorkerServer, budget_bytes

        telemetry.start("kvservice-worker", log_level=plan.log_level, log_format=plan.log_format)
        host, advertise_host = where(plan.host)
        self._server = WorkerServer(
            WorkerSettings(
                worker_id=plan.worker_id,
                budget_bytes=budget_bytes(plan.budget, plan.device),
                device=plan.device,
                host=host,
                port=plan.port,
                lane_port=plan.lane_port,
                advertise_host=advertise_host,
                metrics_port=plan.metrics_port,
                health_port=plan.health_port,
                manager_address=plan.manager_address,
                security=plan.security,
                zero_freed_pages=plan.zero_freed_pages,
            )
        )
        serve(self._server)
        threading.Thread(target=self._leave, name="kvservice-leave", daemon=True).start()

    def _leave(self) -> None:
        """Go for good when the worker has been drained: Ray is not to start it again."""
        self._server.wait()
        self._server.stop()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def describe(self) -> dict[str, object]:
        """Return where it serves. Answers as soon as it does."""
        return {"address": self._server.address, "incarnation": self._server.incarnation}

    def stop(self) -> None:
        """Let calls in progress end, serve no more, and remove what was made for that."""
        self._server.stop()
