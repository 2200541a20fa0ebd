"""What a worker remembers of sessions that have ended: what heartbeats have yet to report."""

from __future__ import annotations

from kvservice.clock import ManualClock
from kvservice_workers.worker import PageWorker, WorkerConfig
from tests.serving import new_id, spec


def test_reported_ends_are_forgotten() -> None:
    """Each end is reported once, and takes no memory afterwards."""
    config = WorkerConfig(worker_id="w", incarnation="i", budget_bytes=1 << 20, address="nowhere:1")
    worker, cursor = PageWorker(config, clock=ManualClock()), 0
    for _ in range(3):
        ids = [new_id() for _ in range(10)]
        for session_id in ids:
            worker.allocate("t", session_id, spec())
        worker.release("t", ids)
        cursor, changed, ended = worker.changes_since(cursor)
        assert not changed
        assert {one.session_id for one in ended} == set(ids)
    assert worker.changes_since(cursor)[1:] == ([], [])
    assert not worker._sessions._ended
    worker.close()
