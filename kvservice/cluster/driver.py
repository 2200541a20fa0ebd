"""The process that talks to Ray for a command: `python -m kvservice.cluster.driver`.

It is a process of its own because Ray reads its settings from the environment at import, aborts
the process that loses its cluster, and may wait for ever for one that isn't there: the command
gives it an environment, and a time after which it ends it.

One request comes in on stdin, as JSON. What happens goes out on stdout, one JSON object a line;
the last one has the key `result` or `error`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final, TextIO

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from kvservice.clock import Clock, SystemClock
from kvservice.cluster.actors import (
    PATIENCE_S,
    Tell,
    cause,
    connect,
    event_of,
    find_actor,
    kill,
    kill_service,
    record,
    start_manager,
)
from kvservice.cluster.keeping import keep
from kvservice.cluster.manager_actor import MANAGER_NAME, NAMESPACE
from kvservice.cluster.placement import Needs, manager_needs, shortage, worker_needs
from kvservice.cluster.state import Actor, ServiceOptions
from kvservice.core.errors import (
    AlreadyExists,
    InternalError,
    KVServiceError,
    Unavailable,
)

_POLL_S: Final = 0.2


def start(request: dict[str, Any], tell: Tell, clock: Clock) -> dict[str, object]:
    """Start the manager and its workers, or find that they run as asked.

    Raises:
        AlreadyExists: A service with other options runs in this cluster.
        Unavailable: Something could not be placed or did not start in time. What this call has
            started is ended.
    """
    options = ServiceOptions.from_json(request["options"])
    deadline = clock.monotonic() + request["timeout_s"]
    connect(request, tell, deadline, clock)
    existing = find_actor(MANAGER_NAME)
    if existing is not None:
        return _already_running(existing, options)
    total = ray.cluster_resources()
    needs = {
        group.prefix: worker_needs(total, options, group, is_local=request["is_local"])
        for group in options.groups
    }
    manager = start_manager(options, needs, is_local=request["is_local"])
    tell(actor=event_of(MANAGER_NAME, manager))
    try:
        return _wait_until_serving(manager, options, needs, tell, deadline, clock)
    except BaseException:
        kill_service(manager)
        raise


def stop(request: dict[str, Any], tell: Tell, clock: Clock) -> dict[str, object]:
    """Kill the recorded actors that are still there, and the workers of a recorded manager.

    An actor that has the name but another id is somebody else's.
    """
    connect(request, tell, clock.monotonic() + request["timeout_s"], clock)
    killed: list[str] = []
    recorded = [Actor(**actor) for actor in request["actors"]]
    # The manager first, for it starts the others.
    for actor in sorted(recorded, key=lambda actor: actor.name != MANAGER_NAME):
        handle = find_actor(actor.name)
        if handle is None or record(actor.name, handle) != actor:
            continue
        if actor.name == MANAGER_NAME:
            killed += kill_service(handle)
        else:
            killed += kill({actor.name: handle})
    tell(killed=killed)
    return {"killed": killed}


def _already_running(manager: Any, options: ServiceOptions) -> dict[str, object]:
    try:
        found: dict[str, Any] = ray.get(manager.describe.remote(), timeout=PATIENCE_S)
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
    needs: Mapping[str, Needs],
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
            + shortage(_manager_needs(options), 1, *_resources())
        ) from None
    except RayActorError as error:
        raise Unavailable(f"the manager did not start: {cause(error)}") from error
    address = found["address"]
    handles = {name: ray.get_actor(name, namespace=NAMESPACE) for name in found["workers"]}
    for name, handle in handles.items():
        tell(actor=event_of(name, handle))
    pending = {handle.describe.remote(): name for name, handle in handles.items()}
    while pending:
        left = max(0.0, deadline - clock.monotonic())
        ready, _ = ray.wait(list(pending), timeout=left)
        if not ready:
            prefix = next(iter(pending.values())).rstrip("0123456789")
            raise Unavailable(
                f"{len(handles) - len(pending)} of {len(handles)} workers started in time; "
                + shortage(needs[prefix], len(pending), *_resources())
            )
        try:
            ray.get(ready[0])
        except RayActorError as error:
            raise Unavailable(f"{pending[ready[0]]} did not start: {cause(error)}") from error
        del pending[ready[0]]
        tell(started_workers=len(handles) - len(pending))
    while ray.get(manager.num_alive_workers.remote(), timeout=PATIENCE_S) < options.total_workers:
        if clock.monotonic() >= deadline:
            raise Unavailable(f"the workers run, but not all have reached the manager at {address}")
        clock.wait(threading.Event(), _POLL_S)
    return _where(found)


def _where(found: dict[str, Any]) -> dict[str, object]:
    return {"manager_address": found["address"], "metrics_address": found["metrics_address"]}


def _manager_needs(options: ServiceOptions) -> Needs:
    return manager_needs(ray.cluster_resources(), by_resource=options.by_resource)


def _resources() -> tuple[dict[str, float], dict[str, float]]:
    return ray.cluster_resources(), ray.available_resources()


def main() -> int:
    """Carry out one request."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints, Ray included, must not get between our lines
    request = json.loads(sys.stdin.read())
    return _answer({"start": start, "stop": stop, "keep": keep}[request["action"]], request, output)


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
