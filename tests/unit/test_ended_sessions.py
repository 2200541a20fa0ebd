"""What a worker remembers of sessions that have ended: what heartbeats have yet to report."""

from __future__ import annotations

import pytest

from kvservice.clock import ManualClock
from kvservice.core.errors import AlreadyExists, SessionMoved, SessionNotFound
from kvservice.core.moving import MovedTo
from kvservice_workers.session_table import LATE_S
from kvservice_workers.worker import PageWorker, WorkerConfig
from tests.serving import new_id, spec


def test_reported_ends_are_forgotten() -> None:
    """Each end is reported once, and takes no memory afterwards."""
    config = WorkerConfig(worker_id="w", incarnation="i", budget_bytes=1 << 20, address="nowhere:1")
    worker, cursor = PageWorker(config, clock=ManualClock()), 0
    for _ in range(3):
        ids = [new_id() for _ in range(10)]
        for session_id in ids:
            worker.opening.allocate("t", session_id, spec())
        worker.leases.release("t", ids)
        cursor, changed, ended = worker.changes_since(cursor)
        assert not changed
        assert {one.session_id for one in ended} == set(ids)
    assert worker.changes_since(cursor)[1:] == ([], [])
    assert not worker._sessions._ended
    worker.close()


def test_no_session_comes_where_one_of_its_id_is_still_to_be_freed() -> None:
    """A lease that is over is found out a moment later; until then the id is taken."""
    config = WorkerConfig(worker_id="w", incarnation="i", budget_bytes=1 << 20, address="nowhere:1")
    clock, session_id = ManualClock(), new_id()
    worker = PageWorker(config, clock=clock)
    worker.opening.allocate("t", session_id, spec())
    clock.advance(3601.0)
    with pytest.raises(SessionNotFound):
        worker.access.get("t", session_id)
    with pytest.raises(AlreadyExists):
        worker.arrivals.check_admitted("t", session_id)
    assert worker.leases.expire() == 1
    worker.arrivals.check_admitted("t", session_id)
    worker.close()


def test_a_late_copy_opens_nothing_where_a_lease_was_over() -> None:
    """Whoever holds that session may not know yet, and is not to find an empty one; a while later,
    or for another request, the id is free."""
    config = WorkerConfig(worker_id="w", incarnation="i", budget_bytes=1 << 20, address="nowhere:1")
    clock, parent, child = ManualClock(), new_id(), new_id()
    worker = PageWorker(config, clock=clock)
    worker.opening.allocate("t", parent, spec(ttl_s=100.0))
    worker.opening.fork("t", parent, 1, child, ttl_s=5.0)
    clock.advance(6.0)
    assert worker.leases.expire() == 1
    with pytest.raises(AlreadyExists, match="expired"):
        worker.opening.fork("t", parent, 1, child, ttl_s=5.0)
    clock.advance(101.0)
    assert worker.leases.expire() == 1
    with pytest.raises(AlreadyExists, match="expired"):
        worker.opening.allocate("t", parent, spec(ttl_s=100.0))
    worker.opening.allocate("t", parent, spec(ttl_s=200.0))
    worker.leases.release("t", [parent])
    clock.advance(LATE_S)
    worker.opening.allocate("t", parent, spec(ttl_s=100.0))
    worker.leases.release("t", [parent])
    assert list(worker._sessions._expired) == [("t", parent)]
    worker.opening.allocate("t", child, spec(ttl_s=1.0))
    clock.advance(2.0)
    assert worker.leases.expire() == 1
    assert list(worker._sessions._expired) == [("t", child)]
    worker.close()


def test_what_was_given_up_is_not_looked_for_where_it_was_before() -> None:
    """A session that had left comes again, and its lease is over before it is known whether it has.
    Where it came from it is told to be here: who shows the ticket for it is told that it has ended,
    and not sent back."""
    config = WorkerConfig(worker_id="w", incarnation="i", budget_bytes=1 << 20, address="nowhere:1")
    clock, session_id = ManualClock(), new_id()
    worker = PageWorker(config, clock=clock)
    worker.opening.allocate("t", session_id, spec(ttl_s=20.0))
    _, ticket, state = worker.departures.state("t", session_id, "copier", 0, freeze=True)
    there = MovedTo("w2", "elsewhere:1", "i2", ticket, "a stay")
    worker.departures.hand_over("t", session_id, there)
    arrival = worker.arrivals.begin("t", session_id, state, "i2")
    worker.arrivals.complete(arrival, state, 7)
    clock.advance(19.0)
    worker.leases.renew("t", [session_id])
    clock.advance(2.0)
    assert worker.arrivals.expire() == 1
    for shown in (0, 6):
        worker.arrivals.arrive_by("t", session_id, shown)
        with pytest.raises(SessionMoved):
            worker.access.get("t", session_id)
    worker.arrivals.arrive_by("t", session_id, 7)
    with pytest.raises(SessionNotFound):
        worker.access.get("t", session_id)
    worker.close()
