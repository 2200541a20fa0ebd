"""Whether a manager has taken over from an earlier one, and how long that took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OUTCOMES: Final = ("complete", "partial")


@dataclass(frozen=True, slots=True)
class Recovery:
    """A take-over that is done.

    Fields:
        outcome: complete: all workers that there should be have said what they hold. partial: the
            time for that was over first.
        seconds: From the manager's start to the last worker's word, or to the end of that time.
    """

    outcome: str
    seconds: float


class TakeOver:
    """Watches a manager's first seconds. `now` is monotonic, in seconds.

    Args:
        incarnation: The manager's own.
        workers_expected: 0: unknown.
        settle_s: The time in which workers are to come back.
    """

    def __init__(
        self, incarnation: str, workers_expected: int, *, started_at: float, settle_s: float
    ) -> None:
        self._incarnation = incarnation
        self._expected = workers_expected
        self._started_at = started_at
        self._settle_s = settle_s
        self._from_another = False
        self._last_at: float | None = None
        self._complete = False

    def registered(self, known_manager: str, num_workers: int, now: float) -> None:
        """Note that a worker has registered.

        Args:
            known_manager: The manager that it heard last; empty if it never heard one.
            num_workers: How many have registered by now.
        """
        if known_manager not in ("", self._incarnation):
            self._from_another = True
        if now - self._started_at <= self._settle_s and not self._complete:
            self._last_at = now
            self._complete = 0 < self._expected <= num_workers

    def recovery(self, now: float) -> Recovery | None:
        """Return how it ended; None if there was nobody to take over from, or it goes on."""
        over = now - self._started_at > self._settle_s
        if not self._from_another or not (self._complete or over):
            return None
        if self._last_at is not None and (self._complete or not self._expected):
            return Recovery("complete", self._last_at - self._started_at)
        return Recovery("partial", self._settle_s)
