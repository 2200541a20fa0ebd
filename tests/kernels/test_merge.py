"""Merging partials: weights, identity, empties, sinks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.errors import InvalidRequest
from kvservice_workers.attention.batch import Partial
from kvservice_workers.attention.merge import merge, merge_sinks


def softmax_partial(scores: list[float], values: list[float]) -> Partial:
    """Return the partial of one query and head with values of dim 1, in float64."""
    if not scores:
        return empty()
    s, v = torch.tensor(scores, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)
    return Partial((s.softmax(0) @ v).view(1, 1, 1), s.logsumexp(0).view(1, 1))


def empty() -> Partial:
    return Partial(
        torch.zeros(1, 1, 1, dtype=torch.float64),
        torch.full((1, 1), -math.inf, dtype=torch.float64),
    )


POINTS = st.lists(st.tuples(st.floats(-30, 30), st.floats(-3, 3)), max_size=12)


@given(st.lists(POINTS, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_any_partition_in_any_order_equals_the_whole(parts, random) -> None:  # type: ignore[no-untyped-def]
    """merge is associative and commutative: the partial of a union, however it was cut."""
    partials = [softmax_partial([s for s, _ in part], [v for _, v in part]) for part in parts]
    everything = [point for part in parts for point in part]
    whole = softmax_partial([s for s, _ in everything], [v for _, v in everything])
    random.shuffle(partials)
    at_once = merge(partials)
    pairwise = partials[0]
    for partial in partials[1:]:
        pairwise = merge([pairwise, partial])
    for merged in (at_once, pairwise):
        torch.testing.assert_close(merged.out, whole.out, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(merged.lse, whole.lse, atol=1e-12, rtol=1e-12)


def test_empty_is_the_identity_whatever_its_out_holds() -> None:
    """A partial with lse = -inf contributes nothing, even if a kernel left NaN in its out."""
    partial = softmax_partial([1.0, 2.0], [3.0, 4.0])
    poisoned = Partial(torch.full((1, 1, 1), math.nan, dtype=torch.float64), empty().lse)
    merged = merge([empty(), partial, poisoned])
    torch.testing.assert_close(merged.out, partial.out)
    torch.testing.assert_close(merged.lse, partial.lse)


def test_empties_give_empty_not_nan() -> None:
    """-inf minus -inf must not reach the result."""
    merged = merge([empty(), empty()])
    assert merged.out.item() == 0
    assert merged.lse.item() == -math.inf


def test_partials_are_weighted_by_their_lse() -> None:
    """Neither a plain mean nor weights in base 2 would do: 1 position against 3 equal ones."""
    one = softmax_partial([0.0], [8.0])
    three = softmax_partial([0.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    merged = merge([one, three])
    assert merged.out.item() == pytest.approx(2.0)
    assert merged.lse.item() == pytest.approx(math.log(4.0))


def test_large_scores_do_not_overflow() -> None:
    """exp(200) is infinite in float32; merge takes the maximum off first."""
    partials = [
        Partial(torch.tensor([[[value]]]), torch.tensor([[lse]]))
        for value, lse in ((1.0, 200.0), (3.0, 200.0), (100.0, -200.0))
    ]
    merged = merge(partials)
    assert merged.out.item() == pytest.approx(2.0)
    assert merged.lse.item() == pytest.approx(200.0 + math.log(2.0))


def test_sinks_take_a_share_of_the_weight() -> None:
    """A sink equal to the lse halves the output; of -inf changes nothing; alone it leaves 0."""
    partial = Partial(torch.full((2, 3, 1), 4.0), torch.tensor([[1.0] * 3, [-math.inf] * 3]))
    merged = merge_sinks(partial, torch.tensor([1.0, -math.inf, 0.0]))
    np.testing.assert_allclose(merged.out[0, :2, 0], [2.0, 4.0], rtol=1e-6)
    np.testing.assert_allclose(merged.lse[0, :2], [1.0 + math.log(2.0), 1.0], rtol=1e-6)
    assert (merged.out[1] == 0).all()
    assert merged.lse[1].tolist() == [1.0, -math.inf, 0.0]


def test_refuses_nothing_and_unequal_shapes() -> None:
    """There is no partial of nothing without a shape."""
    with pytest.raises(InvalidRequest, match="at least one"):
        merge([])
    with pytest.raises(InvalidRequest, match="equal shapes"):
        merge([empty(), Partial(torch.zeros(2, 1, 1), torch.zeros(2, 1))])
