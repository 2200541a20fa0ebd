"""`up` and `down`: from nothing to a serving manager with workers, and back to nothing.

Imports no Ray: see `driver`.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from kvservice.clock import Clock
from kvservice.cluster.dialogue import converse
from kvservice.cluster.head import NODE_ADDRESS, make_scratch, plan_head, start_head
from kvservice.cluster.ports import check_listening, check_port_free, free_ports
from kvservice.cluster.processes import end, find_process, is_alive, members
from kvservice.cluster.state import Actor, Kind, RunState, ServiceOptions, StateStore
from kvservice.core.errors import AlreadyExists, Conflict, InvalidRequest, Unavailable
from kvservice.runtime.secrets import Secrets

LOCAL: Final = "local"
"""The Ray address that means: one of our own."""

_GRACE_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 30.0
_LOOPBACK: Final = "127.0.0.1"
_EVERYWHERE: Final = "0.0.0.0"
_MARGIN_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Down:
    """What `down` has done.

    killed_actors: Names, in a cluster that is not ours.
    ended_processes: How many processes of our own Ray are gone.
    """

    was_running: bool
    killed_actors: tuple[str, ...] = ()
    ended_processes: int = 0


class Launcher:
    """Starts and ends one named service.

    Args:
        store: Where the run is recorded.
        clock: What tells the time.
        environment: For the processes that are started.
        report: Is told what is going on, in a few words each time.
    """

    def __init__(
        self,
        store: StateStore,
        *,
        clock: Clock,
        environment: Mapping[str, str],
        report: Callable[[str], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._environment = environment
        self._report = report

    def up(
        self,
        options: ServiceOptions,
        *,
        ray_address: str,
        timeout_s: float,
        may_exist: bool = True,
    ) -> RunState:
        """Start the service and wait until manager and workers serve.

        Args:
            options: What to start.
            ray_address: LOCAL, "auto" (the cluster of this machine), or host:port.
            timeout_s: Seconds until everything must serve.
            may_exist: Whether a service that runs already, with the same options, will do.

        Returns:
            The record, which has been saved.

        Raises:
            AlreadyExists: The service runs, with other options or though it may not.
            Conflict: The port is in use, or another command is at work.
            Unavailable: No cluster, no room, or not in time. What has been started is ended.
        """
        with self._store.lock():
            present = self._store.find()
            if present is not None and present.kind is Kind.LOCAL:
                if present.manager_address and not self.is_over(present):
                    self._check_same(present, options, ray_address, may_exist=may_exist)
                    return present
                self._end(present)  # what a killed command has left
                present = None
            try:
                if ray_address == LOCAL and present is None:
                    return self._start_local(options, timeout_s)
                return self._start_joined(
                    options, ray_address, timeout_s, present, may_exist=may_exist
                )
            except BaseException:
                self._undo(present)
                raise

    def keep(
        self,
        options: ServiceOptions,
        *,
        ray_address: str,
        timeout_s: float,
        scale_file: Path | None = None,
    ) -> NoReturn:
        """See to it that the service is there in another's cluster, for as long as it answers.

        Records nothing and ends nothing: what runs there goes on without this process.

        Args:
            options: What to start where it is missing.
            ray_address: "auto" (the cluster of this machine), or host:port.
            timeout_s: Seconds until the cluster must have answered.
            scale_file: Holds the numbers of workers, as `keeping.scaled` reads them.

        Raises:
            InvalidRequest: The address or the port is none that a service can be kept at.
            ConfigError: Others could reach what is open to everybody, or a key is missing.
            Unavailable: The cluster does not answer, or no longer.
            Conflict: Another command of this name is at work.
        """
        if ray_address == LOCAL or options.port == 0:
            raise InvalidRequest(
                "a service is kept in a cluster that is there: state --address auto or "
                "HOST:PORT, and a --port that is not 0"
            )
        # The files of the secrets are where manager and workers run, not here.
        options.security.check_reach(options.host or _EVERYWHERE)
        options.security.check_shared_key()
        check_listening(ray_address)
        request = {
            "action": "keep",
            "options": asdict(options),
            "timeout_s": timeout_s,
            "scale_file": "" if scale_file is None else str(scale_file),
            "ray_address": ray_address,
            "node_address": "",
            "is_local": False,
        }

        def heard(event: dict[str, Any]) -> None:
            if "kept" in event:
                self._report(_kept(event["kept"]))

        with self._store.lock():
            self._ask(request, self._environment, timeout_s, heard, margin_s=math.inf)
        raise AssertionError("keeping has no result")

    def down(self) -> Down:
        """End exactly what `up` has started. May be repeated.

        Raises:
            Conflict: Another command is at work.
            Unavailable: The cluster of the record does not answer, or a process does not end; the
                record stays.
        """
        with self._store.lock():
            state = self._store.find()
            return Down(was_running=False) if state is None else self._end(state)

    def forget(self) -> bool:
        """Drop the record without ending anything; return whether there was one.

        For a cluster that is gone, so that nothing can be ended in it any more.

        Raises:
            Conflict: What is recorded runs on this machine; `down` ends it.
        """
        with self._store.lock():
            state = self._store.find()
            if state is not None and members(state.tag, state.head):
                raise Conflict('its processes run on this machine: end them by "kvservice down"')
            self._store.clear()
            return state is not None

    def is_over(self, state: RunState) -> bool:
        """Return whether the service of this record has ended, as far as this machine can tell."""
        return state.kind is Kind.LOCAL and (state.head is None or not is_alive(state.head))

    def _check_same(
        self, present: RunState, options: ServiceOptions, ray_address: str, *, may_exist: bool
    ) -> None:
        """Raise unless the present run is what is asked for."""
        wanted = replace(
            options,
            port=options.port or present.options.port,
            metrics_port=options.metrics_port or present.options.metrics_port,
            host=options.host or present.options.host,
        )
        if not may_exist or wanted != present.options or ray_address != LOCAL:
            what = "runs already" if wanted == present.options else "runs with other options"
            raise AlreadyExists(
                f'"{present.name}" {what}, at {present.manager_address}: '
                'end it by "kvservice down", or choose another --name'
            )

    def _undo(self, before: RunState | None) -> None:
        """End what a failed `up` has started, and only that."""
        state = self._store.find()
        if state is None or state == before:
            return
        if before is None:
            self._end(state)
            return
        started = tuple(actor for actor in state.actors if actor not in before.actors)
        if started:
            self._kill_actors(replace(state, actors=started))
        self._store.save(before)

    def _start_local(self, options: ServiceOptions, timeout_s: float) -> RunState:
        host = options.host or _LOOPBACK
        options.security.check_reach(host)
        options.security.check_shared_key()
        Secrets(options.security, self._clock)  # what is wrong with them is better known now
        # Chosen here, not by the manager, which must come back at them after a restart.
        port, metrics_port = free_ports(host, 2)
        options = replace(
            options,
            host=host,
            port=options.port or port,
            metrics_port=options.metrics_port or metrics_port,
        )
        check_port_free(host, options.port, "--port")
        check_port_free(host, options.metrics_port, "--metrics-port")
        deadline = self._clock.monotonic() + timeout_s
        state = RunState(self._store.name, Kind.LOCAL, options, "", tag=str(uuid.uuid4()))
        state = replace(state, scratch=str(make_scratch()))
        self._store.save(state)
        plan = plan_head(
            Path(state.scratch),
            tag=state.tag,
            num_workers=options.total_workers,
            environment=self._environment,
        )
        self._report("starting Ray")
        head = start_head(plan, self._store.log_path)
        key = find_process(head.pid)
        state = replace(state, head=key, ray_address=plan.address)
        self._store.save(state)
        left = deadline - self._clock.monotonic()
        return self._drive_start(state, plan.environment, left, head)

    def _start_joined(
        self,
        options: ServiceOptions,
        ray_address: str,
        timeout_s: float,
        present: RunState | None,
        *,
        may_exist: bool,
    ) -> RunState:
        if options.port == 0:
            raise InvalidRequest(
                "in a cluster that is not ours the port must be stated, for a restarted manager "
                "must come back at it: --port 0 is for --address local"
            )
        if present is not None and present.ray_address != ray_address:
            raise AlreadyExists(
                f'"{present.name}" is recorded as running in the cluster {present.ray_address}: '
                'end it by "kvservice down", or choose another --name'
            )
        check_listening(ray_address)
        state = RunState(self._store.name, Kind.JOINED, options, ray_address, str(uuid.uuid4()))
        if present is not None:
            # What an earlier command has started there stays recorded, and is ours to end.
            state = replace(state, tag=present.tag, actors=present.actors)
        self._store.save(state)
        self._report(f"connecting to Ray at {ray_address}")
        before = state.actors
        state = self._drive_start(state, self._environment, timeout_s, None)
        if state.actors == before and not may_exist:
            raise AlreadyExists(f"the service runs already, at {state.manager_address}")
        return state

    def _drive_start(
        self,
        state: RunState,
        environment: Mapping[str, str],
        timeout_s: float,
        head: subprocess.Popen[bytes] | None,
    ) -> RunState:
        """Let the driver start the actors; record each as it appears."""
        request = {
            "action": "start",
            "options": asdict(state.options),
            "timeout_s": timeout_s,
            **_where(state),
        }

        def heard(event: dict[str, Any]) -> None:
            nonlocal state
            if "actor" in event:
                state = replace(state, actors=(*state.actors, Actor(**event["actor"])))
                self._store.save(state)
                self._report(f"starting {event['actor']['name']}")
            if "started_workers" in event:
                self._report(f"{event['started_workers']} of {state.options.total_workers} workers")

        def check() -> None:
            if head is not None and head.poll() is not None:
                raise Unavailable(
                    f"Ray ended while starting, exit code {head.returncode}: "
                    f"see {self._store.log_path}"
                )

        result = self._ask(request, environment, timeout_s, heard, check)
        state = replace(
            state,
            manager_address=result["manager_address"],
            metrics_address=result["metrics_address"],
        )
        self._store.save(state)
        return state

    def _end(self, state: RunState) -> Down:
        """End what a record names, and remove the record."""
        if state.kind is Kind.JOINED:
            killed = self._kill_actors(state) if state.actors else ()
            self._store.clear()
            return Down(was_running=True, killed_actors=killed)
        before = members(state.tag, state.head)
        left = end(state.tag, state.head, clock=self._clock, grace_s=_GRACE_S)
        if left:
            pids = ", ".join(str(key.pid) for key in left)
            raise Unavailable(f"processes do not end: {pids}; repeat the command, or look at them")
        if state.scratch:
            shutil.rmtree(state.scratch, ignore_errors=True)
        self._store.clear()
        return Down(was_running=True, ended_processes=len(before))

    def _kill_actors(self, state: RunState) -> tuple[str, ...]:
        request = {
            "action": "stop",
            "actors": [asdict(actor) for actor in state.actors],
            "timeout_s": _STOP_TIMEOUT_S,
            **_where(state),
        }
        result = self._ask(request, self._environment, _STOP_TIMEOUT_S)
        return tuple(result["killed"])

    def _ask(
        self,
        request: Mapping[str, Any],
        environment: Mapping[str, str],
        timeout_s: float,
        heard: Callable[[dict[str, Any]], None] = lambda _: None,
        check: Callable[[], None] = lambda: None,
        margin_s: float = _MARGIN_S,
    ) -> dict[str, Any]:
        return converse(
            request,
            environment=environment,
            log_path=self._store.directory / "driver.log",
            clock=self._clock,
            timeout_s=timeout_s,
            margin_s=margin_s,
            heard=heard,
            check=check,
        )


def _where(state: RunState) -> dict[str, object]:
    is_local = state.kind is Kind.LOCAL
    return {
        "ray_address": state.ray_address,
        "node_address": NODE_ADDRESS if is_local else "",
        "is_local": is_local,
    }


def _kept(state: Mapping[str, Any]) -> str:
    """Return a line that says how a kept service stands."""
    if "waiting" in state:
        return f"waiting: {state['waiting']}"
    line = (
        f"the manager serves at {state['manager_address']}, "
        f"{state['alive']} of {state['expected']} workers are alive"
    )
    if names := state.get("other_options"):
        line += f"; it was started with other options ({', '.join(names)}), which it keeps"
    return line
