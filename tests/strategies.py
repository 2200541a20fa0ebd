"""Generated inputs: ragged batches over a poisoned arena, by hand or by Hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from kvservice.core.geometry import HOLE, cdiv
from kvservice.core.session import MaskKind
from kvservice_workers.attention.batch import AttentionParams, PagedBatch

BAD_PAGES = (2**31 - 1, -(2**31), HOLE, -77, 10**6)
"""What page tables hold where nobody may look: ids that do not exist."""

PAGE_SIZES = (1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32)


@dataclass(frozen=True)
class RowPlan:
    """One row of a batch: positions [start, stop) stored, `padding` of them not to be seen."""

    start: int
    stop: int
    num_queries: int
    q_position: int
    padding: frozenset[int] = frozenset()
    chunk_origin: int = 0


@dataclass(frozen=True)
class Shape:
    """Geometry of an arena, and how many query heads read it."""

    page_size: int = 16
    num_kv_heads: int = 2
    group_size: int = 2
    k_dim: int = 16
    v_dim: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def num_q_heads(self) -> int:
        return self.num_kv_heads * self.group_size


@dataclass(frozen=True)
class AttentionCase:
    """What a kernel is given, and the same keys and values without pages, for the oracle.

    k, v: per row, float[stop, num_kv_heads, dim], by position; NaN where nothing may be read.
    """

    shape: Shape
    rows: tuple[RowPlan, ...]
    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    batch: PagedBatch
    params: AttentionParams
    k: tuple[torch.Tensor, ...] = field(repr=False)
    v: tuple[torch.Tensor, ...] = field(repr=False)

    @property
    def arguments(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch, AttentionParams]:
        return self.q, self.k_pages, self.v_pages, self.batch, self.params

    def with_params(self, params: AttentionParams) -> AttentionCase:
        return replace(self, params=params)

    def with_batch(self, batch: PagedBatch) -> AttentionCase:
        return replace(self, batch=batch)


def make_case(
    rows: Sequence[RowPlan],
    params: AttentionParams,
    shape: Shape = Shape(),
    *,
    seed: int = 0,
    make_holes: bool = True,
    query_padding: npt.NDArray[np.bool_] | None = None,
) -> AttentionCase:
    """Lay out rows over randomly ordered pages, in an arena that is NaN wherever nobody owns it."""
    rng = np.random.default_rng(seed)
    page_size, heads, dtype = shape.page_size, shape.num_kv_heads, shape.dtype
    num_pages = sum(cdiv(row.stop, page_size) for row in rows) + 3
    free = list(rng.permutation(num_pages))
    tables = rng.choice(BAD_PAGES, (len(rows), num_pages)).astype(np.int32)
    arenas = [
        torch.full((num_pages, heads, page_size, dim), torch.nan, dtype=dtype)
        for dim in (shape.k_dim, shape.v_dim)
    ]
    plain: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for row_index, row in enumerate(rows):
        for rows_values, dim in zip(plain, (shape.k_dim, shape.v_dim), strict=True):
            values = rng.standard_normal((row.stop, heads, dim))
            values[[p for p in range(row.stop) if p < row.start or p in row.padding]] = np.nan
            rows_values.append(torch.from_numpy(values).to(dtype))
        for page_index in range(row.start // page_size, cdiv(row.stop, page_size)):
            first = max(row.start, page_index * page_size)
            last = min(row.stop, (page_index + 1) * page_size)
            if first >= last:
                continue
            if make_holes and row.padding.issuperset(range(first, last)):
                tables[row_index, page_index] = HOLE
                continue
            page = tables[row_index, page_index] = free.pop()
            for arena, rows_values in zip(arenas, plain, strict=True):
                begin = first - page_index * page_size
                stored = rows_values[row_index][first:last].transpose(0, 1)
                arena[page, :, begin : begin + last - first] = stored
    q_starts = np.cumsum([0] + [row.num_queries for row in rows])
    q = rng.standard_normal((int(q_starts[-1]), shape.num_q_heads, shape.k_dim))
    batch = PagedBatch(
        page_size=page_size,
        page_tables=tables,
        kv_starts=_int64(row.start for row in rows),
        kv_stops=_int64(row.stop for row in rows),
        q_starts=q_starts.astype(np.int64),
        q_positions=_int64(row.q_position for row in rows),
        chunk_origins=_int64(row.chunk_origin for row in rows),
        padding=_padding(rows),
        query_padding=query_padding,
    )
    return AttentionCase(
        shape, tuple(rows), torch.from_numpy(q).to(dtype), arenas[0], arenas[1], batch, params,
        tuple(plain[0]), tuple(plain[1]),
    )  # fmt: skip


def _int64(values: object) -> npt.NDArray[np.int64]:
    return np.array(list(values), dtype=np.int64)  # type: ignore[call-overload]


def _padding(rows: Sequence[RowPlan]) -> tuple[npt.NDArray[np.uint8] | None, ...]:
    if not any(row.padding for row in rows):
        return ()
    return tuple(
        np.array([p in row.padding for p in range(row.stop)], dtype=np.uint8)
        if row.padding
        else None
        for row in rows
    )


@st.composite
def row_plans(draw: st.DrawFn, *, max_stored: int = 70, max_queries: int = 5) -> RowPlan:
    """Draw one row: extents that start mid-page, empty rows, queries anywhere, padding."""
    start = draw(st.integers(0, 40))
    stop = start + draw(st.integers(0, max_stored))
    num_queries = draw(st.integers(0, max_queries))
    at_the_end = max(0, stop - num_queries)
    q_position = draw(st.one_of(st.just(at_the_end), st.integers(0, stop + 8)))
    padding: set[int] = set()
    for _ in range(draw(st.sampled_from((0, 0, 1, 3)))):
        first = draw(st.integers(start, max(start, stop - 1)))
        padding.update(range(first, min(stop, first + draw(st.integers(1, 40)))))
    origin = draw(st.integers(0, start))
    return RowPlan(start, stop, num_queries, q_position, frozenset(padding), origin)


@st.composite
def shapes(
    draw: st.DrawFn, *, dtypes: Sequence[torch.dtype] = (torch.float32,), dims: Sequence[int] = ()
) -> Shape:
    """Draw a geometry: GQA, MQA and MHA, odd page sizes and dims, K and V of different dims."""
    some_dims = st.sampled_from(tuple(dims) or (1, 3, 8, 16, 24, 64, 80, 128))
    k_dim = draw(some_dims)
    return Shape(
        page_size=draw(st.sampled_from(PAGE_SIZES)),
        num_kv_heads=draw(st.integers(1, 3)),
        group_size=draw(st.integers(1, 5)),
        k_dim=k_dim,
        v_dim=draw(st.one_of(st.just(k_dim), some_dims)),
        dtype=draw(st.sampled_from(tuple(dtypes))),
    )


@st.composite
def attention_cases(
    draw: st.DrawFn,
    *,
    kinds: Sequence[MaskKind] = tuple(MaskKind),
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    max_stored: int = 70,
    max_queries: int = 5,
    plain: bool = False,
) -> AttentionCase:
    """Draw a whole batch with its mask. `plain`: no bias (a dense mask belongs to `kinds`)."""
    rows = draw(
        st.lists(row_plans(max_stored=max_stored, max_queries=max_queries), min_size=1, max_size=4)
    )
    shape = draw(shapes(dtypes=dtypes))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    kind = draw(st.sampled_from(tuple(kinds)))
    has_bias = not plain and draw(st.booleans())
    num_queries = sum(row.num_queries for row in rows)
    params = AttentionParams(
        scale=draw(st.sampled_from((shape.k_dim**-0.5, 0.3, -0.25, 0.0))),
        kind=kind,
        window=draw(st.one_of(st.none(), st.integers(1, 90))) if kind is MaskKind.CAUSAL else None,
        chunk=draw(st.integers(1, 50)) if kind is MaskKind.CHUNK else None,
        dense=draw(_dense(rows, shape, rng, boolean=None)) if kind is MaskKind.DENSE else None,
        bias=draw(_dense(rows, shape, rng, boolean=False)) if has_bias else None,
        column_starts=_int64(max(0, row.start - int(rng.integers(-2, 6))) for row in rows)
        if has_bias or kind is MaskKind.DENSE
        else None,
        softcap=draw(st.sampled_from((None, None, 0.5, 20.0))),
        sinks=torch.from_numpy(rng.standard_normal(shape.num_q_heads).astype(np.float32))
        if draw(st.booleans())
        else None,
    )
    query_padding = rng.random(num_queries) < 0.3 if draw(st.booleans()) else None
    holes = draw(st.booleans())
    return make_case(rows, params, shape, seed=seed, make_holes=holes, query_padding=query_padding)


@st.composite
def _dense(
    draw: st.DrawFn,
    rows: Sequence[RowPlan],
    shape: Shape,
    rng: np.random.Generator,
    *,
    boolean: bool | None,
) -> torch.Tensor:
    """Draw a dense mask (boolean: None = either kind), shared or not by rows and by heads."""
    size = (
        draw(st.sampled_from((1, len(rows)))),
        draw(st.sampled_from((1, shape.num_q_heads))),
        max((row.num_queries for row in rows), default=0),
        draw(st.integers(0, max((row.stop for row in rows), default=0) + 3)),
    )
    seen = rng.random(size) < 0.7
    if boolean is None and draw(st.booleans()):
        return torch.from_numpy(seen)
    added = np.where(seen, rng.standard_normal(size), -np.inf).astype(np.float32)
    return torch.from_numpy(added)
