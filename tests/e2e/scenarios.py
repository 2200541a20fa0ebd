"""What a decoder does with a cache: every decoding strategy, and the recipes that people follow.

A scenario takes a model, and a way to get an empty cache; it returns tensors. Run with a local
cache and with a remote one, they must be equal: integers exactly, floats within rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvservice_client.hf import CACHE_ARGUMENT
from tests.e2e import models
from tests.e2e.models import PAD, VOCAB

Results = list[torch.Tensor]


@dataclass(frozen=True)
class World:
    """A model of a family, and empty caches for it."""

    family: str
    model: Any
    new_cache: Callable[[], Any]


def prompt(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Return i64[rows, tokens] token ids without padding."""
    return torch.randint(2, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def padded(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask of a left-padded batch."""
    width = max(lengths)
    ids = prompt(len(lengths), width, seed)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : width - length] = PAD
        mask[row, : width - length] = 0
    return ids, mask


def generate(world: World, ids: torch.Tensor, cache: Any, new: int = 12, **options: Any) -> Results:
    """Generate with `new` tokens; return sequences, and the logits that led to them."""
    torch.manual_seed(0)
    out = world.model.generate(
        ids,
        max_new_tokens=new,
        return_dict_in_generate=True,
        output_logits=True,
        **{CACHE_ARGUMENT: cache, "do_sample": False, **options},
    )
    return [out.sequences, torch.stack(out.logits)]


@torch.no_grad()
def forward(world: World, ids: torch.Tensor, cache: Any, **options: Any) -> torch.Tensor:
    """Feed tokens by hand; return their logits."""
    logits: torch.Tensor = world.model(
        ids, use_cache=True, **{CACHE_ARGUMENT: cache}, **options
    ).logits
    return logits


def follow(world: World, cache: Any, logits: torch.Tensor, steps: int) -> Results:
    """Decode greedily by hand after `logits`; return tokens and logits."""
    tokens = []
    for _ in range(steps):
        tokens.append(logits[:, -1].argmax(-1, keepdim=True))
        logits = forward(world, tokens[-1], cache)
    return [torch.cat(tokens, 1), logits]


# -- generate()


def greedy(world: World) -> Results:
    return generate(world, prompt(1, 13), world.new_cache(), new=16)


def leftpad_b3(world: World) -> Results:
    ids, mask = padded([11, 3, 7])
    return generate(world, ids, world.new_cache(), attention_mask=mask, new=14)


def beam4(world: World) -> Results:
    return generate(world, prompt(1, 11, seed=4), world.new_cache(), num_beams=4)


def beam4_padded(world: World) -> Results:
    ids, mask = padded([9, 4, 12], seed=1)
    options = {"num_beams": 4, "num_return_sequences": 2, "attention_mask": mask}
    return generate(world, ids, world.new_cache(), **options)


def beam_sample(world: World) -> Results:
    options = {"num_beams": 3, "do_sample": True, "top_k": 20}
    return generate(world, prompt(2, 9, seed=2), world.new_cache(), **options)


def sampling_3(world: World) -> Results:
    options = {"do_sample": True, "num_return_sequences": 3, "top_k": 0}
    return generate(world, prompt(1, 10, seed=3), world.new_cache(), **options)


def assisted_weak(world: World) -> Results:
    options = {"assistant_model": models.weak_draft(world.family)}
    return generate(world, prompt(1, 9, seed=5), world.new_cache(), new=14, **options)


def assisted_twin(world: World) -> Results:
    options = {"assistant_model": models.twin_draft(world.family)}
    return generate(world, prompt(1, 9, seed=6), world.new_cache(), new=20, **options)


def assisted_sampling(world: World) -> Results:
    options = {"assistant_model": models.twin_draft(world.family), "do_sample": True}
    return generate(world, prompt(1, 9, seed=7), world.new_cache(), new=14, **options)


def prompt_lookup(world: World) -> Results:
    ids = prompt(1, 6, seed=8).repeat(1, 3)
    return generate(world, ids, world.new_cache(), new=16, prompt_lookup_num_tokens=4)


def chunked_prefill(world: World) -> Results:
    ids, mask = padded([17, 12], seed=9)
    cache = world.new_cache()
    return generate(world, ids, cache, attention_mask=mask, prefill_chunk_size=5)


def three_turns(world: World) -> Results:
    """Each turn hands over all tokens so far and the same cache."""
    cache, ids, results = world.new_cache(), prompt(1, 9, seed=10), []
    for turn in range(3):
        results += generate(world, ids, cache, new=6)
        ids = torch.cat([results[-2], prompt(1, 3 + turn, seed=20 + turn)], 1)
    return results


def three_turns_padded(world: World) -> Results:
    """As above with two rows, and padding in the middle from the second turn on."""
    cache, results = world.new_cache(), []
    ids, mask = padded([8, 5], seed=11)
    for turn in range(3):
        results += generate(world, ids, cache, attention_mask=mask, new=5)
        more_ids, more_mask = padded([2, 4], seed=30 + turn)
        ids = torch.cat([results[-2], more_ids], 1)
        mask = torch.cat([mask, torch.ones(2, ids.shape[1] - mask.shape[1] - 4), more_mask], 1)
        mask = mask.long()
    return results


# -- recipes


def deepcopy_prefix(world: World) -> Results:
    """One prompt, three continuations on copies, then one on the original."""
    cache, head = world.new_cache(), prompt(1, 10, seed=12)
    results = [forward(world, head, cache)]
    for turn in range(3):
        ids = torch.cat([head, prompt(1, 4, seed=40 + turn)], 1)
        results += generate(world, ids, copy.deepcopy(cache), new=6)
    ids = torch.cat([head, prompt(1, 5, seed=50)], 1)
    return results + generate(world, ids, cache, new=6)


def deepcopy_interleaved(world: World) -> Results:
    """Copies, and copies of copies, which take turns."""
    cache = world.new_cache()
    logits = forward(world, prompt(1, 11, seed=13), cache)
    caches = [cache, copy.deepcopy(cache)]
    caches.append(copy.deepcopy(caches[1]))
    results: Results = [logits]
    for step in range(6):
        for number, each in enumerate(caches):
            token = prompt(1, 1, seed=60 + 10 * number + step)
            results.append(forward(world, token, each))
        if step == 2:
            caches.append(copy.deepcopy(caches[2]))
    return results


def _rows_by_hand(world: World, rows: int) -> Results:
    cache = world.new_cache()
    logits = forward(world, prompt(rows, 10, seed=14), cache)
    cache.batch_repeat_interleave(3)
    results = [forward(world, prompt(3 * rows, 2, seed=15), cache)]
    cache.reorder_cache(torch.arange(3 * rows).flip(0))
    results.append(forward(world, prompt(3 * rows, 1, seed=16), cache))
    cache.batch_select_indices(torch.tensor([2, 0]))
    results.append(forward(world, prompt(2, 1, seed=17), cache))
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    results.append(forward(world, prompt(3, 3, seed=18), cache))
    return [logits, *results]


def rows_by_hand_b1(world: World) -> Results:
    return _rows_by_hand(world, 1)


def rows_by_hand_b2(world: World) -> Results:
    return _rows_by_hand(world, 2)


def crop_by_hand(world: World) -> Results:
    """Several updates between crops, past the window, and crop(0)."""
    cache = world.new_cache()
    cache.activate_past_recording()
    results = [forward(world, prompt(1, 12, seed=70), cache)]
    for step, (tokens, removed) in enumerate([(3, 2), (4, 4), (1, 0), (2, 1), (5, 3), (1, 1)]):
        results.append(forward(world, prompt(1, tokens, seed=71 + step), cache))
        results.append(forward(world, prompt(1, 2, seed=81 + step), cache))
        cache.crop(-removed)
        cache.crop(0)
    return results + follow(world, cache, results[-1], 4)


def reset_reuse(world: World) -> Results:
    """The cache serves another batch after a reset."""
    cache = world.new_cache()
    results = [forward(world, prompt(2, 11, seed=90), cache)]
    cache.reset()
    return results + generate(world, prompt(1, 7, seed=91), cache, new=8)


def tree_mask(world: World) -> Results:
    """A tree of candidates in one forward pass, by a mask of the caller's own."""
    cache = world.new_cache()
    results = [forward(world, prompt(1, 3, seed=92), cache)]
    parents = [-1, 0, 0, 1]
    lowest = torch.finfo(torch.float32).min
    mask = torch.full((1, 1, 4, 7), lowest)
    mask[..., :3] = 0.0
    depths = []
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        mask[0, 0, node, 3 + node] = 0.0
        while parent >= 0:
            mask[0, 0, node, 3 + parent] = 0.0
            parent = parents[parent]
    positions = 3 + torch.tensor([depths])
    options = {"attention_mask": mask, "position_ids": positions}
    return [*results, forward(world, prompt(1, 4, seed=93), cache, **options)]


def early_initialization(world: World) -> Results:
    """Layers are told their shapes before the first token."""
    cache, config = world.new_cache(), world.model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache.early_initialization(2, heads, dim, torch.float32, torch.device("cpu"))
    assert cache.is_initialized or not len(cache)
    return generate(world, prompt(2, 9, seed=94), cache, new=6)


ALL: dict[str, Callable[[World], Results]] = {
    scenario.__name__: scenario
    for scenario in (
        *(greedy, leftpad_b3, beam4, beam4_padded, beam_sample, sampling_3),
        *(assisted_weak, assisted_twin, assisted_sampling, prompt_lookup, chunked_prefill),
        *(three_turns, three_turns_padded, deepcopy_prefix, deepcopy_interleaved),
        *(rows_by_hand_b1, rows_by_hand_b2, crop_by_hand, reset_reuse, tree_mask),
        early_initialization,
    )
}
