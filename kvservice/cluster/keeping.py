"""Keeping a service there, in a cluster whose nodes come and go.

What `up` does once is done again and again: the manager is started where there is none, and is
told how many workers there should be. Nothing is ended, and nothing waits for all to be there, for
a node that is missing may take hours to come.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from kvservice.clock import Clock
from kvservice.cluster.actors import PATIENCE_S, Tell, cause, connect, find_actor, start_manager
from kvservice.cluster.manager_actor import MANAGER_NAME
from kvservice.cluster.placement import worker_needs
from kvservice.cluster.state import ServiceOptions
from kvservice.core.errors import InvalidRequest, KVServiceError

INTERVAL_S: Final = 5.0


def keep(request: dict[str, Any], tell: Tell, clock: Clock) -> dict[str, object]:
    """Keep manager and workers there, until this process is ended. Tells what changes.

    Raises:
        Unavailable: The cluster does not answer, so that connecting again is worth a try.
    """
    options = ServiceOptions.from_json(request["options"])
    scale_file = Path(request["scale_file"]) if request["scale_file"] else None
    connect(request, tell, clock.monotonic() + request["timeout_s"], clock)
    told = None
    while True:
        try:
            options = scaled(options, scale_file)
            found = _once(options)
        except GetTimeoutError:
            found = {"waiting": "the manager has not started yet, or hangs"}
        except RayActorError as error:
            found = {"waiting": f"the manager has ended: {cause(error)}"}
        except (KVServiceError, RayError) as error:
            found = {"waiting": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
        if found != told:
            tell(kept=found)
            told = found
        clock.wait(threading.Event(), INTERVAL_S)


def scaled(options: ServiceOptions, scale_file: Path | None) -> ServiceOptions:
    """Return the options with the numbers of workers that a file states now.

    Args:
        scale_file: JSON, `{"workers": 3, "gpuWorkers": 0}`. None: the options as they are.

    Raises:
        InvalidRequest: The file is anything else.
    """
    if scale_file is None:
        return options
    try:
        found = json.loads(scale_file.read_text())
        numbers = {"num_workers": found["workers"], "num_gpu_workers": found["gpuWorkers"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f'{scale_file} must hold {{"workers": N, "gpuWorkers": N}}: {error!r}'
        ) from error
    if not all(type(number) is int for number in numbers.values()):
        raise InvalidRequest(f"{scale_file} must hold whole numbers, got {numbers}")
    return replace(options, **numbers)


def _once(options: ServiceOptions) -> dict[str, object]:
    """Start the manager if there is none, have it see to its workers, and return how it stands."""
    manager = find_actor(MANAGER_NAME)
    if manager is None:
        total = ray.cluster_resources()
        needs = {
            group.prefix: worker_needs(total, options, group, is_local=False)
            for group in options.groups
        }
        manager = start_manager(options, needs, is_local=False)
    found: Mapping[str, Any] = ray.get(
        manager.scale.remote(options.num_workers, options.num_gpu_workers), timeout=PATIENCE_S
    )
    state: dict[str, object] = {
        "manager_address": found["address"],
        "alive": found["alive"],
        "expected": options.total_workers,
    }
    if different := _differences(found["options"], options):
        state["other_options"] = different
    return state


def _differences(found: Mapping[str, object], options: ServiceOptions) -> list[str]:
    """Return the names of options that the running manager has otherwise."""
    wanted = asdict(options)
    return sorted(name for name in wanted if found.get(name) != wanted[name])
