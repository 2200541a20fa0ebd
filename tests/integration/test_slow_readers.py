"""Peers that ask and do not listen: they are hung up on, and hurt nobody else (P10)."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvservice.config import ServerLimits, WorkerSettings
from kvservice.core import session as core
from kvservice.runtime.worker import WorkerServer
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire import calls, convert
from kvservice.wire.lane import LanePipe
from kvservice.wire.names import WORKER
from kvservice.wire.tensors import from_numpy
from kvservice_client import connect
from kvservice_client._transport_lane import _connect
from tests.driving import Driver
from tests.serving import Peer, new_id, scrape, until, worker_peer

pytestmark = pytest.mark.usefixtures("leaves_nothing")

LIMITS = ServerLimits(max_streams=4, unary_threads=4, answer_s=2.0, idle_stream_s=3.0)
TOKENS, HEADS, DIM = 64, 128, 128
CALLS = 24
"""Of answers of 4 MiB each: more than any window or buffer on the way takes."""


@pytest.fixture
def server() -> Iterator[WorkerServer]:
    settings = WorkerSettings("w0", 64 << 20, metrics_port=0, limits=LIMITS)
    with WorkerServer(settings) as server:
        yield server


def requests(peer: Peer) -> Iterator[bytes]:
    """Yield calls whose answers are large: the first stores, the others only ask."""
    session_id = new_id()
    spec = convert.spec_to_pb(core.SessionSpec(1))
    peer.call("Allocate", types_pb2.AllocateRequest(session_id=session_id, spec=spec))
    q = from_numpy(np.ones((TOKENS, HEADS, DIM), np.float32))
    k = from_numpy(np.ones((TOKENS, 1, DIM), np.float32))
    for number in range(CALLS):
        first = number == 0
        call = core.AttendCall(
            session_id=session_id,
            epoch=1,
            step=1,
            layer=0,
            q=q,
            scale=1.0,
            mask=core.Mask(),
            k=k if first else None,
            v=k if first else None,
            header=core.StepHeader((TOKENS,)) if first else None,
            positions=(0,) if first else (),
            query_counts=(TOKENS,),
            query_positions=(0,),
        )
        made = calls.attend_call_to_pb(call, call_id=number + 1)
        yield worker_pb2.AttendRequest(call=made).SerializeToString()


def ended(server: WorkerServer, method: str, service: str) -> float:
    samples = scrape(str(server.metrics_address))
    return sum(
        value
        for name, value in samples.items()
        if name.startswith("grpc_server_handled_total")
        and f'grpc_method="{method}"' in name
        and f'grpc_service="{service}"' in name
    )


def decode(server: WorkerServer, *, lane: bool, steps: int = 30) -> None:
    """Let somebody else decode; each output is compared with what it must be."""
    with connect(server.address, lane=lane) as client:
        driver = Driver.open(client)
        for _ in range(steps):
            driver.step()
        driver.session.release()


def test_a_stream_that_is_not_read_is_closed(server: WorkerServer) -> None:
    """After the time that an answer may take; others decode on meanwhile."""
    with worker_peer(server.address) as peer:
        method = peer.channel.stream_stream(f"/{WORKER.full_name}/Attend")
        before = ended(server, "Attend", WORKER.full_name)
        stream = method(requests(peer), timeout=60)
        try:
            decode(server, lane=False)
            until(lambda: ended(server, "Attend", WORKER.full_name) > before + 1, 20.0)
        finally:
            stream.cancel()
        decode(server, lane=False, steps=3)
    server.worker.check()


def test_a_lane_that_is_not_read_is_closed(server: WorkerServer) -> None:
    """The same on the lane."""
    with worker_peer(server.address) as peer:
        answer = peer.call("OpenLane", worker_pb2.OpenLaneRequest())
        connection = _connect(answer.addresses[1], 5.0)
        connection.sendall(answer.token)
        pipe = LanePipe(connection, LIMITS.max_frame_bytes)
        before = ended(server, "Attend", "kvservice.lane")
        gone = threading.Event()

        def ask() -> None:
            try:
                connection.settimeout(30.0)
                pipe.send(requests(peer))
            except OSError:
                pass
            gone.set()

        asking = threading.Thread(target=ask)
        asking.start()
        decode(server, lane=True)
        until(lambda: ended(server, "Attend", "kvservice.lane") > before, 20.0)
        assert gone.wait(30)
        asking.join(10)
        pipe.close()
        decode(server, lane=True, steps=3)
    server.worker.check()
