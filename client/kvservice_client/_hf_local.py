"""Attention without a cache of ours: encoders, vision towers, drafts, `use_cache=False`.

A model set to 'kvservice' calls one attention function for everything. Where K and V are ordinary
tensors, the answer must be the one of 'sdpa', or of 'eager' where sdpa cannot do it.
"""

from __future__ import annotations

from typing import Any

import torch

from kvservice_client._hf_compat import sdpa_attention_forward
from kvservice_client._hf_mask import RemoteMask


def local_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    dropout: float,
    is_causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    others: dict[str, Any],
) -> torch.Tensor:
    """Attend to ordinary tensors; arguments as transformers' attention functions get them.

    Returns:
        [rows, queries, heads, v_dim], contiguous.
    """
    needs_scores = softcap is not None or sinks is not None
    if isinstance(mask, RemoteMask):
        mask = mask.seen if needs_scores else mask.local
    elif mask is None and is_causal and (window is not None or needs_scores):
        mask = newest_seen(query.shape[-2], key.shape[-2], window, query.device)
    if not needs_scores:
        out: torch.Tensor = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            mask,
            dropout=dropout,
            scaling=scale,
            is_causal=is_causal,
            position_bias=bias,
            **others,
        )[0]
        return out
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    for added in (bias, mask):
        if added is not None and added.dtype == torch.bool:
            scores = scores.masked_fill(~added, torch.finfo(scores.dtype).min)
        elif added is not None:
            scores = scores + added
    weights = _softmax(scores, sinks)
    weights = torch.nn.functional.dropout(weights, dropout, training=dropout > 0)
    out = weights.to(value.dtype) @ value.repeat_interleave(group, 1)
    return out.transpose(1, 2).contiguous()


def newest_seen(
    num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Return bool[1, 1, queries, keys]: the queries are the newest keys, and see their window."""
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    keys = torch.arange(num_keys, device=device)[None]
    seen = keys <= queries
    if window is not None:
        seen = seen & (keys > queries - window)
    return seen[None, None]


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return weights in float32; a sink takes its share of them and is dropped."""
    if sinks is None:
        return torch.softmax(scores.float(), -1)
    rows, _, queries, _ = scores.shape
    column = sinks.reshape(1, -1, 1, 1).expand(rows, -1, queries, 1)
    return torch.softmax(torch.cat([scores, column.to(scores.dtype)], -1).float(), -1)[..., :-1]
