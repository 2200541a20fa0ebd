"""A session that is moved from worker to worker, beside one that stays: nobody can tell them apart.

All answers are compared bit for bit: what a session stores, its steps, its padding and its windows
are the same on every worker that it comes to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvservice.core.caller import ANONYMOUS, Caller
from kvservice.core.errors import (
    AlreadyExists,
    Conflict,
    Draining,
    InvalidRequest,
    KVServiceError,
    OutOfPages,
    PagesLost,
    SessionNotFound,
    Unavailable,
    WorkerLost,
    WorkerNotFound,
)
from kvservice.v1 import manager_pb2, types_pb2, worker_pb2
from kvservice.wire import convert
from kvservice.wire.names import WORKER
from kvservice_client import DType, LayerGeometry, Session
from kvservice_client._transport import Transport
from kvservice_client.testing import eventually
from kvservice_workers.data_plane import peer
from kvservice_workers.data_plane.service import WorkerService
from kvservice_workers.data_plane.takeover import Takeover
from tests.backends import Backend, embedded_backend
from tests.contract.conftest import Start
from tests.driving import Driver
from tests.faults import Faults

NUM_LAYERS = 3
WINDOWS = [None, 4, None]
UNKNOWN_ID = "123e4567-e89b-42d3-a456-426614174000"


@pytest.fixture
def two(start: Start) -> Backend:
    """A manager with two workers."""
    return start(num_workers=2)


class Twins:
    """Two sessions that are told the same, of which one moves. Their answers must be equal."""

    def __init__(self, backend: Backend, *, num_rows: int = 2, **options: object) -> None:
        self.backend = backend
        client = backend.connect()
        self.moving, self.staying = (
            client.open(num_rows=num_rows, page_size=4, **options) for _ in range(2)
        )
        self.moving.retain = self.staying.retain = 4  # so many may be popped
        self.rng = np.random.default_rng(0)

    @property
    def here(self) -> int:
        """The index of the worker that holds the moving one's tail."""
        return self.backend.index_of(self.moving._mirror.tail.worker_id)

    def move(self) -> None:
        """Move it to the other worker; its holder has not heard of it yet."""
        holders = [
            index
            for index, worker in enumerate(self.backend.workers)
            if any(info.session_id == self.moving.id for _, info in worker.list_sessions(None))
        ]
        assert len(holders) == 1, "a session is on one worker"
        self.backend.move(self.moving.id, 1 - holders[0])

    def both(self, call: Callable[[Session], object]) -> None:
        """Make a call on both, and compare."""
        one, other = call(self.moving), call(self.staying)
        if one is not None:
            np.testing.assert_array_equal(np.stack([one]), np.stack([other]))

    def tokens(self, count: int) -> list[np.ndarray]:
        rows = self.moving.num_rows
        return [
            self.rng.standard_normal((rows, heads, count, 8)).astype(np.float32)
            for heads in (4, 2, 2)
        ]

    def attend(self, layer: int, count: int = 1, **options: object) -> None:
        tokens = self.tokens(count)
        self.both(lambda one: one.attend(layer, *tokens, window=WINDOWS[layer], **options))

    def step(self, count: int = 1, **options: object) -> None:
        for layer in range(NUM_LAYERS):
            self.attend(layer, count, **options)

    def check(self) -> None:
        for layer in range(NUM_LAYERS):
            if any(self.staying.lengths(layer)):
                first = (
                    0 if WINDOWS[layer] is None else max(0, min(self.staying.lengths(layer)) - 3)
                )
                self.both(lambda one, layer=layer, first=first: one.read(layer, first))
        for worker in self.backend.workers:
            worker.check()


OPTIONS = {
    "unstated": {},
    "windows": {"windows": WINDOWS},
    "reserved": {
        "layers": [LayerGeometry(2, 8, 8, DType.FLOAT32)] * NUM_LAYERS,
        "reserve_tokens": 40,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_goes_on_bit_for_bit(two: Backend, options: dict[str, object]) -> None:
    """Whatever a decoder does, between and in the middle of its steps the session may move."""
    twins = Twins(two, **options)
    padding = np.zeros((2, 7), bool)
    padding[1, :3] = True
    twins.step(7, padding=padding)
    twins.move()
    twins.step()
    for layer in range(NUM_LAYERS):
        twins.attend(layer)
        twins.move()
    twins.check()
    twins.move()
    twins.both(lambda one: one.pop(2))
    twins.step(3)
    twins.move()
    twins.both(lambda one: one.select([1, 0, 1]))
    twins.move()
    twins.step(2)
    twins.move()
    k, v = twins.tokens(2)[1:]
    twins.both(lambda one: one.write(0, k, v, positions=[8, 9]))
    twins.step()
    twins.move()
    twins.check()
    twins.both(lambda one: one.reset())
    twins.move()
    twins.step(5)
    twins.move()
    twins.check()
    assert {worker.stats().moves["moved"] for worker in two.workers} == {5, 6}


def test_a_repeat_is_answered_as_before(two: Backend) -> None:
    """What was asked of one worker may be asked of the next one again: it knows the step."""
    twins = Twins(two)
    twins.step(3)
    tokens = twins.tokens(1)
    first = twins.moving.attend(0, *tokens)
    twins.move()
    again = twins.moving.attend(0, *tokens, pos=3)
    np.testing.assert_array_equal(first, again)
    assert twins.moving.lengths(0) == (4, 4)


def test_moves_under_a_decoder(two: Backend) -> None:
    """To and fro, all the time, while somebody decodes, goes back, selects and overwrites."""
    twins = Twins(two, windows=WINDOWS)
    twins.step(20)
    stop, failures, moves = threading.Event(), list[Exception](), list[int]()

    def keep_moving() -> None:
        while not stop.is_set():
            try:
                twins.move()
                moves.append(1)
            except Exception as error:
                failures.append(error)
                return

    mover = threading.Thread(target=keep_moving)
    mover.start()
    try:
        step = 0
        while len(moves) < 6 and not failures:
            step += 1
            twins.step(1 + step % 3)
            if step % 5 == 2:
                twins.both(lambda one: one.pop(2))
            if step % 7 == 3:
                twins.both(lambda one: one.select([1, 0]))
            if step % 4 == 1:
                k, v = twins.tokens(1)[1:]
                last = twins.staying.lengths(0)[0] - 1
                twins.both(lambda one: one.write(0, k, v, positions=[last]))  # noqa: B023
    finally:
        stop.set()
        mover.join()
    assert not failures
    twins.check()


def test_a_layer_is_stored_while_the_others_are_copied(
    two: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens may be older than the copy of the pages that hold them, and are copied as well."""
    twins, original = Twins(two), peer.Source.pages
    asked: list[object] = []

    def pages(self: peer.Source, *args: Any) -> Any:
        if not asked:
            for layer in range(1, NUM_LAYERS):
                twins.attend(layer, 3)
        asked.append(args)
        return original(self, *args)

    def has_all(self: Takeover, missing: Sequence[Any]) -> bool:
        return not any(one.pages for one in missing)

    monkeypatch.setattr(peer.Source, "pages", pages)
    monkeypatch.setattr(Takeover, "_are_few", has_all)  # all is copied while the session is used
    twins.attend(0, 3)
    twins.move()
    assert len(asked) > 1
    twins.check()
    twins.step()
    twins.check()


def test_a_part_of_a_session_moves(start: Start) -> None:
    """Of a session on two workers either part can go to the third, and the whole stays whole."""
    backend = start(num_workers=3)
    client = backend.connect()
    spread, alone = (client.open(num_rows=1, spread=n, page_size=4) for n in (2, 1))
    rng = np.random.default_rng(0)

    def step(count: int) -> None:
        for layer in range(2):
            tokens = [
                rng.standard_normal((1, heads, count, 8)).astype(np.float32) for heads in (4, 2, 2)
            ]
            outs = [one.attend(layer, *tokens) for one in (spread, alone)]
            np.testing.assert_allclose(*outs, atol=2e-6)

    step(20)
    for _ in range(4):
        held = [backend.index_of(extent.worker_id) for extent in spread._mirror.extents]
        free = next(index for index in range(3) if index not in held)
        with pytest.raises(InvalidRequest, match="say from which one"):
            backend.move(spread.id, free)
        moved = backend.move(spread.id, free, source=held[0])
        assert len(moved.extents) == 2
        step(3)
        step(1)
    np.testing.assert_array_equal(spread.read(0)[0], alone.read(0)[0])
    spread.pop(5)
    alone.pop(5)
    step(2)
    attached = client.attach(spread.detach())
    np.testing.assert_array_equal(attached.read(1)[1], alone.read(1)[1])


def test_what_grows_where_a_session_came_from_is_missed(start: Start) -> None:
    """A session moves away, and its next tokens go to where it was: another part of it, which is
    not taken for the one that has moved when that worker dies."""
    geometry = LayerGeometry(2, 8, 8, DType.FLOAT32)
    backend = start(num_workers=2, memory_bytes=8 * 4 * geometry.token_bytes)
    client = backend.connect()
    session = client.open(num_rows=1, layers=[geometry], page_size=4)
    before = backend.index_of(session._mirror.tail.worker_id)
    tokens = [np.ones((1, 2, 20, 8), np.float32)] * 3
    session.attend(0, *tokens)
    backend.move(session.id, 1 - before)
    session.attend(0, *tokens)  # 12 fit there
    assert len(session._mirror.extents) == 2
    session_id = session.detach()
    backend.kill(before)
    backend.bury(before)
    attached = backend.connect().attach(session_id)
    with pytest.raises(PagesLost) as failure:
        attached.attend(0, *tokens)
    assert failure.value.metadata["from_position"] == "20"
    assert attached.roll_back() == (20,)
    backend.restart(before)


def test_release_after_a_move(two: Backend) -> None:
    """A holder that does not know of the move releases the session where it is."""
    twins = Twins(two)
    twins.step(3)
    twins.move()
    twins.moving.release()
    assert two.num_sessions() == 1
    client = two.connect()
    left = client.open(num_rows=1)
    holder = two.index_of(left._mirror.tail.worker_id)
    two.beat()
    two.move(left.id, 1 - holder)
    del left
    eventually(lambda: two.num_sessions() == 1)


def test_what_cannot_be_moved(start: Start) -> None:
    """Each refusal says why, and the session stays where and what it is."""
    geometry = LayerGeometry(2, 8, 8, DType.FLOAT32)
    backend = start(num_workers=2, memory_bytes=16 * 4 * geometry.token_bytes)
    client = backend.connect()
    layers = {"layers": [geometry], "page_size": 4}
    session, other = (client.open(num_rows=1, **layers) for _ in range(2))
    holder = backend.index_of(session._mirror.tail.worker_id)
    k = np.ones((1, 2, 40, 8), np.float32)
    session.write(0, k, k)
    other.write(0, k, k)
    before = [worker.stats().pools for worker in backend.workers]

    def refused(kind: type[KVServiceError], session_id: str, to: int) -> None:
        with pytest.raises(kind):
            backend.move(session_id, to)

    refused(SessionNotFound, UNKNOWN_ID, 0)
    refused(AlreadyExists, session.id, holder)
    refused(OutOfPages, session.id, 1 - holder)
    with pytest.raises(WorkerNotFound):
        backend.manager._moves.move(("", session.id), "nobody", "")
    backend.workers[1 - holder].drain()
    backend.beat()
    refused(Draining, session.id, 1 - holder)
    after = [worker.stats().pools for worker in backend.workers]
    assert [[pool.used_pages for pool in pools] for pools in after] == [
        [pool.used_pages for pool in pools] for pools in before
    ]
    np.testing.assert_array_equal(session.read(0)[0], k)
    assert not any(worker.stats().num_arriving for worker in backend.workers)


def test_only_the_worker_that_it_is_taken_from_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """That one begins another life in the middle of a move. The session is lost; the worker that
    was to take it lives, keeps all that it holds, and goes on reporting."""
    with embedded_backend(num_workers=2) as backend:
        client = backend.connect()
        session, other = (client.open(num_rows=1) for _ in range(2))
        holder = backend.index_of(session._mirror.tail.worker_id)
        address = backend.workers[holder].config.address
        k = np.ones((1, 2, 6, 8), np.float32)
        for one in (session, other):
            one.write(0, k, k)
        assert backend.index_of(other._mirror.tail.worker_id) == 1 - holder

        def copy_state(
            self: WorkerService, request: worker_pb2.CopyStateRequest, caller: Caller
        ) -> Any:
            if backend.workers[holder].config.incarnation != request.incarnation:
                return original(self, request, caller)
            backend.restart(holder)
            way = backend.dial(address)
            return way.call(WORKER.full_name, "CopyState", request, timeout_s=1.0)

        original = WorkerService.copy_state
        monkeypatch.setattr(WorkerService, "copy_state", copy_state)
        with pytest.raises(PagesLost):
            backend.move(session.id, 1 - holder)
        backend.beat()
        states = {info.state for info in client.list_workers()}
        assert states == {manager_pb2.WORKER_STATE_ALIVE}
        np.testing.assert_array_equal(other.read(0)[0], k)


def test_workers_that_cannot_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A move ends when the worker that holds the session is silent for too long, and is made when
    there is a way again: nobody takes that one's silence for the silence of the other."""
    monkeypatch.setattr(peer, "SILENCE_S", 0.2)
    is_cut = True

    def copy_state(
        self: WorkerService, request: worker_pb2.CopyStateRequest, caller: Caller
    ) -> Any:
        if is_cut:
            raise Unavailable("the way is cut")
        return original(self, request, caller)

    original = WorkerService.copy_state
    monkeypatch.setattr(WorkerService, "copy_state", copy_state)
    with embedded_backend(num_workers=2) as backend:
        session = backend.connect().open(num_rows=1)
        holder = backend.index_of(session._mirror.tail.worker_id)
        k = np.ones((1, 2, 6, 8), np.float32)
        session.write(0, k, k)
        with pytest.raises(Conflict, match="cannot be reached"):
            backend.move(session.id, 1 - holder)
        is_cut = False
        backend.move(session.id, 1 - holder)
        np.testing.assert_array_equal(session.read(0)[0], k)


@pytest.mark.parametrize("is_known", [True, False], ids=["known dead", "of an unknown life"])
def test_a_late_copy_of_the_request_that_opened_it(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds that the session has moved to a worker that has died since: nothing is opened, and
    the caller, who may have no session yet, is told neither that its pages are lost nor that there
    is no such session. So it is with a manager that has started after that worker's death."""
    with embedded_backend(num_workers=2) as backend:
        session = backend.connect().open(num_rows=1)
        holder = backend.index_of(session._mirror.tail.worker_id)
        request = types_pb2.AllocateRequest(
            session_id=session.id, spec=convert.spec_to_pb(session._mirror.spec)
        )
        backend.move(session.id, 1 - holder)
        backend.kill(1 - holder)
        backend.manager._directory.end((ANONYMOUS.tenant, session.id), f"worker-{1 - holder}")
        if is_known:
            backend.bury(1 - holder)
        else:
            backend.restart(1 - holder)
            monkeypatch.setattr(backend.manager._directory, "state_of_life", lambda life: None)
            monkeypatch.setattr(backend.manager._directory, "is_held_or_lost", lambda key: False)
        with pytest.raises(WorkerLost):
            backend.manager.allocate(request, ANONYMOUS)
        session.detach()
        if is_known:
            backend.restart(1 - holder)


def test_a_holder_that_was_idle_through_several_moves() -> None:
    """Its session is renewed where it is, by the manager; a worker on the way there has forgotten
    where it went, as nobody asked for so long."""
    with embedded_backend(num_workers=3) as backend:
        driver = Driver.open(backend.connect(), num_rows=1, page_size=4)
        driver.step(6)
        first = backend.index_of(driver.session._mirror.tail.worker_id)
        second, third = (index for index in range(3) if index != first)
        backend.move(driver.session.id, second)
        backend.move(driver.session.id, third)
        del backend.workers[second]._sessions._moved[ANONYMOUS.tenant, driver.session.id]
        driver.step()
        driver.check_stored()
        assert backend.index_of(driver.session._mirror.tail.worker_id) == third


@pytest.mark.parametrize("by_id", [False, True], ids=["by its holder", "by id"])
def test_a_child_that_moves_before_it_is_known(
    two: Backend, by_id: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to a fork is lost, and the child is moved: its parent is forked once more, and the
    first child released."""
    faults = Faults(two.dial)
    client = two.connect(dial=faults.dial)
    driver = Driver.open(client, num_rows=2, page_size=4)
    driver.step(6)
    parent_at = two.index_of(driver.session._mirror.tail.worker_id)
    carried, children = faults._carried, list[str]()

    def carry(address: str, call: Callable[[Transport], Any]) -> Any:
        answer = carried(address, call)
        if isinstance(answer, types_pb2.ForkResponse):
            children.append(answer.session.session_id)
            if len(children) == 1:
                two.beat()
                two.move(children[0], 1 - parent_at)
                raise Unavailable("the answer is lost")
        return answer

    monkeypatch.setattr(faults, "_carried", carry)
    child = client.fork(driver.session.id) if by_id else driver.session.fork()
    assert child.id != children[0]
    assert child.id == children[-1]
    assert child.lengths(0) == driver.session.lengths(0)
    child.release()
    eventually(lambda: two.num_sessions() == 1)
