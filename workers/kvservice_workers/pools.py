"""All pools of a worker, and the bytes that their arenas may take together."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvservice.core.errors import OutOfPages
from kvservice.core.geometry import LayerGeometry
from kvservice.core.quota import QuotaOf, unlimited
from kvservice_workers.arena import Arena, page_bytes
from kvservice_workers.page_pool import PagePool
from kvservice_workers.page_table import PageCopy
from kvservice_workers.usage import TenantUsage

# Pages that a pool grows by at least, where the budget allows.
MIN_GROWTH = 8
# Layers that a pool is taken to have, for reserving address space, when nobody has said.
ASSUMED_LAYERS = 16


class Pool:
    """The pages of one geometry, and their arenas, made at each layer's first use.

    Invariants (asserted by `check`):
      1. Every arena has room for exactly the pages of `pages`.
    """

    def __init__(
        self,
        ordinal: int,
        key: Hashable,
        page_size: int,
        *,
        private: bool,
        zero_freed: bool = False,
    ) -> None:
        self.ordinal = ordinal
        self.key = key
        self.private = private
        self.pages = PagePool(page_size, on_unused=self.zero_pages if zero_freed else None)
        self.arenas: dict[int, Arena] = {}
        self.num_users = 0  # sessions
        # Held by whoever writes to the arenas or moves them.
        self.lock = threading.RLock()

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all arenas that exist."""
        return sum(arena.page_bytes for arena in self.arenas.values())

    @property
    def arena_bytes(self) -> int:
        return self.pages.total * self.page_bytes

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        with self.lock:
            for arena in self.arenas.values():
                arena.copy_pages(copies)

    def zero_pages(self, pages: Sequence[int]) -> None:
        with self.lock:
            for arena in self.arenas.values():
                arena.zero_pages(pages)

    def check(self) -> None:
        self.pages.check()
        assert all(arena.capacity == self.pages.total for arena in self.arenas.values())


@dataclass(frozen=True, slots=True)
class Room:
    """What is wanted of a pool: pages to take (below 0: to give back), and more promised ones."""

    pool: Pool
    num_pages: int = 0
    promise_change: int = 0


def by_pool(rooms: Iterable[Room]) -> list[Room]:
    """Return what is wanted of each pool together, in the order in which they are named first."""
    totals: dict[Pool, Room] = {}
    for room in rooms:
        total = totals.get(room.pool)
        totals[room.pool] = (
            room
            if total is None
            else Room(
                room.pool,
                total.num_pages + room.num_pages,
                total.promise_change + room.promise_change,
            )
        )
    return list(totals.values())


class PoolSet:
    """Every pool of a worker. The caller holds the worker's lock.

    Invariants (asserted by `check`):
      1. The bytes of all arenas are at most the budget.
      2. A private pool without users does not exist.
    """

    def __init__(
        self,
        budget_bytes: int,
        device: torch.device,
        *,
        quota_of: QuotaOf = unlimited,
        zero_freed: bool = False,
    ) -> None:
        """
        Args:
            quota_of: What each tenant may have.
            zero_freed: Overwrite pages as soon as nothing holds them any more.
        """
        self.budget_bytes = budget_bytes
        self.usage = TenantUsage(quota_of)
        self._zero_freed = zero_freed
        self._device = device
        self._pools: dict[Hashable, Pool] = {}
        self._given_back: list[int] = []  # ordinals of pools that are gone, a heap

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    @property
    def arena_bytes(self) -> int:
        return sum(pool.arena_bytes for pool in self._pools.values())

    @property
    def used_bytes(self) -> int:
        return sum(pool.pages.num_used * pool.page_bytes for pool in self._pools.values())

    def open(self, key: Hashable, page_size: int, *, private: bool) -> Pool:
        """Return the pool of a key for one more user, making it if need be."""
        pool = self._pools.get(key)
        if pool is None:
            # The lowest free number: it is a label of metrics, which must not be ever new ones.
            ordinal = heapq.heappop(self._given_back) if self._given_back else len(self._pools)
            pool = Pool(ordinal, key, page_size, private=private, zero_freed=self._zero_freed)
            self._pools[key] = pool
        pool.num_users += 1
        return pool

    def close(self, pool: Pool) -> None:
        """Give up one use. A private pool goes with its last user."""
        pool.num_users -= 1
        if pool.private and pool.num_users == 0:
            assert pool.pages.num_used == 0, "pages without a session"
            self._forget(pool)

    def make_room(self, room: Room, *, keep: Collection[Pool]) -> None:
        """Grow a pool until so many pages can be taken from it; see `PagePool.take`.

        Args:
            keep: Pools that are not to be dropped for it: those of the session that asks.

        Raises:
            OutOfPages: The budget does not allow it. Nothing has changed, except that pools
                without used pages may be gone.
        """
        pool, num_pages = room.pool, room.num_pages
        missing = pool.pages.shortage(num_pages, promise_change=room.promise_change)
        if not missing:
            return
        wanted = max(missing, pool.pages.total // 4, MIN_GROWTH)
        for growth in (wanted, missing):
            if self._fits(pool, growth) or self._drop_unused(pool, growth, keep):
                total = pool.pages.total + growth
                with pool.lock:
                    for arena in pool.arenas.values():
                        arena.grow(total)
                pool.pages.grow(growth)
                return
        raise OutOfPages(
            f"{num_pages} pages needed, {missing} too many: {pool.pages.num_free} free, and "
            f"{missing * pool.page_bytes} bytes more do not fit: "
            f"{self.arena_bytes} of {self.budget_bytes} are taken",
            retry_delay_s=1.0,
            needed=num_pages,
            free=max(0, pool.pages.num_free),
        )

    def make_arena(
        self,
        pool: Pool,
        index: int,
        geometry: LayerGeometry,
        *,
        num_layers: int,
        keep: Collection[Pool],
    ) -> Arena:
        """Return a layer's arena, making it if need be.

        Args:
            num_layers: Layers that the pool will have, 0 if unknown. Only used to reserve address
                space sensibly.
            keep: As for `make_room`.

        Raises:
            OutOfPages: Its bytes exceed the budget. Nothing has changed, except that pools
                without used pages may be gone.
        """
        arena = pool.arenas.get(index)
        if arena is not None:
            return arena
        one = page_bytes(geometry, pool.pages.page_size)
        num_bytes = pool.pages.total * one
        if self.arena_bytes + num_bytes > self.budget_bytes:
            self._drop_all_unused(keep)
        if self.arena_bytes + num_bytes > self.budget_bytes:
            raise OutOfPages(
                f"an arena of {num_bytes} bytes for layer {index} does not fit: "
                f"{self.arena_bytes} of {self.budget_bytes} are taken",
                retry_delay_s=1.0,
                needed_bytes=num_bytes,
            )
        share = self.budget_bytes // max(1, num_layers or ASSUMED_LAYERS)
        arena = Arena(
            geometry,
            pool.pages.page_size,
            device=self._device,
            capacity=pool.pages.total,
            reserve=max(64, share // one),
        )
        pool.arenas[index] = arena
        return arena

    def check(self) -> None:
        for pool in self._pools.values():
            pool.check()
            assert pool.num_users > 0 or not pool.private, "a private pool without users"
        assert self.arena_bytes <= self.budget_bytes, "the arenas exceed the budget"
        numbers = [*self._given_back, *(pool.ordinal for pool in self._pools.values())]
        assert sorted(numbers) == list(range(len(numbers))), "ordinals are lost, or given twice"

    def _fits(self, pool: Pool, growth: int) -> bool:
        total = pool.pages.total + growth
        moved = max((arena.move_bytes(total) for arena in pool.arenas.values()), default=0)
        return self.arena_bytes + growth * pool.page_bytes + moved <= self.budget_bytes

    def _drop_unused(self, growing: Pool, growth: int, keep: Collection[Pool]) -> bool:
        """Drop pools without used pages one by one until a growth fits; return whether it does."""
        for pool in self._droppable(keep):
            self._drop(pool)
            if self._fits(growing, growth):
                return True
        return False

    def _drop_all_unused(self, keep: Collection[Pool]) -> None:
        for pool in self._droppable(keep):
            self._drop(pool)

    def _droppable(self, keep: Collection[Pool]) -> list[Pool]:
        return [pool for pool in self._pools.values() if pool not in keep and _is_droppable(pool)]

    def _drop(self, pool: Pool) -> None:
        """Give back a pool's bytes. Its users, if any, find it empty and let it grow again."""
        with pool.lock:
            pool.arenas.clear()
        pool.pages.clear()
        if pool.num_users == 0:
            self._forget(pool)

    def _forget(self, pool: Pool) -> None:
        del self._pools[pool.key]
        heapq.heappush(self._given_back, pool.ordinal)


def _is_droppable(pool: Pool) -> bool:
    return pool.pages.num_used == 0 and pool.pages.num_reserved == 0 and bool(pool.arenas)
