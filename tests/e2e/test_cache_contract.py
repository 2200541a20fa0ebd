"""What transformers and its users ask of a cache: each member, and what it must mean."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache

from kvservice_client import Client
from kvservice_client.hf import RemoteCache, RemoteFetchWarning
from tests.e2e import models

HEADS, DIM = 2, 8
SINCE_5_24 = hasattr(Cache, "is_recording_past")
"""Whether caches have the members that came with transformers 5.24: this one, and `is_dummy`."""


def states(tokens: int, rows: int = 1, seed: int = 0, dim: int = DIM) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, HEADS, tokens, dim, generator=random)


def feed(cache: Cache, tokens: int, rows: int = 1, layers: int = 2, seed: int = 0) -> list[Any]:
    """Update all layers with the same numbers, whatever the cache; return what they return."""
    return [
        cache.update(
            states(tokens, rows, seed + 10 * layer),
            states(tokens, rows, seed + 10 * layer + 5),
            layer,
        )
        for layer in range(layers)
    ]


def config(window: int | None = None, layers: int = 2) -> Any:
    """Return a config of alternating layers with and without a window."""
    types = ["sliding_attention" if window else "full_attention", "full_attention"]
    settings = models.FAMILIES["qwen3"].config()
    settings.num_hidden_layers = layers
    settings.layer_types = (types * layers)[:layers]
    settings.sliding_window = window
    settings.use_sliding_window = window is not None
    return settings


def contents(cache: Cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(k + 0, v + 0) for k, v, _ in cache]


def assert_equal(ours: Cache, theirs: Cache) -> None:
    """Fail unless two caches say and hold the same."""
    assert len(ours) == len(theirs)
    assert ours.is_sliding == theirs.is_sliding
    for layer in range(len(theirs)):
        assert ours.get_seq_length(layer) == theirs.get_seq_length(layer)
        for new in (1, 3, 20):
            assert ours.get_mask_sizes(new, layer) == theirs.get_mask_sizes(new, layer)
    for mine, other in zip(contents(ours), contents(theirs), strict=True):
        assert torch.equal(mine[0], other[0])
        assert torch.equal(mine[1], other[1])


@pytest.fixture(params=[None, 4], ids=["full", "window 4"])
def pair(
    request: pytest.FixtureRequest, client: Client
) -> Iterator[tuple[RemoteCache, DynamicCache]]:
    """An empty remote cache that fetches, and the local one that it stands for."""
    settings = config(request.param)
    ours = RemoteCache(client, settings, mode="fetch")
    yield ours, DynamicCache(config=settings)
    ours.reset()  # pytest holds it longer than the look at the pages waits


Pair = tuple[RemoteCache, DynamicCache]


def test_before_the_first_update(pair: Pair) -> None:
    """An empty cache answers as a local one does."""
    ours, theirs = pair
    assert isinstance(ours, DynamicCache)
    for cache in pair:
        assert len(cache) == 2
        assert cache.get_seq_length() == cache.get_seq_length(7) == cache.get_query_offset(1) == 0
        assert cache.get_mask_sizes(3, 0) == cache.get_mask_sizes(3, 9) == (3, 0)
        assert not cache.is_initialized
        assert cache.layers[0].keys is None
        assert cache.layers[1].values is None
        assert cache.batch_size == -1
        assert cache.is_linear == [False, False]
        if SINCE_5_24:
            assert cache.is_dummy == [False, False]
        assert not cache.offloading
    ours.crop(-3)
    ours.crop(0)
    ours.reorder_cache(torch.tensor([0]))
    ours.batch_repeat_interleave(2)
    ours.batch_select_indices([0])
    ours.reset()
    assert ours.get_max_length(0) == theirs.get_max_length(0)
    assert ours.get_max_length() == theirs.get_max_length()
    assert hasattr(ours.layers[0], "sliding_window") == hasattr(theirs.layers[0], "sliding_window")
    assert not hasattr(ours.layers[1], "sliding_window")
    assert not ours.is_compileable
    assert ours.is_croppable


def test_updates_return_what_queries_see(pair: Pair) -> None:
    """Lengths, mask sizes and returned states, step by step, below, at and past the window."""
    for step, tokens in enumerate([1, 1, 1, 1, 1, 6, 2, 9]):
        sizes = [cache.get_mask_sizes(tokens, 0) for cache in pair]
        mine, other = (feed(cache, tokens, seed=step) for cache in pair)
        for one, two in zip(mine, other, strict=True):
            assert torch.equal(one[0], two[0])
            assert torch.equal(one[1], two[1])
        assert sizes[0] == sizes[1]
        assert sizes[0][0] == mine[0][0].shape[-2]
        assert_equal(*pair)


def test_rows(pair: Pair) -> None:
    """Repeating, dropping and reordering rows, by tensors, lists and tuples."""
    for cache in pair:
        feed(cache, 6, rows=2)
        cache.batch_repeat_interleave(2)
    assert_equal(*pair)
    assert pair[0].batch_size == 4
    for cache in pair:
        cache.reorder_cache(torch.tensor([3, 1, 1, 0]))
    assert_equal(*pair)
    for indices in (torch.tensor([3, 0, 2]), [1, -1], torch.tensor([True, False])):
        for cache in pair:
            cache.batch_select_indices(indices)
        assert_equal(*pair)
    for cache in pair:
        feed(cache, 2, rows=1, seed=3)
    assert_equal(*pair)


def test_rows_as_tuple(client: Client) -> None:
    """A tuple says rows, not coordinates; reordering takes plain lists and tuples too, and
    selecting a slice."""
    cache = RemoteCache(client, mode="fetch")
    before = feed(cache, 3, rows=3)[0][0]
    cache.batch_select_indices((0, 2))
    assert torch.equal(contents(cache)[0][0], before[[0, 2]])
    cache.reorder_cache((1, 0))
    cache.reorder_cache([1, 1])
    assert torch.equal(contents(cache)[0][0], before[[0, 0]])
    cache.batch_select_indices(slice(1, None))
    assert torch.equal(contents(cache)[0][0], before[[0]])


@pytest.mark.parametrize("rows", [[0, 3], [-1, 0]])
def test_rows_that_are_not_there(client: Client, rows: list[int]) -> None:
    """Nothing is changed by a row number out of range."""
    cache = RemoteCache(client, mode="fetch")
    feed(cache, 3, rows=3)
    with pytest.raises(IndexError):
        cache.reorder_cache(torch.tensor(rows))
    assert cache.batch_size == 3


@pytest.mark.parametrize("removed", [0, 1, 3, 6])
def test_crop_below_the_window(pair: Pair, removed: int) -> None:
    """The newest tokens go, from all layers."""
    for cache in pair:
        feed(cache, 3)
        cache.crop(-min(removed, 3))
        feed(cache, 2, seed=1)
    assert_equal(*pair)


def test_crop_past_the_window(pair: Pair) -> None:
    """While past is recorded, several updates can be taken back, and crop(0) stops keeping them."""
    ours, theirs = pair
    for cache in pair:
        cache.activate_past_recording()
        feed(cache, 9)
        cache.crop(0)
    assert_equal(*pair)
    for step, removed in enumerate([5, 1, 4, 0]):
        for cache in pair:
            feed(cache, 3, seed=step)
            feed(cache, 2, seed=step + 20)
            cache.crop(-removed)
        assert_equal(*pair)
    if SINCE_5_24:
        assert ours.is_recording_past(0) == theirs.is_recording_past(0)
        assert not ours.is_recording_past(1)
    for cache in pair:
        for layer in cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False
        feed(cache, 3, seed=40)
        feed(cache, 1, seed=41)
    assert_equal(*pair)


def test_crop_into_what_has_left_the_window(client: Client) -> None:
    """Refused, with nothing changed, whatever the size of a page."""
    for page_size in (1, 16):
        cache = RemoteCache(client, config(4), mode="fetch", page_size=page_size)
        feed(cache, 6)
        feed(cache, 2, seed=1)
        before = contents(cache)
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-5)
        assert cache.get_seq_length() == 8
        assert all(
            torch.equal(one[0], two[0]) for one, two in zip(before, contents(cache), strict=True)
        )
        cache.crop(-2)  # the last step can be taken back
        assert cache.get_seq_length() == 6


def test_crop_takes_negative_numbers(pair: Pair) -> None:
    """As upstream: a positive number was once the length to keep."""
    for cache in pair:
        feed(cache, 3)
        with pytest.raises(ValueError, match="crop"):
            cache.crop(2)
        assert cache.get_seq_length() == 3


def test_reset_and_another_batch(client: Client) -> None:
    """After a reset the cache is as new, for any number of rows."""
    cache = RemoteCache(client, config(4), mode="fetch")
    feed(cache, 7, rows=2)
    first = cache.session_id
    with pytest.raises(ValueError, match="2 rows"):
        feed(cache, 1, rows=3)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert not cache.is_initialized
    fresh = RemoteCache(client, config(4), mode="fetch")
    for each in (cache, fresh):
        feed(each, 5, rows=3)
    assert_equal(cache, fresh)
    assert cache.session_id != first


def test_early_initialization(pair: Pair) -> None:
    """Shapes can be told before the first token; lists give one entry a layer."""
    for cache in pair:
        cache.early_initialization(2, HEADS, [DIM, DIM], torch.float32, torch.device("cpu"))
        assert cache.is_initialized
        assert cache.get_seq_length() == 0
        feed(cache, 3, rows=2)
    assert_equal(*pair)


def test_deepcopy_is_independent(pair: Pair) -> None:
    """Copies share nothing that can be seen: each goes its own way."""
    ours, theirs = pair
    feed(ours, 6)
    feed(theirs, 6)
    ours._is_user_defined = True
    copies = (copy.deepcopy(ours), copy.deepcopy(theirs))
    assert copies[0]._is_user_defined
    assert copies[0].session_id != ours.session_id
    for cache in copies:
        feed(cache, 3, seed=1)
    assert_equal(*pair)
    assert_equal(*copies)
    for cache in pair:
        feed(cache, 2, seed=2)
    assert_equal(*pair)
    assert_equal(*copies)


def test_copies_that_would_be_two_writers_are_refused(client: Client) -> None:
    """A shallow copy, a pickle and a copied layer have no meaning; the message says what has."""
    cache = RemoteCache(client, mode="fetch")
    feed(cache, 2)
    with pytest.raises(TypeError, match="deepcopy"):
        copy.copy(cache)
    with pytest.raises(TypeError, match="attach"):
        pickle.dumps(cache)
    with pytest.raises(TypeError, match="on the cache"):
        copy.deepcopy(cache.layers[0])
    with pytest.raises(TypeError, match="on the cache"):
        cache.layers[0].crop(-1)


def test_keys_cannot_be_assigned(client: Client) -> None:
    """A layer filled by assignment would hold nothing on the service."""
    cache = RemoteCache(client, mode="fetch")
    feed(cache, 2)
    with pytest.raises(AttributeError, match="assigned"):
        cache.layers[0].keys = states(2)
    with pytest.raises(AttributeError, match="assigned"):
        cache.layers[0].values = states(2)


def test_unknown_options_are_refused(client: Client) -> None:
    """Nothing that is asked for is ignored."""
    with pytest.raises(ValueError, match="mode"):
        RemoteCache(client, mode="remote")
    with pytest.raises(TypeError, match="offloading"):
        RemoteCache(client, offloading=True)
    for no_client in (config(), [(states(2), states(2))]):
        with pytest.raises(TypeError, match="client first"):
            RemoteCache(no_client)  # type: ignore[arg-type]


def test_layers_that_cannot_be_stored_are_refused(client: Client) -> None:
    """A layer whose state is not keys and values is no silent local exception."""
    settings = config()
    settings.layer_types = ["indexed_attention", "full_attention"]
    with pytest.raises(ValueError, match="indexed_attention"):
        RemoteCache(client, settings)


def test_placeholders(client: Client) -> None:
    """In mode "attend" keys have a shape and nothing else: computing on them raises."""
    cache = RemoteCache(client, mode="attend")
    k, v = cache.update(states(3), states(3, dim=12), 0)
    assert (k.shape, v.shape) == ((1, HEADS, 3, DIM), (1, HEADS, 3, 12))
    assert k.dtype == torch.float32
    assert "RemoteKV" in repr(k)
    with pytest.raises(RuntimeError, match="use_remote_attention"):
        k @ v.transpose(-1, -2)
    keys = cache.layers[0].keys
    assert keys is not None
    assert keys.shape == k.shape
    with pytest.raises(RuntimeError, match="use_remote_attention"):
        keys.sum()


def test_auto_fetches_at_the_first_touch(client: Client) -> None:
    """With one warning, whatever is fetched afterwards, copies included."""
    cache = RemoteCache(client, mode="auto")
    given = states(3), states(3, seed=1)
    k, v = cache.update(*given, 0)
    with pytest.warns(RemoteFetchWarning, match="layer 0"):
        assert torch.equal(k + 0, given[0])
    assert torch.equal(v * 1, given[1])
    assert torch.equal(cache.layers[0].keys.clone(), given[0])
    k, _ = copy.deepcopy(cache).update(*given, 0)
    assert torch.equal(k[:, :, 3:], given[0])


def test_placeholders_of_an_older_state_are_refused(client: Client) -> None:
    """What was handed out before a change is never filled with what came after it."""
    cache = RemoteCache(client, mode="auto")
    for change in (
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache([0, 0]),
        lambda: cache.update(states(1, 2), states(1, 2), 0),
        lambda: cache.reset(),
    ):
        k, _ = cache.update(states(2, 2), states(2, 2), 0)
        change()
        with pytest.raises(RuntimeError, match="before the cache was changed"):
            k.sum()


def test_layers_that_differ_in_length(client: Client) -> None:
    """A step that ends half-way is noticed by the next one, and rolled back."""
    cache = RemoteCache(client, config(4), mode="fetch")
    feed(cache, 5)
    cache.update(states(2), states(2), 0)
    with pytest.raises(ValueError, match="rollback"):
        cache.update(states(2), states(2), 0)
    with pytest.raises(ValueError, match="rollback"):
        cache.crop(-1)
    assert cache.rollback() == 5
    fresh = RemoteCache(client, config(4), mode="fetch")
    feed(fresh, 5)
    for each in (cache, fresh):
        feed(each, 2, seed=1)
    assert_equal(cache, fresh)


def test_rollback_of_the_first_step(client: Client) -> None:
    """If a layer has nothing at all, the cache is empty afterwards."""
    cache = RemoteCache(client, config(), mode="fetch")
    cache.update(states(2), states(2), 0)
    assert cache.rollback() == 0
    feed(cache, 3)
    assert cache.get_seq_length(1) == 3


def test_attach_and_detach(client: Client) -> None:
    """Another cache goes on where the first one left off; the first one is of no more use."""
    settings = config(4)
    cache, fresh = (RemoteCache(client, settings, mode="fetch") for _ in range(2))
    feed(cache, 6, rows=2)
    feed(fresh, 6, rows=2)
    session_id = cache.detach()
    with pytest.raises(RuntimeError, match="detached"):
        feed(cache, 1, rows=2)
    for options in ({"config": settings}, {}):
        heir = RemoteCache.attach(session_id, client=client, mode="fetch", **options)
        assert heir.get_seq_length(1) == 6
        assert heir.batch_size == 2
        assert_equal(heir, fresh)
        assert heir.detach() == session_id
    heir = RemoteCache.attach(session_id, client=client, config=settings, mode="fetch")
    for each in (heir, fresh):
        feed(each, 3, rows=2, seed=1)
    assert_equal(heir, fresh)


def test_attach_with_another_config(client: Client) -> None:
    """A session that does not fit is refused, and lives on."""
    cache = RemoteCache(client, config(4), mode="fetch")
    feed(cache, 6)
    session_id = cache.detach()
    for wrong in (config(5), config(), config(4, layers=1)):
        with pytest.raises(ValueError, match="config"):
            RemoteCache.attach(session_id, client=client, config=wrong)
    heir = RemoteCache.attach(session_id, client=client, config=config(4))
    assert heir.get_seq_length() == 6


def test_fork_from(client: Client) -> None:
    """A cache begins with another session's first tokens, and neither disturbs the other."""
    cache = RemoteCache(client, config(), mode="fetch")
    feed(cache, 6)
    whole = RemoteCache.fork_from(cache.session_id, client=client, config=config(), mode="fetch")
    part = RemoteCache.fork_from(cache.session_id, 4, client=client, config=config(), mode="fetch")
    assert (whole.get_seq_length(), part.get_seq_length(1)) == (6, 4)
    expected = contents(cache)
    feed(part, 2, seed=9)
    assert torch.equal(contents(part)[0][0][:, :, :4], expected[0][0][:, :, :4])
    assert torch.equal(contents(whole)[1][1], expected[1][1])
    assert torch.equal(contents(cache)[1][1], expected[1][1])


def test_session_id_of_an_empty_cache(client: Client) -> None:
    """There is none before the first update, and that is said."""
    with pytest.raises(RuntimeError, match="first update"):
        _ = RemoteCache(client).session_id


def test_no_reference_cycle(client: Client) -> None:
    """A cache that is gone is gone at once: its pages do not wait for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        cache = RemoteCache(client, config(4), mode="auto")
        kept = feed(cache, 5)
        layer = weakref.ref(cache.layers[0])
        shared = weakref.ref(cache._shared)
        assert cache.layers[0].keys is not None
        del kept, cache
        assert layer() is None
        assert shared() is None
    finally:
        gc.enable()
