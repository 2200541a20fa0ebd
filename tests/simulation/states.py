"""What a session may hold, as plain arrays, and what operations make of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

DIM: Final = 2
MAX_LENGTH: Final = 24

Array = npt.NDArray[np.float32]
Bits = npt.NDArray[np.bool_]


@dataclass
class Places:
    """Where a write puts its tokens.

    Fields:
        rows: Of the session, in any order.
        positions: One list for each of them. None: behind each row's end, `count` tokens.
        padding: Which tokens are padding, bool[rows, tokens]; None: none is.
    """

    rows: list[int]
    count: int
    positions: list[list[int]] | None = None
    padding: Bits | None = None

    def of(self, index: int, length: int) -> list[int]:
        """Return the positions in the row of an index, which ends at `length`."""
        if self.positions is None:
            return list(range(length, length + self.count))
        return self.positions[index]


@dataclass
class State:
    """What a session may hold: by layer and row, keys and values [tokens, 2 * DIM]; and by row,
    which positions are padding, bool[longest layer]."""

    layers: list[list[Array]]
    padding: list[Bits]

    @property
    def num_rows(self) -> int:
        return len(self.layers[0])

    def lengths(self, layer: int = 0) -> tuple[int, ...]:
        return tuple(len(row) for row in self.layers[layer])

    def shortest(self) -> tuple[int, ...]:
        """Return per row what all layers hold."""
        columns = zip(*(self.lengths(layer) for layer in range(len(self.layers))), strict=True)
        return tuple(map(min, columns))

    def cut(self, keep: Sequence[int]) -> State:
        return State(
            [[row[:n] for row, n in zip(rows, keep, strict=True)] for rows in self.layers],
            [bits[:n] for bits, n in zip(self.padding, keep, strict=True)],
        )

    def select(self, rows: Sequence[int]) -> State:
        return State(
            [[layer[row] for row in rows] for layer in self.layers],
            [self.padding[row] for row in rows],
        )

    def appended(self, layer: int, tokens: Array) -> State:
        """Return it with tokens [rows, tokens, 2 * DIM] at the end of a layer."""
        return self._with(
            layer,
            [
                np.concatenate([row, new])
                for row, new in zip(self.layers[layer], tokens, strict=True)
            ],
            self.padding,
        )

    def written(self, layer: int, places: Places, tokens: Array) -> State:
        """Return it with tokens [places.rows, tokens, 2 * DIM] where they go in a layer.

        The last of two equal positions wins. What lies between a row's end and the tokens beyond it
        is padding from then on.
        """
        rows, padding = list(self.layers[layer]), list(self.padding)
        for index, row in enumerate(places.rows):
            where = places.of(index, len(rows[row]))
            after = max(len(rows[row]), *(position + 1 for position in where))
            rows[row] = _grown(rows[row], after)
            reached, bits = len(padding[row]), _grown(padding[row], after)
            bits[reached:] = True
            for position, token in zip(where, tokens[index], strict=True):
                rows[row][position] = token
                bits[position] &= position < reached
            if places.padding is not None:
                bits[np.array(where)[places.padding[index]]] = True
            padding[row] = bits
        return self._with(layer, rows, padding)

    def _with(self, layer: int, rows: list[Array], padding: Sequence[Bits]) -> State:
        layers = list(self.layers)
        layers[layer] = rows
        longest = [max(map(len, column)) for column in zip(*layers, strict=True)]
        return State(layers, [_grown(bits, n) for bits, n in zip(padding, longest, strict=True)])


@dataclass
class Story:
    """What survives a decoder's process: its session's id, and what that may hold.

    Fields:
        mixed: Each token may be that of any of the candidates: those on one worker may have been
            written, and those on another one not.
        epoch: At which the session was last.
    """

    session_id: str
    candidates: list[State]
    num_layers: int
    errors: list[str] = field(default_factory=list)
    mixed: bool = False
    epoch: int = 0

    def holds(self, *candidates: State, mixed: bool = False) -> None:
        """Note what the session holds, or may hold."""
        self.candidates, self.mixed = list(candidates), mixed


def empty(num_layers: int, num_rows: int) -> State:
    nothing = np.zeros((0, 2 * DIM), np.float32)
    return State(
        [[nothing] * num_rows for _ in range(num_layers)], [np.zeros(0, np.bool_)] * num_rows
    )


def same(stored: State, expected: State) -> bool:
    """Whether two states hold the same, padding included."""
    return same_tokens(stored, [expected]) and all(
        map(np.array_equal, stored.padding, expected.padding)
    )


def same_tokens(stored: State, expected: Sequence[State]) -> bool:
    """Whether each token is that of one of some states at its place, and none has more or less."""
    if any(one.num_rows != stored.num_rows for one in expected):
        return False
    for layer, rows in enumerate(stored.layers):
        for row, tokens in enumerate(rows):
            others = [one.layers[layer][row] for one in expected]
            if len(others) == 1:
                if not np.array_equal(tokens, others[0]):
                    return False
                continue
            if max(map(len, others)) < len(tokens):
                return False
            found = np.zeros(len(tokens), np.bool_)
            for other in others:
                n = min(len(other), len(tokens))
                found[:n] |= (tokens[:n] == other[:n]).all(axis=1)
            if not found.all():
                return False
    return True


def some_places(rng: random.Random, state: State) -> Places | None:
    """Return where a write may put tokens: behind what is there, in the place of it, or both, and
    with gaps. None: there is no room left for more."""
    lengths = state.lengths()
    rows = list(range(state.num_rows))
    if any(lengths) and rng.random() < 0.3:
        rows = rng.sample(rows, rng.randint(1, len(rows)))
    kind = rng.random()
    if kind < 0.4:
        places = Places(rows, rng.choice([1, 2, 3, 7]))
    else:
        count = rng.randint(1, 4)
        beyond = 0 if kind < 0.7 else 3  # so far behind the end
        beyond = beyond if any(lengths) else 3
        rows = [row for row in rows if lengths[row] + beyond]
        if not rows:
            return None
        where = [
            [rng.randrange(max(0, lengths[row] - 7), lengths[row] + beyond) for _ in range(count)]
            for row in rows
        ]
        places = Places(rows, count, where)
    if rng.random() < 0.2:
        drawn = [[rng.random() < 0.3 for _ in range(places.count)] for _ in rows]
        places.padding = np.array(drawn, np.bool_)
    longest = max(max(places.of(index, lengths[row])) + 1 for index, row in enumerate(places.rows))
    return places if longest <= MAX_LENGTH else None


def _grown(array: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """Return a copy with zeros up to a length."""
    grown = np.zeros((max(length, len(array)), *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown
