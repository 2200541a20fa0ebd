"""PagedCache: the worked examples of its specification, numbered as there."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest

from kvservice_client import Client, InvalidRequest, OutOfOrder, PagedCache
from tests.paged import Pair, PlainPagedCache, counting, feed_numbers


def test_case_2_a_new_cache(client: Client) -> None:
    """Nothing is used, everything is free, before any call."""
    cache = PagedCache(2, max_seq_len=64, client=client)
    assert cache.pages_used() == 0
    assert cache.num_free_pages() == 4
    assert cache.seq_len() == 0
    assert astuple(cache.page_stats())[:8] == (0, 4, 4, 16, 0, 0, 2, 0)


def test_case_4_roll_back_frees_pages(client: Client) -> None:
    """Pages go when the last of their tokens goes; asking for too much takes what there is."""
    pair = Pair(client, page_size=16)
    pair.feed(40)
    assert (pair.cache.pages_used(), pair.cache.num_free_pages()) == (3, 1)
    for asked, popped, length, used, free in [
        (9, 9, 31, 2, 2),
        (15, 15, 16, 1, 3),
        (1, 1, 15, 1, 3),
        (1000, 15, 0, 0, 4),
    ]:
        assert pair.popn(asked) == (popped,)
        assert pair.cache.seq_len() == length
        assert (pair.cache.pages_used(), pair.cache.num_free_pages()) == (used, free)


@pytest.mark.parametrize(("popped", "appended"), [(9, 2), (24, 17)])
def test_case_6_growing_again(client: Client, popped: int, appended: int) -> None:
    """After a roll-back the sequence takes as many pages as if it had never been longer."""
    pair = Pair(client, page_size=16)
    pair.feed(40)
    pair.popn(popped)
    pair.feed(appended)
    assert pair.cache.seq_len() == 33
    assert (pair.cache.pages_used(), pair.cache.num_free_pages()) == (3, 1)


def test_case_8_chunks_across_pages(client: Client) -> None:
    """Chunks that begin and end within pages give what one chunk gives."""
    chunked, whole = Pair(client, 1), Pair(client, 1)
    tokens = whole.draw(16)
    (expected,) = whole.feed(16, tokens=tokens)
    outs, first = [], 0
    for count in (3, 6, 5, 2):
        part = tuple(array[:, :, first : first + count] for array in tokens)
        outs += chunked.feed(count, tokens=part)
        first += count
    assert (chunked.cache.seq_len(), chunked.cache.pages_used()) == (16, 4)
    assert np.abs(np.concatenate(outs, axis=2) - expected).max() < 1e-5


def test_case_10_out_of_order(client: Client) -> None:
    """Layer 0 appends at the length and nowhere else."""
    cache = PagedCache(1, max_seq_len=64, client=client)
    feed_numbers(cache, 2)
    for pos in (3, 1):
        with pytest.raises(OutOfOrder) as caught:
            cache.attention(0, *counting([9]), pos, 1.0)
        assert caught.value.metadata["lengths"] == "2"
        assert cache.seq_len() == 2
    assert cache.attention(0, *counting([5]), 2, 1.0).item() == pytest.approx(2.0)
    assert cache.seq_len() == 3


@pytest.mark.parametrize(
    ("window", "means"),
    [(3, [0, 0.5, 1, 2, 3, 4, 5]), (5, [0, 0.5, 1, 1.5, 2, 3, 4])],
)
def test_case_12_window_of_a_global_layer(client: Client, window: int, means: list[float]) -> None:
    """It masks and keeps: the pages still hold all tokens."""
    cache = PagedCache(1, max_seq_len=64, page_size=4, client=client)
    assert feed_numbers(cache, 7, window=window) == pytest.approx(means)
    assert cache.pages_used() == 2
    # A query without a window sees them all.
    assert feed_numbers(cache, 1) == pytest.approx([3.5])


def test_case_14_sliding_layer(client: Client) -> None:
    """A chunk longer than the window is right, and so are the tokens that follow it."""
    cache = PagedCache(1, max_seq_len=64, windows=[5], client=client)
    plain = PlainPagedCache(1, page_size=16, windows=[5])
    sizes = []
    for count, means in [(7, [0, 0.5, 1, 1.5, 2, 3, 4]), (1, [5]), (1, [6])]:
        first = cache.seq_len()
        assert feed_numbers(cache, count) == pytest.approx(means)
        plain.attention(0, *counting(range(first, first + count)), scale=1.0)
        sizes.append(len(plain.tokens[0][0]))
    assert sizes == [4, 4, 4]


def test_case_16_sliding_layer_in_chunks(client: Client) -> None:
    """Chunks shorter than the window, across its edge."""
    cache = PagedCache(1, max_seq_len=64, windows=[4], client=client)
    for count, means in [(3, [0, 0.5, 1]), (3, [1.5, 2.5, 3.5]), (1, [4.5])]:
        assert feed_numbers(cache, count) == pytest.approx(means)


def test_case_18_refusal(client: Client) -> None:
    """Nothing can be popped once a window of 4 has seen a fourth token."""
    cache = PagedCache(1, max_seq_len=64, windows=[4], client=client)
    feed_numbers(cache, 6)
    assert cache.popn(1) == 0
    assert cache.seq_len() == 6
    assert cache.popn(0) == 0
    cache.reset()
    feed_numbers(cache, 3)
    assert cache.popn(1) == 1
    cache.reset()
    feed_numbers(cache, 4)
    assert cache.popn(1) == 0


@pytest.mark.parametrize(
    ("windows", "message"),
    [([None], "one entry per layer"), ([None, 1], "must be >= 2"), ([0, None], "must be >= 2")],
)
def test_case_20_bad_windows(client: Client, windows: list[int | None], message: str) -> None:
    """Windows are refused when the cache is made."""
    with pytest.raises(InvalidRequest, match=message):
        PagedCache(2, max_seq_len=64, windows=windows, client=client)


def test_case_22_other_content_after_a_roll_back(client: Client) -> None:
    """What was popped is never seen again."""
    pair, fresh = Pair(client, seed=1), Pair(client, seed=2)
    tokens, others = pair.draw(10), pair.draw(3)
    pair.feed(10, tokens=tokens)
    assert pair.popn(6) == (6,)
    assert (pair.cache.seq_len(), pair.cache.pages_used()) == (4, 1)
    outs = pair.feed(3, tokens=others)
    fresh.feed(4, tokens=tuple(array[:, :, :4] for array in tokens))
    for out, expected in zip(outs, fresh.feed(3, tokens=others), strict=True):
        assert np.abs(out - expected).max() < 1e-5


@pytest.mark.parametrize(("scale", "expected"), [(1.0, 3.0), (0.0, 2.0), (2.0, 3.6)])
def test_case_24_scale(client: Client, scale: float, expected: float) -> None:
    """The scale is what is given, whatever the dimension."""
    cache = PagedCache(1, max_seq_len=64, client=client)
    ones = np.ones((1, 1, 2, 1), np.float32)
    k = np.array([0.0, np.log(3.0)], np.float32).reshape(1, 1, 2, 1)
    v = np.array([0.0, 4.0], np.float32).reshape(1, 1, 2, 1)
    out = cache.attention(0, ones, k, v, 0, scale)
    assert out[0, 0, 1, 0] == pytest.approx(expected)


def test_case_26_sliding_layer_first(client: Client) -> None:
    """Layer 0 makes the sequence longer; pages appear at the first layer that has them."""
    cache = PagedCache(2, max_seq_len=64, windows=[4, None], client=client)
    cache.attention(0, *counting(range(5)), 0, 1.0)
    assert (cache.seq_len(), cache.pages_used()) == (5, 0)
    cache.attention(1, *counting(range(5)), 0, 1.0)
    assert (cache.seq_len(), cache.pages_used()) == (5, 1)


def test_case_28_materialized_pages(client: Client) -> None:
    """An arena's pages double, or jump to what a chunk needs; the bound is not their number."""
    cache = PagedCache(1, max_seq_len=4096, client=client)

    def materialized() -> int:
        stats = cache.page_stats()
        assert stats.num_pages == 256
        assert stats.pages_free == cache.num_free_pages() == 256 - stats.pages_used
        return stats.pages_materialized

    assert materialized() == 32
    feed_numbers(cache, 512)
    assert materialized() == 32
    feed_numbers(cache, 1)
    assert materialized() == 64
    feed_numbers(cache, 3200 - 513)
    assert materialized() == 200
    assert cache.num_free_pages() == 56
    cache.reset()
    assert materialized() == 200
    assert cache.num_free_pages() == 256
