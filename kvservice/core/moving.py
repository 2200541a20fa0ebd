"""What a worker tells another one that takes a session over: all of it but the pages' contents."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final

from kvservice.core.errors import CapacityError, SessionMoved
from kvservice.core.geometry import HostTensor, LayerGeometry
from kvservice.core.session import RowRange, SessionSpec, StepHeader

Refused = tuple[int, CapacityError]

MAX_REPLACED: Final = 16
"""As many of the lives that held an extent before are remembered."""


def stay_by(source: str, ticket: int) -> str:
    """Return how the stay of a session is called that one life of a worker has handed over by a
    ticket, which it gives once: both sides know it without asking."""
    return f"{source}>{ticket}"


@dataclass(frozen=True, slots=True)
class MovedTo:
    """The worker that has taken a session over.

    Fields:
        ticket: By which it did: it knows itself by then, or believes whoever shows this.
        stay: That has begun there with it; see `stay_by`.
    """

    worker_id: str
    address: str
    incarnation: str
    ticket: int
    stay: str = ""

    def error(self) -> SessionMoved:
        """Return what callers are told who come too late."""
        return SessionMoved(
            f"the session has moved to worker {self.worker_id}: go on there",
            worker_id=self.worker_id,
            address=self.address,
            incarnation=self.incarnation,
        )


@dataclass(frozen=True, slots=True)
class StepState:
    """A step in progress. `appended[layer]` are the positions of what a layer has appended."""

    number: int
    header: StepHeader
    positions: tuple[int, ...]
    appended: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class GroupState:
    """The page tables of the layers that share a window. Pages have their worker's numbers.

    Fields:
        tables: Per row, in position order; HOLE without a page.
        evicted: Per row: positions that are gone at its front.
        in_use: Some layer is stated, or has stored something.
        written: Page -> when it was written last, rising; not listed: not since the copy began.
    """

    window: int | None
    tables: tuple[tuple[int, ...], ...]
    evicted: tuple[int, ...]
    in_use: bool
    written: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class SessionState:
    """All that a worker knows of a session, but the contents of pages.

    Fields:
        origin: The request that opened it, to recognise a repeat; as a worker's `Opening` notes it.
        last_change: The newest structural change, likewise.
        change_before: The one before, if the last one was only to go on.
        copied: The worker that has got a copy, and the epoch that has begun with it.
        unheard_from: Since which epoch copies were made of which the holder has not heard; 0: none.
        lengths: By layer, of those that have stored something; per row.
        geometries: By layer, of those whose shape is known.
        targets: Per row: up to where room is promised. None: none is.
        refused_step, refused_write: The newest of this epoch that found no room, by its number,
            and what was answered.
        group: Of the extent, as in `Extent`.
        replaces: Lives of workers that held it before.
        left_s: Of the lease, in seconds.
    """

    spec: SessionSpec
    num_rows: int
    origin: Hashable
    epoch: int
    last_change: Hashable
    change_before: Hashable
    copied: tuple[MovedTo, int] | None
    unheard_from: int
    last_step: int
    step: StepState | None
    begins_at_zero: bool
    starts: tuple[int, ...] | None
    lengths: Mapping[int, tuple[int, ...]]
    geometries: Mapping[int, LayerGeometry]
    groups: tuple[GroupState, ...]
    padding: tuple[RowRange, ...]
    targets: tuple[int, ...] | None
    followed_by: str
    last_write: int
    refused_step: Refused | None
    refused_write: Refused | None
    group: int
    replaces: tuple[str, ...]
    left_s: float


@dataclass(frozen=True, slots=True)
class CopiedPages:
    """Contents of pages. `written[i]` is when page i was written last, as in `GroupState`.

    Fields:
        layers: Layer -> k and v, [pages * page_size, kv_heads, dim].
    """

    written: tuple[int, ...]
    layers: Mapping[int, tuple[HostTensor, HostTensor]]

    @property
    def num_bytes(self) -> int:
        """Of all contents together."""
        return sum(k.num_bytes + v.num_bytes for k, v in self.layers.values())
