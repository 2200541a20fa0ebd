"""The session that the layers of one RemoteCache share."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvservice_client._client import Client
from kvservice_client._hf_mask import RemoteMask
from kvservice_client._hf_past import Partial
from kvservice_client._hf_prompt import (
    Layer,
    Uploads,
    alike,
    are_folded,
    equal_rows,
    first_rows,
)
from kvservice_client._session import Session

MIN_TOKENS_ONCE: Final = 16
"""A prompt for equal rows that is at least as long is worth making them one, and several again."""


class RemoteFetchWarning(UserWarning):
    """Keys and values travel back to the decoder, because something computes on them there."""


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How a cache opens its session; see `Client.open`."""

    page_size: int
    max_tokens: int | None
    reserve_tokens: int | None
    ttl_s: float
    replicas: int
    spread: int


class SharedSession:
    """The session of a cache, which its first update opens, and what all its layers share.

    Layers point here and nothing here points back: without a cycle, pages are released as soon as
    the cache is gone.

    Fields:
        windows: Of each remote layer, in the order of the session's layers.
        prompts: "local", "remote" or "auto": where prompts are attended to.
        session: None until the first update, and after a reset. Calls go through `opened`.
        uploads: Keys and values of a prompt on their way to the session.
        rows: Which row of the session each row of the cache is, while equal rows are stored once;
            None: they are the same.
        alike: Numbers of rows, the same for those that are known to hold the same; None: all may
            differ.
        recording: Whether what leaves a window must be kept, for a crop to come.
        floor: Length in tokens to which a crop may go back without missing an evicted position.
        step_start: Length of every layer when the step in progress began; None: look again.
        padding: bool[rows, tokens], true where padding has been told to the service; None: none.
    """

    def __init__(
        self, client: Client, mode: str, options: OpenOptions, prompts: str = "auto"
    ) -> None:
        self.client = client
        self.mode = mode
        self.options = options
        # Spread over workers, a prompt is attended by all of them at the same time.
        self.prompts = "remote" if mode == "fetch" or options.spread > 1 else prompts
        self.windows: list[int | None] = []
        self.session: Session | None = None
        self.recording = False
        self.warned = False
        self.detached = False
        self.forget()

    def forget(self) -> None:
        """Go back to before the first update. The session is the caller's business."""
        self.session = None
        self.uploads = Uploads()
        self.rows: list[int] | None = None
        self.alike: list[int] | None = None
        self._alike_before: list[int] | None = None  # as the step in progress began
        self._is_local: bool | None = None  # how its prompt is attended to; None: undecided
        self._began: set[int | None] = set()  # windows whose layers have taken the step's pages
        self.floor = 0
        self.step_start: int | None = 0
        self.padding: npt.NDArray[np.bool_] | None = None
        self._told: weakref.ref[RemoteMask] | None = None  # a mask whose padding is in `padding`

    def ensure(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """See to it that there is a session for new k and v, each [rows, heads, tokens, dim].

        Raises:
            ValueError: It has another number of rows.
            RuntimeError: The cache has let go of it.
            KVServiceError: Keys and values of an earlier layer could not be stored.
        """
        if self.detached:
            raise RuntimeError("this cache has been detached from its session")
        num_rows = k.shape[0]
        if self.session is None:
            options = self.options
            if self.local_prompts and options.reserve_tokens is None:
                self.rows = equal_rows(k, v)
            self.session = self.client.open(
                num_rows=num_rows if self.rows is None else max(self.rows) + 1,
                windows=self.windows or None,
                page_size=options.page_size,
                max_tokens=options.max_tokens,
                reserve_tokens=options.reserve_tokens,
                ttl_s=options.ttl_s,
                replicas=options.replicas,
                spread=options.spread,
            )
            return
        self.uploads.check()
        if self.num_rows != num_rows:
            raise ValueError(
                f"this cache holds {self.num_rows} rows, got a batch of {num_rows}; "
                "reset() it to begin with another batch"
            )

    def opened(self) -> Session:
        """Return the session, with all that it was given and a row for each row of the cache.

        Raises:
            KVServiceError: Keys and values of an earlier layer could not be stored.
        """
        assert self.session is not None, "no session before the first update"
        self.uploads.finish()
        if self.rows is not None:
            self.session.pop(0)  # completes a change of rows that was cut off
            if self.session.num_rows != len(self.rows):
                self.session.select(self.rows)
            self.rows = None
        return self.session

    @property
    def local_prompts(self) -> bool:
        """Whether the decoder attends to a prompt itself."""
        return self.prompts != "remote"

    def attends_behind(
        self, k: torch.Tensor, v: torch.Tensor, past: int, padding: npt.NDArray[np.bool_] | None
    ) -> bool:
        """Whether the decoder attends to a step's new tokens itself, and workers to the past alone.

        Decided with the step's first layer, for all of them: a worker takes a step as a whole.

        Args:
            k, v: [rows, heads, tokens, dim].
            past: Tokens before them.
            padding: News of padding, bool[rows, past + tokens].

        Raises:
            KVServiceError: Keys and values of an earlier step could not be stored.
        """
        if not self.local_prompts or self._is_local is False or self._marks_older(padding, past):
            return False
        if self._is_local is None:
            rows = self._equal_rows(k, v)
            # What equal rows save is more than what is lost where decoder and worker share cores.
            once = rows is not None and k.shape[-2] >= MIN_TOKENS_ONCE
            if self.prompts != "local" and not once:
                return False
            self.uploads.finish()
            self._fold(rows)
            self._is_local = True
        return True

    def stores_apart(self) -> bool:
        """Whether the step in progress stores its tokens without attending to them.

        If that is undecided, it is not: a layer is about to do both at once.
        """
        self._is_local = bool(self._is_local)
        return self._is_local

    def _marks_older(self, padding: npt.NDArray[np.bool_] | None, past: int) -> bool:
        """Whether news of padding is about tokens that are stored already."""
        if padding is None:
            return False
        known = 0 if self.padding is None else int(self.padding[:, :past].sum())
        return int(padding[:, :past].sum()) > known

    def _equal_rows(self, k: torch.Tensor, v: torch.Tensor) -> list[int] | None:
        """Return which rows hold the same and get the same, numbered; None if none do."""
        before = self._alike_before if self.rows is None else self.rows
        if before is None or self.options.reserve_tokens is not None:
            return None
        equal = equal_rows(k, v)
        return None if equal is None else alike(before, equal)

    def _fold(self, rows: list[int] | None) -> None:
        """Let rows with the same number be one row of the session."""
        assert self.session is not None, "there is a past"
        if rows != self.rows or self.session.num_rows == self.num_rows:
            session = self.opened()
            if rows is not None:
                self.rows = rows  # first: it may be carried out although it fails
                session.select(first_rows(rows))

    def as_stored(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return tensors with a row for each row of the session; those that differ part rows."""
        if self.rows is None:
            return tensors
        if not all(are_folded(one, self.rows) for one in tensors):
            self.opened()
            return tensors
        chosen = first_rows(self.rows)
        return tuple(one[chosen] for one in tensors)

    def attend_past(self, index: int, q: torch.Tensor, **how: Any) -> Partial:
        """Attend from new tokens to what a layer had stored before them.

        Args:
            q: [rows of the session, heads, tokens, dim].
            how: As for `Session.attend_partial`.
        """
        assert self.session is not None, "there is a past"
        with self.uploads.paused():
            return Partial(*self.session.attend_partial(index, q, **how))

    def upload(
        self,
        layer: Layer,
        index: int,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: npt.NDArray[np.bool_] | None,
    ) -> None:
        """Store a layer's new k and v while the decoder goes on.

        The first layer of each window is waited for: it takes the pages of all of them, so that
        most of what a service can refuse is refused before anything has been computed.

        Args:
            k, v: [rows, heads, tokens, dim].
            padding: bool[rows, tokens]; None: as the layer before has said.
        """
        told = () if padding is None else (torch.from_numpy(padding),)
        k, v, *told_once = self.as_stored(k, v, *told)
        padding = told_once[0].numpy() if told_once else None
        k, v, session, floor = k.cpu(), v.cpu(), self.session, self.floor
        assert session is not None, "no session before the first update"

        def write() -> None:
            session.write(index, k, v, padding=padding, queries_from=floor)

        window = self.windows[index]
        if window not in self._began:
            write()
            self._began.add(window)
            return
        self.uploads.put(write, layer, k.shape[-2], 2 * k.nbytes)

    @property
    def num_rows(self) -> int:
        """Rows of the cache; -1 if there is no session yet."""
        if self.session is None:
            return -1
        return self.session.num_rows if self.rows is None else len(self.rows)

    def begin_step(self, length: int) -> None:
        """Note that all layers are at `length` and more tokens follow."""
        self.step_start = length
        self._alike_before, self.alike = self.alike, None
        self._is_local = None
        self._began.clear()
        if not self.recording:
            self.floor = length
        if self.session is not None:
            self.session.retain = length - self.floor

    def settle(self, length: int) -> None:
        """Note that all layers have been cut to `length`."""
        self.step_start = None
        self.floor = length if self.recording else min(self.floor, length)
        self._told = None
        if self.padding is not None:
            self.padding = self.padding[:, :length]

    def select(self, rows: Sequence[int]) -> None:
        """Let new row i continue old row rows[i]."""
        known = self.rows or self.alike or range(self.num_rows)
        chosen = [known[row] for row in rows]
        self.opened().select(rows)
        self.alike = alike(chosen, chosen)
        self._told = None
        if self.padding is not None:
            self.padding = self.padding[list(rows)]

    def adopt_padding(self, padding: npt.NDArray[np.bool_]) -> None:
        """Take over what the service knows of padding, bool[rows, tokens]."""
        self.padding = padding if padding.any() else None

    def unseen_padding(self, mask: RemoteMask | None, length: int) -> npt.NDArray[np.bool_] | None:
        """Return padding that the service does not know of yet.

        Args:
            mask: The mask of a step; None if the model has none.
            length: Tokens in the layer, new ones included.

        Returns:
            bool[rows, length], all padding up to now; None if there is no news.

        Raises:
            ValueError: The mask covers another number of tokens, or shows padding as a token.
        """
        if mask is not None and self._told is not None and self._told() is mask:
            return None  # as for the layer before
        if mask is not None and mask.num_tokens not in (None, length):
            raise ValueError(
                f"attention_mask covers {mask.num_tokens} tokens, but there are {length}: those "
                "in the cache and the new ones. Pass a mask for all of them"
            )
        known = self.padding
        told = None if mask is None else mask.padding
        if mask is None or told is None:
            if known is not None and known.any():
                raise ValueError(
                    "the cache holds padding, so that every step needs the attention_mask that "
                    "says where; without one, padding would be attended to"
                )
            return None
        told = np.broadcast_to(told, (self.num_rows, length))
        before = np.zeros_like(told)
        if known is not None:
            before[:, : known.shape[1]] = known
        if np.array_equal(before, told):
            self._told = weakref.ref(mask)
            return None
        if (before & ~told).any():
            raise ValueError(
                "attention_mask shows tokens where there was padding before; padding stays padding"
            )
        return np.array(told)

    def warn_fetch(self, layer: int) -> None:
        """Warn, once a cache and its copies, that keys and values are fetched."""
        if self.mode == "auto" and not self.warned:
            self.warned = True
            warnings.warn(
                f"keys and values of layer {layer} are fetched from the service, because the "
                "model computes on them: attention is not remote. Call "
                "use_remote_attention(model), or say RemoteCache(mode='fetch') if this is meant",
                RemoteFetchWarning,
                stacklevel=2,
            )

    def fork(self) -> SharedSession:
        """Return a copy that shares the pages, copy-on-write. One call."""
        self.alike = self.rows or self.alike
        forked = None if self.session is None else self.opened().fork()
        copy = SharedSession.__new__(SharedSession)
        copy.__dict__.update(self.__dict__)
        copy.windows = list(self.windows)
        copy.uploads = Uploads()
        copy._began = set(self._began)
        copy._told = None
        copy.session = forked
        return copy
