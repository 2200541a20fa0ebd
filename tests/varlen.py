"""What `torch.nn.attention.varlen.varlen_attn` means, slowly, on any device.

FlashAttention itself runs on GPUs alone. This is its documented meaning, so that what is asked of
it can be checked against the reference anywhere; where there is a GPU, it is checked itself.
"""

from __future__ import annotations

import torch


def varlen_meaning(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as varlen_attn does; see there.

    Returns:
        out [queries, heads, dim]; natural log-sum-exp [heads, queries], +inf where nothing is seen.
    """
    num_queries, num_heads, _ = query.shape
    assert enable_gqa or key.shape[-2] == num_heads
    out = torch.zeros(num_queries, num_heads, value.shape[-1], dtype=query.dtype)
    lse = torch.full((num_heads, num_queries), torch.inf)
    for row in range(len(cu_seq_q) - 1):
        first, last = int(cu_seq_q[row]), int(cu_seq_q[row + 1])
        assert last - first <= max_q
        if block_table is None:
            stored = slice(int(cu_seq_k[row]), int(cu_seq_k[row + 1]))
            k, v = key[stored], value[stored]
        else:
            assert seqused_k is not None
            count, size = int(seqused_k[row]), key.shape[1]
            pages = block_table[row, : -(-count // size)].long()
            k, v = (pool[pages].flatten(0, 1)[:count] for pool in (key, value))
        assert len(k) <= max_k
        group = num_heads // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = scale * torch.einsum("qhd,khd->hqk", query[first:last], k)
        left, right = window_size
        # Aligned at the bottom right: the last query stands at the last key.
        stands = torch.arange(last - first)[:, None] + len(k) - (last - first)
        keys = torch.arange(len(k))[None]
        seen = torch.ones(last - first, len(k), dtype=torch.bool)
        if left >= 0:
            seen &= keys >= stands - left
        if right >= 0:
            seen &= keys <= stands + right
        scores = scores.masked_fill(~seen, -torch.inf)
        some = seen.any(1)
        weights = torch.softmax(scores[:, some], -1)
        out[first:last][some] = torch.einsum("hqk,khd->qhd", weights, v)
        lse[:, first:last][:, some] = torch.logsumexp(scores[:, some], -1).float()
    return out, lse
