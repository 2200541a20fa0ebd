"""Merging partials: attention over disjoint sets of positions, combined into one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvservice.core.errors import InvalidRequest
from kvservice_workers.attention.batch import Partial


def merge(partials: Sequence[Partial]) -> Partial:
    """Combine partials over disjoint sets of positions into the partial of their union.

    Associative and commutative up to rounding; `(0, -inf)`, the partial of no positions, is its
    identity.

    Args:
        partials: At least one; all of the same shapes. lse is a *natural* log.

    Returns:
        Partial of the same shapes, fresh.

    Numerics:
        In the partials' own dtype, float32 for kernels. Where all are empty: out = 0 and
        lse = -inf. The `out` of an empty partial is not read.

    Raises:
        InvalidRequest: No partials, or their shapes differ.
    """
    if not partials:
        raise InvalidRequest("merge needs at least one partial, got 0")
    shapes = {(tuple(partial.out.shape), tuple(partial.lse.shape)) for partial in partials}
    if len(shapes) > 1:
        raise InvalidRequest(f"partials to merge must have equal shapes, got {sorted(shapes)}")
    lses = torch.stack([partial.lse for partial in partials])
    highest = lses.amax(0)
    # Where everything is empty, any finite number in its place gives weights of 0.
    weights = torch.exp(lses - torch.where(highest == -torch.inf, 0.0, highest))
    total = weights.sum(0)
    # The weights' own sum, not exp(lse), divides: it has no rounding of a large lse in it.
    shares = (weights / torch.where(total == 0, 1.0, total)).unsqueeze(-1)
    out = torch.zeros_like(partials[0].out)
    for share, partial in zip(shares, partials, strict=True):
        out += torch.where(share > 0, share * partial.out, 0.0)
    return Partial(out, highest + total.log())


def merge_sinks(partial: Partial, sinks: torch.Tensor) -> Partial:
    """Merge a partial with one sink for each query head: a score without a value, `(0, sink)`.

    To be done exactly once, at the end.

    Args:
        partial: Over all positions.
        sinks: f32[num_q_heads]. Scores as they stand: neither scaled nor capped.

    Returns:
        Partial of the same shapes, fresh. A query that saw nothing gets out = 0, lse = sink.
    """
    sink = sinks.to(partial.lse.dtype).expand_as(partial.lse)
    nothing = torch.zeros((), dtype=partial.out.dtype, device=partial.out.device)
    return merge([partial, Partial(nothing.expand_as(partial.out), sink)])
