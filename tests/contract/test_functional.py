"""The functional cache: each row of its behaviour table, and each example case, by name."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import kvservice_client
from kvservice.core.errors import (
    DeadlineExceeded,
    GeometryMismatch,
    InvalidRequest,
    KVServiceError,
    PagesLost,
    PositionOutOfRange,
    QuotaExceeded,
)
from kvservice_client import Client
from kvservice_client.functional import (
    KVLayerCache,
    init_decoder_kv_caches,
    init_decoder_kv_caches_from_config,
    init_kv_layer_cache,
    update_kv_layer_cache,
)
from kvservice_client.testing import eventually
from tests.backends import Backend, embedded_backend
from tests.caching import assert_all_released
from tests.failing import Failing


@dataclass(frozen=True)
class Library:
    """How tests make arrays of a library, and tell them."""

    name: str
    array: Callable[[Any], Any]
    float32: Any
    bfloat16: Any
    kind: type

    def tokens(self, *values: float, rows: int = 1, heads: int = 2, dim: int = 4) -> Any:
        """Return [rows, heads, tokens, dim], token i filled with the value i."""
        one = np.array(values, np.float32).reshape(-1, 1)
        return self.array(np.broadcast_to(one, (rows, heads, len(values), dim)).copy())


LIBRARIES = [
    Library("numpy", np.asarray, np.float32, ml_dtypes.bfloat16, np.ndarray),
    Library("torch", torch.tensor, torch.float32, torch.bfloat16, torch.Tensor),
    Library("jax", jnp.asarray, jnp.float32, jnp.bfloat16, jax.Array),
]


@pytest.fixture(params=LIBRARIES, ids=lambda library: library.name)
def library(request: pytest.FixtureRequest) -> Library:
    return request.param


@pytest.fixture
def backend() -> Iterator[Backend]:
    """A service in this process."""
    with embedded_backend() as backend:
        yield backend


@pytest.fixture
def failing(backend: Backend) -> Failing:
    """What stands between the client and the service."""
    return Failing(backend.dial)


@pytest.fixture
def client(backend: Backend, failing: Failing, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client whose caches free their pages by themselves, once nobody holds them."""
    yield backend.connect(dial=failing.dial)
    request.node.funcargs.clear()
    assert_all_released(backend)


@pytest.fixture
def empty(client: Client, library: Library) -> KVLayerCache:
    """An empty cache of 8 tokens."""
    return init_kv_layer_cache(1, 2, 4, 8, library.float32, client=client)


def slots(array: Any) -> list[float]:
    """Return the first element of every position, all of which hold one value each."""
    values = np.asarray(array.float() if isinstance(array, torch.Tensor) else array, np.float32)
    assert (values == values[:1, :1, :, :1]).all()
    return values[0, 0, :, 0].tolist()


def assert_shows(cache: KVLayerCache, values: list[float], length: int) -> None:
    """Check what a cache shows, from its arrays and again from the service."""
    for _ in range(2):
        assert slots(cache.keys) == values
        assert slots(cache.values) == [-value for value in values]
        if cache._content is not None:
            cache._content._arrays = None
    assert int(cache.length) == length


def update(cache: KVLayerCache, library: Library, start: int, *values: float) -> KVLayerCache:
    tokens = library.tokens(*values)
    return update_kv_layer_cache(cache, tokens, -tokens, start)


def refuses(
    cache: KVLayerCache,
    error: type[Exception],
    call: Callable[[], object],
    match: str | None = None,
) -> None:
    """Check that a call raises, and that the cache is as before."""
    before, length = slots(cache.keys), int(cache.length)
    with pytest.raises(error, match=match):
        call()
    assert_shows(cache, before, length)


# -- rows of the table


def test_kv_layer_cache(library: Library) -> None:
    """Row `KVLayerCache(keys, values, length)`: frozen, not checked, unhashable."""
    keys = library.tokens(1, 2, 3)
    cache = KVLayerCache(keys, -keys, 3)
    assert cache.keys is keys
    assert [one.name for one in dataclasses.fields(cache)][:3] == ["keys", "values", "length"]
    for name in ("keys", "values", "length", "other"):
        with pytest.raises(FrozenInstanceError):
            setattr(cache, name, 1)
    with pytest.raises(TypeError, match="unhashable"):
        hash(cache)
    with pytest.raises((ValueError, RuntimeError), match="ambiguous"):
        assert cache == KVLayerCache(keys + 0, -keys, 3)
    assert KVLayerCache("anything", None, "unchecked").length == "unchecked"  # type: ignore[arg-type]


def test_frozen_with_pages(empty: KVLayerCache, library: Library) -> None:
    """Row `KVLayerCache(keys, values, length)`: also where arrays are looked up."""
    cache = update(empty, library, 0, 1, 2)
    for name in ("keys", "values", "length", "_content"):
        with pytest.raises(FrozenInstanceError):
            setattr(cache, name, 1)
        with pytest.raises(FrozenInstanceError):
            delattr(cache, name)
    with pytest.raises(TypeError, match="unhashable"):
        hash(cache)
    with pytest.raises((ValueError, RuntimeError), match="ambiguous"):
        assert cache == empty
    assert cache == copy.copy(cache)
    assert copy.deepcopy(cache) is cache
    with pytest.raises(AttributeError, match="no attribute"):
        cache.anything  # noqa: B018
    assert "keys=" in repr(cache)


def test_not_a_pytree(client: Client) -> None:
    """Row `not a pytree`: JAX refuses it as an argument of a compiled function."""
    cache = init_kv_layer_cache(1, 2, 4, 8, jnp.float32, client=client)
    with pytest.raises(TypeError):
        jax.jit(lambda cache: cache.keys)(cache)
    assert jax.tree_util.all_leaves([cache])


def test_max_len(empty: KVLayerCache, library: Library) -> None:
    """Row `.max_len`: positions, an int."""
    assert empty.max_len == 8
    assert type(empty.max_len) is int
    assert KVLayerCache(library.tokens(1, 2, 3), None, 0).max_len == 3


def test_length(empty: KVLayerCache, library: Library) -> None:
    """Row `.length`: an int32 scalar array, one for the whole batch."""
    cache = update(empty, library, 0, 1, 2, 3)
    for one, value in ((empty.length, 0), (cache.length, 3)):
        assert isinstance(one, library.kind)
        assert tuple(one.shape) == ()
        assert str(one.dtype).endswith("int32")
        assert int(one) == value


def test_init_kv_layer_cache(empty: KVLayerCache, client: Client, library: Library) -> None:
    """Row `init_kv_layer_cache`: five arguments, none with a default; zeros; one array for both."""
    for count in range(5):
        with pytest.raises(TypeError):
            init_kv_layer_cache(*(1, 2, 4, 8, library.float32)[:count], client=client)
    named = init_kv_layer_cache(
        dtype=library.float32, max_len=6, head_dim=5, num_kv_heads=3, batch_size=2, client=client
    )
    assert tuple(named.keys.shape) == (2, 3, 6, 5)
    assert isinstance(named.keys, library.kind)
    assert named.keys is named.values
    assert_shows(empty, [0.0] * 8, 0)
    assert client.list_sessions() == []


def test_init_without_client(client: Client) -> None:
    """A default client is taken, and without one the error says so."""
    with pytest.raises(RuntimeError, match="no client"):
        init_kv_layer_cache(1, 2, 4, 8, np.float32)
    kvservice_client.use(client)
    try:
        assert init_kv_layer_cache(1, 2, 4, 8, np.float32).max_len == 8
    finally:
        kvservice_client.use(None)


@pytest.mark.parametrize("dtype", [np.int32, torch.int64, "complex64", bool, None, "nonsense"])
def test_init_refuses_what_cannot_be_stored(client: Client, dtype: Any) -> None:
    """Row `init_kv_layer_cache`: other dtypes, and negative sizes, are typed errors."""
    with pytest.raises(InvalidRequest):
        init_kv_layer_cache(1, 2, 4, 8, dtype, client=client)
    with pytest.raises(InvalidRequest):
        init_kv_layer_cache(1, 2, -4, 8, np.float32, client=client)


def test_update_kv_layer_cache(empty: KVLayerCache, library: Library) -> None:
    """Row `update_kv_layer_cache`: a new value; an overflow names both numbers."""
    cache = update(empty, library, 0, 1, 2, 3)
    assert_shows(cache, [1, 2, 3, 0, 0, 0, 0, 0], 3)
    assert_shows(empty, [0] * 8, 0)
    refuses(
        cache,
        ValueError,
        lambda: update(cache, library, 3, 1, 2, 3, 4, 5, 6),
        match="KV cache overflow: end=9 exceeds max_len=8",
    )
    refuses(cache, PositionOutOfRange, lambda: update(cache, library, 8, 1))


def test_length_rule(empty: KVLayerCache, library: Library) -> None:
    """Row `length rule`: where the tokens end, down or over a gap, whatever it was."""
    cache = update(empty, library, 0, 1, 2, 3, 4, 5, 6)
    down = update(cache, library, 1, 9)
    assert_shows(down, [1, 9, 3, 4, 5, 6, 0, 0], 2)
    over_a_gap = update(down, library, 7, 8)
    assert_shows(over_a_gap, [1, 9, 3, 4, 5, 6, 0, 8], 8)
    gap = update(empty, library, 5, 7)
    assert_shows(gap, [0, 0, 0, 0, 0, 7, 0, 0], 6)
    assert_shows(cache, [1, 2, 3, 4, 5, 6, 0, 0], 6)


@pytest.mark.parametrize(("start", "tokens"), [(-3, 1), (-1, 1), (-2, 2), (-1, 0)])
def test_negative_start(empty: KVLayerCache, library: Library, start: int, tokens: int) -> None:
    """Row `start < 0`: an accident there, a typed error here."""
    cache = update(empty, library, 0, 1, 2)
    refuses(cache, PositionOutOfRange, lambda: update(cache, library, start, *range(tokens)))


def test_chunk_0(empty: KVLayerCache, library: Library) -> None:
    """Row `chunk = 0`: nothing is written, the length is the start."""
    assert_shows(update(empty, library, 5), [0] * 8, 5)
    cache = update(empty, library, 0, 1, 2, 3)
    back = update(cache, library, 1)
    assert_shows(back, [1, 2, 3, 0, 0, 0, 0, 0], 1)
    assert_shows(update(back, library, 1, 7), [1, 7, 3, 0, 0, 0, 0, 0], 2)
    assert_shows(cache, [1, 2, 3, 0, 0, 0, 0, 0], 3)
    assert_shows(update(cache, library, 8), [1, 2, 3, 0, 0, 0, 0, 0], 8)
    refuses(cache, PositionOutOfRange, lambda: update(cache, library, 9))


def test_broadcasting(client: Client, library: Library) -> None:
    """Row `broadcasting`: nothing is broadcast; other shapes are refused."""
    cache = init_kv_layer_cache(3, 2, 4, 8, library.float32, client=client)
    right = library.tokens(1, 2, rows=3)
    for wrong in (
        library.tokens(1, 2, rows=1),
        library.tokens(1, 2, rows=2),
        library.tokens(1, 2, rows=3, heads=1),
        library.tokens(1, 2, rows=3, dim=1),
        library.tokens(1, 2, rows=3)[0],
    ):
        refuses(
            cache, ValueError, lambda wrong=wrong: update_kv_layer_cache(cache, wrong, wrong, 0)
        )
        refuses(
            cache,
            GeometryMismatch,
            lambda wrong=wrong: update_kv_layer_cache(cache, right, wrong, 0),
        )


def test_values_shape(empty: KVLayerCache, library: Library) -> None:
    """Row `values shape`: as many tokens as keys."""
    for values in (library.tokens(1), library.tokens(1, 2, 3)):
        refuses(
            empty,
            GeometryMismatch,
            lambda values=values: update_kv_layer_cache(empty, library.tokens(1, 2), values, 0),
        )


def test_dtype(client: Client, library: Library) -> None:
    """Row `dtype`: what comes is cast to the cache's, which stays."""
    exact, rounded = 1.001, float(ml_dtypes.bfloat16(1.001))
    cache = init_kv_layer_cache(1, 2, 4, 8, library.bfloat16, client=client)
    first = update(cache, library, 0, exact)
    second = update(first, library, 1, exact)
    for one in (cache, first, second):
        assert one.keys.dtype == cache.keys.dtype
    assert_shows(second, [rounded, rounded, 0, 0, 0, 0, 0, 0], 2)
    assert_shows(first, [rounded, 0, 0, 0, 0, 0, 0, 0], 1)
    whole = library.array(np.full((1, 2, 1, 4), 3))
    cache = init_kv_layer_cache(1, 2, 4, 8, library.float32, client=client)
    assert_shows(update_kv_layer_cache(cache, whole, -whole, 0), [3, 0, 0, 0, 0, 0, 0, 0], 1)


def test_traced_start(client: Client) -> None:
    """Row `traced start`: fails under jit; a concrete scalar array does not."""
    cache = init_kv_layer_cache(1, 2, 4, 8, jnp.float32, client=client)
    tokens = jnp.ones((1, 2, 1, 4))
    with pytest.raises(TypeError):  # what JAX raises for a traced integer
        jax.jit(lambda start: update_kv_layer_cache(cache, tokens, -tokens, start).keys)(0)
    first = update_kv_layer_cache(cache, tokens, -tokens, cache.length)
    assert_shows(update_kv_layer_cache(first, tokens, -tokens, first.length), [1, 1] + [0] * 6, 2)
    with pytest.raises(InvalidRequest):
        update_kv_layer_cache(cache, tokens, tokens, 0.5)


def test_rollback(empty: KVLayerCache, library: Library) -> None:
    """Row `rollback`: by `dataclasses.replace`, or a smaller start; stale positions stay."""
    cache = update(empty, library, 0, 1, 2, 3, 4)
    back = dataclasses.replace(cache, length=2)
    assert_shows(back, [1, 2, 3, 4, 0, 0, 0, 0], 2)
    assert_shows(update(back, library, 2, 9), [1, 2, 9, 4, 0, 0, 0, 0], 3)
    assert_shows(cache, [1, 2, 3, 4, 0, 0, 0, 0], 4)


def test_replaced_arrays(empty: KVLayerCache, library: Library, client: Client) -> None:
    """Row `rollback`: replaced keys are what the new value shows, and can be gone on with."""
    cache = update(empty, library, 0, 1, 2, 3, 4)
    other = dataclasses.replace(cache, keys=cache.keys * 2, values=cache.values * 2)
    assert_shows(other, [2, 4, 6, 8, 0, 0, 0, 0], 4)
    grown = update(other, library, 4, 5)
    assert_shows(grown, [2, 4, 6, 8, 5, 0, 0, 0], 5)
    assert_shows(update(grown, library, 1, 7), [2, 7, 6, 8, 5, 0, 0, 0], 2)
    assert_shows(cache, [1, 2, 3, 4, 0, 0, 0, 0], 4)
    kvservice_client.use(client)
    try:
        made = KVLayerCache(library.tokens(1, 2, 3), -library.tokens(1, 2, 3), 1)
        assert_shows(update(made, library, 1, 9), [1, 9, 3], 2)
        assert slots(made.keys) == [1, 2, 3]
        ragged = KVLayerCache(library.tokens(1, 2), library.tokens(1), 1)
        with pytest.raises(InvalidRequest):
            update(ragged, library, 0, 1)
    finally:
        kvservice_client.use(None)


def test_init_decoder_kv_caches(client: Client, library: Library) -> None:
    """Row `init_decoder_kv_caches`: keywords only, all required; independent caches."""
    arguments = {
        "num_layers": 3, "batch_size": 1, "num_kv_heads": 2, "head_dim": 4, "max_len": 8,
        "dtype": library.float32,
    }  # fmt: skip
    for name in arguments:
        with pytest.raises(TypeError):
            init_decoder_kv_caches(
                **{key: value for key, value in arguments.items() if key != name}, client=client
            )
    with pytest.raises(TypeError):
        init_decoder_kv_caches(3, 1, 2, 4, 8, library.float32)  # type: ignore[misc]
    caches = init_decoder_kv_caches(**arguments, client=client)
    assert isinstance(caches, tuple)
    assert [int(cache.length) for cache in caches] == [0, 0, 0]
    assert init_decoder_kv_caches(**{**arguments, "num_layers": 0}, client=client) == ()


@dataclass
class Config:
    """A decoder's configuration, with the defaults that it has upstream."""

    vocab_size: int
    d_model: int = 512
    num_heads: int = 8
    num_layers: int = 6
    d_ff: int = 2048
    dropout: float = 0.1
    max_len: int = 512
    pos_emb: str = "sinusoidal"
    rope_base: float = 10000.0
    num_kv_heads: int | None = None
    attention_window: int | None = None
    kv_cache_max_len: int | None = None


def shapes(caches: tuple[KVLayerCache, ...]) -> list[tuple[int, ...]]:
    return [tuple(cache.keys.shape) for cache in caches]


def test_init_from_config(client: Client) -> None:
    """Row `init_decoder_kv_caches_from_config`: capacity, heads, dim and layers from the config."""
    config = Config(100, d_model=64, num_heads=8, num_layers=2, num_kv_heads=2, max_len=32)

    def init(**options: Any) -> list[tuple[int, ...]]:
        return shapes(
            init_decoder_kv_caches_from_config(config, batch_size=3, client=client, **options)
        )

    assert init() == [(3, 2, 32, 8)] * 2
    assert init(max_len=5) == [(3, 2, 5, 8)] * 2
    config.kv_cache_max_len = 16
    assert init() == [(3, 2, 16, 8)] * 2
    with pytest.raises(TypeError):
        init_decoder_kv_caches_from_config(config, 3)  # type: ignore[misc]


def test_falsy_rules(client: Client, library: Library) -> None:
    """Row `falsy rules`: 0 in the config counts as not said, an explicit 0 does not."""
    config = Config(100, num_layers=1, max_len=32, kv_cache_max_len=0, num_kv_heads=0)
    caches = init_decoder_kv_caches_from_config(config, batch_size=1, client=client)
    assert shapes(caches) == [(1, 8, 32, 64)]
    (cache,) = init_decoder_kv_caches_from_config(config, batch_size=1, max_len=0, client=client)
    assert cache.max_len == 0
    tokens = library.tokens(1, heads=8, dim=64)
    with pytest.raises(PositionOutOfRange, match="end=1 exceeds max_len=0"):
        update_kv_layer_cache(cache, tokens, tokens, 0)
    nothing = tokens[:, :, :0]
    assert int(update_kv_layer_cache(cache, nothing, nothing, 0).length) == 0


def test_config_defaults(client: Client) -> None:
    """Row `config defaults`: six layers of 8 heads, 512 tokens and dim 64, in float32."""
    caches = init_decoder_kv_caches_from_config(Config(100), batch_size=2, client=client)
    assert shapes(caches) == [(2, 8, 512, 64)] * 6


def test_dtype_default(client: Client, library: Library) -> None:
    """Row `dtype default`: float32, for the config's helper only."""
    config = Config(100, d_model=8, num_heads=2, num_layers=1, max_len=4)
    (cache,) = init_decoder_kv_caches_from_config(config, batch_size=1, client=client)
    assert str(cache.keys.dtype).endswith("float32")
    (cache,) = init_decoder_kv_caches_from_config(
        config, batch_size=1, dtype=library.bfloat16, client=client
    )
    assert str(cache.keys.dtype).endswith("bfloat16")


def test_gqa(client: Client, library: Library) -> None:
    """Row `GQA`: buffers have KV heads; query head h reads KV head h // group_size."""
    cache = init_kv_layer_cache(1, 2, 1, 4, library.float32, client=client)
    values = library.array(np.array([2, 20], np.float32).reshape(1, 2, 1, 1))
    cache = update_kv_layer_cache(cache, values, values, 0)
    repeated = np.repeat(np.asarray(cache.values)[:, :, :1], 2, axis=1)
    assert repeated[0, :, 0, 0].tolist() == [2, 2, 20, 20]


def test_no_batch_ops() -> None:
    """Row `batch ops, reorder, crop, reset`: there are none."""
    public = {name for name in dir(KVLayerCache) if not name.startswith("_")}
    assert public == {"max_len"}  # fields have no class attributes


# -- kinds of arrays


def test_same_kind_out(empty: KVLayerCache, library: Library) -> None:
    """What comes out is of the library that came in, from any version, in place or not."""
    first = update(empty, library, 0, 1, 2)
    second = update(first, library, 1, 3)
    for cache in (empty, first, second, update(first, library, 2, 4)):
        assert isinstance(cache.keys, library.kind)
        assert isinstance(cache.values, library.kind)
        assert isinstance(cache.length, library.kind)
    if library.name == "numpy":
        with pytest.raises(ValueError, match="read-only"):
            second.keys[:] = 0


@pytest.mark.parametrize("other", LIBRARIES, ids=lambda library: library.name)
def test_kinds_may_change(empty: KVLayerCache, library: Library, other: Library) -> None:
    """A cache that was begun by one library goes on with another, values of a third included."""
    first = update(empty, library, 0, 1, 2)
    second = update(first, other, 1, 3)
    assert isinstance(second.keys, other.kind)
    assert_shows(second, [1, 3, 0, 0, 0, 0, 0, 0], 2)
    assert isinstance(first.keys, library.kind)
    third = update_kv_layer_cache(second, other.tokens(5), -library.tokens(5), 2)
    assert isinstance(third.values, other.kind)
    assert_shows(third, [1, 3, 5, 0, 0, 0, 0, 0], 3)


def test_refuses_what_is_no_array(client: Client) -> None:
    """Lists are no arrays, though they may have a shape."""

    class Shaped(list):  # type: ignore[type-arg]
        shape = (1, 2, 1, 4)

    cache = init_kv_layer_cache(1, 2, 4, 8, np.float32, client=client)
    tokens = np.ones((1, 2, 1, 4), np.float32)
    for wrong in (Shaped(), tokens.tolist(), None, 1.0):
        for keys, values in ((wrong, wrong), (tokens, wrong), (wrong, tokens)):
            with pytest.raises(InvalidRequest, match="torch, numpy or JAX"):
                update_kv_layer_cache(cache, keys, values, 0)


def test_float64_of_jax(client: Client) -> None:
    """Row `dtype`: JAX takes float32 for float64, and warns; a float64 cache refuses its arrays."""
    with pytest.warns(UserWarning, match="float64"):
        cache = init_kv_layer_cache(1, 2, 4, 8, jnp.float64, client=client)
    tokens = jnp.ones((1, 2, 1, 4))
    cache = update_kv_layer_cache(cache, tokens, -tokens, 0)
    assert cache.keys.dtype == jnp.float32
    assert_shows(cache, [1] + [0] * 7, 1)
    wide = init_kv_layer_cache(1, 2, 4, 8, np.float64, client=client)
    with pytest.raises(InvalidRequest, match="jax_enable_x64"):
        update_kv_layer_cache(wide, tokens, -tokens, 0)
    third = np.full((1, 2, 1, 4), 1 / 3)
    wide = update_kv_layer_cache(wide, third, tokens, 0)
    assert (wide.keys[0, 0, 0, 0], wide.values[0, 0, 0, 0]) == (1 / 3, 1)
    assert wide.values.dtype == np.float64


# -- versions


def count_calls(failing: Failing) -> dict[str, int]:
    return {name: failing.calls.count(name) for name in ("Allocate", "Fork", "Write", "Read")}


def test_growing_writes_once_each(client: Client, failing: Failing, library: Library) -> None:
    """A cache that grows makes one call for each update, and reads nothing back."""
    cache = init_kv_layer_cache(1, 2, 4, 8, library.float32, client=client)
    for start in range(8):
        cache = update(cache, library, start, start + 1)
        assert slots(cache.keys)[start] == start + 1
    assert count_calls(failing) == {"Allocate": 1, "Fork": 0, "Write": 8, "Read": 0}


def test_forks_only_when_it_must(client: Client, failing: Failing, library: Library) -> None:
    """Only an older version, or positions below the length, make a fork; going on does not."""
    empty = init_kv_layer_cache(1, 2, 4, 8, library.float32, client=client)
    grown = update(update(empty, library, 0, 1, 2, 3), library, 3, 4, 5, 6)
    older = update(empty, library, 0, 1, 2)
    assert count_calls(failing)["Fork"] == 0  # nothing to share with an empty one
    below = update(grown, library, 2, 9)
    assert count_calls(failing)["Fork"] == 1
    on = update(below, library, 3, 8)
    on = update(on, library, 4, 7)
    assert count_calls(failing)["Fork"] == 1
    branch = update(older, library, 2, 3)
    assert count_calls(failing)["Fork"] == 1
    other = update(older, library, 2, 4)
    assert count_calls(failing)["Fork"] == 2
    assert_shows(grown, [1, 2, 3, 4, 5, 6, 0, 0], 6)
    assert_shows(below, [1, 2, 9, 4, 5, 6, 0, 0], 3)
    assert_shows(on, [1, 2, 9, 8, 7, 6, 0, 0], 5)
    assert_shows(older, [1, 2, 0, 0, 0, 0, 0, 0], 2)
    assert_shows(branch, [1, 2, 3, 0, 0, 0, 0, 0], 3)
    assert_shows(other, [1, 2, 4, 0, 0, 0, 0, 0], 3)
    assert_shows(empty, [0] * 8, 0)


def test_versions_share_pages(client: Client, backend: Backend, library: Library) -> None:
    """Versions of a growing cache take no more pages than the newest; a branch only its own."""
    cache = init_kv_layer_cache(1, 2, 4, 256, library.float32, client=client)
    versions = [cache]
    for start in range(0, 64, 16):
        versions.append(update(versions[-1], library, start, *range(16)))
    assert backend.used_pages() == 4
    branch = update(versions[-1], library, 63, 9)
    assert backend.used_pages() == 5
    del versions, cache
    gc.collect()
    eventually(lambda: backend.num_sessions() == 1)
    assert backend.used_pages() == 4
    assert slots(branch.keys)[60:64] == [12, 13, 14, 9]


def test_freed_when_no_longer_referenced(
    client: Client, backend: Backend, library: Library
) -> None:
    """A session lives as long as some version that shows any of it."""
    empty = init_kv_layer_cache(1, 2, 4, 8, library.float32, client=client)
    grown = update(empty, library, 0, 1, 2, 3, 4)
    below = update(grown, library, 1, 9)
    assert backend.num_sessions() == 2
    gone = weakref.ref(grown)
    del grown, empty
    assert gone() is None
    assert_shows(below, [1, 9, 3, 4, 0, 0, 0, 0], 2)  # its last two are in the first session
    whole = update(below, library, 2, 8, 7)
    del below
    gc.collect()
    eventually(lambda: backend.num_sessions() == 1)
    assert_shows(whole, [1, 9, 8, 7, 0, 0, 0, 0], 4)


def test_layers_share_a_pool(client: Client, backend: Backend, library: Library) -> None:
    """Layers of one shape take their pages from one pool."""
    for cache in init_decoder_kv_caches(
        num_layers=4, batch_size=1, num_kv_heads=2, head_dim=4, max_len=8,
        dtype=library.float32, client=client,
    ):  # fmt: skip
        update(cache, library, 0, 1)
    assert len(backend.workers[0].stats().pools) == 1


@pytest.mark.parametrize("method", ["Allocate", "Write", "Fork"])
@pytest.mark.parametrize("carried_out", [True, False])
@pytest.mark.parametrize("error", [DeadlineExceeded, QuotaExceeded])
def test_failing_update(
    client: Client,
    backend: Backend,
    failing: Failing,
    library: Library,
    method: str,
    carried_out: bool,
    error: type[KVServiceError],
) -> None:
    """An update that fails makes nothing, and leaves every version as it was."""
    if carried_out and error is QuotaExceeded:
        error = DeadlineExceeded  # nobody is refused what was carried out
    empty = init_kv_layer_cache(1, 2, 4, 8, library.float32, client=client)
    grown = update(empty, library, 0, 1, 2, 3)
    target, start = {"Allocate": (empty, 0), "Write": (grown, 3), "Fork": (grown, 1)}[method]
    shown = slots(target.keys)
    failing.fail(method, error, carried_out=carried_out)
    with pytest.raises(error):
        update(target, library, start, 6, 6, 6)
    assert_shows(grown, [1, 2, 3, 0, 0, 0, 0, 0], 3)
    assert_shows(empty, [0] * 8, 0)
    again = update(target, library, start + 1, 5)  # a gap where the lost tokens stand
    shown[start + 1] = 5
    assert_shows(again, shown, start + 2)
    assert_shows(grown, [1, 2, 3, 0, 0, 0, 0, 0], 3)
    eventually(lambda: backend.num_sessions() <= 2 + (method == "Write"))


def test_update_that_arrives_late(client: Client, failing: Failing, library: Library) -> None:
    """What was given up on, and arrives behind what was done instead, shows nowhere."""
    empty = init_kv_layer_cache(1, 2, 4, 8, library.float32, client=client)
    grown = update(empty, library, 0, 1, 2)
    failing.delay("Write")
    with pytest.raises(DeadlineExceeded):
        update(grown, library, 2, 6, 6, 6)
    again = update(update(grown, library, 2, 3), library, 5, 4)
    failing.arrive()
    assert_shows(again, [1, 2, 3, 0, 0, 4, 0, 0], 6)
    assert_shows(grown, [1, 2, 0, 0, 0, 0, 0, 0], 2)


@pytest.mark.parametrize("start", [2, 4, 5], ids=["fork", "append", "gap"])
def test_the_newest_outlives_its_pages(library: Library, start: int) -> None:
    """What a dead worker has held is stored anew from arrays at hand; older versions are lost."""
    with embedded_backend(num_workers=2) as backend:
        client = backend.connect()
        empty = init_kv_layer_cache(1, 2, 4, 8, library.float32, client=client)
        older = update(empty, library, 0, 1, 2, 3)
        newest = update(older, library, 3, 4)
        (session,) = client.list_sessions()
        holder = backend.index_of(session.extents[0].worker_id)
        backend.kill(holder)
        backend.restart(holder)
        expected = [1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]
        with pytest.raises(PagesLost):
            update(older, library, 3, 9)
        grown = update(newest, library, start, 9)
        assert_shows(newest, expected, 4)
        expected[start] = 9.0
        assert_shows(grown, expected, start + 1)
        with pytest.raises(PagesLost):
            older.keys  # noqa: B018
        assert_shows(empty, [0.0] * 8, 0)
        # A second loss, before which the arrays were dropped: an error, and nothing else.
        for index in range(2):
            backend.kill(index)
            backend.restart(index)
        with pytest.raises(PagesLost):
            grown.keys  # noqa: B018
        assert_shows(update(empty, library, 0, 5), [5.0] + [0.0] * 7, 1)


def test_failing_read(client: Client, failing: Failing, library: Library) -> None:
    """Arrays that cannot be read are an error, never something else, and can be asked for again."""
    first = update(init_kv_layer_cache(1, 2, 4, 8, library.float32, client=client), library, 0, 1)
    update(first, library, 1, 2)
    failing.fail("Read", DeadlineExceeded, carried_out=False)
    with pytest.raises(DeadlineExceeded):
        first.keys  # noqa: B018
    assert_shows(first, [1, 0, 0, 0, 0, 0, 0, 0], 1)


# -- example cases (those of decoders are with the decoders)


def test_case_2(empty: KVLayerCache, library: Library) -> None:
    """Case 2: 4 tokens at 0; the original stays empty."""
    cache = update(empty, library, 0, 1, 2, 3, 4)
    assert_shows(cache, [1, 2, 3, 4, 0, 0, 0, 0], 4)
    assert_shows(empty, [0] * 8, 0)


def test_case_4(empty: KVLayerCache, library: Library) -> None:
    """Case 4: 8 at 0 fit; one more at 8 does not."""
    cache = update(empty, library, 0, *range(8))
    assert int(cache.length) == 8
    refuses(cache, ValueError, lambda: update(cache, library, 8, 1), "end=9 exceeds max_len=8")


def test_case_6(empty: KVLayerCache, library: Library) -> None:
    """Case 6: a token at 2 of 6 makes the length 3, and the rest stays."""
    cache = update(empty, library, 0, 1, 2, 3, 4, 5, 6)
    assert_shows(update(cache, library, 2, 9), [1, 2, 9, 4, 5, 6, 0, 0], 3)


def test_case_8(empty: KVLayerCache, library: Library) -> None:
    """Case 8: no token at 3 makes the length 3."""
    cache = update(empty, library, 0, 1)
    assert_shows(update(cache, library, 3), [1, 0, 0, 0, 0, 0, 0, 0], 3)


def test_case_10(client: Client, library: Library) -> None:
    """Case 10: 2 rows, or one, into 3 are refused."""
    cache = init_kv_layer_cache(3, 2, 4, 8, library.float32, client=client)
    for rows in (1, 2):
        tokens = library.tokens(1, rows=rows)
        refuses(
            cache,
            GeometryMismatch,
            lambda tokens=tokens: update_kv_layer_cache(cache, tokens, tokens, 0),
        )


def test_case_12(client: Client, library: Library) -> None:
    """Case 12: three layers are independent; no layers are ()."""
    options: dict[str, Any] = {
        "batch_size": 1, "num_kv_heads": 2, "head_dim": 4, "max_len": 8,
        "dtype": library.float32, "client": client,
    }  # fmt: skip
    caches = init_decoder_kv_caches(num_layers=3, **options)
    first = update(caches[0], library, 0, 1)
    assert [int(cache.length) for cache in (first, *caches[1:])] == [1, 0, 0]
    assert init_decoder_kv_caches(num_layers=0, **options) == ()


def test_case_14(client: Client) -> None:
    """Case 14: shapes from a config with 2 KV heads."""
    config = Config(10, d_model=64, num_heads=8, num_kv_heads=2, num_layers=2, max_len=512)
    caches = init_decoder_kv_caches_from_config(config, batch_size=4, client=client)
    assert shapes(caches) == [(4, 2, 512, 8)] * 2


def test_case_16(client: Client, library: Library) -> None:
    """Case 16: without KV heads all 8; float32 by default, bfloat16 as asked."""
    config = Config(10, d_model=64, num_heads=8, num_kv_heads=None, num_layers=1)
    (cache,) = init_decoder_kv_caches_from_config(config, batch_size=1, client=client)
    assert (cache.keys.shape[1], str(cache.keys.dtype)) == (8, "float32")
    (cache,) = init_decoder_kv_caches_from_config(
        config, batch_size=1, dtype=library.bfloat16, client=client
    )
    assert str(cache.keys.dtype).endswith("bfloat16")
