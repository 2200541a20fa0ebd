"""Placement, and how a session is put together from what its workers say."""

from __future__ import annotations

import uuid
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.errors import Conflict, PagesLost
from kvservice.core.extents import Loss, current, find_loss, join_parts, merge_sessions
from kvservice.core.placement import Candidate, rank
from kvservice.core.session import Extent, RowRange, SessionInfo, SessionSpec

SESSION_ID = str(uuid.UUID(int=0xABC, version=4))


def test_most_free_bytes_come_first() -> None:
    """Free bytes decide; among equals, fewer sessions, then the id."""
    candidates = [
        Candidate("d", 50, 9),
        Candidate("c", 50, 2),
        Candidate("b", 50, 2),
        Candidate("a", 10, 0),
        Candidate("e", 99, 99),
    ]
    assert rank(candidates) == ["e", "b", "c", "d", "a"]
    assert rank([]) == []


def part(
    worker_id: str,
    starts: tuple[int, ...],
    lengths: list[tuple[int, ...]],
    *,
    epoch: int = 1,
    reserve: int | None = None,
    followed_by: str = "",
    replaces: tuple[str, ...] = (),
    group: int = 0,
) -> SessionInfo:
    """Return what a worker says that holds `lengths[layer][row]`, from `starts[row]`.

    Its incarnation is called as the worker, in upper case.
    """
    stops = tuple(max(column) for column in zip(*lengths, strict=True)) if lengths else starts
    return SessionInfo(
        session_id=SESSION_ID,
        epoch=epoch,
        step=epoch,
        spec=SessionSpec(max(1, len(starts)), reserve_tokens=reserve),
        extents=(
            Extent(
                worker_id,
                f"{worker_id}:1",
                worker_id.upper(),
                starts,
                stops,
                followed_by,
                group=group,
                replaces=replaces,
            ),
        ),
        lengths=tuple(lengths),
    )


def workers(info: SessionInfo) -> str:
    return "".join(extent.worker_id for extent in info.extents)


def test_padding_is_what_any_worker_knows() -> None:
    """Each knows at least of that which it holds; what several say is said once."""
    first = replace(part("a", (0, 0), [(16, 16)]), padding=(RowRange(0, 0, 9), RowRange(1, 3, 5)))
    ranges = (RowRange(0, 2, 9), RowRange(0, 16, 20), RowRange(1, 5, 6))
    second = replace(part("b", (16, 16), [(20, 20)]), padding=ranges)
    expected = (RowRange(0, 0, 9), RowRange(0, 16, 20), RowRange(1, 3, 6))
    for infos in ([first, second], [second, first]):
        assert merge_sessions(infos).padding == expected
    assert not merge_sessions([first, second]).padding_unlisted
    unlisted = replace(first, padding=(), padding_unlisted=True)
    assert merge_sessions([unlisted, second]).padding_unlisted


def test_extents_come_in_position_order() -> None:
    """Whatever the order of the answers, the tail is the last."""
    first = part("a", (0, 0), [(16, 10)])
    second = part("b", (16, 10), [(32, 12)])
    third = part("c", (32, 12), [(40, 12)])
    for infos in ([third, first, second], [second, third, first]):
        merged = merge_sessions(infos)
        assert workers(merged) == "abc"
        assert merged.lengths == ((40, 12),)


def test_a_fresh_extent_is_the_tail_and_a_closed_one_is_not() -> None:
    """An extent that was just opened takes the next token; one emptied by Pop does not."""
    first = part("a", (0,), [(20,)])
    assert workers(merge_sessions([part("b", (20,), []), first])) == "ab"
    assert workers(merge_sessions([first, part("b", (30,), [])])) == "ba"
    assert workers(merge_sessions([first, part("b", (), [])])) == "ba"


def test_extents_without_a_start_keep_their_order() -> None:
    """Before anything is stored, the manager's order is the only one there is."""
    infos = [part(name, (), []) for name in "cab"]
    assert workers(merge_sessions(infos)) == "cab"
    assert merge_sessions(infos).lengths == ()


def test_layer_that_fell_behind_ends_where_it_did() -> None:
    """A step that died half-way before the second extent began is not hidden by its start."""
    first = part("a", (0,), [(20,), (16,)])
    second = part("b", (20,), [(25,)])
    assert merge_sessions([first, second]).lengths == ((25,), (16,))


def test_reservation_is_told_by_the_worker_that_has_it() -> None:
    """Extents that were added later have none, and come later."""
    first = part("a", (0,), [(20,)], reserve=64)
    merged = merge_sessions([part("b", (20,), [(30,)]), first])
    assert merged.spec.reserve_tokens == 64


def test_half_done_change_is_a_conflict() -> None:
    """Workers at different epochs have no common answer; a list shows the newest."""
    ahead, behind = part("a", (0,), [(10,)], epoch=2), part("b", (10,), [(20,)])
    with pytest.raises(Conflict) as caught:
        merge_sessions([ahead, behind])
    assert caught.value.metadata["epochs"] == "1,2"
    assert join_parts([ahead, behind]).lengths == ((10,),)


@pytest.mark.parametrize(
    ("infos", "position"),
    [
        ([part("a", (0,), [(10,)]), part("b", (12,), [(20,)])], 10),
        ([part("b", (12,), [(20,)])], 0),
        ([part("a", (0, 0), [(3, 10)]), part("b", (3, 12), [(3, 20)])], 10),
        ([part("a", (0, 0), [(9, 4)]), part("b", (16, 4), [(20, 8)])], 9),
    ],
)
def test_gap_is_lost_pages(infos: list[SessionInfo], position: int) -> None:
    """Tokens missing before stored ones are never passed over, in whichever row."""
    with pytest.raises(PagesLost) as caught:
        merge_sessions(infos)
    assert caught.value.metadata["from_position"] == str(position)


def test_what_should_follow_the_last_tokens_is_missed() -> None:
    """Each worker knows where the session goes on: nobody there is a loss, at that position."""
    first = part("a", (0, 0), [(20, 12)], followed_by="B")
    tail = part("b", (20, 12), [(25, 12)])
    assert find_loss([first, tail]) is None
    assert find_loss([first]) == Loss(12, ("B",))
    assert find_loss([tail]) == Loss(0)
    assert find_loss([]) is None


def test_parts_that_hold_nothing_are_not_taken_for_a_whole() -> None:
    """A worker that was opened, or emptied, behind tokens does not know that there are any."""
    assert find_loss([part("a", (0, 0), [])]) is None
    assert find_loss([part("a", (0,), []), part("b", (), [])]) is None
    assert find_loss([part("b", (), [])]) == Loss(0)
    assert find_loss([part("b", (16,), [])]) == Loss(0)
    assert find_loss([part("a", (), []), part("b", (), [])]) is None, "nothing is stored yet"


def test_a_follower_may_hold_nothing_yet() -> None:
    """It has been opened, or emptied, and the next tokens go there."""
    first = part("a", (0,), [(20,)], followed_by="B")
    for starts in ((20,), ()):
        assert find_loss([part("b", starts, []), first]) is None
    assert find_loss([part("c", (), []), first]) == Loss(20, ("B",))


def test_a_part_is_not_what_follows_it_though_it_was_once_there() -> None:
    """A session moves from a worker, and grows there again: that part is another one, and its
    tokens are missed. What has moved away from where it is expected to follow is still found."""
    first = part("a", (0,), [(10,)], followed_by="C", replaces=("B",))
    second = part("c", (10,), [(20,)], followed_by="B")
    assert find_loss([first, second]) == Loss(20, ("B",))
    assert find_loss([part("a", (0,), [(20,)], followed_by="B", replaces=("B",))]) is not None
    moved = part("d", (20,), [], replaces=("B",))
    assert find_loss([first, second, moved]) is None
    copy = part("a", (0,), [(20,)], epoch=2, followed_by="B", group=1)
    given_up = part("d", (0,), [(20,)], replaces=("B",), group=1)
    assert find_loss([copy, given_up]) == Loss(20, ("B",))
    assert find_loss([copy, given_up, part("e", (20,), [], replaces=("B",), group=2)]) is None


def test_what_the_session_has_left_behind() -> None:
    """A worker that comes back with what was given up is told from one that lacks a change."""
    whole = part("a", (0,), [(20,)], epoch=2)
    before = part("b", (20,), [(25,)], epoch=1)
    assert current([before, whole]) == [whole]
    followed = part("a", (0,), [(20,)], epoch=2, followed_by="B")
    assert current([before, followed]) == [before, followed], "the change is half done"
    assert find_loss([before, followed]) is None
    emptied = part("b", (), [], epoch=3)
    both = [part("a", (0,), [(20,)], followed_by="B"), emptied]
    assert current(both) == both, "it may have been emptied behind tokens"
    later = part("b", (20,), [(25,)], epoch=2)
    first = part("a", (0,), [(20,)], epoch=1)
    assert current([first, later]) == [first, later], "no whole by itself"


@given(
    cuts=st.lists(st.integers(0, 30), min_size=1, max_size=5).map(sorted),
    order=st.randoms(use_true_random=False),
)
def test_any_cut_of_a_session_merges_back(cuts: list[int], order: object) -> None:
    """However a row is cut over workers, order and length come back."""
    bounds = [0, *cuts]
    infos = [
        part(f"w{index}", (start,), [(stop,)])
        for index, (start, stop) in enumerate(pairwise(bounds))
    ]
    shuffled = list(infos)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    merged = merge_sessions(shuffled)
    held = [extent for extent in merged.extents if extent.starts != extent.stops]
    assert [extent.starts for extent in held] == sorted(extent.starts for extent in held)
    assert merged.lengths == ((cuts[-1],),)
