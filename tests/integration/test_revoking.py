"""A token that is taken back, behind a manager: workers hear of it, and end what it has opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

from kvservice.clock import ManualClock
from kvservice.core import errors
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire import status
from kvservice.wire.lane import LanePipe
from kvservice_client import Client
from kvservice_client._transport_lane import _connect
from tests.securing import Folder, secured
from tests.serving import GEOMETRY, Peer, attend_call, until, worker_peer

pytestmark = pytest.mark.usefixtures("leaves_nothing")

TTL_S = 3600.0


def opened(client: Client) -> tuple[str, bytes]:
    """Open a session; return its id, and what its worker has issued for it."""
    session = client.open(num_rows=1, layers=[GEOMETRY], ttl_s=TTL_S)
    lease = next(one for one in client._leases._leases if one.session_id == session.id)
    return session.detach(), next(iter(lease.capabilities.values()))


def lane_of(peer: Peer, session_id: str, capability: bytes) -> LanePipe:
    request = worker_pb2.OpenLaneRequest(session_id=session_id, capability=capability)
    answer = peer.call("OpenLane", request)
    connection = _connect(answer.addresses[0], 5.0)
    connection.sendall(answer.token)
    connection.settimeout(10.0)
    return LanePipe(connection, 1 << 20)


def ask(pipe: LanePipe, call: worker_pb2.AttendCall) -> worker_pb2.AttendResult:
    pipe.send([worker_pb2.AttendRequest(call=call).SerializeToString()])
    raw = pipe.receive()
    assert raw is not None
    return worker_pb2.AttendResponse.FromString(bytes(raw)).result


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except errors.Unauthenticated:
        return True
    return False


def ended(stream: Iterator[worker_pb2.AttendResponse]) -> bool:
    """Wait for a stream that nobody asks anything to be closed."""
    with pytest.raises(errors.KVServiceError):
        next(stream)
    return True


def later(clock: ManualClock) -> bool:
    clock.advance(0.25)
    return True


def test_what_was_opened_by_it_ends(tmp_path: Path) -> None:
    """Renewals are refused, and streams and lanes close, busy or idle; others' go on. Nobody but
    the manager has the token, and nobody waits for a capability to run out."""
    folder, clock = Folder(tmp_path), ManualClock()
    with secured(folder, clock=clock) as service, worker_peer(service.workers[0].address) as peer:
        mine, right = opened(service.connect("alice"))
        others, theirs = opened(service.connect("bob"))
        queues = [SimpleQueue[bytes | None]() for _ in range(2)]
        streams = [peer.attend(iter(queue.get, None)) for queue in queues]
        lanes = []
        for session_id, capability, queue, stream in (
            (mine, right, queues[0], streams[0]),
            (others, theirs, queues[1], streams[1]),
        ):
            call = attend_call(session_id, 0, 2, step=1)
            call.capability = capability
            queue.put(worker_pb2.AttendRequest(call=call).SerializeToString())
            assert not next(stream).result.HasField("error")
            lanes.append(lane_of(peer, session_id, capability))
            assert not ask(lanes[-1], call).HasField("error")

        def renew() -> None:
            request = types_pb2.RenewLeaseRequest(session_ids=[mine], capabilities=[right])
            [renewed] = peer.call("RenewLease", request).capabilities
            assert renewed

        renew()
        folder.write_tokens(without=["alice"])
        with ThreadPoolExecutor(2) as pool:
            ends = pool.submit(lanes[0].receive), pool.submit(ended, streams[0])
            until(lambda: later(clock) and refused(renew) and all(one.done() for one in ends))
            assert [one.result() for one in ends] == [None, True]
        call = attend_call(others, 2, 1, step=2)
        call.capability = theirs
        assert not ask(lanes[1], call).HasField("error")
        queues[1].put(None)
        assert list(streams[1]) == []
        queues[0].put(None)
        for lane in lanes:
            lane.close()
        # It is in the file again: what had not run out holds as before.
        folder.write_tokens()
        until(lambda: later(clock) and not refused(renew))


def test_a_lane_opened_by_a_capability_is_for_its_sessions_alone(tmp_path: Path) -> None:
    """Another session of the same tenant is not reached by leaving the capability out."""
    with secured(Folder(tmp_path)) as service, worker_peer(service.workers[0].address) as peer:
        client = service.connect("alice")
        (session_id, capability), (other, _) = opened(client), opened(client)
        lane = lane_of(peer, session_id, capability)
        for call in (attend_call(other, 0, 1, step=1), attend_call(session_id, 0, 1, step=1)):
            told = status.from_status(ask(lane, call).error)
            assert isinstance(told, errors.Unauthenticated)
        call.capability = capability
        assert not ask(lane, call).HasField("error")
        lane.close()
