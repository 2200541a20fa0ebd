"""The native CPU kernel: one call for a whole ragged batch, reading pages in place.

It is an optional extension, compiled when the package is built. Where there was no compiler, the
torch kernels of `cpu` serve instead; `why_missing` says so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvservice.core.errors import InternalError
from kvservice.core.said import Said
from kvservice.core.session import Mask, MaskKind
from kvservice_workers.attention.batch import AttentionParams, PagedBatch, Partial

# Pages and offsets of tokens, and which tokens these are: None for all.
Slots = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64] | None]
_NO_SLOTS = np.zeros(0, np.int64)

_missing: str | None = None
try:
    from kvservice_workers import _native
    from kvservice_workers._native import read_call as read_call  # or it is of older sources
    from kvservice_workers._native import read_frame as read_frame
except ImportError as error:
    _missing = f"the extension kvservice_workers._native was not built or does not load: {error}"

    def read_call(data: bytes | bytearray | memoryview, /) -> Said | None:
        """Read a serialized `AttendCall`.

        Returns:
            What aliases `data`, which must stay as it is. None: it is unusual in some way, or no
            call at all, or there is no extension: protobuf reads it.
        """
        del data
        return None

    def read_frame(data: bytes | bytearray | memoryview, /) -> Said | None:
        """As `read_call`, of the `AttendRequest` that carries a call whole."""
        del data
        return None


_MASKS = {MaskKind.FULL: 0, MaskKind.CAUSAL: 1, MaskKind.CHUNK: 1}
"""Numbers of `Mask` in kernel.h; a chunk only moves the lowest position that a query sees."""

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of `Element` in kernel.h."""


def available() -> bool:
    """Return whether the extension is there."""
    return _missing is None


def why_missing() -> str | None:
    """Return why the extension is not there, for the log; None if it is."""
    return _missing


def instruction_sets() -> tuple[str, ...]:
    """Return those that there are loops for and that this machine has, best first."""
    return _native.instruction_sets() if available() else ()


def serves(k_pages: torch.Tensor, v_pages: torch.Tensor, params: AttentionParams) -> bool:
    """Return whether the kernel can do a call: dense masks and biases are left to others."""
    return (
        available()
        and k_pages.dtype in _ELEMENTS
        and params.kind in _MASKS
        and params.bias is None
        and _has_dense_pages(k_pages)
        and _has_dense_pages(v_pages)
    )


def attend(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    rows: npt.NDArray[np.int64] | None,
    result: Partial,
    *,
    num_threads: int | None = None,
    instruction_set: str | None = None,
) -> None:
    """Attend for some rows of a batch, sinks and query padding included.

    Args:
        q, k_pages, v_pages, batch, params: As for `reference.paged_attention`, validated, of
            float32, bfloat16 or float16, without bias and dense mask. Pages may lie at any stride,
            but each is contiguous.
        rows: i64[any]. The rows to do, None for all; the queries of all others are left alone in
            `result`.
        result: f32, contiguous. Written for every query of `rows`, whatever it held.
        num_threads: At most this many, the caller's own included; None: as many as there are
            cores for this process.
        instruction_set: One of `instruction_sets()`; None: the best. For tests.

    Numerics:
        float32, weights in base 2 with a running maximum; lse is natural. A row's result is the
        same to the bit whatever its neighbours in the batch and the number of threads.

    Effects:
        The GIL is released. No allocation beyond the kernel's own working memory.

    Raises:
        InternalError: A page table names a page that does not exist; `result` is unspecified.
    """
    num_pages, num_kv_heads, page_size, k_dim = k_pages.shape
    q = q.contiguous()
    sinks = None if params.sinks is None else params.sinks.contiguous().numpy()
    try:
        _native.attend(
            q.data_ptr(),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            result.out.data_ptr(),
            result.lse.data_ptr(),
            _ELEMENTS[q.dtype],
            num_pages,
            num_kv_heads,
            q.shape[1] // num_kv_heads,
            page_size,
            k_dim,
            v_pages.shape[3],
            k_pages.stride(0),
            v_pages.stride(0),
            rows,
            batch.page_tables,
            batch.page_tables.shape[1],
            batch.kv_starts,
            batch.kv_stops,
            batch.q_starts,
            batch.q_positions,
            batch.chunk_origins,
            batch.padding or None,
            batch.query_padding,
            params.scale,
            params.softcap or 0.0,
            _MASKS[params.kind],
            params.window or 0,
            params.chunk or 0,
            sinks,
            _NUM_CORES if num_threads is None else num_threads,
            0 if instruction_set is None else instruction_sets().index(instruction_set),
        )
    except IndexError as error:
        raise InternalError(str(error)) from error


def _has_dense_pages(pages: torch.Tensor) -> bool:
    """Return whether each page is contiguous, wherever it lies."""
    if pages.is_contiguous():
        return True
    _, _, page_size, dim = pages.shape
    return pages.stride()[1:] == (page_size * dim, dim, 1)


def _num_cores() -> int:
    """Return how many cores this process may use at a time: by affinity, and by its cgroup."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return cores  # another system, or cgroup v1


_NUM_CORES = _num_cores()


class PreparedCall(Protocol):
    """What all layers of a step share, as `_native.Step` holds it."""

    def answer(self, call: Said, k_address: int, v_address: int, num_pages: int, /) -> bytes | None:
        """Store a layer's new k and v, attend with its q, and return the `AttendResponse`'s bytes.

        The GIL is released.

        Returns:
            None: The call differs from the one that the step was prepared for in more than call
            id, layer, scale and the tensors' values; or it has a header. Nothing has changed.

        Raises:
            IndexError: A page table names a page that does not exist.
        """


def prepares(k_pages: torch.Tensor, counts: Sequence[int], max_queries: int) -> bool:
    """Return whether steps with so many queries of each row can be prepared."""
    return available() and k_pages.dtype in _ELEMENTS and max(counts) <= max_queries


def prepare(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    mask: Mask,
    slots: Slots | None,
    said: Said,
    *,
    num_tokens: int,
    num_q_heads: int,
    partial: bool,
) -> PreparedCall:
    """Prepare a step: its layers differ in tensors and scale alone.

    Args:
        k_pages, v_pages: Of one layer, for shapes and dtype. Contiguous.
        mask: FULL, CAUSAL or CHUNK.
        slots: Pages and offsets of the new tokens that are stored, and which ones these are. None:
            the calls bring no tokens.
        said: A call that has been answered: others must be alike.
        num_tokens: New tokens, those that are not stored included.
        partial: The answer is float32, with lse.
    """
    _, num_kv_heads, page_size, k_dim = k_pages.shape
    pages, offsets, tokens = (_NO_SLOTS, _NO_SLOTS, None) if slots is None else slots
    prepared: PreparedCall = _native.Step(
        element=_ELEMENTS[k_pages.dtype],
        num_kv_heads=num_kv_heads,
        group_size=num_q_heads // num_kv_heads,
        page_size=page_size,
        k_dim=k_dim,
        v_dim=v_pages.shape[3],
        page_tables=batch.page_tables,
        max_pages=batch.page_tables.shape[1],
        kv_starts=batch.kv_starts,
        kv_stops=batch.kv_stops,
        q_starts=batch.q_starts,
        q_positions=batch.q_positions,
        chunk_origins=batch.chunk_origins,
        padding=batch.padding or None,
        query_padding=batch.query_padding,
        mask=_MASKS[mask.kind],
        window=mask.window or 0,
        chunk=mask.chunk or 0,
        num_threads=_NUM_CORES,
        pages=pages,
        offsets=offsets,
        tokens=tokens,
        num_tokens=num_tokens,
        partial=partial,
        like=said,
    )
    return prepared
