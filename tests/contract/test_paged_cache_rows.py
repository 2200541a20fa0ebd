"""PagedCache with more than one row, rows of different length, and roll-back past a window."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from kvservice_client import Client, InvalidRequest, OutOfOrder, PagedCache, PositionOutOfRange
from tests.backends import Backend
from tests.contract.conftest import Start
from tests.driving import close
from tests.paged import Pair, counting, feed_numbers

# -- rows


def test_rows_of_equal_length(client: Client) -> None:
    """A batch that steps together is like one row: `pos` and `seq_len` are ints."""
    pair = Pair(client, num_rows=3, windows=[None, 5])
    for count in (7, 1, 1):
        length = pair.cache.seq_len()
        tokens = pair.draw(count)
        for layer in (0, 1):
            out = pair.cache.attention(layer, *tokens, length, pair.scale)
            close(out, pair.plain.attention(layer, *tokens, scale=pair.scale))
    assert pair.cache.seq_lens() == (9, 9, 9)
    assert pair.cache.popn(1) == 0
    pair.reset()
    pair.feed(4)
    assert pair.cache.popn(3) == 3


def test_rows_of_different_length(client: Client) -> None:
    """Each row has its own number of new tokens, none included; the rest of the output is 0."""
    pair = Pair(client, num_rows=3, windows=[None, 4])
    passes = (6, [6, 1, 3]), (2, [0, 2, 1]), (3, [1, 3, 0]), (1, [1, 1, 1]), (4, [2, 2, 2])
    for num_tokens, counts in passes:
        for out in pair.feed(num_tokens, counts=counts):
            for row, count in enumerate(counts):
                assert not out[row, :, count:].any()
    assert pair.cache.seq_lens() == (10, 9, 7)
    with pytest.raises(InvalidRequest, match="seq_lens"):
        pair.cache.seq_len()


def test_one_row_of_a_batch_is_that_row_alone(client: Client) -> None:
    """What a row gets does not depend on its neighbours."""
    batch = Pair(client, num_rows=2, windows=[None, 4], seed=1)
    alone = Pair(client, windows=[None, 4], seed=2)
    for num_tokens, counts in ((5, [5, 2]), (1, [1, 1]), (3, [1, 3])):
        tokens = batch.draw(num_tokens)
        outs = batch.feed(num_tokens, counts=counts, tokens=tokens)
        mine = tuple(array[1:, :, : counts[1]] for array in tokens)
        for out, expected in zip(outs, alone.feed(counts[1], tokens=mine), strict=True):
            assert np.array_equal(out[1:, :, : counts[1]], expected)


def test_popn_of_rows(client: Client) -> None:
    """One number for all rows, or one for each; clamped row by row."""
    pair = Pair(client, num_rows=3)
    pair.feed(9, counts=[9, 2, 5])
    assert pair.popn([1, 0, 2]) == (1, 0, 2)
    assert pair.cache.seq_lens() == (8, 2, 3)
    assert pair.cache.popn([0, 1, 100]) == (0, 1, 3)
    pair.plain.popn([0, 1, 3])
    pair.check()
    assert pair.cache.popn(2) == 0  # one row had none
    assert pair.cache.seq_lens() == (6, 0, 0)
    pair.plain.popn([2, 2, 2])
    pair.feed(3, counts=[1, 3, 2])
    for wrong in ([1, 2], [1, 2, 3, 4], [0, 0, -1], [1.0, 1, 1]):
        with pytest.raises(InvalidRequest):
            pair.cache.popn(wrong)  # type: ignore[arg-type]


def test_refusal_covers_all_rows(client: Client) -> None:
    """If one row cannot go back, none does; a row that is not asked to is no obstacle."""
    pair = Pair(client, num_rows=2, windows=[None, 5])
    pair.feed(7, counts=[7, 3])
    assert pair.cache.pop([1, 1]).refused
    assert pair.popn([1, 1]) == (0, 0)
    assert pair.popn([0, 2]) == (0, 2)
    pair.feed(2)


def test_bound_of_rows(client: Client) -> None:
    """Every row has the bound of its own; pages count all of them."""
    pair = Pair(client, num_rows=2, max_seq_len=10)
    pair.feed(9, counts=[9, 1])
    assert pair.cache.page_stats().num_pages == 6
    with pytest.raises(PositionOutOfRange):
        pair.cache.attention(0, *pair.draw(2), [9, 1], 1.0)
    pair.feed(2, counts=[1, 2])


def test_wrong_counts_and_positions(client: Client) -> None:
    """Counts and positions that do not fit are refused, with nothing changed."""
    pair = Pair(client, num_rows=2)
    pair.feed(3, counts=[3, 1])
    tokens = pair.draw(2)
    for counts in ([0, 0], [3, 1], [-1, 1], [1], [1, 1, 1], [1.0, 1]):
        with pytest.raises(InvalidRequest):
            pair.cache.attention(0, *tokens, [3, 1], 1.0, counts=counts)  # type: ignore[arg-type]
    with pytest.raises(OutOfOrder) as caught:
        pair.cache.attention(0, *tokens, 3, 1.0)
    assert caught.value.metadata["lengths"] == "3,1"
    with pytest.raises(InvalidRequest):
        pair.cache.attention(0, *tokens, [3, 1, 0], 1.0)
    q, k, v = tokens
    with pytest.raises(InvalidRequest, match="v must be"):
        pair.cache.attention(0, q, k, v[:, :, :1], [3, 1], 1.0, counts=[2, 1])
    pair.check()
    pair.feed(2, counts=[2, 1])


@pytest.mark.parametrize("make", [torch.from_numpy, jnp.asarray])
def test_ragged_kinds_of_arrays(client: Client, make: object) -> None:
    """Ragged rows of torch and JAX arrays, in bfloat16 too."""
    assert callable(make)
    pair = Pair(client, 1, num_rows=2)
    tokens = [make(array) for array in pair.draw(4)]
    bfloat16 = torch.bfloat16 if isinstance(tokens[0], torch.Tensor) else jnp.bfloat16
    for narrow in (False, True):
        cache = PagedCache(1, max_seq_len=8, client=client)
        given = tokens
        if narrow and isinstance(tokens[0], torch.Tensor):
            given = [array.to(bfloat16) for array in tokens]
        elif narrow:
            given = [array.astype(bfloat16) for array in tokens]
        out = cache.attention(0, *given, 0, 0.35, counts=[2, 4])
        assert type(out) is type(tokens[0])
        assert (out.dtype == bfloat16) is narrow
        pair.plain.reset()
        expected = pair.plain.attention(0, *tokens, scale=0.35, counts=[2, 4])
        wide = out.float().numpy() if isinstance(out, torch.Tensor) else np.asarray(out, "float32")
        close(wide, expected, tolerance=3e-2 if narrow else 2e-5)


def test_another_number_of_rows_after_a_reset(backend: Backend) -> None:
    """A reset leaves it open how many rows come next; before, another number is refused."""
    pair = Pair(backend.connect(), num_rows=2, windows=[None, 4])
    pair.feed(9)
    with pytest.raises(InvalidRequest, match="2 rows until"):
        pair.cache.attention(0, *(array[:1] for array in pair.draw(1)), 9, 1.0)
    pair.reset()
    pair.plain.num_rows = 1
    pair.plain.reset()
    pair.plain.called.clear()
    pair.feed(5)
    assert pair.cache.seq_lens() == (5,)
    assert backend.num_sessions() == 1
    pair.reset()
    pair.plain.num_rows = 3
    pair.plain.reset()
    pair.plain.called.clear()
    pair.feed(5, counts=[1, 5, 2])


# -- roll-back past a window


@pytest.mark.parametrize("rollback", [1, 3, 7])
def test_rollback_past_the_window(client: Client, rollback: int) -> None:
    """With rollback=n the newest n tokens can be popped, however long ago evictions began."""
    pair = Pair(client, 3, page_size=2, windows=[None, 3, 6], rollback=rollback)
    pair.feed(17)
    for popped in (1, rollback, rollback // 2 + 1):
        assert pair.popn(popped) == (popped,)
        pair.feed(popped)  # what it was: the next roll-back reaches as far
    assert pair.popn(rollback + 1) == (0,)
    assert pair.cache.pop(rollback + 1).refused
    assert pair.popn(rollback) == (rollback,)
    assert pair.popn(1) == (0,)  # nothing more is kept
    pair.feed(1)
    assert pair.popn(1) == (1,)
    pair.feed(9)


def test_rollback_before_evictions(client: Client) -> None:
    """As long as nothing was let go of, all can be popped, whatever the window."""
    pair = Pair(client, windows=[None, 3], rollback=4)
    pair.feed(6)  # 2 past tokens of the window, and 4 more
    assert pair.popn(6) == (6,)
    pair.feed(7)
    assert pair.popn(6) == (0,)
    assert pair.popn(4) == (4,)


def test_rollback_keeps_that_much_and_no_more(backend: Backend) -> None:
    """The service holds w - 1 past tokens, n for roll-back, and the newest."""
    pair = Pair(backend.connect(), 1, page_size=1, windows=[5], rollback=3)
    pair.feed(20)
    for _ in range(5):
        pair.feed(1)
        assert backend.used_pages() == 4 + 3 + 1


def test_speculative_decoding(client: Client) -> None:
    """Drafts of n tokens, of which some are rejected, equal plain decoding, windows and all."""
    windows = [None, 4]
    speculative = Pair(client, windows=windows, rollback=3, seed=1)
    plain = Pair(client, windows=windows, seed=2)
    prompt = plain.draw(9)
    for pair in (speculative, plain):
        pair.feed(9, tokens=prompt)
    for accepted in (4, 1, 3, 2, 1, 1, 4):
        draft = speculative.draw(4)
        outs = speculative.feed(4, tokens=draft)
        assert speculative.popn(4 - accepted) == (4 - accepted,)
        for step in range(accepted):
            token = tuple(array[:, :, step : step + 1] for array in draft)
            for out, expected in zip(outs, plain.feed(1, tokens=token), strict=True):
                assert np.abs(out[:, :, step : step + 1] - expected).max() < 1e-5


def test_rollback_of_ragged_rows(client: Client) -> None:
    """Rows of a batch accept drafts of their own length."""
    pair = Pair(client, num_rows=3, windows=[None, 4], rollback=2)
    pair.feed(12, counts=[12, 3, 7])
    for rejected in ([0, 2, 1], [2, 0, 2], [1, 1, 0]):
        pair.feed(3)
        assert pair.popn(rejected) == tuple(rejected)
    assert pair.popn([3, 0, 0]) == (0, 0, 0)


# -- several workers


def test_more_than_one_worker_holds(start: Start) -> None:
    """A cache that its worker has no more room for goes on at another one, and comes back."""
    # 256 bytes a token and layer: room for 64 tokens, with what growing takes.
    backend = start(num_workers=2, memory_bytes=40_000)
    pair = Pair(backend.connect(), 2, max_seq_len=200, windows=[None, 6], rollback=2)
    other = Pair(backend.connect(), 1, max_seq_len=200)
    other.feed(60)
    for _ in range(9):
        pair.feed(11)
        assert pair.popn(2) == (2,)
    assert all(worker.stats().num_sessions for worker in backend.workers)
    assert pair.popn(3) == (0,)
    pair.reset()
    pair.feed(5)


def test_caches_do_not_meet(client: Client) -> None:
    """Caches of one client do not see each other."""
    one, two = (PagedCache(1, max_seq_len=64, client=client) for _ in range(2))
    feed_numbers(one, 5)
    two.attention(0, *counting([100, 200]), 0, 1.0)
    assert feed_numbers(one, 1) == pytest.approx([2.5])
    assert two.seq_len() == 2
