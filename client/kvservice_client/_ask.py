"""What a caller asks of `Session.attend`, checked and packed. No session state is touched."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvservice.core.errors import GeometryMismatch, InvalidRequest
from kvservice.core.geometry import MAX_LAYERS, DType
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire.tensors import dtype_to_pb
from kvservice_client._arrays import (
    NUMPY_TYPES,
    HostArray,
    Kind,
    as_float32,
    to_host,
    to_int,
    to_ints,
)

Lengths = tuple[int, ...]
Packed = npt.NDArray[Any]  # [tokens, heads, dim], the tokens of all rows one after the other

FULL: Final = worker_pb2.Mask(kind=worker_pb2.MASK_KIND_FULL)
CAUSAL: Final = worker_pb2.Mask(kind=worker_pb2.MASK_KIND_CAUSAL)


@dataclass(slots=True)
class Tokens:
    """Keys and values of new tokens, packed.

    Fields:
        counts: Per row.
    """

    k: Packed
    v: Packed
    dtype: DType
    counts: Lengths


@dataclass(slots=True)
class Queries:
    """Queries, packed, and how their answer is to look.

    Fields:
        counts: Per row.
        packed: The caller gave them packed, and gets the answer packed.
    """

    q: Packed
    dtype: DType
    kind: Kind
    counts: Lengths
    packed: bool

    def shape_out(self, out: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a packed answer in the caller's form; a view."""
        if self.packed:
            return out
        rows = len(self.counts)
        by_row = out.reshape(rows, self.counts[0], *out.shape[1:])
        return by_row.transpose(0, 2, 1, 3)


@dataclass(slots=True)
class Scoring:
    """How scores are made, and what a query sees.

    Fields:
        num_columns: Of a dense mask or bias; None without.
        column_starts: As the caller gave them; None: the last column is the newest position.
        sinks: f32[heads].
    """

    mask: worker_pb2.Mask
    scale: float
    softcap: float | None
    sinks: npt.NDArray[np.float32] | None
    bias: types_pb2.Tensor | None
    num_columns: int | None
    column_starts: Lengths | None

    @property
    def is_causal(self) -> bool:
        """Whether no query sees positions after its own, whatever else it sees."""
        kinds = (worker_pb2.MASK_KIND_CAUSAL, worker_pb2.MASK_KIND_CHUNK)
        return self.mask.kind in kinds


@dataclass(slots=True)
class Ask:
    """One call of `Session.attend`, checked.

    Fields:
        tokens: None: only attend.
        pos: Per row: where the new tokens go. None: behind the row's end.
        query_positions: Per row. None: where the new tokens are, or the newest positions.
        partial: The answer is to be merged with attention to other positions.
        meanwhile: To be done by the caller's thread while the workers compute.
    """

    layer: int
    queries: Queries
    tokens: Tokens | None
    scoring: Scoring
    pos: Lengths | None
    query_positions: Lengths | None
    partial: bool = False
    meanwhile: Callable[[], None] | None = None


def read_ask(
    layer: int,
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    num_rows: int,
    counts: Any = None,
    pos: Any = None,
    query_positions: Any = None,
    **scoring: Any,
) -> Ask:
    """Check and pack the arguments of `Session.attend`; `scoring` as for `read_scoring`.

    Raises:
        InvalidRequest, GeometryMismatch: What is wrong, what was expected, and what was got.
    """
    check_layer(layer)
    given = None if counts is None else read_counts(counts, num_rows)
    queries = read_queries(q, num_rows, given)
    tokens = None
    if k is not None or v is not None:
        tokens = read_tokens(k, v, num_rows, given)
        check_agree(queries, tokens)
    elif pos is not None:
        raise InvalidRequest("pos goes with k and v; without them, say query_positions")
    return Ask(
        layer,
        queries,
        tokens,
        read_scoring(queries, **scoring),
        None if pos is None else read_positions(pos, num_rows),
        None
        if query_positions is None
        else read_positions(query_positions, num_rows, "query_positions"),
    )


def check_layer(layer: int) -> int:
    """Return a layer's number."""
    if type(layer) is not int or not 0 <= layer < MAX_LAYERS:
        raise InvalidRequest(f"layer must be an int from 0 to {MAX_LAYERS - 1}, got {layer!r}")
    return layer


def read_counts(counts: Any, num_rows: int) -> Lengths:
    """Return new tokens per row."""
    listed = tuple(to_ints(counts, "counts"))
    if len(listed) != num_rows:
        raise InvalidRequest(f"counts must have one entry per row, {num_rows}, got {len(listed)}")
    if min(listed) < 0 or not any(listed):
        raise InvalidRequest(f"counts must be at least 0, and one above 0, got {list(listed)}")
    return listed


def read_queries(q: Any, num_rows: int, counts: Lengths | None) -> Queries:
    """Check and pack q: [rows, heads, tokens, dim], or with counts [sum(counts), heads, dim]."""
    host = to_host(q, "q")
    data, given = _pack(host, "q", num_rows, counts)
    if host.dtype is DType.BOOL:
        raise InvalidRequest("q must be of a float dtype, got bool")
    return Queries(data, host.dtype, host.kind, given, counts is not None)


def read_tokens(k: Any, v: Any, num_rows: int, counts: Lengths | None) -> Tokens:
    """Check and pack k and v, shaped as q is, each with its own dim."""
    if k is None or v is None:
        raise InvalidRequest("k and v go together: one of them is None")
    host_k, host_v = to_host(k, "k"), to_host(v, "v")
    packed_k, counts_k = _pack(host_k, "k", num_rows, counts)
    packed_v, counts_v = _pack(host_v, "v", num_rows, counts)
    if counts_k != counts_v or packed_k.shape[1] != packed_v.shape[1]:
        raise InvalidRequest(
            f"k and v must have the same rows, heads and tokens, got k {list(host_k.shape)} and "
            f"v {list(host_v.shape)}"
        )
    if host_k.dtype is not host_v.dtype or host_k.dtype is DType.BOOL:
        raise InvalidRequest(
            f"k and v must be of one float dtype, got {host_k.dtype.value} and {host_v.dtype.value}"
        )
    return Tokens(packed_k, packed_v, host_k.dtype, counts_k)


def check_agree(queries: Queries, tokens: Tokens) -> None:
    """Check q against k: dtype, dim, and heads in groups.

    Raises:
        GeometryMismatch: They do not fit.
    """
    if queries.dtype is not tokens.dtype:
        raise GeometryMismatch(
            f"q must have k's dtype, {tokens.dtype.value}, got {queries.dtype.value}"
        )
    _, num_q_heads, q_dim = queries.q.shape
    _, num_kv_heads, k_dim = tokens.k.shape
    if q_dim != k_dim:
        raise GeometryMismatch(f"q must have k's dim, {k_dim}, got {q_dim}")
    if not num_kv_heads or num_q_heads % num_kv_heads:
        raise GeometryMismatch(
            f"q's heads must be a multiple of k's, {num_kv_heads}, got {num_q_heads}"
        )


def read_scoring(
    queries: Queries,
    *,
    mask: Any,
    window: int | None,
    chunk: int | None,
    scale: float | None,
    softcap: float | None,
    sinks: Any = None,
    bias: Any = None,
    column_starts: Any = None,
) -> Scoring:
    """Check what is said about scores and masks.

    Raises:
        InvalidRequest: Out of range, of a wrong shape, or contradicting each other.
    """
    num_heads, dim = queries.q.shape[1:]
    if scale is None:
        scale = 1.0 / math.sqrt(dim)
    elif not math.isfinite(scale):
        raise InvalidRequest(f"scale must be finite, got {scale}")
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise InvalidRequest(f"softcap must be finite and above 0, got {softcap}")
    scoring = Scoring(
        mask=_read_mask(mask, window, chunk, queries),
        scale=float(scale),
        softcap=None if softcap is None else float(softcap),
        sinks=None if sinks is None else _read_sinks(sinks, num_heads),
        bias=None if bias is None else _read_columns(bias, "bias", queries),
        num_columns=None,
        column_starts=None,
    )
    _read_column_starts(scoring, column_starts, len(queries.counts))
    return scoring


def read_positions(pos: Any, num_rows: int, name: str = "pos") -> Lengths:
    """Return a position per row, of one int for all rows or one for each."""
    one = to_int(pos)
    listed = [one] * num_rows if one is not None else to_ints(pos, name)
    if len(listed) != num_rows or min(listed) < 0:
        raise InvalidRequest(
            f"{name} must be a position, at least 0, or one for each of {num_rows} rows, "
            f"got {pos!r}"
        )
    return tuple(listed)


def set_tensor(tensor: types_pb2.Tensor, data: npt.NDArray[Any], dtype: DType) -> None:
    """Fill in a message's tensor; copies the bytes, row-major."""
    tensor.dtype = dtype_to_pb(dtype)
    tensor.shape[:] = data.shape
    tensor.data = data.tobytes()


def tensor_data(tensor: types_pb2.Tensor, dtype: DType) -> npt.NDArray[Any]:
    """Return a message's tensor as an array of its own; one copy."""
    return np.frombuffer(bytearray(tensor.data), NUMPY_TYPES[dtype]).reshape(tensor.shape)


def _pack(
    host: HostArray, name: str, num_rows: int, counts: Lengths | None
) -> tuple[Packed, Lengths]:
    data = host.data
    if counts is not None:
        if data.ndim != 3 or data.shape[0] != sum(counts):
            raise InvalidRequest(
                f"{name} must be [{sum(counts)} tokens, heads, dim] with these counts, "
                f"got {list(data.shape)}"
            )
        return data, counts
    if data.ndim != 4 or data.shape[0] != num_rows or not data.shape[2]:
        raise InvalidRequest(
            f"{name} must be [{num_rows} rows, heads, tokens, dim] with at least one token, "
            f"got {list(data.shape)}"
        )
    rows, heads, tokens, dim = data.shape
    packed = data.transpose(0, 2, 1, 3).reshape(rows * tokens, heads, dim)
    return packed, (tokens,) * rows


def _read_mask(
    mask: Any, window: int | None, chunk: int | None, queries: Queries
) -> worker_pb2.Mask:
    name = mask if isinstance(mask, str) else "an array"
    if window is not None and name != "causal":
        raise InvalidRequest(f'window goes with mask "causal", got {name!r}')
    if (chunk is not None) != (name == "chunk"):
        raise InvalidRequest(f'chunk goes with mask "chunk", and only with it, got {name!r}')
    for value, what in ((window, "window"), (chunk, "chunk")):
        if value is not None and value < 1:
            raise InvalidRequest(f"{what} must be at least 1, got {value}")
    if name == "causal":
        if window is None:
            return CAUSAL
        return worker_pb2.Mask(kind=worker_pb2.MASK_KIND_CAUSAL, window=window)
    if name == "full":
        return FULL
    if chunk is not None:
        return worker_pb2.Mask(kind=worker_pb2.MASK_KIND_CHUNK, chunk=chunk)
    if isinstance(mask, str):
        raise InvalidRequest(f'mask must be "causal", "full", "chunk" or an array, got {mask!r}')
    dense = _read_columns(mask, "mask", queries, may_be_bool=True)
    return worker_pb2.Mask(kind=worker_pb2.MASK_KIND_DENSE, dense=dense)


def _read_columns(
    array: Any, name: str, queries: Queries, *, may_be_bool: bool = False
) -> types_pb2.Tensor:
    host = to_host(array, name)
    if len(set(queries.counts)) > 1:
        raise InvalidRequest(f"{name} needs the same number of queries in every row")
    rows, heads = len(queries.counts), queries.q.shape[1]
    shape = host.shape
    fits = (
        len(shape) == 4
        and shape[0] in (1, rows)
        and shape[1] in (1, heads)
        and shape[2] == queries.counts[0]
        and (may_be_bool or host.dtype is not DType.BOOL)
    )
    if not fits:
        kinds = "bool or float" if may_be_bool else "float"
        raise InvalidRequest(
            f"{name} must be {kinds} [{rows} or 1 rows, {heads} or 1 heads, "
            f"{queries.counts[0]} queries, columns], got {host.dtype.value} {list(shape)}"
        )
    tensor = types_pb2.Tensor()
    set_tensor(tensor, host.data, host.dtype)
    return tensor


def _read_sinks(sinks: Any, num_heads: int) -> npt.NDArray[np.float32]:
    host = to_host(sinks, "sinks")
    if host.shape != (num_heads,) or host.dtype is DType.BOOL:
        raise InvalidRequest(
            f"sinks must be a float for each of {num_heads} heads, got {host.dtype.value} "
            f"{list(host.shape)}"
        )
    return as_float32(host)


def _read_column_starts(scoring: Scoring, column_starts: Any, num_rows: int) -> None:
    tensors: Sequence[types_pb2.Tensor] = [
        tensor
        for tensor in (scoring.bias, scoring.mask.dense if _is_dense(scoring.mask) else None)
        if tensor is not None
    ]
    if not tensors:
        if column_starts is not None:
            raise InvalidRequest("column_starts goes with a mask array or bias, and neither is set")
        return
    columns = {tensor.shape[3] for tensor in tensors}
    scoring.num_columns = max(columns)
    if column_starts is not None:
        listed = (
            [column_starts] * num_rows
            if type(column_starts) is int
            else to_ints(column_starts, "column_starts")
        )
        if len(listed) != num_rows:
            raise InvalidRequest(f"column_starts must have {num_rows} entries, got {len(listed)}")
        scoring.column_starts = tuple(listed)
    elif len(columns) > 1:
        raise InvalidRequest(
            f"mask and bias have {sorted(columns)} columns: say column_starts, or give them alike"
        )


def _is_dense(mask: worker_pb2.Mask) -> bool:
    return mask.kind == worker_pb2.MASK_KIND_DENSE
