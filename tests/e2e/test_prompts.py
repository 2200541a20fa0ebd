"""Prompts: attended in the decoder while k and v are sent, those of equal rows once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvservice.core.errors import DeadlineExceeded, OutOfPages
from kvservice_client import Client, ClientConfig
from kvservice_client._hf_prompt import Uploads, equal_rows
from kvservice_client.hf import RemoteCache, use_remote_attention
from tests.backends import Backend, embedded_backend
from tests.e2e import models
from tests.e2e.conftest import used_pages
from tests.e2e.scenarios import World, forward, padded, prompt
from tests.failing import Failing


def world_of(client: Client, family: str = "llama", **options: Any) -> World:
    model = models.remote_twin(family)
    use_remote_attention(model)
    options = {"mode": "attend", "page_size": 4, **options}
    return World(family, model, lambda: RemoteCache(client, model.config, **options))


def local_world(family: str = "llama") -> World:
    model = models.build(family)
    return World(family, model, lambda: DynamicCache(config=model.config))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def assert_stored(cache: RemoteCache, local: DynamicCache) -> None:
    """Fail unless the service holds what a local cache does."""
    session = cache._shared.opened()
    for index, layer in enumerate(local.layers):
        k, v = session.read(index)
        torch.testing.assert_close(k, layer.keys, atol=1e-4, rtol=0)
        torch.testing.assert_close(v, layer.values, atol=1e-4, rtol=0)


@contextmanager
def failing_backend(num_workers: int = 1) -> Iterator[tuple[Backend, Client, Failing]]:
    with embedded_backend(num_workers=num_workers) as backend:
        failing = Failing(backend.dial)
        config = ClientConfig(timeout_s=5.0, detection_s=0.2, silence_s=0.05)
        yield backend, backend.connect(config=config, dial=failing.dial), failing


@pytest.mark.parametrize("family", models.FAMILIES)
def test_logits_are_the_local_ones_bit_for_bit(client: Client, family: str) -> None:
    """A prompt is computed as with a local cache, by the same kernels, in every family."""
    ids = prompt(2, 11)
    world = world_of(client, family)
    assert models.family(family).attention in ("sdpa", "eager")
    ours = forward(world, ids, world.new_cache())
    theirs = forward(local_world(family), ids, local_world(family).new_cache())
    if models.family(family).attention == "sdpa":
        assert torch.equal(ours, theirs)
    else:
        assert_close(ours, theirs)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_what_is_stored(client: Client, family: str) -> None:
    """Afterwards the service holds every key and value."""
    world = world_of(client, family)
    cache, local = world.new_cache(), DynamicCache()
    ids = prompt(2, 9)
    forward(world, ids, cache)
    forward(local_world(family), ids, local)
    assert_stored(cache, local)


@pytest.mark.parametrize("where", ["local", "remote"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_padded_prompts(client: Client, family: str, where: str) -> None:
    """Both ways of attending to a prompt give the same, and the next steps know its padding."""
    ids, mask = padded([9, 4, 6])
    world, local = world_of(client, family, prompts=where), local_world(family)
    cache, reference = world.new_cache(), local.new_cache()
    ours = forward(world, ids, cache, attention_mask=mask)
    theirs = forward(local, ids, reference, attention_mask=mask)
    assert_close(ours[mask.bool()], theirs[mask.bool()])
    mask = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], dim=1)
    assert_close(
        forward(world, prompt(3, 1), cache, attention_mask=mask),
        forward(local, prompt(3, 1), reference, attention_mask=mask),
    )


def test_prompts_elsewhere_ask_the_service() -> None:
    """With prompts="remote", and with spread, every layer is a round trip."""
    with failing_backend(num_workers=2) as (_, both, counting):
        with pytest.raises(ValueError, match="prompts"):
            RemoteCache(both, prompts="elsewhere")
        for options in ({"prompts": "remote"}, {"spread": 2}):
            world = world_of(both, **options)
            counting.calls.clear()
            cache = world.new_cache()
            forward(world, prompt(1, 6), cache)
            assert "Write" not in counting.calls
            assert cache._shared.opened().lengths(models.NUM_LAYERS - 1) == (6,)


# -- equal rows


@pytest.mark.parametrize("order", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 2]])
def test_equal_rows_are_sent_once(client: Client, order: list[int]) -> None:
    """Rows share the prompt's pages until they differ; tokens are those of rows apart."""
    ids = prompt(3, 8)[order]
    world, local = world_of(client), local_world()
    cache, reference = world.new_cache(), local.new_cache()
    assert_close(forward(world, ids, cache), forward(local, ids, reference))
    assert cache.batch_size == 4
    assert cache.session_id
    assert used_pages(client) == 2 * len(set(order))
    assert_stored(cache, reference)
    following = prompt(4, 2, seed=5)
    assert_close(forward(world, following, cache), forward(local, following, reference))
    cache.reorder_cache([3, 1, 0, 2])
    reference.reorder_cache(torch.tensor([3, 1, 0, 2]))
    assert_close(forward(world, following, cache), forward(local, following, reference))
    assert_stored(cache, reference)


def test_rows_that_part_in_a_later_layer(client: Client) -> None:
    """Equal in the first layer and not in the second, as with noise in a model: stored apart."""
    ids = prompt(1, 7).expand(3, -1)

    def disturb(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = hidden + torch.arange(3.0)[:, None, None]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    results = []
    caches = []
    for world in (world_of(client), local_world()):
        hook = world.model.model.layers[0].register_forward_hook(disturb)
        caches.append(world.new_cache())
        results.append(forward(world, ids, caches[-1]))
        results.append(forward(world, prompt(3, 1), caches[-1]))
        hook.remove()
    assert_close(results[0], results[2])
    assert_close(results[1], results[3])
    assert_stored(*caches)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1.0], [1.0]], [0, 0]),
        ([[1.0], [2.0]], None),
        ([[1.0], [2.0], [1.0]], [0, 1, 0]),
        ([[float("nan")], [float("nan")]], None),
        ([[1.0]], None),
    ],
)
def test_finding_equal_rows(rows: list[list[float]], expected: list[int] | None) -> None:
    """By all of k and v; what cannot be compared differs."""
    k = torch.tensor(rows)[:, None, None].expand(-1, 2, 3, 4).clone()
    assert equal_rows(k, k) == expected
    if expected is not None:
        other = k.clone()
        other[expected.index(0, 1), 1, 0, 0] += 1  # not where samples are taken
        assert equal_rows(k, other) != expected
        assert equal_rows(other, k) != expected


# -- failures


@pytest.mark.parametrize("carried_out", [False, True])
def test_an_upload_that_fails_is_an_error_later(carried_out: bool) -> None:
    """The next call says so, the cache rolls back to what is stored, and the step is fed again."""
    with failing_backend() as (_, client, failing):
        world, local = world_of(client), local_world()
        cache, reference = world.new_cache(), local.new_cache()
        ids = prompt(2, 9)
        failing.fail("Write", DeadlineExceeded, carried_out=carried_out, after=2)

        def two_steps() -> None:
            forward(world, ids, cache)
            forward(world, prompt(2, 1), cache)

        with pytest.raises(DeadlineExceeded):
            two_steps()
        assert cache.rollback() == 0
        assert_close(forward(world, ids, cache), forward(local, ids, reference))
        assert_close(forward(world, prompt(2, 1), cache), forward(local, prompt(2, 1), reference))
        assert_stored(cache, reference)


def test_a_full_service_refuses_the_first_layer() -> None:
    """Before the model has computed on: nothing is stored, and the layers say so."""
    with failing_backend() as (_, client, failing):
        world = world_of(client)
        cache = world.new_cache()
        failing.fail("Write", OutOfPages, carried_out=False)
        failing.fail("Append", OutOfPages, carried_out=False)
        with pytest.raises(OutOfPages):
            forward(world, prompt(2, 9), cache)
        assert failing.calls.count("Write") == 1
        assert cache.rollback() == 0
        assert used_pages(client) == 0


def test_reset_drops_what_is_under_way() -> None:
    """An error that nobody has heard of yet belongs to a session that is no more."""
    with failing_backend() as (_, client, failing):
        world, local = world_of(client), local_world()
        cache = world.new_cache()
        # Of the last layer: no later one asks how the upload went.
        last = world.model.config.num_hidden_layers - 1
        failing.fail("Write", DeadlineExceeded, carried_out=False, after=last)
        forward(world, prompt(1, 5), cache)
        cache.reset()
        assert failing.has_failed()
        assert_close(
            forward(world, prompt(2, 5), cache),
            forward(local, prompt(2, 5), local.new_cache()),
        )
        assert cache.session_id


def test_a_cache_that_is_dropped_frees_its_pages() -> None:
    """Also while its prompt is on its way."""
    with failing_backend() as (_, client, _failing):
        world = world_of(client)
        cache = world.new_cache()
        forward(world, prompt(1, 30), cache)
        uploads = cache._shared.uploads
        del cache
        uploads.settle()
        gc.collect()
        client.close()


def test_uploads_keep_their_order_and_end_their_thread() -> None:
    """One after the other; what comes behind a failure is not carried out."""

    class Counted:
        length = 10

        def set_length(self, length: int) -> None:
            self.length = length

    done: list[int] = []
    layers = [Counted() for _ in range(5)]
    uploads = Uploads()

    def write(number: int) -> None:
        if number == 3:
            raise OutOfPages("full")
        done.append(number)

    for number, layer in enumerate(layers):
        uploads.put(lambda n=number: write(n), layer, 10, 100)
    with pytest.raises(OutOfPages):
        uploads.finish()
    assert done == [0, 1, 2]
    assert [layer.length for layer in layers] == [10, 10, 10, 0, 0]
    uploads.finish()
    uploads.put(lambda: done.append(9), layers[0], 1, 100)
    uploads.finish()
    assert done == [0, 1, 2, 9]
    assert not uploads._running
