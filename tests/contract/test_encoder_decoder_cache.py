"""EncoderDecoderCache: what it hands on to which of its two parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvservice.core.errors import InvalidRequest
from kvservice_client import Client, DynamicCache, EncoderDecoderCache, StaticCache
from kvservice_client.tensor_caches import Cache
from tests.caching import assert_same, contents, lengths
from tests.tokens import random_states


@pytest.fixture(params=["dynamic", "static"])
def cache(cache_client: Client, request: pytest.FixtureRequest) -> EncoderDecoderCache:
    """Two layers, two rows: 3 tokens of the decoder's own, 5 of the encoder's."""
    parts: list[Any] = [DynamicCache(client=cache_client) for _ in range(2)]
    if request.param == "static":
        parts = [StaticCache(8, client=cache_client) for _ in range(2)]
    for part, tokens in zip(parts, (3, 5), strict=True):
        for layer in range(2):
            part.update(*random_states(tokens, rows=2), layer)
    return EncoderDecoderCache(*parts)


def test_own_part_only(cache: EncoderDecoderCache) -> None:
    """Companion row: update, lengths and crop go to the decoder's own part."""
    own, cross = cache.self_attention_cache, cache.cross_attention_cache
    before = contents(cross)
    k, v = random_states(1, rows=2)
    returned = cache.update(k, v, 1, {"read_len": 4})
    assert torch.equal(returned[0][:, :, 3:4], k)
    assert [cache.get_seq_length(layer) for layer in (0, 1)] == lengths(own) == [3, 4]
    assert cache.get_max_cache_shape() == own.get_max_cache_shape()
    assert cache.get_usable_length(1) == 3
    cache.crop(-1)
    assert cache.get_seq_length() == 2
    assert_same(cross, before)
    assert lengths(cross) == [5, 5]


def test_both_parts(cache: EncoderDecoderCache) -> None:
    """Companion row: reorder, select, repeat and reset go to both."""
    parts = (cache.self_attention_cache, cache.cross_attention_cache)
    for method, argument, rows in (
        ("reorder_cache", torch.tensor([1, 0]), [1, 0]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1]),
        ("batch_select_indices", torch.tensor([0, -1, 1]), [0, 3, 1]),
    ):
        expected = [[(k[rows], v[rows]) for k, v in part] for part in parts]
        getattr(cache, method)(argument)
        for part, states in zip(parts, expected, strict=True):
            assert_same(part, states)
    cache.reset()
    assert [part.get_seq_length() for part in parts] == [0, 0]


def test_row_that_one_part_lacks(cache: EncoderDecoderCache) -> None:
    """A row index is checked for both parts before either changes."""
    parts = (cache.self_attention_cache, cache.cross_attention_cache)
    parts[0].batch_repeat_interleave(2)
    before = [contents(part) for part in parts]
    with pytest.raises(InvalidRequest):
        cache.reorder_cache(torch.tensor([3]))
    for part, expected in zip(parts, before, strict=True):
        assert_same(part, expected)


def test_is_updated(cache: EncoderDecoderCache, cache_client: Client) -> None:
    """Companion row: `is_updated` is where cross attention has tokens; a reset clears it."""
    assert cache.is_updated == {0: True, 1: True}
    given = EncoderDecoderCache(
        cache.self_attention_cache, cache.cross_attention_cache, is_updated={0: False}
    )
    assert given.is_updated == {0: False}
    fresh = EncoderDecoderCache(
        DynamicCache(client=cache_client), DynamicCache(client=cache_client)
    )
    assert fresh.is_updated == {}
    cache.reset()
    assert cache.is_updated == {}


def test_getitem_len_iter(cache: EncoderDecoderCache) -> None:
    """Companion row: `[i]` gives four tensors, and KeyError where there is no layer."""
    own, cross = cache.self_attention_cache, cache.cross_attention_cache
    assert len(cache) == 2
    for layer, states in enumerate(cache):
        expected = (*own[layer], *cross[layer])
        assert all(got is one for got, one in zip(states, expected, strict=True))
        assert all(got is one for got, one in zip(cache[layer], expected, strict=True))
    with pytest.raises(KeyError):
        cache[2]


def test_legacy(cache: EncoderDecoderCache, cache_client: Client) -> None:
    """Companion row: the legacy form is four tensors for each layer, and comes back."""
    legacy = cache.to_legacy_cache()
    assert [len(states) for states in legacy] == [4, 4]
    rebuilt = EncoderDecoderCache.from_legacy_cache(legacy, client=cache_client)
    assert_same(rebuilt.self_attention_cache, [states[:2] for states in legacy])  # type: ignore[misc]
    assert_same(rebuilt.cross_attention_cache, [states[2:] for states in legacy])  # type: ignore[misc]
    assert rebuilt.is_updated == {0: True, 1: True}
    assert len(EncoderDecoderCache.from_legacy_cache(client=cache_client)) == 0


def test_legacy_without_cross_attention(cache_client: Client) -> None:
    """Before cross attention is filled the legacy form is pairs, which come back too."""
    own = DynamicCache.from_legacy_cache([random_states(2)], client=cache_client)
    cache = EncoderDecoderCache(own, DynamicCache(client=cache_client))
    legacy = cache.to_legacy_cache()
    assert [len(states) for states in legacy] == [2]
    rebuilt = EncoderDecoderCache.from_legacy_cache(legacy, client=cache_client)
    assert_same(rebuilt.self_attention_cache, contents(own))
    assert rebuilt.is_updated == {}


def test_is_a_cache(cache: EncoderDecoderCache) -> None:
    """It is a `Cache` as its parts are."""
    assert isinstance(cache, Cache)
