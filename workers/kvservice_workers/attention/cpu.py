"""Attention on the CPU by torch: gather a row's pages once, then flash, or matrix products.

Flash serves plain masks; its query heads of one group are folded into rows, so that keys and
values are read once for a group. What is visible to all of a row's queries and the triangle of
its new tokens are attended separately and merged. Everything that changes scores or hides
positions in the middle goes through matrix products, a bounded number of queries at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kvservice.core.geometry import cdiv
from kvservice.core.session import MaskKind
from kvservice_workers.attention.batch import AttentionParams, PagedBatch, Partial
from kvservice_workers.attention.merge import merge, merge_sinks

MAX_SCORES = 1 << 23
"""Scores that matrix products hold at a time (float32: 32 MiB, and a few copies of that)."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One row's queries, and those of its keys and values that any of them may see, in float32.

    q: [num_tokens, num_q_heads, k_dim]; k, v: [num_kv_heads, num_stored, dim].
    positions: i64[num_stored], rising, of k and v; query i stands at q_position + i.
    """

    index: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    positions: npt.NDArray[np.int64]
    q_position: int
    origin: int

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def num_groups(self) -> int:
        return self.k.shape[0]

    @property
    def group_size(self) -> int:
        return self.q.shape[1] // self.k.shape[0]

    def visible_from(self, params: AttentionParams, query_position: int) -> int:
        return lowest_visible(params, query_position, self.origin)


def lowest_visible(params: AttentionParams, query_position: int, origin: int) -> int:
    """Return the lowest position that the mask's kind lets a query see; 0 or less: all."""
    if params.window is not None:
        return query_position - params.window + 1
    if params.chunk is not None:
        return origin + (query_position - origin) // params.chunk * params.chunk
    return 0


def attend_flash(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    rows: npt.NDArray[np.int64] | None,
    result: Partial,
) -> None:
    """Attend by torch's flash kernel; rows whose mask it does not know by matrix products.

    Args:
        q, k_pages, v_pages, batch, params: As for `reference.paged_attention`, without softcap,
            bias and dense mask; K and V of equal dim.
        rows: i64[any]. The rows to do, None for all; the queries of all others are left alone in
            `result`.
        result: f32. Written for every query of `rows`, whatever it held.

    Numerics:
        Everything in float32: keys and values of a shorter dtype are converted after gathering,
        which costs less than flash takes longer on them (measured; without AMX), and leaves no
        rounding to be merged. float64 in float64, rounded at the end.
    """
    for index in range(batch.num_rows) if rows is None else rows.tolist():
        row = _row(q, k_pages, v_pages, batch, params, index)
        partial = None if row is None else _flash_row(row, params)
        if row is not None and partial is None:
            partial = _matmul_row(row, params)
        _store(batch, params, index, partial, result)


def attend_matmul(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    rows: npt.NDArray[np.int64] | None,
    result: Partial,
) -> None:
    """Attend by matrix products: every mask, softcap, bias and dtype.

    Args:
        As for `attend_flash`, with nothing excepted.

    Numerics:
        Everything in float32; float64 inputs in float64, rounded at the end.
    """
    for index in range(batch.num_rows) if rows is None else rows.tolist():
        row = _row(q, k_pages, v_pages, batch, params, index)
        partial = None if row is None else _matmul_row(row, params)
        _store(batch, params, index, partial, result)


def _row(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    index: int,
) -> _Row | None:
    """Return a row, gathered; None: it has no queries, or no positions that these might see."""
    first, last = int(batch.q_starts[index]), int(batch.q_starts[index + 1])
    q_position, origin = int(batch.q_positions[index]), int(batch.chunk_origins[index])
    positions = _positions(batch, params, index, last - first)
    if first == last or not len(positions):
        return None
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = (_gather(pages, batch, index, positions).to(dtype) for pages in (k_pages, v_pages))
    return _Row(index, q[first:last].to(dtype), k, v, positions, q_position, origin)


def _positions(
    batch: PagedBatch, params: AttentionParams, index: int, num_tokens: int
) -> npt.NDArray[np.int64]:
    """Return the stored positions of a row that are no padding and in reach of its queries."""
    start, stop = int(batch.kv_starts[index]), int(batch.kv_stops[index])
    q_position, origin = int(batch.q_positions[index]), int(batch.chunk_origins[index])
    start = max(start, lowest_visible(params, q_position, origin))
    if params.kind in (MaskKind.CAUSAL, MaskKind.CHUNK):
        stop = min(stop, q_position + num_tokens)
    padding = batch.padding[index] if batch.padding else None
    if padding is None or start >= stop:
        return np.arange(start, stop, dtype=np.int64)
    return start + np.flatnonzero(padding[start:stop] == 0)


def _gather(
    pages: torch.Tensor, batch: PagedBatch, index: int, positions: npt.NDArray[np.int64]
) -> torch.Tensor:
    """Return [num_kv_heads, len(positions), dim], touching only pages that hold one of them."""
    page_size = batch.page_size
    first, stop = int(positions[0]), int(positions[-1]) + 1
    if stop - first == len(positions):
        first_page = first // page_size
        ids = batch.page_tables[index, first_page : cdiv(stop, page_size)]
        # By the first dimension: by another, torch would copy the whole arena first.
        whole = pages.index_select(0, torch.from_numpy(ids.astype(np.int64)))
        begin = first - first_page * page_size
        return whole.transpose(0, 1).flatten(1, 2)[:, begin : begin + len(positions)]
    ids = batch.page_tables[index, positions // page_size].astype(np.int64)
    picked = pages[torch.from_numpy(ids), :, torch.from_numpy(positions % page_size)]
    return picked.transpose(0, 1)


def _store(
    batch: PagedBatch,
    params: AttentionParams,
    index: int,
    partial: Partial | None,
    result: Partial,
) -> None:
    """Write a row's partial (None: nothing seen), adding sinks and blanking padding."""
    queries = slice(int(batch.q_starts[index]), int(batch.q_starts[index + 1]))
    out, lse = result.out[queries], result.lse[queries]
    if partial is None:
        partial = Partial(torch.zeros_like(out), torch.full_like(lse, -torch.inf))
    if params.sinks is not None:
        partial = merge_sinks(partial, params.sinks)
    out.copy_(partial.out)
    lse.copy_(partial.lse)
    if batch.query_padding is not None:
        padding = torch.from_numpy(batch.query_padding[queries])
        out[padding] = 0
        lse[padding] = -torch.inf


def _flash_row(row: _Row, params: AttentionParams) -> Partial | None:
    """Attend one row by flash; None: its mask hides more than the triangle above the diagonal."""
    if params.kind is MaskKind.FULL:
        return _flash_all(row, params.scale)
    newest = row.q_position + row.num_tokens - 1
    if row.visible_from(params, newest) > row.positions[0] or row.positions[0] > row.q_position:
        return None
    # With one query nothing is above the diagonal; else the new tokens are cut off, and must be
    # there without gaps, since flash counts its diagonal by columns.
    num_past = len(row.positions)
    if row.num_tokens > 1:
        num_past = int(np.searchsorted(row.positions, row.q_position))
        num_new = len(row.positions) - num_past
        if num_new == 0:
            return _flash_all(row, params.scale)
        if int(row.positions[-1]) - row.q_position + 1 != num_new:
            return None
    partials = []
    if num_past > 0:
        past = replace(row, k=row.k[:, :num_past], v=row.v[:, :num_past])
        partials.append(_flash_all(past, params.scale))
    if num_past < len(row.positions):
        new = replace(row, k=row.k[:, num_past:], v=row.v[:, num_past:])
        partials.append(_flash_triangle(new, params.scale))
    return partials[0] if len(partials) == 1 else merge(partials)


def _flash_all(row: _Row, scale: float) -> Partial:
    """Attend from every query to every position: one read of K and V for each group of heads."""
    num_tokens, num_groups, group_size = row.num_tokens, row.num_groups, row.group_size
    q = row.q.reshape(num_tokens, num_groups, group_size, -1).permute(1, 2, 0, 3)
    folded = q.reshape(1, num_groups, group_size * num_tokens, -1)
    out, lse = _flash(folded, row.k.unsqueeze(0), row.v.unsqueeze(0), scale)
    return Partial(
        out.view(num_groups * group_size, num_tokens, -1).transpose(0, 1),
        lse.reshape(num_groups * group_size, num_tokens).transpose(0, 1),
    )


def _flash_triangle(row: _Row, scale: float) -> Partial:
    """Attend from query i to positions 0 to i of those given."""
    num_tokens, num_groups, group_size = row.num_tokens, row.num_groups, row.group_size
    q = row.q.reshape(num_tokens, num_groups, group_size, -1).permute(1, 2, 0, 3)
    k, v = (x.unsqueeze(1).expand(-1, group_size, -1, -1) for x in (row.k, row.v))
    if scale <= 0:  # flash hides by -inf before it scales, so that 0 gives NaN and -1 gives +inf
        q, scale = q * scale, 1.0
    out, lse = _flash(q, k, v, scale, is_causal=True)
    return Partial(out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2))


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, scale=scale
    )
    return out, lse


def _matmul_row(row: _Row, params: AttentionParams) -> Partial:
    """Attend one row by matrix products, a bounded number of queries at a time."""
    step = max(1, MAX_SCORES // (row.q.shape[1] * len(row.positions)))
    parts = [
        _matmul_queries(row, params, first, min(first + step, row.num_tokens))
        for first in range(0, row.num_tokens, step)
    ]
    return Partial(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


def _matmul_queries(row: _Row, params: AttentionParams, first: int, last: int) -> Partial:
    """Attend from queries first to last - 1 of a row."""
    begin, end = _reach(row, params, first, last)
    num_tokens, num_heads, num_groups = last - first, row.q.shape[1], row.num_groups
    q = row.q[first:last].reshape(num_tokens, num_groups, row.group_size, -1)
    q = q.permute(1, 2, 0, 3).reshape(num_groups, row.group_size * num_tokens, -1)
    k, v = row.k[:, begin:end], row.v[:, begin:end]

    scores = (q @ k.transpose(1, 2)).view(num_heads, num_tokens, end - begin).mul_(params.scale)
    if params.softcap is not None:
        scores.div_(params.softcap).tanh_().mul_(params.softcap)
    _hide(scores, row, params, first, begin)
    for block in (params.dense, params.bias):
        if block is not None:
            _add_block(scores, block, row, params, first, begin)

    highest = (
        scores.amax(-1, keepdim=True) if end > begin else scores.new_zeros(*scores.shape[:2], 1)
    )
    highest = torch.where(highest == -torch.inf, 0.0, highest)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = weights.view(num_groups, row.group_size * num_tokens, end - begin) @ v
    out = out.view(num_heads, num_tokens, -1) / torch.where(total == 0, 1.0, total)
    lse = (highest + total.log()).squeeze(-1)
    return Partial(out.transpose(0, 1), lse.transpose(0, 1))


def _reach(row: _Row, params: AttentionParams, first: int, last: int) -> tuple[int, int]:
    """Return the half-open range of columns (of k and v) that some query of a range may see."""
    if params.kind not in (MaskKind.CAUSAL, MaskKind.CHUNK):
        return 0, len(row.positions)
    lowest = row.visible_from(params, row.q_position + first)
    begin, end = np.searchsorted(row.positions, (lowest, row.q_position + last))
    return int(begin), max(int(begin), int(end))


def _hide(scores: torch.Tensor, row: _Row, params: AttentionParams, first: int, begin: int) -> None:
    """Set what the mask's kind hides to -inf. Column c of scores is column begin + c of k."""
    if params.kind not in (MaskKind.CAUSAL, MaskKind.CHUNK):
        return
    positions = row.positions[begin : begin + scores.shape[2]]
    queries = row.q_position + first + np.arange(scores.shape[1])
    lowest = np.array([row.visible_from(params, int(query)) for query in queries])
    hidden = (positions > queries[:, None]) | (positions < lowest[:, None])
    if hidden.any():
        scores.masked_fill_(torch.from_numpy(hidden), -torch.inf)


def _add_block(
    scores: torch.Tensor,
    block: torch.Tensor,
    row: _Row,
    params: AttentionParams,
    first: int,
    begin: int,
) -> None:
    """Add a dense mask or bias to the scores; positions outside of its columns become hidden."""
    assert params.column_starts is not None, "validated: dense masks and biases have column_starts"
    columns = row.positions[begin : begin + scores.shape[2]] - params.column_starts[row.index]
    outside = torch.from_numpy((columns < 0) | (columns >= block.shape[3]))
    scores.masked_fill_(outside, -torch.inf)
    if block.shape[3] == 0:
        return
    of_row = block[row.index if block.shape[0] > 1 else 0, :, first : first + scores.shape[1]]
    picked = of_row[..., torch.from_numpy(columns.clip(0, block.shape[3] - 1))]
    if block.dtype == torch.bool:
        scores.masked_fill_(~picked, -torch.inf)
    else:
        scores.add_(picked)
