"""Models to measure with, and pairs of decoders of the same model: one local, one remote."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from bench.report import seconds_of
from kvservice.config import cache_directory
from kvservice.demo.model import convert, find_converted, load
from kvservice_client import Client, RemoteCache, use_remote_attention
from kvservice_client.hf import CACHE_ARGUMENT


def smollm2() -> Any:
    """Return SmolLM2-135M-Instruct in float32: 30 layers, 9 query and 3 KV heads of 64."""
    folder = find_converted(cache_directory()) or convert(cache_directory())
    return load(folder)[1]


def wide() -> Any:
    """Return a model of random weights: 4 layers, 32 query and 8 KV heads of 128."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1 << 16,
    )
    return LlamaForCausalLM(config).eval()


class Decoder:
    """A model with a cache; attention is `sdpa` for a local one, `kvservice` for a remote one."""

    def __init__(
        self, model: Any, client: Client | None, *, replicas: int = 1, prompts: str = "auto"
    ) -> None:
        self._model = model
        self._client = client
        self._options = {"replicas": replicas, "prompts": prompts}
        self.cache: Any = None
        self._next: torch.Tensor | None = None

    @torch.inference_mode()
    def prefill(self, ids: torch.Tensor, chunk: int = 2048) -> float:
        """Begin anew with a prompt; return the seconds it takes."""
        self._use_attention()
        if self._client is None:
            self.cache = DynamicCache(config=self._model.config)
        else:
            self.cache = RemoteCache(
                self._client, self._model.config, mode="attend", **self._options
            )
        return seconds_of(lambda: [self.feed(part) for part in ids.split(chunk, dim=1)])

    @torch.inference_mode()
    def step(self) -> float:
        """Feed the token that the last step gave; return the seconds it takes."""
        self._use_attention()
        assert self._next is not None
        return seconds_of(lambda: self.feed(self._next))

    @torch.inference_mode()
    def turn(self, ids: torch.Tensor) -> tuple[float, float]:
        """Feed a prompt behind all that there is, until it is stored, and go back.

        Returns:
            The seconds that it takes, and those of this process' processor time.
        """
        self._use_attention()
        began = os.times()
        seconds = seconds_of(lambda: (self.feed(ids), self.cache.session_id))
        ended = os.times()
        self.cache.crop(-ids.shape[1])
        return seconds, ended.user + ended.system - began.user - began.system

    def end(self) -> None:
        """Let the cache go."""
        if self._client is not None and self.cache is not None:
            self.cache.reset()
        self.cache = None

    def feed(self, ids: Any) -> None:
        """Feed tokens."""
        out = self._model(
            input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: self.cache}
        )
        self._next = out.logits[:, -1:].argmax(-1)

    def _use_attention(self) -> None:
        if self._client is None:
            self._model.set_attn_implementation("sdpa")
        else:
            use_remote_attention(self._model)


def prompt(model: Any, length: int, num_rows: int = 1) -> torch.Tensor:
    """Return token ids of a prompt, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, model.config.vocab_size, (num_rows, length), generator=generator)
