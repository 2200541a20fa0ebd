"""Who attaches to a session, or forks another's, knows which of its positions are padding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvservice_client import Client, InvalidRequest, TooLarge, WorkerLost
from kvservice_workers import snapshot
from tests.backends import Backend
from tests.contract.conftest import Start
from tests.contract.test_session_faults import IMPATIENT
from tests.driving import Driver
from tests.faults import Faults

# One row has padding at the left, one in the middle, one nowhere.
PADDING = np.zeros((3, 11), np.bool_)
PADDING[0, :5] = True
PADDING[1, 3:7] = PADDING[1, 9] = True


def attached(parent: Driver, client: Client) -> Driver:
    return Driver(client.attach(parent.session.detach()), dense=parent.dense.fork(), seed=1)


def forked_by_id(parent: Driver, client: Client) -> Driver:
    return Driver(client.fork(parent.session.id), dense=parent.dense.fork(), seed=1)


def forked(parent: Driver, client: Client) -> Driver:
    return parent.fork()


Take = Callable[[Driver, Client], Driver]
WAYS = pytest.mark.parametrize("take", [attached, forked_by_id, forked])
SPREADS = pytest.mark.parametrize("spread", [1, 2], ids=["alone", "spread"])


def open_driver(backend: Backend, spread: int) -> Driver:
    """Open a session with padding, the first tokens of which are on `spread` workers."""
    driver = Driver.open(backend.connect(), num_rows=3, page_size=4, spread=spread)
    driver.step(11, padding=PADDING)
    driver.step()
    assert len(driver.session.page_stats()) == spread
    return driver


def bits(driver: Driver) -> list[list[bool]]:
    """Return the padding as the oracle has it."""
    length = max(driver.dense.lengths(0))
    return [[position in row for position in range(length)] for row in driver.dense.padding]


@SPREADS
@WAYS
def test_it_is_told(start: Start, take: Take, spread: int) -> None:
    """All of it, that of a later step and what turned into padding included; and after a cut, a
    choice of rows or a fork what is left of it."""
    backend = start(num_workers=2)
    parent = open_driver(backend, spread)
    all_positions = np.concatenate([PADDING, np.zeros((3, 2), np.bool_)], axis=1)
    all_positions[2, [4, 12]] = True
    parent.step(padding=all_positions)
    heir = take(parent, backend.connect())
    assert heir.session.padding().tolist() == bits(heir) == all_positions.tolist()
    heir.step(2)
    heir.pop(keep=[4, 6, 13])
    heir.select([2, 0, 1, 1])
    again = take(heir, backend.connect())
    assert again.session.padding().tolist() == bits(again)
    again.step()


@SPREADS
@WAYS
def test_attention_obeys_it(start: Start, take: Take, spread: int) -> None:
    """Padding is not seen, queries at it return 0, on whichever worker they find tokens, and chunks
    are counted from its end."""
    backend = start(num_workers=2)
    heir = take(open_driver(backend, spread), backend.connect())
    heir.query(0, 3, query_positions=[3, 5, 2])
    heir.query(1, 12, query_positions=[0, 0, 0])
    heir.step(3, mask="chunk", chunk=4)
    heir.step(2, mask="full")
    heir.query(0, 2)


@SPREADS
@WAYS
def test_it_stays_padding(start: Start, take: Take, spread: int) -> None:
    """The new holder cannot say that it is tokens, and nothing changes by trying."""
    backend = start(num_workers=2)
    heir = take(open_driver(backend, spread), backend.connect())
    none = np.zeros((3, 13), np.bool_)
    with pytest.raises(InvalidRequest, match="never turns back"):
        heir.session.attend(0, *heir.tokens(1), padding=none)
    none[:, :11] = PADDING
    heir.step(padding=none)
    heir.check_stored()


def test_a_worker_that_comes_later_is_told(start: Start) -> None:
    """Where the tail is full, the next worker counts chunks from the end of padding, too."""
    page_bytes = 2 * 4 * 2 * 8 * 4 * 2  # two layers, 4 tokens, 2 heads of 8 and 8 floats
    backend = start(num_workers=2, memory_bytes=12 * page_bytes)
    heir = attached(open_driver(backend, 1), backend.connect())
    while len(heir.session.page_stats()) == 1:
        heir.step(3, mask="chunk", chunk=7)
    for _ in range(8):
        heir.step(1, mask="chunk", chunk=7)
    assert heir.session.padding()[:, :11].tolist() == PADDING.tolist()


def test_what_a_lost_answer_has_told(start: Start) -> None:
    """What became padding by a call that was given up is padding, as the worker has it."""
    backend = start()
    faults = Faults(backend.dial)
    client = backend.connect(dial=faults.dial, config=IMPATIENT)
    driver = Driver.open(client, num_rows=1, page_size=4)
    driver.step(6)
    later = np.array([[False, True, False, False, False, False, False]])
    faults.lose("Attend", "answer", times=10_000)
    with pytest.raises(WorkerLost):
        driver.session.attend(0, *driver.tokens(1), padding=later)
    faults.forget()
    driver.session.roll_back()
    assert driver.session.padding().tolist() == later[:, :6].tolist()
    with pytest.raises(InvalidRequest, match="never turns back"):
        driver.session.attend(0, *driver.tokens(1), padding=np.zeros_like(later))
    driver.step(padding=later)


@SPREADS
def test_more_than_can_be_told(start: Start, spread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a bound. Beyond it a session cannot be taken over, which changes nothing; its holder
    and a fork of a part of it that is within the bound go on."""
    backend = start(num_workers=2)
    driver, other = open_driver(backend, spread), backend.connect()
    monkeypatch.setattr(snapshot, "MAX_PADDING_RANGES", 1)
    epoch = driver.session.epoch
    with pytest.raises(TooLarge) as failure:
        other.attach(driver.session.id)
    assert failure.value.metadata["limit"] == "65536"
    with pytest.raises(TooLarge):
        other.fork(driver.session.id)
    assert driver.session.epoch == epoch
    assert backend.num_sessions() == spread
    part = Driver(other.fork(driver.session.id, 3), dense=driver.dense.fork())
    part.dense.pop(keep=3)
    assert part.session.padding().tolist() == PADDING[:, :3].tolist()
    for each in (driver, driver.fork(), part):
        each.step()
        each.check_stored()
