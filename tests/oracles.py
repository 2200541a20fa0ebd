"""Oracles: what the service must agree with, written as differently from it as possible."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def dense_attention(
    q: Floats,
    k: Floats,
    v: Floats,
    visible: Bools,
    *,
    scale: float,
    softcap: float | None = None,
    added: Floats | None = None,
    sinks: Floats | None = None,
) -> tuple[Floats, Floats]:
    """Attend densely in float64: no pages, no rows, no blocks, one big array of scores.

    Args:
        q: f64[num_tokens, num_q_heads, k_dim].
        k, v: f64[num_positions, num_kv_heads, dim].
        visible: bool[num_q_heads, num_tokens, num_positions].
        added: f64, broadcastable to `visible`'s shape. Added to the scores, after the softcap.
        sinks: f64[num_q_heads].

    Returns:
        out f64[num_tokens, num_q_heads, v_dim] and lse f64[num_tokens, num_q_heads].
    """
    group_size = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group_size, axis=1), np.repeat(v, group_size, axis=1)
    scores = np.einsum("thd,shd->hts", q, k) * scale
    if softcap is not None:
        scores = np.tanh(scores / softcap) * softcap
    if added is not None:
        scores = scores + added
    scores = np.where(visible, scores, -np.inf)
    exps = np.exp(scores)  # no maximum is taken off: the tests' scores are small
    total = exps.sum(axis=2)
    if sinks is not None:
        total = total + np.exp(sinks)[:, None]
    out = np.einsum("hts,shd->htd", exps, v)
    out = np.divide(out, total[..., None], out=np.zeros_like(out), where=total[..., None] > 0)
    with np.errstate(divide="ignore"):
        return out.transpose(1, 0, 2), np.log(total).T


def dense_rows(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    visible: npt.ArrayLike,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: npt.ArrayLike | None = None,
) -> tuple[Floats, Floats]:
    """As `dense_attention`, of a batch as decoders have it.

    Args:
        q, k, v: [num_rows, heads, tokens, dim], each with its own.
        visible: Broadcastable to bool[num_rows, num_q_heads, num_tokens, num_positions].

    Returns:
        out f64[num_rows, num_q_heads, num_tokens, v_dim] and
        lse f64[num_rows, num_q_heads, num_tokens].
    """
    by_token = [np.asarray(one, np.float64).transpose(0, 2, 1, 3) for one in (q, k, v)]
    num_rows, num_tokens, num_heads, _ = by_token[0].shape
    shape = (num_rows, num_heads, num_tokens, by_token[1].shape[1])
    rows = [
        dense_attention(
            *row,
            scale=scale,
            softcap=softcap,
            sinks=None if sinks is None else np.asarray(sinks, np.float64),
        )
        for row in zip(*by_token, np.broadcast_to(visible, shape), strict=True)
    ]
    return (
        np.stack([out.transpose(1, 0, 2) for out, _ in rows]),
        np.stack([lse.T for _, lse in rows]),
    )


def causal_visible(query_positions: npt.ArrayLike, positions: npt.ArrayLike) -> Bools:
    """Return bool[num_tokens, num_positions]: a query sees its own position and those before."""
    return np.greater_equal.outer(np.asarray(query_positions), np.asarray(positions))


def window_visible(query_positions: npt.ArrayLike, positions: npt.ArrayLike, window: int) -> Bools:
    """Return bool[num_tokens, num_positions]: the newest `window` positions, its own included."""
    distance = np.subtract.outer(np.asarray(query_positions), np.asarray(positions))
    return (distance >= 0) & (distance < window)


def chunk_visible(
    query_positions: npt.ArrayLike, positions: npt.ArrayLike, chunk: int, origin: int
) -> Bools:
    """Return bool[num_tokens, num_positions]: causal within chunks counted from `origin`."""
    query_chunks = np.floor((np.asarray(query_positions) - origin) / chunk)
    chunks = np.floor((np.asarray(positions) - origin) / chunk)
    return np.equal.outer(query_chunks, chunks) & causal_visible(query_positions, positions)
