"""StaticCache: of fixed size, written at given positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvservice.core.errors import GeometryMismatch, InvalidRequest, PositionOutOfRange
from kvservice.core.geometry import MAX_LAYERS
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


class StaticCache(TensorCache):
    """Keys and values in tensors of a fixed number of positions. For decoders that attend
    themselves.

    See `TensorCache` for what happens where. A layer's first update makes its tensors, and those
    of the layers before it that there are none of yet, as zeros, and takes room for all of its
    positions on the service, or fails there.

    A layer's *counter* says how many tokens were written, wherever they went. Counters are the
    client's: cutting them back leaves what is stored.

    Args:
        max_cache_len: Positions of a layer. Made an int.
        client: Where the session is opened, by the first update. None: the default one.
        replicas: Copies of every page.

    Raises:
        RuntimeError: No client is given, and none is set.

    Attributes:
        max_cache_len: As given.
    """

    def __init__(
        self, max_cache_len: int, *, client: Client | None = None, replicas: int = 1
    ) -> None:
        self.max_cache_len = int(max_cache_len)
        super().__init__(client, self.max_cache_len, replicas=replicas)
        self._cumulative_length: list[int] = []

    @classmethod
    def attach(
        cls,
        session_id: str,
        max_cache_len: int,
        *,
        lengths: Sequence[int] | None = None,
        client: Client | None = None,
        device: Any = None,
    ) -> StaticCache:
        """Go on where another cache has left its session, with the same content.

        Args:
            max_cache_len: As the other cache's.
            lengths: Each layer's counter. None: up to the last position that was ever written,
                which is right unless there was a crop, or positions were given. Where nothing is
                stored, as after a reset, there are no layers yet.
            device: Where the tensors are to be, as torch names it. None: host memory.

        Raises:
            SessionNotFound: It was released, or its lease has expired.
            InvalidRequest: It is not a session of such a cache. The session lives on.
        """
        cache = cls(max_cache_len, client=client)
        cache._adopt(session_id, device)
        try:
            cache._count(lengths)
        except BaseException:
            cache.detach()
            raise
        return cache

    def update(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,
    ) -> States:
        """Write tokens of a layer; return its keys and values, all positions of them.

        Args:
            k, v: [rows, kv_heads, new tokens, dim], of one shape.
            layer_idx: Any layer. Negative: from the end.
            cache_kwargs: `cache_position`, int32 or int64 [new tokens], a tensor: where they go;
                of equal ones the last wins. Anything else in its place is not looked at, and they
                go behind the layer's counter. `read_len`, an int above 0 and below
                `max_cache_len`: return only so many positions.

        Raises:
            PositionOutOfRange: A position that is not there, or the counter would exceed
                `max_cache_len`.
            GeometryMismatch: It does not fit what is stored.
            OutOfPages: The layer's first update, and there is no room for all of its positions.
            InvalidRequest, IndexError: Not such tensors; a layer that cannot be.
        """
        options = cache_kwargs or {}
        if not isinstance(options, Mapping):
            raise InvalidRequest(f"cache_kwargs must be a dict, got {cache_kwargs!r}")
        layer = find_layer(layer_idx, len(self.key_cache))
        if layer >= MAX_LAYERS:
            raise InvalidRequest(f"layer_idx must be below {MAX_LAYERS}, got {layer}")
        old_k, old_v = self._tensors_for(layer, k, v)
        positions = self._positions(layer, k.shape[2], options.get("cache_position"))
        # Of equal positions the last wins.
        newest = {position: token for token, position in enumerate(positions)}
        where, tokens = list(newest), list(newest.values())
        if len(where) < len(positions):
            k, v = k[:, :, tokens], v[:, :, tokens]
        index = torch.tensor(where, dtype=torch.int64, device=k.device)
        new_k, new_v = old_k.index_copy(2, index, k), old_v.index_copy(2, index, v)
        self._follow(layer)
        self._pages.store(layer, k, v, where)
        self._commit(layer, new_k, new_v, where)
        self._cumulative_length[layer] += len(positions)
        if layer_idx == 0:
            self._seen_tokens += len(positions)
        read_len = options.get("read_len")
        if isinstance(read_len, int) and 0 < read_len < self.max_cache_len:
            return new_k[:, :, :read_len], new_v[:, :, :read_len]
        return new_k, new_v

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return a layer's counter; 0 if there is no layer of this number."""
        layer = find_layer(layer_idx, len(self._cumulative_length))
        lengths = self._cumulative_length
        return lengths[layer] if layer < len(lengths) else 0

    def get_max_cache_shape(self) -> int:
        """Return the positions of a layer."""
        return self.max_cache_len

    def crop(self, n: int) -> None:
        """Cut the counters back. What is stored stays where it is.

        Args:
            n: Each layer's counter becomes at most this. Negative: so many fewer, but not less
                than 0.
        """
        most = as_int(n, "n")
        self._cumulative_length = [
            max(0, length + most) if most < 0 else min(length, most)
            for length in self._cumulative_length
        ]
        self._seen_tokens = self.get_seq_length()

    def reset(self) -> None:
        """Make all tensors zeros and all counters 0. Layers, rows and the room taken stay."""
        keys, values = self._map(torch.zeros_like)
        self._pages.reset()
        self._hold(keys, values)
        self._cumulative_length = [0] * len(keys)
        self._seen_tokens = 0

    def _count(self, lengths: Sequence[int] | None) -> None:
        """Set the counters. None: to what is stored."""
        counters = [self._pages.stored(layer) for layer in range(len(self))]
        if lengths is not None:
            given = [as_int(length, "lengths") for length in lengths]
            if not counters and not any(given):
                given = []  # the service knows no layer before its first tokens, or after a reset
            out = [length for length in given if not 0 <= length <= self.max_cache_len]
            if out or len(given) != len(counters):
                raise InvalidRequest(
                    f"lengths must be 0 to {self.max_cache_len}, for each of {len(counters)} "
                    f"layers, got {given}"
                )
            counters = given
        self._cumulative_length = counters
        self._seen_tokens = self.get_seq_length()

    def _positions(self, layer: int, num_tokens: int, given: Any) -> list[int]:
        """Return where new tokens go."""
        length = self.get_seq_length(layer)
        after = length + num_tokens
        if after > self.max_cache_len:
            raise PositionOutOfRange(
                f"layer {layer} would have {after} tokens, the cache is for {self.max_cache_len}",
                length=length,
                max_tokens=self.max_cache_len,
            )
        if not isinstance(given, torch.Tensor):
            return list(range(length, after))
        if given.dtype not in (torch.int32, torch.int64) or given.shape != (num_tokens,):
            raise InvalidRequest(
                f"cache_position must be int32 or int64 [{num_tokens}], got {given.dtype} "
                f"{list(given.shape)}"
            )
        positions: list[int] = given.tolist()
        for position in positions:
            if not 0 <= position < self.max_cache_len:
                raise PositionOutOfRange(
                    f"positions must be 0 to {self.max_cache_len - 1}, got {position}",
                    max_tokens=self.max_cache_len,
                )
        return positions

    def _tensors_for(self, layer: int, k: Any, v: Any) -> States:
        """Return the layer's tensors, which are zeros if there are none yet."""
        check_states(k, v)
        if k.shape != v.shape:
            raise GeometryMismatch(
                f"k and v must be of one shape, got {list(k.shape)} and {list(v.shape)}"
            )
        if self.max_cache_len < 0:
            raise PositionOutOfRange(f"the cache is for {self.max_cache_len} tokens")
        if layer < len(self.key_cache):
            check_fits("k", k, self.key_cache[layer])
            check_fits("v", v, self.value_cache[layer])
            return self.key_cache[layer], self.value_cache[layer]
        check_rows(k, self.key_cache)
        zeros = k.new_zeros((*k.shape[:2], self.max_cache_len, k.shape[3]))
        return zeros, zeros

    def _commit(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, positions: Sequence[int]
    ) -> None:
        while len(self.key_cache) <= layer:  # those left out, and its own place
            self.key_cache.append(torch.zeros_like(k))
            self.value_cache.append(torch.zeros_like(v))
            self._pages.told(len(self.key_cache) - 1, self.key_cache[-1], self.value_cache[-1])
            self._cumulative_length.append(0)
        self.key_cache[layer], self.value_cache[layer] = k, v
        stored = max([self._pages.stored(layer), *(position + 1 for position in positions)])
        self._pages.told(layer, k, v, stored)

    def _adopt(self, session_id: str, device: Any) -> None:
        super()._adopt(session_id, device)

        def whole(states: torch.Tensor) -> torch.Tensor:
            rows, heads, stored, dim = states.shape
            rest = states.new_zeros((rows, heads, self.max_cache_len - stored, dim))
            return torch.cat([states, rest], dim=2)

        self._hold(*self._map(whole))

    def _fetch(self, session: Session, device: Any) -> list[States]:
        if session.max_tokens != self.max_cache_len:
            raise InvalidRequest(
                f"the session is for {session.max_tokens} tokens in each row, the cache for "
                f"{self.max_cache_len}"
            )
        return super()._fetch(session, device)

    def _counters(self) -> Any:
        return self._seen_tokens, list(self._cumulative_length)

    def _restore(self, counters: Any) -> None:
        self._seen_tokens, self._cumulative_length = counters[0], list(counters[1])
