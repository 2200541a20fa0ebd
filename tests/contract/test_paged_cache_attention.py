"""PagedCache: a test for each row of its behaviour table about making it, and attention.

In the table's order and words; the rows that follow are in test_paged_cache_lengths.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import kvservice_client
from kvservice_client import (
    Client,
    Conflict,
    InvalidRequest,
    OutOfOrder,
    PagedCache,
    PositionOutOfRange,
)
from tests.backends import Backend
from tests.faults import Faults
from tests.paged import Pair, counting, feed_numbers

# -- how it is made


def test_cache_config(client: Client) -> None:
    """CacheConfig: pages of 16 unless said otherwise, enough of them for max_seq_len."""
    assert PagedCache(1, max_seq_len=17, client=client).num_free_pages() == 2
    assert PagedCache(1, max_seq_len=17, page_size=4, client=client).num_free_pages() == 5
    for wrong in ({"page_size": 0}, {"max_seq_len": 0}, {"rollback": -1}, {"page_size": 2.0}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            PagedCache(1, **{"max_seq_len": 8, "client": client, **wrong})
    with pytest.raises(InvalidRequest, match="num_layers"):
        PagedCache(0, max_seq_len=8, client=client)
    sizes = np.array([2, 17, 4])
    cache = PagedCache(sizes[0], max_seq_len=sizes[1], windows=[None, sizes[2]], client=client)
    assert (cache.num_free_pages(), cache.windows) == (2, (None, 4))


def test_new(backend: Backend) -> None:
    """new: all layers are without a window; nothing is asked of the service."""
    faults = Faults(backend.dial)
    client = backend.connect(dial=faults.dial)
    cache = PagedCache(3, max_seq_len=64, client=client)
    assert cache.windows == (None, None, None)
    assert cache.page_stats().layers_total == 3
    assert not faults.log
    kvservice_client.use(client)
    try:
        assert PagedCache(1, max_seq_len=8).seq_len() == 0
    finally:
        kvservice_client.use(None)
    with pytest.raises(RuntimeError, match="no client"):
        PagedCache(1, max_seq_len=8)


def test_new_with_windows(client: Client) -> None:
    """new_with_windows: one entry per layer, each at least 2 or none."""
    cache = PagedCache(2, max_seq_len=64, windows=[2, None], client=client)
    assert cache.windows == (2, None)
    for windows in ([2], [2, None, 2], [None, 1], [-3, None], [2.5, None], [True, None]):
        with pytest.raises(InvalidRequest):
            PagedCache(2, max_seq_len=64, windows=windows, client=client)  # type: ignore[arg-type]


def test_storage(backend: Backend) -> None:
    """storage: arenas are made at a layer's first call; a sliding layer keeps w - 1 past tokens."""
    pair = Pair(backend.connect(), page_size=1, windows=[None, 5])
    assert backend.workers[0].stats().arena_bytes == 0
    tokens = pair.draw(7)
    pair.call(0, 7, tokens=tokens)
    arena_bytes = backend.workers[0].stats().arena_bytes
    assert arena_bytes > 0
    pair.call(1, 7, tokens=tokens)
    assert backend.workers[0].stats().arena_bytes > arena_bytes
    for _ in range(9):
        pair.feed(1)
        # With one token a page: all of layer 0, and of layer 1 the newest token and 4 before it.
        assert backend.used_pages() == pair.cache.seq_len() + 5


def test_allocator(backend: Backend) -> None:
    """allocator: freed pages are taken again; it is never the allocator that is exhausted."""
    pair = Pair(backend.connect(), max_seq_len=16)
    for _ in range(3):
        pair.feed(16)
        assert (pair.cache.num_free_pages(), backend.used_pages()) == (0, 4)
        with pytest.raises(PositionOutOfRange):
            pair.call(0, 1)
        pair.popn(16)
        assert (pair.cache.num_free_pages(), backend.used_pages()) == (4, 0)


# -- attention


def test_attention(client: Client) -> None:
    """attention: attention_opts without a window."""
    cache = PagedCache(1, max_seq_len=64, client=client)
    other = PagedCache(1, max_seq_len=64, client=client)
    q, k, v = Pair(client).draw(5)
    out = cache.attention(0, q, k, v, 0, 0.3)
    assert np.array_equal(out, other.attention_opts(0, q, k, v, 0, 0.3, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_opts(client: Client, dtype: torch.dtype) -> None:
    """attention_opts: appends, then attends; returns q's shape with v's dim, in q's dtype."""
    pair = Pair(client, v_dim=6)
    q, k, v = (torch.from_numpy(array).to(dtype) for array in pair.draw(5))
    out = pair.cache.attention_opts(0, q, k, v, 0, 0.3, None)
    assert out.shape == (1, 4, 5, 6)
    assert out.dtype == dtype
    expected = pair.plain.attention(0, q.double(), k.double(), v.double(), scale=0.3)
    assert np.abs(out.double().numpy() - expected).max() < 3e-2
    assert pair.cache.seq_len() == 5


def test_attention_opts_takes_a_query_for_each_token(client: Client) -> None:
    """attention_opts: q and k have the same tokens; another number of queries changes nothing."""
    pair = Pair(client, 2)
    pair.feed(3)
    q, k, v = tokens = pair.draw(2)
    for layer in (0, 1):
        for wrong in (q[:, :, :1], q[:, :, [0, 1, 1]], q[:, :, 0]):
            with pytest.raises(InvalidRequest, match="2 tokens"):
                pair.cache.attention(layer, wrong, k, v, 3, pair.scale)
        pair.check()
        pair.call(layer, 2, tokens=tokens)


@pytest.mark.parametrize("scalar", [np.int64, np.array, torch.tensor, jnp.int32])
def test_integers_of_any_library(client: Client, scalar: Callable[[int], Any]) -> None:
    """attention, popn: a layer, a position and a count may be scalars of torch, numpy or JAX."""
    pair = Pair(client, 2, num_rows=2)
    for pos in (0, 3):
        tokens = pair.draw(3)
        for layer in (0, 1):
            out = pair.cache.attention(scalar(layer), *tokens, scalar(pos), pair.scale)
            expected = pair.plain.attention(layer, *tokens, scale=pair.scale)
            assert np.abs(out - expected).max() < 1e-5
    popped = pair.cache.popn(scalar(2))
    assert (type(popped), popped) == (int, 2)
    assert pair.cache.seq_lens() == (4, 4)
    for wrong in (True, 4.0, torch.tensor(4.0), torch.tensor([4]), np.array([[4, 4]])):
        with pytest.raises(InvalidRequest):
            pair.cache.attention(0, *pair.draw(1), wrong, pair.scale)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            pair.cache.popn(wrong)  # type: ignore[call-overload]


def test_layer_0_rule(client: Client) -> None:
    """layer 0 rule: it alone moves the length, and so comes first in each pass."""
    cache = PagedCache(3, max_seq_len=64, client=client)
    with pytest.raises(Conflict, match="layer 0"):
        cache.attention(1, *counting([0, 1]), 0, 1.0)
    cache.attention(0, *counting([0, 1]), 0, 1.0)
    assert cache.seq_len() == 2
    for layer in (2, 1):  # the others in any order
        cache.attention(layer, *counting([0, 1]), 0, 1.0)
    assert cache.seq_len() == 2
    with pytest.raises(OutOfOrder):
        cache.attention(0, *counting([0, 1]), 0, 1.0)
    for pos, values in ((2, [2]), (1, [1, 2]), (0, [0, 1, 2])):
        with pytest.raises(Conflict):
            cache.attention(1, *counting(values), pos, 1.0)
    # A layer may be called again, and overwrites what it stored; another stretch is refused.
    assert cache.attention(1, *counting([4, 6]), 0, 1.0).reshape(-1).tolist() == [4.0, 5.0]
    with pytest.raises(Conflict):
        cache.attention(1, *counting([9]), 1, 1.0)
    # A layer that has missed a pass cannot be in the next one, until what it lacks is popped.
    for layer in (0, 1):
        cache.attention(layer, *counting([7]), 2, 1.0)
    cache.attention(0, *counting([8]), 3, 1.0)
    with pytest.raises(Conflict, match="every pass"):
        cache.attention(2, *counting([8]), 3, 1.0)
    assert cache.popn(2) == 2
    feed_numbers(cache, 1)


def test_capacity(backend: Backend) -> None:
    """capacity: max_seq_len, not what the pages would hold; refused before anything is sent."""
    faults = Faults(backend.dial)
    cache = PagedCache(2, max_seq_len=17, client=backend.connect(dial=faults.dial))
    with pytest.raises(PositionOutOfRange, match="17"):
        cache.attention(0, *counting(range(18)), 0, 1.0)
    assert cache.seq_len() == 0
    assert not faults.log
    feed_numbers(cache, 17)
    before, num_calls = cache.page_stats(), len(faults.log)
    with pytest.raises(PositionOutOfRange):
        cache.attention(0, *counting([17]), 17, 1.0)
    assert (cache.page_stats(), len(faults.log)) == (before, num_calls)
    assert before.num_pages == before.pages_used == 2


def test_order_of_effects(client: Client) -> None:
    """order of effects: the length moves with layer 0, pages come with the first global layer."""
    pair = Pair(client, 3, windows=[4, 6, None])
    for length, before, after in ((5, 0, 2), (8, 2, 2), (9, 2, 3)):
        tokens = pair.draw(length - pair.cache.seq_len())
        count = tokens[0].shape[2]
        for layer, used in ((0, before), (1, before), (2, after)):
            pair.call(layer, count, tokens=tokens)
            assert (pair.cache.seq_len(), pair.cache.pages_used()) == (length, used)


def test_write(client: Client) -> None:
    """write: a chunk may begin and end anywhere in a page, and touch many."""
    pair = Pair(client, page_size=4, max_seq_len=128)
    for count in (1, 2, 3, 14, 1, 4, 33, 7):
        pair.feed(count)


def test_read(client: Client) -> None:
    """read: the tokens up to the length, however much of the last page lies behind it."""
    pair = Pair(client)
    pair.feed(7)
    pair.popn(2)
    for _ in range(3):
        pair.feed(1)


def test_causal_rule(client: Client) -> None:
    """causal rule: a query sees its own position and those before."""
    cache = PagedCache(1, max_seq_len=64, client=client)
    assert feed_numbers(cache, 5) == pytest.approx([0, 0.5, 1, 1.5, 2])
    assert feed_numbers(cache, 1) == pytest.approx([2.5])


def test_window_on_a_global_layer(client: Client) -> None:
    """window=Some(w) on a global layer: a mask, and each call has its own."""
    pair = Pair(client)
    for count, window in ((6, 3), (3, None), (2, 1), (1, 100), (4, 2)):
        pair.feed(count, window=window)
    assert pair.popn(16) == (16,)  # nothing was evicted
    with pytest.raises(InvalidRequest, match="window"):
        pair.cache.attention_opts(0, *pair.draw(1), 0, 1.0, 0)


def test_sliding_layer(client: Client) -> None:
    """sliding layer: it uses its own window, whatever the caller says."""
    cache = PagedCache(1, max_seq_len=64, windows=[3], client=client)
    assert feed_numbers(cache, 4, window=2) == pytest.approx([0, 0.5, 1, 2])
    assert feed_numbers(cache, 1, window=50) == pytest.approx([3])


@pytest.mark.parametrize("count", [4, 5, 11, 40])
def test_chunk_longer_than_window(client: Client, count: int) -> None:
    """chunk longer than window: what the chunk's own tokens see is not evicted before."""
    pair = Pair(client, windows=[3, None])
    for _ in range(2):
        pair.feed(min(count, 64 - pair.cache.seq_len() - 2))
        pair.feed(1)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_equivalence(client: Client, heads: tuple[int, int]) -> None:
    """equivalence: a sliding layer gives what a global one gives with a mask."""
    options = {"num_heads": heads[0], "num_kv_heads": heads[1], "max_seq_len": 128}
    sliding = Pair(client, 1, windows=[5], **options)  # type: ignore[arg-type]
    masked = Pair(client, 1, **options)  # type: ignore[arg-type]
    for count in (3, 1, 1, 1, 9, 1, 4, 20, 1):
        tokens = sliding.draw(count)
        (out,) = sliding.feed(count, tokens=tokens)
        (expected,) = masked.feed(count, tokens=tokens, window=5)
        assert np.abs(out - expected).max() <= 1e-5
    assert (sliding.cache.pages_used(), masked.cache.pages_used()) == (0, 11)


def test_scale(client: Client) -> None:
    """scale: a factor as given, with and without a window, 1/sqrt(dim) being nothing special."""
    for scale in (8**-0.5, 1.0, 0.0, -0.4):
        pair = Pair(client, windows=[None, 4], scale=scale)
        pair.feed(6)
        pair.feed(1)
    with pytest.raises(InvalidRequest, match="scale"):
        pair.cache.attention(0, *pair.draw(1), 7, float("nan"))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
def test_numerics(client: Client, dtype: torch.dtype, tolerance: float) -> None:
    """numerics: in float32, then rounded once to q's dtype."""
    pair = Pair(client, 1, max_seq_len=512)
    q, k, v = (torch.from_numpy(array).to(dtype) for array in pair.draw(400))
    out = pair.cache.attention(0, q, k, v, 0, 0.35)
    expected = pair.plain.attention(0, q.double(), k.double(), v.double(), scale=0.35)
    rounded = torch.from_numpy(expected).to(dtype)
    off = (out.double() - rounded.double()).abs() / rounded.double().abs().clamp(min=0.05)
    assert float(off.max()) <= tolerance  # one step of the dtype


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (8, 1)])
def test_gqa(client: Client, heads: tuple[int, int]) -> None:
    """GQA: query head h reads KV head h // group_size; other numbers of heads are refused."""
    pair = Pair(client, num_heads=heads[0], num_kv_heads=heads[1])
    pair.feed(5)
    pair.feed(1)
    fresh = PagedCache(1, max_seq_len=8, client=client)
    q, k, v = np.zeros((3, 1, 3, 1, 8), np.float32)
    with pytest.raises(InvalidRequest, match="multiple"):
        fresh.attention(0, q, k[:, :2], v[:, :2], 0, 1.0)
    assert fresh.seq_len() == 0
