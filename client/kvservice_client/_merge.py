"""Putting partials of several workers together, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention of some queries over the positions that one worker holds.

    Fields:
        out: f32[num_queries, num_q_heads, v_dim], normalised over the positions seen.
        lse: f32[num_queries, num_q_heads], natural log; -inf where nothing was seen.
        index: i64[num_queries]: which of all queries these are. None: all, in order.
    """

    out: Floats
    lse: Floats
    index: npt.NDArray[Any] | None = None


def merge(partials: Sequence[Partial], num_queries: int, sinks: Floats | None = None) -> Partial:
    """Return attention over all positions that the partials have seen together.

    Args:
        partials: At least one; in any order.
        sinks: f32[num_q_heads]: one more logit of the softmax, without a value.

    Returns:
        The partial of all queries; out is 0, and lse -inf, where nothing was seen.
    """
    num_heads, v_dim = partials[0].out.shape[1:]
    top = np.full((num_queries, num_heads), -np.inf, np.float32)
    if sinks is not None:
        top[:] = sinks
    for partial in partials:
        where = _where(partial)
        top[where] = np.maximum(top[where], partial.lse)
    # Queries that see nothing have no maximum: any finite number serves, all weights are 0.
    unseen = np.isneginf(top)
    top[unseen] = 0.0
    total = np.zeros((num_queries, num_heads), np.float32)
    if sinks is not None:
        total += np.exp(sinks - top)
    out = np.zeros((num_queries, num_heads, v_dim), np.float32)
    for partial in partials:
        where = _where(partial)
        weight = np.exp(partial.lse - top[where])
        total[where] += weight
        out[where] += weight[..., None] * partial.out
    total[unseen] = 1.0
    lse = top + np.log(total)
    lse[unseen] = -np.inf
    return Partial(np.divide(out, total[..., None], out=out), lse)


def _where(partial: Partial) -> Any:
    return slice(None) if partial.index is None else partial.index
