"""Hugging Face transformers with its keys and values on the service.

    model.generate(**inputs, cache=RemoteCache(client, model.config))

`RemoteCache` is a cache that transformers takes like its own. `use_remote_attention` sets a
model's attention to 'kvservice', which this module registers: then q, k and v of the new tokens
travel, the attention output comes back, and K and V never do.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import torch

from kvservice_client._client import Client, current_client
from kvservice_client._hf_compat import CACHE_ARGUMENT, DynamicCache
from kvservice_client._hf_layer import RemoteLayer
from kvservice_client._hf_models import layers_of, remote_layer, use_remote_attention
from kvservice_client._hf_session import OpenOptions, RemoteFetchWarning, SharedSession
from kvservice_client._session import Session

__all__ = ["CACHE_ARGUMENT", "RemoteCache", "RemoteFetchWarning", "use_remote_attention"]

MODES: Final = ("attend", "fetch", "auto")
PROMPTS: Final = ("auto", "local", "remote")


class RemoteCache(DynamicCache):  # type: ignore[misc]
    """A transformers cache whose keys and values are on the service.

    The first update opens the session, with the batch's rows. Everything that concerns all layers
    (crop, reorder_cache, deepcopy, ...) is one call, however many layers there are.

    Args:
        client: Where sessions are opened. None: the default one (see `use`).
        config: The model's, so that layers with a window free what no query sees any more, and
            layers without keys and values are told apart. None: all layers are full; right for
            the cross-attention cache of an encoder-decoder.
        mode: "attend": keys and values never come back; a model that computes on them itself is
            refused. "fetch": `update` returns real keys and values, for models that do their own
            attention. "auto": attention runs on the service where the model's is 'kvservice';
            elsewhere keys and values are fetched when first touched, with a warning.
        page_size: Tokens in a page.
        max_tokens: Bound on the tokens of a row. None: no bound.
        reserve_tokens: Tokens of a row for which room is promised from the start. None: none.
        ttl_s: Seconds that the session outlives its last call.
        replicas: Copies of every page.
        spread: Workers that share the first tokens.
        prompts: Where prompts are attended to, meaning several tokens at a time. "auto": with
            nothing before them in this process, while their keys and values are sent; behind other
            tokens where the pages are, unless rows that are equal can be one. "local": behind
            other tokens too they attend to each other in this process, and only to those before
            them where the pages are; for decoders that compute faster than workers, or have cores
            of their own. "remote": where the pages are, as all else; better where the workers
            compute faster, and what is done in any case with `spread`.
        offloading: False. Some models (T5Gemma) make a cross-attention cache of the class that
            they find, and say so; it is opened at the default client.

    Raises:
        TypeError: The client is something else, or `offloading` is asked for.
        ValueError: An unknown mode, or a config with layers whose state is not keys and values.

    One owner: as with any cache, one generation at a time may use it, and `generate` appends to
    the cache that it is given. To keep a prompt, hand out `copy.deepcopy(cache)` or `fork_from`.
    """

    def __init__(
        self,
        client: Client | None = None,
        config: Any = None,
        *,
        mode: str = "auto",
        page_size: int = 16,
        max_tokens: int | None = None,
        reserve_tokens: int | None = None,
        ttl_s: float = 60.0,
        replicas: int = 1,
        spread: int = 1,
        prompts: str = "auto",
        offloading: bool = False,
    ) -> None:
        if client is not None and not isinstance(client, Client):
            raise TypeError(
                f"RemoteCache takes the client first, then the config; got {type(client).__name__}"
            )
        if offloading:
            raise TypeError("offloading has no meaning here: keys and values are on the service")
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if prompts not in PROMPTS:
            raise ValueError(f"prompts must be one of {', '.join(PROMPTS)}, got {prompts!r}")
        options = OpenOptions(page_size, max_tokens, reserve_tokens, ttl_s, replicas, spread)
        client = current_client() if client is None else client
        super().__init__()
        self._shared = SharedSession(client, mode, options, prompts)
        self.layers = [] if config is None else layers_of(config, self._shared)

    # -- sessions

    @classmethod
    def attach(
        cls,
        session_id: str,
        *,
        client: Client | None = None,
        config: Any = None,
        mode: str = "auto",
        prompts: str = "auto",
    ) -> RemoteCache:
        """Take over a session that another cache has left, at its stored length.

        After a crash in the middle of a step, or the loss of a worker, call `rollback` next: it
        says how many tokens still hold.

        Raises:
            SessionNotFound: It was released or has expired.
            ValueError: The session does not fit the config, or its rows differ in length.
        """
        cache = cls(client, config, mode=mode, prompts=prompts)
        cache._adopt(cache._shared.client.attach(session_id))
        return cache

    @classmethod
    def fork_from(
        cls,
        session_id: str,
        token_count: int | None = None,
        *,
        client: Client | None = None,
        config: Any = None,
        mode: str = "auto",
        prompts: str = "auto",
    ) -> RemoteCache:
        """Begin with the first `token_count` tokens of another session (None: all), sharing its
        pages. The other one goes on undisturbed.

        Raises:
            SessionNotFound: It was released or has expired.
            PositionOutOfRange: It is shorter, or a window has evicted what would be seen.
            ValueError: The session does not fit the config, or its rows differ in length.
        """
        cache = cls(client, config, mode=mode, prompts=prompts)
        cache._adopt(cache._shared.client.fork(session_id, token_count))
        return cache

    @property
    def session_id(self) -> str:
        """The session's id, for `attach` and `fork_from`.

        Raises:
            RuntimeError: There is no session before the first update, or after `detach`.
        """
        if self._shared.session is None:
            raise RuntimeError("this cache has no session: its first update opens one")
        return self._shared.opened().id

    def detach(self) -> str:
        """Let go of the session without releasing it; return its id. The cache is of no more use.

        The session lives for its ttl, and longer if somebody attaches to it.
        """
        session_id = self.session_id
        self._flush()
        self._shared.opened().detach()
        self._shared.session = None
        self._shared.detached = True
        return session_id

    def _adopt(self, session: Session) -> None:
        shared = self._shared
        try:
            if not self.layers:
                for window in session.windows:
                    self.layers.append(remote_layer(shared, window))
                while len(shared.windows) < session.num_layers:
                    self.layers.append(RemoteLayer(shared))
            _check_windows(shared.windows, session)
            lengths = [_row_length(session, layer.index) for layer in self._remote()]
        except BaseException:
            session.detach()  # what does not fit is not ours to release
            raise
        shared.session = session
        shared.adopt_padding(session.padding())
        shared.step_start = None
        for layer, length in zip(self._remote(), lengths, strict=True):
            layer.set_length(length)
            layer.used = length > 0
        shared.floor = max(lengths, default=0)

    # -- steps

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a layer's new k and v, each [rows, kv_heads, tokens, dim]; return what its queries
        see: real ones or placeholders, by the mode.

        Raises:
            ValueError: Another number of rows than the cache has, or layers differ in length.
        """
        while len(self.layers) <= layer_idx:
            self.layers.append(RemoteLayer(self._shared))
        layer = self.layers[layer_idx]
        if isinstance(layer, RemoteLayer):
            self._join_step(layer)
        states: tuple[torch.Tensor, torch.Tensor] = layer.update(
            key_states, value_states, *args, **kwargs
        )
        return states

    def _join_step(self, layer: RemoteLayer) -> None:
        """Take a layer for the next to be updated: in the step in progress, or as first of one."""
        if layer.length == self._shared.step_start:
            return
        layer.used = True
        self._shared.begin_step(self._length())

    def _length(self) -> int:
        """Return the length that all layers have.

        Raises:
            ValueError: They do not agree.
        """
        lengths = {layer.index: layer.length for layer in self._remote() if layer.used}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"layers differ in length, as after a step that failed half-way: {lengths}; "
                "rollback() cuts them to the shortest"
            )
        return next(iter(lengths.values()), 0)

    def rollback(self) -> int:
        """Cut every layer to what all of them have, after a step that failed: half-way, or because
        a worker was lost with some of the session's pages (`PagesLost`).

        Returns:
            The length in tokens that all layers have now: feed the model again from there.

        Raises:
            RuntimeError: The cache has layers with a local state, which cannot go back.
            PositionOutOfRange: A window has evicted what would be seen again: reset() the cache.
        """
        remote, session = self._remote(), self._shared.session
        self._shared.uploads.settle()  # what failed has set its layers back
        for layer in remote:
            layer.retract()
        lengths = [layer.length for layer in remote if layer.used]
        if self._shared.step_start == 0 and len(lengths) < len(remote):
            lengths.append(0)  # the first step has not reached all layers
        keep = min(lengths, default=0)
        if session is not None:  # it may know of less than we do, and of more
            keep = min(keep, *session.roll_back())
        if max(lengths, default=0) > keep and self._local():
            raise RuntimeError("layers with a local state cannot be rolled back: reset() the cache")
        self._cut(keep)
        return keep

    # -- structural changes: one call each

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens of every row: `-tokens_to_remove` of them, or all there are.

        Args:
            tokens_to_remove: 0 or negative, as in transformers. 0 lets a window free again what
                was recorded for a crop.

        Raises:
            ValueError: It is positive, or layers differ in length.
            RuntimeError: Something that would be seen again has left a window.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the negative number of tokens to remove, got {tokens_to_remove}"
            )
        length = self._length()
        keep = max(length + tokens_to_remove, 0)
        if not all(layer.can_crop_to(keep) for layer in self._remote()):
            raise RuntimeError(
                f"crop to {keep} of {length} tokens needs positions that have left the window: "
                "call activate_past_recording() before what is to be cropped"
            )
        for layer in self._local():
            layer.crop(tokens_to_remove)
        if keep != length:
            self._flush()
            self._cut(keep)
        else:
            self._shared.settle(length)

    def _cut(self, keep: int) -> None:
        if self._shared.session is not None:
            self._shared.opened().pop(keep=keep)
        for layer in self._remote():
            layer.set_length(min(layer.length, keep))
        self._shared.settle(keep)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Let row i continue old row `beam_idx[i]`: a tensor, list or tuple of old rows."""
        rows = _row_numbers(beam_idx, self.batch_size)
        if rows != list(range(self.batch_size)):
            self._select(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies next to each other."""
        self._select([row for row in range(self.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: Any) -> None:
        """Keep only rows `indices`: a tensor, list, tuple or slice, of row numbers or bools."""
        if self._shared.session is not None:
            self._select(torch.arange(self.batch_size)[_as_index(indices)].tolist())

    def _select(self, rows: list[int]) -> None:
        shared = self._shared
        if shared.session is None:
            return
        self._flush()
        shared.select(rows)
        for layer in self._remote():
            layer.version += 1
        index = torch.tensor(rows, dtype=torch.long)
        for layer in self._local():
            layer.reorder_cache(index)

    def reset(self) -> None:
        """Drop all tokens and release the session. The next update opens a new one, of any size."""
        session = self._shared.session
        self._shared.uploads.settle()
        self._shared.forget()
        for layer in self.layers:
            layer.reset()
        if session is not None:
            session.release()

    # -- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteCache:
        """Return an independent cache that shares the pages, copy-on-write. One call."""
        self._flush()
        shared = self._shared.fork()
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        for name, value in self.__dict__.items():
            if name not in ("_shared", "layers"):
                setattr(duplicate, name, copy.deepcopy(value, memo))
        duplicate._shared = shared
        duplicate.layers = [
            layer.copy_to(shared) if isinstance(layer, RemoteLayer) else copy.deepcopy(layer, memo)
            for layer in self.layers
        ]
        return duplicate

    def __copy__(self) -> RemoteCache:
        raise TypeError(
            "two shallow copies of a RemoteCache would write to one session; copy.deepcopy(cache) "
            "makes a fork that shares the pages"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a RemoteCache is a handle and cannot be pickled; hand over cache.detach() and "
            "RemoteCache.attach(session_id)"
        )

    # -- what transformers asks

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first update."""
        return self._shared.num_rows

    @property
    def is_compileable(self) -> bool:
        """False: generation must not prepare masks and graphs for a cache of fixed size."""
        return False

    @property
    def mode(self) -> str:
        """ "attend", "fetch" or "auto"."""
        return self._shared.mode

    def _remote(self) -> list[RemoteLayer]:
        return [layer for layer in self.layers if isinstance(layer, RemoteLayer)]

    def _local(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, RemoteLayer)]

    def _flush(self) -> None:
        for layer in self._remote():
            layer.flush()


def _check_windows(windows: Sequence[int | None], session: Session) -> None:
    """Refuse a session whose layers are not those of the config."""
    stated = [*session.windows, *[None] * (len(windows) - len(session.windows))]
    if list(windows) != stated or session.num_layers > len(windows):
        raise ValueError(
            f"the session has {session.num_layers} layers with windows {session.windows}, which "
            f"are not those of the config: {tuple(windows)}"
        )


def _row_length(session: Session, layer: int) -> int:
    lengths = set(session.lengths(layer))
    if len(lengths) > 1:
        raise ValueError(
            f"rows of layer {layer} differ in length ({sorted(lengths)}); a transformers cache "
            "has one length"
        )
    return lengths.pop()


def _row_numbers(rows: Any, num_rows: int) -> list[int]:
    """Return old rows as a plain list."""
    numbers = [int(row) for row in (rows.tolist() if isinstance(rows, torch.Tensor) else rows)]
    if num_rows >= 0 and not all(0 <= row < num_rows for row in numbers):
        raise IndexError(f"rows must be between 0 and {num_rows - 1}, got {numbers}")
    return numbers


def _as_index(indices: Any) -> Any:
    """Return indices as torch takes them along one dimension: a tuple would be coordinates."""
    if isinstance(indices, torch.Tensor):
        return indices.cpu()
    return indices if isinstance(indices, slice) else list(indices)
