"""Checks of what kernels are given: shapes and dtypes always, values where somebody asks."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from kvservice.core.errors import GeometryMismatch, InvalidRequest
from kvservice.core.geometry import HOLE, cdiv
from kvservice.core.session import MaskKind
from kvservice_workers.attention.batch import AttentionParams, PagedBatch

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


def validate(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    params: AttentionParams,
) -> None:
    """Check shapes, dtypes and scalars, without looking into any tensor or array.

    Raises:
        GeometryMismatch: The queries do not fit the arena.
        InvalidRequest: Anything else disagrees with what `PagedBatch` and `AttentionParams` say.
    """
    _check_arena(q, k_pages, v_pages, batch)
    _check_batch(batch, q.shape[0])
    _check_params(batch, params, q.shape[1])


def _check_arena(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch
) -> None:
    if q.ndim != 3 or k_pages.ndim != 4 or v_pages.ndim != 4:
        raise InvalidRequest(
            "q must have 3 dimensions and pages 4, "
            f"got q {tuple(q.shape)}, k {tuple(k_pages.shape)}, v {tuple(v_pages.shape)}"
        )
    heads, tokens = (2, 1) if batch.token_major else (1, 2)
    if k_pages.shape[:3] != v_pages.shape[:3] or k_pages.shape[tokens] != batch.page_size:
        layout = ["num_pages", "num_kv_heads", str(batch.page_size), "dim"]
        layout[1:3] = (layout[heads], layout[tokens])
        raise InvalidRequest(
            f"k and v pages must be [{', '.join(layout)}], "
            f"got {tuple(k_pages.shape)} and {tuple(v_pages.shape)}"
        )
    if q.dtype not in FLOATS or not q.dtype == k_pages.dtype == v_pages.dtype:
        raise GeometryMismatch(
            "q, k and v must be of one float dtype, "
            f"got {q.dtype}, {k_pages.dtype} and {v_pages.dtype}"
        )
    num_q_heads, num_kv_heads = q.shape[1], k_pages.shape[heads]
    if num_q_heads == 0 or num_q_heads % num_kv_heads:
        raise GeometryMismatch(
            f"{num_q_heads} query heads are not a multiple of {num_kv_heads} KV heads"
        )
    if q.shape[2] != k_pages.shape[3]:
        raise GeometryMismatch(f"q of dim {q.shape[2]} does not fit k of dim {k_pages.shape[3]}")


def _check_batch(batch: PagedBatch, num_queries: int) -> None:
    num_rows = batch.num_rows
    tables = batch.page_tables
    if tables.dtype != np.int32 or tables.ndim != 2 or tables.shape[0] != num_rows:
        raise InvalidRequest(
            f"page_tables must be i32[{num_rows}, max_pages], got {tables.dtype}{tables.shape}"
        )
    if not tables.flags.c_contiguous:
        raise InvalidRequest("page_tables must be C-contiguous")
    for name, array, size in (
        ("kv_starts", batch.kv_starts, num_rows),
        ("kv_stops", batch.kv_stops, num_rows),
        ("q_positions", batch.q_positions, num_rows),
        ("chunk_origins", batch.chunk_origins, num_rows),
        ("q_starts", batch.q_starts, num_rows + 1),
    ):
        _check_vector(name, array, size)
    if batch.num_queries != num_queries:
        raise InvalidRequest(f"the batch has {batch.num_queries} queries, q has {num_queries}")
    if batch.padding and len(batch.padding) != num_rows:
        raise InvalidRequest(f"padding must be of {num_rows} rows, got {len(batch.padding)}")
    mask = batch.query_padding
    if mask is not None and (mask.dtype != np.bool_ or mask.shape != (num_queries,)):
        raise InvalidRequest(
            f"query_padding must be bool[{num_queries}], got {mask.dtype}{mask.shape}"
        )


def _check_vector(name: str, array: npt.NDArray[np.int64], size: int) -> None:
    if array.dtype != np.int64 or array.shape != (size,) or not array.flags.c_contiguous:
        raise InvalidRequest(f"{name} must be i64[{size}], got {array.dtype}{array.shape}")


def _check_params(batch: PagedBatch, params: AttentionParams, num_q_heads: int) -> None:
    if not math.isfinite(params.scale):
        raise InvalidRequest(f"scale must be finite, got {params.scale}")
    if params.softcap is not None and not (math.isfinite(params.softcap) and params.softcap > 0):
        raise InvalidRequest(f"softcap must be positive and finite, got {params.softcap}")
    for name, value, kind in (
        ("window", params.window, MaskKind.CAUSAL),
        ("chunk", params.chunk, MaskKind.CHUNK),
    ):
        if value is not None and (value < 1 or params.kind is not kind):
            raise InvalidRequest(
                f"{name} must be at least 1 and belongs to a {kind.value} mask, "
                f"got {value} with {params.kind.value}"
            )
    if params.kind is MaskKind.CHUNK and params.chunk is None:
        raise InvalidRequest("a chunk mask needs a chunk")
    if (params.dense is not None) != (params.kind is MaskKind.DENSE):
        raise InvalidRequest("a dense mask needs a dense tensor, and no other mask may have one")
    sinks = params.sinks
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != (num_q_heads,)):
        raise InvalidRequest(
            f"sinks must be f32[{num_q_heads}], got {sinks.dtype}{tuple(sinks.shape)}"
        )
    for name, block in (("dense", params.dense), ("bias", params.bias)):
        if block is not None:
            _check_block(name, block, batch, params, num_q_heads)


def _check_block(
    name: str, block: torch.Tensor, batch: PagedBatch, params: AttentionParams, num_q_heads: int
) -> None:
    if block.dtype not in FLOATS and not (name == "dense" and block.dtype == torch.bool):
        raise InvalidRequest(f"{name} must be of a float dtype, or bool if a mask: {block.dtype}")
    num_indices = max(np.diff(batch.q_starts), default=0)
    if (
        block.ndim != 4
        or block.shape[0] not in (1, batch.num_rows)
        or block.shape[1] not in (1, num_q_heads)
        or block.shape[2] < num_indices
    ):
        raise InvalidRequest(
            f"{name} must be [1 or {batch.num_rows}, 1 or {num_q_heads}, at least {num_indices}, "
            f"columns], got {tuple(block.shape)}"
        )
    if params.column_starts is None:
        raise InvalidRequest(f"{name} needs column_starts")
    _check_vector("column_starts", params.column_starts, batch.num_rows)


def validate_values(batch: PagedBatch, num_pages: int) -> None:
    """Check the values in the batch's arrays; costs a pass over all pages of all rows.

    Workers make batches from their own tables and need not call this. Tests do, always.

    Raises:
        InvalidRequest: A value breaks what `PagedBatch` promises.
    """
    if batch.q_starts[0] != 0 or (np.diff(batch.q_starts) < 0).any():
        raise InvalidRequest("q_starts must rise from 0")
    if (batch.q_positions < 0).any():
        raise InvalidRequest("positions must be at least 0")
    for row in range(batch.num_rows):
        _check_row_values(batch, row, num_pages)


def _check_row_values(batch: PagedBatch, row: int, num_pages: int) -> None:
    start, stop = int(batch.kv_starts[row]), int(batch.kv_stops[row])
    if not 0 <= start <= stop:
        raise InvalidRequest(f"need 0 <= kv_start <= kv_stop, got {start} and {stop} in row {row}")
    if cdiv(stop, batch.page_size) > batch.page_tables.shape[1]:
        raise InvalidRequest(f"position {stop - 1} of row {row} is beyond its page table")
    padding = batch.padding[row] if batch.padding else None
    if padding is not None and (padding.dtype != np.uint8 or len(padding) < stop):
        raise InvalidRequest(f"padding of row {row} must be u8[at least {stop}]")
    for page_index in range(start // batch.page_size, cdiv(stop, batch.page_size)):
        first = max(start, page_index * batch.page_size)
        last = min(stop, (page_index + 1) * batch.page_size)
        if first == last:
            continue
        page = int(batch.page_tables[row, page_index])
        if page == HOLE and padding is not None and padding[first:last].all():
            continue
        if not 0 <= page < num_pages:
            raise InvalidRequest(
                f"row {row} has positions {first} to {last - 1} in page {page}, "
                f"which is none of {num_pages}"
            )
