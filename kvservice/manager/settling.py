"""Settling: what a manager that has just started does not know yet."""

from __future__ import annotations

from typing import Final

from kvservice.clock import Clock
from kvservice.core.errors import Unavailable
from kvservice.manager.directory import RETRY_DELAY_S, SharedDirectory

SETTLE_S: Final = 5.0
"""How long workers may be on their way to a manager that has just started."""


class Settling:
    """Whether it is known which workers there are.

    Args:
        workers_expected: When so many have registered, or `SETTLE_S` are over, it is. 0: unknown;
            then only what others say of a worker is waited for.
    """

    def __init__(self, directory: SharedDirectory, clock: Clock, workers_expected: int) -> None:
        self._directory = directory
        self._clock = clock
        self._workers_expected = workers_expected
        self.ends_at = clock.monotonic() + SETTLE_S

    def check(self) -> None:
        """Refuse to decide anything before the workers that are expected have reported.

        Raises:
            Unavailable: They have not, and there is time left for it.
        """
        if self._workers_expected:
            self.check_heard_of_all()

    def check_heard_of_all(self) -> None:
        """As `check`, of a worker that others have named: it counts even if none is expected."""
        if self._clock.monotonic() >= self.ends_at:
            return
        num_workers = len(self._directory.workers())
        if 0 < self._workers_expected <= num_workers:
            return
        expected = self._workers_expected or "an unknown number"
        raise Unavailable(
            f"{num_workers} of {expected} workers have registered so far",
            retry_delay_s=RETRY_DELAY_S,
        )
