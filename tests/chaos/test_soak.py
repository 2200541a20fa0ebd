"""Sessions by the thousand, one after the other: nothing may be left of them.

By name alone (`make soak`), for it takes minutes. KVSERVICE_SOAK_SESSIONS says how many.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from kvservice.clock import SystemClock
from kvservice_client import Client, DType, LayerGeometry
from tests.chaos.decoding import DIM, KV_HEADS, NUM_LAYERS
from tests.chaos.service import Process, Service, serving
from tests.oracles import causal_visible, dense_attention

CLOCK = SystemClock()
NUM_SESSIONS = int(os.environ.get("KVSERVICE_SOAK_SESSIONS", "20000"))
NUM_THREADS = 4
NUM_SAMPLES = 20
MAX_GROWTH_MIB_PER_MIN = 1.0
LAYERS = [LayerGeometry(KV_HEADS, DIM, DIM, DType.FLOAT32)] * NUM_LAYERS

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(1800)]


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment."""

    at_s: float
    num_sessions: int
    rss_mib: float
    num_files: int
    num_threads: int


class Myself(Process):
    """The test's own process, in which the clients are."""

    def __init__(self) -> None:
        super().__init__("client", {})

    @property
    def pid(self) -> int:
        return os.getpid()


class Work:
    """Opens sessions, uses and closes them, until so many have been."""

    def __init__(self, client: Client, count: int) -> None:
        self._client = client
        self._left = count
        self._lock = threading.Lock()
        self.num_done = 0
        self.errors: list[BaseException] = []

    def run(self) -> None:
        try:
            while (number := self._take()) is not None:
                self._use(number)
                with self._lock:
                    self.num_done += 1
        except BaseException as error:
            self.errors.append(error)

    def _take(self) -> int | None:
        with self._lock:
            self._left -= 1
            return None if self._left < 0 else self._left

    def _use(self, number: int) -> None:
        """A prompt, a step, and one time in ten a fork, a pop and a second client's look."""
        rng = np.random.default_rng(number)
        k = rng.standard_normal((1, KV_HEADS, 12, DIM)).astype(np.float32)
        session = self._client.open(num_rows=1, layers=LAYERS, page_size=4)
        for layer in range(NUM_LAYERS):
            out = session.attend(layer, k, k, k)
        seen = causal_visible(np.arange(12), np.arange(12))
        rows = k[0].swapaxes(0, 1).astype(np.float64)
        wanted, _ = dense_attention(
            rows, rows, rows, np.broadcast_to(seen, (KV_HEADS, 12, 12)), scale=DIM**-0.5
        )
        np.testing.assert_allclose(out[0].swapaxes(0, 1), wanted, atol=2e-5, rtol=2e-5)
        if number % 10 == 0:
            child = session.fork(7)
            session.pop(3)
            for layer in range(NUM_LAYERS):
                child.attend(layer, *(k[:, :, :1],) * 3)
            child.release()
        session.release()


def test_many_sessions() -> None:
    """Flat memory, file descriptors and threads in every process, and no page at the end."""
    with serving(2) as service:
        work = Work(service.connect(), NUM_SESSIONS)
        samples = list(watched(service, work))
        assert not work.errors, work.errors[0]
        service.settle()
        print_table(samples)
        first, last = len(samples) // 4, -1  # the first quarter is to warm up
        minutes = (samples[last][0][1].at_s - samples[first][0][1].at_s) / 60
        for position, (name, _) in enumerate(samples[0]):
            warm, end = samples[first][position][1], samples[last][position][1]
            growth = slope([one[position][1] for one in samples[first:]])
            # A line through a short run says nothing.
            is_flat = growth < MAX_GROWTH_MIB_PER_MIN or end.rss_mib - warm.rss_mib < 2.0
            assert is_flat, f"{name} grows by {growth:.2f} MiB a minute, in {minutes:.1f} minutes"
            assert end.num_files <= warm.num_files + 4, f"{name} keeps files open"
            assert end.num_threads <= warm.num_threads + 4, f"{name} keeps threads"


Samples = list[tuple[str, Sample]]


def watched(service: Service, work: Work) -> Iterator[Samples]:
    """Do the work in threads; yield samples of all processes, at even distances."""
    processes = {"manager": service.manager, "client": Myself()}
    processes |= {worker.worker_id: worker for worker in service.workers}
    threads = [threading.Thread(target=work.run, daemon=True) for _ in range(NUM_THREADS)]
    began = CLOCK.monotonic()
    for thread in threads:
        thread.start()
    for number in range(1, NUM_SAMPLES + 1):
        due = NUM_SESSIONS * number // NUM_SAMPLES
        while work.num_done < due and not work.errors:
            CLOCK.wait(threading.Event(), 0.02)
        if work.errors:
            break
        at_s = CLOCK.monotonic() - began
        yield [
            (
                name,
                Sample(
                    at_s, work.num_done, one.rss_bytes() / (1 << 20), one.num_files(),
                    one.num_threads(),
                ),
            )
            for name, one in processes.items()
        ]  # fmt: skip
    for thread in threads:
        thread.join(timeout=60)


def slope(samples: list[Sample]) -> float:
    """Return the growth of memory in MiB a minute, as a line through the samples has it."""
    at = [one.at_s / 60 for one in samples]
    return float(np.polyfit(at, [one.rss_mib for one in samples], 1)[0])


def print_table(samples: list[Samples]) -> None:
    names = [name for name, _ in samples[0]]
    write = sys.stdout.write
    write("\n| sessions | seconds |" + "".join(f" {name} MiB, files, threads |" for name in names))
    write("\n|---|---|" + "---|" * len(names) + "\n")
    for one in samples:
        cells = [f"{s.rss_mib:.1f}, {s.num_files}, {s.num_threads}" for _, s in one]
        write(f"| {one[0][1].num_sessions} | {one[0][1].at_s:.1f} | " + " | ".join(cells) + " |\n")
    slopes = (
        f"{name} {slope([one[i][1] for one in samples[len(samples) // 4 :]]):+.2f}"
        for i, name in enumerate(names)
    )
    write("MiB a minute after the first quarter: " + ", ".join(slopes) + "\n")
    write(f"{samples[-1][0][1].num_sessions} sessions, 0 pages used at the end\n")
