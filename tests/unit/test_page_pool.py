"""Page ids: free list, reference counts, and room that is promised."""

import pytest

from kvservice.core.errors import OutOfPages
from kvservice_workers.page_pool import PagePool


def test_promised_room_is_kept_from_others() -> None:
    """Others get a page only while more are unused than promised."""
    pool = PagePool(16, 4)
    pool.take(0, promise_change=3)
    assert (pool.num_used, pool.num_reserved, pool.num_free) == (0, 3, 1)
    pool.take(1)
    with pytest.raises(OutOfPages) as error:
        pool.take(1)
    assert error.value.metadata == {"needed": "1", "free": "0"}
    assert error.value.retry_delay_s
    assert (pool.num_used, pool.num_reserved, pool.num_free) == (1, 3, 0)
    pool.take(2, promise_change=-2)  # by the one it was promised to
    assert (pool.num_used, pool.num_reserved, pool.num_free) == (3, 1, 0)
    pool.check()


def test_a_page_is_free_when_its_last_reference_goes() -> None:
    """Sharing counts references; releasing says how many pages became unused."""
    pool = PagePool(16, 2)
    [page] = pool.take(1)
    pool.retain([page])
    assert pool.is_shared(page)
    assert pool.release([page]) == 0
    assert not pool.is_shared(page)
    assert pool.release([page]) == 1
    assert pool.num_free == 2
    pool.check()


def test_growing_adds_free_pages_and_ids() -> None:
    """Existing ids stay; the lowest new id goes first."""
    pool = PagePool(16, 1)
    assert pool.take(1) == [0]
    assert pool.shortage(2, promise_change=1) == 3
    pool.grow(3)
    assert pool.shortage(2, promise_change=1) == 0
    assert pool.take(2) == [1, 2]
    pool.check()


def test_giving_back_more_than_is_needed_is_no_shortage() -> None:
    """Pages that an eviction frees in the same call count."""
    pool = PagePool(16, 1)
    pool.take(1)
    assert pool.shortage(-1, promise_change=1) == 0
    assert pool.shortage(0, promise_change=1) == 1
