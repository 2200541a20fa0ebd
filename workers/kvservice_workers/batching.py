"""From a session's rows to what kernels are told: where tokens go, and what queries look at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvservice.core.geometry import HOLE
from kvservice_workers.attention.batch import PagedBatch
from kvservice_workers.attention.native import Slots
from kvservice_workers.layer_group import LayerGroup
from kvservice_workers.padding import RowPadding
from kvservice_workers.session_state import WorkerSession


def token_slots(group: LayerGroup, positions: Sequence[int], counts: Sequence[int]) -> Slots:
    """Return pages and offsets of rows' new tokens, one row after the other.

    Tokens in holes (padding) are left out; the third array says which ones are left, or is None
    if all are.
    """
    size = group.page_size
    table = group.table_array()
    rows = np.repeat(np.arange(len(counts)), counts)
    where = np.concatenate(
        [np.arange(p, p + n, dtype=np.int64) for p, n in zip(positions, counts, strict=True)]
    )
    return slots_at(table, size, rows, where)


def slots_at(
    table: npt.NDArray[np.int32],
    page_size: int,
    rows: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
) -> Slots:
    """Return pages and offsets of positions; see `token_slots`."""
    index, offsets = np.divmod(positions, page_size)
    width = table.shape[1]
    if index.max(initial=0) < width:  # mostly: pages were provided
        pages = table[rows, index].astype(np.int64)
    else:
        pages = np.where(index < width, table[rows, np.minimum(index, width - 1)], HOLE)
        pages = pages.astype(np.int64)
    present = pages != HOLE
    if present.all():
        return pages, offsets, None
    kept = np.flatnonzero(present)
    return pages[kept], offsets[kept], kept


def paged_batch(
    session: WorkerSession,
    group: LayerGroup,
    lengths: Sequence[int],
    query_counts: Sequence[int],
    query_positions: Sequence[int],
    *,
    token_major: bool,
) -> PagedBatch:
    """Return what a kernel needs to know of the rows, with `lengths` stored."""
    kv_stops = np.array(lengths, np.int64)
    leading = [padding.leading for padding in session.padding]
    starts = [
        min(length, max(session.start_of(row), leading[row], group.evicted[row]))
        for row, length in enumerate(lengths)
    ]
    bits = [
        _bits(padding, length) for padding, length in zip(session.padding, lengths, strict=True)
    ]
    q_starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(query_counts, out=q_starts[1:])
    return PagedBatch(
        page_size=group.page_size,
        page_tables=group.table_array(),
        kv_starts=np.array(starts, np.int64),
        kv_stops=kv_stops,
        q_starts=q_starts,
        q_positions=np.array(query_positions, np.int64),
        chunk_origins=np.array(leading, np.int64),
        padding=tuple(bits) if any(row is not None for row in bits) else (),
        query_padding=_query_padding(session, query_counts, query_positions),
        token_major=token_major,
    )


def _bits(padding: RowPadding, length: int) -> npt.NDArray[np.uint8] | None:
    """Return padding by position, for `length` positions; None if all of it is leading."""
    if padding.bits is None:
        return None
    bits = np.zeros(max(length, len(padding.bits)), np.uint8)
    bits[: len(padding.bits)] = np.frombuffer(padding.bits, np.uint8)
    return bits


def _query_padding(
    session: WorkerSession, query_counts: Sequence[int], query_positions: Sequence[int]
) -> npt.NDArray[np.bool_] | None:
    """Return which queries are padding, or None if none is."""
    parts: list[npt.NDArray[np.bool_]] = []
    for padding, count, first in zip(session.padding, query_counts, query_positions, strict=True):
        where = np.arange(first, first + count, dtype=np.int64)
        mine = where < padding.leading
        if padding.bits is not None:
            bits = np.frombuffer(padding.bits, np.uint8)
            known = where < len(bits)
            mine[known] |= bits[where[known]] != 0
        parts.append(mine)
    joined = np.concatenate(parts)
    return joined if joined.any() else None
