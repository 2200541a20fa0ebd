"""What the first layer of a step has worked out, and serves the other layers.

The first layer of a layer group goes the long way (`long_way`), which checks everything against
the session and leaves a `SteadyStep` behind. A later layer whose message says the same, byte by
byte, but for its number, scale and tensors, goes the short way (`short_way`). It needs one native
call: read, store, attend, write the answer. If anything about it differs, the long way is taken,
which also finds the words for what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvservice.core.geometry import LayerGeometry
from kvservice.core.said import Said
from kvservice.core.session import AttendCall
from kvservice_workers.arena import Arena
from kvservice_workers.attention import dispatch, native
from kvservice_workers.attention.batch import PagedBatch
from kvservice_workers.attention.native import Slots

# Rows with more queries are bound by arithmetic, and go to other kernels.
MAX_QUERIES = dispatch.NATIVE_MAX_QUERIES

SteadyKey = tuple[int | None, bool]
"""A layer group's window, and whether the calls bring keys and values."""


@dataclass(frozen=True, slots=True)
class SteadyStep:
    """What serves later layers of a step the short way.

    Fields:
        geometry: The layers'.
        positions, lengths: Per row: where a layer ends before and after.
        version: Of the layer group's page tables.
        slots: Where the tokens go. None: there are none.
        shapes: Of k and v.
        num_bytes: Of both together.
        call: Answers, if a call asks the same.
    """

    geometry: LayerGeometry
    positions: tuple[int, ...]
    lengths: tuple[int, ...]
    num_rows: int
    version: int
    slots: Slots | None
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    num_bytes: int
    call: native.PreparedCall


def settle(
    call: AttendCall,
    said: Said,
    *,
    arena: Arena,
    geometry: LayerGeometry,
    batch: PagedBatch,
    slots: Slots | None,
    lengths: tuple[int, ...],
    counts: Sequence[int],
    query_counts: Sequence[int],
    version: int,
) -> SteadyStep | None:
    """Return what serves later layers that ask as `call` does, which has just been answered.

    Args:
        said: The call as it came.
        lengths: Of the layer, per row, as they are now.
        counts: Tokens that it has brought, per row.

    Returns:
        None: calls like this one go the long way.
    """
    plain = (
        call.bias is None
        and call.mask.dense is None
        and call.sinks is None
        and call.softcap is None
    )
    if not plain or not arena.on_cpu or not native.prepares(arena.k, query_counts, MAX_QUERIES):
        return None
    k, v = call.k, call.v
    return SteadyStep(
        geometry=geometry,
        positions=tuple([length - count for length, count in zip(lengths, counts, strict=True)]),
        lengths=lengths,
        num_rows=len(lengths),
        version=version,
        slots=slots,
        shapes=((), ()) if k is None or v is None else (k.shape, v.shape),
        num_bytes=0 if k is None or v is None else k.num_bytes + v.num_bytes,
        call=native.prepare(
            arena.k,
            arena.v,
            batch,
            call.mask,
            slots,
            said,
            num_tokens=sum(counts),
            num_q_heads=call.q.shape[1],
            partial=call.partial,
        ),
    )
