"""A padded batch whose cache another decoder takes over, or goes on from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvservice_client import Client
from kvservice_client.hf import RemoteCache, use_remote_attention
from tests.e2e import models
from tests.e2e.scenarios import World, forward, generate, padded

LENGTHS = [11, 3, 7]


def padded_turns() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids and mask of a left-padded prompt, and of it with a second, left-padded turn."""
    ids, mask = padded(LENGTHS)
    more_ids, more_mask = padded([2, 4, 1], seed=1)
    return ids, mask, torch.cat([ids, more_ids], 1), torch.cat([mask, more_mask], 1)


def take_over(cache: RemoteCache, way: str, client: Client, config: Any) -> RemoteCache:
    """Return another cache for the session, or of its prompt."""
    options = {"client": client, "config": config, "mode": "attend"}
    if way == "attach":
        return RemoteCache.attach(cache.detach(), **options)
    return RemoteCache.fork_from(cache.session_id, **options)


@pytest.mark.parametrize("spread", [1, 2])
@pytest.mark.parametrize("way", ["attach", "fork_from"])
@pytest.mark.parametrize("family", ["llama", "mistral", "llama4"])
def test_generation_goes_on(grpc_client: Client, family: str, way: str, spread: int) -> None:
    """The next turn is generated as by the local cache that has seen all, padding included."""
    ids, mask, all_ids, all_mask = padded_turns()
    remote, local = models.remote_twin(family), models.build(family)
    use_remote_attention(remote)
    cache: Any = RemoteCache(grpc_client, remote.config, mode="attend", spread=spread, page_size=2)
    world, ours = World(family, remote, lambda: None), cache
    forward(world, ids, cache, attention_mask=mask)
    cache = take_over(cache, way, grpc_client, remote.config)
    results = generate(world, all_ids, cache, attention_mask=all_mask)
    theirs = DynamicCache(config=local.config)
    world = World(family, local, lambda: None)
    forward(world, ids, theirs, attention_mask=mask)
    tokens, logits = generate(world, all_ids, theirs, attention_mask=all_mask)
    assert torch.equal(results[0], tokens)
    torch.testing.assert_close(results[1], logits, atol=1e-4, rtol=0)
    del ours


@pytest.mark.parametrize("way", ["attach", "fork_from"])
def test_padding_is_not_forgotten(client: Client, way: str) -> None:
    """A step without a mask, or with one that shows padding as tokens, is refused, as it would be
    by the first cache; and nothing changes by trying."""
    ids, mask, all_ids, all_mask = padded_turns()
    model = use_remote_attention(models.remote_twin("llama"))
    world = World("llama", model, lambda: None)
    first = RemoteCache(client, model.config, mode="attend")
    forward(world, ids, first, attention_mask=mask)
    cache = take_over(first, way, client, model.config)
    new = all_ids[:, ids.shape[1] :]
    with pytest.raises(ValueError, match="needs the attention_mask"):
        forward(world, new, cache)
    wrong = all_mask.clone()
    wrong[1] = 1
    with pytest.raises(ValueError, match="padding stays padding"):
        forward(world, new, cache, attention_mask=wrong)
    cache.rollback()
    logits = forward(world, new, cache, attention_mask=all_mask)
    local = World("llama", models.build("llama"), lambda: None)
    theirs = DynamicCache()
    forward(local, ids, theirs, attention_mask=mask)
    wanted = forward(local, new, theirs, attention_mask=all_mask)
    real = all_mask[:, ids.shape[1] :].bool()
    torch.testing.assert_close(logits[real], wanted[real], atol=1e-4, rtol=0)


def test_a_part_has_its_padding(client: Client) -> None:
    """Of a leading part, only what is in it; a part without padding needs no mask."""
    ids, mask = (side.flip(1) for side in padded(LENGTHS))  # at the right
    model = use_remote_attention(models.remote_twin("llama"))
    world = World("llama", model, lambda: None)
    first = RemoteCache(client, model.config, mode="attend")
    forward(world, ids, first, attention_mask=mask)
    part = RemoteCache.fork_from(first.session_id, 3, client=client, config=model.config)
    logits = forward(world, ids[:, 3:5], part)
    local = World("llama", models.build("llama"), lambda: None)
    wanted = forward(local, ids[:, :5], DynamicCache())[:, 3:]
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
