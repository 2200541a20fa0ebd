"""Which kernel attends: one table, from the most special to the most general."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from kvservice.core.errors import Unimplemented
from kvservice_workers.attention import cpu
from kvservice_workers.attention.batch import AttentionParams, PagedBatch, Partial
from kvservice_workers.attention.merge import merge_sinks
from kvservice_workers.attention.validate import validate


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
    run: Writes the partials of the given rows' queries into a result filled with (0, -inf).
    """

    name: str
    serves: Callable[[Call], bool]
    run: Callable[[Call, Iterable[int], Partial], None]


def _serves_flash(call: Call) -> bool:
    params = call.params
    plain = params.softcap is None and params.dense is None and params.bias is None
    return plain and call.k_pages.shape[3] == call.v_pages.shape[3]


def _serves_all(_call: Call) -> bool:
    return True


def _run_flash(call: Call, rows: Iterable[int], result: Partial) -> None:
    cpu.attend_flash(call.q, call.k_pages, call.v_pages, call.batch, call.params, rows, result)


def _run_matmul(call: Call, rows: Iterable[int], result: Partial) -> None:
    cpu.attend_matmul(call.q, call.k_pages, call.v_pages, call.batch, call.params, rows, result)


CPU_KERNELS: Sequence[Kernel] = (
    Kernel("cpu_flash", _serves_flash, _run_flash),
    Kernel("cpu_matmul", _serves_all, _run_matmul),
)
"""The first that serves a call gets it."""

KERNELS: dict[str, Sequence[Kernel]] = {"cpu": CPU_KERNELS}
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
    return run(_kernel(call), call)


def run(kernel: Kernel, call: Call) -> Partial:
    """Run one kernel on a whole call, and add what is common to all: sinks, query padding."""
    q, batch = call.q, call.batch
    shape = (q.shape[0], q.shape[1])
    result = Partial(
        torch.zeros(*shape, call.v_pages.shape[3], dtype=torch.float32, device=q.device),
        torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device),
    )
    kernel.run(call, range(batch.num_rows), result)
    if call.params.sinks is not None:
        result = merge_sinks(result, call.params.sinks)
    if batch.query_padding is not None:
        padding = torch.from_numpy(batch.query_padding)
        result.out[padding] = 0
        result.lse[padding] = -torch.inf
    return result


def kernel_name(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    params: AttentionParams,
) -> str:
    """Return the name of the kernel that `attend` would choose; raises as it does."""
    validate(q, k_pages, v_pages, batch, params)
    return _kernel(Call(q, k_pages, v_pages, batch, params)).name


def _kernel(call: Call) -> Kernel:
    device = call.q.device.type
    for kernel in KERNELS.get(device, ()):
        if kernel.serves(call):
            return kernel
    raise Unimplemented(f"no attention kernel for device {device}", device=device)
