"""Helpers for tests of decoders that use kvservice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.clock import SystemClock

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def eventually(
    predicate: Callable[[], object], *, timeout_s: float = 10.0, interval_s: float = 0.01
) -> None:
    """Wait until a condition holds, looking again and again; no longer than it takes.

    Raises:
        AssertionError: It did not hold within `timeout_s` seconds.
    """
    clock = SystemClock()
    deadline = clock.monotonic() + timeout_s
    while not predicate():
        if clock.monotonic() >= deadline:
            raise AssertionError(f"{predicate!r} did not become true within {timeout_s:g} s")
        clock.wait(threading.Event(), interval_s)


def dense_attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    visible: npt.ArrayLike = True,
    scale: float | None = None,
    softcap: float | None = None,
    bias: npt.ArrayLike = 0.0,
    sinks: npt.ArrayLike | None = None,
) -> Floats:
    """Attend densely, in float64: slow, obvious, and with nothing of ours in it.

    Args:
        q: [heads, queries, dim]
        k, v: [kv_heads, positions, dim]. Query head h reads KV head h // (heads // kv_heads).
        visible: bool, broadcastable to [heads, queries, positions].
        scale: Factor on q·k. None: 1 / sqrt(dim).
        softcap: Scores become softcap * tanh(score / softcap).
        bias: Added to the scores after that; broadcastable to [heads, queries, positions].
        sinks: [heads]: a logit without a value.

    Returns:
        f64[heads, queries, v_dim]; 0 for a query that sees nothing.
    """
    q64, k64, v64 = (np.asarray(array, np.float64) for array in (q, k, v))
    heads, queries, dim = q64.shape
    kv_heads, positions, _ = k64.shape
    out = np.zeros((heads, queries, v64.shape[2]))
    seen = np.broadcast_to(np.asarray(visible, np.bool_), (heads, queries, positions))
    added = np.broadcast_to(np.asarray(bias, np.float64), (heads, queries, positions))
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        scores = q64[head] @ k64[kv_head].T * (dim**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        scores = np.where(seen[head], scores + added[head], -np.inf)
        for query in range(queries):
            logits = scores[query]
            if sinks is not None:
                logits = np.append(logits, np.asarray(sinks, np.float64)[head])
            if not np.isfinite(logits).any():
                continue
            weights = np.exp(logits - logits.max())
            out[head, query] = weights[:positions] / weights.sum() @ v64[kv_head]
    return out


class DenseSession:
    """Does in memory, densely and in float64, what a `Session` does on the service.

    An oracle for tests: feed it the same calls, and compare. It checks nothing.
    """

    def __init__(self, num_rows: int) -> None:
        # Layer -> row -> [kv_heads, positions, dim]
        self._k: dict[int, list[Floats]] = {}
        self._v: dict[int, list[Floats]] = {}
        self.padding: list[set[int]] = [set() for _ in range(num_rows)]

    @property
    def num_rows(self) -> int:
        return len(self.padding)

    def lengths(self, layer: int = 0) -> tuple[int, ...]:
        if layer not in self._k:
            return (0,) * self.num_rows
        return tuple(row.shape[1] for row in self._k[layer])

    def attend(
        self,
        layer: int,
        q: npt.ArrayLike,
        k: npt.ArrayLike | None = None,
        v: npt.ArrayLike | None = None,
        *,
        mask: Any = "causal",
        window: int | None = None,
        chunk: int | None = None,
        counts: Sequence[int] | None = None,
        padding: Any = None,
        bias: Any = None,
        column_starts: Sequence[int] | None = None,
        query_positions: Sequence[int] | None = None,
        **scoring: Any,
    ) -> Floats:
        """As `Session.attend`."""
        q_rows = _split(q, counts)
        before = self.lengths(layer)
        if k is not None and v is not None:
            k_rows, v_rows = _split(k, counts), _split(v, counts)
            self._append(layer, k_rows, v_rows)
            self._mark(padding, before, [row.shape[1] for row in k_rows])
        out = []
        for row, q_row in enumerate(q_rows):
            length = self.lengths(layer)[row]
            first = length - q_row.shape[1]
            first = first if query_positions is None else query_positions[row]
            where = np.arange(first, first + q_row.shape[1])
            visible, added = np.ones((1, len(where), length), np.bool_), np.zeros((1, 1, length))
            for array in (mask if not isinstance(mask, str) else None, bias):
                if array is not None:
                    start = None if column_starts is None else column_starts[row]
                    seen, score = _columns(np.asarray(array), row, length, start)
                    visible, added = visible & seen, added + score
            visible = visible & self._visible(row, where, length, mask, window, chunk)
            one = dense_attention(
                q_row, self._k[layer][row], self._v[layer][row],
                visible=visible, bias=added, **scoring,
            )  # fmt: skip
            if k is not None or mask != "full":
                one[:, [position in self.padding[row] for position in where]] = 0.0
            out.append(one)
        return np.stack(out) if counts is None else np.concatenate(out, 1).swapaxes(0, 1)

    def read(self, layer: int, row: int) -> tuple[Floats, Floats]:
        """Return one row's keys and values, [kv_heads, positions, dim]."""
        return self._k[layer][row], self._v[layer][row]

    def pop(self, num_tokens: int | None = None, *, keep: Any = None) -> None:
        """As `Session.pop`."""
        longest = [
            max((self.lengths(layer)[row] for layer in self._k), default=0)
            for row in range(self.num_rows)
        ]
        if num_tokens is not None:
            keep = [max(0, length - num_tokens) for length in longest]
        keeps = [keep] * self.num_rows if isinstance(keep, int) else list(keep)
        for store in (self._k, self._v):
            for layer, rows in store.items():
                store[layer] = [one[:, :length] for one, length in zip(rows, keeps, strict=True)]
        self.padding = [
            {position for position in padding if position < length}
            for padding, length in zip(self.padding, keeps, strict=True)
        ]

    def select(self, rows: Sequence[int]) -> None:
        """As `Session.select`."""
        for store in (self._k, self._v):
            for layer, stored in store.items():
                store[layer] = [stored[row] for row in rows]
        self.padding = [set(self.padding[row]) for row in rows]

    def reset(self) -> None:
        """As `Session.reset`."""
        self.__init__(self.num_rows)  # type: ignore[misc]

    def fork(self) -> DenseSession:
        """As `Session.fork`."""
        child = DenseSession(self.num_rows)
        child._k = {layer: list(rows) for layer, rows in self._k.items()}
        child._v = {layer: list(rows) for layer, rows in self._v.items()}
        child.padding = [set(padding) for padding in self.padding]
        return child

    def _append(self, layer: int, k_rows: list[Floats], v_rows: list[Floats]) -> None:
        for store, new in ((self._k, k_rows), (self._v, v_rows)):
            old = store.get(layer) or [row[:, :0] for row in new]
            store[layer] = [np.concatenate(pair, 1) for pair in zip(old, new, strict=True)]

    def _mark(self, padding: Any, before: Sequence[int], counts: Sequence[int]) -> None:
        if padding is None:
            return
        bits = np.asarray(padding, np.bool_)
        offset = 0
        for row, (start, count) in enumerate(zip(before, counts, strict=True)):
            if bits.ndim == 1:
                mine, offset = bits[offset : offset + count], offset + count
            elif bits.shape[1] == count:
                mine = bits[row]
            else:
                mine, start = bits[row, : start + count], 0
            self.padding[row] |= set((start + np.flatnonzero(mine)).tolist())

    def _visible(
        self,
        row: int,
        where: npt.NDArray[np.int64],
        length: int,
        mask: Any,
        window: int | None,
        chunk: int | None,
    ) -> Bools:
        positions = np.arange(length)
        padding = self.padding[row]
        real = np.array([position not in padding for position in range(length)], np.bool_)
        distance = where[:, None] - positions[None, :]
        visible = np.ones(distance.shape, np.bool_)
        if mask in ("causal", "chunk") if isinstance(mask, str) else False:
            visible &= distance >= 0
        if window is not None:
            visible &= distance < window
        if chunk is not None:
            origin = next(p for p in range(length + 1) if p not in padding)
            visible &= (where[:, None] - origin) // chunk == (positions[None, :] - origin) // chunk
        return (visible & real)[None]


def _split(array: npt.ArrayLike, counts: Sequence[int] | None) -> list[Floats]:
    """Return [heads, tokens, dim] for each row."""
    array64 = np.asarray(array, np.float64)
    if counts is None:
        return list(array64)
    return [part.swapaxes(0, 1) for part in np.split(array64, np.cumsum(counts)[:-1])]


def _columns(
    array: npt.NDArray[Any], row: int, length: int, start: int | None
) -> tuple[Bools, Floats]:
    """Spread an array over columns to positions [0, length): what is seen, and what is added."""
    mine = array[row if len(array) > 1 else 0]
    first = length - mine.shape[2] if start is None else start
    seen = np.zeros((*mine.shape[:2], length), np.bool_)
    added = np.zeros((*mine.shape[:2], length))
    for column in range(mine.shape[2]):
        position = first + column
        if 0 <= position < length:
            values = mine[:, :, column]
            seen[:, :, position] = values if array.dtype == np.bool_ else True
            if array.dtype != np.bool_:
                added[:, :, position] = values
    return seen, added
