"""Manager and workers over real gRPC on loopback: every verb, growth, losses, restarts."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvservice.clock import ManualClock
from kvservice.config import ManagerSettings, ServerLimits, WorkerSettings
from kvservice.core import errors
from kvservice.runtime.manager import ManagerServer
from kvservice.runtime.worker import WorkerServer
from kvservice.server.heartbeat import HeartbeatSource
from kvservice.server.worker_stub import HeartbeatLoop
from kvservice.v1 import manager_pb2, types_pb2
from kvservice.wire import convert
from kvservice.wire.names import MANAGER
from tests.serving import (
    PAGE_BYTES,
    allocate_request,
    attend_call,
    manager_peer,
    new_id,
    scrape,
    spec,
    until,
    worker_peer,
)

LIMITS = ServerLimits(max_streams=8, unary_threads=4)
NUM_PAGES = 8
BUDGET = NUM_PAGES * PAGE_BYTES * 2  # growth counts the copy
pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Cluster:
    """A manager and workers, each with a server of its own, all on one clock."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.clock = ManualClock()
        self.workers: dict[str, WorkerServer] = {}
        self.manager = self.start_manager()
        self.peer = stack.enter_context(manager_peer(self.manager.address))

    def start_manager(self, port: int = 0, workers_expected: int = 0) -> ManagerServer:
        settings = ManagerSettings(
            port=port, metrics_port=0, limits=LIMITS, workers_expected=workers_expected
        )
        server = ManagerServer(settings, clock=self.clock)
        server.start()
        self._stack.callback(server.stop, 0.1)
        return server

    def start_worker(self, worker_id: str, budget: int = BUDGET) -> WorkerServer:
        settings = WorkerSettings(
            worker_id,
            budget,
            manager_address=self.manager.address,
            metrics_port=0,
            limits=LIMITS,
        )
        server = WorkerServer(settings, clock=self.clock)
        server.start()
        self._stack.callback(server.stop, 0.1)
        self.workers[worker_id] = server
        self.wait_for(worker_id, manager_pb2.WORKER_STATE_ALIVE)
        return server

    def states(self) -> dict[str, int]:
        listed = self.peer.call("ListWorkers", manager_pb2.ListWorkersRequest()).workers
        return {worker.worker_id: worker.state for worker in listed}

    def wait_for(self, worker_id: str, state: int) -> None:
        until(lambda: self.beat() or self.states().get(worker_id) == state)

    def beat(self) -> None:
        """Let a heartbeat's time pass."""
        self.clock.advance(1.0)

    def call(self, method: str, request: Any) -> types_pb2.Session:
        answer = self.peer.call(method, request)
        session: types_pb2.Session = answer.session
        return session

    def open(self, **fields: Any) -> str:
        session_id = new_id()
        self.call("Allocate", allocate_request(session_id, spec(ttl_s=3600, **fields)))
        return session_id

    def append(self, session: types_pb2.Session, position: int, num_tokens: int, step: int) -> None:
        """Append tokens at the session's tail."""
        call = attend_call(
            session.session_id,
            position,
            num_tokens,
            step=step,
            epoch=session.epoch,
            partial=len(session.extents) > 1,
        )
        with worker_peer(session.extents[-1].address) as peer:
            peer.attend_once(call)

    def get(self, session_id: str) -> types_pb2.Session:
        return self.call("GetSession", types_pb2.GetSessionRequest(session_id=session_id))

    def check(self) -> None:
        for worker in self.workers.values():
            worker.worker.check()


@contextmanager
def running(num_workers: int) -> Iterator[Cluster]:
    with ExitStack() as stack:
        cluster = Cluster(stack)
        for index in range(num_workers):
            cluster.start_worker(f"w{index}")
        yield cluster
        cluster.check()


@pytest.fixture
def one() -> Iterator[Cluster]:
    """Return a manager with one worker."""
    with running(1) as cluster:
        yield cluster


@pytest.fixture
def two() -> Iterator[Cluster]:
    """Return a manager with two workers."""
    with running(2) as cluster:
        yield cluster


def grown(cluster: Cluster, **fields: Any) -> types_pb2.Session:
    """Return a session of 8 pages on its first worker and one on the second."""
    session = cluster.get(cluster.open(**fields))
    cluster.append(session, 0, 16 * NUM_PAGES, 1)
    cluster.append(session, 16 * NUM_PAGES, 16 * NUM_PAGES, 2)
    request = types_pb2.AppendRequest(
        session_id=session.session_id,
        epoch=1,
        token_count=16,
        expected_lengths=[32 * NUM_PAGES],
    )
    session = cluster.call("Append", request)
    cluster.append(session, 32 * NUM_PAGES, 10, 3)
    return cluster.get(session.session_id)


FIRST = 32 * NUM_PAGES
TOTAL = FIRST + 10


def shape(session: types_pb2.Session) -> list[tuple[list[int], list[int]]]:
    return [(list(extent.starts), list(extent.stops)) for extent in session.extents]


def test_every_verb_on_one_worker(one: Cluster) -> None:
    """From Allocate to Release through the manager, each change at its epoch."""
    session_id = one.open(num_rows=1)
    session = one.get(session_id)
    one.append(session, 0, 40, 1)
    append = types_pb2.AppendRequest(
        session_id=session_id, epoch=1, token_count=20, expected_lengths=[40]
    )
    assert shape(one.call("Append", append)) == [([0], [40])]
    assert shape(one.call("Append", append)) == [([0], [40])]
    (stats,) = one.peer.call("PageStats", types_pb2.PageStatsRequest()).workers
    assert stats.pools[0].reserved_page_count == 1
    fork = types_pb2.ForkRequest(
        session_id=session_id, epoch=1, new_session_id=new_id(), token_count=32
    )
    child = one.call("Fork", fork)
    assert (child.epoch, shape(child)) == (1, [([0], [32])])
    pop = types_pb2.PopRequest(session_id=session_id, epoch=1, keep=[35], expected_lengths=[40])
    session = one.call("Pop", pop)
    assert (session.epoch, shape(session)) == (2, [([0], [35])])
    select = types_pb2.SelectRequest(session_id=session_id, epoch=2, rows=[0, 0])
    session = one.call("Select", select)
    assert (session.epoch, shape(session)) == (3, [([0, 0], [35, 35])])
    session = one.call("Attach", types_pb2.AttachRequest(session_id=session_id))
    assert session.epoch == 4
    session = one.call("Reset", types_pb2.ResetRequest(session_id=session_id, epoch=4))
    assert (session.epoch, shape(session)) == (5, [([0, 0], [0, 0])])
    listed = one.peer.call("ListSessions", types_pb2.ListSessionsRequest()).sessions
    assert {item.session_id for item in listed} == {session_id, child.session_id}
    missing = new_id()
    renewed = one.peer.call(
        "RenewLease", types_pb2.RenewLeaseRequest(session_ids=[session_id, missing])
    )
    assert list(renewed.missing_session_ids) == [missing]
    release = types_pb2.ReleaseRequest(session_ids=[session_id, child.session_id, missing])
    assert one.peer.call("Release", release).released_count == 2
    assert one.peer.call("Release", release).released_count == 0
    with pytest.raises(errors.SessionNotFound):
        one.get(session_id)


def test_repeats_change_nothing_and_others_are_refused(one: Cluster) -> None:
    """Sessions by their id, structural changes by their epoch: once is as good as three times."""
    session_id, child_id = new_id(), new_id()
    request = allocate_request(session_id, spec(ttl_s=3600))
    answers = [one.call("Allocate", request) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    with pytest.raises(errors.AlreadyExists):
        one.call("Allocate", allocate_request(session_id, spec(ttl_s=3600, num_rows=2)))
    one.append(answers[0], 0, 20, 1)
    fork = types_pb2.ForkRequest(session_id=session_id, epoch=1, new_session_id=child_id)
    assert one.call("Fork", fork) == one.call("Fork", fork)
    with pytest.raises(errors.AlreadyExists):
        one.call(
            "Fork",
            types_pb2.ForkRequest(
                session_id=session_id, epoch=1, new_session_id=child_id, token_count=3
            ),
        )
    with pytest.raises(errors.AlreadyExists):
        one.call(
            "Fork",
            types_pb2.ForkRequest(session_id=session_id, epoch=1, new_session_id=session_id),
        )
    pop = types_pb2.PopRequest(session_id=session_id, epoch=1, keep=[4], expected_lengths=[20])
    assert one.call("Pop", pop) == one.call("Pop", pop)
    with pytest.raises(errors.StaleEpoch) as caught:
        one.call("Reset", types_pb2.ResetRequest(session_id=session_id, epoch=1))
    assert caught.value.metadata["epoch"] == "2"
    attach = types_pb2.AttachRequest(session_id=session_id, epoch=2)
    assert one.call("Attach", attach).epoch == one.call("Attach", attach).epoch == 3


@pytest.mark.parametrize(
    ("method", "request_", "error"),
    [
        ("Allocate", types_pb2.AllocateRequest(session_id="x"), errors.InvalidRequest),
        (
            "Allocate",
            types_pb2.AllocateRequest(session_id=str(uuid.uuid4())),
            errors.InvalidRequest,
        ),
        (
            "Allocate",
            types_pb2.AllocateRequest(
                session_id=str(uuid.uuid4()),
                spec=convert.spec_to_pb(spec()),
                extent_starts=[0],
                epoch=1,
            ),
            errors.InvalidRequest,
        ),
        ("Allocate", allocate_request(str(uuid.uuid4()), spec(replicas=2)), errors.Unavailable),
        (
            "Allocate",
            types_pb2.AllocateRequest(
                session_id=str(uuid.uuid4()),
                spec=types_pb2.SessionSpec(row_count=1, replica_count=3),
            ),
            errors.InvalidRequest,
        ),
        ("Allocate", allocate_request(str(uuid.uuid4()), spec(spread=2)), errors.Unavailable),
        (
            "Allocate",
            allocate_request(str(uuid.uuid4()), spec(reserve_tokens=1 << 20)),
            errors.InvalidRequest,
        ),
        (
            "GetSession",
            types_pb2.GetSessionRequest(session_id=str(uuid.uuid4())),
            errors.SessionNotFound,
        ),
        (
            "Reset",
            types_pb2.ResetRequest(session_id=str(uuid.uuid4()), epoch=1),
            errors.SessionNotFound,
        ),
        ("Reset", types_pb2.ResetRequest(session_id=str(uuid.uuid4())), errors.InvalidRequest),
        ("DrainWorker", manager_pb2.DrainWorkerRequest(), errors.InvalidRequest),
        ("DrainWorker", manager_pb2.DrainWorkerRequest(worker_id="w9"), errors.WorkerNotFound),
        (
            "DrainWorker",
            manager_pb2.DrainWorkerRequest(worker_id="w0", timeout=Duration(seconds=-1)),
            errors.InvalidRequest,
        ),
        ("MoveSession", manager_pb2.MoveSessionRequest(worker_id="w"), errors.InvalidRequest),
        (
            "MoveSession",
            manager_pb2.MoveSessionRequest(session_id=str(uuid.uuid4())),
            errors.InvalidRequest,
        ),
        (
            "MoveSession",
            manager_pb2.MoveSessionRequest(session_id=str(uuid.uuid4()), worker_id="w"),
            errors.SessionNotFound,
        ),
        ("ListSessions", types_pb2.ListSessionsRequest(page_size=-1), errors.InvalidRequest),
        ("ListSessions", types_pb2.ListSessionsRequest(page_token="x"), errors.InvalidRequest),
        ("Release", types_pb2.ReleaseRequest(), errors.InvalidRequest),
        ("GetSession", b"\xff\xff", errors.InvalidRequest),
    ],
)
def test_refusals_have_reasons(
    one: Cluster, method: str, request_: Any, error: type[errors.KVServiceError]
) -> None:
    """Each mistake, and each thing that cannot be, has its class."""
    with pytest.raises(error) as caught:
        one.peer.call(method, request_)
    assert type(caught.value) is error


def test_tenants_see_their_own_sessions(one: Cluster) -> None:
    """The manager forwards in the caller's name: to others a session is not there."""
    session_id = one.open()
    with manager_peer(one.manager.address, "other") as other:
        asked = types_pb2.GetSessionRequest(session_id=session_id)
        with pytest.raises(errors.SessionNotFound):
            other.call("GetSession", asked)
        other.call("Allocate", allocate_request(session_id, spec(num_rows=3, ttl_s=3600)))
        assert other.call("GetSession", asked).session.spec.row_count == 3
        release = types_pb2.ReleaseRequest(session_ids=[session_id])
        assert other.call("Release", release).released_count == 1
    assert one.get(session_id).spec.row_count == 1


def test_sessions_go_where_there_is_room(two: Cluster) -> None:
    """The emptiest worker first; among equals, the one with fewer sessions."""
    placed = [two.get(two.open()).extents[0].worker_id for _ in range(4)]
    assert placed == ["w0", "w1", "w0", "w1"]
    reserved = two.get(two.open(reserve_tokens=64)).extents[0].worker_id
    two.beat()
    other = {"w0": "w1", "w1": "w0"}[reserved]
    until(lambda: free(two, reserved) < free(two, other))
    assert [two.get(two.open()).extents[0].worker_id for _ in range(2)] == [other, other]


def free(cluster: Cluster, worker_id: str) -> int:
    listed = cluster.peer.call("ListWorkers", manager_pb2.ListWorkersRequest()).workers
    return {worker.worker_id: worker.free_bytes for worker in listed}[worker_id]


def test_reservation_goes_on_to_the_next_worker(two: Cluster) -> None:
    """A worker that cannot promise the room is passed over; if none can, that is said."""
    reserve = 16 * NUM_PAGES
    holders = [two.get(two.open(reserve_tokens=reserve)).extents[0].worker_id for _ in range(4)]
    assert sorted(holders) == ["w0", "w0", "w1", "w1"]
    with pytest.raises(errors.OutOfPages):
        two.open(reserve_tokens=reserve)
    stats = two.peer.call("PageStats", types_pb2.PageStatsRequest()).workers
    assert [worker.session_count for worker in stats] == [2, 2]


def test_draining_worker_gets_no_sessions(two: Cluster) -> None:
    """It is known by its next heartbeat, and believed at once when it says so itself."""
    two.workers["w0"].worker.drain()
    assert {two.get(two.open()).extents[0].worker_id for _ in range(2)} == {"w1"}
    two.wait_for("w0", manager_pb2.WORKER_STATE_DRAINING)
    two.workers["w1"].worker.drain()
    with pytest.raises(errors.Draining):
        two.open()


def test_session_grows_onto_another_worker(two: Cluster) -> None:
    """A full tail gets a successor; what each holds, and the whole, is told in order."""
    session = grown(two)
    assert shape(session) == [([0], [FIRST]), ([FIRST], [TOTAL])]
    assert [list(layer.lengths) for layer in session.layers] == [[TOTAL]]
    append = types_pb2.AppendRequest(
        session_id=session.session_id, epoch=1, token_count=6, expected_lengths=[TOTAL]
    )
    assert shape(two.call("Append", append)) == shape(session)
    stale = types_pb2.AppendRequest(
        session_id=session.session_id, epoch=1, token_count=6, expected_lengths=[FIRST]
    )
    with pytest.raises(errors.Conflict):
        two.call("Append", stale)
    too_much = types_pb2.AppendRequest(
        session_id=session.session_id, epoch=1, token_count=FIRST, expected_lengths=[TOTAL]
    )
    with pytest.raises(errors.OutOfPages):
        two.call("Append", too_much)
    assert shape(two.get(session.session_id)) == shape(session)


def test_changes_reach_all_workers_of_a_session(two: Cluster) -> None:
    """Pop, Select, Fork, Attach and Reset leave every worker at the same epoch."""
    session = grown(two)
    session_id = session.session_id
    wrong = types_pb2.PopRequest(
        session_id=session_id, epoch=1, keep=[5], expected_lengths=[TOTAL - 1]
    )
    with pytest.raises(errors.Conflict):
        two.call("Pop", wrong)
    pop = types_pb2.PopRequest(
        session_id=session_id, epoch=1, keep=[TOTAL - 4], expected_lengths=[TOTAL]
    )
    for _ in range(2):
        assert shape(two.call("Pop", pop)) == [([0], [FIRST]), ([FIRST], [TOTAL - 4])]
    select = types_pb2.SelectRequest(session_id=session_id, epoch=2, rows=[0, 0])
    assert shape(two.call("Select", select))[1] == ([FIRST] * 2, [TOTAL - 4] * 2)
    child_id = new_id()
    fork = types_pb2.ForkRequest(
        session_id=session_id, epoch=3, new_session_id=child_id, token_count=FIRST + 2
    )
    assert shape(two.call("Fork", fork))[1] == ([FIRST] * 2, [FIRST + 2] * 2)
    too_long = types_pb2.ForkRequest(
        session_id=session_id, epoch=3, new_session_id=new_id(), token_count=TOTAL
    )
    with pytest.raises(errors.PositionOutOfRange):
        two.call("Fork", too_long)
    assert two.call("Attach", types_pb2.AttachRequest(session_id=session_id)).epoch == 4
    # Below the second extent: it is emptied, and the tail goes back.
    pop = types_pb2.PopRequest(
        session_id=session_id, epoch=4, keep=[30, 20], expected_lengths=[TOTAL - 4] * 2
    )
    session = two.call("Pop", pop)
    assert shape(session) == [([], []), ([0, 0], [30, 20])]
    two.call("Reset", types_pb2.ResetRequest(session_id=session_id, epoch=5))
    session = two.get(session_id)
    assert session.epoch == 6
    assert {tuple(extent.stops) for extent in session.extents} <= {(0, 0), ()}
    release = types_pb2.ReleaseRequest(session_ids=[session_id, child_id])
    assert two.peer.call("Release", release).released_count == 2
    assert all(not worker.worker.stats().used_bytes for worker in two.workers.values())


def pop_on_first(session: types_pb2.Session, keep: int) -> None:
    """Let a Pop reach the first of a session's workers only."""
    request = types_pb2.PopRequest(
        session_id=session.session_id, epoch=1, keep=[keep], expected_lengths=[FIRST]
    )
    with worker_peer(session.extents[0].address) as peer:
        peer.call("Pop", request)


def test_half_done_change_is_rolled_forward(two: Cluster) -> None:
    """A Pop that reached only one worker is completed by repeating it; nothing else goes on."""
    session = grown(two)
    session_id = session.session_id
    pop_on_first(session, FIRST + 3)
    with pytest.raises(errors.Conflict):
        two.get(session_id)
    with pytest.raises(errors.StaleEpoch):
        two.call("Reset", types_pb2.ResetRequest(session_id=session_id, epoch=1))
    pop = types_pb2.PopRequest(
        session_id=session_id, epoch=1, keep=[FIRST + 3], expected_lengths=[TOTAL]
    )
    session = two.call("Pop", pop)
    assert (session.epoch, shape(session)) == (2, [([0], [FIRST]), ([FIRST], [FIRST + 3])])


def test_half_done_change_that_leaves_a_whole_is_that_whole(two: Cluster) -> None:
    """What the Pop was to take from the second worker is not looked at any more; repeating it
    frees that too."""
    session = grown(two)
    pop_on_first(session, 50)
    left = two.get(session.session_id)
    assert (left.epoch, shape(left)) == (2, [([0], [50])])
    pop = types_pb2.PopRequest(
        session_id=session.session_id, epoch=1, keep=[50], expected_lengths=[TOTAL]
    )
    for _ in range(2):
        session = two.call("Pop", pop)
    assert (session.epoch, shape(session)) == (2, [([], []), ([0], [50])])


def test_spread_session_is_on_several_workers(two: Cluster) -> None:
    """All or none: each opens an extent whose start its first tokens decide."""
    session_id = two.open(spread=2)
    session = two.get(session_id)
    assert {extent.worker_id for extent in session.extents} == {"w0", "w1"}
    assert shape(session) == [([], []), ([], [])]
    with pytest.raises(errors.Unavailable):
        two.open(spread=3)
    stats = two.peer.call("PageStats", types_pb2.PageStatsRequest()).workers
    assert [worker.session_count for worker in stats] == [1, 1]


def test_dead_worker_is_told_as_lost_pages(two: Cluster) -> None:
    """A new life of a worker has nothing of the old: its sessions say from where, others go on."""
    session = grown(two)
    tail = session.extents[-1].worker_id
    untouched = two.open()
    lonely = next(other for other in (two.open() for _ in range(9)) if holder(two, other) == tail)
    while holder(two, untouched) == tail:
        untouched = two.open()
    two.workers[tail].stop(0.0)
    with pytest.raises(errors.WorkerLost):
        two.get(session.session_id)
    two.start_worker(tail)
    with pytest.raises(errors.PagesLost) as caught:
        two.get(session.session_id)
    assert caught.value.metadata["from_position"] == str(FIRST)
    with pytest.raises(errors.PagesLost) as caught:
        two.get(lonely)
    assert caught.value.metadata["from_position"] == "0"
    assert two.get(untouched).epoch == 1
    keeps_too_much = types_pb2.PopRequest(
        session_id=session.session_id, epoch=1, keep=[FIRST + 1], expected_lengths=[TOTAL]
    )
    with pytest.raises(errors.PagesLost):
        two.call("Pop", keeps_too_much)
    pop = types_pb2.PopRequest(
        session_id=session.session_id, epoch=1, keep=[FIRST], expected_lengths=[TOTAL]
    )
    assert shape(two.call("Pop", pop)) == [([0], [FIRST])]
    assert shape(two.get(session.session_id)) == [([0], [FIRST])]


def holder(cluster: Cluster, session_id: str) -> str:
    return str(cluster.get(session_id).extents[-1].worker_id)


def test_worker_that_is_cut_off_gets_nothing_and_is_welcomed_back(one: Cluster) -> None:
    """Its heartbeats end, it answers: suspect at once, dead when three are missed, and until it is
    heard again its sessions are not to be had from the manager. Then it is as before."""
    settings = WorkerSettings("w1", BUDGET, metrics_port=0, limits=LIMITS)
    with WorkerServer(settings, clock=one.clock) as cut:
        with reporting(cut, one):
            one.wait_for("w1", manager_pb2.WORKER_STATE_ALIVE)
            kept = next(session_id for session_id in opened(one) if holder(one, session_id) == "w1")
        until(lambda: one.states()["w1"] == manager_pb2.WORKER_STATE_SUSPECT)
        assert {one.get(one.open()).extents[0].worker_id for _ in range(2)} == {"w0"}
        until(lambda: one.beat() or one.states()["w1"] == manager_pb2.WORKER_STATE_DEAD)
        with pytest.raises(errors.PagesLost):
            one.get(kept)
        with worker_peer(cut.address) as peer:
            peer.call("GetSession", types_pb2.GetSessionRequest(session_id=kept))
        with reporting(cut, one):
            one.wait_for("w1", manager_pb2.WORKER_STATE_ALIVE)
            assert one.get(kept).epoch == 1


@contextmanager
def reporting(worker: WorkerServer, cluster: Cluster) -> Iterator[None]:
    """Let a worker that was started without a manager report to the cluster's."""
    source = HeartbeatSource(worker.worker)
    loop = HeartbeatLoop(source, cluster.manager.address, clock=cluster.clock)
    loop.start()
    try:
        yield
    finally:
        loop.stop()


def opened(cluster: Cluster) -> Iterator[str]:
    """Yield sessions, each opened when it is asked for."""
    for _ in range(9):
        yield cluster.open()


def test_worker_that_refuses_connections_is_dead_within_a_second(two: Cluster) -> None:
    """Nobody waits for three heartbeats where it can be told at once; others see nothing."""
    session = grown(two)
    first, tail = (extent.worker_id for extent in session.extents)
    other = next(one for one in opened(two) if holder(two, one) == first)
    two.workers[tail].stop(0.0)
    began = two.clock.monotonic()
    until(lambda: two.clock.advance(0.02) or two.states()[tail] == manager_pb2.WORKER_STATE_DEAD)
    assert two.clock.monotonic() - began < 1.0
    with pytest.raises(errors.PagesLost) as caught:
        two.get(session.session_id)
    assert caught.value.metadata["from_position"] == str(FIRST)
    assert two.get(other).epoch == 1
    assert two.get(two.open()).extents[0].worker_id == first


def test_a_joining_worker_is_used(one: Cluster) -> None:
    """A session that has filled the only worker goes on where another one has come."""
    session = one.get(one.open())
    one.append(session, 0, 16 * NUM_PAGES, 1)
    one.append(session, 16 * NUM_PAGES, 16 * NUM_PAGES, 2)
    append = types_pb2.AppendRequest(
        session_id=session.session_id, epoch=1, token_count=16, expected_lengths=[FIRST]
    )
    with pytest.raises(errors.OutOfPages):
        one.call("Append", append)
    with pytest.raises(errors.Unavailable):
        one.open(spread=2)
    one.start_worker("late")
    assert [extent.worker_id for extent in one.call("Append", append).extents] == ["w0", "late"]
    spread = one.get(one.open(spread=2))
    assert {extent.worker_id for extent in spread.extents} == {"w0", "late"}


def test_a_lost_tail_is_missed_by_a_new_manager(two: Cluster) -> None:
    """Manager and tail die together: what the first worker knows of the second is enough."""
    session = grown(two)
    first, tail = (extent.worker_id for extent in session.extents)
    port = int(two.manager.address.rpartition(":")[2])
    two.manager.stop(0.0)
    two.workers[tail].stop(0.0)
    two.manager = two.start_manager(port, workers_expected=2)
    two.wait_for(first, manager_pb2.WORKER_STATE_ALIVE)
    if two.clock.monotonic() < two.manager.manager._settling.ends_at - 0.5:
        with pytest.raises(errors.Unavailable):  # it may be on its way
            two.get(session.session_id)
    two.start_worker(tail)
    for _ in range(2):
        with pytest.raises(errors.PagesLost) as caught:
            two.get(session.session_id)
        assert caught.value.metadata["from_position"] == str(FIRST)
    pop = types_pb2.PopRequest(
        session_id=session.session_id, epoch=1, keep=[FIRST], expected_lengths=[TOTAL]
    )
    assert shape(two.call("Pop", pop)) == [([0], [FIRST])]


def test_directory_is_rebuilt_from_heartbeats(two: Cluster) -> None:
    """A new manager at the old address knows nothing, and soon everything."""
    session = grown(two)
    single = two.open()
    port = int(two.manager.address.rpartition(":")[2])
    before = two.manager.incarnation
    two.manager.stop(0.0)
    two.manager = two.start_manager(port, workers_expected=2)
    assert two.manager.incarnation != before
    for worker_id in two.workers:
        two.wait_for(worker_id, manager_pb2.WORKER_STATE_ALIVE)
    assert shape(two.get(session.session_id)) == shape(session)
    assert two.get(single).session_id == single
    again = allocate_request(single, spec(ttl_s=3600))
    assert two.call("Allocate", again) == two.get(single)
    with pytest.raises(errors.AlreadyExists):
        two.call("Allocate", allocate_request(single, spec(ttl_s=3600, num_rows=9)))


def test_session_of_the_last_second_is_found(two: Cluster) -> None:
    """A fork made at its worker directly is found before any heartbeat has told of it."""
    session_id, child_id = two.open(), new_id()
    session = two.get(session_id)
    two.append(session, 0, 5, 1)
    with worker_peer(session.extents[0].address) as peer:
        peer.call(
            "Fork",
            types_pb2.ForkRequest(session_id=session_id, epoch=1, new_session_id=child_id),
        )
    assert shape(two.get(child_id)) == [([0], [5])]


def test_nothing_is_placed_before_the_expected_workers_are_there() -> None:
    """After a restart an early Allocate could open a session a second time: it waits instead."""
    with ExitStack() as stack:
        cluster = Cluster(stack)
        cluster.manager.stop(0.0)
        port = int(cluster.manager.address.rpartition(":")[2])
        cluster.manager = cluster.start_manager(port, workers_expected=2)
        until(lambda: cluster.states() == {})
        cluster.start_worker("w0")
        if cluster.clock.monotonic() < 1005.0:
            with pytest.raises(errors.Unavailable, match="1 of 2 workers"):
                cluster.open()
        cluster.clock.advance(5.0)
        cluster.wait_for("w0", manager_pb2.WORKER_STATE_ALIVE)
        cluster.open()


def test_workers_are_told_apart_by_their_lives(two: Cluster) -> None:
    """A registration in the name of a replaced life is refused, and changes nothing."""
    old = two.workers["w1"]
    message = manager_pb2.HeartbeatRequest(worker=convert.record_to_pb(old.worker.stats(), ""))
    old.stop(0.0)
    two.start_worker("w1")
    path = f"/{MANAGER.full_name}/Heartbeat"
    stream = two.peer.channel.stream_stream(
        path,
        manager_pb2.HeartbeatRequest.SerializeToString,
        manager_pb2.HeartbeatResponse.FromString,
    )
    answers = stream(iter([message]), timeout=5)
    with pytest.raises(Exception, match="another incarnation"):
        next(answers)
    until(lambda: two.beat() or two.states()["w1"] == manager_pb2.WORKER_STATE_ALIVE)


def test_stats_and_metrics_agree_over_all_workers(two: Cluster) -> None:
    """The manager's PageStats is each worker's own; its metrics count the workers."""
    grown(two)
    stats = two.peer.call("PageStats", types_pb2.PageStatsRequest()).workers
    assert [worker.worker_id for worker in stats] == ["w0", "w1"]
    for worker in stats:
        samples = scrape(str(two.workers[worker.worker_id].metrics_address))
        label = f'{{worker="{worker.worker_id}"}}'
        assert samples[f"kvservice_used_bytes{label}"] == worker.used_bytes > 0
        assert samples[f"kvservice_appended_tokens_total{label}"] == worker.appended_token_count
    assert sum(worker.appended_token_count for worker in stats) == TOTAL
    samples = scrape(str(two.manager.metrics_address))
    assert samples['kvservice_workers{state="alive"}'] == 2
    assert samples['kvservice_workers{state="dead"}'] == 0
    assert samples["kvservice_workers_expected"] == 0
    heard = samples['kvservice_worker_heartbeat_timestamp_seconds{worker="w0"}']
    assert two.clock.time() - 5 < heard <= two.clock.time()


def test_unreachable_worker_is_left_out_of_stats(two: Cluster) -> None:
    """The numbers of those that can be asked, rather than none."""
    two.workers["w0"].stop(0.0)
    stats = two.peer.call("PageStats", types_pb2.PageStatsRequest()).workers
    assert [worker.worker_id for worker in stats] == ["w1"]


def test_lists_are_merged_by_session(two: Cluster) -> None:
    """A session on two workers is listed once; pages of the list neither lose nor repeat any."""
    ids = sorted([grown(two).session_id, *(two.open() for _ in range(5))])
    listed: list[str] = []
    token = ""
    while True:
        request = types_pb2.ListSessionsRequest(page_size=2, page_token=token)
        answer = two.peer.call("ListSessions", request)
        listed += [session.session_id for session in answer.sessions]
        token = answer.next_page_token
        if not token:
            break
    assert listed == ids


def test_manager_says_what_it_serves(one: Cluster) -> None:
    """Health tells a manager from a worker."""
    stub = health_pb2_grpc.HealthStub(one.peer.channel)
    for name in ("", MANAGER.full_name):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_two_managers_do_not_meet() -> None:
    """What one knows is nothing to another on the same machine."""
    with running(1) as first, running(1) as second:
        session_id = first.open()
        with pytest.raises(errors.SessionNotFound):
            second.get(session_id)
