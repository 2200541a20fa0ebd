"""The attention function 'kvservice': one round trip per layer and step.

It gets q, the placeholders that `RemoteCache.update` returned, and a mask; it sends q, the new k
and v, and what the mask is; it returns the attention output. A prompt with nothing before it needs
no answer: it is attended to here, and its k and v are sent meanwhile. Behind other tokens a prompt
may be attended to here as well, but for its past, which workers are asked for.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvservice_client._hf_behind import attend_behind, attends_behind
from kvservice_client._hf_layer import RemoteLayer
from kvservice_client._hf_local import local_attention, newest_seen
from kvservice_client._hf_mask import RemoteMask, Seen, describe
from kvservice_client._hf_tensors import RemoteKV, Ticket, refuse_backward

UNKNOWN_SCORES: Final = ("indices", "block_indices", "sinks")
"""Keywords by which some models choose keys or change scores in a way that workers do not know."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def remote_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend where the keys and values are. The signature is transformers' attention interface.

    Returns:
        The output [rows, queries, heads, v_dim], and None: attention weights are never here.

    Effects:
        With placeholders of a RemoteCache: stores the layer's pending k and v, one round trip; or,
        of a prompt that is attended to here, in the background.
        With ordinary tensors: none.

    Raises:
        ValueError: The mask does not fit the cache.
        RuntimeError: Dropout, a stale placeholder, or a keyword that workers do not know.
        KVServiceError: The service refuses or cannot be reached. The layer's tokens are not
            stored; layers before it have theirs (see `RemoteCache.rollback`).
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)

    def attend_here(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return local_attention(
            module,
            query,
            key,
            value,
            attention_mask,
            scale=scale,
            dropout=dropout,
            is_causal=causal,
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
            bias=position_bias,
            others=others,
        )

    if not isinstance(key, RemoteKV) or not isinstance(value, RemoteKV):
        # What the model has computed on is here already; a placeholder beside it is fetched.
        return attend_here(key, value), None

    ticket = _ticket(key, value)
    layer: RemoteLayer = ticket.layer
    try:
        _refuse_unknown(module, dropout, others)
        seen = describe(
            attention_mask,
            first_key=ticket.start,
            num_keys=ticket.stop - ticket.start,
            num_queries=query.shape[-2],
            is_causal=causal,
            window=sliding_window,
        )
        padding = _padding(attention_mask, layer, ticket.stop)
        if layer.prompt is not None:
            out = attend_here(*layer.prompt)
            layer.upload(padding)
            return refuse_backward(out, query, key, value), None
        bias = _bias(position_bias, query.shape[-2])
        if bias is None and attends_behind(layer, query, seen, padding):
            out = attend_behind(
                layer,
                query,
                seen,
                _among_new(attention_mask, seen, query),
                scale=scale,
                softcap=softcap,
                sinks=s_aux,
            )
            layer.upload(padding)
        else:
            out = layer.attend(
                query,
                seen,
                first_key=ticket.start,
                scale=scale,
                softcap=softcap,
                sinks=s_aux,
                bias=bias,
                padding=padding,
            )
    except BaseException:
        layer.retract()  # the tokens of this layer are not stored, and must not seem to be
        raise
    return refuse_backward(out, query, key, value).transpose(1, 2).contiguous(), None


def _among_new(mask: torch.Tensor | None, seen: Seen, query: torch.Tensor) -> torch.Tensor | None:
    """Return what new tokens see of each other; None: all up to their own."""
    if isinstance(mask, RemoteMask):
        return mask.among_new
    tokens = query.shape[-2]
    if seen.window is None or seen.window >= tokens:
        return None
    return newest_seen(tokens, tokens, seen.window, query.device)


def _padding(
    mask: torch.Tensor | None, layer: RemoteLayer, length: int
) -> npt.NDArray[np.bool_] | None:
    """Return news of padding. A mask of the caller's own has none: it says all."""
    if mask is not None and not isinstance(mask, RemoteMask):
        return None
    return layer.shared.unseen_padding(mask, length)


def _ticket(key: RemoteKV, value: RemoteKV) -> Ticket:
    """Return the ticket that keys and values share.

    Raises:
        RuntimeError: They do not, or the layer has changed since.
    """
    if value.ticket is not key.ticket or (key.which, value.which) != (0, 1):
        raise RuntimeError("keys and values come from different reads of the cache")
    key.ticket.check()
    return key.ticket


def _refuse_unknown(module: torch.nn.Module, dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise RuntimeError("attention dropout cannot be applied on the service: call model.eval()")
    if unknown := [name for name in UNKNOWN_SCORES if others.get(name) is not None]:
        raise RuntimeError(
            f"{type(module).__name__} passes {unknown[0]!r} to its attention, which cannot be "
            "computed on the service: use RemoteCache(mode='fetch') with another attention"
        )


def _bias(bias: torch.Tensor | None, num_queries: int) -> torch.Tensor | None:
    """Return a bias with a row for each query; None for zeros, which some models pass."""
    if bias is None or not bias.any():
        return None
    return bias.detach().expand(-1, -1, num_queries, -1)
