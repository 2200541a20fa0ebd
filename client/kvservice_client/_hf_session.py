"""The session that the layers of one RemoteCache share."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvservice_client._client import Client
from kvservice_client._hf_mask import RemoteMask
from kvservice_client._session import Session


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
        session: None until the first update, and after a reset.
        recording: Whether what leaves a window must be kept, for a crop to come.
        floor: Length in tokens to which a crop may go back without missing an evicted position.
        step_start: Length of every layer when the step in progress began; None: look again.
        padding: bool[rows, tokens], true where padding has been told to the service; None: none.
    """

    def __init__(self, client: Client, mode: str, options: OpenOptions) -> None:
        self.client = client
        self.mode = mode
        self.options = options
        self.windows: list[int | None] = []
        self.session: Session | None = None
        self.recording = False
        self.warned = False
        self.detached = False
        self.forget()

    def forget(self) -> None:
        """Go back to before the first update. The session is the caller's business."""
        self.session = None
        self.floor = 0
        self.step_start: int | None = 0
        self.padding: npt.NDArray[np.bool_] | None = None
        self._told: weakref.ref[RemoteMask] | None = None  # a mask whose padding is in `padding`

    def ensure(self, num_rows: int) -> Session:
        """Return the session, opened for `num_rows` if there is none.

        Raises:
            ValueError: It has another number of rows.
            RuntimeError: The cache has let go of it.
        """
        if self.detached:
            raise RuntimeError("this cache has been detached from its session")
        if self.session is None:
            options = self.options
            self.session = self.client.open(
                num_rows=num_rows,
                windows=self.windows or None,
                page_size=options.page_size,
                max_tokens=options.max_tokens,
                reserve_tokens=options.reserve_tokens,
                ttl_s=options.ttl_s,
                replicas=options.replicas,
                spread=options.spread,
            )
        elif self.session.num_rows != num_rows:
            raise ValueError(
                f"this cache holds {self.session.num_rows} rows, got a batch of {num_rows}; "
                "reset() it to begin with another batch"
            )
        return self.session

    def opened(self) -> Session:
        assert self.session is not None, "no session before the first update"
        return self.session

    @property
    def num_rows(self) -> int:
        """Rows of the session; -1 if there is none yet."""
        return -1 if self.session is None else self.session.num_rows

    def begin_step(self, length: int) -> None:
        """Note that all layers are at `length` and more tokens follow."""
        self.step_start = length
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

    def select_padding(self, rows: Sequence[int]) -> None:
        self._told = None
        if self.padding is not None:
            self.padding = self.padding[list(rows)]

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
        copy = SharedSession.__new__(SharedSession)
        copy.__dict__.update(self.__dict__)
        copy.windows = list(self.windows)
        copy._told = None
        copy.session = None if self.session is None else self.session.fork()
        return copy
