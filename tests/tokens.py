"""Keys and values for tests of caches."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_generator = torch.Generator().manual_seed(0)


def random_states(
    tokens: int, *, rows: int = 1, heads: int = 2, dim: int = 4, v_dim: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return k and v [rows, heads, tokens, dim] that no two calls have in common."""
    k = torch.randn(rows, heads, tokens, dim, generator=_generator)
    v = torch.randn(rows, heads, tokens, dim if v_dim is None else v_dim, generator=_generator)
    return k, v


def filled(values: Iterable[float], *, rows: int = 1, heads: int = 2, dim: int = 4) -> torch.Tensor:
    """Return [rows, heads, tokens, dim], token i filled with the value i."""
    return torch.tensor(list(values)).float()[:, None].expand(rows, heads, -1, dim).clone()
