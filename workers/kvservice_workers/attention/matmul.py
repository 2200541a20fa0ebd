"""Attention by matrix products: every mask, every change of scores, every dtype, any device.

A row's pages are gathered once; scores are made for a bounded number of queries at a time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvservice.core.session import MaskKind
from kvservice_workers.attention.batch import AttentionParams, PagedBatch, Partial
from kvservice_workers.attention.rows import Row, gather_row, store_partial

MAX_SCORES = 1 << 23
"""Scores that matrix products hold at a time (float32: 32 MiB, and a few copies of that)."""


def attend(
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
        q, k_pages, v_pages, batch, params: As for `reference.paged_attention`, on any device.
        rows: i64[any]. The rows to do, None for all; the queries of all others are left alone in
            `result`.
        result: f32. Written for every query of `rows`, whatever it held.

    Numerics:
        Everything in float32; float64 inputs in float64, rounded at the end.
    """
    for index in range(batch.num_rows) if rows is None else rows.tolist():
        row = gather_row(q, k_pages, v_pages, batch, params, index)
        partial = None if row is None else attend_row(row, params)
        store_partial(batch, params, index, partial, result)


def attend_row(row: Row, params: AttentionParams) -> Partial:
    """Attend one row by matrix products, a bounded number of queries at a time."""
    step = max(1, MAX_SCORES // (row.q.shape[1] * len(row.positions)))
    parts = [
        _matmul_queries(row, params, first, min(first + step, row.num_tokens))
        for first in range(0, row.num_tokens, step)
    ]
    return Partial(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


def _matmul_queries(row: Row, params: AttentionParams, first: int, last: int) -> Partial:
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


def _reach(row: Row, params: AttentionParams, first: int, last: int) -> tuple[int, int]:
    """Return the half-open range of columns (of k and v) that some query of a range may see."""
    if params.kind not in (MaskKind.CAUSAL, MaskKind.CHUNK):
        return 0, len(row.positions)
    lowest = row.visible_from(params, row.q_position + first)
    begin, end = np.searchsorted(row.positions, (lowest, row.q_position + last))
    return int(begin), max(int(begin), int(end))


def _hide(scores: torch.Tensor, row: Row, params: AttentionParams, first: int, begin: int) -> None:
    """Set what the mask's kind hides to -inf. Column c of scores is column begin + c of k."""
    if params.kind not in (MaskKind.CAUSAL, MaskKind.CHUNK):
        return
    positions = row.positions[begin : begin + scores.shape[2]]
    queries = row.q_position + first + np.arange(scores.shape[1])
    lowest = np.array([row.visible_from(params, int(query)) for query in queries])
    hidden = (positions > queries[:, None]) | (positions < lowest[:, None])
    if hidden.any():
        scores.masked_fill_(torch.from_numpy(hidden).to(scores.device), -torch.inf)


def _add_block(
    scores: torch.Tensor,
    block: torch.Tensor,
    row: Row,
    params: AttentionParams,
    first: int,
    begin: int,
) -> None:
    """Add a dense mask or bias to the scores; positions outside of its columns become hidden."""
    assert params.column_starts is not None, "validated: dense masks and biases have column_starts"
    columns = row.positions[begin : begin + scores.shape[2]] - params.column_starts[row.index]
    outside = torch.from_numpy((columns < 0) | (columns >= block.shape[3])).to(scores.device)
    scores.masked_fill_(outside, -torch.inf)
    if block.shape[3] == 0:
        return
    of_row = block[row.index if block.shape[0] > 1 else 0, :, first : first + scores.shape[1]]
    picked = of_row[..., torch.from_numpy(columns.clip(0, block.shape[3] - 1)).to(block.device)]
    if block.dtype == torch.bool:
        scores.masked_fill_(~picked, -torch.inf)
    else:
        scores.add_(picked)
