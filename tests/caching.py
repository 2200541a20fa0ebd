"""What tests of caches check, whichever cache it is."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvservice_client.testing import eventually
from tests.backends import Backend

Contents = list[tuple[torch.Tensor, torch.Tensor]]


def contents(cache: Any) -> Contents:
    """Return copies of all tensors of a cache."""
    return [(k.clone(), v.clone()) for k, v in cache]


def lengths(cache: Any) -> list[int]:
    return [cache.get_seq_length(layer) for layer in range(len(cache))]


def assert_same(cache: Any, expected: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Check that a cache holds these tensors, bit for bit."""
    assert len(cache) == len(expected)
    for (k, v), (expected_k, expected_v) in zip(cache, expected, strict=True):
        assert k.shape == expected_k.shape
        assert v.shape == expected_v.shape
        assert torch.equal(k, expected_k)
        assert torch.equal(v, expected_v)


def fails_without_change(
    cache: Any, error: type[BaseException], call: Callable[[], object]
) -> None:
    """Check that a call raises, and that the cache is as before."""

    def counters() -> Any:
        return lengths(cache), cache.seen_tokens, cache.session_id

    before, tensors = counters(), contents(cache)
    with pytest.raises(error):
        call()
    assert_same(cache, tensors)
    assert counters() == before


def assert_all_released(backend: Backend) -> None:
    """Wait until all sessions are gone, because nobody holds them any more."""

    def gone() -> bool:
        return not backend.num_sessions() and not backend.used_pages()

    try:
        eventually(gone, timeout_s=0.3)
    except AssertionError:
        gc.collect()  # an exception holds on to what it went through
        eventually(gone)
