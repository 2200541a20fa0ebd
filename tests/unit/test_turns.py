"""Turns: one caller at a time decides where a session goes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvservice.clock import ManualClock, SystemClock
from kvservice.core.errors import Unavailable
from kvservice.manager.turns import Turns

KEY, OTHER = ("alice", "a"), ("alice", "b")
TIMEOUT_S = 30.0


class WatchedClock(SystemClock):
    """Says when somebody has begun to wait."""

    def __init__(self) -> None:
        self.waits = threading.Event()

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        self.waits.set()
        return super().wait(event, timeout_s)


class OverClock(ManualClock):
    """Nothing that is waited for comes in time."""

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        assert timeout_s is not None
        self.advance(timeout_s)
        return super().wait(event, 0.0)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_a_repeat_waits_for_the_first(pool: ThreadPoolExecutor) -> None:
    """Who comes second finds the session as the first has left it, and is let in then."""
    clock = WatchedClock()
    turns, order = Turns(clock, TIMEOUT_S), list[str]()

    def second() -> None:
        with turns.take(KEY):
            order.append("second")

    with turns.take(KEY):
        repeat = pool.submit(second)
        assert clock.waits.wait(TIMEOUT_S)
        order.append("first")
    repeat.result(TIMEOUT_S)
    assert order == ["first", "second"]
    assert not turns.is_taken(KEY)


def test_other_sessions_are_not_waited_for() -> None:
    """Two sessions may be decided about at the same time."""
    turns = Turns(OverClock(), TIMEOUT_S)
    with turns.take(KEY):
        assert turns.is_taken(KEY)
        assert not turns.is_taken(OTHER)
        with turns.take(OTHER):
            assert turns.is_taken(OTHER)
        assert not turns.is_taken(OTHER)


def test_who_waits_too_long_is_told(pool: ThreadPoolExecutor) -> None:
    """The turn stays with who has it, and is given on when that one is through."""
    turns = Turns(OverClock(), TIMEOUT_S)

    def late() -> None:
        with turns.take(KEY):
            pytest.fail("two have the turn")

    with turns.take(KEY):
        with pytest.raises(Unavailable):
            pool.submit(late).result(TIMEOUT_S)
        assert turns.is_taken(KEY)
    with turns.take(KEY):
        pass


def test_a_failure_ends_the_turn() -> None:
    """Whoever fails stands in nobody's way."""
    turns = Turns(ManualClock(), TIMEOUT_S)
    with pytest.raises(KeyError), turns.take(KEY):
        raise KeyError
    assert not turns.is_taken(KEY)
