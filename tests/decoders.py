"""A small decoder that knows nothing of the service: a GPT in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvservice_client import DynamicCache, StaticCache


class GPTBlock(nn.Module):
    """Attention with an additive mask, and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        shape = (rows, tokens, self.heads, width // self.heads)
        return tuple(one.view(shape).transpose(1, 2) for one in (q, k, v))

    def join(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        x = x + self.project(attended.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """A language model that uses caches as GPT-2 does: positions, lengths and masks are its own."""

    def __init__(self, vocabulary: int = 50, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.max_positions = 32
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(self.max_positions, width)
        self.blocks = nn.ModuleList([GPTBlock(width, heads) for _ in range(2)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
        """Return logits [rows, tokens, vocabulary]."""
        past = 0 if cache is None else cache.get_seq_length()
        tokens = ids.shape[1]
        if past + tokens > self.max_positions:
            raise ValueError("too many positions")
        where = torch.arange(past, past + tokens)
        x = self.embed(ids) + self.positions(where)
        for layer, block in enumerate(self.blocks):
            q, k, v = block.split(x)
            if cache is not None:
                options: dict[str, Any] = {"cache_position": where}
                if isinstance(cache, StaticCache):
                    options["read_len"] = cache.get_seq_length(layer) + tokens
                k, v = cache.update(k, v, layer, options)
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            mask = torch.tril(torch.ones(k.shape[2], k.shape[2]))[where]
            scores = scores + (1 - mask) * -1e4
            x = block.join(x, scores.softmax(-1) @ v)
        return self.head(x)

    def generate(self, ids: torch.Tensor, new_tokens: int, cache: Any = None) -> torch.Tensor:
        """Return the ids with tokens added greedily: all at once at first, then one by one.

        With a cache, it has all tokens in the end.
        """
        return self._add(ids, self(ids, cache), new_tokens, cache)

    def go_on(self, ids: torch.Tensor, new_tokens: int, cache: DynamicCache | StaticCache) -> Any:
        """As `generate`, where another decoder has left a cache with all of the ids."""
        cache.crop(ids.shape[1] - 1)  # for the logits of the last one
        return self._add(ids, self(ids[:, -1:], cache), new_tokens, cache)

    def _add(
        self, ids: torch.Tensor, logits: torch.Tensor, new_tokens: int, cache: Any
    ) -> torch.Tensor:
        for _ in range(new_tokens):
            token = logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, token], dim=1)
            logits = self(token if cache is not None else ids, cache)
        return ids
