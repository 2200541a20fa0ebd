"""Structural changes, and keys and values at positions, against the oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvservice_client import (
    Client,
    Conflict,
    DType,
    InvalidRequest,
    LayerGeometry,
    OutOfOrder,
    PositionOutOfRange,
)
from tests.contract.conftest import Start
from tests.driving import Driver

# Every test runs on one worker, and with the rows' tokens on two.
SPREADS = pytest.mark.parametrize("spread", [1, 2], ids=["alone", "spread"])


@pytest.fixture
def open_driver(start: Start) -> Callable[..., Driver]:
    """Opens drivers on two workers, the first 10 tokens of which are on the first, if spread."""
    client = start(num_workers=2).connect()

    def open_driver(spread: int, **options: object) -> Driver:
        driver = Driver.open(client, spread=spread, page_size=4, **options)
        driver.step(11)
        driver.step()
        return driver

    return open_driver


@SPREADS
def test_pop(open_driver: Callable[..., Driver], spread: int) -> None:
    """The newest tokens go, by number or by what stays; more than there are: all."""
    driver = open_driver(spread)
    driver.pop(np.int64(3))
    driver.step(2)
    driver.pop(keep=[10, 4])
    driver.step()
    driver.check_stored()
    driver.pop(keep=100)
    driver.pop(0)
    driver.step(3)
    driver.pop(100)
    assert driver.session.lengths(0) == (0, 0)
    driver.step(5)
    driver.check_stored()


@SPREADS
def test_pop_below_all_that_a_worker_holds(open_driver: Callable[..., Driver], spread: int) -> None:
    """An extent that a pop has emptied is closed, and the tail goes back."""
    driver = open_driver(spread)
    driver.pop(keep=5)
    assert len(driver.session.page_stats()) == 1
    for count in (1, 6, 3):
        driver.step(count)
    driver.check_stored()


@SPREADS
def test_rows_cut_on_different_workers(open_driver: Callable[..., Driver], spread: int) -> None:
    """One row may end on the first worker, the other on the second."""
    driver = open_driver(spread)
    driver.pop(keep=[3, 11])
    driver.step(2)
    driver.pop(keep=[4, 12])
    driver.step()
    driver.check_stored()
    driver.pop(keep=[2, 2])
    driver.step(3)
    driver.check_stored()


@SPREADS
def test_pop_counts_epochs(open_driver: Callable[..., Driver], spread: int) -> None:
    """A change moves the session to the next epoch; what changes nothing does not."""
    driver = open_driver(spread)
    epoch = driver.session.epoch
    driver.pop(keep=50)
    driver.select([0, 1])
    assert driver.session.epoch == epoch
    driver.pop(1)
    assert driver.session.epoch == epoch + 1


@SPREADS
def test_select(open_driver: Callable[..., Driver], spread: int) -> None:
    """Rows are reordered, repeated and dropped, and part ways afterwards."""
    driver = open_driver(spread)
    for rows in ([1, 0], [0, 0, 1], [2], [0, 0]):
        driver.select(rows)
        assert driver.session.num_rows == len(rows)
        driver.step()
    driver.check_stored()


@SPREADS
def test_beams(open_driver: Callable[..., Driver], spread: int) -> None:
    """A beam search: rows are picked after every step."""
    driver = open_driver(spread, num_rows=4)
    for _ in range(8):
        driver.select(driver.rng.integers(0, 4, 4).tolist())
        driver.step()
    driver.check_stored()


@SPREADS
def test_select_takes_padding_along(open_driver: Callable[..., Driver], spread: int) -> None:
    """Padding belongs to the row it came with."""
    driver = open_driver(spread)
    driver.reset()
    padding = np.zeros((2, 10), np.bool_)
    padding[0, :6] = True
    driver.step(10, padding=padding)
    driver.select([1, 0, 0])
    driver.step(2)
    driver.pop(keep=5)
    driver.step()


@SPREADS
def test_pop_forgets_padding(open_driver: Callable[..., Driver], spread: int) -> None:
    """Where padding was popped, tokens may follow."""
    driver = open_driver(spread)
    padding = np.array([[True] * 4, [False] * 3 + [True]])
    driver.step(4, padding=padding)
    driver.pop(keep=13)
    whole = np.zeros((2, 16), np.bool_)
    whole[0, 12] = True  # what is left of it
    outs = driver.step(3, padding=whole)
    assert outs[0][:, :, 0].all()
    driver.pop(keep=[9, 13])
    driver.step(2, padding=np.zeros((2, 2), np.bool_))
    driver.check_stored()


@SPREADS
def test_fork(open_driver: Callable[..., Driver], spread: int) -> None:
    """Parent and child share a past, and see nothing of each other afterwards."""
    parent = open_driver(spread)
    child = parent.fork()
    grandchild = child.fork(7)
    for _ in range(4):
        for driver in (parent, child, grandchild):
            driver.step()
    for driver in (parent, child, grandchild):
        driver.check_stored()
    child.session.release()
    parent.pop(keep=3)
    parent.step(2)
    grandchild.step(2)
    grandchild.check_stored()


@SPREADS
def test_fork_of_a_part(open_driver: Callable[..., Driver], spread: int) -> None:
    """The leading tokens of each row can be shared alone."""
    parent = open_driver(spread)
    for token_count in (1, 4, 9, 12):
        child = parent.fork(token_count)
        assert child.session.lengths(1) == (token_count, token_count)
        child.step(2)
        child.check_stored()
    with pytest.raises(PositionOutOfRange):
        parent.session.fork(13)
    with pytest.raises(PositionOutOfRange):
        parent.session.fork(0)


@SPREADS
def test_reset(open_driver: Callable[..., Driver], spread: int) -> None:
    """All tokens go; the session can be used again, shared out as at first."""
    driver = open_driver(spread)
    driver.reset()
    assert driver.session.lengths(0) == (0, 0)
    driver.step(13)
    assert len(driver.session.page_stats()) == spread
    driver.step()
    driver.check_stored()


@SPREADS
def test_roll_back(open_driver: Callable[..., Driver], spread: int) -> None:
    """A step that died half-way is undone, and can be fed again."""
    driver = open_driver(spread)
    session = driver.session
    session.attend(0, *driver.tokens(2))
    assert session.lengths(0) == (14, 14)
    session.attend(0, *driver.tokens(1))
    with pytest.raises(Conflict):  # the second layer has been left behind
        session.attend(1, *driver.tokens(1))
    with pytest.raises(Conflict):
        session.attend(0, *driver.tokens(1))
    session.roll_back()
    assert session.lengths(0) == session.lengths(1) == (12, 12)
    driver.step(2)
    driver.check_stored()
    session.roll_back()
    driver.step()


def test_roll_back_of_the_first_step(open_driver: Callable[..., Driver]) -> None:
    """If a call of the very first step fails, all of it goes."""
    driver = open_driver(1)
    driver.reset()
    session = driver.session
    session.attend(0, *driver.tokens(4))
    with pytest.raises(InvalidRequest):
        session.attend(1, *driver.tokens(4), window=0)
    with pytest.raises(Conflict, match="layer 1"):
        session.attend(0, *driver.tokens(4))
    session.roll_back()
    driver.step(4)
    driver.check_stored()


@SPREADS
def test_write_and_read(open_driver: Callable[..., Driver], spread: int) -> None:
    """Tokens go to listed positions, wherever these are held, and come back from there."""
    driver = open_driver(spread)
    session = driver.session
    k, v = session.read(0)
    _, new_k, new_v = driver.tokens(3)
    session.write(0, new_k, new_v, positions=[11, 2, 7])
    k[:, :, [11, 2, 7]], v[:, :, [11, 2, 7]] = new_k, new_v
    per_row = [[0, 3, 0], [9, 8, 10]]
    session.write(0, new_k, new_v, positions=per_row)
    for row, positions in enumerate(per_row):
        for token, position in enumerate(positions):  # the last of two equal ones wins
            k[row, :, position], v[row, :, position] = new_k[row, :, token], new_v[row, :, token]
    session.write(0, new_k[:1], new_v[:1], rows=[1], positions=[4, 5, 6])
    k[1, :, 4:7], v[1, :, 4:7] = new_k[0], new_v[0]
    for start, stop in ((0, 12), (5, 9), (9, 12), (0, 1)):
        got_k, got_v = session.read(0, start, stop)
        assert np.array_equal(got_k, k[:, :, start:stop])
        assert np.array_equal(got_v, v[:, :, start:stop])


@SPREADS
def test_write_appends(open_driver: Callable[..., Driver], spread: int) -> None:
    """Without positions, tokens go behind each row's end; attention sees them."""
    driver = open_driver(spread)
    driver.pop(keep=[7, 10])
    for layer in range(2):
        q, k, v = driver.tokens(3)
        driver.session.write(layer, k, v)
        driver.dense.attend(layer, q, k, v)
    assert driver.session.lengths(0) == (10, 13)
    driver.step()
    driver.check_stored()


def test_write_beyond_the_end(open_driver: Callable[..., Driver]) -> None:
    """What a write jumps over reads as zeros, and is padding to attention."""
    driver = open_driver(1)
    driver.pop(keep=4)
    gap = np.zeros((2, 2, 3, 8), np.float32)
    for layer in range(2):
        _, k, v = driver.tokens(2)
        driver.session.write(layer, k, v, positions=[7, 8])
        padding = np.array([[True] * 3 + [False] * 2] * 2)
        longer = [np.concatenate([gap[:, : x.shape[1]], x], 2) for x in (k, v)]
        driver.dense.attend(layer, driver.random(4, 5, 8), *longer, padding=padding)
    k, v = driver.session.read(0, 4, 7)
    assert not k.any()
    assert not v.any()
    driver.step(2)


def test_first_write_of_a_spread_session(open_driver: Callable[..., Driver]) -> None:
    """Tokens that are written before any attention stay together."""
    driver = open_driver(2)
    driver.reset()
    for layer in range(2):
        q, k, v = driver.tokens(10)
        driver.session.write(layer, k, v)
        driver.dense.attend(layer, q, k, v)
    driver.step()
    driver.check_stored()


def test_ragged_reads(open_driver: Callable[..., Driver]) -> None:
    """Rows that were cut at different places read right, zeros behind the shorter one."""
    driver = open_driver(2)
    k, _ = driver.session.read(0)
    driver.pop(keep=[3, 10])
    got, _ = driver.session.read(0)
    assert np.array_equal(got[1], k[1, :, :10])
    assert np.array_equal(got[0, :, :3], k[0, :, :3])
    assert not got[0, :, 3:].any()
    got, _ = driver.session.read(0, 8, 10)
    assert np.array_equal(got[1], k[1, :, 8:10])


def test_evicted_positions(client: Client) -> None:
    """What a window has evicted is neither read nor popped to, and nothing changes by trying."""
    driver = Driver.open(client, page_size=4, windows=[4, 4])
    for _ in range(15):
        driver.step(windows=[4, 4])
    session = driver.session
    with pytest.raises(PositionOutOfRange):
        session.read(0)
    k, _ = session.read(0, 12)
    assert k.shape == (2, 2, 3, 8)
    epoch = session.epoch
    for change in (lambda: session.pop(8), lambda: session.fork(7)):
        with pytest.raises(PositionOutOfRange):
            change()
    assert session.epoch == epoch
    driver.step(windows=[4, 4])


def test_write_evicts(client: Client) -> None:
    """Writing can free what has left the windows, as attention does. What is gone is neither read
    nor written again; what queries see is there."""
    layers = [LayerGeometry(2, 8, 8, DType.FLOAT32)] * 2
    driver = Driver.open(client, page_size=4, layers=layers, windows=[6, 6])
    session = driver.session
    for length in range(30):
        write_step(driver, length, window=6)
    (stats,) = client.page_stats()
    assert sum(pool.used_pages for pool in stats.pools) <= 2 * 3  # 6 tokens touch up to 3 pages
    k, v = session.read(1, 24)
    for row in range(2):
        for got, expected in zip((k, v), driver.dense.read(1, row), strict=True):
            assert np.array_equal(got[row], expected[:, 24:].astype(np.float32))
    driver.query(0, window=6)
    _, k, v = driver.tokens(1)
    with pytest.raises(PositionOutOfRange):
        session.read(0, 23)
    with pytest.raises(PositionOutOfRange):
        session.write(0, k, v, positions=[23])
    with pytest.raises(PositionOutOfRange):
        session.pop(3)


@pytest.mark.parametrize("kept", [3, None])
def test_write_evicts_no_more_than_it_may(client: Client, kept: int | None) -> None:
    """Tokens that queries may come back to stay, and by default all."""
    driver = Driver.open(client, page_size=4, windows=[4, 4])
    for length in range(20):
        write_step(driver, None if kept is None else max(0, length - kept), window=4)
    driver.pop(15 if kept is None else 4)
    driver.step(2, windows=[4, 4])


def write_step(driver: Driver, queries_from: int | None, *, window: int) -> None:
    """Write a token to each layer, without attention."""
    for layer in range(driver.num_layers):
        q, k, v = driver.tokens(1)
        driver.session.write(layer, k, v, queries_from=queries_from)
        driver.dense.attend(layer, q, k, v, window=window)


def test_order(open_driver: Callable[..., Driver]) -> None:
    """An append anywhere but at the length is refused, with the length."""
    driver = open_driver(1)
    with pytest.raises(OutOfOrder) as failure:
        driver.session.attend(0, *driver.tokens(1), pos=10)
    assert failure.value.metadata["lengths"] == "12,12"
    driver.step()


def test_steps_share_counts(client: Client) -> None:
    """Layers of one step bring the same number of tokens, at the same positions."""
    driver = Driver.open(client)
    session = driver.session
    session.attend(0, *driver.tokens(3))
    with pytest.raises(Conflict, match="new tokens per row"):
        session.attend(1, *driver.tokens(2))
    session.attend(1, *driver.tokens(3))
    assert session.lengths(1) == (3, 3)
