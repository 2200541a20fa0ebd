"""One session out of what each of its workers says about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvservice.core.errors import Conflict, PagesLost
from kvservice.core.session import Extent, RowRange, SessionInfo


def merge_sessions(infos: Sequence[SessionInfo]) -> SessionInfo:
    """Return the session whose parts `infos` are, one for each worker that holds it.

    Extents come in position order, the tail last. Those that hold nothing, and could not take the
    next token, come before all others. A layer's length reaches as far as its tokens follow each
    other without a gap. The epoch is one at which all were what they are.

    Args:
        infos: At least one, of one session; each with one extent.

    Raises:
        Conflict: There is no such epoch: a structural change is half done, and must be repeated
            until all workers have it.
        PagesLost: Tokens are missing between two extents, or before the first.
    """
    epochs = sorted({info.epoch for info in infos})
    if max(info.same_since_epoch or info.epoch for info in infos) > epochs[0]:
        raise Conflict(
            f"a change is half done, the session's workers are at epochs {epochs}: repeat it",
            epochs=",".join(map(str, epochs)),
        )
    merged = replace(_joined(without_laggards(infos)), epoch=epochs[0])
    gap = find_gap(merged.extents)
    if gap is not None:
        raise pages_lost(gap)
    return merged


def join_parts(infos: Sequence[SessionInfo]) -> SessionInfo:
    """As `merge_sessions`, without the checks: of a half-done change, what the newest parts say."""
    return _joined(_newest(infos))


def _joined(infos: Sequence[SessionInfo]) -> SessionInfo:
    ordered = in_order(infos)
    num_layers = max(len(info.lengths) for info in ordered)
    return replace(
        # The one with the reservation: extents that were added later have none.
        max(ordered, key=lambda info: info.spec.reserve_tokens or 0),
        step=max(info.step for info in ordered),
        last_write=max(info.last_write for info in ordered),
        current_step=max(info.current_step for info in ordered),
        extents=tuple(info.extents[0] for info in ordered),
        lengths=tuple(_layer_lengths(ordered, layer) for layer in range(num_layers)),
        padding=_united(ordered),
        padding_unlisted=any(info.padding_unlisted for info in ordered),
    )


def in_order(infos: Sequence[SessionInfo]) -> list[SessionInfo]:
    """Return the parts of a session in position order, the tail last, copies side by side."""
    longest = row_lengths([info.extents[0] for info in infos])

    def key(info: SessionInfo) -> tuple[bool, tuple[int, ...], tuple[int, ...], int]:
        extent = info.extents[0]
        # Empty, but where the next token goes: an extent that has just been opened.
        fresh = bool(extent.starts) and extent.starts == longest
        return (fresh or not is_empty(extent), extent.starts, extent.stops, extent.group)

    return sorted(infos, key=key)


def without_laggards(infos: Iterable[SessionInfo]) -> list[SessionInfo]:
    """Return the parts of a session without copies that lack what others of their group have.

    All copies get the same calls in the same order, so that one of them has seen the beginning of
    what another has seen, and counts that only rise say which is ahead. Equal ones hold the same.
    """
    infos = list(infos)
    furthest: dict[int, tuple[int, ...]] = {}
    for info in infos:
        group = info.extents[0].group
        furthest[group] = max(furthest.get(group, ()), _progress(info))
    return [
        info
        for info in infos
        if not info.extents[0].group or _progress(info) == furthest[info.extents[0].group]
    ]


def _progress(info: SessionInfo) -> tuple[int, ...]:
    """Return how far a copy has come: within an epoch no call makes any of this less."""
    return (info.epoch, info.current_step, info.last_write, num_stored(info))


def num_stored(info: SessionInfo) -> int:
    """Return the sum of all lengths, which tells how much copies of the same have stored."""
    return sum(length for of_layer in info.lengths for length in of_layer)


def num_groups(infos: Sequence[SessionInfo]) -> int:
    """Return how many parts a session is in, copies counted once."""
    groups = [info.extents[0].group for info in infos]
    return groups.count(0) + len({group for group in groups if group})


def find_lone(infos: Sequence[SessionInfo]) -> SessionInfo | None:
    """Return a part of which there are fewer copies than there should be; None if there is none."""
    groups = Counter(info.extents[0].group for info in infos)
    return next(
        (one for one in infos if 0 < groups[one.extents[0].group] < one.spec.replicas), None
    )


def missing_copies(infos: Sequence[SessionInfo]) -> int:
    """Return how many copies more a session was opened with than it has, of all its parts."""
    return max(0, infos[0].spec.replicas * num_groups(infos) - len(infos))


def is_empty(extent: Extent) -> bool:
    """Whether nothing is stored in the extent."""
    return extent.starts == extent.stops


def row_lengths(extents: Sequence[Extent]) -> tuple[int, ...]:
    """Return the length of each row's longest layer; nothing if no extent has a start.

    An extent that holds nothing of a row says nothing about it, wherever it would begin.
    """
    ends = [
        [stop if start < stop else 0 for start, stop in zip(e.starts, e.stops, strict=True)]
        for e in extents
        if e.starts
    ]
    return tuple(max(column) for column in zip(*ends, strict=True))


def find_gap(ordered: Sequence[Extent]) -> int | None:
    """Return the lowest position that is missing before a stored one; None if none is."""
    reached: dict[int, int] = {}
    gaps: list[int] = []
    for extent in ordered:
        for row, (start, stop) in enumerate(zip(extent.starts, extent.stops, strict=True)):
            if start < stop:
                if start > reached.get(row, 0):
                    gaps.append(reached.get(row, 0))
                reached[row] = max(reached.get(row, 0), stop)
    return min(gaps, default=None)


@dataclass(frozen=True, slots=True)
class Loss:
    """A part of a session that nobody holds.

    Fields:
        position: The lowest that is missing.
        incarnations: Of the workers of which one should hold it. None: it is not known whose it
            was.
    """

    position: int
    incarnations: tuple[str, ...] = ()


def find_loss(infos: Sequence[SessionInfo]) -> Loss | None:
    """Return what is missing of a session of which these are the parts; None if nothing is.

    What lies between extents is missing, and what should follow the last of them: each worker
    knows on which other one the session goes on. Where nobody holds anything, it may be that all
    is missing.
    """
    newest = in_order(_newest(infos))
    gap = find_gap([info.extents[0] for info in newest])
    if gap is not None:
        return Loss(gap)
    holding = [info.extents[0] for info in newest if not is_empty(info.extents[0])]
    if not holding:
        return None if _may_be_all(newest) else Loss(0)
    followers = holding[-1].followers
    # A part may have come here from where the session goes on now, and is not what is there; nor
    # is a copy of it, even one that was given up.
    groups = {one.group for one in holding if one.group}
    parts = [info.extents[0] for info in infos]
    others = [one for one in parts if one not in holding and one.group not in groups]
    held = {one.incarnation for one in holding}
    if not followers or any(
        life in held or any(one.stands_for(life) for one in others) for life in followers
    ):
        return None
    return Loss(min(holding[-1].stops), followers)


def _may_be_all(empty: Sequence[SessionInfo]) -> bool:
    """Whether parts that hold nothing can be all of a session: one begins at 0, or there are as
    many as it was opened with. Others may have been opened, or emptied, behind tokens."""
    if not empty:
        return True
    begins_at_zero = any(
        one.starts and not any(one.starts) for one in (info.extents[0] for info in empty)
    )
    return begins_at_zero or num_groups(empty) >= max(2, empty[0].spec.spread)


def current(infos: Sequence[SessionInfo]) -> list[SessionInfo]:
    """Return the parts without those that the session has left behind.

    A worker that was cut off while the session lost what it held there, and went on at a later
    epoch, still has it when it is back. Parts of the newest epoch that are a whole session by
    themselves are all of it; otherwise older ones are on their way through a change. Of copies
    those that have fallen behind are none of it, either way: the others have what they have.
    """
    newest = _newest(infos)
    return newest if find_loss(newest) is None else without_laggards(infos)


def is_left_behind(epoch: int, latest: int) -> bool:
    """Whether a part at an epoch is none of a session any more of which another is known.

    One epoch behind may be a change that is half done; nobody gets two ahead of a worker that the
    session still needs.
    """
    return epoch <= latest - 2


def _newest(infos: Sequence[SessionInfo]) -> list[SessionInfo]:
    epoch = max((info.epoch for info in infos), default=0)
    return without_laggards(info for info in infos if info.epoch == epoch)


def pages_lost(from_position: int) -> PagesLost:
    """Return the error for tokens that went with their worker."""
    return PagesLost(
        f"a worker of this session is gone, and its tokens from position {from_position} with it",
        from_position=from_position,
    )


def _united(infos: Sequence[SessionInfo]) -> tuple[RowRange, ...]:
    """Return all padding that the parts know of. Each knows at least of that which it holds."""
    if len(infos) == 1:
        return infos[0].padding
    united: list[RowRange] = []
    ranges = (item for info in infos for item in info.padding)
    for item in sorted(ranges, key=lambda item: (item.row, item.start)):
        last = united[-1] if united else None
        if last is not None and last.row == item.row and item.start <= last.stop:
            united[-1] = RowRange(item.row, last.start, max(last.stop, item.stop))
        else:
            united.append(item)
    return tuple(united)


def _layer_lengths(ordered: Sequence[SessionInfo], layer: int) -> tuple[int, ...]:
    lengths: list[int] = []
    for info in ordered:
        starts = info.extents[0].starts
        if not starts:
            continue
        stored = info.lengths[layer] if layer < len(info.lengths) else starts
        lengths = lengths or [0] * len(starts)
        for row, (start, stop) in enumerate(zip(starts, stored, strict=True)):
            # A layer that fell behind before this extent began ends where it fell behind.
            if start <= lengths[row]:
                lengths[row] = max(lengths[row], stop)
    return tuple(lengths)
