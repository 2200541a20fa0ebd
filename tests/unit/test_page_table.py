"""Page tables: which pages a write needs, and that a shared page is never written in place."""

from __future__ import annotations

from kvservice.core.geometry import HOLE
from kvservice_workers.page_pool import PagePool
from kvservice_workers.page_table import PageCopy, PageTable


def write(table: PageTable, pool: PagePool, *indices: int) -> list[PageCopy]:
    """Provide what a write at some indices needs; return the copies that are to be made."""
    need = table.need(indices)
    return table.provide(need, pool.take(need.num_pages))


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    """By whoever writes first; the other one is alone with it then, and writes in place."""
    pool = PagePool(16, 4)
    table = PageTable(pool)
    assert write(table, pool, 0, 1) == []
    child = table.share()
    assert child.entries == table.entries == [0, 1]
    assert write(child, pool, 1) == [PageCopy(src=1, dst=2)]
    assert (table.entries, child.entries) == ([0, 1], [0, 2])
    assert write(table, pool, 1) == []
    assert [pool.is_shared(page) for page in range(3)] == [True, False, False]
    for one in (table, child):
        one.check()
    assert child.cut(0) + table.cut(0) == 3
    assert pool.num_used == 0
    pool.check()


def test_a_write_fills_holes_and_takes_nothing_twice() -> None:
    """Only what is missing is asked for; what was evicted is a hole, and may be written again."""
    pool = PagePool(16, 4)
    table = PageTable(pool)
    write(table, pool, 2)
    assert table.entries == [HOLE, HOLE, 0]
    assert table.num_held == 1
    assert table.need([2]).num_pages == 0
    write(table, pool, 1, 2)
    assert table.entries == [HOLE, 1, 0]
    assert table.evict(2) == 1
    assert table.entries == [HOLE, HOLE, 0]
    table.check()
    pool.check()


def test_a_shared_page_is_not_freed_by_one_of_its_tables() -> None:
    """Neither by a cut nor by an eviction, and both say so."""
    pool = PagePool(16, 4)
    table = PageTable(pool)
    write(table, pool, 0, 1)
    child = table.share(1)
    assert child.entries == [0]
    assert table.count_evictable(2) == 1
    assert table.evict(1) == 0
    assert child.cut(0) == 1
    assert table.cut(0) == 1
    pool.check()
