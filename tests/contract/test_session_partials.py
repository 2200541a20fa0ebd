"""Attention to what is stored alone, to be merged with attention to other positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvservice_client import Client, InvalidRequest
from tests.driving import Driver, close
from tests.oracles import dense_rows

PAST, NEW = 9, 5


def merged(*partials: Any) -> Any:
    """Return attention over the positions of all partials, as the docstring says."""
    lse = np.logaddexp.reduce([lse for _, lse in partials])
    return sum(out * np.exp(part - lse)[..., None] for out, part in partials)


@pytest.mark.parametrize("spread", [1, 2])
@pytest.mark.parametrize(
    "how", [{}, {"window": 4}, {"softcap": 1.5}, {"mask": "chunk", "chunk": 6}, {"mask": "full"}]
)
def test_what_is_stored_and_what_is_not(start: Any, how: dict[str, Any], spread: int) -> None:
    """Merged with the new tokens' own partial, it is attention over all; nothing is stored."""
    client = start(num_workers=spread).connect()
    driver = Driver.open(client, page_size=4, spread=spread)
    driver.step(PAST)
    k, v = driver.session.read(0)
    q, new_k, new_v = driver.tokens(NEW)
    calls: list[int] = []
    past = driver.session.attend_partial(
        0, q, query_positions=PAST, meanwhile=lambda: calls.append(1), **how
    )
    assert calls == [1]
    assert past[0].dtype == past[1].dtype == np.float32
    assert past[1].shape == (2, 4, NEW)
    queries, keys = np.arange(PAST, PAST + NEW)[:, None], np.arange(PAST + NEW)[None]
    seen = (keys <= queries) | (how.get("mask") == "full")
    seen = seen & (keys > queries - how.get("window", 99))
    seen = seen & (keys // how.get("chunk", 99) == queries // how.get("chunk", 99))
    how_scored = {"scale": q.shape[-1] ** -0.5, "softcap": how.get("softcap")}
    new = dense_rows(q, new_k, new_v, seen[:, PAST:], **how_scored)
    whole = np.concatenate([k, new_k], axis=2), np.concatenate([v, new_v], axis=2)
    expected, _ = dense_rows(q, *whole, seen, **how_scored)
    close(merged(past, new), expected)
    assert driver.session.lengths(0) == (PAST, PAST)
    driver.step(NEW)
    driver.check_stored()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arrays_of_the_callers_kind(client: Client, dtype: torch.dtype) -> None:
    """Partials are float32, whatever the queries are; what is not seen is nothing."""
    session = client.open(num_rows=1)
    k, v = torch.randn(2, 1, 2, 3, 8).to(dtype)
    session.write(0, k, v)
    q = torch.randn(1, 4, 2, 8).to(dtype)
    out, lse = session.attend_partial(0, q, query_positions=3, window=2)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == lse.dtype == torch.float32
    assert (out.shape, lse.shape) == ((1, 4, 2, 8), (1, 4, 2))
    assert lse[:, :, 1].isneginf().all()
    assert not out[:, :, 1].any()
    with pytest.raises(InvalidRequest):
        session.attend_partial(1, q, query_positions=0)


def test_what_is_done_meanwhile_may_fail(client: Client) -> None:
    """Its error is the caller's; the session goes on."""
    driver = Driver.open(client)
    driver.step(3)

    def fail() -> None:
        raise RuntimeError("of the caller's own")

    with pytest.raises(RuntimeError, match="own"):
        driver.session.attend_partial(0, driver.tokens(2)[0], query_positions=3, meanwhile=fail)
    driver.step(2)
    driver.step()


def test_padding_that_is_written_within_a_step(client: Client) -> None:
    """It is still known when queries are asked that belong to the step before."""
    driver = Driver.open(client, num_layers=1)
    driver.step(3)
    session = driver.session
    q, k, v = driver.tokens(2)
    session.write(0, k, v, padding=[[False, True], [False, False]])
    session.attend_partial(0, q, query_positions=3)
    assert session.padding().tolist() == [[False] * 4 + [True], [False] * 5]
