"""One layer of a RemoteCache."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvservice_client._hf_compat import CacheLayerMixin
from kvservice_client._hf_mask import Seen
from kvservice_client._hf_session import SharedSession
from kvservice_client._hf_tensors import Form, Ticket, refuse_backward


class RemoteLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, on the service. Wears transformers' interface of cache layers.

    `update` keeps the new k and v until the attention call sends them together with q; whatever
    else needs them on the service writes them first.

    Fields:
        index: Layer of the session.
        length: Tokens that the layer was given, those of `pending` included.
        used: Whether `update` was ever called.
        version: Changes whenever placeholders that were handed out before are no longer true.
        pending: The newest k and v, each [rows, kv_heads, tokens, dim], while they are not sent.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = True
    is_sliding = False

    def __init__(self, shared: SharedSession, window: int | None = None) -> None:
        super().__init__()  # assigns None to keys and values, which their setters accept
        self.shared = shared
        self.index = len(shared.windows)
        self.length = 0
        self.used = False
        self.version = 0
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self._ticket: weakref.ref[Ticket] | None = None  # weak: layer and ticket form no cycle
        self._form: Form | None = None
        shared.windows.append(window)

    @property
    def mode(self) -> str:
        """ "attend", "fetch" or "auto"."""
        return self.shared.mode

    # -- what transformers calls

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Learn shapes, dtype and device, and open the session if it is not open."""
        self._form = Form.of(key_states, value_states)
        self.shared.ensure(key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new k and v, each [rows, kv_heads, tokens, dim]; return those that queries see.

        Returns:
            In mode "fetch" the real keys and values; else placeholders for them.
        """
        self.used = True
        self.shared.ensure(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.flush()
        start = self._window_start(self.length)
        k, v = key_states.detach(), value_states.detach()
        num_tokens = k.shape[-2]
        if self.mode == "fetch" and num_tokens:
            self._write(k, v)
        elif num_tokens:
            self.pending = (k, v)
        self.length += num_tokens
        self.version += 1
        if self.mode == "fetch":
            seen = self.fetch(start, self.length)
        else:
            ticket = Ticket(self, start, self.length)
            seen = self._known_form().placeholders(ticket, self.shared.num_rows)
        return (
            refuse_backward(seen[0], key_states, value_states),
            refuse_backward(seen[1], key_states, value_states),
        )

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys the next `update` of that many tokens returns, and the position of
        the first."""
        start = self._window_start(self.length)
        return self.length - start + query_length, start

    def _window_start(self, length: int) -> int:
        """Return the first position that a query at position `length` may see."""
        return 0

    def _kept_from(self) -> int:
        """Return the first position that a local cache would still hold."""
        return 0

    def can_crop_to(self, length: int) -> bool:
        """Whether nothing that queries from `length` on may see has been evicted."""
        return True

    @property
    def keys(self) -> torch.Tensor | None:
        """Keys that the layer holds, or a placeholder for them; None before the first update."""
        return self._read(0)

    @keys.setter
    def keys(self, value: None) -> None:
        _refuse_assignment("keys", value)

    @property
    def values(self) -> torch.Tensor | None:
        """Values that the layer holds, or a placeholder for them; None before the first update."""
        return self._read(1)

    @values.setter
    def values(self, value: None) -> None:
        _refuse_assignment("values", value)

    def reset(self) -> None:
        """Forget everything. The cache releases the session."""
        self.pending = None
        self.length = 0
        self.used = False
        self.is_initialized = False
        self.version += 1

    # Rows and lengths change in all layers at once, by one call of the cache. These are here for
    # callers that go through the layers.

    def crop(self, tokens_to_remove: int) -> None:
        raise _ask_the_cache("crop")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise _ask_the_cache("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise _ask_the_cache("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise _ask_the_cache("batch_select_indices")

    def offload(self) -> None:
        """Do nothing: there is nothing here to offload."""

    def prefetch(self) -> None:
        """Do nothing: there is nothing here to bring back."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteLayer:
        raise _ask_the_cache("copy.deepcopy")

    # -- what the cache and the attention function call

    def flush(self) -> None:
        """Store new tokens that no attention call has sent."""
        if self.pending is not None:
            self._write(*self.pending)
            self.pending = None

    def _write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.shared.opened().write(self.index, k, v, queries_from=self.shared.floor)

    def retract(self) -> None:
        """Forget new tokens that have not been stored."""
        if self.pending is not None:
            self.set_length(self.length - self.pending[0].shape[-2])
            self.pending = None

    def set_length(self, length: int) -> None:
        """Note that the session's layer is at `length` now."""
        self.length = length
        self.version += 1

    @property
    def prompt(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """All of the layer's k and v, where they are new and the decoder attends to them itself."""
        pending = self.pending
        if not self.shared.local_prompts or pending is None:
            return None
        return pending if pending[0].shape[-2] == self.length else None

    def upload(self, padding: npt.NDArray[np.bool_] | None) -> None:
        """Store the prompt while the decoder goes on. An error may come with a later call.

        Args:
            padding: News of padding, bool[rows, length].
        """
        assert self.pending is not None, "nothing is pending"
        k, v = self.pending
        new = None if padding is None else padding[:, self.length - k.shape[-2] :]
        self.shared.upload(self, self.index, k, v, new)
        self.pending = None
        if padding is not None:
            self.shared.padding = padding

    def attend(
        self,
        query: torch.Tensor,
        seen: Seen,
        *,
        first_key: int,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
        bias: torch.Tensor | None,
        padding: npt.NDArray[np.bool_] | None,
    ) -> torch.Tensor:
        """Store what is pending and attend to all of the layer. One round trip.

        Args:
            query: [rows, heads, queries, dim].
            first_key: Position of the first column of a dense mask and of the bias.
            padding: News of padding, bool[rows, length].

        Returns:
            [rows, heads, queries, v_dim], of the query's dtype and device.
        """
        if self.pending is not None and self.shared.stores_apart():
            self.flush()
        session = self.shared.opened()
        k, v = self.pending if self.pending is not None else (None, None)
        columns = bias is not None or isinstance(seen.mask, torch.Tensor)
        stored = None if k is None else self.length - k.shape[-2]
        # Queries that are the new tokens need no position, and are not sent where none is seen.
        are_new = stored == seen.query_position and stored + query.shape[-2] == self.length
        out: torch.Tensor = session.attend(
            self.index,
            query.detach(),
            k,
            v,
            pos=stored,
            scale=scale,
            mask=seen.mask,
            window=seen.window,
            chunk=seen.chunk,
            softcap=softcap,
            sinks=None if sinks is None else sinks.detach().float(),
            bias=bias,
            padding=padding,
            column_starts=first_key if columns else None,
            query_positions=None if are_new else seen.query_position,
        )
        self.pending = None
        if padding is not None:
            self.shared.padding = padding
        return out

    def fetch(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v of positions [start, stop), each [rows, kv_heads, stop - start, dim]."""
        self.flush()
        form = self._known_form()
        if start == stop:
            return form.empty(self.shared.num_rows)
        self.shared.warn_fetch(self.index)
        like = torch.empty(0, dtype=form.dtype, device=form.device)
        k, v = self.shared.opened().read(self.index, start, stop, like=like)
        return k, v

    def copy_to(self, shared: SharedSession) -> RemoteLayer:
        """Return this layer of a fork of the session."""
        assert self.pending is None, "the fork was made without what is pending"
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.shared = shared
        copy._ticket = None
        return copy

    def _read(self, which: int) -> torch.Tensor | None:
        if not self.is_initialized and not self.length:
            return None
        if self.mode == "fetch":
            return self.fetch(self._kept_from(), self.length)[which]
        # Keys and values that are read one after the other must have one ticket.
        ticket = None if self._ticket is None else self._ticket()
        if ticket is None or ticket.version != self.version:
            ticket = Ticket(self, self._kept_from(), self.length)
            self._ticket = weakref.ref(ticket)
        return self._known_form().placeholders(ticket, self.shared.num_rows)[which]

    def _known_form(self) -> Form:
        if self._form is None:  # attached, and not used since: the service knows
            last = self.length - 1
            k, v = self.shared.opened().read(self.index, last, self.length, like=torch.empty(0))
            self._form = Form.of(k, v)
        return self._form


class RemoteSlidingLayer(RemoteLayer):
    """A layer whose queries see `sliding_window` tokens, their own included (or a chunk of them).

    Pages that no later query can see are freed, except while past is recorded for a crop.
    """

    is_sliding = True

    def __init__(self, shared: SharedSession, sliding_window: int) -> None:
        super().__init__(shared, sliding_window)
        self.sliding_window = sliding_window
        self._sliding_window_tensor = torch.tensor(sliding_window, dtype=torch.long)

    @property
    def cumulative_length(self) -> int:
        return self.length

    @property
    def record_past(self) -> bool:
        """Whether a later crop can go back beyond the window. One for all layers of a cache."""
        return self.shared.recording

    @record_past.setter
    def record_past(self, value: bool) -> None:
        if value and not self.shared.recording:
            self.shared.floor = self.length
        self.shared.recording = value

    def activate_past_recording(self) -> None:
        self.record_past = True

    def get_max_length(self) -> int:
        return self.sliding_window

    def _window_start(self, length: int) -> int:
        return max(length - self.sliding_window + 1, 0)

    def _kept_from(self) -> int:
        floor = self.shared.floor if self.record_past else self.length
        return self._window_start(min(floor, self.length))

    def can_crop_to(self, length: int) -> bool:
        # An empty cache has nothing to miss.
        return (
            length == 0 or length >= self.shared.floor or self._window_start(self.shared.floor) == 0
        )


def _refuse_assignment(name: str, value: object) -> None:
    if value is not None:
        raise AttributeError(
            f"{name} of a RemoteCache cannot be assigned: they are on the service. Use update()"
        )


def _ask_the_cache(name: str) -> TypeError:
    return TypeError(f"{name} changes all layers of a RemoteCache at once: call it on the cache")
