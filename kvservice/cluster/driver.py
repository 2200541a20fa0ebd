"""The process that talks to Ray for a command: `python -m kvservice.cluster.driver`.

It is a process of its own because Ray reads its settings from the environment at import, aborts
the process that loses its cluster, and may wait for ever for one that isn't there: the command
gives it an environment, and a time after which it ends it.

One request comes in on stdin, as JSON. What happens goes out on stdout, one JSON object a line;
the last one has the key `result` or `error`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final, Protocol, TextIO

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from kvservice.clock import Clock, SystemClock
from kvservice.cluster.manager_actor import MANAGER_NAME, NAMESPACE, WORKER_PREFIX, ManagerActor
from kvservice.cluster.placement import Needs, manager_needs, shortage, worker_needs
from kvservice.cluster.processes import wait_until
from kvservice.cluster.state import Actor, ServiceOptions
from kvservice.core.errors import (
    AlreadyExists,
    InternalError,
    KVServiceError,
    Unavailable,
)

_POLL_S: Final = 0.2
_PATIENCE_S: Final = 5.0  # for an actor that should answer at once


class Tell(Protocol):
    """Says what has happened, to the command that waits."""

    def __call__(self, **event: object) -> None: ...


def start(request: dict[str, Any], tell: Tell, clock: Clock) -> dict[str, object]:
    """Start the manager and its workers, or find that they run as asked.

    Raises:
        AlreadyExists: A service with other options runs in this cluster.
        Unavailable: Something could not be placed or did not start in time. What this call has
            started is ended.
    """
    options = ServiceOptions(**request["options"])
    deadline = clock.monotonic() + request["timeout_s"]
    _connect(request, tell, deadline, clock)
    existing = _find_actor(MANAGER_NAME)
    if existing is not None:
        return _already_running(existing, options)
    needs = worker_needs(ray.cluster_resources(), options, is_local=request["is_local"])
    manager = (
        ray.remote(ManagerActor)
        .options(
            name=MANAGER_NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,  # nothing that changes something is done twice
            num_cpus=0,
            resources=manager_needs(ray.cluster_resources()).resources,
        )
        .remote(options, needs, is_local=request["is_local"])
    )
    tell(actor=asdict(_record(MANAGER_NAME, manager)))
    try:
        return _wait_until_serving(manager, options, needs, tell, deadline, clock)
    except BaseException:
        _kill_service(manager)
        raise


def stop(request: dict[str, Any], tell: Tell, clock: Clock) -> dict[str, object]:
    """Kill the recorded actors that are still there, and the workers of a recorded manager.

    An actor that has the name but another id is somebody else's.
    """
    _connect(request, tell, clock.monotonic() + request["timeout_s"], clock)
    killed: list[str] = []
    recorded = [Actor(**actor) for actor in request["actors"]]
    # The manager first, for it starts the others.
    for actor in sorted(recorded, key=lambda actor: actor.name != MANAGER_NAME):
        handle = _find_actor(actor.name)
        if handle is None or _record(actor.name, handle) != actor:
            continue
        if actor.name == MANAGER_NAME:
            killed += _kill_service(handle)
        else:
            killed += _kill({actor.name: handle})
    tell(killed=killed)
    return {"killed": killed}


def _connect(request: dict[str, Any], tell: Tell, deadline: float, clock: Clock) -> None:
    """Connect to the cluster; one that is just being started may take a while to answer."""
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


def _already_running(manager: Any, options: ServiceOptions) -> dict[str, object]:
    try:
        found: dict[str, Any] = ray.get(manager.describe.remote(), timeout=_PATIENCE_S)
    except (GetTimeoutError, RayError) as error:
        raise Unavailable(
            f"the cluster has an actor {MANAGER_NAME} already, and it does not answer: {error}"
        ) from error
    if found["options"] != asdict(options):
        raise AlreadyExists(
            f"a service with other options runs in this cluster, at {found['address']}: "
            'end it by "kvservice down" where it was started'
        )
    return _where(found)


def _wait_until_serving(
    manager: Any,
    options: ServiceOptions,
    needs: Needs,
    tell: Tell,
    deadline: float,
    clock: Clock,
) -> dict[str, object]:
    """Wait for the manager, for each worker, and for their first heartbeats."""
    left = max(0.0, deadline - clock.monotonic())
    try:
        found: dict[str, Any] = ray.get(manager.describe.remote(), timeout=left)
    except GetTimeoutError:
        raise Unavailable(
            "the manager has not started in time; "
            + shortage(manager_needs(ray.cluster_resources()), 1, *_resources())
        ) from None
    except RayActorError as error:
        raise Unavailable(f"the manager did not start: {_cause(error)}") from error
    address = found["address"]
    handles = {name: ray.get_actor(name, namespace=NAMESPACE) for name in found["workers"]}
    for name, handle in handles.items():
        tell(actor=asdict(_record(name, handle)))
    pending = {handle.describe.remote(): name for name, handle in handles.items()}
    while pending:
        left = max(0.0, deadline - clock.monotonic())
        ready, _ = ray.wait(list(pending), timeout=left)
        if not ready:
            raise Unavailable(
                f"{len(handles) - len(pending)} of {len(handles)} workers started in time; "
                + shortage(needs, len(pending), *_resources())
            )
        try:
            ray.get(ready[0])
        except RayActorError as error:
            raise Unavailable(f"{pending[ready[0]]} did not start: {_cause(error)}") from error
        del pending[ready[0]]
        tell(started_workers=len(handles) - len(pending))
    while ray.get(manager.num_alive_workers.remote(), timeout=_PATIENCE_S) < options.num_workers:
        if clock.monotonic() >= deadline:
            raise Unavailable(f"the workers run, but not all have reached the manager at {address}")
        clock.wait(threading.Event(), _POLL_S)
    return _where(found)


def _where(found: dict[str, Any]) -> dict[str, object]:
    return {"manager_address": found["address"], "metrics_address": found["metrics_address"]}


def _kill_service(manager: Any) -> list[str]:
    """Kill a manager and its workers; return the names."""
    names: list[str] = []
    try:
        names = ray.get(manager.describe.remote(), timeout=_PATIENCE_S)["workers"]
    except (GetTimeoutError, RayError):
        # It is between two lives, or never had one: it names its workers like this.
        names = [
            found["name"]
            for found in ray.util.list_named_actors(all_namespaces=True)
            if found["namespace"] == NAMESPACE and found["name"].startswith(WORKER_PREFIX)
        ]
    handles = {MANAGER_NAME: manager}
    for name in names:
        handle = _find_actor(name)
        if handle is not None:
            handles[name] = handle
    return _kill(handles)


def _kill(handles: dict[str, Any]) -> list[str]:
    """Stop and kill actors, wait until Ray has forgotten their names, and return these."""
    with contextlib.suppress(GetTimeoutError, RayError):
        ray.get([handle.stop.remote() for handle in handles.values()], timeout=_PATIENCE_S)
    for handle in handles.values():
        ray.kill(handle, no_restart=True)
    wait_until(
        lambda: all(_find_actor(name) is None for name in handles),
        clock=SystemClock(),
        timeout_s=_PATIENCE_S,
    )
    return list(handles)


def _find_actor(name: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _record(name: str, handle: Any) -> Actor:
    return Actor(name, handle._actor_id.hex())


def _resources() -> tuple[dict[str, float], dict[str, float]]:
    return ray.cluster_resources(), ray.available_resources()


def _cause(error: RayActorError) -> str:
    """Return the line of Ray's long message that says what the constructor raised."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def main() -> int:
    """Carry out one request."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints, Ray included, must not get between our lines
    request = json.loads(sys.stdin.read())
    return _answer({"start": start, "stop": stop}[request["action"]], request, output)


def _answer(
    action: Callable[[dict[str, Any], Tell, Clock], dict[str, object]],
    request: dict[str, Any],
    output: TextIO,
) -> int:
    def tell(**event: object) -> None:
        print(json.dumps(event), file=output, flush=True)

    try:
        result = action(request, tell, SystemClock())
    except KVServiceError as error:
        tell(error={"reason": error.reason, "message": error.message})
    except Exception as error:
        tell(error={"reason": InternalError.reason, "message": f"{type(error).__name__}: {error}"})
        raise
    else:
        tell(result=result)
        return 0
    finally:
        ray.shutdown()
    return 1


if __name__ == "__main__":
    sys.exit(main())
