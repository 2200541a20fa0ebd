"""Small decoders that know nothing of the service: attention blocks in JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class BlockConfig:
    """A decoder of attention blocks with rotary positions."""

    d_model: int = 32
    num_heads: int = 4
    num_kv_heads: int | None = 2
    num_layers: int = 2
    vocabulary: int = 40
    max_len: int = 32
    kv_cache_max_len: int | None = None

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads


def init_weights(config: BlockConfig) -> dict[str, Any]:
    """Return weights; those of the layers are stacked, so that they can be scanned over."""
    random = np.random.default_rng(0)
    kv_width = (config.num_kv_heads or config.num_heads) * config.head_dim
    widths = {"q": config.d_model, "k": kv_width, "v": kv_width, "o": config.d_model}

    def normal(*shape: int) -> Any:
        return jnp.asarray(random.normal(size=shape).astype(np.float32) / shape[-2] ** 0.5 * 2)

    layers = {
        name: normal(config.num_layers, config.d_model, width) for name, width in widths.items()
    }
    return {
        "embed": normal(config.vocabulary, config.d_model) * 2,
        "layers": layers,
        "head": normal(config.d_model, config.vocabulary),
    }


def rotate(x: Any, past: Any) -> Any:
    """Return x [rows, heads, tokens, dim] with rotary positions from `past` on."""
    half = x.shape[-1] // 2
    positions = past + jnp.arange(x.shape[2])
    angles = positions[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def project(config: BlockConfig, layer: dict[str, Any], x: Any, past: Any) -> tuple[Any, Any, Any]:
    """Return q, k, v of one layer, [rows, heads, tokens, dim], q and k rotated."""
    rows, tokens, _ = x.shape

    def heads(name: str) -> Any:
        return (x @ layer[name]).reshape(rows, tokens, -1, config.head_dim).swapaxes(1, 2)

    return rotate(heads("q"), past), rotate(heads("k"), past), heads("v")


def dense_attention(q: Any, k: Any, v: Any, past: Any) -> Any:
    """Attend causally; the queries stand at positions from `past` on. KV heads are repeated."""
    repeats = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, repeats, axis=1), jnp.repeat(v, repeats, axis=1)
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    seen = jnp.arange(k.shape[2])[None, :] <= jnp.arange(q.shape[2])[:, None] + past
    return jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(scores.dtype).min)) @ v


def finish(layer: dict[str, Any], x: Any, attended: Any) -> Any:
    """Return x with what a layer's attention adds to it."""
    rows, tokens, width = x.shape
    return x + attended.swapaxes(1, 2).reshape(rows, tokens, width) @ layer["o"]


def layer_of(weights: dict[str, Any], index: int) -> dict[str, Any]:
    return {name: stacked[index] for name, stacked in weights["layers"].items()}


@partial(jax.jit, static_argnums=0)
def full_logits(config: BlockConfig, weights: dict[str, Any], ids: Any) -> Any:
    """Return logits of all positions, computed from nothing."""
    x = weights["embed"][ids]
    for index in range(config.num_layers):
        layer = layer_of(weights, index)
        x = finish(layer, x, dense_attention(*project(config, layer, x, 0), 0))
    return x @ weights["head"]


jitted_project = partial(jax.jit, static_argnums=0)(project)
jitted_finish = jax.jit(finish)

Update = Callable[[Any, Any, Any, Any], Any]
"""Of a cache, new keys and values, and their start: returns the cache that has them."""


@partial(jax.jit, static_argnums=0)
def _attend_to_all(
    config: BlockConfig, layer: dict[str, Any], x: Any, keys: Any, values: Any, past: Any
) -> tuple[Any, Any, Any]:
    q, k, v = project(config, layer, x, past)
    keys = jax.lax.dynamic_update_slice_in_dim(keys, k, past, axis=2)
    values = jax.lax.dynamic_update_slice_in_dim(values, v, past, axis=2)
    return dense_attention(q, keys, values, past), k, v


def cached_attention(
    config: BlockConfig, layer: dict[str, Any], x: Any, cache: Any, update: Update
) -> tuple[Any, Any]:
    """Return attention to a cache's tokens and the new ones, and the cache that has them."""
    past = int(cache.length)
    out, k, v = _attend_to_all(config, layer, x, cache.keys, cache.values, past)
    return out, update(cache, k, v, past)


def cached_step(
    config: BlockConfig, weights: dict[str, Any], ids: Any, caches: tuple[Any, ...], update: Update
) -> tuple[Any, tuple[Any, ...]]:
    """Return logits of new tokens, and the caches that have them."""
    x = weights["embed"][ids]
    after = []
    for index, cache in enumerate(caches):
        layer = layer_of(weights, index)
        attended, cache = cached_attention(config, layer, x, cache, update)
        x = jitted_finish(layer, x, attended)
        after.append(cache)
    return x @ weights["head"], tuple(after)


Attend = Callable[[Any, Any, Any, Any], Any]
"""Of a layer's number, and q, k, v of its new tokens: returns the attention output."""


def host_step(
    config: BlockConfig, weights: dict[str, Any], ids: Any, past: int, attend: Attend
) -> Any:
    """Return logits of new tokens: jitted halves of layers, with `attend` between them."""
    x = weights["embed"][ids]
    for index in range(config.num_layers):
        layer = layer_of(weights, index)
        q, k, v = jitted_project(config, layer, x, past)
        x = jitted_finish(layer, x, attend(index, q, k, v))
    return x @ weights["head"]


def traced_step(
    config: BlockConfig, weights: dict[str, Any], ids: Any, past: Any, attend: Attend
) -> Any:
    """Return logits of new tokens: all of it can be traced, if `attend` can."""
    x = weights["embed"][ids]
    for index in range(config.num_layers):
        layer = layer_of(weights, index)
        x = finish(layer, x, attend(index, *project(config, layer, x, past)))
    return x @ weights["head"]


def scanned_step(
    config: BlockConfig, weights: dict[str, Any], ids: Any, past: Any, attend: Attend
) -> Any:
    """As `traced_step`, with a scan over the layers, whose number is traced too."""

    def one_layer(x: Any, numbered: tuple[Any, dict[str, Any]]) -> tuple[Any, None]:
        index, layer = numbered
        return finish(layer, x, attend(index, *project(config, layer, x, past))), None

    layers = (jnp.arange(config.num_layers), weights["layers"])
    x, _ = jax.lax.scan(one_layer, weights["embed"][ids], layers)
    return x @ weights["head"]


def greedy(step: Callable[[Any, int], Any], ids: Ids, new_tokens: int) -> Ids:
    """Return the ids with tokens added greedily: all at once at first, then one by one.

    Args:
        step: Returns logits for new ids, behind so many tokens.
    """
    past = 0
    for _ in range(new_tokens):
        logits = step(ids[:, past:], past)
        past = ids.shape[1]
        ids = _with_best(ids, logits, -1)
    return ids


def greedy_anew(config: BlockConfig, weights: dict[str, Any], ids: Ids, new_tokens: int) -> Ids:
    """As `greedy`, with everything computed again for each token."""
    for _ in range(new_tokens):
        length = ids.shape[1]
        whole = np.pad(ids, ((0, 0), (0, config.max_len - length)))  # one shape to compile
        ids = _with_best(ids, full_logits(config, weights, whole), length - 1)
    return ids


def _with_best(ids: Ids, logits: Any, position: int) -> Ids:
    best = np.asarray(logits)[:, position].argmax(-1)
    return np.concatenate([ids, best[:, None].astype(ids.dtype)], axis=1)
