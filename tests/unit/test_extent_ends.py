"""An extent that begins in the middle of a page, and what is left of it after a cut."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

from kvservice.clock import ManualClock
from kvservice.core.errors import Conflict
from kvservice.core.geometry import DType, HostTensor
from kvservice.core.session import SessionSpec, WriteCall
from kvservice_workers.worker import PageWorker, WorkerConfig

ID = str(uuid.UUID(int=7, version=4))


def tensor(count: int) -> HostTensor:
    array = np.ones((count, 1, 2), np.float32)
    return HostTensor(DType.FLOAT32, array.shape, array.tobytes())


def write(epoch: int, *positions: int, number: int = 0) -> WriteCall:
    tokens = tensor(len(positions))
    rows = (0,) * len(positions)
    return WriteCall(ID, epoch, 0, tokens, tokens, rows, positions, number=number)


@pytest.fixture
def worker() -> PageWorker:
    """Return a worker with an extent from position 9 on, in pages of 2 tokens."""
    worker = PageWorker(WorkerConfig("w", "life", 1 << 20), clock=ManualClock())
    worker.opening.allocate("t", ID, SessionSpec(1, page_size=2), extent_starts=[9], epoch=1)
    worker.tokens.write("t", write(1, 9, 10, 11))
    return worker


def used(worker: PageWorker) -> int:
    return sum(pool.used_pages for pool in worker.stats().pools)


@pytest.mark.parametrize(("keep", "pages"), [(12, 2), (10, 1), (9, 0), (8, 0), (0, 0)])
def test_a_cut_frees_the_page_that_it_empties(worker: PageWorker, keep: int, pages: int) -> None:
    """Also the one in which the extent began."""
    worker.changes.pop("t", ID, 1, [keep], [12])
    assert used(worker) == pages
    worker.check()


def test_a_fork_below_an_extent_shares_none_of_its_pages(worker: PageWorker) -> None:
    """The child has nothing there, so it must not keep the parent's page alive."""
    child = str(uuid.UUID(int=8, version=4))
    worker.opening.fork("t", ID, 1, child, token_count=9, clip=True)
    worker.leases.release("t", [ID])
    assert used(worker) == 0
    worker.check()


def test_a_write_behind_a_later_one_is_refused(worker: PageWorker) -> None:
    """A copy that was stuck on the way must not undo what has come since; a repeat may come."""
    worker.tokens.write("t", write(1, 9, number=1))
    for _ in range(2):
        worker.tokens.write("t", write(1, 9, number=2))
    with pytest.raises(Conflict):
        worker.tokens.write("t", write(1, 9, number=1))
    worker.changes.pop("t", ID, 1, [12], [12])
    worker.tokens.write("t", write(2, 9, number=1))  # the next epoch counts anew


def test_the_follower_is_known_until_all_is_here(worker: PageWorker) -> None:
    """A cut beyond what is held here leaves it, one within ends it; forks take it along."""
    assert worker.changes.go_on_elsewhere("t", ID, 1, "B").extents[0].followed_by == "B"
    children = [str(uuid.UUID(int=number, version=4)) for number in (8, 9, 10)]
    found = [
        worker.opening.fork("t", ID, 1, child, token_count=count, clip=True).extents[0].followed_by
        for child, count in zip(children, (None, 13, 12), strict=True)
    ]
    assert found == ["B", "B", ""]
    assert worker.changes.pop("t", ID, 1, [13], [12]).extents[0].followed_by == "B"
    assert worker.changes.select("t", ID, 2, [0, 0]).extents[0].followed_by == "B"
    assert worker.changes.pop("t", ID, 3, [12, 12], [12, 12]).extents[0].followed_by == ""
