"""Caches whose sessions move from worker to worker under their decoders: nobody can tell."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvservice_client import DynamicCache, PagedCache, StaticCache
from kvservice_client.hf import RemoteCache, use_remote_attention
from kvservice_client.testing import eventually
from tests.backends import Backend, embedded_backend
from tests.e2e import models
from tests.e2e.scenarios import World, generate, padded
from tests.tokens import random_states

NUM_LAYERS = 2


@pytest.fixture
def backend() -> Iterator[Backend]:
    """A manager with two workers."""
    with embedded_backend(num_workers=2) as backend:
        yield backend


def move_all(backend: Backend) -> int:
    """Move every session to the other worker; return how many there were.

    One that is being opened may be at a worker before the manager has been told of it.
    """
    held = [
        (index, info.session_id)
        for index, worker in enumerate(backend.workers)
        for _, info in worker.list_sessions(None)
        if backend.manager._directory.keys_of(info.session_id)
    ]
    for index, session_id in held:
        backend.move(session_id, 1 - index)
    return len(held)


@contextmanager
def always_moving(backend: Backend) -> Iterator[Callable[[], int]]:
    """Move every session all the time; yields what counts the moves, and raises what they did."""
    stop, counts, failures = threading.Event(), list[int](), list[Exception]()

    def run() -> None:
        try:
            while not stop.is_set():
                counts.append(move_all(backend))
        except Exception as error:
            failures.append(error)

    def num_moves() -> int:
        if failures:
            raise failures[0]
        return sum(counts)

    mover = threading.Thread(target=run)
    mover.start()
    try:
        yield num_moves
    finally:
        stop.set()
        mover.join()
    assert not failures, failures


class Paced(transformers.LogitsProcessor):  # type: ignore[misc]
    """Lets no more than three tokens be generated for each move, however fast the model is."""

    def __init__(self, num_moves: Callable[[], int]) -> None:
        self._num_moves = num_moves
        self.num_tokens = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del input_ids
        self.num_tokens += 1
        eventually(lambda: 3 * self._num_moves() >= self.num_tokens, timeout_s=30.0)
        return scores


@pytest.mark.parametrize("strategy", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_generation_goes_on(backend: Backend, family: str, strategy: dict[str, Any]) -> None:
    """A model generates through moves what it generates with its own cache."""
    ids, mask = padded([11, 3, 7])
    remote, local = models.remote_twin(family), models.build(family)
    use_remote_attention(remote)
    cache = RemoteCache(backend.connect(), remote.config, page_size=2)
    with always_moving(backend) as num_moves:
        world, paced = World(family, remote, lambda: None), Paced(num_moves)
        options = {"attention_mask": mask, "logits_processor": [paced], **strategy}
        tokens, logits = generate(world, ids, cache, **options)
        assert paced.num_tokens == 12
        assert num_moves() >= 4
    theirs = transformers.DynamicCache(config=local.config)
    world = World(family, local, lambda: None)
    expected, wanted = generate(world, ids, theirs, attention_mask=mask, **strategy)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_tensor_caches_go_on(backend: Backend, kind: str) -> None:
    """What is written, selected and read back is the same through moves."""
    client = backend.connect()

    def make() -> Any:
        return DynamicCache(client=client) if kind == "dynamic" else StaticCache(40, client=client)

    moving, staying = make(), make()
    for step in range(6):
        for layer in range(NUM_LAYERS):
            states = random_states(1 + step % 3, rows=2)
            for mine, theirs in zip(
                *(one.update(*states, layer) for one in (moving, staying)), strict=True
            ):
                assert torch.equal(mine, theirs)
            assert move_all(backend) == 2
        if step == 3:
            for one in (moving, staying):
                one.reorder_cache(torch.tensor([1, 0]))
    bound = () if kind == "dynamic" else (40,)
    moved = type(moving).attach(moving.detach(), *bound, client=client)
    for (k, v), (expected_k, expected_v) in zip(moved, staying, strict=True):
        assert torch.equal(k, expected_k)
        assert torch.equal(v, expected_v)


def test_a_paged_cache_goes_on(backend: Backend) -> None:
    """Windows, roll-back and attention are the same through moves."""
    client = backend.connect()
    moving, staying = (
        PagedCache(
            NUM_LAYERS, max_seq_len=64, page_size=4, windows=[6, None], rollback=3, client=client
        )
        for _ in range(2)
    )
    rng = np.random.default_rng(0)
    for step in range(10):
        count, length = 1 + step % 4, moving.seq_len()
        for layer in range(NUM_LAYERS):
            q, k, v = (
                rng.standard_normal((1, heads, count, 8)).astype(np.float32) for heads in (4, 2, 2)
            )
            outs = [one.attention(layer, q, k, v, length, 0.35) for one in (moving, staying)]
            np.testing.assert_array_equal(*outs)
        move_all(backend)
        if step % 4 == 2:
            for one in (moving, staying):
                one.popn(2)
    assert moving.page_stats() == staying.page_stats()
