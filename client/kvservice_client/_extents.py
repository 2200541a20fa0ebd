"""Which workers hold which positions of a session, as the client knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvservice.core import session as core
from kvservice.core.geometry import cdiv
from kvservice_client._transport import AttendStream

Lengths = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Extent:
    """Positions [starts[row], stops[row]) of each row, on one incarnation of one worker.

    Of the tail, `stops` is not kept: it ends where the session does. Of a twin neither is: it holds
    what the extent holds that has it.

    Fields:
        stream: The session's own way to the worker for Attend, once opened.
        lost: The worker counts as dead, or lives another life.
        replaced: It lives another life: what it held is gone for certain.
        knows_padding: Whether the worker has been told of all padding so far.
        capability: What it has issued with the answer that told of it. The lease takes it over.
        group: The number by which the service knows its copies.
        twin: The other copy, on another worker: asked for nothing, but told all that changes.
        stay: By which the worker knows the session's time there. Empty: it was not told.
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
    group: int = 0
    twin: Extent | None = None
    stay: str = ""

    @property
    def copies(self) -> tuple[Extent, ...]:
        """This one, which is asked, and its twin."""
        return (self,) if self.twin is None else (self, self.twin)

    def move_to(self, told: core.Extent) -> None:
        """Be on another worker from now on. What it holds is what it was."""
        self.close_stream()
        self.worker_id, self.address = told.worker_id, told.address
        self.incarnation, self.capability = told.incarnation, told.capability
        self.stay = told.stay

    def hand_over(self) -> Extent:
        """Let the twin be the one that is asked, and have no twin; return it."""
        twin, self.twin = self.twin, None
        assert twin is not None, "there is no other copy"
        twin.starts, twin.stops, twin.knows_padding = self.starts, self.stops, self.knows_padding
        return twin

    def close_streams(self) -> None:
        for copy in self.copies:
            copy.close_stream()

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
        told: In position order, the tail last, copies side by side, with addresses that can be
            dialled.
        longest: Per row: where the session ends.
        spread: On how many workers the first tokens go, copies counted once.

    Returns:
        Extents in position order, and spares: those that hold nothing, and are not the tail.
    """
    num_open = 1 if any(longest) else spread
    extents: list[Extent] = []
    spares: list[Extent] = []
    grouped = _grouped(told)
    holders = _holders(known, grouped)
    for index, ((one, *others), extent) in enumerate(zip(grouped, holders, strict=True)):
        if extent is None:
            extent = Extent(
                one.address,
                one.incarnation,
                one.starts or longest,
                one.stops or longest,
                one.worker_id,
                group=one.group,
            )
            extent.knows_padding = index == 0 or any(map(int.__lt__, one.starts, one.stops))
        _pair(extent, (one, *others), told)
        if len(grouped) - index > num_open and one.starts == one.stops:
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


def _holders(
    known: Sequence[Extent], grouped: Sequence[Sequence[core.Extent]]
) -> list[Extent | None]:
    """Return for each group of copies the extent that has them: one of them, or, where none of the
    extent's own is told of, what has come of it elsewhere."""
    found = [_find(_is_same, known, told) for told in grouped]
    left = [extent for extent in known if extent not in found]
    return [
        holder or _find(_has_moved, left, told) for holder, told in zip(found, grouped, strict=True)
    ]


def _find(
    matches: Callable[[Extent, core.Extent], bool],
    known: Sequence[Extent],
    told: Sequence[core.Extent],
) -> Extent | None:
    pairs = ((extent, one) for one in told for extent in known)
    return next(
        (extent for extent, one in pairs if any(matches(copy, one) for copy in extent.copies)),
        None,
    )


def _has_moved(known: Extent, told: core.Extent) -> bool:
    """Whether what is told of is what is known elsewhere, or a copy of it."""
    if told.group:
        return told.group == known.group
    return bool(known.incarnation) and known.incarnation in told.replaces


def _is_same(known: Extent, told: core.Extent) -> bool:
    """Whether what is known at a worker is what is told of there, not what had been there before:
    a session may have left, and come again."""
    is_other_stay = known.stay and told.stay and known.stay != told.stay
    is_other = is_other_stay or known.group != told.group
    return _life(known) == _life(told) and not is_other


def _life(extent: Extent | core.Extent) -> tuple[str, str]:
    return (extent.address, extent.incarnation)


def _grouped(told: Sequence[core.Extent]) -> list[list[core.Extent]]:
    """Put copies together, each group where its first is."""
    groups: dict[object, list[core.Extent]] = {}
    for one in told:
        groups.setdefault(one.group or _life(one), []).append(one)
    return list(groups.values())


def _pair(extent: Extent, mine: Sequence[core.Extent], told: Sequence[core.Extent]) -> None:
    """Take over what is told of an extent's copies. What is not mentioned stays one: its own worker
    says whether it has gone. But a worker has one part at most: where another is now, it has."""
    others = {_life(one) for one in told if one not in mine}
    for one in mine:
        known = next((copy for copy in extent.copies if _is_same(copy, one)), None)
        if known is None:
            known = next((copy for copy in extent.copies if _life(copy) in others), None)
            if known is None and not one.group:
                known = extent
            if known is not None:
                known.move_to(one)
            elif extent.twin is None:
                known = extent.twin = Extent(
                    one.address, one.incarnation, (), (), one.worker_id, group=one.group
                )
        if known is not None:
            known.capability = one.capability or known.capability
            known.stay = one.stay or known.stay


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
