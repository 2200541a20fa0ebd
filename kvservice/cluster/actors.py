"""Connecting to a Ray cluster, and starting, finding and killing the actors of the service."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from kvservice.clock import Clock, SystemClock
from kvservice.cluster.manager_actor import MANAGER_NAME, NAMESPACE, ManagerActor
from kvservice.cluster.placement import Needs, manager_needs
from kvservice.cluster.processes import wait_until
from kvservice.cluster.state import (
    GPU_WORKER_PREFIX,
    WORKER_PREFIX,
    Actor,
    ServiceOptions,
)
from kvservice.core.errors import Unavailable

PATIENCE_S: Final = 5.0
"""For an actor that should answer at once."""

_POLL_S: Final = 0.2


class Tell(Protocol):
    """Says what has happened, to the command that waits."""

    def __call__(self, **event: object) -> None: ...


def connect(request: Mapping[str, Any], tell: Tell, deadline: float, clock: Clock) -> None:
    """Connect to the cluster; one that is just being started may take a while to answer.

    Raises:
        Unavailable: None answers.
    """
    extra = {"_node_ip_address": request["node_address"]} if request["node_address"] else {}
    while True:
        try:
            ray.init(
                address=request["ray_address"],
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level="ERROR",
                **extra,
            )
            tell(connected=True)
            return
        except (ConnectionError, RayError, RuntimeError, ValueError, TimeoutError) as error:
            if clock.monotonic() >= deadline or not request["is_local"]:
                first_line = str(error).strip().splitlines()[:1]
                raise Unavailable(
                    f"no Ray cluster answers at {request['ray_address']}: {' '.join(first_line)}"
                ) from error
            clock.wait(threading.Event(), _POLL_S)


def start_manager(options: ServiceOptions, needs: Mapping[str, Needs], *, is_local: bool) -> Any:
    """Return the handle of the manager's actor, started if there is none. Does not wait for it."""
    own = manager_needs(ray.cluster_resources(), by_resource=options.by_resource)
    return (
        ray.remote(ManagerActor)
        .options(
            name=MANAGER_NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,  # nothing that changes something is done twice
            num_cpus=0,
            resources=own.resources,
        )
        .remote(options, needs, is_local=is_local)
    )


def find_actor(name: str) -> Any | None:
    """Return the handle of a named actor; None if there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def record(name: str, handle: Any) -> Actor:
    """Return what an actor is recorded by."""
    return Actor(name, handle._actor_id.hex())


def event_of(name: str, handle: Any) -> dict[str, str]:
    """Return an actor's record as an event has it."""
    return asdict(record(name, handle))


def kill_service(manager: Any) -> list[str]:
    """Kill a manager and its workers; return the names."""
    names: list[str] = []
    try:
        names = ray.get(manager.describe.remote(), timeout=PATIENCE_S)["workers"]
    except (GetTimeoutError, RayError):
        # It is between two lives, or never had one: it names its workers like this.
        names = [
            found["name"]
            for found in ray.util.list_named_actors(all_namespaces=True)
            if found["namespace"] == NAMESPACE
            and found["name"].startswith((WORKER_PREFIX, GPU_WORKER_PREFIX))
        ]
    handles = {MANAGER_NAME: manager}
    for name in names:
        handle = find_actor(name)
        if handle is not None:
            handles[name] = handle
    return kill(handles)


def kill(handles: dict[str, Any]) -> list[str]:
    """Stop and kill actors, wait until Ray has forgotten their names, and return these."""
    with contextlib.suppress(GetTimeoutError, RayError):
        ray.get([handle.stop.remote() for handle in handles.values()], timeout=PATIENCE_S)
    for handle in handles.values():
        ray.kill(handle, no_restart=True)
    wait_until(
        lambda: all(find_actor(name) is None for name in handles),
        clock=SystemClock(),
        timeout_s=PATIENCE_S,
    )
    return list(handles)


def cause(error: RayActorError) -> str:
    """Return the line of Ray's long message that says what the constructor raised."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
