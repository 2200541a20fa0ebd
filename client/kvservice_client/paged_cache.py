"""PagedCache: attention inside the cache, windows per layer, roll-back; K and V never come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, overload

import numpy as np

from kvservice.core.errors import (
    Conflict,
    InvalidRequest,
    OutOfOrder,
    PositionOutOfRange,
    Unimplemented,
)
from kvservice.core.geometry import DEFAULT_PAGE_SIZE, MAX_LAYERS, MAX_PAGE_SIZE
from kvservice.core.session import MAX_REPLICAS, MAX_TOKENS
from kvservice_client._arrays import to_int, to_ints
from kvservice_client._ask import Lengths, check_agree, read_positions, read_queries, read_tokens
from kvservice_client._client import Client, current_client
from kvservice_client._paged_state import PagedState
from kvservice_client._ragged import Ragged

_MIN_WINDOW: Final = 2  # with 1, a decoded token would have no past at all


@dataclass(frozen=True, slots=True)
class PageStats:
    """A cache's pages at one moment. Counted in the client, of its layers without a window.

    With several rows, pages are those of all rows together.

    Fields:
        pages_used: Page table entries of the rows; not multiplied by layers.
        pages_free: num_pages - pages_used.
        num_pages: What the rows may use at most: the pages of `max_seq_len` tokens each.
        page_size: In tokens.
        seq_len: Tokens of the longest row.
        layers_materialized: Layers without a window that were called. A reset does not change it.
        layers_total: Layers, with and without a window.
        layers_sliding: Layers with a window that hold tokens now.
        pages_materialized: The pages that an arena of this cache's own would have grown to: 32 at
            first, doubled or raised to what is needed, never shrunk, at most num_pages.
    """

    pages_used: int
    pages_free: int
    num_pages: int
    page_size: int
    seq_len: int
    layers_materialized: int
    layers_total: int
    layers_sliding: int
    pages_materialized: int


@dataclass(frozen=True, slots=True)
class Popped:
    """The answer to `PagedCache.pop`.

    Fields:
        num_tokens: Per row: how many were dropped. All 0 if it was refused.
        refused: A window has let go of tokens that would be seen again. Nothing has changed.
    """

    num_tokens: Lengths
    refused: bool


@dataclass(frozen=True, slots=True)
class _Append:
    """The tokens of one call: per row, where they begin, how many they are, where they end.

    Fields:
        ragged: None: every row has all the tokens of the arrays.
    """

    first: Lengths
    counts: Lengths
    after: Lengths
    ragged: Ragged | None


class PagedCache:
    """A decoder's cache that attends itself: bounded, with windows by layer and roll-back.

    A *pass* calls layer 0 with new tokens, which makes the sequence longer, and then the other
    layers with the same ones. The first call opens a session, for as many rows as it has; after a
    reset there may be another number of them. The service is asked once per layer and pass, and
    once for each pop and reset; for lengths and page counts never.

    After InvalidRequest and Conflict, and what derives from them, the cache is as before. After
    any other error in one layer of a pass the whole pass is void: its tokens are dropped, at once
    or before the next call, and `seq_len` is what it was before the pass. Feed the same tokens
    again. A pop or reset whose outcome is unknown counts as made, and is finished before the next
    call.

    Raises, everywhere: what `Session` says. After PagesLost: `roll_back`, or `reset`.

    Not thread-safe.

    Attributes:
        num_layers, max_seq_len, page_size, rollback: As given.
        windows: Per layer.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        max_seq_len: int,
        page_size: int = DEFAULT_PAGE_SIZE,
        windows: Sequence[int | None] | None = None,
        rollback: int = 0,
        kind: str = "paged",
        quantize_kv: bool = False,
        replicas: int = 1,
        client: Client | None = None,
    ) -> None:
        """Set up an empty cache. Nothing is sent.

        Args:
            num_layers: At least 1.
            max_seq_len: In tokens: no row grows beyond.
            page_size: Tokens in a page.
            windows: Per layer: a query sees so many tokens, its own included, and older ones are
                evicted; at least 2. None: all positions, and nothing is evicted.
            rollback: Tokens kept beyond every window, so that as many can be popped after
                evictions have begun.
            kind: "paged", the only one there is.
            quantize_kv: Must be False.
            replicas: Copies of every page: with 2, a worker that dies loses nothing.
            client: None: the one set by `use`.

        Raises:
            InvalidRequest: Out of range.
            Unimplemented: Quantized keys and values, or the contiguous cache.
            RuntimeError: No client is given, and none is set.
        """
        if quantize_kv:
            raise Unimplemented("quantize_kv: keys and values are stored as they are given")
        if kind != "paged":
            raise Unimplemented(f'kind must be "paged" (no ContiguousKVCache here), got {kind!r}')
        self.num_layers = _read_size("num_layers", num_layers, 1, MAX_LAYERS)
        self.max_seq_len = _read_size("max_seq_len", max_seq_len, 1, MAX_TOKENS)
        self.page_size = _read_size("page_size", page_size, 1, MAX_PAGE_SIZE)
        self.windows = _read_windows(windows, self.num_layers)
        self.rollback = _read_size("rollback", rollback, 0, MAX_TOKENS)
        self._state = PagedState(
            current_client() if client is None else client,
            windows=self.windows,
            max_seq_len=self.max_seq_len,
            page_size=self.page_size,
            rollback=self.rollback,
            replicas=_read_size("replicas", replicas, 1, MAX_REPLICAS),
        )

    # -- attention

    def attention(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        pos: int | Sequence[int],
        scale: float,
        *,
        counts: Sequence[int] | None = None,
    ) -> Any:
        """Append new tokens to a layer and attend; as `attention_opts` without a window."""
        return self.attention_opts(layer, q, k, v, pos, scale, None, counts=counts)

    def attention_opts(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        pos: int | Sequence[int],
        scale: float,
        window: int | None,
        *,
        counts: Sequence[int] | None = None,
    ) -> Any:
        """Append new tokens to a layer, attend causally to all it holds, return the output.

        Args:
            layer: 0 first in each pass, then the others in any order. A layer called again in the
                same pass overwrites what it stored. Like `pos`, any library's integer.
            q: float[rows, heads, tokens, dim], of torch, numpy or JAX.
            k, v: Alike, with heads that divide q's (query head h reads KV head h // group_size).
            pos: Position of the first new token, of all rows or of each. In layer 0 the row's
                length; in the others what it was in layer 0.
            scale: Factor on q·k.
            window: For a layer without one: a query sees the newest `window` tokens, its own
                included, and older ones stay. A layer with a window uses its own.
            counts: With rows of different length: how many of the tokens are real in each row,
                possibly 0. The others, at the end, are ignored, and their output is 0.

        Returns:
            [rows, heads, tokens, v_dim], of q's kind, dtype and device; computed in float32.

        Raises:
            InvalidRequest: The layer's number, shapes, dtypes or ranges.
            OutOfOrder: `pos` in layer 0 is not the length, which is in the metadata.
            PositionOutOfRange: Some row would be longer than `max_seq_len`.
            Conflict: The layer brings other tokens than layer 0, or has missed an earlier pass.
        """
        state = self._state
        state.settle()
        number = to_int(layer)
        if number is None or not 0 <= number < self.num_layers:
            raise InvalidRequest(f"layer must be from 0 to {self.num_layers - 1}, got {layer!r}")
        layer, append = number, self._read(q, k, pos, counts)
        self._check(layer, append)
        num_rows = len(append.first)
        if state.session is None or state.session.num_rows != num_rows:
            # Before a session is opened for it.
            check_agree(read_queries(q, num_rows, None), read_tokens(k, v, num_rows, None))
        session = state.opened(num_rows)
        own_window, ragged = self.windows[layer], append.ragged
        if ragged is not None:
            q, k, v = ragged.pack(q, "q"), ragged.pack(k, "k"), ragged.pack(v, "v")
        try:
            out = session.attend(
                layer,
                q,
                k,
                v,
                pos=append.first,
                scale=scale,
                window=window if own_window is None else own_window,
                counts=None if ragged is None else append.counts,
            )
        except BaseException as error:
            state.void(append.first, error)
            raise
        state.note(layer, append.first, append.after)
        return out if ragged is None else ragged.unpack(out)

    # -- lengths

    def seq_len(self) -> int:
        """Return the length in tokens, evicted ones included.

        Raises:
            InvalidRequest: Rows differ in length: see `seq_lens`.
        """
        lengths = self.seq_lens()
        if len(set(lengths)) > 1:
            raise InvalidRequest(f"rows have lengths {list(lengths)}: use seq_lens()")
        return lengths[0]

    def seq_lens(self) -> tuple[int, ...]:
        """Return the length of each row; (0,) before the first call."""
        return self._state.stored(0)

    @overload
    def popn(self, n: int) -> int: ...

    @overload
    def popn(self, n: Sequence[int]) -> tuple[int, ...]: ...

    def popn(self, n: int | Sequence[int]) -> int | tuple[int, ...]:
        """Drop the newest tokens; as `pop`, for decoders that compare the answer with `n`.

        Returns:
            For an int: how many tokens each row has dropped (the least of them, where rows
            differ), so that it equals `n` only if all have. Otherwise per row. 0 also where
            there was nothing to drop, or where it was refused: `pop` tells these apart.
        """
        popped = self.pop(n).num_tokens
        return popped if to_int(n) is None else min(popped)

    def pop(self, n: int | Sequence[int]) -> Popped:
        """Drop the newest `n` tokens of every row, or of each: of all layers, or of none.

        A layer with a window keeps the newest `window - 1 + rollback` tokens. As long as these are
        all there were, anything can be dropped. After that it is refused as soon as, in any row,
        fewer than `window - 1` of them would be left: without `rollback`, always.

        Args:
            n: In tokens, at least 0. More than a row has: all it has.

        Raises:
            InvalidRequest: Negative, or not for each row.
        """
        lengths = self.seq_lens()
        one = to_int(n)
        asked = to_ints(n, "n") if one is None else [one] * len(lengths)
        if len(asked) != len(lengths) or min(asked) < 0:
            raise InvalidRequest(
                f"n must be at least 0, for all rows or for each of {len(lengths)}, got {n!r}"
            )
        popped = tuple(map(min, asked, lengths))
        keep = tuple(map(int.__sub__, lengths, popped))
        if not any(popped):
            return Popped(popped, refused=False)
        if self._state.has_evicted(keep):
            return Popped((0,) * len(popped), refused=True)
        self._state.cut(keep)
        return Popped(popped, refused=False)

    def roll_back(self) -> Lengths:
        """Drop what an unfinished pass has appended, and what was lost with a worker.

        For a decoder whose pass has failed between two layers, where windows do not matter; and
        after `PagesLost`. Feed the tokens again from where it says.

        Returns:
            Per row: the length in tokens that is left.

        Raises:
            PositionOutOfRange: After a loss: a window has evicted what would be seen. Reset.
        """
        return self._state.roll_back()

    def reset(self) -> None:
        """Drop all tokens. The next pass may have another number of rows."""
        self._state.reset()

    def release(self) -> None:
        """Free the pages now, rather than when this object goes. The cache starts anew."""
        self._state.release()

    # -- pages

    def pages_used(self) -> int:
        """Return the pages of layers without a window; of all rows together."""
        state = self._state
        return max(
            (state.pages_of(state.stored(layer)) for layer in self._layers(sliding=False)),
            default=0,
        )

    def num_free_pages(self) -> int:
        """Return how many pages the cache may still take."""
        return self._state.num_pages - self.pages_used()

    def page_stats(self) -> PageStats:
        """Return the page counts. Asks nobody."""
        state, used = self._state, self.pages_used()
        return PageStats(
            pages_used=used,
            pages_free=state.num_pages - used,
            num_pages=state.num_pages,
            page_size=self.page_size,
            seq_len=max(self.seq_lens()),
            layers_materialized=len(state.materialized),
            layers_total=self.num_layers,
            layers_sliding=sum(any(state.stored(layer)) for layer in self._layers(sliding=True)),
            pages_materialized=state.pages_materialized,
        )

    def __repr__(self) -> str:
        lengths = ", ".join(map(str, self.seq_lens()))
        return f"<PagedCache of {self.num_layers} layers, {lengths} of {self.max_seq_len} tokens>"

    # -- before a call

    def _layers(self, *, sliding: bool) -> list[int]:
        """Return the layers with a window, or those without."""
        return [
            layer for layer, window in enumerate(self.windows) if (window is not None) is sliding
        ]

    def _read(self, q: Any, k: Any, pos: Any, counts: Any) -> _Append:
        """Say where a call's tokens go."""
        shape, q_shape = np.shape(k), np.shape(q)
        if len(shape) != 4 or not shape[0]:
            raise InvalidRequest(f"k must be [rows, heads, tokens, dim], got {list(shape)}")
        if len(q_shape) != 4 or q_shape[2] != shape[2]:
            raise InvalidRequest(
                f"q must be [rows, heads, {shape[2]} tokens, dim] as k is, got {list(q_shape)}"
            )
        num_rows, num_tokens = shape[0], shape[2]
        if num_rows != self._state.num_rows and self._state.any_stored():
            raise InvalidRequest(
                f"the cache has {self._state.num_rows} rows until it is reset, got {num_rows}"
            )
        listed, ragged = (num_tokens,) * num_rows, None
        if counts is not None:
            listed = tuple(to_ints(counts, "counts"))
            ragged = Ragged.of(listed, num_rows, num_tokens)
        first = read_positions(pos, num_rows)
        return _Append(first, listed, tuple(map(int.__add__, first, listed)), ragged)

    def _check(self, layer: int, append: _Append) -> None:
        """Check a call's place in the sequence and in the pass."""
        lengths = self._state.stored(0, len(append.first))
        stored = self._state.stored(layer, len(append.first))
        if layer == 0 and append.first != lengths:
            raise OutOfOrder(
                f"layer 0 appends at the length {list(lengths)}, got pos {list(append.first)}",
                lengths=",".join(map(str, lengths)),
                layer=layer,
            )
        brought = self._state.find_pass()
        if layer != 0 and brought is None:
            raise Conflict("a pass begins with layer 0, also after a pop or reset", layer=layer)
        if layer != 0 and (append.first, append.after) != (brought, lengths):
            raise Conflict(
                f"layer 0 has brought the tokens from {brought} to {lengths}, layer {layer} brings "
                f"those from {append.first} to {append.after}",
                layer=layer,
            )
        if layer != 0 and stored not in (append.first, lengths):
            raise Conflict(
                f"layer {layer} has {stored} tokens, got new ones from {append.first} on: it must "
                "be called in every pass; pop to what it has",
                layer=layer,
            )
        if max(append.after) > self.max_seq_len:
            raise PositionOutOfRange(
                f"rows would have {list(append.after)} tokens, max_seq_len is {self.max_seq_len}",
                max_tokens=self.max_seq_len,
            )


def _read_size(name: str, value: Any, least: int, most: int) -> int:
    size = to_int(value)
    if size is None or not least <= size <= most:
        raise InvalidRequest(f"{name} must be an int from {least} to {most}, got {value!r}")
    return size


def _read_windows(windows: Sequence[int | None] | None, num_layers: int) -> tuple[int | None, ...]:
    if windows is None:
        return (None,) * num_layers
    if len(windows) != num_layers:
        raise InvalidRequest(f"windows must have one entry per layer, {num_layers}, got {windows}")
    sizes = tuple(map(to_int, windows))
    for layer, (size, window) in enumerate(zip(sizes, windows, strict=True)):
        if window is not None and (size is None or size < _MIN_WINDOW):
            raise InvalidRequest(
                f"a window must be >= {_MIN_WINDOW} tokens, got {window!r} for layer {layer}",
                layer=layer,
            )
    return sizes
