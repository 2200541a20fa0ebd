"""Sessions and a worker's numbers, as they are reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from itertools import islice

from kvservice.core.geometry import HOLE
from kvservice.core.session import (
    MAX_PADDING_RANGES,
    Extent,
    PoolStats,
    RowRange,
    SessionInfo,
    SessionSpec,
    WorkerStats,
)
from kvservice_workers.counters import (
    DISCREPANCIES,
    FAILURE_REASONS,
    FREE_REASONS,
    MOVED,
    REPLAYED,
    Counters,
)
from kvservice_workers.layer_group import LayerGroup
from kvservice_workers.pools import Pool, PoolSet
from kvservice_workers.session_state import WorkerSession
from kvservice_workers.worker_config import WorkerConfig


def session_info(
    config: WorkerConfig, session: WorkerSession, *, with_padding: bool = False
) -> SessionInfo:
    """Return what is said of a session to callers. The worker's lock is held."""
    padding = _told_padding(session) if with_padding else ()
    return SessionInfo(
        session_id=session.key[1],
        epoch=session.epoch,
        step=session.last_step,
        spec=_spec_now(session),
        extents=(
            Extent(
                worker_id=config.worker_id,
                address=config.address,
                incarnation=config.incarnation,
                starts=() if session.starts is None else tuple(session.starts),
                stops=() if session.starts is None else tuple(session.longest_of_all()),
                followed_by=session.followed_by,
                group=session.group,
                replaces=session.replaces,
                stay=session.stay,
            ),
        ),
        lengths=tuple(
            tuple(session.layer_lengths(layer))
            for layer in range(max(session.lengths, default=-1) + 1)
        ),
        padding=padding or (),
        padding_unlisted=padding is None,
        last_write=session.last_write,
        current_step=0 if session.step is None else session.step.number,
        same_since_epoch=session.same_since_epoch,
    )


def _spec_now(session: WorkerSession) -> SessionSpec:
    spec, num_rows = session.spec, session.num_rows
    return spec if spec.num_rows == num_rows else replace(spec, num_rows=num_rows)


def _told_padding(session: WorkerSession) -> tuple[RowRange, ...] | None:
    """Return all padding; None if there is too much to be told."""
    ranges = (
        RowRange(row, start, stop)
        for row, padding in enumerate(session.padding)
        for start, stop in padding.ranges()
    )
    told = tuple(islice(ranges, MAX_PADDING_RANGES + 1))
    return told if len(told) <= MAX_PADDING_RANGES else None


def worker_stats(
    config: WorkerConfig,
    sessions: Collection[WorkerSession],
    pools: PoolSet,
    counters: Counters,
    *,
    draining: bool,
    num_arriving: int,
) -> WorkerStats:
    """Return a worker's numbers. The worker's lock is held, so they are of one moment."""
    tokens: Counter[int] = Counter()
    for session in sessions:
        for group in session.groups.values():
            tokens[group.pool.ordinal] += _stored_tokens(session, group)
    failures = {name: counters.allocation_failures[name] for name in FAILURE_REASONS}
    return WorkerStats(
        worker_id=config.worker_id,
        incarnation=config.incarnation,
        address=config.address,
        device=config.device,
        budget_bytes=config.budget_bytes,
        arena_bytes=pools.arena_bytes,
        used_bytes=pools.used_bytes,
        num_sessions=len(sessions),
        pools=tuple(_pool_stats(pool, tokens[pool.ordinal]) for pool in pools),
        page_allocations=counters.page_allocations,
        page_frees={name: counters.page_frees[name] for name in FREE_REASONS},
        allocation_failures=failures,
        appended_tokens=counters.appended_tokens,
        popped_tokens=counters.popped_tokens,
        appended_bytes=counters.appended_bytes,
        read_bytes=counters.read_bytes,
        lease_expirations=counters.lease_expirations,
        draining=draining,
        replays={name: counters.replays[name] for name in REPLAYED},
        stale_epochs=counters.stale_epochs,
        page_discrepancies={name: counters.page_discrepancies[name] for name in DISCREPANCIES},
        attention_seconds=counters.timings.attention_seconds.snapshot(),
        attention_rows=counters.timings.attention_rows.snapshot(),
        session_pages=counters.timings.session_pages.snapshot(),
        moves={name: counters.moves[name] for name in MOVED},
        moved_bytes=counters.moved_bytes,
        handover_seconds=counters.timings.handover_seconds.snapshot(),
        num_arriving=num_arriving,
    )


def _stored_tokens(session: WorkerSession, group: LayerGroup) -> int:
    """Return the tokens that a session stores in a group's pages."""
    size = group.page_size
    total = 0
    for row, table in enumerate(group.tables):
        if not table.num_held:
            continue
        start, stop = session.start_of(row), session.longest(row)
        total += table.num_held * size
        if table.page_at(start // size) != HOLE:
            total -= start % size
        if table.page_at((stop - 1) // size) != HOLE:
            total -= -stop % size
    return total


def _pool_stats(pool: Pool, num_tokens: int) -> PoolStats:
    return PoolStats(
        pool=pool.ordinal,
        page_size=pool.pages.page_size,
        page_bytes=pool.page_bytes,
        used_pages=pool.pages.num_used,
        reserved_pages=pool.pages.num_reserved,
        free_pages=pool.pages.num_free,
        num_tokens=num_tokens,
    )
