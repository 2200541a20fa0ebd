"""Networks that delay, break, or swallow what is sent: calls end in time, act once, and go on."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvservice.clock import SystemClock
from kvservice.core.errors import DeadlineExceeded, Overloaded, Unavailable
from kvservice.v1 import manager_pb2
from tests.chaos.conftest import Report
from tests.chaos.decoding import Decoder, workers_of
from tests.chaos.history import Event, History, Outcome, find_contradiction
from tests.chaos.proxy import Network, Proxy, proxies
from tests.chaos.service import HOST, TTL_S, Service, serving
from tests.serving import until

CLOCK = SystemClock()
HISTORY_S = 20.0
FAR = "127.0.0.5"  # where workers say they are; only a proxy listens there

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


class Ways:
    """A service whose workers are reached through proxies alone, by gRPC and by lane."""

    def __init__(self, service: Service, network: Network) -> None:
        self.service = service
        self.proxies: dict[str, list[Proxy]] = {}
        for worker in service.workers:
            ports = [
                address.rpartition(":")[2] for address in (worker.address, *worker.said["lanes"])
            ]
            self.proxies[worker.worker_id] = [
                network.proxy(f"{HOST}:{port}", at=f"{FAR}:{port}")[0] for port in ports
            ]

    def to(self, decoder: Decoder) -> list[Proxy]:
        """Return the proxies before the one worker that holds a decoder's session."""
        (worker_id,) = workers_of(decoder)
        return self.proxies[worker_id]


@pytest.fixture(scope="module")
def far_service() -> Iterator[Ways]:
    with (
        proxies() as network,
        serving(2, memory_bytes=256 << 20, advertise_host=FAR, tcp_lane=True) as service,
    ):
        yield Ways(service, network)


@pytest.fixture
def ways(far_service: Ways) -> Iterator[Ways]:
    """Workers behind proxies that pass everything on, before and after the test."""
    yield far_service
    for group in far_service.proxies.values():
        for proxy in group:
            proxy.heal()
    far_service.service.settle()


both_ways = pytest.mark.parametrize("lane", [False, True], ids=["grpc", "lane"])


def named(lane: bool) -> str:
    return "lane" if lane else "gRPC"


@both_ways
def test_a_black_hole_that_heals(ways: Ways, report: Report, lane: bool) -> None:
    """A step waits until its answer comes, and has acted once. A living worker loses nothing."""
    decoder = Decoder(ways.service.connect(lane=lane), 1, ttl_s=30.0)
    decoder.step(20)
    for proxy in ways.to(decoder):
        proxy.black_hole()
    done = threading.Event()
    failures: list[BaseException] = []

    def step() -> None:
        try:
            decoder.step()
        except BaseException as error:
            failures.append(error)
        done.set()

    threading.Thread(target=step, daemon=True).start()
    assert not CLOCK.wait(done, 5.0), f"a step came through: {failures}"
    healed_at = CLOCK.monotonic()
    for proxy in ways.to(decoder):
        proxy.heal()
    assert CLOCK.wait(done, 20.0)
    took = CLOCK.monotonic() - healed_at
    assert not failures, failures
    decoder.step()
    decoder.check_stored()
    report(
        "P7", f"cut of 5 s between client and worker ({named(lane)}), healed",
        recovery_s=took, bound_s=2.0, num_checked=decoder.num_checked,
    )  # fmt: skip


@both_ways
def test_calls_end_within_their_time(ways: Ways, report: Report, lane: bool) -> None:
    """In a black hole a call ends at its deadline, whatever TCP thinks of the connection."""
    decoder = Decoder(ways.service.connect(lane=lane, timeout_s=1.5), 2, ttl_s=30.0)
    decoder.step(20)
    for proxy in ways.to(decoder):
        proxy.black_hole()
    began = CLOCK.monotonic()
    with pytest.raises((DeadlineExceeded, Unavailable)):
        decoder.step()
    took = CLOCK.monotonic() - began
    for proxy in ways.to(decoder):
        proxy.heal()
    until(lambda: rolls_back(decoder))
    assert decoder.length in (20, 21)
    decoder.step()
    decoder.check_stored()
    report(
        "P7", f"cut with a deadline of 1.5 s ({named(lane)}): the call ends",
        recovery_s=took, bound_s=2.0, num_checked=decoder.num_checked,
    )  # fmt: skip


def rolls_back(decoder: Decoder) -> bool:
    try:
        decoder.resume()
    except (Unavailable, DeadlineExceeded):
        return False
    return True


@both_ways
def test_connections_that_are_reset(ways: Ways, report: Report, lane: bool) -> None:
    """Over and over, in the middle of steps: each is made again, and every token is there once."""
    decoder = Decoder(ways.service.connect(lane=lane), 3, ttl_s=30.0)
    decoder.step(20)
    slowest_s = 0.0
    for _ in range(20):
        for proxy in ways.to(decoder):
            proxy.delay(0.01)
        resets = threading.Timer(0.02, lambda: [p.reset_all() for p in ways.to(decoder)])
        resets.start()
        began = CLOCK.monotonic()
        decoder.step(2)
        slowest_s = max(slowest_s, CLOCK.monotonic() - began)
        resets.join()
    decoder.check_stored()
    report(
        "P7", f"20 resets in the middle of steps ({named(lane)}): the slowest step",
        recovery_s=slowest_s, bound_s=2.0, num_checked=decoder.num_checked,
    )  # fmt: skip


@both_ways
def test_answers_that_are_lost(ways: Ways, report: Report, lane: bool) -> None:
    """The request has acted, its answer never comes: the repeat gets the same, and acts not."""
    decoder = Decoder(ways.service.connect(lane=lane), 4, ttl_s=30.0)
    decoder.step(20)
    slowest_s = 0.0
    for _ in range(10):
        for proxy in ways.to(decoder):
            proxy.lose_next_answer()
        began = CLOCK.monotonic()
        decoder.step()
        slowest_s = max(slowest_s, CLOCK.monotonic() - began)
        decoder.session.pop(keep=decoder.length - 1)
        decoder.length -= 1
        decoder.step(2)
    assert decoder.session.lengths(0) == (40,)
    decoder.check_stored()
    report(
        "P11", f"10 answers lost after the request acted ({named(lane)})",
        recovery_s=slowest_s, bound_s=2.0, num_checked=decoder.num_checked,
    )  # fmt: skip


@both_ways
def test_a_long_way(ways: Ways, report: Report, lane: bool) -> None:
    """A delay makes steps slow, and nothing else."""
    decoder = Decoder(ways.service.connect(lane=lane), 5, ttl_s=30.0)
    for proxy in ways.to(decoder):
        proxy.delay(0.1)
    began = CLOCK.monotonic()
    decoder.step(20)
    for _ in range(4):
        decoder.step()
    took = (CLOCK.monotonic() - began) / 5
    decoder.check_stored()
    report(
        "P1", f"0.1 s of delay each way ({named(lane)}): a step of 2 layers",
        recovery_s=took, bound_s=2.0, num_checked=decoder.num_checked,
    )  # fmt: skip


class Writer:
    """Does what it likes to one session, and notes what became of it."""

    def __init__(self, decoder: Decoder, number: int, history: History) -> None:
        self.decoder = decoder
        self._number = number
        self._history = history
        self._rng = random.Random(number)

    def act(self) -> None:
        """Make one call; if it fails, find out where the session stands, as a decoder would."""
        decoder, rng = self.decoder, self._rng
        op = rng.choice(("append",) * 6 + ("pop", "pop", "reset"))
        if op == "append":
            value = rng.choice((1, 1, 1, 2, 5))
        else:
            value = rng.randrange(decoder.length + 1) if op == "pop" else 0
        began, outcome = CLOCK.monotonic(), Outcome.OK
        try:
            if op == "append":
                decoder.step(value)
            elif op == "pop":
                decoder.session.pop(keep=value)
                decoder.length = value
            else:
                decoder.session.reset()
                decoder.length = 0
        except (Unavailable, DeadlineExceeded):
            outcome = Outcome.UNKNOWN
        self._note(op, value, began, outcome)
        if outcome is Outcome.UNKNOWN:
            until(lambda: rolls_back(decoder), 60.0)
        self._note("see", decoder.session.lengths(0)[0], CLOCK.monotonic(), Outcome.OK)
        if decoder.length > 100:
            decoder.check_stored()

    def _note(self, op: str, value: int, began: float, outcome: Outcome) -> None:
        now = CLOCK.monotonic()
        self._history.note(Event(self._number, self._number, op, value, began, now, outcome))


def test_histories_under_all_of_it(
    ways: Ways, report: Report, tmp_path: Path, chaos_seed: int
) -> None:
    """Delays, resets, lost answers and black holes in any order: what the clients were told can be
    explained by calls that have acted once, or not at all; every answer was right."""
    history, rng = History(), random.Random(chaos_seed)
    service, stop = ways.service, threading.Event()
    writers = [
        Writer(Decoder(service.connect(timeout_s=1.0, lane=bool(n % 2)), n, ttl_s=60.0), n, history)
        for n in range(6)
    ]
    errors: list[BaseException] = []

    def run(writer: Writer) -> None:
        try:
            while not stop.is_set():
                writer.act()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in writers]
    for thread in threads:
        thread.start()
    all_proxies = [proxy for group in ways.proxies.values() for proxy in group]
    num_faults, ends_at = 0, CLOCK.monotonic() + HISTORY_S
    while CLOCK.monotonic() < ends_at and not errors:
        for proxy in rng.sample(all_proxies, rng.randrange(1, len(all_proxies) + 1)):
            rng.choice(
                (
                    proxy.reset_all,
                    proxy.lose_next_answer,
                    proxy.black_hole,
                    lambda proxy=proxy: proxy.delay(rng.uniform(0.0, 0.05)),
                )
            )()
            num_faults += 1
        CLOCK.wait(stop, rng.uniform(0.1, 1.0))
        for proxy in rng.sample(all_proxies, len(all_proxies)):
            proxy.heal()
            CLOCK.wait(stop, rng.uniform(0.0, 0.2))
    stop.set()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a client hangs"
    history.save(tmp_path / "history.jsonl")
    assert not errors, f"seed {chaos_seed}, {tmp_path}: {errors[0]!r}"
    for writer in writers:
        mine = [event for event in history.events if event.session == writer._number]
        assert (found := find_contradiction(mine)) is None, f"seed {chaos_seed}: {found}"
        writer.decoder.step()
        writer.decoder.check_stored()
    unknown = sum(event.outcome is Outcome.UNKNOWN for event in history.events)
    calls = sum(event.op != "see" for event in history.events)
    assert calls > 100
    report(
        "P1", f"{num_faults} faults of all kinds, {calls} calls, {unknown} of unknown outcome",
        num_checked=sum(writer.decoder.num_checked for writer in writers),
    )  # fmt: skip


def test_a_slow_reader(ways: Ways, report: Report) -> None:
    """One that takes 1 kB/s of 64 MiB is ended at its deadline; others hardly notice."""
    service = ways.service
    slow = service.connect(timeout_s=4.0, lane=False)
    session = slow.open(num_rows=1, ttl_s=30.0)
    part = np.ones((1, 8, 4096, 128), np.float32)
    for _ in range(2):
        session.write(0, part, part)  # 64 MiB in all
    fast = [Decoder(service.connect(), seed, ttl_s=30.0) for seed in range(4)]
    for one in fast:
        one.step(40)
    (worker_id,) = (extent.worker_id for extent in session._mirror.extents)
    worker = service.worker_named(worker_id)
    alone = sorted(timed_step(one) for one in fast for _ in range(25))
    rss = worker.rss_bytes()
    for proxy in ways.proxies[worker_id]:
        proxy.slow(1000.0)
    ended: list[float] = []

    def read() -> None:
        began = CLOCK.monotonic()
        with pytest.raises((DeadlineExceeded, Overloaded, Unavailable)):
            session.read(0, 0, 8192)
        ended.append(CLOCK.monotonic() - began)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    beside: list[float] = []
    while reader.is_alive():
        beside += [timed_step(one) for one in fast]
    reader.join()
    beside.sort()
    grown = (worker.rss_bytes() - rss) / (1 << 20)
    p99, p99_alone = (times[int(len(times) * 0.99)] for times in (beside, alone))
    checked = sum(one.num_checked for one in fast)
    # Two tries of 64 MiB, each as it was read and as it is sent.
    assert grown < 272, f"the worker has grown by {grown:.0f} MiB"
    report(
        "P10", "reader at 1 kB/s of 64 MiB: it is ended at its deadline of 4 s",
        recovery_s=ended[0], bound_s=6.0, num_checked=checked,
    )  # fmt: skip
    report(
        "P10", "reader at 1 kB/s: the others' p99 of a step",
        recovery_s=p99, bound_s=max(2 * p99_alone, 0.1), num_checked=checked,
    )  # fmt: skip


def timed_step(decoder: Decoder) -> float:
    began = CLOCK.monotonic()
    decoder.step()
    return CLOCK.monotonic() - began


def test_a_worker_that_the_manager_cannot_hear(report: Report) -> None:
    """It goes on serving those it has, and gets nobody new, until it is heard again."""
    with proxies() as network, serving(2) as service:
        mute, where = network.proxy(service.address)
        joined = service.add_worker(worker_id="mute", budget_bytes=512 << 20, manager_address=where)
        joined.wait()
        service.wait_for(3)
        decoder = Decoder(service.connect(), 1, ttl_s=TTL_S)
        decoder.step(20)
        assert workers_of(decoder) == ["mute"], "the largest is asked first"
        mute.black_hole()
        client = service.connect()

        def state() -> int:
            return next(w.state for w in client.list_workers() if w.worker_id == "mute")

        began = CLOCK.monotonic()
        until(lambda: state() != manager_pb2.WORKER_STATE_ALIVE)
        until(lambda: state() == manager_pb2.WORKER_STATE_DEAD)
        took = CLOCK.monotonic() - began
        others = [Decoder(service.connect(), seed, ttl_s=TTL_S) for seed in range(2, 6)]
        for one in (decoder, *others):
            for _ in range(10):
                one.step()
        assert all(workers_of(one) != ["mute"] for one in others)
        healed_at = CLOCK.monotonic()
        mute.heal()
        until(lambda: state() == manager_pb2.WORKER_STATE_ALIVE)
        back_s = CLOCK.monotonic() - healed_at
        decoder.step()
        decoder.check_stored()
        checked = sum(one.num_checked for one in (decoder, *others))
        assert service.settle() < TTL_S + 1.0
    report(
        "P8", "cut between worker and manager: nothing new is placed there",
        recovery_s=took, bound_s=4.5, num_checked=checked,
    )  # fmt: skip
    report(
        "P8", "that cut healed: it takes sessions again, those it had went on",
        recovery_s=back_s, bound_s=4.0, num_checked=checked,
    )  # fmt: skip
