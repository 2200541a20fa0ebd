"""What servers log: which call it belongs to, at which level, and as JSON."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvservice import logs
from kvservice.config import ManagerSettings, ServerLimits, WorkerSettings
from kvservice.core import errors
from kvservice.runtime.manager import ManagerServer
from kvservice.runtime.worker import WorkerServer
from kvservice.v1 import types_pb2
from tests.serving import (
    Peer,
    allocate_request,
    attend_call,
    manager_peer,
    new_id,
    spec,
    until,
    worker_peer,
)

LIMITS = ServerLimits(max_streams=8, unary_threads=4)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Configure this process as a server's would be, and put back what was there."""
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    stream = io.StringIO()
    logs.configure("debug", "json", stream)
    yield stream
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in found if line["logger"].startswith("kvservice")]


def of_call(stream: io.StringIO, request_id: str) -> list[dict[str, Any]]:
    return [line for line in lines(stream) if line.get("request_id") == request_id]


def with_id(peer: Peer, request_id: str) -> Peer:
    peer.metadata = (*peer.metadata, (logs.REQUEST_KEY, request_id))
    return peer


def test_one_id_from_the_caller_to_the_worker(log: io.StringIO, leaves_nothing: None) -> None:
    """The manager hands the caller's id on, so that one search finds all lines of a call."""
    with ExitStack() as running:
        manager = running.enter_context(ManagerServer(ManagerSettings(limits=LIMITS)))
        settings = WorkerSettings("w0", 1 << 22, manager_address=manager.address, limits=LIMITS)
        running.enter_context(WorkerServer(settings))
        until(lambda: manager.manager.workers())
        peer = with_id(running.enter_context(manager_peer(manager.address)), "mine-1")
        peer.call("Allocate", allocate_request(new_id(), spec()))
        found = until(lambda: found if len(found := of_call(log, "mine-1")) == 2 else None)
    assert [(line["rpc_method"], line["rpc_outcome"]) for line in found] == [("Allocate", "OK")] * 2
    assert all(line["level"] == "debug" and line["duration_s"] >= 0 for line in found)


def test_levels_mean_something(log: io.StringIO, leaves_nothing: None) -> None:
    """A refusal is information, a bug of ours an error whose id the caller has been told."""
    with (
        WorkerServer(WorkerSettings("w0", 1 << 22, limits=LIMITS)) as worker,
        worker_peer(worker.address) as peer,
    ):
        with_id(peer, "mine-2")
        missing = types_pb2.GetSessionRequest(session_id=new_id())
        with pytest.raises(errors.SessionNotFound):
            peer.call("GetSession", missing)
        [refused] = [line for line in of_call(log, "mine-2") if line["level"] == "info"]
        assert refused["rpc_outcome"] == "SESSION_NOT_FOUND"
        assert missing.session_id not in refused["message"]
        worker.worker.stats = None  # type: ignore[assignment, method-assign]  # a bug
        with pytest.raises(errors.InternalError) as caught:
            peer.call("PageStats", types_pb2.PageStatsRequest())
        [broken] = [line for line in of_call(log, "mine-2") if line["level"] == "error"]
        assert caught.value.metadata["error_id"] in broken["message"]
        assert "TypeError" in broken["exception"]
        del worker.worker.stats


@pytest.mark.parametrize("stated", ["a b", "x" * 65, 'a"b'])
def test_ids_that_are_none_are_replaced(
    log: io.StringIO, stated: str, leaves_nothing: None
) -> None:
    """What a caller writes into the log is bounded; it gets an id all the same."""
    with (
        WorkerServer(WorkerSettings("w0", 1 << 22, limits=LIMITS)) as worker,
        worker_peer(worker.address) as peer,
    ):
        with_id(peer, stated)
        peer.call("PageStats", types_pb2.PageStatsRequest())
        [line] = until(lambda: [x for x in lines(log) if x.get("rpc_method") == "PageStats"])
    assert len(line["request_id"]) == 32


def test_contents_are_not_logged(log: io.StringIO, leaves_nothing: None) -> None:
    """At the most talkative level there is neither a session's id nor a tensor in it."""
    with (
        WorkerServer(WorkerSettings("w0", 1 << 22, limits=LIMITS)) as worker,
        worker_peer(worker.address) as peer,
    ):
        session_id = new_id()
        peer.call("Allocate", allocate_request(session_id, spec()))
        peer.attend_once(attend_call(session_id, 0, 3, step=1))
        with pytest.raises(errors.OutOfOrder):
            peer.attend_once(attend_call(session_id, 9, 3, step=2))
    text = log.getvalue()
    assert "OUT_OF_ORDER" in text
    assert session_id not in text
    assert max(len(line) for line in text.splitlines()) < 2000


def test_command_logs_as_it_is_told() -> None:
    """`kvservice manager --log-format json --log-level info` says objects, on stderr."""
    command = (sys.executable, "-m", "kvservice", "manager", "--port", "0")
    with subprocess.Popen(
        [*command, "--log-format", "json", "--log-level", "info"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        assert "serves at" in run.stdout.readline()
        run.terminate()
        _, err = run.communicate(timeout=60)
    said = [json.loads(line) for line in err.splitlines()]
    assert any("serves at" in line["message"] and line["level"] == "info" for line in said)
    assert all(line["time"].endswith("+00:00") for line in said)
