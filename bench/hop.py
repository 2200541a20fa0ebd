"""The way to the kernel and back: one layer, one new token, 128 tokens stored.

    around_kernel_us      everything a worker does for a layer besides the kernel: decode the
                          message, session, epoch, checks, tables, counters, metrics, encode
    grpc_vs_echo          a layer over gRPC, the kernel's time taken off, by a bare stream's echo
    lane_vs_echo          a layer by lane, kernel included, by a bare socket's echo
    lane_vs_grpc          a layer by lane, by the same over gRPC

Echoes move the same numbers of bytes. Round trips are taken with 2 ms of computing between them,
as a decoder calls, and back to back.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from bench.echo import GrpcEcho, SocketEcho
from bench.processes import lone_worker, process
from bench.report import Report, busy, median, seconds_of
from kvservice.clock import SystemClock, now_ns
from kvservice.core.caller import ANONYMOUS
from kvservice.core.geometry import DType, HostTensor
from kvservice.core.session import AttendCall, Mask, SessionSpec, StepHeader
from kvservice.v1 import worker_pb2
from kvservice.wire import calls
from kvservice.wire.fragments import frames
from kvservice_client import Session, connect
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


def measure_around_kernel(report: Report, rounds: int = 60) -> float:
    """Time a worker's answers, bytes to bytes, in this process; return the kernel's seconds."""
    config = WorkerConfig("bench", "life", budget_bytes=1 << 30)
    worker = PageWorker(config, clock=SystemClock())
    service = WorkerService(worker)
    worker.allocate(ANONYMOUS.tenant, SESSION, SessionSpec(1))
    parts: dict[str, list[float]] = {name: [] for name in ("decode", "serve", "kernel", "encode")}
    length = 0
    for step, count in enumerate([CONTEXT, *[1] * rounds], start=1):
        q, k, v = (_host(tensor) for tensor in tensors(count))
        for layer in range(LAYERS):
            header = StepHeader((count,)) if layer == 0 else None
            call = AttendCall(
                SESSION, 1, step, layer, q, 0.1, Mask(), k, v, header, positions=(length,)
            )
            [raw] = frames(calls.attend_call_to_pb(call, call_id=1))
            times = [now_ns()]
            message = worker_pb2.AttendRequest.FromString(raw)
            times.append(now_ns())
            result = service.attend(message.call, ANONYMOUS)
            times.append(now_ns())
            answer = list(frames(result))
            times.append(now_ns())
            assert answer
            decode, serve, encode = ((b - a) / 1e9 for a, b in pairwise(times))
            if layer and step > 2:  # the others of a step are most of a model's layers
                kernel = _native_seconds(worker, layer, (q.data, k.data, v.data))
                for name, value in zip(parts, (decode, serve, kernel, encode), strict=True):
                    parts[name].append(value)
        length += count
    micro = {name: [1e6 * value for value in values] for name, values in parts.items()}
    around = [d + s - k + e for d, s, k, e in zip(*micro.values(), strict=True)]
    report.figure(
        "around_kernel_us", median(around), "decode + checks + commit + encode, a layer", around
    )
    for name, values in micro.items():
        report.figure(f"{name}_us", median(values), "of it; serve has the kernel inside", values)
    worker.close()
    return median(parts["kernel"])


def _native_seconds(worker: PageWorker, layer: int, data: tuple[bytes, bytes, bytes]) -> float:
    """Repeat the native call that has just been made: it writes what is there already."""
    session = worker._sessions.peek(ANONYMOUS.tenant, SESSION)
    assert session is not None
    assert session.step is not None
    steady = session.step.steady.get(None)
    assert steady is not None, "the native extension is missing: nothing to measure here"
    arena = session.groups[None].pool.arenas[layer]
    return seconds_of(lambda: steady.call.attend(*arena.addresses, arena.room, *data, 0.1))


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
