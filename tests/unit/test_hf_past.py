"""A prompt with something before it: partials of the new tokens and of the past, merged."""

from __future__ import annotations

import pytest
import torch

from kvservice_client import _hf_past
from kvservice_client._hf_past import Partial, attend_new, merge
from tests.oracles import dense_rows


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> Partial:
    """Attend in float64, with whole matrices."""
    tensors = (one.double().numpy() for one in (q, k, v))
    out, lse = dense_rows(*tensors, seen.numpy(), scale=scale, softcap=softcap, sinks=sinks)
    return Partial(torch.from_numpy(out), torch.from_numpy(lse))


def tokens(
    past: int, new: int, dims: tuple[int, int] = (8, 8), dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q of the new tokens of two rows, 6 heads, and k and v of all tokens, 2 heads."""
    torch.manual_seed(3)
    k_dim, v_dim = dims
    q = torch.randn(2, 6, new, k_dim)
    k, v = torch.randn(2, 2, past + new, k_dim), torch.randn(2, 2, past + new, v_dim)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("scale", [0.35, 0.0, -0.5])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dims", [(8, 8), (8, 5)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_cut", [False, True])
def test_new_tokens(
    monkeypatch: pytest.MonkeyPatch,
    is_cut: bool,
    masked: bool,
    dims: tuple[int, int],
    softcap: float | None,
    scale: float,
) -> None:
    """Every way to attend gives the dense one's output and lse, whole or a few queries at a time;
    queries that see nothing give nothing."""
    if is_cut:
        monkeypatch.setattr(_hf_past, "MAX_SCORES", 2 * 6 * 9 * 2)
    q, k, v = tokens(0, 9, dims)
    seen = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9).clone()
    if masked:
        seen[1, :, :, :3] = False
    ours = attend_new(q, k, v, seen if masked else None, scale=scale, softcap=softcap)
    theirs = dense(q, k, v, seen, scale, softcap, None)
    torch.testing.assert_close(ours.out.double(), theirs.out, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.lse.double(), theirs.lse, atol=1e-5, rtol=0)
    if masked:
        assert ours.lse[1, :, :3].isneginf().all()
        assert not ours.out[1, :, :3].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_not_rounded_before_the_merge(dtype: torch.dtype) -> None:
    """Partials are as exact as what came in allows."""
    q, k, v = tokens(0, 9, dtype=dtype)
    ours = attend_new(q, k, v, None, scale=0.35, softcap=None)
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    assert ours.out.dtype == ours.lse.dtype == torch.float32
    theirs = dense(q, k, v, seen, 0.35, None, None)
    torch.testing.assert_close(ours.out.double(), theirs.out, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sinks", [None, torch.tensor([-40.0, 0.0, 1.0, 2.0, 30.0, -torch.inf])])
@pytest.mark.parametrize("window", [None, 1, 4, 8])
def test_merged_with_the_past(window: int | None, sinks: torch.Tensor | None) -> None:
    """It is attention over all, with sinks counted once; a window's later queries miss the past."""
    past, new = 7, 9
    q, k, v = tokens(past, new)
    positions = torch.arange(past + new)
    seen = positions[None] <= positions[past:, None]
    if window is not None:
        seen &= positions[None] > positions[past:, None] - window
    of_new = attend_new(
        q, k[:, :, past:], v[:, :, past:], seen[None, None, :, past:], scale=0.4, softcap=None
    )
    asked = new if window is None else min(new, window - 1)
    of_past = None
    if asked:
        args = q[:, :, :asked], k[:, :, :past], v[:, :, :past], seen[:asked, :past]
        of_past = Partial(*(x.float() for x in dense(*args, 0.4, None, None)))
    ours = merge(of_new, of_past, sinks)
    theirs = dense(q, k, v, seen, 0.4, None, sinks)
    torch.testing.assert_close(ours.double(), theirs.out, atol=1e-5, rtol=0)


def test_nothing_is_seen_on_either_side() -> None:
    """Then the output is 0, and no NaN."""
    nothing = Partial(torch.zeros(1, 2, 3, 4), torch.full((1, 2, 3), -torch.inf))
    assert not merge(nothing, nothing, None).any()
    assert not merge(nothing, nothing, torch.zeros(2)).any()
    something = Partial(torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3))
    assert torch.equal(merge(something, nothing, None), something.out)
    assert torch.equal(merge(nothing, something, None), something.out)
