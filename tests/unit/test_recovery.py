"""When a manager has taken over from another, and how that went."""

from __future__ import annotations

import pytest

from kvservice.core.recovery import Recovery, TakeOver


def take_over(workers_expected: int = 2) -> TakeOver:
    return TakeOver("me", workers_expected, started_at=100.0, settle_s=3.0)


def test_first_manager_takes_over_from_nobody() -> None:
    """Workers that have never heard a manager make a start, and no recovery."""
    watch = take_over()
    watch.registered("", 1, 100.1)
    watch.registered("", 2, 100.2)
    watch.registered("me", 2, 101.0)  # its connection broke, and it came back
    assert watch.recovery(200.0) is None


def test_recovery_is_complete_with_the_last_worker() -> None:
    """It took until the last that should be there had spoken; later ones change nothing."""
    watch = take_over()
    watch.registered("before", 1, 100.5)
    assert watch.recovery(100.6) is None
    watch.registered("before", 2, 101.25)
    watch.registered("before", 3, 102.0)
    assert watch.recovery(101.5) == Recovery("complete", pytest.approx(1.25))


def test_recovery_is_partial_when_the_time_is_over() -> None:
    """A worker that comes later makes it no more complete."""
    watch = take_over()
    watch.registered("before", 1, 100.5)
    assert watch.recovery(102.0) is None
    watch.registered("before", 2, 104.0)
    assert watch.recovery(105.0) == Recovery("partial", 3.0)


def test_without_a_number_of_workers_the_time_decides() -> None:
    """Those that came within it were all, as far as anybody can tell."""
    watch = take_over(workers_expected=0)
    watch.registered("before", 1, 100.5)
    watch.registered("before", 2, 101.0)
    assert watch.recovery(102.0) is None
    assert watch.recovery(103.5) == Recovery("complete", pytest.approx(1.0))
