"""The oracle: the same scenario with transformers' own cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers

from kvservice_client.hf import use_remote_attention
from tests.e2e import models, scenarios
from tests.e2e.scenarios import Results, World

# Absolute, on logits of size 1 to 10 in float32. Sums are taken in another order: about 1e-5.
TOLERANCE = 1e-4


@functools.cache
def expected(family: str, scenario: str) -> tuple[torch.Tensor, ...]:
    """Return what a scenario gives with a local cache."""
    model = models.build(family)
    world = World(family, model, lambda: transformers.DynamicCache(config=model.config))
    return tuple(scenarios.ALL[scenario](world))


def run(family: str, scenario: str, mode: str, new_cache: Callable[[Any], Any]) -> Results:
    """Run a scenario with caches of `mode`, which `new_cache` makes for a config."""
    model = models.remote_twin(family)
    if mode == "attend":
        use_remote_attention(model)
    else:
        model.set_attn_implementation(models.family(family).attention)
    return scenarios.ALL[scenario](World(family, model, lambda: new_cache(model.config)))


def difference(results: Results, wanted: tuple[torch.Tensor, ...]) -> str | None:
    """Say where results differ from what is wanted; None if they do not."""
    assert len(results) == len(wanted)
    for number, (ours, theirs) in enumerate(zip(results, wanted, strict=True)):
        if ours.shape != theirs.shape:
            return f"result {number}: shapes {tuple(ours.shape)} and {tuple(theirs.shape)}"
        if not ours.is_floating_point():
            if not torch.equal(ours, theirs):
                return f"result {number}: tokens {ours.tolist()} instead of {theirs.tolist()}"
            continue
        # Beam search fills the logits of finished rows with the same infinity.
        worst = float((ours - theirs).nan_to_num(0.0).abs().max())
        if worst > TOLERANCE:
            return f"result {number}: off by {worst:.1e}"
    return None


def assert_same(family: str, scenario: str, results: Results) -> None:
    """Fail if a scenario's results are not those of a local cache."""
    found = difference(results, expected(family, scenario))
    assert found is None, f"{family} {scenario}: {found}"
