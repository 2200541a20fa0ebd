"""PagedCache under a decoder of the Llama family, as an engine drives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvservice_client import Client, OutOfOrder, PagedCache
from kvservice_client.testing import dense_attention

Floats = npt.NDArray[np.float64]

VOCABULARY, HIDDEN, NUM_HEADS, NUM_KV_HEADS, DIM = 50, 16, 4, 2, 8
SCALE = DIM**-0.5

LLAMA = (None, None, None)
GEMMA = (4, 4, None)  # two local layers to each global one
MISTRAL = (5, 5, 5)
WINDOWS = {"llama": LLAMA, "gemma": GEMMA, "mistral": MISTRAL}


def unit(x: Floats) -> Floats:
    """Normalise to a mean square of 1, as RMS norm does."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def rotate(x: Floats, positions: npt.NDArray[np.int64]) -> Floats:
    """Rotate [heads, tokens, DIM] by absolute positions (RoPE)."""
    half = DIM // 2
    angles = positions[:, None] * 100.0 ** -(np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


@dataclass
class Decoder:
    """Random weights; in float64, but for what goes through a cache."""

    windows: tuple[int | None, ...]
    weights: list[dict[str, Floats]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)
        self.embedding = rng.standard_normal((VOCABULARY, HIDDEN))
        sizes = {"q": NUM_HEADS * DIM, "k": NUM_KV_HEADS * DIM, "v": NUM_KV_HEADS * DIM}
        for _ in self.windows:
            layer = {name: rng.standard_normal((HIDDEN, size)) for name, size in sizes.items()}
            layer["o"] = rng.standard_normal((NUM_HEADS * DIM, HIDDEN))
            self.weights.append(layer)

    def forward(self, ids: Sequence[int], first: int, cache: Any) -> Floats:
        """Return the logits after each of `ids`, whose positions begin at `first`."""
        x = self.embedding[list(ids)]
        positions = np.arange(first, first + len(ids))
        for layer, weights in enumerate(self.weights):
            normed = unit(x)
            q, k, v = (
                (normed @ weights[name]).reshape(len(ids), -1, DIM).swapaxes(0, 1)
                for name in ("q", "k", "v")
            )
            q, k = rotate(unit(q), positions), rotate(unit(k), positions)
            arrays = (array[None].astype(np.float32) for array in (q, k, v))
            out = cache.attention_opts(layer, *arrays, first, SCALE, self.windows[layer])
            x = x + out[0].swapaxes(0, 1).reshape(len(ids), -1) @ weights["o"]
        return np.asarray(unit(x) @ self.embedding.T, np.float64)


class Recomputing:
    """Stands where a cache does, for a decoder that feeds all its tokens each time."""

    def attention_opts(
        self, layer: int, q: Any, k: Any, v: Any, pos: int, scale: float, window: int | None
    ) -> Floats:
        assert pos == 0
        distance = np.subtract.outer(np.arange(q.shape[2]), np.arange(k.shape[2]))
        visible = (distance >= 0) & (distance < (window or 10**6))
        return dense_attention(q[0], k[0], v[0], visible=visible, scale=scale)[None]


def recomputed(decoder: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """Generate greedily without any cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(decoder.forward(ids, 0, Recomputing())[-1].argmax()))
    return ids[len(prompt) :]


class Engine:
    """Generates with one cache, which it reuses for what prompts have in common."""

    def __init__(self, client: Client, windows: tuple[int | None, ...], *, chunk: int = 0) -> None:
        self.decoder, self.client, self.chunk = Decoder(windows), client, chunk
        self.cache = self.new_cache()
        self.history: list[int] = []  # what the cache holds
        self.fed = 0  # tokens that prompts have cost

    def new_cache(self) -> PagedCache:
        windows = self.decoder.windows
        return PagedCache(
            len(windows), max_seq_len=128, page_size=4, windows=windows, client=self.client
        )

    def feed(self, ids: Sequence[int]) -> Floats:
        logits = self.decoder.forward(ids, self.cache.seq_len(), self.cache)
        self.history += ids
        assert self.cache.seq_len() == len(self.history)
        return logits[-1]

    def prefill(self, ids: Sequence[int]) -> Floats:
        self.fed += len(ids)
        size = self.chunk or len(ids)
        return [self.feed(ids[first : first + size]) for first in range(0, len(ids), size)][-1]

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Generate greedily. The last token is not in the cache."""
        shared = 0
        while shared < min(len(prompt) - 1, len(self.history)) and (
            prompt[shared] == self.history[shared]
        ):
            shared += 1
        need = len(self.history) - shared
        if need and self.cache.popn(need) != need:
            self.cache, shared = self.new_cache(), 0
        self.history = self.history[:shared]
        logits = self.prefill(prompt[shared:])
        ids = [int(logits.argmax())]
        while len(ids) < count:
            ids.append(int(self.feed(ids[-1:]).argmax()))
        return ids


def prompt_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


@pytest.mark.parametrize("chunk", [0, 1, 3, 8, 512])
@pytest.mark.parametrize("model", sorted(WINDOWS))
def test_chunks_of_a_prompt(client: Client, model: str, chunk: int) -> None:
    """A prompt in chunks of any size gives the tokens that recomputing everything gives."""
    engine = Engine(client, WINDOWS[model], chunk=chunk)
    prompt = prompt_of(1, 13)
    assert engine.generate(prompt, 12) == recomputed(engine.decoder, prompt, 12)


@pytest.mark.parametrize("model", sorted(WINDOWS))
def test_reuse_of_a_prefix(client: Client, model: str) -> None:
    """Prompts of a conversation keep what they share; a refused roll-back costs only time."""
    engine = Engine(client, WINDOWS[model], chunk=5)
    first = prompt_of(2, 11)
    answer = engine.generate(first, 6)
    prompts = [
        [*first, *answer, *prompt_of(3, 4)],  # the next turn
        [*first, *prompt_of(4, 5)],  # another one in its place
        first,  # the same again: at least its last token is fed
        prompt_of(5, 8),  # nothing in common
    ]
    fed = []
    for prompt in prompts:
        engine.fed = 0
        assert engine.generate(prompt, 6) == recomputed(engine.decoder, prompt, 6)
        fed.append(engine.fed)
    # Appending is free; going back is so only without windows.
    assert fed == ([5, 5, 1, 8] if model == "llama" else [5, 16, 11, 8])


@pytest.mark.parametrize("model", sorted(WINDOWS))
def test_speculative_decoding(client: Client, model: str) -> None:
    """Drafts, some of them wrong, give the tokens of plain decoding, past all windows."""
    decoder, rollback = Decoder(WINDOWS[model]), 3
    cache = PagedCache(
        3, max_seq_len=64, page_size=4, windows=decoder.windows, rollback=rollback, client=client
    )
    prompt, rng = prompt_of(6, 9), np.random.default_rng(0)
    expected = recomputed(decoder, prompt, 24)
    ids = [int(decoder.forward(prompt, 0, cache)[-1].argmax())]
    while len(ids) < 20:
        num_right = int(rng.integers(0, rollback + 1))
        draft = expected[len(ids) : len(ids) + num_right] + prompt_of(7, rollback - num_right)
        logits = decoder.forward([ids[-1], *draft], cache.seq_len(), cache)
        verified = [int(row.argmax()) for row in logits]
        accepted = 0
        while accepted < rollback and draft[accepted] == verified[accepted]:
            accepted += 1
        assert accepted >= num_right
        assert cache.popn(rollback - accepted) == rollback - accepted
        ids += verified[: accepted + 1]
        assert cache.seq_len() == len(prompt) + len(ids) - 1
    assert ids == expected[: len(ids)]


def test_positions_must_follow(client: Client) -> None:
    """A decoder that has lost count of its cache is told so."""
    engine = Engine(client, GEMMA)
    engine.generate(prompt_of(8, 5), 2)
    with pytest.raises(OutOfOrder):
        engine.decoder.forward([1], 5, engine.cache)
    engine.feed([1])
