"""Many decoders at once on two workers: tokens a second, and how long a layer takes.

load16_p99_vs_fair      99th percentile of a layer's time with 16 decoders, by 16 times the
                        median of one alone
idle_session_bytes      memory that a worker takes for a session that stores nothing
"""

from __future__ import annotations

import resource
import threading
from dataclasses import dataclass, field

import numpy as np

from bench.processes import two_workers
from bench.report import Report, median, seconds_of
from kvservice.clock import ManualClock, now_ns
from kvservice.core.session import SessionSpec
from kvservice_client import Client, connect
from kvservice_workers.worker import PageWorker, WorkerConfig

HEADS, KV_HEADS, DIM, LAYERS, CONTEXT = 9, 3, 64, 30, 128
STEPS = 12


@dataclass
class Result:
    """What decoders at the same time have seen."""

    layer_s: list[float] = field(default_factory=list)
    tokens_per_s: float = 0.0

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.layer_s, percent))


def run(client: Client, num_decoders: int) -> Result:
    """Let decoders take steps at the same time, each with a session of its own."""
    barrier = threading.Barrier(num_decoders + 1)
    times: list[list[float]] = [[] for _ in range(num_decoders)]

    def decode(mine: list[float]) -> None:
        rng = np.random.default_rng(0)
        session = client.open(num_rows=1)
        for layer in range(LAYERS):
            q = rng.standard_normal((1, HEADS, CONTEXT, DIM), np.float32)
            k = rng.standard_normal((1, KV_HEADS, CONTEXT, DIM), np.float32)
            session.attend(layer, q, k, k)
        q, k = q[:, :, :1].copy(), k[:, :, :1].copy()
        barrier.wait()
        for _ in range(STEPS):
            for layer in range(LAYERS):
                mine.append(seconds_of(lambda n=layer: session.attend(n, q, k, k)))
        barrier.wait()
        session.release()

    threads = [threading.Thread(target=decode, args=(mine,)) for mine in times]
    for thread in threads:
        thread.start()
    barrier.wait()
    started = now_ns()
    barrier.wait()
    seconds = (now_ns() - started) / 1e9
    for thread in threads:
        thread.join()
    return Result([t for mine in times for t in mine], num_decoders * STEPS / seconds)


def idle_session_bytes(count: int = 20_000) -> float:
    """Return the bytes that a worker grows by for each session opened on it, in this process."""
    config = WorkerConfig("bench", "life", budget_bytes=1 << 30, max_sessions=count + 1)
    worker = PageWorker(config, clock=ManualClock())
    before = _peak_bytes()
    for i in range(count):
        worker.opening.allocate("t", f"{i:08x}-0000-4000-8000-000000000000", SessionSpec(1))
    grown = _peak_bytes() - before
    worker.close()
    return grown / count


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    report = Report("load")
    idle = idle_session_bytes()
    alone: list[float] = []
    loaded: list[float] = []
    with two_workers() as address, connect(address) as client:
        for _ in range(9):
            alone.append(run(client, 1).percentile(50))
            loaded.append(run(client, 16).percentile(99))
        for number in (1, 2, 4, 8, 16, 32):
            result = run(client, number)
            note = f"{number} decoders on 2 workers, threads of one process"
            report.figure(f"tokens_per_s_{number}", result.tokens_per_s, note)
            report.figure(f"layer_p50_us_{number}", 1e6 * result.percentile(50), note)
            report.figure(f"layer_p99_us_{number}", 1e6 * result.percentile(99), note)
    note = "p99 of a layer with 16 decoders / 16 times the p50 of one alone"
    report.ratio("load16_p99_vs_fair", loaded, [16 * value for value in alone], note)
    report.figure("alone_p50_us", 1e6 * median(alone), "a layer of one decoder alone")
    report.figure("idle_session_bytes", idle, "a worker's memory for a session without tokens")
    report.print()


if __name__ == "__main__":
    main()
