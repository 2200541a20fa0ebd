"""The specification of attention over pages: slow, obvious, exact. Every kernel is tested on it."""

from __future__ import annotations

import math

import torch

from kvservice.core.session import MaskKind
from kvservice_workers.attention.batch import AttentionParams, PagedBatch, Partial


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    *,
    dtype: torch.dtype = torch.float32,
) -> Partial:
    """Attend from queries to the keys and values that this worker holds, one query at a time.

    Each row may have only some of its positions here (an extent). The result is therefore a
    partial: merge the partials of all extents with `merge`, in any order, to get attention over
    the whole sequence. Sinks, if given, are counted in, so give them to one of the calls at most.

    Args:
        q: float[num_queries, num_q_heads, k_dim]. The queries of all rows, one after the other.
        k_pages: same dtype, [num_pages, num_kv_heads, page_size, k_dim]. One layer of an arena.
            Slots of padding and of positions that no row has may hold anything, NaN included.
        v_pages: same dtype, [num_pages, num_kv_heads, page_size, v_dim]. Likewise.
        batch: Which pages and positions each row has, and which queries. See `PagedBatch`.
        params: Scale, mask and all that changes scores. See `AttentionParams`.
        dtype: What is computed in and returned; float64 to measure errors with.

    Returns:
        Partial(out, lse), fresh.
        out: dtype[num_queries, num_q_heads, v_dim], normalised over the positions seen here.
        lse: dtype[num_queries, num_q_heads], natural log of the sum of exp(scores).

    Numerics:
        Inputs are converted to `dtype` first; nothing is rounded in between. A query that sees no
        position, of a row without positions, or that is padding gets `out = 0` and `lse = -inf`,
        which `merge` treats as an empty set. With sinks, a query that sees no position gets
        `out = 0` and `lse` = its head's sink; one that is padding still gets -inf.
        Query head h reads KV head h // (num_q_heads // num_kv_heads)   (GQA).

    Effects:
        None.

    Not checked:
        Anything. See `validate.validate` and `validate.validate_values`.
    """
    num_queries, num_q_heads, _ = q.shape
    group_size = num_q_heads // k_pages.shape[1]
    out = torch.zeros(num_queries, num_q_heads, v_pages.shape[3], dtype=dtype)
    lse = torch.full((num_queries, num_q_heads), -math.inf, dtype=dtype)
    for row in range(batch.num_rows):
        positions = _stored_positions(batch, row)
        first_query = int(batch.q_starts[row])
        for query in range(first_query, int(batch.q_starts[row + 1])):
            if batch.query_padding is not None and batch.query_padding[query]:
                continue
            index = query - first_query
            for head in range(num_q_heads):
                kv_head = head // group_size
                scores, values = [], []
                for position in positions:
                    added = _added_score(batch, params, row, index, head, position)
                    if added == -math.inf:
                        continue
                    page = int(batch.page_tables[row, position // batch.page_size])
                    offset = position % batch.page_size
                    k = k_pages[page, kv_head, offset].to(dtype)
                    score = params.scale * torch.dot(q[query, head].to(dtype), k)
                    if params.softcap is not None:
                        score = params.softcap * torch.tanh(score / params.softcap)
                    scores.append(score + added)
                    values.append(v_pages[page, kv_head, offset].to(dtype))
                if params.sinks is not None and params.sinks[head] > -math.inf:
                    scores.append(params.sinks[head].to(dtype))
                    values.append(torch.zeros(v_pages.shape[3], dtype=dtype))
                if scores:
                    weights = torch.stack(scores)
                    lse[query, head] = torch.logsumexp(weights, 0)
                    out[query, head] = torch.softmax(weights, 0) @ torch.stack(values)
    return Partial(out, lse)


def _stored_positions(batch: PagedBatch, row: int) -> list[int]:
    """Return the positions of the row that may be attended to at all."""
    padding = batch.padding[row] if batch.padding else None
    stored = range(int(batch.kv_starts[row]), int(batch.kv_stops[row]))
    return [position for position in stored if padding is None or not padding[position]]


def _added_score(
    batch: PagedBatch, params: AttentionParams, row: int, index: int, head: int, position: int
) -> float:
    """Return what mask and bias add to one score; -inf: the query does not see the position."""
    query_position = int(batch.q_positions[row]) + index
    if not _sees(params, query_position, position, int(batch.chunk_origins[row])):
        return -math.inf
    added = 0.0
    for block in (params.dense, params.bias):
        if block is None:
            continue
        assert params.column_starts is not None, "dense masks and biases come with column_starts"
        column = position - int(params.column_starts[row])
        if not 0 <= column < block.shape[3]:
            return -math.inf
        of_row = block[row if block.shape[0] > 1 else 0]
        entry = of_row[head if block.shape[1] > 1 else 0, index, column].item()
        if block.dtype == torch.bool:
            entry = 0.0 if entry else -math.inf
        added += entry
    return added


def _sees(params: AttentionParams, query_position: int, position: int, origin: int) -> bool:
    """Return whether the rule of the mask kind lets a query see a position."""
    if params.kind in (MaskKind.FULL, MaskKind.DENSE):
        return True
    if position > query_position:
        return False
    if params.kind is MaskKind.CAUSAL:
        return params.window is None or position > query_position - params.window
    assert params.chunk is not None, "validated: a chunk mask has a chunk"
    return (position - origin) // params.chunk == (query_position - origin) // params.chunk
