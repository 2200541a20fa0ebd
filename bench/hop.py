"""The way to the kernel and back: one layer, one new token, 128 tokens stored.

    around_kernel_us      everything a worker does for a layer besides the native call that
                          compares, stores, attends and writes the answer: look at the message,
                          capability, session, lease, checks, commit, counters, metrics
    grpc_vs_echo          a layer over gRPC, the kernel's time taken off, by a bare stream's echo
    lane_vs_echo          a layer by lane, kernel included, by a bare socket's echo
    lane_vs_grpc          a layer by lane, by the same over gRPC

Echoes move the same numbers of bytes. Round trips are taken with 2 ms of computing between them,
as a decoder calls, and back to back.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.echo import GrpcEcho, SocketEcho
from bench.processes import lone_worker, process
from bench.report import Report, busy, median, seconds_of
from kvservice.clock import SystemClock, now_ns
from kvservice.config import ServerLimits
from kvservice.core.access import Rights
from kvservice.core.caller import ANONYMOUS
from kvservice.core.capability import Keyring
from kvservice.core.geometry import DType, HostTensor
from kvservice.core.session import AttendCall, Mask, SessionSpec, StepHeader
from kvservice.metrics.of_worker import WorkerMetrics
from kvservice.server.attends import LaneAnswers
from kvservice.server.guard import Credential, Guard
from kvservice.wire import calls
from kvservice.wire.fragments import frames
from kvservice_client import Session, connect
from kvservice_workers.attention.native import PreparedCall
from kvservice_workers.data_plane.service import WorkerService
from kvservice_workers.worker import PageWorker, WorkerConfig

HEADS, KV_HEADS, DIM = 32, 8, 128
CONTEXT = 128
LAYERS = 8
SESSION = "00000000-0000-4000-8000-000000000001"
PAUSE_S = 0.002
REQUEST_BYTES = (HEADS + 2 * KV_HEADS) * DIM * 4
REPLY_BYTES = HEADS * DIM * 4

Floats = npt.NDArray[np.float32]


def tensors(count: int) -> tuple[Floats, Floats, Floats]:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, HEADS, count, DIM), np.float32)
    k, v = rng.standard_normal((2, 1, KV_HEADS, count, DIM), np.float32)
    return q, k, v


class Layers:
    """A session that decodes: each call is the next layer of the next step."""

    def __init__(self, session: Session) -> None:
        self._session = session
        for layer in range(LAYERS):
            session.attend(layer, *tensors(CONTEXT))
        self._one = tensors(1)
        self._next = 0

    def __call__(self) -> float:
        """Return the seconds of one layer's round trip."""
        layer = self._next % LAYERS
        self._next += 1
        return seconds_of(lambda: self._session.attend(layer, *self._one))


PARTS = ("read", "admit", "serve", "kernel", "record")


def measure_around_kernel(report: Report, rounds: int = 60) -> float:
    """Time a worker's answers, bytes to bytes, as a lane's thread gives them.

    With everything real: a capability behind each call, metrics, a session with its lease. Some
    layers are answered by the lane's own code and timed as a whole; in others the same calls are
    made one by one.

    Returns:
        The kernel's seconds: of the native call that is made, not of a repeat with warm caches.
    """
    worker = PageWorker(WorkerConfig("bench", "life", budget_bytes=1 << 30), clock=SystemClock())
    lane = Lane(worker)
    capability = lane.open_session()
    whole: list[float] = []
    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    length = 0
    for step, count in enumerate([CONTEXT, *[1] * rounds], start=1):
        q, k, v = (_host(tensor) for tensor in tensors(count))
        for layer in range(LAYERS):
            header = StepHeader((count,)) if layer == 0 else None
            call = AttendCall(
                SESSION, 1, step, layer, q, 0.1, Mask(), k, v, header, positions=(length,)
            )
            pb = calls.attend_call_to_pb(call, call_id=1, incarnation="life")
            pb.capability = capability
            [raw] = frames(pb)
            if layer == 0 or step < 3:  # the others of a step are most of a model's layers
                assert lane.answer(raw)
            elif layer % 2:
                whole.append(lane.time_whole(raw))
            else:
                for name, seconds in zip(PARTS, lane.time_parts(raw), strict=True):
                    parts[name].append(seconds)
        length += count
    around = [1e6 * seconds for seconds in whole]
    note = "read, admit, check, commit, count, write the answer: a layer, less the native call"
    report.figure("around_kernel_us", median(around), note, around)
    for name, values in parts.items():
        micro = [1e6 * value for value in values]
        report.figure(f"{name}_us", median(micro), _NOTES[name], micro)
    worker.close()
    return median(parts["kernel"])


_NOTES = {
    "read": "of it: look at the message, find what may differ",
    "admit": "of it: the capability",
    "serve": "of it: session, lease, checks, commit, counters; the native call left out",
    "kernel": "the native call: compare, store, attend, write",
    "record": "of it: the call's metrics",
}


class Lane:
    """What a lane's thread does between receiving and sending, with a guard and metrics."""

    def __init__(self, worker: PageWorker) -> None:
        clock = SystemClock()
        keys = Keyring([secrets.token_bytes(32)])
        self._guard = Guard("life", clock=clock, keys=lambda: keys)
        self._worker = worker
        self._service = WorkerService(worker, issue=self._guard.issue)
        self._recorder = WorkerMetrics("bench").method("bidi_stream", "kvservice.lane", "Attend")
        self._credential = Credential(ANONYMOUS)
        self._clock = clock
        self.kernel_s = 0.0
        self._answers = LaneAnswers(
            credential=self._credential,
            guard=self._guard,
            service=self._service,
            limits=ServerLimits(),
            recorder=self._recorder,
            clock=clock,
        )

    def open_session(self) -> bytes:
        """Open a session; return the right to it."""
        self._worker.opening.allocate(ANONYMOUS.tenant, SESSION, SessionSpec(1))
        return self._guard.issue(ANONYMOUS, SESSION, 60.0, Rights.WRITE)

    def answer(self, raw: bytes) -> list[bytes]:
        return list(self._answers.answer(memoryview(raw)))

    def time_whole(self, raw: bytes) -> float:
        """Return the seconds of an answer, less those of the native call."""
        self._watch_kernel()
        started = now_ns()
        answer = self._answers.answer(memoryview(raw))
        seconds = (now_ns() - started) / 1e9
        assert answer
        return seconds - self.kernel_s

    def time_parts(self, raw: bytes) -> tuple[float, ...]:
        """Return the seconds of an answer's parts, as PARTS names them."""
        self._watch_kernel()
        times = [now_ns()]
        said = self._service.read_attend(memoryview(raw))
        assert said is not None
        times.append(now_ns())
        caller = self._guard.admit_attend(self._credential, said)
        times.append(now_ns())
        answer = self._service.attend_steadily(said, caller)
        assert answer is not None, "the short way does not serve: nothing to measure here"
        times.append(now_ns())
        self._recorder.carried(self._clock.monotonic() - 0.0)
        times.append(now_ns())
        read, admit, serve, record = ((b - a) / 1e9 for a, b in pairwise(times))
        return read, admit, serve - self.kernel_s, self.kernel_s, record

    def _watch_kernel(self) -> None:
        """Have the step's native calls timed from now on."""
        session = self._worker._sessions.peek(ANONYMOUS.tenant, SESSION)
        assert session is not None
        assert session.step is not None
        steady = session.step.steady.get((None, True))
        assert steady is not None, "the native extension is missing: nothing to measure here"
        if not isinstance(steady.call, _Watched):
            watched = replace(steady, call=_Watched(steady.call, self))
            session.step.steady[None, True] = watched


class _Watched:
    """A native step that says how long its calls take."""

    def __init__(self, inner: PreparedCall, lane: Lane) -> None:
        self._inner, self._lane = inner, lane

    def answer(self, *args: Any) -> bytes | None:
        started = now_ns()
        answer = self._inner.answer(*args)
        self._lane.kernel_s = (now_ns() - started) / 1e9
        return answer


def measure_trips(report: Report, kernel_s: float, pairs: int = 150) -> None:
    """Compare round trips over both ways with bare echoes of the same bytes."""
    request = bytes(REQUEST_BYTES)
    with (
        lone_worker() as address,
        process("bench.echo", "socket", str(REPLY_BYTES)) as path,
        process("bench.echo", "grpc", str(REPLY_BYTES)) as target,
        connect(address) as by_lane,
        connect(address, lane=False) as by_grpc,
    ):
        lane, over_grpc = (Layers(client.open(num_rows=1)) for client in (by_lane, by_grpc))
        socket_echo, grpc_echo = SocketEcho(path.strip(), REPLY_BYTES), GrpcEcho(target.strip())
        for pause, suffix in ((PAUSE_S, ""), (0.0, "_back_to_back")):
            samples: dict[str, list[float]] = {}
            for _ in range(pairs):
                for name, action in (
                    ("lane", lane),
                    ("socket", lambda: seconds_of(lambda: socket_echo(request))),
                    ("grpc", over_grpc),
                    ("stream", lambda: seconds_of(lambda: grpc_echo(request))),
                ):
                    busy(pause)
                    samples.setdefault(name, []).append(action())
            how = "2 ms of computing between" if pause else "back to back"
            bare = [max(value - kernel_s, 1e-6) for value in samples["grpc"]]
            report.ratio(f"grpc_vs_echo{suffix}", bare, samples["stream"], f"gRPC / echo, {how}")
            report.ratio(
                f"lane_vs_echo{suffix}", samples["lane"], samples["socket"], f"lane / echo, {how}"
            )
            report.ratio(
                f"lane_vs_grpc{suffix}", samples["lane"], samples["grpc"], f"lane / gRPC, {how}"
            )
            for name, values in samples.items():
                micro = [1e6 * value for value in values]
                report.figure(f"{name}{suffix}_us", median(micro), how, micro)


def _host(array: Floats) -> HostTensor:
    packed = np.ascontiguousarray(array[0].swapaxes(0, 1))
    return HostTensor(DType.FLOAT32, packed.shape, packed.tobytes())


def main() -> None:
    report = Report("hop")
    kernel_s = measure_around_kernel(report)
    measure_trips(report, kernel_s)
    report.print()


if __name__ == "__main__":
    main()
