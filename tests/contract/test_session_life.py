"""From open to release: leases, garbage, detaching and attaching, threads."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvservice.clock import ManualClock
from kvservice.core.caller import ANONYMOUS
from kvservice_client import (
    Client,
    ClientConfig,
    InvalidRequest,
    PagesLost,
    PositionOutOfRange,
    SessionNotFound,
    StaleEpoch,
    current_client,
    use,
)
from kvservice_client.testing import eventually
from tests.backends import Backend
from tests.contract.conftest import Start
from tests.driving import Driver


def test_release(backend: Backend, client: Client) -> None:
    """A released session is gone at once, says so, and can be released again."""
    driver = Driver.open(client)
    driver.step(5)
    driver.session.release()
    assert (backend.used_pages(), backend.num_sessions()) == (0, 0)
    assert driver.session.closed
    for call in (driver.step, driver.session.reset, driver.session.detach, driver.session.fork):
        with pytest.raises(SessionNotFound):
            call()
    driver.session.release()


def test_release_at_the_end_of_a_block(backend: Backend, client: Client) -> None:
    """A session is a context manager."""
    with client.open(num_rows=1) as session:
        assert not session.closed
    assert session.closed
    assert backend.num_sessions() == 0


def test_release_when_nobody_holds_it(backend: Backend, client: Client) -> None:
    """A session that is dropped is released soon, without waiting for a garbage collection."""
    gc.disable()
    try:
        driver = Driver.open(client)
        driver.step(5)
        child = driver.fork()
        del driver
        eventually(lambda: backend.num_sessions() == 1)
        child.step()
        del child
        eventually(lambda: (backend.num_sessions(), backend.used_pages()) == (0, 0))
    finally:
        gc.enable()


def test_release_from_a_cycle(backend: Backend, client: Client) -> None:
    """A finalizer may run in the middle of anything; it only leaves a note."""
    for _ in range(20):
        ring: list[object] = [client.open(num_rows=1)]
        ring.append(ring)
    del ring
    gc.collect()
    eventually(lambda: backend.num_sessions() == 0)


def test_release_with_the_client(backend: Backend) -> None:
    """Closing a client releases what is open, and ends its sessions."""
    with backend.connect() as client:
        driver = Driver.open(client)
        driver.step(5)
    assert (backend.used_pages(), backend.num_sessions()) == (0, 0)
    with pytest.raises(SessionNotFound):
        driver.step()
    client.close()


def test_a_dropped_client_ends_its_thread(backend: Backend) -> None:
    """A client that nobody closes goes with its last session."""
    client = backend.connect()
    backend.clients.clear()
    session = client.open(num_rows=1)
    thread = client._leases._thread
    assert thread is not None
    del client
    assert session.lengths(0) == (0,)
    session.reset()
    del session
    eventually(lambda: not thread.is_alive())
    assert backend.num_sessions() == 0


def test_detach_and_attach(backend: Backend) -> None:
    """Another process goes on at the stored length, with the next epoch."""
    driver = Driver.open(backend.connect(), page_size=4)
    driver.step(6)
    driver.session.attend(0, *driver.tokens(2))
    driver.session.roll_back()
    driver.step()
    old, epoch = driver.session, driver.session.epoch
    session_id = old.detach()
    assert old.closed
    with pytest.raises(SessionNotFound):
        old.attend(0, *driver.tokens(1))
    backend.clients[0].close()
    assert backend.num_sessions() == 1
    driver.session = backend.connect().attach(session_id)
    assert driver.session.id == session_id
    assert driver.session.epoch == epoch + 1
    assert driver.session.lengths(0) == (7, 7)
    driver.step()
    driver.check_stored()


def test_attach_to_several_workers(start: Start) -> None:
    """All extents come back, ragged rows included."""
    backend = start(num_workers=2)
    driver = Driver.open(backend.connect(), page_size=4, spread=2, num_rows=3)
    driver.ragged_step([11, 4, 9])
    driver.pop(keep=[11, 3, 7])
    session_id = driver.session.detach()
    driver.session = backend.connect().attach(session_id)
    assert driver.session.lengths(1) == (11, 3, 7)
    driver.step(2)
    driver.check_stored()
    driver.pop(keep=2)
    driver.step()


def test_an_older_holder_is_stale(backend: Backend) -> None:
    """Whoever attaches has the session; the one before can do nothing more to it."""
    first, second = backend.connect(), backend.connect()
    old = Driver.open(first)
    old.step(3)
    new = Driver(second.attach(old.session.id), dense=old.dense.fork())
    for call in (
        lambda: old.session.attend(0, *old.tokens(1)),
        lambda: old.session.pop(1),
        lambda: old.session.read(0),
        lambda: old.session.fork(),
    ):
        with pytest.raises(StaleEpoch):
            call()
    old.session.release()
    new.step()
    new.check_stored()


def test_attach_to_nothing(client: Client) -> None:
    """Ids that nobody has, and what is no id."""
    with pytest.raises(SessionNotFound):
        client.attach("00000000-0000-4000-8000-000000000000")
    with pytest.raises(InvalidRequest):
        client.attach("nobody")


def test_fork_by_id(backend: Backend) -> None:
    """A session can be forked by its id, under its holder's hands."""
    parent = Driver.open(backend.connect(), page_size=4)
    parent.step(9)
    child = Driver(backend.connect().fork(parent.session.id, 6), dense=parent.dense.fork())
    child.dense.pop(keep=6)
    parent.step()
    child.step(3)
    for driver in (parent, child):
        driver.check_stored()
    with pytest.raises(PositionOutOfRange):
        backend.clients[0].fork(parent.session.id, 11)


def test_leases_end(start: Start) -> None:
    """A session that nobody renews is gone after its time, and its holder is told so."""
    clock = ManualClock()
    backend = start(clock=clock)
    # A client with a clock of its own, which stands still: it renews nothing.
    driver = Driver.open(backend.connect(), ttl_s=30.0)
    driver.step(5)
    clock.advance(29.0)
    backend.workers[0].leases.expire()
    driver.step()  # every call renews
    clock.advance(29.0)
    backend.workers[0].leases.expire()
    assert backend.num_sessions() == 1
    clock.advance(2.0)
    backend.workers[0].leases.expire()
    assert (backend.num_sessions(), backend.used_pages()) == (0, 0)
    with pytest.raises(SessionNotFound):
        driver.session.attend(0, *driver.tokens(1))
    driver.session.release()


@pytest.mark.parametrize("first_to_go", [0, 1])
def test_a_part_whose_lease_is_over_is_a_loss(start: Start, first_to_go: int) -> None:
    """What another worker still holds is no whole session, and is never taken for one."""
    clock = ManualClock()
    backend = start(num_workers=2, clock=clock)
    driver = Driver.open(backend.connect(), ttl_s=30.0, spread=2, page_size=4)
    driver.step(16)
    assert all(len(worker.list_sessions(None)) == 1 for worker in backend.workers)
    clock.advance(29.0)
    kept = backend.workers[1 - first_to_go]
    assert kept.leases.renew(ANONYMOUS.tenant, [driver.session.id]) == []
    clock.advance(2.0)
    backend.workers[first_to_go].leases.expire()
    backend.beat()
    heir = backend.connect().attach(driver.session.id)
    for call in (lambda: heir.attend(0, *driver.tokens(1)), lambda: heir.read(0), heir.fork):
        with pytest.raises(PagesLost):
            call()
    heir.detach()
    clock.advance(31.0)
    kept.leases.expire()
    backend.beat()
    with pytest.raises(SessionNotFound):
        backend.connect().attach(driver.session.id)
    driver.session.release()


def test_idle_sessions_are_renewed(backend: Backend) -> None:
    """A living client's sessions stay, however idle, for many times their lease."""
    client = backend.connect()
    sessions = [client.open(num_rows=1, ttl_s=1.0) for _ in range(5)]
    started = backend.clock.monotonic()

    def expire_and_look() -> bool:
        backend.workers[0].leases.expire()
        assert backend.num_sessions() == len(sessions)
        return backend.clock.monotonic() - started > 2.5

    eventually(expire_and_look)
    for session in sessions:
        session.reset()


def test_a_detached_session_is_left_to_its_lease(backend: Backend) -> None:
    """Nobody renews a session that was let go."""
    client = backend.connect()
    kept, let_go = (client.open(num_rows=1, ttl_s=1.0) for _ in range(2))
    let_go.detach()

    def expired() -> bool:
        backend.workers[0].leases.expire()
        return backend.num_sessions() == 1

    eventually(expired)
    kept.reset()


@pytest.mark.parametrize("ttl_s", [0.5, 4000.0, float("nan")])
def test_leases_have_bounds(client: Client, ttl_s: float) -> None:
    """1 s to 1 h."""
    with pytest.raises(InvalidRequest, match="ttl"):
        client.open(num_rows=1, ttl_s=ttl_s)


def test_threads(start: Start) -> None:
    """Many sessions in several threads at once do not disturb each other."""
    backend = start(num_workers=2)
    client = backend.connect()
    failures: list[BaseException] = []

    def decode(seed: int) -> None:
        try:
            for one in range(3):
                driver = Driver.open(
                    client, page_size=4, seed=10 * seed + one, spread=1 + one % 2, num_layers=1
                )
                driver.step(6 + seed)
                child = driver.fork()
                for _ in range(4):
                    driver.step()
                    child.step()
                driver.select([1, 0])
                driver.step()
                driver.check_stored()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=decode, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_one_session_in_two_threads(client: Client) -> None:
    """A session has one user at a time; calls that come at once are done one after the other."""
    driver = Driver.open(client, num_layers=1)
    driver.step(4)
    q = driver.random(4, 1, 8)
    expected = driver.session.attend(0, q)
    results: list[np.ndarray] = []

    def ask() -> None:
        for _ in range(20):
            results.append(driver.session.attend(0, q))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    assert all(np.array_equal(result, expected) for result in results)


def test_what_there_is(start: Start) -> None:
    """Workers, sessions and numbers, as the service has them."""
    backend = start(num_workers=2)
    client = backend.connect()
    driver = Driver.open(client, page_size=4, num_rows=1)
    driver.step(6)
    assert {worker.worker_id for worker in client.list_workers()} == {"worker-0", "worker-1"}
    assert [info.session_id for info in client.list_sessions()] == [driver.session.id]
    (mine,) = driver.session.page_stats()
    (used,) = [stats for stats in client.page_stats() if stats.num_sessions]
    assert used.worker_id == mine.worker_id
    assert sum(pool.num_tokens for pool in used.pools) == 6
    assert "1 rows" in repr(driver.session)


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_sessions_are_not_copied(client: Client, take: Callable[[object], object]) -> None:
    """A copy would release its original's pages: the error says what to do instead."""
    session = client.open(num_rows=1)
    with pytest.raises(TypeError, match=r"fork\(\)"):
        take(session)


def test_the_default_client(client: Client) -> None:
    """`use` sets it; without one the error says what to do."""
    with pytest.raises(RuntimeError, match="use"):
        current_client()
    use(client)
    try:
        assert current_client() is client
    finally:
        use(None)


def test_time_limits_are_settable(backend: Backend) -> None:
    """A client's limits are its own."""
    client = backend.connect(config=ClientConfig(timeout_s=3.0, detection_s=0.5))
    assert client.open(num_rows=1).num_rows == 1
