"""Keys and values that are not here: tensors with a shape and no storage, which carry a ticket.

`RemoteCache.update` returns them. The attention function finds its layer by the ticket, so nothing
has to be kept on the model, the module or the thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

_aten = torch.ops.aten


class TicketLayer(Protocol):
    """What a ticket needs to know of its layer."""

    index: int
    version: int

    @property
    def mode(self) -> str:
        """ "attend" if contents must never be fetched."""

    def fetch(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v of positions [start, stop), each [rows, kv_heads, stop - start, dim]."""


class Ticket:
    """Names positions [start, stop) of one layer, as of one version of it."""

    __slots__ = ("__weakref__", "_contents", "layer", "start", "stop", "version")

    def __init__(self, layer: Any, start: int, stop: int) -> None:
        self.layer = layer
        self.start = start
        self.stop = stop
        self.version = layer.version
        self._contents: tuple[torch.Tensor, torch.Tensor] | None = None

    def check(self) -> None:
        """Refuse if the layer has changed since.

        Raises:
            RuntimeError: It has: an update, crop, reorder, rollback or reset came in between.
        """
        if self.version != self.layer.version:
            raise RuntimeError(
                f"these keys and values of layer {self.layer.index} were handed out before the "
                "cache was changed (by update, crop, reorder_cache, reset, ...)"
            )

    def contents(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the real k and v, fetched once."""
        if self._contents is None:
            self.check()
            self._contents = self.layer.fetch(self.start, self.stop)
        return self._contents

    def __repr__(self) -> str:
        return f"Ticket(layer {self.layer.index}, positions [{self.start}, {self.stop}))"


class RemoteKV(torch.Tensor):
    """Keys (`which` 0) or values (`which` 1) that are on the service: a shape, and a ticket.

    Detaching, aliasing and moving to another device keep the ticket. Any other operation fetches
    the contents and goes on with them, or, in mode "attend", raises: a model that computes on K
    and V after the cache must be noticed, not fed with something else.
    """

    ticket: Ticket
    which: int

    @staticmethod
    def __new__(
        cls: type[RemoteKV],
        ticket: Ticket,
        which: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> RemoteKV:
        placeholder: RemoteKV = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device
        )
        placeholder.ticket = ticket
        placeholder.which = which
        return placeholder

    # Shape, dtype and device are then read as those of any tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _keeps_contents(func, args, kwargs):
            source = args[0]
            device = kwargs.get("device") or source.device
            return cls(source.ticket, source.which, tuple(source.shape), source.dtype, device)

        def real(argument: Any) -> Any:
            if not isinstance(argument, RemoteKV):
                return argument
            if argument.ticket.layer.mode == "attend":
                raise RuntimeError(
                    f"{func} was called on keys or values that are on the service. The model, or "
                    "its attention implementation, computes on them after Cache.update(), so that "
                    "its attention cannot run where the pages are. Call use_remote_attention(model)"
                    ", or use RemoteCache(mode='auto') or RemoteCache(mode='fetch')."
                )
            return argument.ticket.contents()[argument.which].to(argument.device)

        return func(*tree_map(real, args), **tree_map(real, kwargs))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RemoteKV({'kv'[self.which]}, {tuple(self.shape)}, {self.dtype}, {self.ticket})"


@dataclass(frozen=True, slots=True)
class Form:
    """Heads, dims, dtype and device of a layer's keys and values."""

    num_kv_heads: int
    dims: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(k: torch.Tensor, v: torch.Tensor) -> Form:
        return Form(k.shape[1], (k.shape[-1], v.shape[-1]), k.dtype, k.device)

    def _shapes(self, num_rows: int, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        k_dim, v_dim = self.dims
        shape = (num_rows, self.num_kv_heads, num_tokens)
        return (*shape, k_dim), (*shape, v_dim)

    def empty(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v without tokens."""
        k_shape, v_shape = self._shapes(num_rows, 0)
        return (
            torch.empty(k_shape, dtype=self.dtype, device=self.device),
            torch.empty(v_shape, dtype=self.dtype, device=self.device),
        )

    def placeholders(self, ticket: Ticket, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what stands for the k and v that a ticket names."""
        k_shape, v_shape = self._shapes(num_rows, ticket.stop - ticket.start)
        return (
            RemoteKV(ticket, 0, k_shape, self.dtype, self.device),
            RemoteKV(ticket, 1, v_shape, self.dtype, self.device),
        )


def _keeps_contents(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the result of an operation has the same elements, in the same shape and dtype."""
    if func in (_aten.detach.default, _aten.alias.default):
        return True
    if func is _aten.view.default:
        return tuple(args[1]) == tuple(args[0].shape)
    if func is _aten._to_copy.default:
        return kwargs.get("dtype") in (None, args[0].dtype)
    return False


class InferenceOnly(torch.autograd.Function):
    """Passes a tensor on as if it came from `sources`; backward() raises.

    Gradients end at the service. To be told so is better than to train on what is left of them.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "remote attention is inference only: no gradient can flow through a RemoteCache. "
            "Use torch.no_grad(), or train with a local cache."
        )


def refuse_backward(tensor: torch.Tensor, *sources: torch.Tensor | None) -> torch.Tensor:
    """Return `tensor`, so that backward() through it raises if any source wants a gradient."""
    if not torch.is_grad_enabled():
        return tensor
    wanting = [source for source in sources if source is not None and source.requires_grad]
    if not wanting:
        return tensor
    result: torch.Tensor = InferenceOnly.apply(tensor, *wanting)  # type: ignore[no-untyped-call]
    return result
