"""Sessions of which there are copies: what counts, what has fallen behind, and what is lost."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.errors import Conflict
from kvservice.core.extents import (
    current,
    find_loss,
    merge_sessions,
    missing_copies,
    num_groups,
    without_laggards,
)
from kvservice.core.session import Extent, SessionInfo, SessionSpec

SESSION_ID = str(uuid.UUID(int=0xABC, version=4))
EPOCH = 3


@dataclass(frozen=True)
class Copy:
    """One copy of a part, and whether it has all that was acknowledged."""

    info: SessionInfo
    is_current: bool


@st.composite
def sessions(draw: st.DrawFn) -> tuple[list[list[Copy]], int]:
    """Return the copies of each part of a session, and the session's length."""
    borders = [0, *sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=3)))]
    lives = [
        [f"{number}{name}" for name in "AB"[: draw(st.integers(1, 2))]]
        for number in range(1, len(borders))
    ]
    groups = []
    for index, (start, stop) in enumerate(pairwise(borders)):
        follower = ",".join(lives[index + 1]) if index + 1 < len(lives) else ""
        is_tail = not follower
        whole = SessionInfo(
            session_id=SESSION_ID,
            epoch=EPOCH,
            step=7,
            spec=SessionSpec(1, replicas=2),
            extents=(Extent("", "", "", (start,), (stop,), followed_by=follower, group=index + 1),),
            lengths=((stop,), (stop,)),
            current_step=7,
        )
        behind = [
            replace(whole, epoch=EPOCH - 1),
            replace(whole, current_step=6) if is_tail else replace(whole, epoch=EPOCH - 1),
            replace(whole, lengths=((stop,), (start,))) if is_tail else replace(whole, epoch=1),
        ]
        copies = []
        for number, life in enumerate(lives[index]):
            is_current = number == 0 or draw(st.booleans())
            info = whole if is_current else draw(st.sampled_from(behind))
            extent = replace(info.extents[0], worker_id=life, address=life, incarnation=life)
            copies.append(Copy(replace(info, extents=(extent,)), is_current))
        groups.append(copies)
    return groups, borders[-1]


@given(sessions(), st.randoms(use_true_random=False))
def test_one_copy_of_each_part_is_all(session: tuple[list[list[Copy]], int], rng: object) -> None:
    """Whatever has fallen behind, and whoever is asked first, the others are the session."""
    groups, length = session
    infos = [copy.info for copies in groups for copy in copies]
    rng.shuffle(infos)  # type: ignore[attr-defined]
    good = [copy.info for copies in groups for copy in copies if copy.is_current]
    assert find_loss(infos) is None
    found = current(infos)
    assert {info.extents[0].incarnation for info in found} == {
        info.extents[0].incarnation for info in good
    }
    merged = merge_sessions(found)
    assert merged.lengths == ((length,), (length,))
    assert [extent.group for extent in merged.extents] == sorted(
        extent.group for extent in merged.extents
    )
    assert num_groups(found) == len(groups)
    assert missing_copies(found) == 2 * len(groups) - len(good)


@given(sessions(), st.data())
def test_a_part_without_a_copy_is_lost(
    session: tuple[list[list[Copy]], int], data: st.DataObject
) -> None:
    """Only when all current copies of a part are gone; from where it began."""
    groups, _ = session
    gone = data.draw(st.integers(0, len(groups) - 1))
    left = [
        copy.info
        for index, copies in enumerate(groups)
        for copy in copies
        if index != gone and copy.is_current
    ]
    loss = find_loss(left)
    if len(groups) == 1:
        assert not left
        return
    assert loss is not None
    assert loss.position == groups[gone][0].info.extents[0].starts[0]


def test_parts_without_copies_never_fall_behind() -> None:
    """Extents of no group are stripes, even if they look like copies."""
    infos = [
        SessionInfo(SESSION_ID, 1, step, SessionSpec(1, spread=2), (Extent(name, name, name),))
        for step, name in enumerate("ab")
    ]
    assert without_laggards(infos) == infos
    assert num_groups(infos) == 2


@pytest.mark.parametrize("num_empty", [1, 2])
def test_copies_that_hold_nothing(num_empty: int) -> None:
    """Two empty copies of one part are not two empty parts: others may have held tokens."""
    spec = SessionSpec(1, spread=2, replicas=2)
    one = SessionInfo(SESSION_ID, 1, 0, spec, (Extent("a", "a", "a", group=1),))
    infos = [
        replace(one, extents=(replace(one.extents[0], incarnation=str(n)),))
        for n in range(num_empty)
    ]
    assert find_loss(infos) is not None
    other = replace(one, extents=(replace(one.extents[0], group=2),))
    assert find_loss([*infos, other]) is None


def test_parts_that_differ_by_copies_alone() -> None:
    """Where copies of one part were made or given up, and the others are yet to come along, there
    is an epoch at which all are what they are; after another change there is none."""
    spec = SessionSpec(1, spread=2, replicas=2)
    whole = SessionInfo(SESSION_ID, 5, 1, spec, ())
    first, copy = (
        replace(
            whole,
            epoch=7,
            same_since_epoch=5,
            extents=(Extent(life, "", life, (0,), (4,), "C", group=1),),
            lengths=((4,),),
        )
        for life in "AB"
    )
    tail = replace(
        whole, extents=(Extent("C", "", "C", (4,), (9,), group=2),), lengths=((9,),), epoch=6
    )
    merged = merge_sessions([tail, first, copy])
    assert (merged.epoch, merged.lengths) == (6, ((9,),))
    assert [extent.incarnation for extent in merged.extents] == ["A", "B", "C"]
    assert merge_sessions([replace(tail, epoch=5), first]).epoch == 5
    for changed in (replace(tail, epoch=4), replace(tail, epoch=8)):
        with pytest.raises(Conflict, match="half done"):
            merge_sessions([changed, first])
    assert merge_sessions([replace(tail, epoch=8, same_since_epoch=7), first]).epoch == 7
