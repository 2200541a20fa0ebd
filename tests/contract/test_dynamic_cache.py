"""DynamicCache: each row of its behaviour table, and each example case, by name and number."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from typing import Any

import pytest
import torch

import kvservice_client
from kvservice.core.errors import (
    GeometryMismatch,
    InvalidRequest,
    KVServiceError,
    SessionNotFound,
    StaleEpoch,
)
from kvservice_client import Client, DynamicCache
from kvservice_client.tensor_caches import Cache
from tests.backends import embedded_backend
from tests.caching import assert_same, contents, fails_without_change, lengths
from tests.tokens import filled, random_states


def assert_survives(cache: DynamicCache, client: Client) -> DynamicCache:
    """Check that the service holds what the cache does. Returns another cache that goes on."""
    expected = contents(cache)
    twin = DynamicCache.attach(cache.detach(), client=client)
    assert_same(twin, expected)
    return twin


@pytest.fixture
def cache(cache_client: Client) -> DynamicCache:
    return DynamicCache(client=cache_client)


# -- rows of the table


def test_constructor(cache_client: Client) -> None:
    """Row `DynamicCache()`: no arguments are needed where a default client is set."""
    with pytest.raises(RuntimeError, match="no client"):
        DynamicCache()
    kvservice_client.use(cache_client)
    try:
        assert len(DynamicCache()) == 0
    finally:
        kvservice_client.use(None)


def test_key_cache_and_value_cache(cache: DynamicCache) -> None:
    """Row `key_cache, value_cache`: lists of tensors, empty at first; `_seen_tokens` is an int."""
    assert cache.key_cache == []
    assert cache.value_cache == []
    assert cache._seen_tokens == 0
    k, v = random_states(2)
    cache.update(k, v, 0)
    assert isinstance(cache.key_cache, list)
    assert cache.key_cache[0].shape == (1, 2, 2, 4)
    assert torch.equal(cache.value_cache[0], v)
    assert type(cache._seen_tokens) is int


def test_seen_tokens(cache: DynamicCache) -> None:
    """Row `seen_tokens`: tokens of layer 0's updates, adjusted by crop and reset."""
    for layer, tokens in ((0, 3), (1, 3), (0, 2), (1, 1)):
        cache.update(*random_states(tokens), layer)
    assert cache.seen_tokens == 5
    cache.crop(4)
    assert cache.seen_tokens == 4
    cache.reset()
    assert cache.seen_tokens == 0


def test_update(cache: DynamicCache, cache_client: Client) -> None:
    """Row `update(k, v, layer_idx, cache_kwargs=None)`: appends; returns all there is."""
    parts = [random_states(tokens) for tokens in (3, 1, 4)]
    for k, v in parts:
        all_k, all_v = cache.update(k, v, 0, {"cache_position": torch.tensor([7]), "read_len": 1})
    assert torch.equal(all_k, torch.cat([k for k, _ in parts], 2))
    assert torch.equal(all_v, torch.cat([v for _, v in parts], 2))
    assert_survives(cache, cache_client)


def test_seed_aliasing(cache: DynamicCache) -> None:
    """Row `seed aliasing`: the first tensors are kept as they are; later returns are new ones."""
    k, v = random_states(2)
    first = cache.update(k, v, 0)
    assert first[0] is k
    assert first[1] is v
    before = k.clone()
    second = cache.update(*random_states(1), 0)
    assert torch.equal(first[0], before)
    third = cache.update(*random_states(1), 0)
    assert second[0].shape[2] == 3
    assert third[0].shape[2] == 4


def test_layer_gap(cache: DynamicCache) -> None:
    """Row `layer gap`: a layer that is left out is an error, before anything changes."""
    fails_without_change(cache, InvalidRequest, lambda: cache.update(*random_states(1), 1))
    cache.update(*random_states(2), 0)
    fails_without_change(cache, InvalidRequest, lambda: cache.update(*random_states(1), 2))
    cache.update(*random_states(2), 1)


def test_negative_layer_idx(cache: DynamicCache, cache_client: Client) -> None:
    """Row `negative layer_idx`: from the end, seen unchanged; without layers an IndexError."""
    fails_without_change(cache, IndexError, lambda: cache.update(*random_states(1), -1))
    cache.update(*random_states(2), 0)
    cache.update(*random_states(2), 1)
    cache.update(*random_states(3), -1)
    assert lengths(cache) == [2, 5]
    cache.update(*random_states(1), -2)
    assert lengths(cache) == [3, 5]
    assert cache.seen_tokens == 2
    fails_without_change(cache, IndexError, lambda: cache.update(*random_states(1), -3))
    assert_survives(cache, cache_client)


BAD_STATES = {
    "rows": lambda: random_states(1, rows=2),
    "heads": lambda: random_states(1, heads=3),
    "k dim": lambda: random_states(1, dim=8, v_dim=4),
    "v dim": lambda: random_states(1, v_dim=8),
    "rank": lambda: tuple(one[0] for one in random_states(1)),
    "dtype": lambda: tuple(one.double() for one in random_states(1)),
    "v dtype": lambda: (random_states(1)[0], random_states(1)[1].half()),
    "not a tensor": lambda: tuple(one.numpy() for one in random_states(1)),
    "device": lambda: tuple(one.to("meta") for one in random_states(1)),
    "sparse": lambda: tuple(one.to_sparse() for one in random_states(1)),
}


@pytest.mark.parametrize("what", BAD_STATES)
def test_mismatch_on_concat(cache: DynamicCache, cache_client: Client, what: str) -> None:
    """Row `shape/dtype mismatch on concat`: an error; keys and values stay of one length."""
    cache.update(*random_states(3), 0)
    fails_without_change(cache, InvalidRequest, lambda: cache.update(*BAD_STATES[what](), 0))
    assert_survives(cache, cache_client)


@pytest.mark.parametrize("what", ["rank", "v dtype", "not a tensor", "device", "sparse"])
def test_bad_first_tokens(cache: DynamicCache, what: str) -> None:
    """Row `update(...)`: what cannot be stored opens no layer, and no session."""
    fails_without_change(cache, InvalidRequest, lambda: cache.update(*BAD_STATES[what](), 0))
    cache.update(*random_states(1), 0)


def test_k_and_v_dims(cache: DynamicCache, cache_client: Client) -> None:
    """Row `K and V lengths/dims`: dims may differ, also from layer to layer.

    Numbers of tokens may not: the service has one length for both, so that is refused.
    """
    cache.update(*random_states(3, dim=4, v_dim=6), 0)
    cache.update(*random_states(3, heads=1, dim=2, v_dim=1), 1)
    k, v = cache.update(*random_states(1, dim=4, v_dim=6), 0)
    assert (k.shape, v.shape) == ((1, 2, 4, 4), (1, 2, 4, 6))
    k, v = random_states(2, dim=4, v_dim=6)
    fails_without_change(cache, GeometryMismatch, lambda: cache.update(k, v[:, :, :1], 0))
    assert_survives(cache, cache_client)


def test_get_seq_length(cache: DynamicCache) -> None:
    """Row `get_seq_length`: of a layer; 0 if there is none; negative from the end."""
    assert cache.get_seq_length() == 0
    assert cache.get_seq_length(5) == 0
    with pytest.raises(IndexError):
        cache.get_seq_length(-1)
    cache.update(*random_states(2), 0)
    cache.update(*random_states(3), 1)
    assert (cache.get_seq_length(), cache.get_seq_length(1), cache.get_seq_length(2)) == (2, 3, 0)
    assert cache.get_seq_length(-1) == 3


def test_get_max_cache_shape(cache: DynamicCache) -> None:
    """Row `get_max_cache_shape()`: None."""
    assert cache.get_max_cache_shape() is None


def test_get_usable_length(cache: DynamicCache) -> None:
    """Row `get_usable_length`: the current length, whatever comes."""
    cache.update(*random_states(3), 0)
    assert [cache.get_usable_length(new) for new in (0, 5, 10**6)] == [3, 3, 3]
    assert cache.get_usable_length(5, 1) == 0


def test_len_getitem_iter(cache: DynamicCache) -> None:
    """Row `len / [] / iter`: current tensors; KeyError outside the layers, -1 included."""
    cache.update(*random_states(3), 0)
    cache.update(*random_states(2), 1)
    assert len(cache) == 2
    assert [k.shape[2] for k, _ in cache] == [3, 2]
    assert cache[1][0] is cache.key_cache[1]
    for layer in (-1, 2):
        with pytest.raises(KeyError, match=f"Cache has 2 layers; no entry for layer {layer}."):
            cache[layer]
    for _ in cache:  # of the layers there were
        cache.update(*random_states(1), len(cache))
    assert len(cache) == 4


@pytest.mark.parametrize(
    ("n", "kept"), [(3, 3), (5, 5), (9, 5), (-2, 3), (-1, 4), (1, 1), (0, 0), (-5, 0), (-8, 0)]
)
def test_crop(cache: DynamicCache, cache_client: Client, n: int, kept: int) -> None:
    """Rows `crop(n)`, `crop(0)`, `crop(-L)`, `crop(-m), m > L`: negative drops, never below 0."""
    parts = [random_states(5), random_states(5, v_dim=3)]
    for layer, (k, v) in enumerate(parts):
        cache.update(k, v, layer)
    cache.crop(n)
    assert_same(cache, [(k[:, :, :kept], v[:, :, :kept]) for k, v in parts])
    assert cache.seen_tokens == kept
    assert lengths(cache) == [kept, kept]
    k, v = cache.update(*random_states(1), 0)
    assert k.shape[2] == kept + 1
    cache.update(*random_states(1, v_dim=3), 1)
    assert_survives(cache, cache_client)


def test_crop_to_nothing_keeps_layers(cache: DynamicCache) -> None:
    """Row `crop(0)`: tensors without positions stay, and what follows must fit them."""
    cache.update(*random_states(3), 0)
    cache.crop(0)
    assert cache[0][0].shape == (1, 2, 0, 4)
    fails_without_change(cache, GeometryMismatch, lambda: cache.update(*random_states(1, dim=8), 0))


def test_crop_on_empty_cache(cache: DynamicCache) -> None:
    """Row `crop on empty cache`: nothing happens, and seen stays 0."""
    for n in (0, 3, -3):
        cache.crop(n)
        assert (len(cache), cache.seen_tokens, cache.session_id) == (0, 0, None)


def test_crop_with_uneven_layers(cache: DynamicCache, cache_client: Client) -> None:
    """Row `crop with uneven layers`: layer 0 decides, and all are cut to the same length."""
    cache.update(*random_states(3), 0)
    cache.update(*random_states(6), 1)
    cache.update(*random_states(1), 2)
    cache.crop(3)
    assert lengths(cache) == [3, 6, 1]
    cache.crop(-1)
    assert lengths(cache) == [2, 2, 1]
    assert_survives(cache, cache_client)


def test_crop_rank(cache: DynamicCache) -> None:
    """Row `crop rank`: tensors of another rank are refused when they come."""
    states = torch.ones(2, 3, 4)
    fails_without_change(cache, InvalidRequest, lambda: cache.update(states, states, 0))


def test_reset(cache: DynamicCache, cache_client: Client) -> None:
    """Row `reset()`: lists are emptied; the next seed may have another batch, dtype and shape."""
    cache.update(*random_states(3), 0)
    cache.update(*random_states(3), 1)
    cache.reset()
    assert (len(cache), cache.seen_tokens, cache.key_cache) == (0, 0, [])
    same = random_states(2)
    cache.update(*same, 0)
    assert_same(cache, [same])
    cache.reset()
    other = tuple(one.double() for one in random_states(2, rows=3, heads=1, dim=8))
    cache.update(other[0], other[1], 0)
    assert_same(cache, [other])
    assert_survives(cache, cache_client)


def test_reset_then_another_shape_in_a_later_layer(
    cache: DynamicCache, cache_client: Client
) -> None:
    """Row `reset()`: also where only a later layer is another one."""
    for layer in range(2):
        cache.update(*random_states(3), layer)
    cache.reset()
    expected = [random_states(2), random_states(2, heads=1, dim=8)]
    for layer, states in enumerate(expected):
        cache.update(*states, layer)
    assert_same(cache, expected)
    assert_survives(cache, cache_client)


SELECTIONS = [[1, 0], [1], [0, 0, 1], [-1, -2], [0, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize("method", ["reorder_cache", "batch_select_indices"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", SELECTIONS, ids=str)
def test_reorder_cache_and_batch_select_indices(
    cache: DynamicCache, cache_client: Client, method: str, dtype: torch.dtype, rows: list[int]
) -> None:
    """Rows `reorder_cache, batch_select_indices`, `seen after batch ops`."""
    parts = [random_states(3, rows=2), random_states(2, rows=2)]
    for layer, states in enumerate(parts):
        cache.update(*states, layer)
    getattr(cache, method)(torch.tensor(rows, dtype=dtype))
    assert_same(cache, [(k[rows], v[rows]) for k, v in parts])
    assert (cache.seen_tokens, lengths(cache)) == (3, [3, 2])
    more = random_states(1, rows=len(rows))
    cache.update(*more, 0)
    assert torch.equal(cache[0][0][:, :, 3:], more[0])
    assert_survives(cache, cache_client)


BAD_ROWS = {
    "list": [0, 1],
    "numpy": torch.tensor([0, 1]).numpy(),
    "bool": torch.tensor([True, False]),
    "float": torch.tensor([0.0, 1.0]),
    "two dimensions": torch.tensor([[0, 1]]),
    "scalar": torch.tensor(1),
    "beyond": torch.tensor([0, 5]),
    "below": torch.tensor([0, -3]),
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_bad_row_indices(cache: DynamicCache, what: str) -> None:
    """Row `reorder_cache, batch_select_indices`: only tensors, in range, before any change."""
    for layer in range(2):
        cache.update(*random_states(3, rows=2), layer)
    rows = BAD_ROWS[what]
    fails_without_change(cache, InvalidRequest, lambda: cache.reorder_cache(rows))
    fails_without_change(cache, InvalidRequest, lambda: cache.batch_select_indices(rows))


@pytest.mark.parametrize("r", [1, 2, 3])
def test_batch_repeat_interleave(cache: DynamicCache, cache_client: Client, r: int) -> None:
    """Row `batch_repeat_interleave(r)`: copies of a row next to each other."""
    parts = [random_states(3, rows=2), random_states(3, rows=2)]
    for layer, states in enumerate(parts):
        cache.update(*states, layer)
    cache.batch_repeat_interleave(r)
    assert_same(cache, [(k.repeat_interleave(r, 0), v.repeat_interleave(r, 0)) for k, v in parts])
    assert cache.seen_tokens == 3
    assert_survives(cache, cache_client)


def test_batch_without_rows(cache: DynamicCache) -> None:
    """Row `batch_repeat_interleave(r)`: 0 makes an empty batch, which can be gone on with."""
    cache.update(*random_states(3, rows=2), 0)
    cache.batch_repeat_interleave(0)
    assert cache[0][0].shape == (0, 2, 3, 4)
    assert cache.update(*random_states(1, rows=0), 0)[0].shape == (0, 2, 4, 4)
    assert cache.get_seq_length() == 4
    fails_without_change(cache, InvalidRequest, lambda: cache.batch_repeat_interleave(-1))
    fails_without_change(cache, InvalidRequest, lambda: cache.batch_repeat_interleave(1.5))
    cache.reset()
    cache.update(*random_states(1, rows=2), 0)


def test_batch_ops_on_empty_cache(cache: DynamicCache) -> None:
    """Row `reorder_cache, batch_select_indices`: without layers nothing happens."""
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_select_indices(torch.tensor([3]))
    cache.batch_repeat_interleave(2)
    assert len(cache) == 0


def test_to_legacy_cache(cache: DynamicCache) -> None:
    """Row `to_legacy_cache()`: a tuple of pairs, the tensors themselves; `()` if empty."""
    assert cache.to_legacy_cache() == ()
    cache.update(*random_states(2), 0)
    cache.update(*random_states(2), 1)
    legacy = cache.to_legacy_cache()
    assert isinstance(legacy, tuple)
    assert legacy[1][0] is cache.key_cache[1]
    assert legacy[0][1] is cache.value_cache[0]


def test_from_legacy_cache(cache_client: Client) -> None:
    """Row `from_legacy_cache(past=None)`: empty for None and `()`, else replayed layer by layer."""
    for past in (None, ()):
        assert len(DynamicCache.from_legacy_cache(past, client=cache_client)) == 0
    past = (random_states(3), random_states(2))
    cache = DynamicCache.from_legacy_cache(past, client=cache_client)
    assert_same(cache, past)
    assert cache.seen_tokens == 3
    assert_survives(cache, cache_client)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_dtype(cache: DynamicCache, cache_client: Client, dtype: torch.dtype) -> None:
    """Row `dtype`: as it comes, to the bit, and what follows must have it too."""
    parts = [tuple(one.to(dtype) for one in random_states(n, v_dim=3)) for n in (3, 2)]
    for k, v in parts:
        cache.update(k, v, 0)
    assert cache[0][0].dtype == dtype
    k, v = random_states(1, v_dim=3)
    other = torch.float16 if dtype == torch.float32 else torch.float32
    fails_without_change(cache, GeometryMismatch, lambda: cache.update(k.to(other), v.to(other), 0))
    assert_survives(cache, cache_client)


def test_gqa(cache: DynamicCache) -> None:
    """Row `GQA`: KV heads are stored as given."""
    k, v = random_states(1, rows=2, heads=2, dim=8)
    assert cache.update(k, v, 0)[0].shape == (2, 2, 1, 8)


def test_surface_count(cache: DynamicCache) -> None:
    """Row `Surface count`: those members, and what a remote session adds."""
    methods = {
        "update", "get_seq_length", "get_max_cache_shape", "get_usable_length", "reorder_cache",
        "batch_select_indices", "batch_repeat_interleave", "crop", "reset", "to_legacy_cache",
        "from_legacy_cache",
    }  # fmt: skip
    public = {name for name, _ in inspect.getmembers(DynamicCache) if not name.startswith("_")}
    assert public == methods | {"seen_tokens", "attach", "detach", "session_id"}
    assert inspect.ismethod(DynamicCache.from_legacy_cache)
    assert isinstance(inspect.getattr_static(DynamicCache, "seen_tokens"), property)
    with pytest.raises(AttributeError):
        cache.seen_tokens = 3  # type: ignore[misc]


def test_base_class_contract() -> None:
    """The base class: four abstract methods, and `get_usable_length` on top of them."""
    assert Cache.__abstractmethods__ == {
        "update", "get_seq_length", "get_max_cache_shape", "reorder_cache",
    }  # fmt: skip

    class Bounded(Cache):
        def update(self, *_: Any) -> Any: ...

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 6

        def get_max_cache_shape(self) -> int:
            return 8

        def reorder_cache(self, beam_idx: torch.Tensor) -> None: ...

    assert [Bounded().get_usable_length(new) for new in (0, 2, 3, 8, 10)] == [6, 6, 5, 0, -2]
    assert issubclass(DynamicCache, Cache)


# -- example cases


def test_case_2(cache: DynamicCache) -> None:
    """Case 2: 3 tokens, then 1: the first three stay, the fourth is the new one."""
    k, v = random_states(3)
    assert cache.update(k, v, 0)[0].shape == (1, 2, 3, 4)
    assert (cache.get_seq_length(), cache.seen_tokens) == (3, 3)
    new_k, new_v = random_states(1)
    all_k, all_v = cache.update(new_k, new_v, 0)
    assert all_k.shape == (1, 2, 4, 4)
    assert (cache.get_seq_length(), cache.seen_tokens) == (4, 4)
    assert torch.equal(all_k[:, :, :3], k)
    assert torch.equal(all_v[:, :, 3:], new_v)


def test_case_4(cache: DynamicCache) -> None:
    """Case 4: layers have lengths of their own."""
    for layer, tokens in ((0, 2), (1, 2), (0, 1)):
        cache.update(*random_states(tokens), layer)
    assert (lengths(cache), len(cache), cache.seen_tokens) == ([3, 2], 2, 3)


def test_case_6(cache: DynamicCache) -> None:
    """Case 6: cache_kwargs have no effect."""
    cache.update(*random_states(3), 0)
    k, _ = cache.update(*random_states(1), 0, {"cache_position": [9], "read_len": 1})
    assert k.shape[2] == 4
    assert cache.get_seq_length() == 4


def test_case_8(cache: DynamicCache) -> None:
    """Case 8: crop(3) of two layers; crop(10) and crop(3) change nothing more."""
    cache.update(*random_states(5), 0)
    cache.update(*random_states(5), 1)
    cache.crop(3)
    expected = contents(cache)
    for n in (10, 3):
        cache.crop(n)
        assert_same(cache, expected)
    assert (lengths(cache), cache.seen_tokens, cache[1][0].shape) == ([3, 3], 3, (1, 2, 3, 4))


def test_case_10(cache: DynamicCache) -> None:
    """Case 10: crop(0) keeps the layer; an append follows."""
    cache.update(*random_states(5), 0)
    cache.crop(0)
    assert (cache.get_seq_length(), cache.seen_tokens, len(cache)) == (0, 0, 1)
    cache.update(*random_states(1), 0)
    assert (cache.get_seq_length(), cache.seen_tokens) == (1, 1)


def test_case_12(cache: DynamicCache) -> None:
    """Case 12: crop(-3) of an empty cache leaves 0."""
    cache.crop(-3)
    assert (cache.get_seq_length(), cache.seen_tokens) == (0, 0)


def test_case_14(cache: DynamicCache) -> None:
    """Case 14: after a reset another batch size."""
    cache.update(*random_states(4), 0)
    cache.reset()
    assert (len(cache), cache.get_seq_length(), cache.seen_tokens) == (0, 0, 0)
    k, _ = cache.update(*random_states(2, rows=3), 0)
    assert (cache.get_seq_length(), k.shape) == (2, (3, 2, 2, 4))


def test_case_16(cache: DynamicCache) -> None:
    """Case 16: reorder, select one row, select with repeats."""
    k, v = filled([0, 1, 2]), filled([10, 11, 12])
    rows = torch.cat([k, v])
    cache.update(rows, rows, 0)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache[0][0], torch.cat([v, k]))
    cache.batch_select_indices(torch.tensor([1]))
    assert torch.equal(cache[0][0], k)
    cache.reset()
    cache.update(rows, rows, 0)
    cache.batch_select_indices(torch.tensor([0, 0, 1]))
    assert torch.equal(cache[0][0], torch.cat([k, k, v]))
    assert (cache.seen_tokens, cache.get_seq_length()) == (3, 3)


def test_case_18(cache: DynamicCache, cache_client: Client) -> None:
    """Case 18: to the legacy form and back."""
    cache.update(*random_states(3), 0)
    cache.update(*random_states(3), 1)
    legacy = cache.to_legacy_cache()
    assert [len(pair) for pair in legacy] == [2, 2]
    rebuilt = DynamicCache.from_legacy_cache(legacy, client=cache_client)
    assert_same(rebuilt, legacy)
    assert (lengths(rebuilt), rebuilt.seen_tokens) == ([3, 3], 3)
    assert len(DynamicCache.from_legacy_cache(None, client=cache_client)) == 0
    assert DynamicCache(client=cache_client).to_legacy_cache() == ()


@pytest.mark.parametrize("what", ["rows", "k dim", "dtype"])
def test_case_20(cache: DynamicCache, what: str) -> None:
    """Case 20: another batch, dim or dtype is an error, and lengths stay."""
    cache.update(*random_states(3), 0)
    fails_without_change(cache, KVServiceError, lambda: cache.update(*BAD_STATES[what](), 0))
    assert lengths(cache) == [3]


def test_case_22(cache: DynamicCache, cache_client: Client) -> None:
    """Case 22: drafts are appended, rejected, and the next token stands in their place."""
    cache.update(*random_states(4), 0)
    cache.update(*random_states(3), 0)
    assert cache.get_seq_length() == 7
    cache.crop(-2)
    assert cache.get_seq_length() == 5
    k, v = random_states(1)
    all_k, _ = cache.update(k, v, 0)
    assert cache.get_seq_length() == 6
    assert torch.equal(all_k[:, :, 5:], k)
    assert_survives(cache, cache_client)


# -- the session


def test_attach_goes_on(cache: DynamicCache, cache_client: Client) -> None:
    """A cache whose decoder has died goes on in another one, with uneven layers too."""
    cache.update(*random_states(20, rows=2), 0)
    cache.update(*random_states(19, rows=2), 1)
    expected = contents(cache)
    assert cache.session_id is not None
    twin = DynamicCache.attach(cache.session_id, client=cache_client)
    assert_same(twin, expected)
    assert (twin.seen_tokens, lengths(twin)) == (20, [20, 19])
    with pytest.raises(StaleEpoch):
        cache.update(*random_states(1, rows=2), 0)
    assert_same(cache, expected)
    more = random_states(1, rows=2)
    twin.update(*more, 1)
    twin.reorder_cache(torch.tensor([1, 1, 0]))
    del cache  # its end does not end the session
    gc.collect()
    third = assert_survives(twin, cache_client)
    assert torch.equal(third[1][1][0, :, 19:], more[1][1])


def test_attach_to_layers_without_tokens(cache: DynamicCache, cache_client: Client) -> None:
    """A layer without tokens is shaped like one that has some; without any there are none."""
    cache.update(*random_states(0), 0)
    cache.update(*random_states(2), 1)
    twin = assert_survives(cache, cache_client)
    twin.crop(0)
    assert lengths(twin) == [0, 2]
    twin.update(*random_states(1), 0)
    twin.crop(0)
    assert lengths(twin) == [0, 0]
    assert len(DynamicCache.attach(twin.detach(), client=cache_client)) == 0


@pytest.mark.parametrize("by_hand", [False, True])
def test_attach_after_a_reset(cache: DynamicCache, cache_client: Client, by_hand: bool) -> None:
    """Row `reset()`: the next tokens may have another shape and dtype, whoever stores them."""
    for layer in range(3):
        cache.update(*random_states(3), layer)
    cache.reset()
    twin = copy.deepcopy(DynamicCache.attach(cache.detach(), client=cache_client))
    expected = [random_states(2, heads=1, dim=8), random_states(2, heads=3)]
    expected[0] = (expected[0][0].double(), expected[0][1].double())
    if by_hand:
        twin.key_cache[:], twin.value_cache[:] = map(list, zip(*expected, strict=True))
    else:
        for layer, states in enumerate(expected):
            twin.update(*states, layer)
    assert_same(assert_survives(twin, cache_client), expected)


def test_attach_in_the_first_step_after_a_reset(cache: DynamicCache, cache_client: Client) -> None:
    """Row `reset()`: layers that have no tokens yet are not there, and take what comes."""
    for layer in range(2):
        cache.update(*random_states(3), layer)
    cache.reset()
    expected = [random_states(2), random_states(2, heads=1, dim=8)]
    cache.update(*expected[0], 0)
    twin = DynamicCache.attach(cache.detach(), client=cache_client)
    assert len(twin) == 1
    twin.update(*expected[1], 1)
    assert_same(assert_survives(twin, cache_client), expected)


def test_attach_refuses_rows_of_different_length(cache_client: Client) -> None:
    """A session whose rows differ in length is not taken, and lives on."""
    session = cache_client.open(num_rows=2)
    k, v = random_states(3, rows=1)
    session.write(0, k, v, rows=[0])
    session_id = session.detach()
    with pytest.raises(InvalidRequest, match="differ in length"):
        DynamicCache.attach(session_id, client=cache_client)
    cache_client.attach(session_id).release()


def test_detach(cache: DynamicCache, cache_client: Client) -> None:
    """After a detach tensors can be read, but take nothing; a reset begins anew."""
    with pytest.raises(InvalidRequest, match="nothing was stored"):
        cache.detach()
    cache.update(*random_states(2), 0)
    session_id = cache.detach()
    assert cache.get_seq_length() == 2
    fails_without_change(cache, SessionNotFound, lambda: cache.update(*random_states(1), 0))
    cache.reset()
    cache.update(*random_states(1), 0)
    assert cache.session_id not in (None, session_id)
    cache_client.attach(session_id).release()


def test_deepcopy_shares_pages(cache: DynamicCache, cache_client: Client) -> None:
    """A deep copy is independent, and its pages are shared until one of the two writes."""
    cache.update(*random_states(32), 0)
    used = sum(pool.used_pages for worker in cache_client.page_stats() for pool in worker.pools)
    twin = copy.deepcopy(cache)
    assert used == sum(
        pool.used_pages for worker in cache_client.page_stats() for pool in worker.pools
    )
    expected = contents(cache)
    twin.update(*random_states(1), 0)
    assert_same(cache, expected)
    assert twin.session_id != cache.session_id
    assert_survives(cache, cache_client)
    assert_survives(twin, cache_client)


def test_pickling(cache: DynamicCache) -> None:
    """Pages are not pickled, and the error says what is done instead."""
    cache.update(*random_states(2), 0)
    with pytest.raises(TypeError, match="attach"):
        pickle.dumps(cache)


def test_repeated_rows_share_pages(cache: DynamicCache, cache_client: Client) -> None:
    """A prompt that is repeated after its prefill takes no more pages."""
    cache.update(*random_states(32), 0)
    cache.batch_repeat_interleave(8)
    stats = cache_client.page_stats()
    assert sum(pool.used_pages for worker in stats for pool in worker.pools) == 2


def test_tensors_put_in_by_hand(cache: DynamicCache, cache_client: Client) -> None:
    """Tensors that the decoder has put into the lists, or written to, are what survives."""
    for layer in range(2):
        cache.update(*random_states(6, rows=2), layer)
    for layer in range(2):
        cache.key_cache[layer] = cache.key_cache[layer][:, :, :4]
        cache.value_cache[layer] = cache.value_cache[layer][:, :, :4]
    cache.update(*random_states(1, rows=2), 0)
    twin = assert_survives(cache, cache_client)
    twin.key_cache[1][:, :, 2] = 7.0
    other = assert_survives(twin, cache_client)
    for layer, (k, v) in enumerate(contents(other)):
        other.key_cache[layer], other.value_cache[layer] = k[[1, 0, 1]], v[[1, 0, 1]]
    other.update(*random_states(1, rows=3), 0)
    assert_survives(other, cache_client)


def test_gradients_stay_local(cache: DynamicCache) -> None:
    """Keys that want a gradient are stored as they are, and the result still leads to them."""
    k, v = random_states(2)
    k.requires_grad_()
    cache.update(*random_states(1), 0)
    all_k, _ = cache.update(k, v, 0)
    all_k.sum().backward()
    assert k.grad is not None


def test_inference_mode(cache: DynamicCache, cache_client: Client) -> None:
    """Tensors of inference mode, which have no versions, go in and out of the cache."""
    with torch.inference_mode():
        cache.update(*random_states(2), 0)
        cache.update(*random_states(1), 0)
    cache.update(*random_states(1), 0)
    assert_survives(cache, cache_client)


def test_a_step_sends_only_new_tokens() -> None:
    """Bytes that reach the service do not grow with what is stored, and none come back."""
    with embedded_backend() as backend:
        client = backend.connect()
        cache = DynamicCache(client=client)
        cache.update(*random_states(100), 0)
        sent = []
        for _ in range(3):
            before = backend.workers[0].stats().appended_bytes
            cache.update(*random_states(1), 0)
            sent.append(backend.workers[0].stats().appended_bytes - before)
        assert sent == [64, 64, 64]
        assert backend.workers[0].stats().read_bytes == 0
