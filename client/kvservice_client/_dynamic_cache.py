"""DynamicCache: grows by appending, without a bound."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from kvservice.core.errors import InvalidRequest
from kvservice_client._client import Client
from kvservice_client._session import Session
from kvservice_client._tensor_cache import States, TensorCache
from kvservice_client._tensor_rules import (
    as_int,
    check_fits,
    check_rows,
    check_states,
    find_layer,
)


class DynamicCache(TensorCache):
    """Keys and values that grow by appending. For decoders that attend themselves.

    See `TensorCache` for what happens where. Layers come in the order 0, 1, 2, ... at first, all
    with the same rows; heads, dims and dtype are each layer's own.

    Args:
        client: Where the session is opened, by the first update. None: the default one.
        replicas: Copies of every page.

    Raises:
        RuntimeError: No client is given, and none is set.
    """

    def __init__(self, *, client: Client | None = None, replicas: int = 1) -> None:
        super().__init__(client, replicas=replicas)

    @classmethod
    def attach(
        cls, session_id: str, *, client: Client | None = None, device: Any = None
    ) -> DynamicCache:
        """Go on where another cache has left its session, with the same content.

        A layer without tokens takes the shape of one that has some, if such a one comes after it;
        else it is not there yet.

        Args:
            device: Where the tensors are to be, as torch names it. None: host memory.

        Raises:
            SessionNotFound: It was released, or its lease has expired.
            InvalidRequest: Its rows differ in length. The session lives on.
        """
        cache = cls(client=client)
        cache._adopt(session_id, device)
        return cache

    def _fetch(self, session: Session, device: Any) -> list[States]:
        layers = super()._fetch(session, device)
        while layers and not layers[-1][0].shape[2]:
            layers.pop()
        return layers

    def update(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,
    ) -> States:
        """Append to a layer; return all of its keys and values.

        Args:
            k, v: [rows, kv_heads, new tokens, dim], each with its own dim. The first ones of a
                layer are kept as they are, not copied.
            layer_idx: Of the layers there are, or the next one. Negative: from the end.
            cache_kwargs: Not looked at.

        Raises:
            GeometryMismatch: It does not fit what is stored.
            InvalidRequest: Not such tensors, or a layer was left out.
            IndexError: A negative layer that does not exist.
        """
        del cache_kwargs
        layer = find_layer(layer_idx, len(self.key_cache))
        if layer > len(self.key_cache):
            raise InvalidRequest(
                f"layers come one after the other: {len(self.key_cache)} is next, got {layer}"
            )
        check_states(k, v)
        length, all_k, all_v = 0, k, v
        if layer < len(self.key_cache):
            check_fits("k", k, self.key_cache[layer])
            check_fits("v", v, self.value_cache[layer])
            length = self.key_cache[layer].shape[-2]
            all_k = torch.cat([self.key_cache[layer], k], dim=-2)
            all_v = torch.cat([self.value_cache[layer], v], dim=-2)
        else:
            check_rows(k, self.key_cache)
        self._follow(layer)
        self._pages.store(layer, k, v, range(length, length + k.shape[-2]))
        self.key_cache[layer : layer + 1] = [all_k]
        self.value_cache[layer : layer + 1] = [all_v]
        self._pages.told(layer, all_k, all_v, all_k.shape[-2])
        if layer_idx == 0:
            self._seen_tokens += k.shape[-2]
        return all_k, all_v

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens of a layer; 0 if there is none of this number."""
        layer = find_layer(layer_idx, len(self.key_cache))
        return self.key_cache[layer].shape[-2] if layer < len(self.key_cache) else 0

    def get_max_cache_shape(self) -> None:
        """Return None: there is no bound."""

    def crop(self, n: int) -> None:
        """Cut every layer to `n` tokens, if layer 0 has more.

        Args:
            n: Negative: so many fewer than layer 0 has, but not less than none.
        """
        keep, length = as_int(n, "n"), self.get_seq_length()
        if keep < 0:
            keep = max(0, length + keep)
        if length <= keep:
            return
        keys, values = self._map(lambda states: states[:, :, :keep])
        self._follow()
        self._pages.pop(keep)
        self._hold(keys, values)
        self._seen_tokens = keep

    def reset(self) -> None:
        """Forget all layers. The next ones may have other rows, shapes and dtypes."""
        self._pages.reset()
        self.key_cache, self.value_cache = [], []
        self._seen_tokens = 0

    def to_legacy_cache(self) -> tuple[States, ...]:
        """Return keys and values by layer, the tensors themselves."""
        return tuple(self)

    @classmethod
    def from_legacy_cache(
        cls, past: Iterable[States] | None = None, *, client: Client | None = None
    ) -> DynamicCache:
        """Return a cache that holds keys and values given by layer. None: nothing."""
        cache = cls(client=client)
        for layer, (k, v) in enumerate(past or ()):
            cache.update(k, v, layer)
        return cache
