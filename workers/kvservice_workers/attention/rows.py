"""One row of a batch at a time: its queries, and the keys and values that these may see.

For kernels that gather pages before they compute. On any device, in both layouts of pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvservice.core.geometry import cdiv
from kvservice.core.session import MaskKind
from kvservice_workers.attention.batch import AttentionParams, PagedBatch, Partial
from kvservice_workers.attention.merge import merge_sinks

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """One row's queries, and those of its keys and values that any of them may see, in float32.

    q: [num_tokens, num_q_heads, k_dim]; k, v: [num_kv_heads, num_stored, dim].
    positions: i64[num_stored], rising, of k and v; query i stands at q_position + i.
    All tensors are on the device of the arena.
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


def gather_row(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    index: int,
) -> Row | None:
    """Return a row, gathered; None: it has no queries, or no positions that these might see."""
    first, last = int(batch.q_starts[index]), int(batch.q_starts[index + 1])
    q_position, origin = int(batch.q_positions[index]), int(batch.chunk_origins[index])
    positions = seen_positions(batch, params, index, last - first)
    if first == last or not len(positions):
        return None
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = (gather(pages, batch, index, positions).to(dtype) for pages in (k_pages, v_pages))
    return Row(index, q[first:last].to(dtype), k, v, positions, q_position, origin)


def seen_positions(
    batch: PagedBatch, params: AttentionParams, index: int, num_tokens: int
) -> Positions:
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


def gather(
    pages: torch.Tensor, batch: PagedBatch, index: int, positions: Positions
) -> torch.Tensor:
    """Return [num_kv_heads, len(positions), dim], touching only pages that hold one of them."""
    page_size, device = batch.page_size, pages.device
    first, stop = int(positions[0]), int(positions[-1]) + 1
    if stop - first == len(positions):
        first_page = first // page_size
        ids = batch.page_tables[index, first_page : cdiv(stop, page_size)]
        # By the first dimension: by another, torch would copy the whole arena first.
        whole = pages.index_select(0, torch.from_numpy(ids.astype(np.int64)).to(device))
        begin = first - first_page * page_size
        stored = slice(begin, begin + len(positions))
        if batch.token_major:
            return whole.flatten(0, 1)[stored].transpose(0, 1)
        return whole.transpose(0, 1).flatten(1, 2)[:, stored]
    ids = batch.page_tables[index, positions // page_size].astype(np.int64)
    at = torch.from_numpy(ids).to(device), torch.from_numpy(positions % page_size).to(device)
    picked = pages[at] if batch.token_major else pages[at[0], :, at[1]]
    return picked.transpose(0, 1)


def store_partial(
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
        padding = torch.from_numpy(batch.query_padding[queries]).to(out.device)
        out[padding] = 0
        lse[padding] = -torch.inf
