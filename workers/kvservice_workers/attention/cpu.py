"""Attention on the CPU by torch: gather a row's pages once, then flash.

Flash serves plain masks; its query heads of one group are folded into rows, so that keys and
values are read once for a group. What is visible to all of a row's queries and the triangle of
its new tokens are attended separately and merged. Rows whose mask hides positions in the middle
go through matrix products.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kvservice.core.session import MaskKind
from kvservice_workers.attention import matmul
from kvservice_workers.attention.batch import AttentionParams, PagedBatch, Partial
from kvservice_workers.attention.merge import merge
from kvservice_workers.attention.rows import Row, gather_row, store_partial


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
        row = gather_row(q, k_pages, v_pages, batch, params, index)
        partial = None if row is None else _flash_row(row, params)
        if row is not None and partial is None:
            partial = matmul.attend_row(row, params)
        store_partial(batch, params, index, partial, result)


def _flash_row(row: Row, params: AttentionParams) -> Partial | None:
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


def _flash_all(row: Row, scale: float) -> Partial:
    """Attend from every query to every position: one read of K and V for each group of heads."""
    num_tokens, num_groups, group_size = row.num_tokens, row.num_groups, row.group_size
    q = row.q.reshape(num_tokens, num_groups, group_size, -1).permute(1, 2, 0, 3)
    folded = q.reshape(1, num_groups, group_size * num_tokens, -1)
    out, lse = _flash(folded, row.k.unsqueeze(0), row.v.unsqueeze(0), scale)
    return Partial(
        out.view(num_groups * group_size, num_tokens, -1).transpose(0, 1),
        lse.reshape(num_groups * group_size, num_tokens).transpose(0, 1),
    )


def _flash_triangle(row: Row, scale: float) -> Partial:
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
