"""Which positions of a row are padding, against a plain list of bits."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.session import RowRange
from kvservice_client._padding import Padding
from kvservice_workers.padding import RowPadding

RANGES = st.tuples(st.integers(0, 20), st.integers(0, 8)).map(lambda t: (t[0], t[0] + t[1]))


@given(
    st.lists(
        st.one_of(RANGES.map(lambda r: ("mark", *r)), st.integers(0, 30).map(lambda n: ("cut", n)))
    )
)
def test_marks_and_cuts_as_a_list_of_bits_would(changes: list[tuple[object, ...]]) -> None:
    """Leading run, single bits, and the question whether a range is all padding."""
    padding, model = RowPadding(), [False] * 40
    for change in changes:
        match change:
            case ("mark", int(start), int(stop)):
                padding.mark(start, stop)
                model[start:stop] = [True] * (stop - start)
            case ("cut", int(length)):
                padding.cut(length)
                model[length:] = [False] * (40 - length)
        padding.check()
        assert padding.leading == next(i for i, bit in enumerate([*model, False]) if not bit)
        bits = padding.bits or b""
        known = [i < padding.leading or (i < len(bits) and bits[i] == 1) for i in range(40)]
        assert known == model
        listed = list(padding.ranges())
        assert [any(a <= i < b for a, b in listed) for i in range(40)] == model
        assert all(stop < start for (_, stop), (start, _) in pairwise(listed)), "apart, and rising"
        for start in range(0, 40, 3):
            for stop in range(start, 40, 5):
                assert padding.covers(start, stop) == all(model[start:stop])
        assert padding.copy().bits == padding.bits


@given(st.lists(st.tuples(st.integers(0, 2), RANGES), max_size=6))
def test_the_client_reads_what_workers_tell(changes: list[tuple[int, tuple[int, int]]]) -> None:
    """Ranges and bits, in the client's form and in the workers', say the same."""
    rows, mine = [RowPadding() for _ in range(3)], Padding.none(3)
    for row, (start, stop) in changes:
        rows[row].mark(start, stop)
        mine = mine.united(Padding.of(3, [RowRange(row, start, stop)] if start < stop else []))
    told = [
        RowRange(row, start, stop)
        for row, padding in enumerate(rows)
        for start, stop in padding.ranges()
    ]
    assert mine.ranges() == told == Padding.of(3, told).ranges()
