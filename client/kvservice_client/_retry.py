"""When to ask again, and when to give up."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, TypeVar

from kvservice.clock import Clock
from kvservice.core.errors import (
    DeadlineExceeded,
    Draining,
    KVServiceError,
    Moving,
    Overloaded,
    Unavailable,
)

MOVING_DELAY_S: Final = 0.01
"""How long to wait for a session that is between two workers."""

T = TypeVar("T")
Attempt = Callable[[float], T]
"""Makes one try, within the given seconds. Every try sends the same bytes."""


class Random(Protocol):
    """What we need of `random.Random`."""

    def uniform(self, a: float, b: float, /) -> float: ...


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to wait before a try: exponential from `first_delay_s` to `max_delay_s`.

    Each delay is drawn evenly from (1 - jitter) of it to all of it, so that clients that lost the
    same server do not come back as one.
    """

    first_delay_s: float = 0.02
    factor: float = 2.0
    max_delay_s: float = 0.5
    jitter: float = 0.5

    def delay_s(self, num_failures: int, rng: Random) -> float:
        """Return the delay after this many failures, at least 1."""
        full = min(self.max_delay_s, self.first_delay_s * self.factor ** (num_failures - 1))
        return rng.uniform(full * (1.0 - self.jitter), full)


class ServerDead(Exception):
    """Nobody has answered for the whole detection time. Never leaves the client."""


class Verdict(Enum):
    """What somebody else says about a server that does not answer."""

    DEAD = "dead"
    ALIVE = "alive"
    UNKNOWN = "unknown"


Judge = Callable[[bool], Verdict]
"""Says what is known of a silent server. Told whether the detection time is over, and so whether
nothing but its word stands between the server and its being given up. Must not raise."""


@dataclass(frozen=True, slots=True)
class Detection:
    """When a server counts as dead.

    Fields:
        dead_after_s: Seconds without an answer, failed tries at the start and the end of them.
        silence_s: What of a failed try counts, at most: a call may have been at work for long
            before the connection broke, and that says nothing about the server now.
    """

    dead_after_s: float
    silence_s: float


class Retrier:
    """Repeats what may be repeated, as long as it can help. Thread-safe.

    MOVING is tried again at once, and says nothing against the server. UNAVAILABLE is tried again
    (but not DRAINING, which is an answer), and OVERLOADED, which is a sign of life; every other
    error is the caller's at once. `close` ends all waiting.
    """

    def __init__(self, clock: Clock, rng: Random | None = None, policy: RetryPolicy | None = None):
        self._clock = clock
        self._rng: Random = rng if rng is not None else random.Random()
        self._policy = policy if policy is not None else RetryPolicy()
        self._closed = threading.Event()

    def run(
        self,
        attempt: Attempt[T],
        timeout_s: float,
        detection: Detection | None = None,
        judge: Judge | None = None,
        *,
        began: float | None = None,
    ) -> T:
        """Return what `attempt` returns, trying again while nobody answers.

        Args:
            timeout_s: For all tries together.
            detection: When to give up before that. None: never.
            judge: Asked after each failed try but the first. Whom it calls alive is not given up:
                it is the way there that is broken.
            began: When the first try began, if `attempt` only tells what became of it. None: it
                is made now.

        Raises:
            ServerDead: Nobody has answered for the detection time, or it is known to be dead.
            Unavailable, Overloaded: Nobody has answered within `timeout_s`.
            DeadlineExceeded: The answer to the only try did not come in time.
        """
        start = self._clock.monotonic() if began is None else began
        try:
            return attempt(timeout_s)
        except (Draining, DeadlineExceeded):
            raise
        except (Unavailable, Overloaded) as error:
            failure: KVServiceError = error
        return self._run_again(attempt, failure, start, timeout_s, _Tries(detection), judge)

    def _run_again(
        self,
        attempt: Attempt[T],
        failure: KVServiceError,
        began: float,
        timeout_s: float,
        tries: _Tries,
        judge: Judge | None,
    ) -> T:
        """Go on after a first try, begun at `began`, which has failed."""
        deadline = began + timeout_s
        while True:
            now = self._clock.monotonic()
            if isinstance(failure, Moving):  # whoever says so lives, and it takes milliseconds
                tries.begin_again()
                delay_s = self._rng.uniform(MOVING_DELAY_S / 2, MOVING_DELAY_S)
            else:
                now, delay_s = self._judge(failure, began, now, tries, judge)
            if now + delay_s >= deadline or self._clock.wait(self._closed, delay_s):
                raise _last_word(failure, timeout_s) from failure.__cause__
            began = self._clock.monotonic()
            # Once a try has failed, a hanging one says no more than a failing one.
            remaining_s = max(0.001, min(deadline, tries.give_up_at) - began)
            try:
                return attempt(remaining_s)
            except Draining:
                raise
            except (Unavailable, Overloaded, DeadlineExceeded) as error:
                failure = error

    def _judge(
        self,
        failure: KVServiceError,
        began: float,
        now: float,
        tries: _Tries,
        judge: Judge | None,
    ) -> tuple[float, float]:
        """Return the time, and how long to wait before the next try, unless the server is dead."""
        tries.failed(failure, began, now)
        if tries.num_failures > 1:
            is_over = now >= tries.give_up_at
            verdict = Verdict.UNKNOWN if judge is None else judge(is_over)
            if verdict is Verdict.DEAD or (is_over and verdict is Verdict.UNKNOWN):
                raise ServerDead(str(failure)) from failure
            if is_over:
                tries.begin_again()
            now = self._clock.monotonic()
        return now, self._policy.delay_s(tries.num_failures, self._rng)

    def close(self) -> None:
        """End all waiting: what is being retried fails with what it failed with last."""
        self._closed.set()


class _Tries:
    def __init__(self, detection: Detection | None) -> None:
        self._detection = detection
        self.num_failures = 0
        self.give_up_at = float("inf")

    def begin_again(self) -> None:
        """The server lives: the next failure begins another detection time."""
        self.give_up_at = float("inf")

    def failed(self, failure: KVServiceError, began: float, now: float) -> None:
        self.num_failures += 1
        if isinstance(failure, Overloaded):
            self.begin_again()
        elif self.give_up_at == float("inf") and self._detection is not None:
            dead_since = max(began, now - self._detection.silence_s)
            self.give_up_at = dead_since + self._detection.dead_after_s


def _last_word(failure: KVServiceError, timeout_s: float) -> KVServiceError:
    if not isinstance(failure, DeadlineExceeded):
        return failure
    return Unavailable(f"nobody has answered within {timeout_s:g} s: {failure}")
