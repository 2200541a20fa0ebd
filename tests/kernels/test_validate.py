"""Static checks refuse what does not fit; value checks find what a kernel would stumble on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvservice.core.errors import GeometryMismatch, InvalidRequest
from kvservice.core.session import MaskKind
from kvservice_workers.attention.batch import AttentionParams, PagedBatch
from kvservice_workers.attention.validate import validate, validate_values
from tests.strategies import AttentionCase, RowPlan, make_case

PARAMS = AttentionParams(scale=0.25)


def case() -> AttentionCase:
    """Two rows of 2 queries each, one with padding."""
    rows = [RowPlan(0, 20, 2, 18), RowPlan(3, 40, 2, 38, frozenset({5}))]
    return make_case(rows, PARAMS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, q=c.q.double()), "one float dtype"),
        (lambda c: replace(c, q=c.q[..., :8]), "does not fit k"),
        (lambda c: replace(c, q=c.q[:, :3]), "not a multiple"),
    ],
)
def test_queries_that_do_not_fit_the_arena(
    change: Callable[[AttentionCase], AttentionCase], message: str
) -> None:
    """A caller's geometry differs from the session's: GEOMETRY_MISMATCH."""
    with pytest.raises(GeometryMismatch, match=message):
        validate(*change(case()).arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, q=c.q[0]), "q must have 3 dimensions"),
        (lambda c: replace(c, v_pages=c.v_pages[:, :1]), "k and v pages must be"),
        (lambda c: replace(c, q=c.q[:3]), "batch has 4 queries, q has 3"),
    ],
)
def test_tensors_that_disagree(
    change: Callable[[AttentionCase], AttentionCase], message: str
) -> None:
    """Shapes are named in the message."""
    with pytest.raises(InvalidRequest, match=message):
        validate(*change(case()).arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 8}, "num_kv_heads, 8, dim"),
        ({"page_tables": np.zeros((2, 3), dtype=np.int64)}, "page_tables must be i32"),
        ({"page_tables": np.zeros((2, 6), dtype=np.int32)[:, ::2]}, "C-contiguous"),
        ({"kv_starts": np.zeros(2, dtype=np.int32)}, "kv_starts must be i64"),
        ({"kv_stops": np.zeros(3, dtype=np.int64)}, "kv_stops must be i64"),
        ({"padding": (None,)}, "padding must be of 2 rows"),
        ({"query_padding": np.zeros(3, dtype=bool)}, "query_padding must be bool"),
    ],
)
def test_batches_that_disagree(changes: dict[str, object], message: str) -> None:
    """Every array has one dtype and one size."""
    wrong = case()
    with pytest.raises(InvalidRequest, match=message):
        validate(*wrong.with_batch(replace(wrong.batch, **changes)).arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": float("nan")}, "scale must be finite"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"window": 0}, "window must be at least 1"),
        ({"kind": MaskKind.FULL, "window": 4}, "belongs to a causal mask"),
        ({"chunk": 4}, "belongs to a chunk mask"),
        ({"kind": MaskKind.CHUNK}, "needs a chunk"),
        ({"kind": MaskKind.DENSE}, "needs a dense tensor"),
        ({"sinks": torch.zeros(3)}, "sinks must be f32"),
        ({"sinks": torch.zeros(4, dtype=torch.float64)}, "sinks must be f32"),
        ({"bias": torch.zeros(1, 1, 2, 9)}, "needs column_starts"),
        ({"bias": torch.zeros(1, 1, 1, 9)}, "bias must be"),
        ({"bias": torch.zeros(1, 1, 2, 9, dtype=torch.bool)}, "float dtype"),
        ({"kind": MaskKind.DENSE, "dense": torch.zeros(3, 1, 2, 9)}, "dense must be"),
    ],
)
def test_params_that_disagree(changes: dict[str, object], message: str) -> None:
    """Scalars are in range, and each mask has what it needs and nothing else's."""
    wrong = case()
    with pytest.raises(InvalidRequest, match=message):
        validate(*wrong.with_params(replace(wrong.params, **changes)).arguments)  # type: ignore[arg-type]


def _broken(**changes: object) -> PagedBatch:
    return replace(case().batch, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (_broken(q_starts=np.array([0, 5, 4])), "q_starts must rise"),
        (_broken(q_positions=np.array([0, -1])), "positions must be at least 0"),
        (_broken(kv_starts=np.array([21, 3])), "kv_start <= kv_stop"),
        (_broken(kv_stops=np.array([20, 400])), "beyond its page table"),
        (_broken(padding=(None, np.zeros(39, dtype=np.uint8))), "padding of row 1"),
        (_broken(kv_stops=np.array([90, 40])), "which is none of"),
    ],
)
def test_values_that_would_lead_a_kernel_astray(batch: PagedBatch, message: str) -> None:
    """Pages that do not exist, and ranges that no table covers."""
    with pytest.raises(InvalidRequest, match=message):
        validate_values(batch, case().k_pages.shape[0])


def test_holes_are_allowed_where_all_is_padding() -> None:
    """A page that would hold only padding is not allocated."""
    holed = make_case([RowPlan(0, 40, 1, 39, frozenset(range(16, 32)))], PARAMS)
    validate_values(holed.batch, holed.k_pages.shape[0])
    batch = replace(holed.batch, padding=())
    with pytest.raises(InvalidRequest, match="which is none of"):
        validate_values(batch, holed.k_pages.shape[0])
