"""New tokens behind a past: the decoder attends to them itself, and workers to what is before."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvservice_client._hf_layer import RemoteLayer
from kvservice_client._hf_mask import Seen
from kvservice_client._hf_past import Partial, attend_new, merge


def attends_behind(
    layer: RemoteLayer, query: torch.Tensor, seen: Seen, padding: npt.NDArray[np.bool_] | None
) -> bool:
    """Whether the decoder attends to the new tokens itself, and workers to those before."""
    if layer.pending is None or query.shape[-2] == 1:
        return False
    if not isinstance(seen.mask, str) or seen.mask == "full":
        return False
    k, v = layer.pending
    past = layer.length - k.shape[-2]
    if past != seen.query_position or query.shape[-2] != k.shape[-2] or not past:
        return False
    return layer.shared.attends_behind(k, v, past, padding)


def attend_behind(
    layer: RemoteLayer,
    query: torch.Tensor,
    seen: Seen,
    among_new: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend here from new tokens to each other, and on the workers to all before them.

    Args:
        query: [rows, heads, tokens, dim].
        among_new: bool[rows, 1, tokens, tokens]: what they see of each other. None: all up to
            their own.

    Returns:
        [rows, heads, tokens, v_dim], of the query's dtype and device.

    Effects:
        None: what is pending stays so.
    """
    assert layer.pending is not None, "nothing is pending"
    masks = () if among_new is None else (among_new.expand(len(query), -1, -1, -1),)
    q, k, v, *seen_new = layer.shared.as_stored(query.detach(), *layer.pending, *masks)
    new: list[Partial] = []

    def attend_to_new() -> None:
        if not new:
            mask = seen_new[0] if seen_new else None
            new.append(attend_new(q, k, v, mask, scale=scale, softcap=softcap))

    # Later queries of a window see nothing of the past.
    num_queries = q.shape[-2] if seen.window is None else min(q.shape[-2], seen.window - 1)
    if num_queries:
        past = layer.shared.attend_past(
            layer.index,
            q[:, :, :num_queries],
            query_positions=seen.query_position,
            scale=scale,
            mask=seen.mask,
            window=seen.window,
            chunk=seen.chunk,
            softcap=softcap,
            meanwhile=attend_to_new,
        )
        out = merge(new[0], past, None if sinks is None else sinks.detach())
    else:
        attend_to_new()
        out = merge(new[0], None, sinks)
    out = out.to(query.dtype)
    return out if len(out) == len(query) else out[layer.shared.rows]
