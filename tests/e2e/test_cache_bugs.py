"""What has gone wrong in other caches, and must not in this one."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from kvservice.core.errors import Unavailable
from kvservice_client import Client, Session
from kvservice_client.hf import CACHE_ARGUMENT, RemoteCache, use_remote_attention
from tests.e2e import models
from tests.e2e.conftest import used_pages
from tests.e2e.models import WINDOW
from tests.e2e.scenarios import World, forward, padded, prompt

REMOTE_AND_LOCAL = ("llama", "mistral", "gpt-oss", "gemma3")


def worlds(client: Client, family: str, mode: str = "attend") -> tuple[World, World]:
    """Return the same model twice: with remote caches and with local ones."""
    remote, local = models.remote_twin(family), models.build(family)
    use_remote_attention(remote)
    return (
        World(family, remote, lambda: RemoteCache(client, remote.config, mode=mode)),
        World(family, local, lambda: DynamicCache(config=local.config)),
    )


def model_for(family: str, mode: str) -> Any:
    """Return a model whose attention is where caches of this mode want it."""
    model = models.remote_twin(family)
    if mode == "attend":
        return use_remote_attention(model)
    model.set_attn_implementation(models.family(family).attention)
    return model


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1])
@pytest.mark.parametrize("family", ["mistral", "llama4"])
def test_at_the_edge_of_the_window(client: Client, family: str, length: int) -> None:
    """Windows and chunks are right exactly where a prompt, or decoding, reaches their size."""
    logits = []
    for world in worlds(client, family):
        cache = world.new_cache()
        logits.append(forward(world, prompt(1, length), cache))
        for step in range(3):
            logits.append(forward(world, prompt(1, 1, seed=step), cache))
    for ours, theirs in zip(logits[:4], logits[4:], strict=True):
        assert_close(ours, theirs)


def test_chunks_count_from_each_rows_first_token(client: Client) -> None:
    """Left padding shifts the chunks of its row only."""
    ids, mask = padded([2 * WINDOW + 1, WINDOW - 1, WINDOW + 3])
    ours, theirs = (
        forward(world, ids, world.new_cache(), attention_mask=mask)
        for world in worlds(client, "llama4")
    )
    real = mask.bool()
    assert_close(ours[real], theirs[real])


def test_a_row_does_not_depend_on_its_neighbours(client: Client) -> None:
    """Alone, or padded beside a longer one: the same."""
    world, _ = worlds(client, "mistral")
    ids, mask = padded([11, 5])
    both = forward(world, ids, world.new_cache(), attention_mask=mask)
    alone = forward(world, ids[1:, 6:], world.new_cache())
    assert_close(both[1:, 6:], alone)


def test_a_step_with_a_mask_for_fewer_tokens_is_refused(client: Client) -> None:
    """Continuing with a mask for the new tokens alone would shift it silently."""
    world, _ = worlds(client, "llama")
    for columns in (1, 9, 11):
        cache = world.new_cache()
        forward(world, prompt(1, 9), cache)
        with pytest.raises(ValueError, match=f"covers {columns} tokens, but there are 10"):
            forward(world, prompt(1, 1), cache, attention_mask=torch.ones(1, columns))
        forward(world, prompt(1, 1), cache, attention_mask=torch.ones(1, 10))
        assert cache.get_seq_length(3) == 10


def test_padding_is_not_forgotten(client: Client) -> None:
    """A later step without the mask, or with another one, is refused instead of attending to it."""
    world, _ = worlds(client, "llama")
    ids, mask = padded([6, 3])
    cache = world.new_cache()
    forward(world, ids, cache, attention_mask=mask)
    with pytest.raises(ValueError, match="padding"):
        forward(world, prompt(2, 1), cache)
    other = torch.cat([mask.flip(0), torch.ones(2, 1)], 1)
    with pytest.raises(ValueError, match="padding"):
        forward(world, prompt(2, 1), cache, attention_mask=other)
    cache.batch_select_indices([0])  # this row has none
    forward(world, prompt(1, 1), cache)


def test_padding_after_a_crop(client: Client) -> None:
    """What was padding and has been cropped may be a token the next time."""
    remote, local = worlds(client, "llama")
    results = []
    for world in (remote, local):
        cache = world.new_cache()
        ids, mask = padded([6, 3])
        forward(world, ids, cache, attention_mask=mask)
        cache.crop(-4)
        mask = torch.cat([mask[:, :2], torch.ones(2, 3)], 1)
        results.append(forward(world, prompt(2, 3), cache, attention_mask=mask))
    assert_close(results[0], results[1])


def test_tokens_that_turn_into_padding(client: Client) -> None:
    """What a finished row was fed is padding in the next turn."""
    results = []
    for world in worlds(client, "llama"):
        cache = world.new_cache()
        forward(world, prompt(2, 6), cache)
        mask = torch.ones(2, 8)
        mask[1, 4:6] = 0
        results.append(forward(world, prompt(2, 2, seed=1), cache, attention_mask=mask))
        mask = torch.cat([mask, torch.ones(2, 1)], 1)
        results.append(forward(world, prompt(2, 1, seed=2), cache, attention_mask=mask))
    assert_close(results[0], results[2])
    assert_close(results[1], results[3])


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_crop_leaves_no_stale_tokens(client: Client, family: str) -> None:
    """Cropping everything, and more, empties the cache: what follows is as the first."""
    world, _ = worlds(client, family)
    first = forward(world, prompt(1, 6, seed=1), world.new_cache())
    for removed in (6, 7, 1000):
        cache = world.new_cache()
        cache.activate_past_recording()
        forward(world, prompt(1, 6), cache)
        cache.crop(-removed)
        assert cache.get_seq_length() == 0
        assert_close(forward(world, prompt(1, 6, seed=1), cache), first)


@pytest.mark.parametrize("family", REMOTE_AND_LOCAL)
def test_mask_sizes_are_those_of_update(client: Client, family: str) -> None:
    """While past is recorded too: what `update` returns is what the mask was made for."""
    world, _ = worlds(client, family)
    cache = world.new_cache()
    cache.activate_past_recording()
    for step, tokens in enumerate([12, 1, 4, 3]):
        sizes = [cache.get_mask_sizes(tokens, layer)[0] for layer in range(len(cache))]
        forward(world, prompt(1, tokens, seed=step), cache)
        kept = [layer.keys.shape[-2] for layer in cache.layers]
        assert all(keys >= size - tokens for keys, size in zip(kept, sizes, strict=True))


def test_keys_and_values_are_not_mixed_up(client: Client) -> None:
    """Of different sizes, so that no copy can go the wrong way."""
    cache = RemoteCache(client, mode="fetch")
    k, v = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 12)
    cache.update(k, v, 0)
    cache.batch_repeat_interleave(2)
    cache.crop(-1)
    cache.reorder_cache([3, 0])
    assert torch.equal(cache.layers[0].keys, k[[1, 0], :, :4])
    assert torch.equal(cache.layers[0].values, v[[1, 0], :, :4])


def test_the_same_text_every_time(client: Client) -> None:
    """Whatever the page size, and whether pages are shared: windows and forks change no token."""
    model = models.remote_twin("mistral")
    use_remote_attention(model)
    ids = prompt(1, 13)
    texts = []
    for page_size in (1, 3, 16, 64):
        cache = RemoteCache(client, model.config, mode="attend", page_size=page_size)
        with torch.no_grad():
            model(ids[:, :-1], **{CACHE_ARGUMENT: cache})
        for each in (copy.deepcopy(cache), cache):
            texts.append(
                model.generate(ids, **{CACHE_ARGUMENT: each}, max_new_tokens=12, do_sample=False)
            )
    assert all(torch.equal(text, texts[0]) for text in texts)


@pytest.mark.filterwarnings("ignore::kvservice_client.hf.RemoteFetchWarning")
@pytest.mark.parametrize("mode", ["attend", "auto", "fetch"])
def test_windows_give_pages_back(client: Client, mode: str) -> None:
    """A long generation with windows holds no more pages than a short one, wherever its attention
    is computed; and it is the text of a local cache."""
    model = model_for("mistral", mode)
    used = []
    for tokens in (10, 50):
        cache = RemoteCache(client, model.config, mode=mode, page_size=4)
        options = {"max_new_tokens": tokens, "do_sample": False}
        text = model.generate(prompt(1, 9), **{CACHE_ARGUMENT: cache}, **options)
        assert torch.equal(text, models.build("mistral").generate(prompt(1, 9), **options))
        used.append(used_pages(client))
        cache.reset()
    assert used[1] <= used[0] + 1


@pytest.mark.parametrize("mode", ["attend", "fetch"])
def test_assisted_decoding_gives_pages_back(client: Client, mode: str) -> None:
    """Recording the past for a crop does not keep all of it."""
    model = model_for("mistral", mode)
    used = []
    for tokens in (10, 40):
        cache = RemoteCache(client, model.config, mode=mode, page_size=4)
        ids = prompt(1, 5).repeat(1, 3)
        options = {"max_new_tokens": tokens, "do_sample": False}
        text = model.generate(ids, **{CACHE_ARGUMENT: cache}, prompt_lookup_num_tokens=3, **options)
        assert torch.equal(text, models.build("mistral").generate(ids, **options))
        used.append(used_pages(client))
        cache.reset()
    assert used[1] <= used[0] + 2


def test_only_what_the_mode_says_travels_back(client: Client) -> None:
    """No key or value comes back while attention is remote, and no warning is due."""
    model = models.remote_twin("llama")
    use_remote_attention(model)
    before = sum(worker.read_bytes for worker in client.page_stats())
    cache = RemoteCache(client, model.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(prompt(1, 9), **{CACHE_ARGUMENT: cache}, max_new_tokens=6, do_sample=False)
    assert sum(worker.read_bytes for worker in client.page_stats()) == before


def test_one_call_a_layer_and_step(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Structural changes are one call, however many layers; the identity is none."""
    from kvservice_client import Session

    calls: list[str] = []
    for name in ("attend", "write", "read", "pop", "select", "fork", "release"):
        real = getattr(Session, name)

        def counted(
            self: Any, *args: Any, _name: str = name, _real: Any = real, **more: Any
        ) -> Any:
            calls.append(_name)
            return _real(self, *args, **more)

        monkeypatch.setattr(Session, name, counted)
    world, _ = worlds(client, "llama")
    cache = world.new_cache()
    forward(world, prompt(2, 5), cache)
    assert cache.session_id  # which waits for what is under way
    assert calls == ["write"] * models.NUM_LAYERS
    for change, expected in [
        (lambda: forward(world, prompt(2, 1), cache), ["attend"] * models.NUM_LAYERS),
        (lambda: cache.crop(-2), ["pop"]),
        (lambda: cache.crop(0), []),
        (lambda: cache.reorder_cache(torch.tensor([0, 1])), []),
        (lambda: cache.reorder_cache(torch.tensor([1, 1])), ["select"]),
        (lambda: copy.deepcopy(cache), ["fork"]),
        (lambda: cache.reset(), ["release"]),
    ]:
        calls.clear()
        change()
        assert calls == expected


def test_cross_attention_has_no_window(client: Client) -> None:
    """What the encoder said is kept whole, however small the window of the decoder's own tokens."""
    config = models.family("mistral").config()
    cache = EncoderDecoderCache(
        RemoteCache(client, config, mode="fetch", page_size=4),
        RemoteCache(client, mode="fetch", page_size=4),
    )
    said = [torch.randn(1, 2, 3 * WINDOW, 16) for _ in range(2)]
    cache.cross_attention_cache.update(*said, 0)
    for step in range(2 * WINDOW):
        states = torch.full((1, 2, 1, 16), float(step))
        cache.self_attention_cache.update(states, states, 0)
    assert cache.is_sliding == [True] * 4
    assert cache.cross_attention_cache.is_sliding == [False]
    assert cache.self_attention_cache.layers[0].keys.shape[2] == WINDOW - 1
    layer = cache.cross_attention_cache.layers[0]
    assert torch.equal(layer.keys, said[0])
    assert torch.equal(layer.values, said[1])


@pytest.mark.parametrize("call", ["read", "write"])
@pytest.mark.parametrize("mode", ["fetch", "auto"])
@pytest.mark.filterwarnings("ignore::kvservice_client.hf.RemoteFetchWarning")
def test_keys_and_values_that_do_not_come_are_an_error(
    client: Client, monkeypatch: pytest.MonkeyPatch, mode: str, call: str
) -> None:
    """A decoder never goes on with others; after a rollback it does, with the same text."""
    model = model_for("mistral", mode)
    world = World("mistral", model, lambda: RemoteCache(client, model.config, mode=mode))
    cache, fails = world.new_cache(), threading.Event()
    forward(world, prompt(1, 11), cache)
    real = getattr(Session, call)

    def fail(self: Session, layer: int, *args: Any, **options: Any) -> Any:
        if layer == 2 and fails.is_set():
            raise Unavailable("nobody answers")
        return real(self, layer, *args, **options)

    monkeypatch.setattr(Session, call, fail)
    fails.set()
    with pytest.raises(Unavailable):
        forward(world, prompt(1, 2, seed=1), cache)
    fails.clear()
    assert cache.rollback() == 11
    local = World("mistral", models.build("mistral"), lambda: None)
    ids = torch.cat([prompt(1, 11), prompt(1, 2, seed=1)], 1)
    wanted = forward(local, ids, DynamicCache(config=model.config))[:, 11:]
    assert_close(forward(world, prompt(1, 2, seed=1), cache), wanted)
