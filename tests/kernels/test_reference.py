"""The reference kernel, which is the specification, agrees with dense attention in float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.session import MaskKind
from kvservice_workers.attention.batch import AttentionParams, Partial
from kvservice_workers.attention.merge import merge, merge_sinks
from kvservice_workers.attention.reference import paged_attention
from kvservice_workers.attention.validate import validate, validate_values
from tests.oracles import causal_visible, chunk_visible, dense_attention, window_visible
from tests.strategies import AttentionCase, RowPlan, Shape, attention_cases, make_case

PLAIN = AttentionParams(scale=0.25)


def oracle(case: AttentionCase) -> Partial:
    """Attend densely over the case's plain keys and values, row by row."""
    outs, lses = [], []
    for index, row in enumerate(case.rows):
        stored = [p for p in range(row.start, row.stop) if p not in row.padding]
        queries = row.q_position + np.arange(row.num_queries)
        visible, added = dense_mask(case, index, queries, np.array(stored, dtype=np.int64))
        first = int(case.batch.q_starts[index])
        out, lse = dense_attention(
            case.q[first : first + row.num_queries].double().numpy(),
            case.k[index][stored].double().numpy(),
            case.v[index][stored].double().numpy(),
            visible,
            scale=case.params.scale,
            softcap=case.params.softcap,
            added=added,
            sinks=None if case.params.sinks is None else case.params.sinks.double().numpy(),
        )
        outs.append(out)
        lses.append(lse)
    out, lse = np.concatenate(outs), np.concatenate(lses)
    if case.batch.query_padding is not None:
        out[case.batch.query_padding] = 0
        lse[case.batch.query_padding] = -np.inf
    return Partial(torch.from_numpy(out), torch.from_numpy(lse))


def dense_mask(
    case: AttentionCase, index: int, queries: np.ndarray, stored: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return what one row's queries see, bool[heads, queries, stored], and what is added."""
    params, shape = case.params, (case.shape.num_q_heads, len(queries), len(stored))
    visible = np.ones(shape, dtype=bool)
    added = np.zeros(shape)
    if params.kind is MaskKind.CAUSAL:
        visible &= causal_visible(queries, stored)
        if params.window is not None:
            visible &= window_visible(queries, stored, params.window)
    if params.kind is MaskKind.CHUNK:
        assert params.chunk is not None
        visible &= chunk_visible(queries, stored, params.chunk, case.rows[index].chunk_origin)
    for block in (params.dense, params.bias):
        if block is None:
            continue
        assert params.column_starts is not None
        whole = block.double().numpy() if block.dtype != torch.bool else block.numpy()
        whole = np.broadcast_to(whole, (len(case.rows), case.shape.num_q_heads, *block.shape[2:]))[
            index, :, : len(queries)
        ]
        columns = stored - params.column_starts[index]
        inside = (columns >= 0) & (columns < block.shape[3])
        picked = np.zeros(shape) if block.dtype != torch.bool else np.zeros(shape, dtype=bool)
        picked[:, :, inside] = whole[:, :, columns[inside]]
        visible &= inside
        if block.dtype == torch.bool:
            visible &= picked
        else:
            added += picked
    return visible, added


def assert_close(actual: Partial, expected: Partial, tolerance: float) -> None:
    """Compare partials; infinities must be equal."""
    torch.testing.assert_close(
        actual.out.double(), expected.out.double(), atol=tolerance, rtol=tolerance
    )
    torch.testing.assert_close(
        actual.lse.double(), expected.lse.double(), atol=tolerance, rtol=tolerance
    )


@given(attention_cases(max_stored=24, max_queries=3))
def test_reference_equals_dense_float64(case: AttentionCase) -> None:
    """Every mask, bias, softcap, sinks, padding, hole and geometry, to 1e-12; NaN is never read."""
    validate(*case.arguments)
    validate_values(case.batch, case.k_pages.shape[0])
    assert_close(paged_attention(*case.arguments, dtype=torch.float64), oracle(case), 1e-12)


@given(attention_cases(max_stored=24, max_queries=3))
def test_reference_in_float32_is_close(case: AttentionCase) -> None:
    """Its default dtype is float32 and differs from float64 by rounding only."""
    partial = paged_attention(*case.arguments)
    assert partial.out.dtype == partial.lse.dtype == torch.float32
    assert_close(partial, oracle(case), 1e-5)


@pytest.mark.parametrize("window", [9, 10, 11])
def test_window_counts_the_query_itself(window: int) -> None:
    """A query at position 10 sees the newest `window` positions: 10 - window + 1 to 10."""
    row = RowPlan(0, 11, 1, 10)
    case = make_case([row], AttentionParams(scale=0.25, window=window))
    out, lse = paged_attention(*case.arguments, dtype=torch.float64)
    stored = list(range(11 - window, 11))
    expected = dense_attention(
        case.q.double().numpy(),
        case.k[0][stored].double().numpy(),
        case.v[0][stored].double().numpy(),
        np.ones((4, 1, window), dtype=bool),
        scale=0.25,
    )
    np.testing.assert_allclose(out, expected[0], atol=1e-12)
    np.testing.assert_allclose(lse, expected[1], atol=1e-12)


def test_chunks_are_counted_from_the_origin() -> None:
    """With chunk 4 and origin 3, position 6 begins no chunk, and position 7 does."""
    row = RowPlan(3, 12, 2, 6, chunk_origin=3)
    case = make_case([row], AttentionParams(scale=0.0, kind=MaskKind.CHUNK, chunk=4))
    _, lse = paged_attention(*case.arguments)
    # At scale 0 all scores are 0, so exp(lse) counts the positions seen: 3 to 6, then 7 alone.
    np.testing.assert_allclose(lse.exp()[:, 0], [4.0, 1.0], rtol=1e-6)


def test_full_sees_positions_after_the_query() -> None:
    """FULL is for cross attention: positions of queries mean nothing."""
    case = make_case([RowPlan(2, 12, 1, 0)], AttentionParams(scale=0.0, kind=MaskKind.FULL))
    np.testing.assert_allclose(paged_attention(*case.arguments).lse.exp()[0], 10.0, rtol=1e-6)


def test_rows_without_queries_or_positions() -> None:
    """Nothing asked: nothing answered. Nothing stored: out = 0 and lse = -inf."""
    rows = [RowPlan(0, 5, 0, 5), RowPlan(7, 7, 2, 7), RowPlan(0, 3, 1, 2)]
    case = make_case(rows, PLAIN)
    out, lse = paged_attention(*case.arguments)
    assert out.shape == (3, 4, 16)
    assert (out[:2] == 0).all()
    assert (lse[:2] == -math.inf).all()
    assert lse[2].isfinite().all()


def test_sinks_are_a_score_without_a_value() -> None:
    """A query that sees nothing has lse = sink; one that is padding has -inf all the same."""
    sinks = torch.tensor([0.5, -1.0, 2.0, -math.inf])
    case = make_case(
        [RowPlan(4, 4, 2, 4)],
        AttentionParams(scale=0.25, sinks=sinks),
        query_padding=np.array([False, True]),
    )
    out, lse = paged_attention(*case.arguments)
    assert (out == 0).all()
    assert torch.equal(lse[0], sinks)
    assert (lse[1] == -math.inf).all()


@given(attention_cases(max_stored=24, max_queries=3), st.lists(st.integers(0, 70), max_size=3))
def test_split_positions_merge_to_the_whole(case: AttentionCase, cuts: list[int]) -> None:
    """Partials over any cut of the positions, even within pages, merge to the partial of all."""
    sinks = case.params.sinks
    bare = replace(case.params, sinks=None)
    bounds = [0, *sorted(cuts), 10**6]
    parts = []
    for low, high in itertools.pairwise(bounds):
        starts = np.clip(case.batch.kv_starts, low, high)
        stops = np.clip(case.batch.kv_stops, low, high)
        batch = replace(case.batch, kv_starts=starts, kv_stops=np.maximum(starts, stops))
        part = case.with_params(bare).with_batch(batch)
        parts.append(paged_attention(*part.arguments, dtype=torch.float64))
    merged = merge(parts)
    if sinks is not None:
        merged = merge_sinks(merged, sinks)
        if case.batch.query_padding is not None:
            merged.lse[torch.from_numpy(case.batch.query_padding)] = -math.inf
    assert_close(merged, oracle(case), 1e-12)


def test_gqa_head_reads_its_group() -> None:
    """Query heads 0 and 1 of 4 read KV head 0; 2 and 3 read KV head 1."""
    case = make_case([RowPlan(0, 6, 1, 5)], PLAIN, Shape(num_kv_heads=2, group_size=2))
    whole = paged_attention(*case.arguments)
    page = int(case.batch.page_tables[0, 0])
    case.v_pages[page, 1] = 0
    changed = paged_attention(*case.arguments)
    assert torch.equal(whole.out[:, :2], changed.out[:, :2])
    assert (changed.out[:, 2:] == 0).all()
