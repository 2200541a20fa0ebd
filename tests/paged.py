"""A PagedCache and a plain one of lists, told the same and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice_client import Client, PagedCache
from kvservice_client.testing import dense_attention
from tests.driving import close

Array = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Token:
    """One stored token of one row and layer: k and v are [kv_heads, dim]."""

    position: int
    k: Floats
    v: Floats


class PlainPagedCache:
    """What PagedCache promises, with lists of tokens: attends densely, evicts by cutting a list.

    It checks nothing, and holds the roll-back rule window by window.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        page_size: int,
        windows: Sequence[int | None],
        rollback: int = 0,
        num_rows: int = 1,
    ) -> None:
        self.num_layers, self.page_size, self.num_rows = num_layers, page_size, num_rows
        self.windows, self.rollback = windows, rollback
        self.called: set[int] = set()  # layers without a window
        self.reset()

    def reset(self) -> None:
        self.lengths = [0] * self.num_rows
        self.tokens: list[list[list[Token]]] = [
            [[] for _ in range(self.num_rows)] for _ in range(self.num_layers)
        ]
        self.tables = [0] * self.num_rows  # pages
        # By window and row: positions below are gone.
        self.gone = {window: [0] * self.num_rows for window in self.windows if window is not None}

    def attention(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        *,
        scale: float,
        window: int | None = None,
        counts: Sequence[int] | None = None,
    ) -> Floats:
        """Append and attend, all rows at where they are."""
        q64, k64, v64 = (np.asarray(array, np.float64) for array in (q, k, v))
        counts = [q64.shape[2]] * self.num_rows if counts is None else counts
        own = self.windows[layer]
        out = np.zeros((*q64.shape[:3], v64.shape[3]))
        for row, count in enumerate(counts):
            if layer == 0:
                self.lengths[row] += count
            first = self.lengths[row] - count
            self.tokens[layer][row] += [
                Token(first + i, k64[row, :, i], v64[row, :, i]) for i in range(count)
            ]
            if count:
                out[row, :, :count] = self._attend(
                    layer, row, q64[row, :, :count], scale, own or window
                )
            if own is None:
                self.called.add(layer)
                self.tables[row] = -(-self.lengths[row] // self.page_size)
            elif count:
                kept = own - 1 + self.rollback
                self.tokens[layer][row] = self.tokens[layer][row][-kept:]
            for one, gone in self.gone.items():
                gone[row] = max(gone[row], self.lengths[row] - (one - 1) - self.rollback)
        return out

    def refuses(self, popped: Sequence[int]) -> bool:
        """Return whether some row would need what a window has let go of."""
        return any(
            count > 0 and gone[row] > 0 and self.lengths[row] - count < gone[row] + window - 1
            for window, gone in self.gone.items()
            for row, count in enumerate(popped)
        )

    def popn(self, asked: Sequence[int]) -> list[int]:
        popped = [min(pair) for pair in zip(asked, self.lengths, strict=True)]
        if self.refuses(popped):
            return [0] * self.num_rows
        for row, count in enumerate(popped):
            self.lengths[row] -= count
            for layer in self.tokens:
                layer[row] = [one for one in layer[row] if one.position < self.lengths[row]]
            pages = -(-self.lengths[row] // self.page_size)
            self.tables[row] = min(self.tables[row], pages)
        return popped

    def _attend(self, layer: int, row: int, q: Floats, scale: float, window: int | None) -> Floats:
        stored = self.tokens[layer][row]
        positions = np.array([token.position for token in stored])
        queries = np.arange(self.lengths[row] - q.shape[1], self.lengths[row])
        visible = positions[None] <= queries[:, None]
        if window is not None:
            visible &= positions[None] > queries[:, None] - window
        k, v = (np.stack([getattr(token, name) for token in stored], axis=1) for name in ("k", "v"))
        return dense_attention(q, k, v, visible=visible, scale=scale)


class Pair:
    """A cache and its plain twin. Every output and every count is compared."""

    def __init__(
        self,
        client: Client,
        num_layers: int = 2,
        *,
        num_rows: int = 1,
        max_seq_len: int = 64,
        page_size: int = 4,
        windows: Sequence[int | None] | None = None,
        rollback: int = 0,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        k_dim: int = 8,
        v_dim: int = 8,
        scale: float = 0.35,
        seed: int = 0,
    ) -> None:
        self.cache = PagedCache(
            num_layers,
            max_seq_len=max_seq_len,
            page_size=page_size,
            windows=windows,
            rollback=rollback,
            client=client,
        )
        self.plain = PlainPagedCache(
            num_layers,
            page_size=page_size,
            windows=self.cache.windows,
            rollback=rollback,
            num_rows=num_rows,
        )
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.k_dim, self.v_dim, self.scale = k_dim, v_dim, scale
        self.rng = np.random.default_rng(seed)

    def draw(self, num_tokens: int) -> tuple[Array, Array, Array]:
        """Return random q, k, v of new tokens."""
        shapes = (
            (self.num_heads, self.k_dim),
            (self.num_kv_heads, self.k_dim),
            (self.num_kv_heads, self.v_dim),
        )
        rows = self.plain.num_rows
        q, k, v = (
            self.rng.standard_normal((rows, heads, num_tokens, dim)).astype(np.float32)
            for heads, dim in shapes
        )
        return q, k, v

    def call(
        self,
        layer: int,
        num_tokens: int,
        *,
        window: int | None = None,
        counts: Sequence[int] | None = None,
        tokens: tuple[Array, Array, Array] | None = None,
    ) -> Array:
        """Feed one layer, comparing the output."""
        q, k, v = self.draw(num_tokens) if tokens is None else tokens
        taken = [num_tokens] * self.plain.num_rows if counts is None else counts
        ends = self.plain.lengths
        pos = list(ends) if layer == 0 else [end - n for end, n in zip(ends, taken, strict=True)]
        out: Array = self.cache.attention_opts(
            layer, q, k, v, pos, self.scale, window, counts=counts
        )
        expected = self.plain.attention(
            layer, q, k, v, scale=self.scale, window=window, counts=counts
        )
        close(out, expected)
        self.check()
        return out

    def feed(self, num_tokens: int, **options: Any) -> list[Array]:
        """Feed all layers one pass."""
        return [self.call(layer, num_tokens, **options) for layer in range(self.cache.num_layers)]

    def popn(self, asked: Sequence[int] | int) -> tuple[int, ...]:
        """Pop, comparing the answers; all three forms of it agree."""
        rows = self.plain.num_rows
        listed = [asked] * rows if isinstance(asked, int) else list(asked)
        popped = [min(pair) for pair in zip(listed, self.plain.lengths, strict=True)]
        refused = self.plain.refuses(popped)
        answer = self.cache.pop(asked)
        assert answer.refused == refused
        assert list(answer.num_tokens) == self.plain.popn(listed)
        self.check()
        return answer.num_tokens

    def reset(self) -> None:
        self.cache.reset()
        self.plain.reset()
        self.check()

    def check(self) -> None:
        """Compare what is counted."""
        cache, plain = self.cache, self.plain
        rows = plain.num_rows if cache.page_stats().seq_len else len(cache.seq_lens())
        assert cache.seq_lens() == tuple(plain.lengths[:rows])
        if len(set(plain.lengths)) == 1:
            assert cache.seq_len() == plain.lengths[0]
        used = sum(plain.tables)
        total = rows * -(-cache.max_seq_len // cache.page_size)
        assert cache.pages_used() == used
        assert cache.num_free_pages() == total - used
        stats = cache.page_stats()
        assert (stats.pages_used, stats.pages_free, stats.num_pages) == (used, total - used, total)
        assert (stats.page_size, stats.seq_len) == (cache.page_size, max(plain.lengths))
        assert stats.layers_materialized == len(plain.called)
        assert stats.layers_total == plain.num_layers
        assert stats.layers_sliding == sum(
            any(plain.tokens[layer])
            for layer, window in enumerate(plain.windows)
            if window is not None
        )
        assert used <= stats.pages_materialized <= total


def counting(values: Sequence[float]) -> tuple[Array, Array, Array]:
    """Return q = 0 and k = 0, so that the output is the mean of the visible values; one head."""
    v = np.array(values, np.float32).reshape(1, 1, -1, 1)
    return np.zeros_like(v), np.zeros_like(v), v


def feed_numbers(cache: PagedCache, count: int, *, window: int | None = None) -> list[float]:
    """Feed every layer `count` tokens whose values are their positions; return layer 0's means."""
    first = cache.seq_len()
    outs = [
        cache.attention_opts(layer, *counting(range(first, first + count)), first, 1.0, window)
        for layer in range(cache.num_layers)
    ]
    return [float(value) for value in outs[0].reshape(-1)]
