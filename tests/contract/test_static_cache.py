"""StaticCache: each row of its behaviour table, and each example case, by name and number."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvservice.core.errors import (
    GeometryMismatch,
    InvalidRequest,
    OutOfPages,
    PositionOutOfRange,
    SessionNotFound,
    StaleEpoch,
)
from kvservice_client import Client, StaticCache
from tests.backends import Backend
from tests.caching import assert_same, contents, fails_without_change, lengths
from tests.tokens import filled, random_states

Make = Callable[..., StaticCache]


def assert_survives(cache: StaticCache, client: Client) -> StaticCache:
    """Check that the service holds what the cache does. Returns another cache that goes on."""
    expected, counters, seen = contents(cache), lengths(cache), cache.seen_tokens
    twin = StaticCache.attach(cache.detach(), cache.max_cache_len, lengths=counters, client=client)
    assert_same(twin, expected)
    assert (lengths(twin), twin.seen_tokens) == (counters, counters[0] if counters else 0)
    assert seen <= sum(counters)
    return twin


def at(*positions: int, dtype: torch.dtype = torch.int64) -> dict[str, Any]:
    return {"cache_position": torch.tensor(positions, dtype=dtype)}


def write(
    cache: StaticCache, values: Any, layer: int = 0, options: dict[str, Any] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Update with tokens that are filled with these values, keys and values alike."""
    states = filled(values)
    return cache.update(states, states, layer, options)


def slots(states: torch.Tensor) -> list[float]:
    """Return the first element of every position."""
    return states[0, 0, :, 0].tolist()


@pytest.fixture
def make(cache_client: Client) -> Make:
    return lambda capacity=8: StaticCache(capacity, client=cache_client)


@pytest.fixture
def cache(make: Make) -> StaticCache:
    """A cache of 8 tokens."""
    return make()


# -- rows of the table


def test_constructor(make: Make, cache_client: Client) -> None:
    """Row `StaticCache(max_cache_len)`: made an int, not checked; nothing is allocated."""
    for given, capacity in ((8, 8), (8.9, 8), ("8", 8), (0, 0), (-3, -3)):
        cache = make(given)
        assert cache.max_cache_len == capacity
        assert len(cache) == 0
    assert StaticCache(max_cache_len=4, client=cache_client).max_cache_len == 4
    assert cache_client.list_sessions() == []
    with pytest.raises(TypeError):
        StaticCache()  # type: ignore[call-arg]
    for capacity in (0, -3):
        cache = make(capacity)
        fails_without_change(cache, PositionOutOfRange, lambda cache=cache: write(cache, [1]))
    empty = make(0)
    nothing = torch.ones(1, 2, 0, 4)
    assert empty.update(nothing, nothing, 0)[0].shape == (1, 2, 0, 4)


def test_max_cache_len(cache: StaticCache) -> None:
    """Row `.max_cache_len`: the capacity, an int."""
    assert cache.max_cache_len == 8
    assert type(cache.max_cache_len) is int


def test_key_cache_and_value_cache(cache: StaticCache) -> None:
    """Row `.key_cache, .value_cache`: lists of one full tensor for each layer."""
    assert (cache.key_cache, cache.value_cache) == ([], [])
    write(cache, [1, 2])
    assert [states.shape for states in cache.key_cache + cache.value_cache] == [(1, 2, 8, 4)] * 2
    assert isinstance(cache.key_cache, list)


def test_private_counters(cache: StaticCache) -> None:
    """Row `._cumulative_length`: a list of counters by layer; `_seen_tokens` an int."""
    assert (cache._cumulative_length, cache._seen_tokens) == ([], 0)
    write(cache, [1, 2], 0)
    write(cache, [1], 1)
    assert (cache._cumulative_length, cache._seen_tokens) == ([2, 1], 2)


def test_seen_tokens(cache: StaticCache) -> None:
    """Row `.seen_tokens`: tokens written to layer 0."""
    for layer, tokens in ((0, 3), (1, 3), (0, 2), (2, 1)):
        write(cache, range(tokens), layer)
    assert cache.seen_tokens == 5
    assert isinstance(inspect.getattr_static(StaticCache, "seen_tokens"), property)


def test_len(cache: StaticCache) -> None:
    """Row `len(c)`: layers that there are tensors of, written or not."""
    assert len(cache) == 0
    write(cache, [1], 2)
    assert len(cache) == 3
    cache.reset()
    assert len(cache) == 3


def test_getitem(cache: StaticCache) -> None:
    """Row `c[i]`: the full tensors; KeyError outside the layers, -1 included."""
    write(cache, [1, 2], 0, {"read_len": 2})
    write(cache, [1, 2], 1)
    assert cache[1][0] is cache.key_cache[1]
    assert cache[0][0].shape == (1, 2, 8, 4)
    for layer in (-1, 2):
        with pytest.raises(KeyError, match=f"Cache has 2 layers; no entry for layer {layer}."):
            cache[layer]


def test_iter(cache: StaticCache) -> None:
    """Row `iter(c)`: pairs of full tensors in layer order."""
    write(cache, [1], 0)
    write(cache, [2, 3], 1)
    assert [slots(k)[:2] for k, _ in cache] == [[1, 0], [2, 3]]
    assert all(v.shape == (1, 2, 8, 4) for _, v in cache)


def test_lazy_allocation(cache: StaticCache, cache_client: Client) -> None:
    """Row `Lazy allocation`: of the layers left out too, zeros like the key that came."""
    k, v = random_states(2, heads=3, dim=5)
    cache.update(k.double(), v.double(), 2)
    assert len(cache) == 3
    assert lengths(cache) == [0, 0, 2]
    for layer in (0, 1):
        assert not cache[layer][0].any()
        assert cache[layer][1].shape == (1, 3, 8, 5)
        assert cache[layer][0].dtype == torch.float64
    k, v = random_states(1, dim=4, v_dim=6)
    fails_without_change(cache, GeometryMismatch, lambda: cache.update(k, v, 3))
    states = random_states(1, heads=3, dim=5)
    fails_without_change(cache, GeometryMismatch, lambda: cache.update(*states, 1))
    cache.update(states[0].double(), states[1].double(), 1)
    twin = assert_survives(cache, cache_client)
    assert lengths(twin) == [0, 1, 2]


def test_capacity_is_reserved(start: Callable[..., Backend]) -> None:
    """A layer's first update takes room for all of its positions, or fails with nothing changed."""
    page_bytes = 2 * 16 * 2 * 4 * 4  # keys and values of 16 tokens, 2 heads, 4 float32
    backend = start(memory_bytes=20 * page_bytes)
    client = backend.connect()
    cache = StaticCache(128, client=client)  # 8 pages
    write(cache, [1], 0)
    write(cache, [1], 1)
    fails_without_change(cache, OutOfPages, lambda: write(cache, [1], 2))
    other = StaticCache(128, client=client)
    fails_without_change(other, OutOfPages, lambda: write(other, [1], 0))
    assert other.session_id is None
    for _ in range(127):
        for layer in range(2):
            write(cache, [2], layer)
    assert lengths(cache) == [128, 128]


def test_update(cache: StaticCache, cache_client: Client) -> None:
    """Row `update(k, v, layer_idx, cache_kwargs=None)`: other tensors are put into the lists."""
    k, v = random_states(3)
    first = cache.update(k, v, 0)
    assert cache.key_cache[0] is first[0]
    assert torch.equal(first[0][:, :, :3], k)
    assert torch.equal(first[1][:, :, :3], v)
    assert not first[1][:, :, 3:].any()
    second = cache.update(*random_states(1), 0)
    assert cache.key_cache[0] is second[0]
    assert second[0] is not first[0]
    assert_survives(cache, cache_client)


def test_default_positions(cache: StaticCache) -> None:
    """Row `positions, default`: behind the counter of the layer itself."""
    write(cache, [1, 2, 3], 0)
    write(cache, [4], 1)
    write(cache, [5], 0)
    write(cache, [6], 1)
    assert slots(cache[0][0])[:4] == [1, 2, 3, 5]
    assert slots(cache[1][0])[:3] == [4, 6, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cache_position(cache: StaticCache, cache_client: Client, dtype: torch.dtype) -> None:
    """Row `positions, cache_kwargs["cache_position"]`: used if it is a tensor."""
    write(cache, [7, 8], 0, at(5, 2, dtype=dtype))
    assert slots(cache[0][0]) == [0, 0, 8, 0, 0, 7, 0, 0]
    assert_survives(cache, cache_client)


@pytest.mark.parametrize("given", [None, [4], np.array([4]), 4, (4,), "4"], ids=repr)
def test_cache_position_that_is_no_tensor(cache: StaticCache, given: Any) -> None:
    """Row `positions, cache_kwargs["cache_position"]`: anything else is not looked at."""
    write(cache, [1])
    write(cache, [9], 0, {"cache_position": given})
    assert slots(cache[0][0])[:6] == [1, 9, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "given",
    [torch.tensor([1.0]), torch.tensor(1), torch.tensor([1, 2]), torch.tensor([True])],
    ids=repr,
)
def test_cache_position_of_the_wrong_form(cache: StaticCache, given: torch.Tensor) -> None:
    """Row `positions, cache_kwargs["cache_position"]`: integers, one for each token."""
    write(cache, [1])
    options = {"cache_position": given}
    fails_without_change(cache, InvalidRequest, lambda: write(cache, [9], 0, options))


def test_options_that_are_no_dict(cache: StaticCache) -> None:
    """Refused before anything is written."""
    write(cache, [1])
    options: Any = 5
    fails_without_change(cache, InvalidRequest, lambda: write(cache, [9], 0, options))


def test_counters_after_update(cache: StaticCache) -> None:
    """Row `counters after update`: tokens written, wherever they went."""
    write(cache, [1], 0, at(5))
    assert (lengths(cache), cache.seen_tokens) == ([1], 1)
    write(cache, [2, 3], 0, at(5, 0))
    write(cache, [4], 1, at(7))
    assert (lengths(cache), cache.seen_tokens) == ([3, 1], 3)


def test_scatter_with_gaps(cache: StaticCache, cache_client: Client) -> None:
    """Row `scatter with gaps`: zeros stay zero; the next write goes on at the counter."""
    write(cache, [5, 6], 0, at(3, 6))
    write(cache, [7], 0)
    assert slots(cache[0][0]) == [0, 0, 7, 5, 0, 0, 6, 0]
    assert_survives(cache, cache_client)


def test_duplicate_positions(cache: StaticCache, cache_client: Client) -> None:
    """Row `duplicate positions in one call`: the last wins, and all of them count."""
    write(cache, [1, 2, 3, 4], 0, at(5, 1, 5, 1))
    assert slots(cache[0][0]) == [0, 4, 0, 0, 0, 3, 0, 0]
    assert lengths(cache) == [4]
    assert_survives(cache, cache_client)


def test_unsorted_positions(cache: StaticCache, cache_client: Client) -> None:
    """Row `unsorted positions`: token j goes to position p[j]."""
    k, v = random_states(8)
    order = [3, 7, 0, 5, 1, 6, 2, 4]
    cache.update(k, v, 0, at(*order))
    assert torch.equal(cache[0][0][:, :, order], k)
    assert torch.equal(cache[0][1][:, :, order], v)
    assert_survives(cache, cache_client)


@pytest.mark.parametrize("position", [-1, -8, -9])
def test_negative_positions(cache: StaticCache, position: int) -> None:
    """Row `negative positions`: outside [0, capacity), so an error with nothing changed."""
    write(cache, [1])
    fails_without_change(
        cache, PositionOutOfRange, lambda: write(cache, [2, 3], 0, at(0, position))
    )


@pytest.mark.parametrize("position", [8, 9, 2**40])
def test_positions_beyond_capacity(cache: StaticCache, position: int) -> None:
    """Row `positions >= capacity`: an error with nothing changed, counters included."""
    write(cache, [1])
    fails_without_change(
        cache, PositionOutOfRange, lambda: write(cache, [2, 3], 0, at(0, position))
    )


def test_more_tokens_than_capacity(cache: StaticCache) -> None:
    """Row `T_new > capacity`, and a counter that would exceed it by explicit positions."""
    fails_without_change(cache, PositionOutOfRange, lambda: write(cache, range(9)))
    write(cache, range(7), 0)
    fails_without_change(cache, PositionOutOfRange, lambda: write(cache, [1, 2], 0))
    fails_without_change(cache, PositionOutOfRange, lambda: write(cache, [1, 2], 0, at(0, 1)))
    write(cache, [1], 0, at(0))


@pytest.mark.parametrize(
    ("read_len", "width"),
    [
        *((3, 3), (1, 1), (7, 7), (True, 1)),
        *((8, 8), (9, 8), (0, 8), (-1, 8), (False, 8), (None, 8)),
        *((np.int64(3), 8), (3.0, 8), ("3", 8)),
    ],
    ids=repr,
)
def test_read_len(cache: StaticCache, read_len: Any, width: int) -> None:
    """Row `read_len`: an int above 0 and below capacity narrows what returns."""
    k, v = write(cache, [1, 2], 0, {"read_len": read_len})
    assert (k.shape[2], v.shape[2]) == (width, width)


def test_read_len_against_written_length(cache: StaticCache) -> None:
    """Row `read_len vs written length`: not checked; zeros show, or new keys are hidden."""
    assert slots(write(cache, [1, 2], 0, {"read_len": 4})[0]) == [1, 2, 0, 0]
    assert slots(write(cache, [3], 0, {"read_len": 1})[0]) == [1]
    assert slots(cache[0][0])[:3] == [1, 2, 3]


def test_read_len_narrows_only_the_return(cache: StaticCache) -> None:
    """Row `read_len + stored buffer`: what is stored stays whole."""
    write(cache, [1, 2], 0, {"read_len": 1})
    assert cache.key_cache[0].shape[2] == cache[0][1].shape[2] == 8


def test_return_without_read_len(cache: StaticCache) -> None:
    """Row `return when no read_len`: the stored tensors themselves."""
    k, v = write(cache, [1])
    assert k is cache.key_cache[0]
    assert v is cache.value_cache[0]


def test_snapshot_property(cache: StaticCache) -> None:
    """Row `snapshot property`: what was returned is never changed."""
    returned = [write(cache, [value]) for value in (1, 2)]
    narrowed = write(cache, [3], 0, {"read_len": 3})[0]
    copies = [k.clone() for k, _ in returned]
    write(cache, [9], 0, at(0))
    cache.crop(1)
    write(cache, [8])
    cache.reset()
    assert all(torch.equal(k, before) for (k, _), before in zip(returned, copies, strict=True))
    assert slots(narrowed) == [1, 2, 3]


@pytest.mark.parametrize("options", [{}, None, {"sin": 1, "cos": 2}], ids=repr)
def test_unknown_kwargs(cache: StaticCache, options: Any) -> None:
    """Row `unknown kwargs`: not looked at; `{}` is as None."""
    assert slots(write(cache, [1], 0, options)[0]) == [1, 0, 0, 0, 0, 0, 0, 0]


def test_get_seq_length(cache: StaticCache) -> None:
    """Row `get_seq_length`: the counter; 0 where there is no layer; negative from the end."""
    assert cache.get_seq_length() == cache.get_seq_length(3) == 0
    with pytest.raises(IndexError):
        cache.get_seq_length(-1)
    write(cache, [1, 2], 0)
    write(cache, [1], 1)
    assert [cache.get_seq_length(layer) for layer in (0, 1, 2, -1, -2)] == [2, 1, 0, 1, 2]


def test_get_max_cache_shape(cache: StaticCache) -> None:
    """Row `get_max_cache_shape()`: the capacity, also before there is anything."""
    assert cache.get_max_cache_shape() == 8
    write(cache, [1])
    assert cache.get_max_cache_shape() == 8


def test_get_usable_length(cache: StaticCache) -> None:
    """Row `get_usable_length`: what can stay; negative where the new ones alone are too many."""
    write(cache, range(5))
    assert [cache.get_usable_length(new) for new in (0, 3, 4, 8, 10)] == [5, 5, 4, 0, -2]


SELECTIONS = [[1, 0], [1], [0, 0, 1], [-1, -2], [0, 1]]


@pytest.mark.parametrize("method", ["reorder_cache", "batch_select_indices"])
@pytest.mark.parametrize("rows", SELECTIONS, ids=str)
def test_reorder_cache_and_batch_select_indices(
    cache: StaticCache, cache_client: Client, method: str, rows: list[int]
) -> None:
    """Rows `reorder_cache(beam_idx)`, `batch_select_indices(indices)`: counters stay."""
    for layer, tokens in ((0, 3), (1, 2)):
        cache.update(*random_states(tokens, rows=2), layer)
    expected = [(k[rows], v[rows]) for k, v in cache]
    getattr(cache, method)(torch.tensor(rows, dtype=torch.int32))
    assert_same(cache, expected)
    assert (lengths(cache), cache.seen_tokens) == ([3, 2], 3)
    cache.update(*random_states(1, rows=len(rows)), 1)
    assert_survives(cache, cache_client)


@pytest.mark.parametrize("r", [1, 3])
def test_batch_repeat_interleave(cache: StaticCache, cache_client: Client, r: int) -> None:
    """Row `batch_repeat_interleave(r)`: copies of a row next to each other; counters stay."""
    cache.update(*random_states(3, rows=2), 0)
    expected = [(k.repeat_interleave(r, 0), v.repeat_interleave(r, 0)) for k, v in cache]
    cache.batch_repeat_interleave(r)
    assert_same(cache, expected)
    assert lengths(cache) == [3]
    assert_survives(cache, cache_client)


def test_batch_without_rows(cache: StaticCache) -> None:
    """Row `batch_repeat_interleave(r)`: 0 makes an empty batch."""
    cache.update(*random_states(3, rows=2), 0)
    cache.batch_repeat_interleave(0)
    assert cache[0][0].shape == (0, 2, 8, 4)
    assert cache.update(*random_states(1, rows=0), 0)[0].shape == (0, 2, 8, 4)
    cache.batch_select_indices(torch.tensor([], dtype=torch.int64))
    assert lengths(cache) == [4]


BAD_ROWS = {
    "list": [0, 1],
    "bool": torch.tensor([True, False]),
    "two dimensions": torch.tensor([[0, 1]]),
    "beyond": torch.tensor([0, 5]),
    "below": torch.tensor([0, -3]),
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_index_type_and_range(cache: StaticCache, what: str) -> None:
    """Row `index type / range`: tensors of integers, in range, before any layer changes."""
    for layer in range(2):
        cache.update(*random_states(3, rows=2), layer)
    rows = BAD_ROWS[what]
    fails_without_change(cache, InvalidRequest, lambda: cache.reorder_cache(rows))
    fails_without_change(cache, InvalidRequest, lambda: cache.batch_select_indices(rows))


def test_batch_ops_on_empty_cache(cache: StaticCache) -> None:
    """Row `batch ops on empty cache`: nothing happens."""
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_select_indices(torch.tensor([5]))
    cache.batch_repeat_interleave(3)
    assert len(cache) == 0


@pytest.mark.parametrize(
    ("n", "kept"), [(2, 2), (0, 0), (-1, 4), (-5, 0), (-9, 0), (5, 5), (8, 5), (99, 5)]
)
def test_crop(cache: StaticCache, cache_client: Client, n: int, kept: int) -> None:
    """Rows `crop(n)`, `crop(0)`, `crop(>= length)`: counters only, clamped; tensors stay."""
    write(cache, [1, 2, 3, 4, 5])
    stored = cache.key_cache[0]
    calls = backend_calls(cache_client)
    cache.crop(n)
    assert backend_calls(cache_client) == calls
    assert (lengths(cache), cache.seen_tokens) == ([kept], kept)
    assert cache.key_cache[0] is stored
    assert slots(stored)[:5] == [1, 2, 3, 4, 5]
    write(cache, [9])
    expected = [1.0, 2, 3, 4, 5, 0, 0, 0]
    expected[kept] = 9
    assert slots(cache[0][0]) == expected
    assert_survives(cache, cache_client)


def backend_calls(client: Client) -> int:
    """Return something that every structural change makes larger."""
    return sum(session.epoch for session in client.list_sessions())


def test_crop_with_uneven_layers(cache: StaticCache) -> None:
    """Row `crop with uneven layers`: negative is relative to each layer, positive a cap of each."""
    for layer, tokens in enumerate((5, 3, 1)):
        write(cache, range(tokens), layer)
    cache.crop(-2)
    assert (lengths(cache), cache.seen_tokens) == ([3, 1, 0], 3)
    cache.crop(2)
    assert (lengths(cache), cache.seen_tokens) == ([2, 1, 0], 2)
    fails_without_change(cache, InvalidRequest, lambda: cache.crop(1.0))  # type: ignore[arg-type]


def test_crop_on_empty_cache(cache: StaticCache) -> None:
    """Row `crop(n)`: without layers, seen is 0."""
    cache.crop(-3)
    assert (lengths(cache), cache.seen_tokens) == ([], 0)


def test_reset(cache: StaticCache, cache_client: Client) -> None:
    """Row `reset()`: zeros of the same shape; counters and seen are 0; layers stay."""
    for layer in range(2):
        cache.update(*random_states(3, rows=2), layer)
    session_id = cache.session_id
    cache.reset()
    assert (len(cache), lengths(cache), cache.seen_tokens) == (2, [0, 0], 0)
    assert all(k.shape == (2, 2, 8, 4) and not k.any() and not v.any() for k, v in cache)
    cache.update(*random_states(2, rows=2), 0)
    assert cache.session_id == session_id
    # What was there before does not show through, nor on the service.
    assert not cache[1][0].any()
    cache.update(*random_states(1, rows=2), 1, at(5))
    assert_survives(cache, cache_client)


def test_another_batch_after_reset(cache: StaticCache) -> None:
    """Row `after reset with another batch size`: the tensors stay, so it is refused."""
    cache.update(*random_states(3, rows=2), 0)
    cache.reset()
    fails_without_change(
        cache, GeometryMismatch, lambda: cache.update(*random_states(1, rows=3), 0)
    )
    assert cache[0][0].shape[0] == 2


BAD_STATES = {
    "rows": lambda: random_states(1, rows=2),
    "heads": lambda: random_states(1, heads=3),
    "k and v dim": lambda: random_states(1, dim=8),
    "v dim": lambda: random_states(1, v_dim=8),
    "v tokens": lambda: (random_states(1)[0], random_states(2)[1]),
    "rank": lambda: tuple(one[0] for one in random_states(1)),
    "dtype": lambda: tuple(one.double() for one in random_states(1)),
    "v dtype": lambda: (random_states(1)[0], random_states(1)[1].half()),
    "not a tensor": lambda: tuple(one.numpy() for one in random_states(1)),
}


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("what", BAD_STATES)
def test_mismatch(cache: StaticCache, what: str, layer: int) -> None:
    """Advice (b): another batch, head, dim or dtype is an error, also in a layer of its own."""
    write(cache, [1, 2, 3])
    k, v = BAD_STATES[what]()
    if layer == 1 and what in ("heads", "k and v dim", "dtype"):
        cache.update(k, v, layer)  # a layer's own business
    else:
        fails_without_change(cache, InvalidRequest, lambda: cache.update(k, v, layer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_dtype(cache: StaticCache, cache_client: Client, dtype: torch.dtype) -> None:
    """Row `dtype`: that of the first key, all of the service's, to the bit."""
    for tokens in (3, 2):
        k, v = random_states(tokens)
        cache.update(k.to(dtype), v.to(dtype), 0)
    assert cache[0][0].dtype == cache[0][1].dtype == dtype
    assert_survives(cache, cache_client)


def test_gqa(cache: StaticCache) -> None:
    """Row `GQA`: KV heads are stored as they come."""
    assert cache.update(*random_states(1, heads=2, dim=8), 0)[0].shape == (1, 2, 8, 8)


def test_no_legacy_api(cache: StaticCache) -> None:
    """Row `No legacy API`: neither `to_legacy_cache` nor `from_legacy_cache`."""
    assert not hasattr(cache, "to_legacy_cache")
    assert not hasattr(StaticCache, "from_legacy_cache")


def test_thread_safety(cache: StaticCache, cache_client: Client) -> None:
    """Row `thread safety`: none is promised; a cache may be handed from thread to thread."""
    for value in (1, 2, 3):
        thread = threading.Thread(target=write, args=(cache, [value]))
        thread.start()
        thread.join()
    assert cache.get_seq_length() == 3
    assert slots(cache[0][0]) == [1, 2, 3, 0, 0, 0, 0, 0]
    assert_survives(cache, cache_client)


def test_surface_count() -> None:
    """Row `Surface count`: those members, and what a remote session adds."""
    public = {name for name, _ in inspect.getmembers(StaticCache) if not name.startswith("_")}
    methods = {
        "update", "get_seq_length", "get_max_cache_shape", "reorder_cache",
        "batch_select_indices", "batch_repeat_interleave", "crop", "reset",
    }  # fmt: skip
    inherited = {"get_usable_length"}
    assert public == methods | inherited | {"seen_tokens", "attach", "detach", "session_id"}
    for name in ("__len__", "__getitem__", "__iter__"):
        assert callable(getattr(StaticCache, name))


def test_negative_layer_idx(cache: StaticCache) -> None:
    """A negative layer counts from the end, and does not count as seen."""
    fails_without_change(cache, IndexError, lambda: write(cache, [1], -1))
    write(cache, [1], 0)
    write(cache, [2], -1)
    assert (lengths(cache), cache.seen_tokens) == ([2], 1)
    fails_without_change(cache, InvalidRequest, lambda: write(cache, [1], 1024))


# -- example cases


def test_case_2(cache: StaticCache) -> None:
    """Case 2: 3 tokens: three positions written, the others zero."""
    k, _ = write(cache, [1, 1, 1])
    assert k.shape == (1, 2, 8, 4)
    assert k[:, :, :3].sum() == 24
    assert k[:, :, 3:].sum() == 0
    assert cache.get_seq_length() == 3


def test_case_4(cache: StaticCache) -> None:
    """Case 4: one token at position 4 counts as one."""
    k, _ = write(cache, [5], 0, at(4))
    assert k[:, :, 4].sum() == 40
    assert k.sum() == 40
    assert (cache.get_seq_length(), cache.seen_tokens) == (1, 1)


def test_case_6(cache: StaticCache) -> None:
    """Case 6: two tokens at positions 6 and 3."""
    k, _ = write(cache, [1, 2], 0, at(6, 3))
    assert (slots(k)[6], slots(k)[3], cache.get_seq_length()) == (1, 2, 2)


@pytest.mark.parametrize("read_len", [16, 20, 0, -1])
def test_case_8(make: Make, read_len: int) -> None:
    """Case 8: a read_len that does not narrow."""
    cache = make(16)
    write(cache, [1, 2, 3])
    assert write(cache, [4], 0, {"read_len": read_len})[0].shape == (1, 2, 16, 4)


def test_case_10(cache: StaticCache) -> None:
    """Case 10: positions as a list are not looked at."""
    k, _ = write(cache, [1], 0, {"cache_position": [4]})
    assert slots(k) == [1, 0, 0, 0, 0, 0, 0, 0]


def test_case_12(cache: StaticCache) -> None:
    """Case 12: layers have counters of their own."""
    for layer, tokens in ((0, 2), (1, 2), (0, 1)):
        write(cache, range(tokens), layer)
    assert (lengths(cache), cache.seen_tokens) == ([3, 2], 3)


def test_case_14(cache: StaticCache) -> None:
    """Case 14: crop(2), crop(-1), reset."""
    k, _ = write(cache, [1, 2, 3, 4, 5])
    total = k.sum()
    cache.crop(2)
    assert (cache.get_seq_length(), cache.seen_tokens, cache[0][0].sum()) == (2, 2, total)
    cache.crop(-1)
    assert cache.get_seq_length() == 1
    cache.reset()
    assert (cache.get_seq_length(), cache[0][0].sum(), len(cache)) == (0, 0, 1)


def test_case_16(make: Make) -> None:
    """Case 16: uneven layers, cropped relatively and absolutely."""
    for n, expected in ((-2, [3, 1]), (4, [4, 3])):
        cache = make()
        write(cache, range(5), 0)
        write(cache, range(3), 1)
        cache.crop(n)
        assert (lengths(cache), cache.seen_tokens) == (expected, expected[0])


def test_case_18(cache: StaticCache) -> None:
    """Case 18: repeat 4 times, then select two rows."""
    write(cache, [1, 2, 3])
    cache.batch_repeat_interleave(4)
    assert (cache[0][0].shape, cache.get_seq_length()) == ((4, 2, 8, 4), 3)
    cache.batch_select_indices(torch.tensor([0, 2]))
    assert cache[0][0].shape == (2, 2, 8, 4)


def test_case_20(cache: StaticCache) -> None:
    """Case 20: row 5 of 2 is an error; on an empty cache nothing happens."""
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.update(*random_states(1, rows=2), 0)
    fails_without_change(
        cache, InvalidRequest, lambda: cache.batch_select_indices(torch.tensor([5]))
    )


def test_case_22(cache: StaticCache) -> None:
    """Case 22: what was returned before keeps its values."""
    first, _ = write(cache, [1, 2])
    before = first.clone()
    write(cache, [3], 0, at(0))
    assert torch.equal(first, before)


def test_case_24(cache: StaticCache) -> None:
    """Case 24: one token more than the capacity is an error."""
    write(cache, range(8))
    fails_without_change(cache, PositionOutOfRange, lambda: write(cache, [1]))


# -- the session


def test_attach_goes_on(cache: StaticCache, cache_client: Client) -> None:
    """A cache whose decoder has died goes on in another one; counters follow what was written."""
    write(cache, [1, 2, 3], 0)
    write(cache, [4, 5], 1)
    assert cache.session_id is not None
    twin = StaticCache.attach(cache.session_id, 8, client=cache_client)
    assert_same(twin, contents(cache))
    assert (lengths(twin), twin.seen_tokens) == ([3, 2], 3)
    with pytest.raises(StaleEpoch):
        write(cache, [9], 0)
    write(twin, [6], 1)
    assert slots(twin[1][0])[:3] == [4, 5, 6]
    assert_survives(twin, cache_client)


@pytest.mark.parametrize("counters", [None, [0, 0], []], ids=str)
def test_attach_after_a_reset(
    cache: StaticCache, cache_client: Client, counters: list[int] | None
) -> None:
    """Nothing is stored, so there are no layers, and the next ones may be of another shape."""
    for layer in range(2):
        write(cache, [1, 2, 3], layer)
    cache.reset()
    session_id = cache.detach()
    with pytest.raises(InvalidRequest):
        StaticCache.attach(session_id, 8, lengths=[0, 1], client=cache_client)
    twin = StaticCache.attach(session_id, 8, lengths=counters, client=cache_client)
    assert (len(twin), twin.seen_tokens) == (0, 0)
    states = random_states(2, heads=3, dim=8)
    for layer in range(2):
        twin.update(*states, layer)
    assert lengths(twin) == [2, 2]
    assert_survives(twin, cache_client)


def test_attach_takes_only_what_fits(cache: StaticCache, cache_client: Client) -> None:
    """Another capacity, or counters that cannot be, are refused, and the session lives on."""
    write(cache, [1, 2, 3], 0)
    session_id = cache.detach()
    for capacity, counters in ((16, None), (8, [9]), (8, [-1]), (8, [1, 2]), (8, [1.5])):
        with pytest.raises(InvalidRequest):
            StaticCache.attach(session_id, capacity, lengths=counters, client=cache_client)
    twin = StaticCache.attach(session_id, 8, lengths=[1], client=cache_client)
    assert (lengths(twin), slots(twin[0][0])[:4]) == ([1], [1, 2, 3, 0])


def test_detach(cache: StaticCache, cache_client: Client) -> None:
    """After a detach tensors can be read, but take nothing; a reset begins anew."""
    write(cache, [1])
    session_id = cache.detach()
    fails_without_change(cache, SessionNotFound, lambda: write(cache, [2]))
    cache.reset()
    write(cache, [3])
    assert slots(cache[0][0])[:2] == [3, 0]
    cache_client.attach(session_id).release()


def test_deepcopy(cache: StaticCache, cache_client: Client) -> None:
    """A deep copy is independent, counters too."""
    write(cache, [1, 2])
    twin = copy.deepcopy(cache)
    write(twin, [3])
    twin.crop(1)
    assert (lengths(cache), lengths(twin)) == ([2], [1])
    assert slots(cache[0][0])[:3] == [1, 2, 0]
    assert_survives(twin, cache_client)
    assert_survives(cache, cache_client)


def test_state_put_back_by_hand(cache: StaticCache, cache_client: Client) -> None:
    """A decoder that takes tensors and counters out, and puts them back, gets what it expects.

    So does a step that is traced once, rolled back by hand, and run again.
    """
    for layer in range(2):
        cache.update(*random_states(3), layer)
    saved = (
        list(cache.key_cache), list(cache.value_cache),
        list(cache._cumulative_length), cache._seen_tokens,
    )  # fmt: skip
    step = [random_states(1) for _ in range(2)]
    for layer, states in enumerate(step):
        cache.update(*states, layer)
    expected = contents(cache)
    cache.key_cache[:], cache.value_cache[:] = saved[0], saved[1]
    cache._cumulative_length[:], cache._seen_tokens = saved[2], saved[3]
    twin = copy.deepcopy(cache)
    for layer, states in enumerate(step):
        cache.update(*states, layer)
    assert_same(cache, expected)
    assert lengths(cache) == [4, 4]
    assert_survives(cache, cache_client)
    assert_survives(twin, cache_client)


def test_tensors_written_in_place(cache: StaticCache, cache_client: Client) -> None:
    """What the decoder writes into the tensors is what survives."""
    write(cache, [1, 2])
    cache.key_cache[0][:, :, 5] = 9.0
    twin = assert_survives(cache, cache_client)
    assert slots(twin[0][0]) == [1, 2, 0, 0, 0, 9, 0, 0]
