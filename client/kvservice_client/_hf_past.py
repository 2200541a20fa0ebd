"""A prompt with something before it: the decoder attends to the new tokens, workers to the past.

Both give a partial, an output with the natural log of its sum of exponentiated scores, and these
are merged here. So new keys and values need not be stored before anybody attends to them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from kvservice_client._hf_local import newest_seen

MAX_SCORES: Final = 1 << 23
"""Scores that matrix products hold at a time (float32: 32 MiB, and a few copies of that)."""


class Partial(NamedTuple):
    """Attention over some of the positions.

    out: f32[rows, heads, queries, v_dim], normalised over the positions seen.
    lse: f32[rows, heads, queries]; -inf, with out = 0, where nothing was seen.
    """

    out: torch.Tensor
    lse: torch.Tensor


def attend_new(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> Partial:
    """Attend from new tokens to themselves.

    Args:
        q: [rows, heads, tokens, dim].
        k, v: [rows, kv_heads, tokens, dim], each with its own dim.
        seen: bool[rows or 1, 1, tokens, tokens], true where a query sees a key. None: causal.

    Numerics:
        In float32, whatever the tensors' dtype: that leaves no rounding to be merged.
    """
    q, k, v = q.float(), k.float(), v.float()
    is_plain = seen is None and softcap is None and q.is_cpu and scale > 0
    if is_plain and q.shape[-1] == v.shape[-1]:
        return _by_flash(q, k, v, scale)
    if seen is None:
        seen = newest_seen(q.shape[-2], k.shape[-2], None, q.device)
    return _by_products(q, k, v, seen, scale, softcap)


def merge(new: Partial, past: Partial | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return attention over both, f32[rows, heads, queries, v_dim].

    Args:
        past: Of the first queries of `new`, perhaps of fewer: the others see nothing of it. None:
            none does.
        sinks: [heads]: one more logit of the softmax, without a value.
    """
    num_past, lse = 0, new.lse.clone()
    if past is not None:
        num_past = past.lse.shape[-1]
        lse[..., :num_past] = torch.logaddexp(new.lse[..., :num_past], past.lse)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float()[:, None])
    # Queries that see nothing: any finite number serves, all weights are 0.
    lse = torch.where(lse.isneginf(), 0.0, lse)
    out = new.out * torch.exp(new.lse - lse)[..., None]
    if past is not None:
        weight = torch.exp(past.lse - lse[..., :num_past])
        out[..., :num_past, :] += past.out * weight[..., None]
    return out


def _by_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Partial:
    rows, heads, tokens, dim = q.shape
    num_groups = k.shape[1]
    q = q.reshape(rows * num_groups, heads // num_groups, tokens, dim)
    k, v = (
        x.reshape(rows * num_groups, 1, tokens, dim).expand(-1, q.shape[1], -1, -1) for x in (k, v)
    )
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, True, scale=scale
    )
    return Partial(out.reshape(rows, heads, tokens, dim), lse.reshape(rows, heads, tokens))


def _by_products(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> Partial:
    """Attend by matrix products, a bounded number of queries at a time."""
    rows, heads, tokens, dim = q.shape
    num_groups = k.shape[1]
    grouped = q.reshape(rows, num_groups, heads // num_groups, tokens, dim)
    step = max(1, MAX_SCORES // (rows * heads * tokens))
    outs, sums = [], []
    for first in range(0, tokens, step):
        part = grouped[:, :, :, first : first + step]
        count = part.shape[3]
        scores = part.reshape(rows, num_groups, -1, dim) @ k.transpose(-1, -2)
        scores = scores.view(rows, heads, count, tokens).mul_(scale)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        scores.masked_fill_(~seen[:, :, first : first + step], -torch.inf)
        lse = torch.logsumexp(scores, -1)
        base = torch.where(lse.isneginf(), 0.0, lse)
        weights = scores.sub_(base[..., None]).exp_()
        out = weights.view(rows, num_groups, -1, tokens) @ v
        outs.append(out.view(rows, heads, count, -1))
        sums.append(lse)
    return Partial(torch.cat(outs, 2), torch.cat(sums, 2))
