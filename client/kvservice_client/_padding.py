"""The client's picture of which positions are padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvservice.core.errors import InvalidRequest
from kvservice.core.session import RowRange

Bits = npt.NDArray[np.bool_]
_NONE: Bits = np.zeros(0, np.bool_)


class Padding:
    """Padding by row and position. Immutable: changes return another one.

    A row's bits reach as far as something was marked; positions behind them are not padding.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: Sequence[Bits]) -> None:
        self._rows = tuple(rows)

    @staticmethod
    def none(num_rows: int) -> Padding:
        return Padding([_NONE] * num_rows)

    @staticmethod
    def of(num_rows: int, ranges: Iterable[RowRange]) -> Padding:
        """Return padding as the service tells it: by row, rising."""
        rows = [_NONE] * num_rows
        for row, mine in groupby(ranges, key=lambda one: one.row):
            listed = list(mine)
            rows[row] = np.zeros(max(one.stop for one in listed), np.bool_)
            for one in listed:
                rows[row][one.start : one.stop] = True
        return Padding(rows)

    def united(self, other: Padding) -> Padding:
        """Return what is padding here or there."""
        united = self
        for row, bits in enumerate(other._rows):
            united, _ = united.marked(row, 0, bits)
        return united

    @property
    def empty(self) -> bool:
        """Whether no position is padding."""
        return not any(len(bits) for bits in self._rows)

    def bits(self, row: int, start: int, stop: int) -> Bits:
        """Return the row's bits at positions [start, stop)."""
        known = self._rows[row][start:stop]
        if len(known) == stop - start:
            return known
        result = np.zeros(stop - start, np.bool_)
        result[: len(known)] = known
        return result

    def ranges(self) -> list[RowRange]:
        """Return all padding."""
        return [found for row, bits in enumerate(self._rows) for found in _runs(row, 0, bits)]

    def marked(self, row: int, start: int, bits: Bits) -> tuple[Padding, list[RowRange]]:
        """Return this with padding added at positions from `start` on, and what is new of it."""
        new = bits & ~self.bits(row, start, start + len(bits))
        if not new.any():
            return self, []
        rows = list(self._rows)
        grown = np.zeros(max(len(rows[row]), start + len(bits)), np.bool_)
        grown[: len(rows[row])] = rows[row]
        grown[start : start + len(bits)] |= bits
        rows[row] = grown
        return Padding(rows), _runs(row, start, new)

    def cut(self, keep: Sequence[int]) -> Padding:
        """Forget each row's positions from `keep[row]` on."""
        if self.empty:
            return self
        return Padding([bits[:length] for bits, length in zip(self._rows, keep, strict=True)])

    def select(self, rows: Sequence[int]) -> Padding:
        """Return the padding of rows in a new order."""
        return Padding([self._rows[row] for row in rows])


def add_new(
    padding: Padding, before: Sequence[int], counts: Sequence[int], given: Bits
) -> tuple[Padding, list[RowRange]]:
    """Mark what is padding among new tokens.

    Args:
        before: Per row: position of the first new token.
        counts: Per row: new tokens.
        given: bool[sum(counts)], row by row; or bool[rows, longest length afterwards], all
            positions, where older ones may have turned into padding. What lies behind a row's
            end is ignored.

    Returns:
        The padding afterwards, and the ranges that are new.

    Raises:
        InvalidRequest: Another shape, or an older position that was padding and is real here.
    """
    if given.ndim == 1:
        return _add_packed(padding, before, counts, given)
    after = [start + count for start, count in zip(before, counts, strict=True)]
    ranges: list[RowRange] = []
    for row, (start, stop) in enumerate(zip(before, after, strict=True)):
        now = given[row, :stop]
        back = padding.bits(row, 0, start) & ~now[:start]
        if back.any():
            raise InvalidRequest(
                f"padding never turns back into tokens: row {row}, position {int(back.argmax())}",
                row=row,
                position=int(back.argmax()),
            )
        padding, new = padding.marked(row, 0, now)
        ranges += new
    return padding, ranges


def as_packed_or_whole(
    given: Bits, counts: Sequence[int], after: Sequence[int], packed: bool
) -> Bits:
    """Return a caller's padding in one of the two forms that `add_new` takes.

    Args:
        given: bool[rows, tokens] (with `packed` bool[sum(counts)]): the new tokens; or
            bool[rows, longest length afterwards]: all positions.

    Raises:
        InvalidRequest: Any other shape.
    """
    num_rows = len(counts)
    if packed and given.shape == (sum(counts),):
        return given
    if given.ndim == 2 and given.shape[0] == num_rows:
        if given.shape[1] == max(after):
            return given
        if not packed and given.shape[1] == counts[0]:
            return given.reshape(-1)
    new = f"[{sum(counts)}]" if packed else f"[{num_rows}, {counts[0]}]"
    raise InvalidRequest(
        f"padding must be {new} (the new tokens) or [{num_rows}, {max(after)}] (all positions), "
        f"got {list(given.shape)}"
    )


def _add_packed(
    padding: Padding, before: Sequence[int], counts: Sequence[int], given: Bits
) -> tuple[Padding, list[RowRange]]:
    if not given.any():
        return padding, []
    ranges: list[RowRange] = []
    offset = 0
    for row, (start, count) in enumerate(zip(before, counts, strict=True)):
        padding, new = padding.marked(row, start, given[offset : offset + count])
        ranges += new
        offset += count
    return padding, ranges


def _runs(row: int, start: int, bits: Bits) -> list[RowRange]:
    """Return the stretches of True in `bits`, whose first is at position `start`."""
    if not bits.any():
        return []
    edges = np.flatnonzero(np.diff(bits, prepend=False, append=False))
    return [
        RowRange(row, start + int(first), start + int(stop)) for first, stop in edges.reshape(-1, 2)
    ]
