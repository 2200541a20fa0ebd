"""When the client asks again, and when it gives up."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.clock import ManualClock
from kvservice.core.errors import (
    DeadlineExceeded,
    Draining,
    KVServiceError,
    OutOfPages,
    Overloaded,
    StaleEpoch,
    Unavailable,
    WorkerLost,
)
from kvservice_client._retry import Detection, Retrier, RetryPolicy, ServerDead, Verdict
from kvservice_client._watchdog import NEVER, Watchdog
from kvservice_client.testing import eventually

DETECTION = Detection(dead_after_s=4.0, silence_s=3.0)


class WaitingClock(ManualClock):
    """Whoever waits moves the time, so nobody has to."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        assert timeout_s is not None
        if not event.is_set():
            self.waits.append(timeout_s)
            self.advance(timeout_s)
        return event.is_set()


class Server:
    """Fails as told, then answers; each call takes `takes_s`, or until its time is over."""

    def __init__(
        self, clock: ManualClock, failures: list[KVServiceError | None], takes_s: float = 0.0
    ) -> None:
        self.clock = clock
        self.failures = failures
        self.takes_s = takes_s
        self.limits: list[float] = []

    def __call__(self, limit_s: float) -> str:
        self.limits.append(limit_s)
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, DeadlineExceeded):
            self.clock.advance(limit_s)
            raise failure
        self.clock.advance(self.takes_s)
        if failure is not None:
            raise failure
        return "answer"


def retrier(clock: ManualClock, policy: RetryPolicy | None = None) -> Retrier:
    return Retrier(clock, random.Random(7), policy)


def test_an_answer_ends_it() -> None:
    """Nobody waits for what works."""
    clock = WaitingClock()
    server = Server(clock, [])
    assert retrier(clock).run(server, 10.0) == "answer"
    assert (server.limits, clock.waits) == ([10.0], [])


@pytest.mark.parametrize("failure", [Unavailable("x"), WorkerLost("x"), Overloaded("x")])
def test_silence_is_retried(failure: KVServiceError) -> None:
    """What nobody has carried out is tried again, after a delay that grows."""
    clock = WaitingClock()
    server = Server(clock, [failure] * 5)
    assert retrier(clock).run(server, 10.0) == "answer"
    assert len(server.limits) == 6
    assert clock.waits == sorted(clock.waits)
    # What is left shrinks by exactly what was waited.
    assert server.limits[-1] == pytest.approx(10.0 - sum(clock.waits))


@pytest.mark.parametrize(
    "failure", [OutOfPages("x"), StaleEpoch("x"), Draining("x"), DeadlineExceeded("x")]
)
def test_answers_are_not_retried(failure: KVServiceError) -> None:
    """What the service has said is the caller's, and so is a deadline that the answer missed."""
    clock = WaitingClock()
    server = Server(clock, [failure])
    with pytest.raises(type(failure)):
        retrier(clock).run(server, 10.0, DETECTION)
    assert len(server.limits) == 1


def test_time_runs_out() -> None:
    """Without an answer within the time the last failure surfaces, and not later."""
    clock = WaitingClock()
    started = clock.monotonic()
    server = Server(clock, [Unavailable("nobody there")] * 1000)
    with pytest.raises(Unavailable, match="nobody there"):
        retrier(clock).run(server, 10.0)
    assert 9.0 < clock.monotonic() - started <= 10.0


def test_dead_after_the_detection_time() -> None:
    """A server that refuses for the detection time is dead, long before the deadline."""
    clock = WaitingClock()
    started = clock.monotonic()
    server = Server(clock, [Unavailable("refused")] * 1000)
    with pytest.raises(ServerDead):
        retrier(clock).run(server, 60.0, DETECTION)
    assert 4.0 <= clock.monotonic() - started <= 4.6


def test_a_first_try_that_is_over_counts_from_its_beginning() -> None:
    """It was made elsewhere, and has taken a second and a half: that much sooner it is dead."""
    clock = WaitingClock()
    began = clock.monotonic()
    clock.advance(1.5)
    server = Server(clock, [Unavailable("refused")] * 1000)
    with pytest.raises(ServerDead):
        retrier(clock).run(server, 60.0, DETECTION, began=began)
    assert 4.0 <= clock.monotonic() - began <= 4.6
    assert server.limits[0] == 60.0


def test_a_hanging_server_is_dead_as_soon() -> None:
    """Once a try has failed, others may not hang longer than the detection time has left."""
    clock = WaitingClock()
    started = clock.monotonic()
    # Silent for 3 s until keepalive breaks the connection; then connects, but does not answer.
    failures: list[KVServiceError | None] = [Unavailable("broken"), DeadlineExceeded("hangs")]
    server = Server(clock, failures, takes_s=3.0)
    with pytest.raises(ServerDead):
        retrier(clock).run(server, 60.0, DETECTION)
    assert clock.monotonic() - started == pytest.approx(4.0)


def test_long_work_is_not_held_against_a_server() -> None:
    """A connection that breaks after minutes of work gets a second chance."""
    clock = WaitingClock()
    server = Server(clock, [Unavailable("broken")], takes_s=100.0)
    assert retrier(clock).run(server, 300.0, DETECTION) == "answer"


def test_somebody_knows_that_it_is_dead() -> None:
    """Then nobody waits for the detection time; a single failed try asks nobody."""
    clock = WaitingClock()
    started = clock.monotonic()
    asked: list[bool] = []

    def judge(is_over: bool) -> Verdict:
        asked.append(is_over)
        return Verdict.DEAD if len(asked) == 2 else Verdict.ALIVE

    server = Server(clock, [Unavailable("x")])
    assert retrier(clock).run(server, 60.0, DETECTION, judge) == "answer"
    assert not asked
    server = Server(clock, [Unavailable("x")] * 1000)
    with pytest.raises(ServerDead):
        retrier(clock).run(server, 60.0, DETECTION, judge)
    assert asked == [False, False]
    assert clock.monotonic() - started < 0.5


def test_a_server_that_lives_is_not_given_up() -> None:
    """However long no way leads to it; the judge is told when nothing else speaks for it."""
    clock = WaitingClock()
    asked: list[bool] = []

    def judge(is_over: bool) -> Verdict:
        asked.append(is_over)
        return Verdict.ALIVE if is_over else Verdict.UNKNOWN

    server = Server(clock, [Unavailable("cut")] * 1000)
    with pytest.raises(Unavailable, match="cut"):
        retrier(clock).run(server, 30.0, DETECTION, judge)
    assert sum(asked) == 6, "once for each detection time of 4 s and a delay"
    server = Server(clock, [Unavailable("cut")] * 15)
    assert retrier(clock).run(server, 30.0, DETECTION, judge) == "answer"


def test_a_detection_longer_than_the_deadline() -> None:
    """Until a server counts as dead, what surfaces can be retried by the caller."""
    clock = WaitingClock()
    server = Server(clock, [Unavailable("x")] * 1000)
    with pytest.raises(Unavailable):
        retrier(clock).run(server, 2.0, DETECTION)


def test_closing_ends_the_waiting() -> None:
    """A client that is closed does not wait for its retries."""
    clock = WaitingClock()
    closed = retrier(clock)
    closed.close()
    server = Server(clock, [Unavailable("x")] * 1000)
    with pytest.raises(Unavailable):
        closed.run(server, 1e9)
    assert len(server.limits) == 1


@given(
    failures=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    first=st.floats(0.001, 1.0),
    factor=st.floats(1.0, 4.0),
    jitter=st.floats(0.0, 1.0),
)
def test_delays_stay_within_bounds(
    failures: int, seed: int, first: float, factor: float, jitter: float
) -> None:
    """Every delay is between (1 - jitter) of the exponential and all of it, and bounded."""
    policy = RetryPolicy(first_delay_s=first, factor=factor, max_delay_s=2.0, jitter=jitter)
    full = min(2.0, first * factor ** (failures - 1))
    delay = policy.delay_s(failures, random.Random(seed))
    assert full * (1 - jitter) <= delay + 1e-12
    assert delay <= full + 1e-12


def test_delays_are_spread() -> None:
    """Clients that fail together do not come back together, and the same seed repeats itself."""

    def delays(seed: int) -> list[float]:
        rng = random.Random(seed)
        return [RetryPolicy().delay_s(failures, rng) for failures in range(1, 6)]

    assert delays(1) == delays(1)
    assert delays(1) != delays(2)


class Call:
    """Something with a deadline."""

    def __init__(self) -> None:
        self.deadline = NEVER
        self.expired = threading.Event()

    def expire(self) -> None:
        self.expired.set()


class SleepersClock(ManualClock):
    """Knows until when its one user sleeps: time that passes before that would pass unnoticed."""

    asleep_until = 0.0

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        with self._moved:
            if not event.is_set():
                self.asleep_until = NEVER if timeout_s is None else self._now + timeout_s
            return super().wait(event, timeout_s)


def test_the_watchdog_ends_what_is_overdue() -> None:
    """Of several calls exactly those expire whose deadline has passed, the earliest first."""
    clock = SleepersClock()
    watchdog = Watchdog(clock)
    late, early, never = Call(), Call(), Call()
    for call in (late, early, never):
        watchdog.watch(call)
    now = clock.monotonic()
    watchdog.arm(late, now + 20.0)
    watchdog.arm(early, now + 5.0)
    eventually(lambda: clock.asleep_until == now + 5.0)
    clock.advance(6.0)
    eventually(early.expired.is_set)
    assert not late.expired.is_set()
    eventually(lambda: clock.asleep_until == now + 20.0)
    clock.advance(20.0)
    eventually(late.expired.is_set)
    assert not never.expired.is_set()
    watchdog.close()


def test_the_watchdog_lets_go() -> None:
    """A call that has ended in time, or was forgotten, does not expire."""
    clock = SleepersClock()
    watchdog = Watchdog(clock)
    done, forgotten, last = Call(), Call(), Call()
    due = clock.monotonic() + 1.0
    for call in (done, forgotten, last):
        watchdog.watch(call)
        watchdog.arm(call, due)
    done.deadline = NEVER
    watchdog.forget(forgotten)
    eventually(lambda: clock.asleep_until == due)
    clock.advance(2.0)
    eventually(last.expired.is_set)
    assert not done.expired.is_set()
    assert not forgotten.expired.is_set()
    watchdog.close()
