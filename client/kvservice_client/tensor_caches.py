"""Caches for decoders that attend themselves: keys and values come back as torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kvservice_client._client import Client
from kvservice_client._dynamic_cache import DynamicCache
from kvservice_client._static_cache import StaticCache
from kvservice_client._tensor_cache import Cache, Snapshot, States, TensorCache

__all__ = ["Cache", "DynamicCache", "EncoderDecoderCache", "StaticCache"]

FourStates = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class EncoderDecoderCache(Cache):
    """Two caches of one decoder: of its own tokens, and of the encoder's for cross attention.

    Appending, lengths and `crop` concern its own tokens only; whatever changes rows, and `reset`,
    both. If the second of two fails, the first is as before.

    Args:
        self_attention_cache: Of the decoder's own tokens.
        cross_attention_cache: Of the encoder's. Filled and read directly.
        is_updated: Per layer, whether the cross part is filled. None: where it has tokens.

    Attributes:
        self_attention_cache, cross_attention_cache, is_updated.
    """

    def __init__(
        self,
        self_attention_cache: TensorCache,
        cross_attention_cache: TensorCache,
        *,
        is_updated: Mapping[int, bool] | None = None,
    ) -> None:
        self.self_attention_cache = self_attention_cache
        self.cross_attention_cache = cross_attention_cache
        if is_updated is None:
            cross = cross_attention_cache
            is_updated = {layer: cross.get_seq_length(layer) > 0 for layer in range(len(cross))}
        self.is_updated = dict(is_updated)

    def update(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,
    ) -> States:
        """Update the decoder's own part."""
        return self.self_attention_cache.update(k, v, layer_idx, cache_kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the decoder's own tokens of a layer."""
        return self.self_attention_cache.get_seq_length(layer_idx)

    def get_max_cache_shape(self) -> int | None:
        """Return the most tokens that the decoder's own part can have. None: no bound."""
        return self.self_attention_cache.get_max_cache_shape()

    def crop(self, n: int) -> None:
        """Crop the decoder's own part."""
        self.self_attention_cache.crop(n)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i of both parts continue old row `beam_idx[i]`."""
        own, cross = self._parts
        rows = [own._read_rows(beam_idx), cross._read_rows(beam_idx)]
        self._both(lambda part: part._select(rows[part is cross]))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of both parts, in this order."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, r: int) -> None:
        """Repeat every row of both parts `r` times, the copies of a row next to each other."""
        self._both(lambda part: part._select(part._repeat_rows(r)))

    def reset(self) -> None:
        """Reset both parts. No layer's cross part counts as filled any more."""
        self._both(lambda part: part.reset())
        self.is_updated.clear()

    def __len__(self) -> int:
        return len(self.self_attention_cache)

    def __getitem__(self, layer_idx: int) -> FourStates:
        return (*self.self_attention_cache[layer_idx], *self.cross_attention_cache[layer_idx])

    def __iter__(self) -> Iterator[FourStates]:
        return (self[layer] for layer in range(len(self)))

    def to_legacy_cache(self) -> tuple[FourStates, ...] | tuple[States, ...]:
        """Return keys and values by layer: the decoder's own, then those for cross attention, if
        there are any yet."""
        return tuple(self) if len(self.cross_attention_cache) else tuple(self.self_attention_cache)

    @classmethod
    def from_legacy_cache(
        cls, past: Iterable[Sequence[torch.Tensor]] | None = None, *, client: Client | None = None
    ) -> EncoderDecoderCache:
        """Return two caches that hold what is given by layer: four tensors, or the first two."""
        layers = [tuple(states) for states in past or ()]
        own = DynamicCache.from_legacy_cache([(one[0], one[1]) for one in layers], client=client)
        cross = DynamicCache.from_legacy_cache(
            [(one[2], one[3]) for one in layers if len(one) > 2], client=client
        )
        return cls(own, cross)

    @property
    def _parts(self) -> tuple[TensorCache, TensorCache]:
        return self.self_attention_cache, self.cross_attention_cache

    def _both(self, change: Callable[[TensorCache], None]) -> None:
        """Change both parts, or neither."""
        own, cross = self._parts
        before = Snapshot(own)
        change(own)
        try:
            change(cross)
        except BaseException:
            before.put_back()
            raise
