"""`kvservice drain` lets a worker give away its sessions, and leave; `kvservice move` moves one."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from typing import Any, Final

from kvservice.cli.exits import OK
from kvservice.cli.showing import connect_to
from kvservice.clock import Clock, SystemClock
from kvservice.core.errors import DeadlineExceeded, InvalidRequest, KVServiceError, WorkerNotFound
from kvservice.wire import convert
from kvservice.wire.json_form import json_form
from kvservice_client import Client

_POLL_S: Final = 0.5
_MARGIN_S: Final = 15.0
"""How much longer than its time a worker may take to be gone."""


def drain(arguments: argparse.Namespace) -> int:
    """Ask the manager to let a worker leave; unless told otherwise, wait until it has left."""
    if arguments.timeout < 0:
        raise InvalidRequest("--timeout must not be negative")
    clock = SystemClock()
    with connect_to(arguments) as client:
        worker = _find(client, arguments.worker)
        client.drain_worker(worker.worker_id, timeout_s=arguments.timeout)
        left = worker.session_count
        if not arguments.no_wait:
            _say(arguments, f"{worker.worker_id} drains; {left} sessions are to move, or end")
            left = _wait(client, worker, arguments, clock)
    found = {
        "workerId": worker.worker_id,
        "hasLeft": not arguments.no_wait,
        "sessionsLeft": left,
    }
    if arguments.json:
        print(json.dumps(found))
    elif arguments.no_wait:
        print(f"{worker.worker_id} drains, for {arguments.timeout:g} s at most")
    else:
        lost = f"; {left} sessions were lost with it" if left else ""
        print(f"{worker.worker_id} has left{lost}")
    return OK


def move(arguments: argparse.Namespace) -> int:
    """Move a session to another worker, and wait until it is there."""
    if not arguments.timeout > 0:
        raise InvalidRequest("--timeout must be above 0")
    with connect_to(arguments) as client:
        worker = _find(client, arguments.worker)
        session = client.move_session(
            arguments.session,
            worker.worker_id,
            from_worker_id=arguments.source,
            timeout_s=arguments.timeout,
        )
    if arguments.json:
        print(json.dumps(json_form(convert.session_to_pb(session))))
    else:
        holders = ", ".join(extent.worker_id for extent in session.extents)
        print(f"{session.session_id} is on {holders}")
    return OK


def _find(client: Client, name: str) -> Any:
    """Return the worker of this id, address, or host.

    Raises:
        WorkerNotFound: There is none.
        InvalidRequest: There are several at this host.
    """
    listed = client.list_workers()
    for matches in (
        [worker for worker in listed if name in (worker.worker_id, worker.address)],
        [worker for worker in listed if worker.address.rpartition(":")[0].strip("[]") == name],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            ids = ", ".join(worker.worker_id for worker in matches)
            raise InvalidRequest(f"{name} has several workers: name one of {ids}")
    ids = ", ".join(worker.worker_id for worker in listed) or "none"
    raise WorkerNotFound(f'no worker is called "{name}", or is there; there are: {ids}')


def _wait(client: Client, worker: Any, arguments: argparse.Namespace, clock: Clock) -> int:
    """Wait until a worker is listed no more; return how many sessions it had at last.

    Raises:
        DeadlineExceeded: It is still there long after its time.
    """
    never = threading.Event()
    deadline = clock.monotonic() + arguments.timeout + _MARGIN_S
    left: int = worker.session_count
    while True:
        try:
            listed = {found.worker_id: found for found in client.list_workers()}
        except KVServiceError as error:
            _say(arguments, f"asking again: {error}")
        else:
            now = listed.get(worker.worker_id)
            if now is None or now.incarnation != worker.incarnation:
                return left
            if now.session_count != left:
                left = now.session_count
                _say(arguments, f"{left} sessions left")
        if clock.monotonic() > deadline:
            raise DeadlineExceeded(f"{worker.worker_id} is still there, with {left} sessions")
        clock.wait(never, _POLL_S)


def _say(arguments: argparse.Namespace, text: str) -> None:
    if not arguments.json:
        print(text, file=sys.stderr, flush=True)
