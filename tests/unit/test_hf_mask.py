"""Masks: what is recognised as a pattern, and that the description says what the mask says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import masking_utils
from transformers.masking_utils import eager_mask, sdpa_mask

from kvservice_client._hf_mask import Pattern, RemoteMask, describe, recognise, remote_mask
from kvservice_client.hf import CACHE_ARGUMENT, use_remote_attention

LEFT = torch.tensor([2, 0])


def _third_only(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key % 3 == 0


PATTERNS = {
    "causal": (masking_utils.causal_mask_function, Pattern(causal=True)),
    "full": (masking_utils.bidirectional_mask_function, Pattern(causal=False)),
    "window": (
        masking_utils.sliding_window_causal_mask_function(5),
        Pattern(causal=True, window=5),
    ),
    "chunk": (
        masking_utils.chunked_causal_mask_function(3, LEFT),
        Pattern(causal=True, chunk=3, origins=LEFT),
    ),
}
OTHERS = {
    "window both ways": masking_utils.sliding_window_bidirectional_mask_function(5),
    "packed": masking_utils.and_masks(
        masking_utils.causal_mask_function,
        masking_utils.packed_sequence_mask_function(torch.zeros(2, 9)),
    ),
    "blocks": masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.blockwise_overlay(torch.zeros(2, 9))
    ),
    "two overlays": masking_utils.and_masks(
        masking_utils.sliding_window_causal_mask_function(5), _third_only
    ),
    "somebody's own": _third_only,
}


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_is_recognised(name: str) -> None:
    """Fails when transformers renames or rewrites its closures: then masks travel densely."""
    function, pattern = PATTERNS[name]
    assert recognise(function) == pattern


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_not(name: str) -> None:
    """A mask that is nearly a known pattern is not taken for one."""
    assert recognise(OTHERS[name]) is None


@pytest.mark.parametrize(
    ("creator", "config", "pattern"),
    [
        ("create_causal_mask", {}, Pattern(causal=True)),
        ("create_bidirectional_mask", {}, Pattern(causal=False)),
        ("create_sliding_window_causal_mask", {"sliding_window": 6}, Pattern(True, window=6)),
    ],
)
def test_models_ask_us(creator: str, config: dict[str, Any], pattern: Pattern) -> None:
    """What models call gives our description, with the 2-d mask as padding."""
    settings = transformers.LlamaConfig(**config)
    settings._attn_implementation = "kvservice"
    given = torch.tensor([[0, 1, 1], [1, 1, 1]])
    create = getattr(masking_utils, creator)
    mask = create(settings, torch.zeros(2, 3, 4), given, **{CACHE_ARGUMENT: None})
    assert isinstance(mask, RemoteMask)
    assert mask.pattern == pattern
    assert mask.shape == (2, 1, 3, 3)
    assert mask.padding is not None
    assert mask.padding.tolist() == [[True, False, False], [False, False, False]]


@pytest.mark.parametrize("function", [*(each for each, _ in PATTERNS.values()), _third_only])
@pytest.mark.parametrize("given", [None, torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]] * 2) > 0])
def test_computing_on_a_mask_gives_the_dense_one(function: Any, given: Any) -> None:
    """Whoever computes on the description gets what eager attention would have got."""
    asked = {
        "batch_size": 2,
        "q_length": 4,
        "kv_length": 9,
        "q_offset": 5,
        "kv_offset": 0,
        "mask_function": function,
        "attention_mask": given,
    }
    mask = remote_mask(**asked, dtype=torch.float32, device="cpu")
    dense = eager_mask(**asked, dtype=torch.float32)
    assert torch.equal(mask + 0.0, dense)
    assert torch.equal(mask[:, :, :, -3:], dense[:, :, :, -3:])
    assert torch.equal(mask.seen, sdpa_mask(**asked, allow_is_causal_skip=False))


def _mask(function: Any, queries: int, first: int, keys: int, given: Any = None) -> RemoteMask:
    mask: RemoteMask = remote_mask(2, queries, keys, first + keys - queries, first, function, given)
    return mask


def _describe(mask: Any, queries: int, first: int, keys: int) -> Any:
    return describe(
        mask, first_key=first, num_keys=keys, num_queries=queries, is_causal=True, window=None
    )


def test_patterns_travel_as_patterns() -> None:
    """No matrix is made for what has a name."""
    seen = _describe(_mask(PATTERNS["causal"][0], 2, 0, 9), 2, 0, 9)
    assert (seen.mask, seen.window, seen.query_position) == ("causal", None, 7)
    seen = _describe(_mask(PATTERNS["window"][0], 2, 3, 6), 2, 3, 6)
    assert (seen.mask, seen.window, seen.query_position) == ("causal", 5, 7)
    seen = _describe(_mask(PATTERNS["full"][0], 2, 0, 9), 2, 0, 9)
    assert (seen.mask, seen.query_position) == ("full", 9)
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9]) > 0
    seen = _describe(_mask(PATTERNS["chunk"][0], 2, 5, 4, padding), 2, 5, 4)
    assert (seen.mask, seen.chunk, seen.query_position) == ("chunk", 3, 7)


@pytest.mark.parametrize(
    ("name", "first", "why"),
    [
        ("causal", 4, "sees only the keys that a layer with a window returns"),
        ("full", 4, "likewise"),
        ("window", 6, "reaches further than the layer's own window"),
        ("chunk", 5, "counts from padding that was not told"),
    ],
)
def test_patterns_that_do_not_fit_travel_densely(name: str, first: int, why: str) -> None:
    """A pattern is only sent where it says all."""
    mask = _mask(PATTERNS[name][0], 2, first, 9 - first)
    seen = _describe(mask, 2, first, 9 - first)
    assert torch.equal(seen.mask, mask.seen), why


def test_a_callers_own_mask_travels_as_it_is() -> None:
    """Floats stay floats, integers are bools, and one row serves all queries."""
    floats = torch.zeros(1, 1, 2, 9)
    assert torch.equal(_describe(floats, 2, 0, 9).mask, floats)
    seen = _describe(torch.ones(1, 1, 1, 9, dtype=torch.int64), 2, 0, 9)
    assert seen.mask.dtype == torch.bool
    assert seen.mask.shape == (1, 1, 2, 9)


@pytest.mark.parametrize(
    ("mask", "queries"),
    [
        (torch.zeros(1, 1, 2, 8), 2),
        (torch.zeros(1, 1, 3, 9), 2),
        (torch.zeros(2, 9), 2),
        (_mask(PATTERNS["causal"][0], 2, 0, 8), 2),
        (_mask(PATTERNS["causal"][0], 2, 1, 8), 2),
        (remote_mask(2, 2, 9, 3, 0, PATTERNS["causal"][0]), 2),
    ],
    ids=["keys", "queries", "dimensions", "too few keys", "offset", "query offset"],
)
def test_a_mask_for_something_else_is_refused(mask: torch.Tensor, queries: int) -> None:
    """Never shifted, cut or broadcast to fit."""
    with pytest.raises(ValueError, match="mask"):
        _describe(mask, queries, 0, 9)


def test_without_a_mask_the_module_decides() -> None:
    """Models that make no mask say what they want by `is_causal` and `sliding_window`."""
    common = {"first_key": 0, "num_keys": 9, "num_queries": 2}
    seen = describe(None, **common, is_causal=True, window=4)
    assert (seen.mask, seen.window, seen.query_position) == ("causal", 4, 7)
    seen = describe(None, **common, is_causal=False, window=None)
    assert (seen.mask, seen.query_position) == ("full", 9)


def test_attention_and_mask_are_registered_together() -> None:
    """Without a mask function under the same name, causality is lost without a word."""
    assert use_remote_attention is not None
    assert "kvservice" in transformers.AttentionInterface().valid_keys()
    assert "kvservice" in masking_utils.AttentionMaskInterface().valid_keys()
