"""Which worker holds which positions of a session, as the client knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvservice.core import session as core
from kvservice.core.geometry import cdiv
from kvservice_client._transport import AttendStream

Lengths = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Extent:
    """Positions [starts[row], stops[row]) of each row, on one incarnation of one worker.

    Of the tail, `stops` is not kept: it ends where the session does.

    Fields:
        stream: The session's own way to the worker for Attend, once opened.
        lost: The worker counts as dead, or lives another life.
        replaced: It lives another life: what it held is gone for certain.
        knows_padding: Whether the worker has been told of all padding so far.
        capability: What it has issued with the answer that told of it. The lease takes it over.
    """

    address: str
    incarnation: str
    starts: Lengths
    stops: Lengths
    worker_id: str = ""
    stream: AttendStream | None = field(default=None, repr=False)
    lost: bool = False
    replaced: bool = False
    knows_padding: bool = True
    capability: bytes = field(default=b"", repr=False)

    def close_stream(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def cut(self, keep: Sequence[int]) -> None:
        """Drop each row's positions from `keep[row]` on. A start moves down to where it ends."""
        self.starts = _lowest(self.starts, keep)
        self.stops = _lowest(self.stops, keep)

    def select(self, rows: Sequence[int]) -> None:
        """Let new row i be old row rows[i]."""
        self.starts = tuple(self.starts[row] for row in rows)
        self.stops = tuple(self.stops[row] for row in rows)

    def is_empty(self, stops: Sequence[int]) -> bool:
        """Whether it holds nothing of any row, where the rows end at `stops`."""
        return all(start >= stop for start, stop in zip(self.starts, stops, strict=True))


def adopt(
    known: Sequence[Extent], told: Sequence[core.Extent], longest: Lengths, spread: int
) -> tuple[list[Extent], list[Extent]]:
    """Take over a session's extents as the service tells them, keeping what is known of each.

    Args:
        known: The extents and spares so far.
        told: In position order, the tail last, with addresses that can be dialled.
        longest: Per row: where the session ends.
        spread: On how many workers the first tokens go.

    Returns:
        Extents in position order, and spares: those that hold nothing, and are not the tail.
    """
    by_life = {(extent.address, extent.incarnation): extent for extent in known}
    num_open = 1 if any(longest) else spread
    extents: list[Extent] = []
    spares: list[Extent] = []
    for index, one in enumerate(told):
        extent = by_life.get((one.address, one.incarnation))
        if extent is None:
            extent = Extent(
                one.address,
                one.incarnation,
                one.starts or longest,
                one.stops or longest,
                one.worker_id,
            )
            extent.knows_padding = index == 0 or any(map(int.__lt__, one.starts, one.stops))
        extent.capability = one.capability or extent.capability
        if len(told) - index > num_open and one.starts == one.stops:
            extent.starts = extent.stops = one.stops or (0,) * len(longest)
            extent.knows_padding = False
            spares.append(extent)
            continue
        if one.starts == one.stops:  # a tail that holds nothing yet
            extent.starts = one.starts or longest
        extents.append(extent)
    for extent, following in pairwise(extents):
        extent.stops = following.starts
    listed = {id(extent) for extent in (*extents, *spares)}
    spares += [one for one in known if id(one) not in listed and one.starts == one.stops]
    return extents, spares


def cut_into_parts(counts: Sequence[int], num_parts: int, page_size: int) -> list[Lengths]:
    """Cut the first tokens of a session for several workers, at page boundaries.

    All rows are cut at the same offsets; a row that is shorter has nothing in the later parts.

    Returns:
        Per part, per row: its first position. At most `num_parts` parts, none of them empty for
        the longest row, as even as pages allow.
    """
    pages = cdiv(max(counts), page_size)
    pages_each = max(1, cdiv(pages, num_parts))
    offsets = range(0, max(1, pages), pages_each)
    return [tuple(min(offset * page_size, count) for count in counts) for offset in offsets]


def _lowest(positions: Sequence[int], keep: Sequence[int]) -> Lengths:
    return tuple(min(position, bound) for position, bound in zip(positions, keep, strict=True))
