"""The short way through a step: what its first layer has worked out serves the other layers.

The first layer of a layer group goes the long way (`data_path`), which checks everything against
the session and leaves a `SteadyStep` behind. A later layer that asks the same of the same
positions needs one native call: store, attend, return the output's bytes. If anything about it
differs, the long way is taken, which also finds the words for what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvservice.core.geometry import LayerGeometry
from kvservice.core.session import AttendCall, Mask
from kvservice_workers.arena import Arena
from kvservice_workers.attention import dispatch, native
from kvservice_workers.attention.batch import PagedBatch

# Pages and offsets of tokens, and which tokens these are: None for all.
Slots = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64] | None]


# Rows with more queries are bound by arithmetic, and go to other kernels.
MAX_QUERIES = dispatch.NATIVE_MAX_QUERIES


@dataclass(frozen=True, slots=True)
class SteadyStep:
    """What a later layer of a step must ask for to be served the short way.

    Fields:
        epoch, number: The session's epoch and step.
        geometry: The layer's. Shapes and positions are lists, as they come from the wire.
        positions, lengths: Per row: where the layer ends before and after.
        version: Of the layer group's page tables.
    """

    epoch: int
    number: int
    geometry: LayerGeometry
    mask: Mask
    q_shape: list[int]
    k_shape: list[int]
    v_shape: list[int]
    positions: list[int]
    lengths: list[int]
    version: int
    slots: Slots
    call: native.PreparedCall


def settle(
    call: AttendCall,
    *,
    arena: Arena,
    batch: PagedBatch,
    slots: Slots,
    counts: Sequence[int],
    version: int,
) -> SteadyStep | None:
    """Return what serves later layers that ask as `call` does, which has just been answered.

    None: calls like this one go the long way.
    """
    plain = (
        call.k is not None
        and call.v is not None
        and not call.partial
        and call.bias is None
        and call.mask.dense is None
        and call.sinks is None
        and call.softcap is None
        and not call.query_counts
        and not call.query_positions
    )
    if not plain or not arena.on_cpu or not native.prepares(arena.k, counts, MAX_QUERIES):
        return None
    assert call.k is not None
    assert call.v is not None
    return SteadyStep(
        epoch=call.epoch,
        number=call.step,
        geometry=arena.geometry,
        mask=call.mask,
        q_shape=list(call.q.shape),
        k_shape=list(call.k.shape),
        v_shape=list(call.v.shape),
        positions=list(call.positions),
        lengths=[p + n for p, n in zip(call.positions, counts, strict=True)],
        version=version,
        slots=slots,
        call=native.prepare(
            arena.k,
            arena.v,
            batch,
            call.mask,
            slots,
            num_tokens=call.k.shape[0],
            num_q_heads=call.q.shape[1],
        ),
    )
