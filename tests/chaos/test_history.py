"""The checker of histories finds what is wrong, and only that. Not chaos: it checks the checker."""

from __future__ import annotations

import pytest

from tests.chaos.history import Event, Outcome, find_contradiction

OK, FAIL, UNKNOWN = Outcome.OK, Outcome.FAIL, Outcome.UNKNOWN


def history(*calls: tuple[str, int, Outcome]) -> list[Event]:
    return [
        Event(0, 0, op, value, float(at), at + 0.5, outcome)
        for at, (op, value, outcome) in enumerate(calls)
    ]


@pytest.mark.parametrize(
    "calls",
    [
        [("append", 3, OK), ("append", 2, UNKNOWN), ("see", 5, OK)],
        [("append", 3, OK), ("append", 2, UNKNOWN), ("see", 3, OK)],
        [("append", 3, OK), ("append", 2, FAIL), ("see", 3, OK)],
        [("append", 9, OK), ("pop", 4, UNKNOWN), ("append", 1, OK), ("see", 10, OK)],
        [("append", 9, OK), ("reset", 0, UNKNOWN), ("see", 0, OK), ("append", 1, OK)],
    ],
)
def test_what_can_be(calls: list[tuple[str, int, Outcome]]) -> None:
    """An unknown call may have happened, or not."""
    assert find_contradiction(history(*calls)) is None


@pytest.mark.parametrize(
    "calls",
    [
        [("append", 3, OK), ("append", 2, OK), ("see", 3, OK)],  # lost
        [("append", 3, OK), ("append", 2, FAIL), ("see", 5, OK)],  # refused, and yet there
        [("append", 3, OK), ("append", 2, UNKNOWN), ("see", 7, OK)],  # acted twice
        [("append", 9, OK), ("pop", 4, UNKNOWN), ("see", 9, OK), ("see", 4, OK)],  # came late
    ],
)
def test_what_cannot_be(calls: list[tuple[str, int, Outcome]]) -> None:
    """Lost, done though refused, done twice, done after it was seen not to be."""
    assert find_contradiction(history(*calls)) is not None
