"""Decoders that know nothing of the service, on every cache: tokens as by computing all anew."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from kvservice_client import Client, DynamicCache, StaticCache, functional
from kvservice_client.functional import (
    init_decoder_kv_caches_from_config,
    init_kv_layer_cache,
    update_kv_layer_cache,
)
from tests import jax_decoders
from tests.caching import lengths
from tests.decoders import GPT
from tests.jax_decoders import BlockConfig, cached_attention, cached_step, dense_attention

IDS = torch.tensor([[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 9, 32]])
CONFIG = BlockConfig()
WEIGHTS = jax_decoders.init_weights(CONFIG)
JAX_IDS = np.array([[3, 14, 15, 9], [35, 8, 9, 7]], np.int32)
NEW_TOKENS = 6


# -- torch: the decoder attends, the cache keeps


@pytest.fixture(scope="module")
def gpt() -> GPT:
    return GPT().requires_grad_(False)


def make_cache(kind: str, client: Client) -> Any:
    return DynamicCache(client=client) if kind == "dynamic" else StaticCache(24, client=client)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_case_24_logits(gpt: GPT, cache_client: Client, kind: str) -> None:
    """Case 24: 6 tokens one by one give the logits of one forward pass; 2 layers in the cache."""
    cache = make_cache(kind, cache_client)
    ids = IDS[:1]
    steps = [gpt(ids[:, i : i + 1], cache) for i in range(6)]
    torch.testing.assert_close(torch.cat(steps, 1), gpt(ids), atol=1e-4, rtol=0)
    assert len(cache) == 2
    assert lengths(cache) == [6, 6]
    if kind == "dynamic":
        assert cache[0][0].shape == (1, 2, 6, 16)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_case_24_greedy(gpt: GPT, cache_client: Client, kind: str) -> None:
    """Case 24: greedy tokens with a cache are those without."""
    expected = gpt.generate(IDS, 12)
    assert torch.equal(gpt.generate(IDS, 12, make_cache(kind, cache_client)), expected)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_another_decoder_goes_on(gpt: GPT, cache_client: Client, kind: str) -> None:
    """One decoder stops in the middle; another, with nothing but the id, makes the same tokens."""
    expected = gpt.generate(IDS, 12)
    cache = make_cache(kind, cache_client)
    ids = gpt.generate(IDS, 5, cache)
    session_id = cache.detach()
    if kind == "dynamic":
        cache = DynamicCache.attach(session_id, client=cache_client)
    else:
        cache = StaticCache.attach(session_id, 24, client=cache_client)
    assert lengths(cache) == [ids.shape[1]] * 2
    assert torch.equal(gpt.go_on(ids, 7, cache), expected)


# -- JAX: the decoder attends, the cache keeps


def test_functional_greedy(client: Client) -> None:
    """A loop of jitted halves makes the tokens of full recomputation."""
    caches = init_decoder_kv_caches_from_config(CONFIG, batch_size=2, client=client)

    def step(ids: Any, past: int) -> Any:
        nonlocal caches
        assert [int(cache.length) for cache in caches] == [past] * CONFIG.num_layers
        logits, caches = cached_step(CONFIG, WEIGHTS, ids, caches, update_kv_layer_cache)
        return logits

    tokens = jax_decoders.greedy(step, JAX_IDS, NEW_TOKENS)
    assert_tokens(tokens)


def test_case_18(client: Client) -> None:
    """Case 18: a prompt of 4 and 3 single tokens are one pass over 7; length 7 on every layer."""
    ids = np.concatenate([JAX_IDS, np.array([[1, 2, 3], [4, 5, 6]], np.int32)], axis=1)
    config = BlockConfig(num_kv_heads=None)
    weights = jax_decoders.init_weights(config)
    caches = init_decoder_kv_caches_from_config(config, batch_size=2, client=client)
    parts = []
    for part in (ids[:, :4], ids[:, 4:5], ids[:, 5:6], ids[:, 6:]):
        logits, caches = cached_step(config, weights, part, caches, update_kv_layer_cache)
        parts.append(logits)
    whole = jax_decoders.full_logits(config, weights, ids)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=1e-4, rtol=0)
    assert [int(cache.length) for cache in caches] == [7, 7]


@pytest.mark.parametrize(("rows", "heads", "kv_heads"), [(2, 8, 8), (1, 8, 2)])
def test_case_20(client: Client, rows: int, heads: int, kv_heads: int) -> None:
    """Case 20: shapes and lengths of an attention block of width 64, with and without groups."""
    config = BlockConfig(d_model=64, num_heads=heads, num_kv_heads=kv_heads, max_len=64)
    layer = jax_decoders.layer_of(jax_decoders.init_weights(config), 0)
    cache = init_kv_layer_cache(rows, kv_heads, 8, 64, jnp.float32, client=client)
    first, then = (4, 1) if rows == 2 else (2, 1)
    for tokens, length in ((first, first), (then, first + then)):
        x = jnp.ones((rows, tokens, 64))
        out, cache = cached_attention(config, layer, x, cache, update_kv_layer_cache)
        assert jax_decoders.finish(layer, x, out).shape == (rows, tokens, 64)
        assert int(cache.length) == length
    assert cache.keys.shape == (rows, kv_heads, 64, 8)


def test_case_22(client: Client) -> None:
    """Case 22: KV heads with values 2 and 20 give query heads 0 to 3 the values 2, 2, 20, 20."""
    values = jnp.broadcast_to(jnp.array([2.0, 20.0])[None, :, None, None], (1, 2, 3, 4))
    cache = init_kv_layer_cache(1, 2, 4, 8, jnp.float32, client=client)
    cache = update_kv_layer_cache(cache, jnp.zeros((1, 2, 3, 4)), values, 0)
    keys, values = cache.keys[:, :, :3], cache.values[:, :, :3]
    local = dense_attention(jnp.zeros((1, 4, 1, 4)), keys, values, 2)
    assert local[0, :, 0, 0].tolist() == [2, 2, 20, 20]
    with client.open(num_rows=1) as session:
        there = session.attend(0, jnp.zeros((1, 4, 3, 4)), keys, values)
    np.testing.assert_allclose(there[0, :, -1, 0], [2, 2, 20, 20], rtol=1e-6)


# -- JAX: the service attends


def test_attend_between_jitted_halves(client: Client) -> None:
    """`Session.attend` in a loop over layers makes the tokens of full recomputation."""
    with client.open(num_rows=2) as session:

        def step(ids: Any, past: int) -> Any:
            return jax_decoders.host_step(CONFIG, WEIGHTS, ids, past, session.attend)

        assert_tokens(jax_decoders.greedy(step, JAX_IDS, NEW_TOKENS))
        assert session.lengths(1) == (JAX_IDS.shape[1] + NEW_TOKENS - 1,) * 2


@pytest.mark.parametrize("step", [jax_decoders.traced_step, jax_decoders.scanned_step])
def test_attend_in_a_jitted_step(client: Client, step: Any) -> None:
    """One compiled step, over layers one by one or in a scan. It is compiled twice, for the
    prompt and for one token, and not again as the sequence grows."""
    with client.open(num_rows=2) as session:
        compiled = jax.jit(
            lambda ids, past: step(CONFIG, WEIGHTS, ids, past, partial(functional.attend, session))
        )
        assert_tokens(jax_decoders.greedy(compiled, JAX_IDS, NEW_TOKENS))
        assert compiled._cache_size() == 2
        assert session.lengths(1) == (JAX_IDS.shape[1] + NEW_TOKENS - 1,) * 2


def assert_tokens(tokens: Any) -> None:
    """Check tokens made from `JAX_IDS`, and that they are not always the same."""
    expected = jax_decoders.greedy_anew(CONFIG, WEIGHTS, JAX_IDS, NEW_TOKENS)
    assert tokens.tolist() == expected.tolist()
    assert len(set(expected[:, JAX_IDS.shape[1] :].ravel().tolist())) > NEW_TOKENS // 2
