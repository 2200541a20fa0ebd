"""Which positions of a row are padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvservice.core.errors import InvalidRequest
from kvservice.core.session import MAX_TOKENS, RowRange

PADDING = 1


class RowPadding:
    """The padding of one row: a leading run, and single positions after it.

    A position may turn into padding, never back (but by `cut`). Positions that were never marked
    are not padding.

    Invariants (asserted by `check`):
      1. `bits`, if any, is indexed by position; it has a 1 somewhere at or after `leading`, and
         a 0 at `leading` if it reaches so far.
    """

    __slots__ = ("_bits", "_leading")

    def __init__(self) -> None:
        self._leading = 0
        self._bits: bytearray | None = None

    @property
    def leading(self) -> int:
        """Length of the run of padding at position 0."""
        return self._leading

    @property
    def bits(self) -> bytearray | None:
        """One byte a position, 1 = padding, as far as marked; None if all padding is leading."""
        return self._bits

    def mark(self, start: int, stop: int) -> None:
        """Make padding of positions [start, stop)."""
        start = max(start, self._leading)
        if start >= stop:
            return
        if start == self._leading and self._bits is None:
            self._leading = stop
            return
        bits = self._bits if self._bits is not None else bytearray(self._leading)
        if len(bits) < stop:
            bits.extend(bytes(stop - len(bits)))
        bits[start:stop] = bytes([PADDING]) * (stop - start)
        self._bits = bits
        self._settle()

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield all padding as ranges [start, stop), rising."""
        if self._leading:
            yield 0, self._leading
        bits = self._bits
        if bits is None:
            return
        start = bits.find(PADDING, self._leading)
        while start >= 0:
            stop = bits.find(0, start)
            stop = stop if stop >= 0 else len(bits)
            yield start, stop
            start = bits.find(PADDING, stop)

    def covers(self, start: int, stop: int) -> bool:
        """Whether all positions in [start, stop) are padding."""
        start = max(start, self._leading)
        if start >= stop:
            return True
        bits = self._bits
        return bits is not None and len(bits) >= stop and bits.find(0, start, stop) < 0

    def cut(self, length: int) -> None:
        """Forget everything at and after position `length`."""
        self._leading = min(self._leading, length)
        if self._bits is not None:
            del self._bits[length:]
            self._settle()

    def copy(self) -> RowPadding:
        other = RowPadding()
        other._leading = self._leading
        other._bits = None if self._bits is None else bytearray(self._bits)
        return other

    def check(self) -> None:
        if self._bits is not None:
            assert self._bits.find(PADDING, self._leading) >= 0, "bits without use"
            assert len(self._bits) <= self._leading or self._bits[self._leading] == 0

    def _settle(self) -> None:
        bits = self._bits
        assert bits is not None
        first_real = bits.find(0, self._leading)
        self._leading = max(self._leading, first_real if first_real >= 0 else len(bits))
        if bits.find(PADDING, self._leading) < 0:
            self._bits = None


def check_ranges(ranges: Sequence[RowRange], num_rows: int) -> None:
    """Refuse padding that no row can have.

    Raises:
        InvalidRequest: There is no such row, or a range is empty, or out of bounds.
    """
    for item in ranges:
        if not 0 <= item.row < num_rows:
            raise InvalidRequest(f"padding of row {item.row}: there are {num_rows} rows")
        if not 0 <= item.start < item.stop <= MAX_TOKENS:
            raise InvalidRequest(f"padding must be a range of positions, got {item}")


def padding_after(
    before: Sequence[RowPadding], ranges: Sequence[RowRange], lengths: Sequence[int]
) -> list[RowPadding]:
    """Return the rows' padding with more of it marked, as far as rows reach: `lengths`.

    Rows without new padding are the same objects.
    """
    padding = list(before)
    copied: set[int] = set()
    for item in ranges:
        if item.row not in copied:
            padding[item.row] = padding[item.row].copy()
            copied.add(item.row)
        padding[item.row].mark(item.start, min(item.stop, lengths[item.row]))
    return padding
