"""The client's picture of a session: steps, padding, extents, and what each worker is asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.errors import (
    Conflict,
    GeometryMismatch,
    InvalidRequest,
    KVServiceError,
    OutOfOrder,
)
from kvservice.core.geometry import LayerSpec, cdiv
from kvservice.core.session import Extent as Told
from kvservice.core.session import RowRange, SessionInfo, SessionSpec
from kvservice_client._ask import Ask, read_ask
from kvservice_client._extents import Extent, adopt, cut_into_parts
from kvservice_client._merge import Partial, merge
from kvservice_client._mirror import Mirror, Step
from kvservice_client._padding import Padding, add_new, as_packed_or_whole
from kvservice_client._steps import (
    header_for,
    packed_index,
    padded_queries,
    parts_of,
    query_positions_of,
    step_for_append,
    step_for_queries,
)
from tests.oracles import dense_attention

SESSION_ID = "5c0f4d0e-3f0a-4f49-9d8e-0d7d6a1b2c3d"


def mirror(num_rows: int = 2, **spec: Any) -> Mirror:
    info = SessionInfo(SESSION_ID, 1, 0, SessionSpec(num_rows, **spec), ())
    made = Mirror(info)
    nothing = (0,) * num_rows
    made.extents = [Extent("a", "i", nothing, nothing, "w0")]
    return made


def ask(
    layer: int = 0, tokens: int | None = 1, *, num_rows: int = 2, queries: int = 1, **options: Any
) -> Ask:
    shape = (num_rows, 2, tokens or queries, 4)
    x = np.zeros(shape, np.float32)
    arguments: dict[str, Any] = {
        "counts": None, "pos": None, "query_positions": None, "mask": "causal", "window": None,
        "chunk": None, "scale": None, "softcap": None, "sinks": None, "bias": None,
        "column_starts": None, **options,
    }  # fmt: skip
    k = None if tokens is None else x
    return read_ask(layer, x, k, k, num_rows=num_rows, **arguments)


def commit(picture: Mirror, step: Step, layer: int, positions: tuple[int, ...]) -> None:
    """What a success does."""
    step.begun, picture.step, picture.padding = True, step, step.padding
    picture.last_step = step.number
    step.appended[layer] = positions
    picture.lengths[layer] = step.after


def append(picture: Mirror, layer: int, tokens: int = 1, **options: Any) -> Step:
    padding = options.pop("padding", None)
    call = ask(layer, tokens, num_rows=picture.num_rows, **options)
    step, positions = step_for_append(picture, call, padding, options.pop("retain", 0))
    commit(picture, step, layer, positions)
    return step


# Steps


def test_a_step_ends_where_a_layer_comes_again() -> None:
    """Layers come one after the other; the first one that comes again begins the next step."""
    picture = mirror()
    numbers = [append(picture, layer).number for layer in (0, 1, 2, 0, 1, 2, 0)]
    assert numbers == [1, 1, 1, 2, 2, 2, 3]
    assert picture.layer_lengths(0) == (3, 3)
    assert picture.layer_lengths(2) == (2, 2)


def test_layers_of_a_step_share_counts_and_positions() -> None:
    """Other numbers of tokens, or a layer that was left behind, do not fit."""
    picture = mirror()
    append(picture, 0, 3)
    with pytest.raises(Conflict, match="new tokens per row"):
        append(picture, 1, 2)
    append(picture, 1, 3)
    append(picture, 0)
    append(picture, 0)
    with pytest.raises(Conflict, match="left it behind"):
        append(picture, 1)


def test_structural_changes_end_steps() -> None:
    """After any of them the next append begins a new step."""
    for change in (
        lambda picture: picture.cut([1, 1]),
        lambda picture: picture.select([1, 0]),
        lambda picture: picture.reset(),
    ):
        picture = mirror()
        append(picture, 0, 2)
        epoch = picture.epoch
        change(picture)
        assert picture.epoch == epoch + 1
        assert append(picture, 1 if not picture.lengths else 0).number == 2


def test_positions_that_are_said() -> None:
    """The stored length appends, where the last append stood repeats it, all else is refused."""
    picture = mirror()
    append(picture, 0, 3)
    append(picture, 0, 2)
    step, positions = step_for_append(picture, ask(0, 2, pos=[3, 3]), None, 0)
    assert (step, positions) == (picture.step, (3, 3))
    step, positions = step_for_append(picture, ask(0, 2, pos=5), None, 0)
    assert (step.number, positions) == (3, (5, 5))
    for wrong in (4, [3, 5], 0):
        with pytest.raises(OutOfOrder) as failure:
            step_for_append(picture, ask(0, 2, pos=wrong), None, 0)
        assert failure.value.metadata["lengths"] == "5,5"
    with pytest.raises(OutOfOrder):  # a repeat has as many tokens
        step_for_append(picture, ask(0, 1, pos=3), None, 0)


def test_a_failed_step_must_be_dealt_with() -> None:
    """No step begins while a call of the last one has failed and was not repeated."""
    picture = mirror()
    append(picture, 0)
    picture.note_failure(1)
    with pytest.raises(Conflict, match="layer 1"):
        append(picture, 0)
    assert picture.shortest() == (0, 0)
    append(picture, 1)
    assert picture.step is not None
    picture.step.failed_layer = None
    append(picture, 0)
    assert picture.shortest() == (1, 1)


def test_what_a_roll_back_keeps() -> None:
    """The shortest layer; nothing of a step that has failed, whatever of it is stored."""
    picture = mirror()
    for layer in (0, 1):
        append(picture, layer, 4)
    append(picture, 0)
    assert picture.shortest() == (4, 4)
    append(picture, 1)
    assert picture.shortest() == (5, 5)
    assert picture.step is not None
    picture.step.failed_layer = 1
    assert picture.shortest() == (4, 4)


def test_stated_layers_are_missed_in_the_first_step() -> None:
    """If a session states its layers, its first step is not over before all have come."""
    picture = mirror(layers=(LayerSpec(), LayerSpec()))
    append(picture, 0, 4)
    assert picture.shortest() == (0, 0)
    append(picture, 1, 4)
    assert picture.shortest() == (4, 4)


def test_queries_belong_to_the_current_step() -> None:
    """They begin one only where there is none, or where they bring new padding."""
    picture = mirror()
    first = step_for_queries(picture, ask(tokens=None, mask="full"), None)
    assert (first.number, first.counts) == (1, (0, 0))
    append(picture, 0, 3)
    assert step_for_queries(picture, ask(tokens=None), None) is picture.step
    known = np.zeros((2, 3), np.bool_)
    assert step_for_queries(picture, ask(tokens=None), known) is picture.step
    known[0, 1] = True
    step = step_for_queries(picture, ask(tokens=None), known)
    assert step.number == 2
    assert step.new_padding == [RowRange(0, 1, 2)]


@pytest.mark.parametrize(
    ("retain", "expected"), [(0, (5, 3)), (2, (3, 1)), (4, (1, 0)), (6, None), (None, None)]
)
def test_evictions(retain: int | None, expected: tuple[int, int] | None) -> None:
    """What no later query sees, by window and row, but for what is retained."""
    picture = mirror(layers=(LayerSpec(window=4), LayerSpec(), LayerSpec(window=4)))
    picture.lengths = {0: (8, 6), 1: (100, 100), 2: (9, 6)}
    found = picture.evictions(retain)
    assert [(one.window, one.positions) for one in found] == ([(4, expected)] if expected else [])


# Padding


def test_padding_in_either_form() -> None:
    """The new tokens, or all positions; both say the same."""
    before, counts, after = (3, 3), (2, 2), (5, 5)
    new = np.array([[True, False], [False, True]])
    whole = np.concatenate([np.zeros((2, 3), np.bool_), new], 1)
    results = []
    for given_bits in (new, whole):
        bits = as_packed_or_whole(given_bits, counts, after, packed=False)
        padding, ranges = add_new(Padding.none(2), before, counts, bits)
        assert ranges == [RowRange(0, 3, 4), RowRange(1, 4, 5)]
        results.append(padding.ranges())
    assert results[0] == results[1]


def test_padding_may_come_later_but_never_go() -> None:
    """An older position may turn into padding; a padded one that is real again is refused."""
    padding, _ = add_new(Padding.none(1), (0,), (4,), np.array([True, False, False, False]))
    later = np.array([[True, False, True, False, False]])
    padding, ranges = add_new(padding, (4,), (1,), later)
    assert ranges == [RowRange(0, 2, 3)]
    with pytest.raises(InvalidRequest, match="never turns back") as failure:
        add_new(padding, (5,), (1,), np.zeros((1, 6), np.bool_))
    assert failure.value.metadata == {"row": "0", "position": "0"}


@pytest.mark.parametrize("shape", [(2, 4), (2, 6), (3, 5), (4,), (2, 5, 1)])
def test_padding_of_another_shape(shape: tuple[int, ...]) -> None:
    """The message says both shapes that would do."""
    with pytest.raises(InvalidRequest, match=r"\[2, 2\].*\[2, 5\]"):
        as_packed_or_whole(np.zeros(shape, np.bool_), (2, 2), (5, 5), packed=False)


def test_layers_of_a_step_share_its_padding() -> None:
    """Said again it must be the same; not said it is the step's."""
    picture = mirror()
    padding = np.array([[True, False], [False, False]])
    append(picture, 0, 2, padding=padding)
    append(picture, 1, 2)
    append(picture, 2, 2, padding=padding.copy())
    with pytest.raises(Conflict, match="share its padding"):
        append(picture, 3, 2, padding=~padding)


@given(st.data())
def test_padding_is_what_a_set_says(data: st.DataObject) -> None:
    """Marking, cutting and selecting agree with plain sets, and ranges name each new one once."""
    num_rows = data.draw(st.integers(1, 3))
    padding, model = Padding.none(num_rows), [set[int]() for _ in range(num_rows)]
    for _ in range(data.draw(st.integers(1, 8))):
        row = data.draw(st.integers(0, len(model) - 1))
        start = data.draw(st.integers(0, 12))
        bits = np.array(data.draw(st.lists(st.booleans(), min_size=1, max_size=9)), np.bool_)
        new = set((start + np.flatnonzero(bits)).tolist()) - model[row]
        padding, ranges = padding.marked(row, start, bits)
        assert {p for one in ranges for p in range(one.start, one.stop)} == new
        assert all(one.row == row for one in ranges)
        model[row] |= new
        match data.draw(st.sampled_from(["cut", "select", "look"])):
            case "cut":
                keep = data.draw(st.lists(st.integers(0, 20), min_size=len(model)).map(tuple))
                padding = padding.cut(keep[: len(model)])
                model = [{p for p in one if p < k} for one, k in zip(model, keep, strict=False)]
            case "select":
                rows = data.draw(st.lists(st.integers(0, len(model) - 1), min_size=1, max_size=4))
                padding, model = padding.select(rows), [set(model[one]) for one in rows]
        for one, expected in enumerate(model):
            assert set(np.flatnonzero(padding.bits(one, 0, 30)).tolist()) == expected
        assert padding.empty == (not any(model)) or not padding.ranges()


# Extents


@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=4).filter(any),
    num_parts=st.integers(1, 5),
    page_size=st.integers(1, 17),
)
def test_cutting_into_parts(counts: list[int], num_parts: int, page_size: int) -> None:
    """Parts cover all tokens once, are cut at page boundaries, and are as even as pages allow."""
    starts = cut_into_parts(counts, num_parts, page_size)
    assert 1 <= len(starts) <= num_parts
    assert not any(starts[0])
    longest = counts.index(max(counts))
    stops = [*starts[1:], tuple(counts)]
    sizes = [stop[longest] - start[longest] for start, stop in zip(starts, stops, strict=True)]
    assert all(size > 0 for size in sizes)
    assert max(sizes) <= cdiv(cdiv(max(counts), page_size), num_parts) * page_size
    for part in starts:
        for first, count in zip(part, counts, strict=True):
            assert first == count or (first % page_size == 0 and first <= count)


def two_extents(lengths: tuple[int, ...], border: tuple[int, ...]) -> Mirror:
    picture = mirror(len(lengths))
    picture.extents[0].stops = border
    picture.extents.append(Extent("b", "j", border, lengths, "w1"))
    picture.lengths = {0: lengths}
    return picture


def test_new_tokens_go_to_the_tail_and_queries_to_all() -> None:
    """The worker below the tail is asked as well, and stores nothing."""
    picture = two_extents((9, 9), (8, 8))
    call = ask(0, 2)
    step, positions = step_for_append(picture, call, None, 0)
    below, tail = parts_of(picture, step, call, positions)
    assert (below.counts, tail.counts) == ((0, 0), (2, 2))
    assert tail.starts == (9, 9)
    assert below.first_query == tail.first_query == (0, 0)
    assert list(header_for(picture, step, below).counts) == [0, 0]
    assert list(header_for(picture, step, tail).counts) == [2, 2]


def test_a_prompt_is_shared_out() -> None:
    """Each worker gets its part, and the queries from there on; rows may end before."""
    picture = mirror(2)
    picture.extents = [
        Extent("a", "i", (0, 0), (4, 3), "w0"),
        Extent("b", "j", (4, 3), (0, 0), "w1"),
    ]
    x = np.zeros((10, 2, 4), np.float32)
    call = read_ask(
        0, x, x, x, num_rows=2, counts=[7, 3], pos=None, query_positions=None, mask="causal",
        window=None, chunk=None, scale=None, softcap=None, sinks=None, bias=None,
        column_starts=None,
    )  # fmt: skip
    step, positions = step_for_append(picture, call, None, 0)
    first, second = parts_of(picture, step, call, positions)
    assert (first.starts, first.stops, first.first_query) == ((0, 0), (4, 3), (0, 0))
    assert (second.starts, second.stops, second.first_query) == ((4, 3), (7, 3), (4, 3))
    index = packed_index((7, 3), second.first_query, (7, 3))
    assert index is not None
    assert index.tolist() == [4, 5, 6]


def test_a_layer_that_a_worker_does_not_hold() -> None:
    """Only workers that hold something of the layer are asked."""
    picture = two_extents((9, 9), (8, 8))
    picture.lengths[1] = (8, 8)
    call = ask(1, None)
    step = step_for_queries(picture, call, None)
    assert [part.extent.address for part in parts_of(picture, step, call, (8, 8))] == ["a"]


def test_evictions_reach_no_further_than_an_extent() -> None:
    """A worker is told of its own positions alone."""
    picture = two_extents((20, 20), (8, 8))
    picture.windows = (4,)
    call = ask(0, 1)
    step, positions = step_for_append(picture, call, None, 0)
    parts = parts_of(picture, step, call, positions)
    told = [header_for(picture, step, part).evict_before[0].positions for part in parts]
    assert [list(one) for one in told] == [[8, 8], [17, 17]]


def test_a_new_worker_is_told_of_all_padding() -> None:
    """Chunks are counted from the end of leading padding, which another worker holds."""
    picture = two_extents((9, 9), (8, 8))
    picture.padding, _ = picture.padding.marked(0, 0, np.array([True, True]))
    picture.extents[1].knows_padding = False
    call = ask(0, 1)
    step, positions = step_for_append(picture, call, np.array([[False], [True]]), 0)
    below, tail = parts_of(picture, step, call, positions)
    ranges = [
        [(one.row, one.start, one.stop) for one in header_for(picture, step, part).padding]
        for part in (below, tail)
    ]
    assert ranges == [[(1, 9, 10)], [(0, 0, 2), (1, 9, 10)]]


def test_a_cut_lets_the_tail_go_back() -> None:
    """An extent that holds nothing any more is a spare; rows may end on different workers."""
    picture = two_extents((9, 9), (8, 8))
    picture.cut([3, 9])
    assert [one.starts for one in picture.extents] == [(0, 0), (3, 8)]
    picture.cut([5, 8])
    assert [one.address for one in picture.extents] == ["a"]
    assert [one.address for one in picture.spares] == ["b"]
    assert picture.layer_lengths(0) == (3, 8)


def test_lost_extents_are_forgotten_by_the_cut() -> None:
    """Below them everything stays; if nothing was below, another worker begins anew."""
    picture = two_extents((9, 9), (8, 8))
    picture.extents[1].lost = True
    assert picture.pages_lost().metadata == {"from_position": "8"}
    picture.cut([8, 8])
    assert [one.address for one in picture.extents] == ["a"]
    picture = two_extents((9, 9), (8, 8))
    picture.extents[0].lost = True
    assert picture.pages_lost().metadata == {"from_position": "0"}
    picture.cut([0, 0])
    assert [(one.address, one.starts) for one in picture.extents] == [("b", (0, 0))]


def test_extents_as_the_manager_tells_them() -> None:
    """Known ones stay what they are; empty ones are spares, but for the last, which is the tail."""
    known = Extent("a", "i", (0, 0), (9, 9), "w0")
    told = [Told("w2", "c", "k"), Told("w0", "a", "i", (0, 0), (9, 9)), Told("w1", "b", "j")]
    extents, spares = adopt([known], told, (9, 9), 1)
    assert extents[0] is known
    assert [(one.address, one.starts) for one in extents] == [("a", (0, 0)), ("b", (9, 9))]
    assert [one.address for one in spares] == ["c"]
    assert not extents[1].knows_padding
    extents, spares = adopt((), told[:1] + told[2:], (0, 0), 2)
    assert [(one.address, one.starts) for one in extents] == [("c", (0, 0)), ("b", (0, 0))]
    assert not spares


def test_a_part_that_has_come_again_is_not_the_one_that_was_there() -> None:
    """Where a session has moved from a worker, and then grown onto it, that knows nothing yet."""
    was = Extent("a", "i", (0,), (9,), "w0", stay="first")
    told = [
        Told("w1", "b", "j", (0,), (9,), stay="second"),
        Told("w0", "a", "i", (9,), (9,), stay="third"),
    ]
    (moved, tail), spares = adopt([was], told, (9,), 1)
    assert not spares
    assert [(one.address, one.stay, one.starts) for one in (moved, tail)] == [
        ("b", "second", (0,)),
        ("a", "third", (9,)),
    ]
    assert moved is not was
    assert tail is not was
    assert not tail.knows_padding


@pytest.mark.parametrize("group", [0, 3], ids=["alone", "a copy"])
def test_a_part_that_has_moved_is_not_another_one(group: int) -> None:
    """What is told of elsewhere is the part that we know where it was; its copy becomes one."""
    first = Extent("a", "i", (0,), (9,), "w0", stay="first", group=group and 1)
    spare = Extent("b", "j", (9,), (9,), "w1", stay="second", group=group)
    told = [
        Told("w0", "a", "i", (0,), (9,), stay="first", group=group and 1),
        Told("w2", "c", "k", (9,), (9,), replaces=("j",), stay="third", group=group),
    ]
    (known, tail), spares = adopt([first, spare], told, (9,), 1)
    assert (known, tail) == (first, spare)
    assert not spares
    if not group:
        assert (tail.worker_id, tail.address, tail.incarnation, tail.stay) == (
            "w2",
            "c",
            "k",
            "third",
        )
        assert tail.twin is None
    else:
        assert tail.address == "b"
        assert tail.twin is not None
        assert (tail.twin.address, tail.twin.stay) == ("c", "third")


def test_where_another_part_is_now_a_copy_has_left() -> None:
    """A worker has one part of a session at most: the copy that was known there is elsewhere."""
    first = Extent("a", "i", (0,), (9,), "w0", group=1)
    told = [
        Told("w2", "c", "k", (0,), (9,), replaces=("i",), stay="second", group=1),
        Told("w0", "a", "i", (9,), (9,), stay="third", group=2),
        Told("w1", "b", "j", (9,), (9,), stay="fourth", group=2),
    ]
    (moved, tail), spares = adopt([first], told, (9,), 1)
    assert moved is first
    assert not spares
    assert (moved.address, moved.stay, moved.twin) == ("c", "second", None)
    assert [copy.address for copy in tail.copies] == ["a", "b"]


# Queries


def test_where_queries_stand() -> None:
    """At the new tokens; else at the newest positions; at none where the mask is full."""
    assert query_positions_of(ask(tokens=3), (5, 2)) is None
    assert query_positions_of(ask(tokens=None, queries=2), (5, 2)) == (3, 0)
    assert query_positions_of(ask(tokens=None, queries=2, mask="full"), (5, 2)) == (5, 2)
    assert query_positions_of(ask(tokens=None, query_positions=[1, 0]), (5, 2)) == (1, 0)
    with pytest.raises(InvalidRequest, match="query_positions"):
        query_positions_of(ask(tokens=None, queries=3), (5, 2))


def test_padded_queries() -> None:
    """Those that stand at padding, row by row."""
    padding, _ = Padding.none(2).marked(1, 3, np.array([True, False]))
    step = Step(1, (2, 2), (3, 3), (5, 5), padding)
    found = padded_queries(step, ask(tokens=2), (3, 3))
    assert found is not None
    assert found.tolist() == [False, False, True, False]
    assert padded_queries(step, ask(tokens=2), (8, 8)) is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": "causl"}, InvalidRequest, "mask must be"),
        ({"mask": "full", "window": 3}, InvalidRequest, "window goes with"),
        ({"mask": "chunk"}, InvalidRequest, "chunk goes with"),
        ({"chunk": 3}, InvalidRequest, "chunk goes with"),
        ({"window": 0}, InvalidRequest, "window must be at least 1"),
        ({"scale": float("nan")}, InvalidRequest, "scale must be finite"),
        ({"softcap": 0.0}, InvalidRequest, "softcap must be"),
        ({"sinks": np.zeros(3, np.float32)}, InvalidRequest, "sinks must be"),
        ({"bias": np.zeros((2, 2, 1), np.float32)}, InvalidRequest, "bias must be"),
        ({"bias": np.zeros((1, 1, 1, 4), np.bool_)}, InvalidRequest, "bias must be float"),
        ({"mask": np.zeros((3, 1, 1, 4), np.bool_)}, InvalidRequest, "mask must be"),
        ({"mask": np.zeros((1, 1, 1, 4), np.int64)}, InvalidRequest, "mask must be one of"),
        ({"column_starts": 0}, InvalidRequest, "column_starts goes with"),
        ({"mask": np.zeros((1, 1, 1, 4), np.bool_), "bias": np.zeros((1, 1, 1, 3), np.float32)},
         InvalidRequest, "columns"),
        ({"counts": [1]}, InvalidRequest, "counts must have"),
        ({"counts": [0, 0]}, InvalidRequest, "counts must be"),
        ({"counts": [2, -1]}, InvalidRequest, "counts must be"),
        ({"counts": [1, 1]}, InvalidRequest, "q must be"),
        ({"pos": -1}, InvalidRequest, "pos must be"),
        ({"pos": [1]}, InvalidRequest, "pos must be"),
        ({"pos": 1.0}, InvalidRequest, "pos"),
        ({"pos": 1, "tokens": None}, InvalidRequest, "pos goes with"),
        ({"query_positions": [0, 0, 0]}, InvalidRequest, "query_positions must be"),
        ({"num_rows": 3}, InvalidRequest, "q must be"),
        ({"layer": -1}, InvalidRequest, "layer must be"),
        ({"layer": True}, InvalidRequest, "layer must be"),
        ({"layer": 1024}, InvalidRequest, "layer must be"),
    ],
)  # fmt: skip
def test_what_is_refused(
    options: dict[str, Any], error: type[KVServiceError], message: str
) -> None:
    """Nothing is sent for a call that is wrong as it stands; the message says what was expected."""
    num_rows = options.pop("num_rows", 2)
    arguments: dict[str, Any] = {
        "layer": 0, "counts": None, "pos": None, "query_positions": None, "mask": "causal",
        "window": None, "chunk": None, "scale": None, "softcap": None, "sinks": None,
        "bias": None, "column_starts": None, **options,
    }  # fmt: skip
    x = np.zeros((2, 2, 1, 4), np.float32)
    k = None if "tokens" in arguments else x
    arguments.pop("tokens", None)
    with pytest.raises(error, match=message):
        read_ask(arguments.pop("layer"), x, k, k, num_rows=num_rows, **arguments)


@pytest.mark.parametrize(
    ("q", "k", "v", "error"),
    [
        ((2, 4, 3, 8), (2, 3, 3, 8), (2, 3, 3, 8), GeometryMismatch),
        ((2, 4, 3, 8), (2, 2, 3, 4), (2, 2, 3, 8), GeometryMismatch),
        ((2, 4, 3, 8), (2, 2, 2, 8), (2, 2, 3, 8), InvalidRequest),
        ((2, 4, 3, 8), (2, 2, 3, 8), (2, 1, 3, 8), InvalidRequest),
        ((2, 4, 3, 8), (2, 2, 3, 8), None, InvalidRequest),
        ((2, 4, 0, 8), (2, 2, 0, 8), (2, 2, 0, 8), InvalidRequest),
        ((2, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8), InvalidRequest),
        ((1, 4, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8), InvalidRequest),
    ],
)
def test_shapes_that_do_not_fit(q: Any, k: Any, v: Any, error: type[KVServiceError]) -> None:
    """q, k and v agree in rows, tokens, dims and groups of heads."""
    arrays = [None if one is None else np.zeros(one, np.float32) for one in (q, k, v)]
    options: dict[str, Any] = dict.fromkeys(
        ("counts", "pos", "query_positions", "window", "chunk", "scale", "softcap", "sinks",
         "bias", "column_starts")
    )  # fmt: skip
    with pytest.raises(error):
        read_ask(0, *arrays, num_rows=2, mask="causal", **options)


def test_dtypes_agree() -> None:
    """q, k and v are of one float dtype."""
    x = np.zeros((2, 2, 1, 4), np.float32)
    options: dict[str, Any] = dict.fromkeys(
        ("counts", "pos", "query_positions", "window", "chunk", "scale", "softcap", "sinks",
         "bias", "column_starts")
    )  # fmt: skip
    half, bits = x.astype(np.float16), x.astype(np.bool_)
    for arrays, error in (
        ((half, x, x), GeometryMismatch),
        ((x, x, half), InvalidRequest),
        ((x, bits, bits), InvalidRequest),
        ((bits, None, None), InvalidRequest),
    ):
        with pytest.raises(error):
            read_ask(0, *arrays, num_rows=2, mask="causal", **options)


# Merging


@given(
    seed=st.integers(0, 2**32 - 1),
    num_parts=st.integers(1, 4),
    with_sinks=st.booleans(),
    huge=st.booleans(),
)
def test_partials_merge_to_the_whole(
    seed: int, num_parts: int, with_sinks: bool, huge: bool
) -> None:
    """In any order, with empty ones among them, some of some queries alone, and sinks once."""
    rng = np.random.default_rng(seed)
    num_queries, num_heads, num_positions = 3, 2, 9
    q = rng.standard_normal((num_queries, num_heads, 4))
    k, v = rng.standard_normal((2, num_positions, 1, 4))
    owner = rng.integers(0, num_parts, num_positions)
    seen = rng.random((num_heads, num_queries, num_positions)) < 0.6
    sinks = rng.standard_normal(num_heads) if with_sinks else None
    expected, _ = dense_attention(q, k, v, seen, scale=0.5, sinks=sinks)
    partials = []
    for part in rng.permutation(num_parts):
        out, lse = dense_attention(q, k, v, seen & (owner == part), scale=0.5)
        index = rng.permutation(num_queries) if rng.random() < 0.5 else None
        order = slice(None) if index is None else index
        partials.append(
            Partial(out[order].astype(np.float32), lse[order].astype(np.float32), index)
        )
    if huge:  # scores far beyond what exp can take
        partials = [Partial(one.out, one.lse + np.float32(500), one.index) for one in partials]
        sinks = None if sinks is None else sinks + 500
    merged = merge(partials, num_queries, None if sinks is None else sinks.astype(np.float32)).out
    assert (
        np.abs(merged - expected).max() < 1e-4 if huge else np.abs(merged - expected).max() < 1e-5
    )


def test_merging_nothing() -> None:
    """Two empty sets are an empty set: 0, and no NaN."""
    empty = Partial(np.zeros((2, 1, 3), np.float32), np.full((2, 1), -np.inf, np.float32))
    nothing = merge([empty, empty], 2)
    assert not nothing.out.any()
    assert np.isneginf(nothing.lse).all()
    only = Partial(np.ones((1, 1, 3), np.float32), np.zeros((1, 1), np.float32), np.array([1]))
    assert merge([empty, only], 2).out[:, 0, 0].tolist() == [0.0, 1.0]
