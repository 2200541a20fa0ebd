"""What a kernel is told: which pages each row has, which positions count, and what a query sees.

A `PagedBatch` is worked out once per step and layer group; all layers of the group share it. An
`AttentionParams` is what one call adds. Tensors come beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvservice.core.session import MaskKind


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The stored positions and the queries of a ragged batch of rows.

    Row r has positions [kv_starts[r], kv_stops[r]) to attend to, except where `padding[r]` says
    so. Position p lies in page `page_tables[r, p // page_size]` at offset `p % page_size`. Inside
    that range an entry may be HOLE only if all its positions are padding.

    Fields:
        page_size: Tokens in a page.
        page_tables: i32[num_rows, max_pages], C-contiguous. Entries outside the range may hold
            anything, HOLE or an id that does not exist; they must never be used.
        kv_starts: i64[num_rows]. After leading padding, evicted positions, and what other
            workers hold. At most kv_stops.
        kv_stops: i64[num_rows]. One past the newest stored position of this layer.
        padding: per row, None or u8[at least kv_stops[r]], indexed by position: 1 = padding,
            never attended to. None where the range holds no padding. An empty tuple: no row
            has any.
        chunk_origins: i64[num_rows]. Where chunks are counted from: the end of leading padding.
        q_starts: i64[num_rows + 1]. Row r owns queries q_starts[r]:q_starts[r + 1].
        q_positions: i64[num_rows]. Position of the row's first query; the others follow it.
        query_padding: None, or bool[num_queries]: queries that are padding, and return out = 0
            and lse = -inf.
        token_major: Pages are [num_pages, page_size, num_kv_heads, dim], as GPUs want them, instead
            of [num_pages, num_kv_heads, page_size, dim].
        memo: What kernels have worked out about the batch, by keys of their own. All layers of a
            step share it. Writing an entry twice does no harm.
    """

    page_size: int
    page_tables: npt.NDArray[np.int32]
    kv_starts: npt.NDArray[np.int64]
    kv_stops: npt.NDArray[np.int64]
    q_starts: npt.NDArray[np.int64]
    q_positions: npt.NDArray[np.int64]
    chunk_origins: npt.NDArray[np.int64]
    padding: tuple[npt.NDArray[np.uint8] | None, ...] = ()
    query_padding: npt.NDArray[np.bool_] | None = None
    token_major: bool = False
    memo: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def num_rows(self) -> int:
        return len(self.kv_starts)

    @property
    def num_queries(self) -> int:
        return int(self.q_starts[-1])


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How scores are made and which positions a query sees.

    Scores: s = scale * q·k; then softcap * tanh(s / softcap) if softcap is set; then + bias.
    Query at position p, stored position j (both absolute in their row):
        FULL: every j.
        CAUSAL: j <= p, and j > p - window if window is set.
        CHUNK: j <= p, and (j - origin) // chunk == (p - origin) // chunk, floor division, with
            origin = chunk_origins[row].
        DENSE: column c = j - column_starts[row]; 0 <= c < columns; bool: dense[.., i, c] is
            true; float: dense[.., i, c] is added to the score, -inf hides the position. i is the
            query's index within its row.
    bias: float [rows or 1, heads or 1, queries, columns], by the same columns; a position outside
        of its columns is not seen.
    sinks: f32[num_q_heads]. One more score in the softmax, without a value. Applied by the kernel,
        once; the caller leaves it out where the result is to be merged.
    """

    scale: float
    kind: MaskKind = MaskKind.CAUSAL
    window: int | None = None
    chunk: int | None = None
    dense: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    column_starts: npt.NDArray[np.int64] | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class Partial(NamedTuple):
    """Attention over a subset of the positions.

    out: f32[num_queries, num_q_heads, v_dim], normalised over the positions seen.
    lse: f32[num_queries, num_q_heads]: natural log of the sum of exp(scores), sinks included if
        the kernel was given any; -inf, with out = 0, where nothing was seen.
    """

    out: torch.Tensor
    lse: torch.Tensor
