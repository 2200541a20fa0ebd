"""The client's picture of a session. Plain values, no calls.

The client is the session's only writer, so it knows lengths, padding and epoch without asking;
only a call whose outcome is unknown makes the picture uncertain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvservice.core import session as core
from kvservice.core.errors import PagesLost
from kvservice.core.session import EvictBefore, RowRange, SessionInfo, SessionSpec
from kvservice_client._extents import Extent, Lengths
from kvservice_client._padding import Padding


@dataclass(slots=True)
class Step:
    """One forward pass: what its layers share, and how far it has come.

    Fields:
        number: As sent to the workers.
        counts: Per row: new tokens. All 0 in a step without appends.
        positions: Per row: of the first new token, in every layer.
        after: Per row: the length once they are stored.
        padding: All padding once the step's tokens are stored.
        new_padding: What of it the workers have not been told before.
        given_padding: The caller's array it was read from, to recognise it in the next layer.
        evict_before: What the workers may free.
        earlier_layers: Layers that had stored something before the step began.
        appended: Layer -> per row, the position of the first token it has appended.
        begun: Whether a worker has accepted a call of the step.
        failed_layer: The layer whose call has failed last, until it is repeated.
        greeted: Extents that have the step's header.
    """

    number: int
    counts: Lengths
    positions: Lengths
    after: Lengths
    padding: Padding
    new_padding: list[RowRange] = field(default_factory=list)
    given_padding: object = None
    evict_before: list[EvictBefore] = field(default_factory=list)
    earlier_layers: frozenset[int] = frozenset()
    appended: dict[int, Lengths] = field(default_factory=dict)
    begun: bool = False
    failed_layer: int | None = None
    greeted: list[Extent] = field(default_factory=list)

    @property
    def appends(self) -> bool:
        return any(self.counts)

    @property
    def marks_older(self) -> bool:
        """Whether older tokens turn into padding: no cut to where it began undoes that."""
        return any(one.start < self.positions[one.row] for one in self.new_padding)


class Mirror:
    """What is known of a session: rows, epoch, lengths by layer, padding, step, extents.

    Lengths are positions, one past the newest token, padding included; layers that hold nothing
    are not listed. Layers that have the same lengths mostly share one tuple, so that comparing
    them costs nothing.
    """

    def __init__(self, info: SessionInfo) -> None:
        self.id = info.session_id
        self.spec: SessionSpec = info.spec
        self.epoch = info.epoch
        self.last_step = info.step
        self.num_rows = len(info.lengths[0]) if info.lengths else info.spec.num_rows
        self.lengths: dict[int, Lengths] = {
            layer: lengths for layer, lengths in enumerate(info.lengths) if any(lengths)
        }
        self.padding = Padding.of(self.num_rows, info.padding)
        self.step: Step | None = None
        self.extents: list[Extent] = []
        # On workers that hold nothing of the session just now, but follow its changes.
        self.spares: list[Extent] = []
        self.uncertain = False  # the workers may have stored more than `lengths` says
        # A call that nobody waits for any more may still arrive, unless an epoch ends before.
        self.is_late_possible = False
        self.num_writes = 0
        # A worker that was given up may still live, and is to be known to be old when it is back.
        self.haunted = False
        self.windows = tuple(layer.window for layer in info.spec.layers)
        # How often copies were given up or found, and after how many of those all have gone on.
        self.num_changed = 0
        self.num_settled = 0
        self._goes_further = False

    @property
    def tail(self) -> Extent:
        return self.extents[-1]

    @property
    def living(self) -> list[Extent]:
        """Extents and spares, but for those that are lost."""
        return [extent for extent in (*self.extents, *self.spares) if not extent.lost]

    @property
    def everywhere(self) -> list[Extent]:
        """Extents and spares with their copies, but for those that are lost."""
        return [copy for extent in self.living for copy in extent.copies]

    def close_streams(self) -> None:
        for extent in self.extents:
            extent.close_streams()

    @property
    def misses_copies(self) -> bool:
        """Whether there are fewer copies of something than the session was opened with."""
        return self.spec.replicas > 1 and any(one.twin is None for one in self.extents)

    @property
    def num_layers(self) -> int:
        """Layers that are stated, or have stored something."""
        return max(len(self.spec.layers), max(self.lengths, default=-1) + 1)

    def layer_lengths(self, layer: int) -> Lengths:
        return self.lengths.get(layer) or self._nothing

    def longest(self) -> Lengths:
        """Return per row the length of its longest layer."""
        return self._over_layers(max)

    def padding_bits(self) -> npt.NDArray[np.bool_]:
        """Return which positions are padding, bool[rows, longest length]."""
        longest = max(self.longest())
        return np.stack([self.padding.bits(row, 0, longest) for row in range(self.num_rows)])

    def shortest(self) -> Lengths:
        """Return per row what every layer has that takes part in steps, a failed one left out."""
        step, shortest = self.step, self._over_layers(min)
        if step is None:
            return shortest
        if step.failed_layer is not None:
            return tuple(map(min, shortest, step.positions))
        stated = range(len(self.spec.layers))
        if not step.earlier_layers and any(layer not in self.lengths for layer in stated):
            # The session's first step: which layers it has is not yet seen from what is stored.
            return (0,) * self.num_rows
        return shortest

    def follower_of(self, extent: Extent) -> str:
        """Return the incarnations on which the session goes on behind an extent; "": it ends."""
        for one, following in pairwise(self.extents):
            if one is extent:
                return ",".join(copy.incarnation for copy in following.copies)
        return ""

    def stops_of(self, extent: Extent) -> Lengths:
        """Return per row where an extent ends, or a spare's worker says that it does."""
        for one in (*self.extents, *self.spares):
            if extent is one or extent is one.twin:
                return self.longest() if one is self.tail else one.stops
        return extent.stops

    def evictions(self, retain: int | None) -> list[EvictBefore]:
        """Return, by layer group, the positions that the next step's queries do not see.

        Args:
            retain: Tokens kept beyond the window, for roll-back. None: evict nothing.
        """
        if retain is None:
            return []
        result = []
        for window in sorted({window for window in self.windows if window is not None}):
            stored = [
                self.lengths[layer]
                for layer, of_layer in enumerate(self.windows)
                if of_layer == window and layer in self.lengths
            ]
            if stored:
                behind = window - 1 + retain
                positions = tuple(max(0, length - behind) for length in _per_row(min, stored))
                if any(positions):
                    result.append(EvictBefore(window, positions))
        return result

    def unseen_from(self, positions: Sequence[int]) -> list[EvictBefore]:
        """Return, by layer group, what queries at these positions and later do not see."""
        first = tuple(map(min, positions, self.longest()))
        windows = sorted({window for window in self.windows if window is not None})
        unseen = [
            EvictBefore(window, tuple(max(0, position - window + 1) for position in first))
            for window in windows
        ]
        return [group for group in unseen if any(group.positions)]

    def evictions_on(self, extent: Extent, evict_before: list[EvictBefore]) -> list[EvictBefore]:
        """Return what of it a worker can have: nothing behind where its extent ends."""
        if len(self.extents) == 1:
            return evict_before
        stops = self.stops_of(extent)
        return [
            EvictBefore(group.window, tuple(map(min, group.positions, stops)))
            for group in evict_before
        ]

    def note_failure(self, layer: int) -> None:
        """Note that an append has failed which belongs to the step in progress."""
        step = self.step
        if step is not None and step.appends and layer not in step.appended:
            step.failed_layer = layer

    # -- structural changes

    def cut(self, keep: Sequence[int]) -> None:
        """Cut every layer of each row to `keep[row]`. What is lost from there on is forgotten.

        An extent that is emptied becomes a spare, and the tail goes back.
        """
        cuts = {lengths: tuple(map(min, lengths, keep)) for lengths in self.lengths.values()}
        self.lengths = {
            layer: cuts[lengths] for layer, lengths in self.lengths.items() if any(cuts[lengths])
        }
        self.padding = self.padding.cut(keep)
        # One that is found to be lost while the cut is made may hold something that stays.
        gone = [
            one for one in self.extents if one.lost and not any(map(int.__lt__, one.starts, keep))
        ]
        gone += [one for one in self.spares if one.lost]
        self.haunted |= any(not one.replaced for one in gone)
        self.extents = [extent for extent in self.extents if extent not in gone]
        self.spares = [extent for extent in self.spares if not extent.lost]
        for extent in self.extents:
            extent.cut(keep)
        self._next_epoch()
        longest = self.longest()
        while len(self.extents) > 1 and self.tail.is_empty(longest):
            self.spare(self.extents.pop())
        if not self.extents and self.spares:
            self.extents.append(self.spares.pop())

    def reset(self) -> None:
        """Drop all tokens. The first workers take tokens again, as many as the session spreads."""
        living = self.living
        gone = [one for one in (*self.extents, *self.spares) if one.lost]
        self.haunted |= any(not one.replaced for one in gone)
        self.lengths = {}
        self.padding = Padding.none(self.num_rows)
        self.uncertain = False
        self._next_epoch()
        self.spares = []
        for extent in living:
            self.spare(extent)
        self.extents, self.spares = (
            self.spares[: self.spec.spread],
            self.spares[self.spec.spread :],
        )

    def select(self, rows: Sequence[int]) -> None:
        """Let new row i be old row rows[i]. As after a cut, a tail that is emptied goes back."""
        picked = {lengths: tuple(lengths[row] for row in rows) for lengths in self.lengths.values()}
        self.lengths = {
            layer: picked[lengths]
            for layer, lengths in self.lengths.items()
            if any(picked[lengths])
        }
        self.padding = self.padding.select(rows)
        for extent in (*self.extents, *self.spares):
            extent.select(rows)
        self.num_rows = len(rows)
        self._next_epoch()
        longest = self.longest()
        while len(self.extents) > 1 and self.tail.is_empty(longest):
            self.spare(self.extents.pop())

    def spare(self, extent: Extent) -> None:
        """Keep an extent that holds nothing for later."""
        extent.starts = extent.stops = self._nothing
        extent.knows_padding = False
        self.spares.append(extent)

    # -- losses

    @property
    def num_lost(self) -> int:
        """How many extents and spares are known to be lost."""
        return sum(extent.lost for extent in (*self.extents, *self.spares))

    @property
    def may_come_back(self) -> bool:
        """Whether any of those may come back with what it holds: nobody has taken its place."""
        return any(one.lost and not one.replaced for one in (*self.extents, *self.spares))

    def miss(self, starts: Lengths) -> None:
        """Note that what nobody knows any more is gone: each row's positions from `starts` on."""
        below = sum(any(map(int.__lt__, one.starts, starts)) for one in self.extents)
        self.extents.insert(below, Extent("", "", starts, starts, lost=True, replaced=True))
        self.uncertain = True  # where the extents beside it end is for their workers to say

    def find_lost(self) -> Extent | None:
        """Return the lowest extent that is lost."""
        return next((extent for extent in self.extents if extent.lost), None)

    def pages_lost(self) -> PagesLost:
        """Return the error that says from where the session's tokens are gone."""
        lost = self.find_lost()
        assert lost is not None, "nothing is lost"
        position = min(lost.starts, default=0)
        who = f"the worker {lost.worker_id or lost.address}" if lost.address else "a worker"
        return PagesLost(
            f"{who} has died with this session's pages from position {position} on: roll back, and "
            "feed the rest again",
            from_position=position,
        )

    @property
    def _nothing(self) -> Lengths:
        return (0,) * self.num_rows

    # -- copies

    def other_copy(self, extent: Extent) -> Extent | None:
        """Return the copy that holds the same as this one; None: there is no other."""
        for one in (*self.extents, *self.spares):
            if one.twin is not None and extent in one.copies:
                return one.twin if extent is one else one
        return None

    def give_up(self, extent: Extent) -> bool:
        """Go on without a copy, if there is another one; return whether there is.

        Before anything more is stored, the others have to go to the next epoch (`go_on`).
        """
        for listed in (self.extents, self.spares):
            for index, one in enumerate(listed):
                if one.twin is None or extent not in one.copies:
                    continue
                if extent is one:
                    listed[index] = one.hand_over()
                    if self.step is not None and one in self.step.greeted:
                        self.step.greeted.append(listed[index])
                else:
                    one.twin = None
                self.haunted |= not extent.replaced
                self.num_changed += 1
                return True
        return False

    def found(self, extent: Extent, told: core.Extent) -> None:
        """Note that there is a copy of an extent now. Both are at the next epoch, to which all
        others have to go (`go_on`)."""
        self.num_changed += 1
        for one in self.living:
            if extent is one and one.twin is None:
                one.twin = Extent(
                    told.address,
                    told.incarnation,
                    (),
                    (),
                    told.worker_id,
                    group=one.group,
                    stay=told.stay,
                )
                if self.step is not None and one in self.step.greeted:
                    self.step.greeted.append(one.twin)

    def go_on(self, num_changed: int) -> None:
        """Begin the next epoch, in the middle of whatever is in progress: after so many changes of
        copies."""
        self.epoch += 1
        self.num_settled = num_changed
        if self._goes_further:
            self._goes_further = False
            self.num_changed += 1

    def go_on_where_missing(self) -> None:
        """Let all go to the next epoch if there are fewer copies of something than there should
        be: one that nobody has reached may be at this epoch, and is not to be taken for another
        one of what is stored from now on."""
        if self.misses_copies:
            self.num_changed += 1

    def go_on_twice(self) -> None:
        """Let all go to the next epoch, and then to one more: there may be copies at the first of
        which nobody here knows."""
        self.num_changed += 1
        self._goes_further = True

    def _next_epoch(self) -> None:
        self.epoch += 1
        self.step = None
        self.is_late_possible = False

    def _over_layers(self, choose: Callable[..., int]) -> Lengths:
        lengths = list({id(one): one for one in self.lengths.values()}.values())
        if not lengths:
            return (0,) * self.num_rows
        return _per_row(choose, lengths)


def _per_row(choose: Callable[..., int], lengths: Sequence[Lengths]) -> Lengths:
    if len(lengths) == 1:
        return lengths[0]
    return tuple(map(choose, *lengths))
