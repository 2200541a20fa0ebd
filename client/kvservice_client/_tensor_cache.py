"""What DynamicCache and StaticCache share: lists of tensors, by layer, with pages that follow."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from kvservice.core.errors import InvalidRequest
from kvservice_client._client import Client, current_client
from kvservice_client._session import Session
from kvservice_client._tensor_pages import TensorPages
from kvservice_client._tensor_rules import as_int, read_rows

States = tuple[torch.Tensor, torch.Tensor]
AnyCache = TypeVar("AnyCache", bound="TensorCache")


class Cache(ABC):
    """What a decoder may ask of any cache of keys and values."""

    @abstractmethod
    def update(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,
    ) -> States:
        """Take new keys and values of a layer; return all that its queries may see."""

    @abstractmethod
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens of a layer."""

    @abstractmethod
    def get_max_cache_shape(self) -> int | None:
        """Return the most tokens that a layer can have. None: no bound."""

    @abstractmethod
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue old row `beam_idx[i]`."""

    def get_usable_length(self, new: int, layer_idx: int = 0) -> int:
        """Return how many tokens of a layer can stay when `new` ones come, negative if those
        alone are too many."""
        most, length = self.get_max_cache_shape(), self.get_seq_length(layer_idx)
        return length if most is None or length + new <= most else most - new


class TensorCache(Cache):
    """Keys and values of each layer as local tensors, and the same on the service.

    The tensors are what a decoder gets: every change puts other tensors into the lists, so that
    those handed out before stay as they are. The pages are the copy that outlives the decoder. A
    step sends only its new tokens; whatever concerns all layers is one call.

    After a call that raises, tensors and counters are as before. If the service may have carried
    it out all the same, or the cache's owner has put tensors into the lists, the next call brings
    the pages back to what the tensors say.

    Not thread-safe.

    Attributes:
        key_cache, value_cache: By layer, [rows, kv_heads, positions, dim].
    """

    def __init__(
        self, client: Client | None, capacity: int | None = None, *, replicas: int = 1
    ) -> None:
        self.key_cache: list[torch.Tensor] = []
        self.value_cache: list[torch.Tensor] = []
        self._seen_tokens = 0
        client = current_client() if client is None else client
        self._pages = TensorPages(client, capacity, replicas)

    # -- the session

    @property
    def session_id(self) -> str | None:
        """The session's id, for `attach`; None before the first tokens are stored."""
        session = self._pages.session
        return None if session is None else session.id

    def detach(self) -> str:
        """Let go of the session without releasing it; it lives on until its lease ends.

        The tensors can still be read, but take no more updates; `reset` begins anew.

        Returns:
            The id, for `attach`.

        Raises:
            InvalidRequest: Nothing was stored yet.
        """
        self._follow()
        if self._pages.session is None:
            raise InvalidRequest("there is no session to let go of: nothing was stored yet")
        return self._pages.session.detach()

    # -- reading

    @property
    def seen_tokens(self) -> int:
        """Tokens of layer 0, as far as updates have named it by its number."""
        return self._seen_tokens

    def __len__(self) -> int:
        return len(self.key_cache)

    def __getitem__(self, layer_idx: int) -> States:
        layer = as_int(layer_idx, "layer_idx")
        if not 0 <= layer < len(self.key_cache):
            raise KeyError(
                f"Cache has {len(self.key_cache)} layers; no entry for layer {layer_idx}."
            )
        return self.key_cache[layer], self.value_cache[layer]

    def __iter__(self) -> Iterator[States]:
        return (self[layer] for layer in range(len(self)))

    # -- changing

    @abstractmethod
    def crop(self, n: int) -> None:
        """Cut back to `n` tokens. Negative: by so many."""

    @abstractmethod
    def reset(self) -> None:
        """Begin anew."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue old row `beam_idx[i]`.

        Args:
            beam_idx: int32 or int64, [any number of rows]; repeats allowed, negative ones count
                from the end.

        Raises:
            InvalidRequest: Not such a tensor, or a row that does not exist. Nothing has changed.
        """
        if self.key_cache:
            self._select(self._read_rows(beam_idx))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order. The same as `reorder_cache`."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, r: int) -> None:
        """Repeat every row `r` times, the copies of a row next to each other.

        Raises:
            InvalidRequest: `r` is no integer, or negative.
        """
        if self.key_cache:
            self._select(self._repeat_rows(r))

    def _read_rows(self, indices: Any) -> list[int]:
        return read_rows(indices, self.key_cache[0].shape[0]) if self.key_cache else []

    def _repeat_rows(self, r: Any) -> list[int]:
        times = as_int(r, "r")
        if times < 0:
            raise InvalidRequest(f"r must be at least 0, got {times}")
        rows = self.key_cache[0].shape[0] if self.key_cache else 0
        return [row for row in range(rows) for _ in range(times)]

    def _select(self, rows: Sequence[int]) -> None:
        if not self.key_cache:
            return
        index = torch.tensor(rows, dtype=torch.int64, device=self.key_cache[0].device)
        keys, values = self._map(lambda states: states.index_select(0, index.to(states.device)))
        self._follow()
        self._pages.select(rows)
        self._hold(keys, values)

    # -- for subclasses

    def _map(
        self, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return list(map(change, self.key_cache)), list(map(change, self.value_cache))

    def _follow(self, layer: int | None = None) -> None:
        self._pages.follow(self.key_cache, self.value_cache, layer)

    def _hold(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Hold these tensors from now on, which the service has been told of."""
        self.key_cache[:], self.value_cache[:] = keys, values
        for layer, states in enumerate(zip(keys, values, strict=True)):
            self._pages.told(layer, *states)

    def _adopt(self, session_id: str, device: Any) -> None:
        """Take a session over, with all that it stores."""
        session = self._pages.client.attach(session_id)
        try:
            layers = self._fetch(session, device)
        except BaseException:
            session.detach()  # what could not be read is not ours to release
            raise
        self._pages.adopt(session, layers)
        self.key_cache = [k for k, _ in layers]
        self.value_cache = [v for _, v in layers]
        self._seen_tokens = self._pages.stored(0)

    def _fetch(self, session: Session, device: Any) -> list[States]:
        """Return what a session stores, layer by layer.

        A layer without tokens is shaped like the first that has some; the service knows no more.
        """
        like = torch.empty(0, device=device)
        found: list[States | None] = []
        for layer in range(session.num_layers):
            lengths = set(session.lengths(layer))
            if len(lengths) > 1:
                raise InvalidRequest(
                    f"rows of layer {layer} differ in length, {sorted(lengths)}; this cache has "
                    "one length for all"
                )
            found.append(session.read(layer, like=like) if lengths != {0} else None)
        shapes = [states for states in found if states is not None]
        if not shapes:
            return []
        empty = (shapes[0][0][:, :, :0], shapes[0][1][:, :, :0])
        return [states if states is not None else empty for states in found]

    def _counters(self) -> Any:
        """Return what `_restore` needs to put counters back."""
        return self._seen_tokens

    def _restore(self, counters: Any) -> None:
        self._seen_tokens = counters

    def __deepcopy__(self: AnyCache, memo: dict[int, Any]) -> AnyCache:
        """Return an independent cache that shares the pages, copy-on-write. One call."""
        self._follow()
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            if name not in ("_pages", "key_cache", "value_cache"):
                setattr(twin, name, copy.deepcopy(value, memo))
        twin._pages = self._pages.fork()
        twin.key_cache, twin.value_cache = self._map(torch.Tensor.clone)
        for layer, (k, v) in enumerate(twin):
            twin._pages.told(layer, k, v, self._pages.stored(layer))
        return twin


class Snapshot:
    """A cache's tensors and counters, to put them back. The pages follow later."""

    def __init__(self, cache: TensorCache) -> None:
        self._cache = cache
        self._tensors = list(cache.key_cache), list(cache.value_cache)
        self._counters = cache._counters()

    def put_back(self) -> None:
        self._cache.key_cache[:], self._cache.value_cache[:] = self._tensors
        self._cache._restore(self._counters)
