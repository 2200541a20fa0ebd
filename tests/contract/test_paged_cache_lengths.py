"""PagedCache: a test for each row of its behaviour table about lengths, counts and refusals.

In the table's order and words; the rows before are in test_paged_cache_attention.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from kvservice_client import (
    Client,
    Conflict,
    InvalidRequest,
    OutOfOrder,
    PagedCache,
    PageStats,
    PositionOutOfRange,
    Unimplemented,
)
from tests.backends import Backend
from tests.faults import Faults
from tests.paged import Pair, counting, feed_numbers

# -- lengths and roll-back


def test_seq_len(client: Client) -> None:
    """seq_len(): all tokens that were appended, those included that a window has let go of."""
    pair = Pair(client, windows=[3, 2])
    for count in (1, 5, 1, 9):
        pair.feed(count)
    assert pair.cache.seq_len() == 16


def test_popn(client: Client) -> None:
    """popn(n): cuts every layer, sliding or not, and frees the pages at the end; or refuses."""
    pair = Pair(client, 3, windows=[None, 12, 9])
    pair.feed(8)
    for asked, appended in ((0, 0), (1, 1), (3, 4)):
        assert pair.popn(asked) == (asked,)
        if appended:
            pair.feed(appended)
    # Of 9 tokens the window of 9 has let go of the first.
    assert pair.cache.seq_len() == 9
    before = pair.cache.page_stats()
    assert pair.cache.popn(1) == 0
    assert pair.cache.page_stats() == before
    pair.feed(2)


def test_popn_over_ask(client: Client) -> None:
    """popn over-ask: takes all there is."""
    pair = Pair(client, windows=[None, 20])
    pair.feed(15)
    assert pair.cache.popn(1000) == 15
    pair.plain.popn([15])
    pair.check()
    pair.feed(3)


def test_popn_ambiguity(client: Client) -> None:
    """popn ambiguity: 0 means three things, which `pop` tells apart."""
    cache = PagedCache(1, max_seq_len=64, windows=[4], client=client)
    assert cache.popn(5) == 0
    assert not cache.pop(5).refused
    feed_numbers(cache, 6)
    assert cache.popn(0) == 0
    assert not cache.pop(0).refused
    assert cache.popn(1) == 0
    answer = cache.pop(1)
    assert (answer.num_tokens, answer.refused) == ((0,), True)
    for wrong in (-1, 1.5, None, "3", [1, 2]):
        with pytest.raises(InvalidRequest):
            cache.popn(wrong)  # type: ignore[call-overload]


def test_popn_data(client: Client) -> None:
    """popn data: what was popped is overwritten or unseen, in whole pages and within one."""
    pair = Pair(client, windows=[None, 30])
    pair.feed(23)
    for popped, appended in ((3, 1), (9, 2), (1, 7), (21, 1)):
        pair.popn(popped)
        pair.feed(appended)


def test_eviction_test(client: Client) -> None:
    """eviction test: of the windows as given and the length, whatever was really stored."""
    cache = PagedCache(2, max_seq_len=64, windows=[None, 4], client=client)
    cache.attention(0, *counting(range(3)), 0, 1.0)
    assert cache.popn(1) == 1
    cache.attention(0, *counting(range(2)), 2, 1.0)
    assert cache.seq_len() == 4
    assert cache.popn(1) == 0  # layer 1, never called, would have let go of a token
    assert cache.pop(1000).refused


def test_reset(client: Client) -> None:
    """reset(): drops all tokens; windows, and what was materialized, stay."""
    pair = Pair(client, windows=[None, 4])
    pair.cache.reset()
    pair.feed(40)
    assert pair.cache.page_stats().layers_sliding == 1
    pair.reset()
    assert pair.cache.page_stats() == PageStats(0, 16, 16, 4, 0, 1, 2, 0, 16)
    pair.feed(3)
    assert pair.popn(3) == (3,)
    pair.feed(5)
    assert pair.popn(1) == (0,)


# -- counts


def test_num_free_pages(client: Client) -> None:
    """num_free_pages(): the bound's pages before the first use, and then what is left of them."""
    pair = Pair(client, max_seq_len=30)
    assert pair.cache.num_free_pages() == 8
    pair.feed(9)
    assert pair.cache.num_free_pages() == 5


def test_pages_used(client: Client) -> None:
    """pages_used(): of the sequence, not of its layers; 0 if all layers slide."""
    pair = Pair(client, 3)
    pair.feed(9)
    assert pair.cache.pages_used() == 3
    sliding = Pair(client, windows=[3, 5])
    sliding.feed(9)
    assert sliding.cache.pages_used() == 0
    assert sliding.cache.num_free_pages() == 16


def test_page_stats(backend: Backend) -> None:
    """page_stats(): all counts at once, used and free adding up; nobody is asked."""
    faults = Faults(backend.dial)
    pair = Pair(backend.connect(dial=faults.dial), 3, windows=[None, 3, None])
    pair.feed(9)
    num_calls = len(faults.log)
    assert pair.cache.page_stats() == PageStats(
        pages_used=3,
        pages_free=13,
        num_pages=16,
        page_size=4,
        seq_len=9,
        layers_materialized=2,
        layers_total=3,
        layers_sliding=1,
        pages_materialized=16,
    )
    assert len(faults.log) == num_calls


def test_layers_materialized(client: Client) -> None:
    """layers_materialized: rises in the first pass, by layers without a window, and stays."""
    pair = Pair(client, 3, windows=[None, 4, None])
    tokens = pair.draw(5)
    for layer, materialized in ((0, 1), (1, 1), (2, 2)):
        pair.call(layer, 5, tokens=tokens)
        assert pair.cache.page_stats().layers_materialized == materialized
    pair.reset()
    assert pair.cache.page_stats().layers_materialized == 2


def test_layers_sliding(client: Client) -> None:
    """layers_sliding: those that hold tokens now, not those that have a window."""
    pair = Pair(client, 3, windows=[9, None, 9])
    tokens = pair.draw(3)
    for layer, sliding in ((0, 1), (1, 1), (2, 2)):
        pair.call(layer, 3, tokens=tokens)
        assert pair.cache.page_stats().layers_sliding == sliding
    pair.popn(3)
    assert pair.cache.page_stats().layers_sliding == 0
    pair.feed(3)
    pair.reset()
    assert pair.cache.page_stats().layers_sliding == 0


def test_later_growth(client: Client) -> None:
    """later growth: 32 pages, then doubled or raised to the need, up to the bound; no way back."""
    cache = PagedCache(1, max_seq_len=400, page_size=4, client=client)
    for count, materialized in ((128, 32), (1, 64), (127, 64), (1, 100), (143, 100)):
        feed_numbers(cache, count)
        assert cache.page_stats().pages_materialized == materialized
        assert cache.num_free_pages() == 100 - cache.pages_used()
    cache.popn(390)
    assert cache.page_stats().pages_materialized == 100
    assert PagedCache(1, max_seq_len=9, client=client).page_stats().pages_materialized == 1
    sliding = PagedCache(1, max_seq_len=4096, windows=[4], client=client)
    feed_numbers(sliding, 1000)
    assert sliding.page_stats().pages_materialized == 32


# -- refusals


def test_quantize_kv(client: Client) -> None:
    """quantize_kv: refused by name."""
    with pytest.raises(Unimplemented, match="quantize_kv"):
        PagedCache(1, max_seq_len=8, quantize_kv=True, client=client)


def test_contiguous_kv_cache(client: Client) -> None:
    """ContiguousKVCache: refused by name."""
    with pytest.raises(Unimplemented, match="ContiguousKVCache"):
        PagedCache(1, max_seq_len=8, kind="contiguous", client=client)
    assert PagedCache(1, max_seq_len=8, kind="paged", client=client).seq_len() == 0


@pytest.mark.parametrize("layer", [2, -1, 1000, 1.0, None])
def test_layer_index_out_of_range(client: Client, layer: int) -> None:
    """layer index out of range: a typed error, with nothing changed."""
    pair = Pair(client)
    pair.feed(3)
    with pytest.raises(InvalidRequest, match="layer"):
        pair.cache.attention(layer, *pair.draw(1), 3, 1.0)
    pair.check()
    pair.feed(1)


def test_trait_defaults(client: Client) -> None:
    """trait defaults: a cache may be handed to another thread."""
    pair = Pair(client)
    pair.feed(3)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(pair.feed, 4).result()
    pair.feed(1)


def test_errors(client: Client) -> None:
    """Panics are typed errors, raised before anything changes."""
    pair = Pair(client, windows=[None, 40], max_seq_len=32)
    pair.feed(5)
    before = pair.cache.page_stats()
    q, k, v = pair.draw(2)
    wrong: list[tuple[type[Exception], tuple[object, ...]]] = [
        (InvalidRequest, (0, q[0], k[0], v[0], 5, 1.0)),
        (InvalidRequest, (0, q, k[:, :1], v, 5, 1.0)),
        (InvalidRequest, (0, q, k, v[:, :, :1], 5, 1.0)),
        (InvalidRequest, (0, q[:, :3], k, v, 5, 1.0)),
        (InvalidRequest, (0, q[..., :3], k, v, 5, 1.0)),
        (InvalidRequest, (0, q[..., :3], k[..., :3], v, 5, 1.0)),
        (InvalidRequest, (0, q, k.astype(np.float16), v, 5, 1.0)),
        (InvalidRequest, (0, q.astype(int), k, v, 5, 1.0)),
        (InvalidRequest, (0, q[:, :, :0], k[:, :, :0], v[:, :, :0], 5, 1.0)),
        (InvalidRequest, (0, [[1.0]], [[1.0]], [[1.0]], 5, 1.0)),
        (InvalidRequest, (0, *(np.concatenate([a, a]) for a in (q, k, v)), 5, 1.0)),
        (InvalidRequest, (0, q, k, v, -1, 1.0)),
        (InvalidRequest, (0, q, k, v, 5.0, 1.0)),
        (InvalidRequest, (0, q, k, v, None, 1.0)),
        (OutOfOrder, (0, q, k, v, 4, 1.0)),
        (Conflict, (1, q, k, v, 5, 1.0)),
        (PositionOutOfRange, (0, *pair.draw(28), 5, 1.0)),
    ]
    for kind, arguments in wrong:
        with pytest.raises(kind):
            pair.cache.attention(*arguments)  # type: ignore[arg-type]
        assert pair.cache.page_stats() == before
    pair.feed(2)


# -- beyond the table


def test_one_call_per_layer(backend: Backend) -> None:
    """A layer and pass is one call of the service, and so are pop and reset; the rest is none."""
    faults = Faults(backend.dial)
    pair = Pair(backend.connect(dial=faults.dial), 3, windows=[None, 20, 4])
    pair.feed(3)
    faults.log.clear()
    pair.feed(1)
    assert [method for _, method, _ in faults.log] == ["Attend"] * 3
    faults.log.clear()
    assert pair.popn(2) == (0,)  # refused without asking
    assert not faults.log
    pair.reset()
    pair.feed(3)
    faults.log.clear()
    pair.popn(2)
    assert [method for _, method, _ in faults.log] == ["Pop"]
    faults.log.clear()
    pair.reset()
    pair.reset()
    assert [method for _, method, _ in faults.log] == ["Reset"]


def test_kinds_of_arrays(client: Client) -> None:
    """Arrays of torch, numpy and JAX: the output is of the same kind."""
    pair = Pair(client)
    for kind, make in ((np.ndarray, np.asarray), (torch.Tensor, torch.from_numpy)):
        cache = PagedCache(1, max_seq_len=8, client=client)
        assert isinstance(cache.attention(0, *map(make, pair.draw(2)), 0, 1.0), kind)
    cache = PagedCache(1, max_seq_len=8, client=client)
    out = cache.attention(0, *map(jnp.asarray, pair.draw(2)), 0, 1.0)
    assert isinstance(out, jnp.ndarray)
    assert out.shape == (1, 4, 2, 8)


def test_release(backend: Backend) -> None:
    """Pages go when the cache is released, or is no more; a released one begins anew."""
    client = backend.connect()
    pair = Pair(client)
    pair.feed(5)
    assert backend.used_pages() == 2
    pair.cache.release()
    assert backend.used_pages() == 0
    fresh = PagedCache(2, max_seq_len=64, page_size=4, client=client)
    assert pair.cache.page_stats() == fresh.page_stats()
    pair.plain.reset()
    pair.plain.called.clear()
    pair.feed(3)
    assert repr(pair.cache) == "<PagedCache of 2 layers, 3 of 64 tokens>"
