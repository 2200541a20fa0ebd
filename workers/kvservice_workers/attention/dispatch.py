"""Which kernel attends: one table, from the most special to the most general."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvservice.core.errors import Unimplemented
from kvservice_workers.attention import cpu, cuda, matmul, native
from kvservice_workers.attention.batch import AttentionParams, PagedBatch, Partial
from kvservice_workers.attention.validate import validate

Rows = npt.NDArray[np.int64] | None
"""Indices of rows; None: all of the batch."""

NATIVE_MAX_QUERIES = 16
"""Rows with more queries are bound by arithmetic, not by memory: torch's products are faster."""


@dataclass(frozen=True, slots=True)
class Call:
    """Everything one call of `attend` is given."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    batch: PagedBatch
    params: AttentionParams


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way to attend.

    serves: Whether it can do the call.
    run: Writes the partials of the given rows' queries into a result, each query's exactly once,
        sinks and query padding included.
    max_queries: Rows with more queries are left to the next kernel that serves. None: no limit.
    """

    name: str
    serves: Callable[[Call], bool]
    run: Callable[[Call, Rows, Partial], None]
    max_queries: int | None = None


def _serves_native(call: Call) -> bool:
    in_tiles = not call.batch.token_major
    return in_tiles and native.serves(call.k_pages, call.v_pages, call.params)


def _serves_flash(call: Call) -> bool:
    params = call.params
    plain = params.softcap is None and params.dense is None and params.bias is None
    return plain and call.k_pages.shape[3] == call.v_pages.shape[3]


def _serves_varlen(call: Call) -> bool:
    return call.batch.token_major and cuda.serves(call.k_pages, call.v_pages, call.params)


def _serves_all(_call: Call) -> bool:
    return True


def _run_native(call: Call, rows: Rows, result: Partial) -> None:
    native.attend(call.q, call.k_pages, call.v_pages, call.batch, call.params, rows, result)


def _run_flash(call: Call, rows: Rows, result: Partial) -> None:
    cpu.attend_flash(call.q, call.k_pages, call.v_pages, call.batch, call.params, rows, result)


def _run_matmul(call: Call, rows: Rows, result: Partial) -> None:
    matmul.attend(call.q, call.k_pages, call.v_pages, call.batch, call.params, rows, result)


def _run_varlen(call: Call, rows: Rows, result: Partial) -> None:
    cuda.attend(call.q, call.k_pages, call.v_pages, call.batch, call.params, rows, result)


CPU_KERNELS: Sequence[Kernel] = (
    Kernel("native", _serves_native, _run_native, NATIVE_MAX_QUERIES),
    Kernel("cpu_flash", _serves_flash, _run_flash),
    Kernel("cpu_matmul", _serves_all, _run_matmul),
)
"""A row goes to the first that serves the call and takes as many queries."""

CUDA_KERNELS: Sequence[Kernel] = (
    Kernel("cuda_varlen", _serves_varlen, _run_varlen),
    Kernel("cuda_matmul", _serves_all, _run_matmul),
)

KERNELS: dict[str, Sequence[Kernel]] = {"cpu": CPU_KERNELS, "cuda": CUDA_KERNELS}
"""By device type."""


def attend(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    params: AttentionParams,
) -> Partial:
    """Attend from queries to the keys and values in the arena, by the best kernel there is.

    Args:
        As for `reference.paged_attention`, whose result this is up to rounding.

    Returns:
        Partial(out f32, lse f32), fresh, on q's device.

    Numerics:
        Scores and sums in float32. A query that sees nothing, or is padding: `(0, -inf)`.

    Raises:
        InvalidRequest: Shapes, dtypes or scalars disagree (GeometryMismatch: q and the arena).
        Unimplemented: No kernel for this device.

    Not checked:
        The values in the batch's arrays. See `validate.validate_values`.

    Threads:
        Any number may attend at once, as long as nobody writes the slots that they read.
    """
    validate(q, k_pages, v_pages, batch, params)
    call = Call(q, k_pages, v_pages, batch, params)
    result = _no_result(call)
    for kernel, rows in _assign(call):
        kernel.run(call, rows, result)
    return result


def run(kernel: Kernel, call: Call) -> Partial:
    """Run one kernel on all rows of a call that it serves, whatever the table prefers."""
    result = _no_result(call)
    kernel.run(call, None, result)
    return result


def kernel_name(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    params: AttentionParams,
) -> str:
    """Return the name of the kernel that `attend` would choose; raises as it does.

    Where rows of one batch go to several kernels, their names are joined by a plus sign.
    """
    validate(q, k_pages, v_pages, batch, params)
    call = Call(q, k_pages, v_pages, batch, params)
    return "+".join(kernel.name for kernel, _ in _assign(call))


def _no_result(call: Call) -> Partial:
    """Return tensors of the right shapes, holding anything."""
    num_queries, num_q_heads, _ = call.q.shape
    out_shape = (num_queries, num_q_heads, call.v_pages.shape[3])
    if call.q.is_cpu:  # half the time of torch.empty, which counts at a token a call
        out, lse = np.empty(out_shape, np.float32), np.empty(out_shape[:2], np.float32)
        return Partial(torch.from_numpy(out), torch.from_numpy(lse))
    device = call.q.device
    return Partial(
        torch.empty(out_shape, dtype=torch.float32, device=device),
        torch.empty(out_shape[:2], dtype=torch.float32, device=device),
    )


def _assign(call: Call) -> list[tuple[Kernel, Rows]]:
    """Return who does which rows; together they are all rows of the batch."""
    batch, rows = call.batch, None
    assigned: list[tuple[Kernel, Rows]] = []
    for kernel in KERNELS.get(call.q.device.type, ()):
        if not kernel.serves(call):
            continue
        most = kernel.max_queries
        if most is None or batch.num_queries <= most:
            return [*assigned, (kernel, rows)]
        if rows is None:
            rows = np.arange(batch.num_rows)
        is_small = batch.q_starts[rows + 1] - batch.q_starts[rows] <= most
        if is_small.all():
            return [*assigned, (kernel, rows)]
        if is_small.any():
            assigned.append((kernel, rows[is_small]))
        rows = rows[~is_small]
    device = call.q.device.type
    raise Unimplemented(f"no attention kernel for device {device}", device=device)
