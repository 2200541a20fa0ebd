"""Attention on a GPU by FlashAttention, as torch offers it: `torch.nn.attention.varlen`.

Rows are told apart by what their queries see. Where that is a run of positions that begins with a
page, FlashAttention reads the pages in place by their table, if it can for this page size; where
not, a run's keys and values are gathered first. A row whose mask is none of FlashAttention's goes
through matrix products. What is worked out about a batch is kept with it: its layers share it.

FlashAttention aligns its diagonal at the bottom right: the last query of a row stands at the last
key that the row is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvservice.core.geometry import cdiv
from kvservice.core.session import MaskKind
from kvservice_workers.attention import matmul
from kvservice_workers.attention.batch import AttentionParams, PagedBatch, Partial
from kvservice_workers.attention.merge import merge_sinks
from kvservice_workers.attention.rows import lowest_visible, seen_positions

Ints = npt.NDArray[np.int64]
Varlen = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""`torch.nn.attention.varlen.varlen_attn` with `return_aux=AuxRequest(lse=True)`: out
[queries, heads, dim] and the natural log-sum-exp, f32[heads, queries]."""

MAX_DIM: Final = 256
DTYPES: Final = frozenset({torch.float16, torch.bfloat16})


def serves(k_pages: torch.Tensor, v_pages: torch.Tensor, params: AttentionParams) -> bool:
    """Return whether FlashAttention can do a call: half precision, and scores as they are."""
    dim = k_pages.shape[3]
    return (
        k_pages.dtype in DTYPES
        and params.softcap is None
        and params.dense is None
        and params.bias is None
        and dim == v_pages.shape[3]
        and dim % 8 == 0
        and dim <= MAX_DIM
    )


def attend(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    rows: Ints | None,
    result: Partial,
    *,
    varlen: Varlen | None = None,
    in_place: bool | None = None,
) -> None:
    """Attend for some rows of a batch, sinks and query padding included.

    Args:
        q, k_pages, v_pages, batch, params: As for `reference.paged_attention`, on one device, with
            token-major pages, and such that `serves` says yes.
        rows: i64[any]. The rows to do, None for all; the queries of all others are left alone in
            `result`.
        result: f32. Written for every query of `rows`, whatever it held.
        varlen: What attends. None: torch's.
        in_place: Whether it reads pages by their table. None: found out by trying, once.

    Numerics:
        FlashAttention's: products in q's dtype, sums in float32, `out` rounded to q's dtype.
    """
    varlen = varlen or torch_varlen
    if in_place is None:
        in_place = reads_pages(q.device, q.dtype, batch.page_size, q.shape[2])
    key = ("cuda", params.kind, params.window, params.chunk, in_place)
    plan: Plan | None = batch.memo.get(key) if rows is None else None
    if plan is None:
        plan = plan_batch(batch, params, rows, q.device, in_place=in_place)
        if rows is None:
            batch.memo[key] = plan
    for queries in plan.nothing:
        result.out[queries] = 0
        result.lse[queries] = -torch.inf
    for part in plan.parts:
        _attend_part(q, k_pages, v_pages, params.scale, part, varlen, result)
    for queries in plan.queries:
        _finish(params, queries, result)
    if plan.query_padding is not None:
        result.out[plan.query_padding] = 0
        result.lse[plan.query_padding] = -torch.inf
    if len(plan.others):
        matmul.attend(q, k_pages, v_pages, batch, params, plan.others, result)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that one call of FlashAttention serves.

    Fields:
        queries: Of these rows, one row's after the other: a slice, or i64[num_queries].
        window: As FlashAttention takes it: how far a query sees to its left and right; -1: all.
        q_starts, k_starts: i32[num_rows + 1]. Where each row's queries and keys begin.
        lengths: i32[num_rows]. Keys of each row.
        tables: i32[num_rows, max_pages], if pages are read in place; else None.
        slots: Page and offset of each key, i64[num_keys] both, if they are gathered; else None.
    """

    queries: Any
    window: tuple[int, int]
    q_starts: torch.Tensor
    k_starts: torch.Tensor
    lengths: torch.Tensor
    max_queries: int
    max_keys: int
    tables: torch.Tensor | None
    slots: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Who does what.

    Fields:
        parts: Calls of FlashAttention.
        nothing: Queries that see nothing, as slices, a row each.
        queries: Those of `parts` and `nothing` together, as slices or i64 arrays.
        others: Rows for matrix products.
        query_padding: i64, queries of `parts` and `nothing` that are padding; None: none.
    """

    parts: tuple[Part, ...]
    nothing: tuple[slice, ...]
    queries: tuple[Any, ...]
    others: Ints
    query_padding: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Run:
    """What a row's queries see. positions: None: [start, stop), all of them."""

    row: int
    start: int
    stop: int
    window: tuple[int, int]
    positions: Ints | None


FULL: Final = (-1, -1)
CAUSAL: Final = (-1, 0)


def plan_batch(
    batch: PagedBatch,
    params: AttentionParams,
    rows: Ints | None,
    device: torch.device,
    *,
    in_place: bool,
) -> Plan:
    """Say who does what for some rows of a batch, None for all."""
    groups: dict[tuple[tuple[int, int], bool], list[_Run]] = {}
    nothing: list[slice] = []
    others: list[int] = []
    for row in range(batch.num_rows) if rows is None else rows.tolist():
        queries = slice(int(batch.q_starts[row]), int(batch.q_starts[row + 1]))
        if queries.start == queries.stop:
            continue
        positions = seen_positions(batch, params, row, queries.stop - queries.start)
        if not len(positions):
            nothing.append(queries)
            continue
        run = _run_of(batch, params, row, queries.stop - queries.start, positions)
        if run is None:
            others.append(row)
            continue
        by_table = in_place and run.positions is None and run.start % batch.page_size == 0
        groups.setdefault((run.window, by_table), []).append(run)
    parts = tuple(
        _part(batch, runs, device, by_table=by_table) for (_, by_table), runs in groups.items()
    )
    padded = None
    if batch.query_padding is not None:
        hidden = batch.query_padding.copy()
        for row in others:  # matrix products see to their own
            hidden[batch.q_starts[row] : batch.q_starts[row + 1]] = False
        if rows is not None:
            mine = np.zeros(batch.num_queries, np.bool_)
            for row in rows.tolist():
                mine[batch.q_starts[row] : batch.q_starts[row + 1]] = True
            hidden &= mine
        padded = _to(np.flatnonzero(hidden), device) if hidden.any() else None
    return Plan(
        parts,
        tuple(nothing),
        (*(part.queries for part in parts), *nothing),
        np.array(others, np.int64),
        padded,
    )


def _run_of(
    batch: PagedBatch, params: AttentionParams, row: int, num_queries: int, positions: Ints
) -> _Run | None:
    """Return what a row's queries see, in FlashAttention's terms; None: it has none for it.

    Args:
        positions: Rising, never empty: what any of the queries may see.
    """
    first = int(batch.q_positions[row])
    newest = first + num_queries - 1
    start, stop = int(positions[0]), int(positions[-1]) + 1
    without_gaps = stop - start == len(positions)
    kept = None if without_gaps else positions
    if params.kind is MaskKind.FULL:
        return _Run(row, start, stop, FULL, kept)
    same_start = lowest_visible(params, newest, int(batch.chunk_origins[row])) <= start
    if same_start and stop <= first + 1:
        return _Run(row, start, stop, FULL, kept)
    # From here on the diagonal matters, so that the new tokens must be there, without gaps.
    num_new = len(positions) - int(np.searchsorted(positions, first))
    if stop != newest + 1 or num_new != num_queries:
        return None
    if same_start:
        return _Run(row, start, stop, CAUSAL, kept)
    if params.window is not None and without_gaps:
        return _Run(row, start, stop, (params.window - 1, 0), None)
    return None


def _part(batch: PagedBatch, runs: list[_Run], device: torch.device, *, by_table: bool) -> Part:
    rows = np.array([run.row for run in runs])
    counts = batch.q_starts[rows + 1] - batch.q_starts[rows]
    lengths = np.array(
        [run.stop - run.start if run.positions is None else len(run.positions) for run in runs]
    )
    tables, slots = None, None
    if by_table:
        size = batch.page_size
        table = np.zeros((len(runs), cdiv(int(lengths.max()), size)), np.int32)
        for index, run in enumerate(runs):
            ids = batch.page_tables[run.row, run.start // size : cdiv(run.stop, size)]
            table[index, : len(ids)] = ids
        tables = _to(table, device)
    else:
        slots = _slots(batch, runs, device)
    return Part(
        queries=_queries(batch, rows, device),
        window=runs[0].window,
        q_starts=_starts(counts, device),
        k_starts=_starts(lengths, device),
        lengths=_to(lengths.astype(np.int32), device),
        max_queries=int(counts.max()),
        max_keys=int(lengths.max()),
        tables=tables,
        slots=slots,
    )


def _slots(
    batch: PagedBatch, runs: list[_Run], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    pages, offsets = [], []
    for run in runs:
        where = np.arange(run.start, run.stop) if run.positions is None else run.positions
        pages.append(batch.page_tables[run.row, where // batch.page_size].astype(np.int64))
        offsets.append(where % batch.page_size)
    return _to(np.concatenate(pages), device), _to(np.concatenate(offsets), device)


def _queries(batch: PagedBatch, rows: Ints, device: torch.device) -> Any:
    starts, stops = batch.q_starts[rows], batch.q_starts[rows + 1]
    if (starts[1:] == stops[:-1]).all():
        return slice(int(starts[0]), int(stops[-1]))
    ranges = [np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)]
    return _to(np.concatenate(ranges), device)


def _attend_part(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    scale: float,
    part: Part,
    varlen: Varlen,
    result: Partial,
) -> None:
    k, v = k_pages, v_pages
    options: dict[str, Any] = {}
    if part.slots is not None:
        k, v = k_pages[part.slots], v_pages[part.slots]
    else:
        options = {"seqused_k": part.lengths, "block_table": part.tables}
    out, lse = varlen(
        q[part.queries],
        k,
        v,
        part.q_starts,
        part.k_starts,
        part.max_queries,
        part.max_keys,
        scale=scale,
        window_size=part.window,
        enable_gqa=q.shape[1] != k.shape[-2],
        **options,
    )
    result.out[part.queries] = out.float()
    result.lse[part.queries] = lse.transpose(0, 1)


def _finish(params: AttentionParams, queries: Any, result: Partial) -> None:
    if params.sinks is None:
        return
    merged = merge_sinks(Partial(result.out[queries], result.lse[queries]), params.sinks)
    result.out[queries] = merged.out
    result.lse[queries] = merged.lse


def torch_varlen(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend by torch's FlashAttention."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    answer: Any = varlen_attn(*arguments, return_aux=AuxRequest(lse=True), **options)
    out, lse = answer
    return out, lse


@lru_cache(maxsize=256)
def reads_pages(device: torch.device, dtype: torch.dtype, page_size: int, dim: int) -> bool:
    """Return whether torch's FlashAttention reads pages of this size in place on this device.

    FlashAttention 2 wants pages of a multiple of 256 tokens, later ones less; what torch was built
    with is found out by asking.
    """
    pages = torch.zeros(1, page_size, 1, dim, dtype=dtype, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    try:
        torch_varlen(
            pages[0, :1], pages, pages, starts, starts, 1, 1, seqused_k=one, block_table=table
        )
        torch.cuda.synchronize(device)
    except (RuntimeError, ValueError):
        return False
    return True


def _starts(counts: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    return _to(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), device)


def _to(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
