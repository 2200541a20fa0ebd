"""What a worker does when too much is asked of it, and when connections come and go.

All on one machine: callers and worker share its cores. An empty RPC is the health check.

control_p50_vs_empty    median of a GetSession, by that of an empty RPC, 8 in flight
control_p99_vs_empty    99th percentile of a GetSession, by the median of an empty RPC
goodput_vs_held         Attends answered a second while three processes try to have 120 streams
                        each, more than a worker takes, by what three processes of 3 streams get
reject_p99_vs_empty     99th percentile of how long a refusal takes then, by an empty RPC's median
recovery_s              seconds after that until an Attend takes what it took before
connect_vs_empty        connecting, one empty RPC, and closing, by an empty RPC alone
churn_*                 connections a second, and what the worker keeps of them
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np

from bench.processes import process
from bench.report import Report, median, seconds_of
from kvservice.clock import now_ns
from kvservice.core.session import AttendCall, Mask, SessionSpec, StepHeader
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire import calls, convert
from kvservice.wire.names import WORKER
from kvservice.wire.tensors import from_numpy

HELD: Final = 8
FLOOD_PROCESSES: Final = 3
FLOOD_STREAMS: Final = 120
ENDED_MEANWHILE: Final = "Internal error from Core"
BACKOFF_S: Final = 1.0  # what a refusal says in its RetryInfo
SLICE_S: Final = 0.5
PAIRS: Final = 9
ATTEND: Final = f"/{WORKER.full_name}/Attend"
GET: Final = f"/{WORKER.full_name}/GetSession"
EMPTY: Final = "/grpc.health.v1.Health/Check"


# -- callers, in processes of their own


async def _unary(method: Any, request: bytes, until: int, noted: Noted) -> None:
    while now_ns() < until:
        began = now_ns()
        try:
            await method(request, timeout=10)
            noted.good.append((now_ns() - began) / 1e6)
        except grpc.aio.AioRpcError as error:
            await noted.failed(error.code(), began)


async def _stream(method: Any, request: bytes, until: int, noted: Noted) -> None:
    """Keep a stream open and make one call after the other on it; open it anew if it ends."""
    while now_ns() < until:
        began = now_ns()
        stream = method(timeout=60)
        try:
            while now_ns() < until:
                began = now_ns()
                await stream.write(request)
                if await stream.read() is grpc.aio.EOF:
                    break
                noted.good.append((now_ns() - began) / 1e6)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # Its library calls it INTERNAL where the end of a stream meets what is being written.
            await noted.failed(await stream.code(), began, await stream.details())
        finally:
            stream.cancel()


class Noted:
    """Durations of answers and of refusals, in ms, and how often anything else happened."""

    def __init__(self) -> None:
        self.good: list[float] = []
        self.refused: list[float] = []
        self.others: dict[str, int] = {}

    async def failed(self, code: grpc.StatusCode, began: int, details: str | None = None) -> None:
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED or details == ENDED_MEANWHILE:
            self.refused.append((now_ns() - began) / 1e6)
        else:
            self.others[code.name] = self.others.get(code.name, 0) + 1
        await asyncio.sleep(BACKOFF_S)


async def _calls(address: str, path: str, requests: list[bytes], seconds: float) -> Any:
    """Keep a call or stream in flight for each request."""
    noted = Noted()
    until = now_ns() + int(seconds * 1e9)
    async with grpc.aio.insecure_channel(address) as channel:
        streams = path == ATTEND
        method = channel.stream_stream(path) if streams else channel.unary_unary(path)
        one = _stream if streams else _unary
        await asyncio.gather(*(one(method, request, until, noted) for request in requests))
    return {"good": noted.good, "refused": noted.refused, "others": noted.others}


def call(address: str, path: str, requests: list[bytes], *, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = asyncio.run(_calls(address, path, requests, seconds))
    return found


def flood(address: str, requests: list[bytes], seconds: float) -> list[dict[str, Any]]:
    """Let several processes call at once, each with its share of the streams."""
    command = [sys.executable, "-m", "bench.overload", "--flood", address, str(seconds)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(FLOOD_PROCESSES)
    ]
    for index, child in enumerate(children):
        assert child.stdin is not None
        share = requests[index::FLOOD_PROCESSES]
        child.stdin.write(json.dumps([one.hex() for one in share]))
        child.stdin.close()
        child.stdin = None
    return [json.loads(child.communicate(timeout=seconds + 60)[0]) for child in children]


# -- measurements


def control(report: Report, address: str, request: bytes) -> float:
    """Compare a GetSession with an empty RPC; return the empty one's median, in ms."""
    ours, empty = [], []
    for _ in range(PAIRS):
        ours.append(call(address, GET, [request] * HELD, seconds=SLICE_S)["good"])
        empty.append(call(address, EMPTY, [b""] * HELD, seconds=SLICE_S)["good"])
    halves = [median(one) for one in empty]
    tails = [float(np.percentile(one, 99)) for one in ours]
    note = "GetSession / health check, 8 in flight"
    report.ratio("control_p50_vs_empty", [median(one) for one in ours], halves, note)
    report.ratio("control_p99_vs_empty", tails, halves, f"{note}: p99 / p50")
    rates = [len(one) / SLICE_S for one in ours]
    report.figure("control_rps", median(rates), "GetSession, 8 in flight, one process", rates)
    report.figure("empty_p50_ms", median(halves), "health check, 8 in flight", halves)
    return median(halves)


def overload(
    report: Report, address: str, requests: list[bytes], empty_ms: float, seconds: float
) -> None:
    """Ask for far more than there is, then look how soon all is as before."""
    before = median(call(address, ATTEND, requests[:1], seconds=SLICE_S)["good"])
    few = FLOOD_PROCESSES * 3
    held = sum(len(one["good"]) for one in flood(address, requests[:few], seconds)) / seconds
    note = f"{FLOOD_PROCESSES} processes of 3 streams for {seconds:g} s"
    report.figure("held_rps", held, f"Attends answered, {note}")
    found = flood(address, requests, seconds)
    began = now_ns()
    while True:
        took = call(address, ATTEND, requests[:1], seconds=0.1)["good"]
        waited = (now_ns() - began) / 1e9
        if (took and median(took) <= 2 * before) or waited > 30:
            break
    good = [ms for one in found for ms in one["good"]]
    refused = [ms for one in found for ms in one["refused"]]
    others: dict[str, int] = {}
    for one in found:
        for name, count in one["others"].items():
            others[name] = others.get(name, 0) + count
    rate = len(good) / seconds
    note = f"{FLOOD_PROCESSES} x {FLOOD_STREAMS} streams for {seconds:g} s"
    report.figure("goodput_vs_held", rate / held, f"answers a second / held, {note}")
    report.figure("overload_rps", rate, f"answered, {note}")
    report.figure("refused_rps", len(refused) / seconds, f"RESOURCE_EXHAUSTED, {note}")
    report.figure("other_errors", sum(others.values()), f"any other code, {note}: {others}")
    if refused:
        tail = float(np.percentile(refused, 99))
        report.figure("reject_p99_ms", tail, "how long a refusal takes, p99")
        report.figure("reject_p99_vs_empty", tail / empty_ms, "the same / p50 of an empty RPC")
    report.figure("recovery_s", waited, "until an Attend takes what it took before")


def churn(report: Report, address: str, pid: int, seconds: float) -> None:
    """Connect, ask, close, again and again, by four threads; look what the worker keeps."""

    def come_and_go() -> None:
        with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            channel.unary_unary(EMPTY)(b"", timeout=10)

    connected, plain = [], []
    with grpc.insecure_channel(address) as channel:
        method = channel.unary_unary(EMPTY)
        method(b"", timeout=10)
        for _ in range(10 * PAIRS):
            connected.append(seconds_of(come_and_go))
            plain.append(seconds_of(lambda: method(b"", timeout=10)))
    report.ratio("connect_vs_empty", connected, plain, "connect, ask, close / ask")
    before = _kept(pid)
    until = now_ns() + int(seconds * 1e9)
    counts = [0] * 4
    failures: list[BaseException] = []

    def run(index: int) -> None:
        while now_ns() < until:
            try:
                come_and_go()
                counts[index] += 1
            except grpc.RpcError as error:
                failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = _kept(pid)
    for name, was, now in zip(("fds", "threads", "rss_mib"), before, after, strict=True):
        report.figure(f"churn_{name}", now - was, f"more {name} in the worker: {was} to {now}")
    report.figure("churn_per_s", sum(counts) / seconds, f"connections, for {seconds:g} s")
    report.figure("churn_failures", len(failures), "connections that failed")


def _kept(pid: int) -> tuple[int, int, int]:
    """Return a process's open files, threads, and resident MiB."""
    place = Path(f"/proc/{pid}")
    pages = int((place / "statm").read_text().split()[1])
    mib = pages * os.sysconf("SC_PAGESIZE") >> 20
    return len(list((place / "fd").iterdir())), len(list((place / "task").iterdir())), mib


def _pid_of(address: str) -> int:
    """Return the process that listens at a port of this machine."""
    port = int(address.rpartition(":")[2])
    tables = (Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    lines = [line for text in tables for line in text.splitlines()[1:]]
    inodes = {
        line.split()[9]
        for line in lines
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    }
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                for descriptor in (entry / "fd").iterdir():
                    if os.readlink(descriptor).removeprefix("socket:[").rstrip("]") in inodes:
                        return int(entry.name)
            except OSError:
                continue
    raise ProcessLookupError(f"nobody listens at {address}")


def opened(allocate: Any) -> str:
    """Open a session, and return its id."""
    session_id = str(uuid.uuid4())
    spec = convert.spec_to_pb(SessionSpec(1, ttl_s=3600.0))
    request = types_pb2.AllocateRequest(session_id=session_id, spec=spec)
    allocate(request.SerializeToString(), timeout=10)
    return session_id


def attend(session_id: str) -> bytes:
    """Return a stream's message: one token in one layer. Repeated, it does the same again."""
    one = from_numpy(np.ones((1, 8, 64), np.float32))
    made = AttendCall(
        session_id=session_id,
        epoch=1,
        step=1,
        layer=0,
        q=one,
        scale=0.125,
        mask=Mask(),
        k=one,
        v=one,
        header=StepHeader((1,)),
        positions=(0,),
    )
    wrapped = worker_pb2.AttendRequest(call=calls.attend_call_to_pb(made, call_id=1))
    return wrapped.SerializeToString()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of overload and of churn")
    parser.add_argument("--flood", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.flood:
        address, seconds = arguments.flood
        requests = [bytes.fromhex(one) for one in json.loads(sys.stdin.read())]
        print(json.dumps(call(address, ATTEND, requests, seconds=float(seconds))))
        return
    report = Report("overload")
    with process("kvservice", "worker", "--port", "0", "--json") as line:
        address = json.loads(line)["address"]
        with grpc.insecure_channel(address) as channel:
            allocate = channel.unary_unary(f"/{WORKER.full_name}/Allocate")
            ids = [opened(allocate) for _ in range(FLOOD_PROCESSES * FLOOD_STREAMS)]
        request = types_pb2.GetSessionRequest(session_id=ids[0]).SerializeToString()
        empty_ms = control(report, address, request)
        overload(report, address, [attend(one) for one in ids], empty_ms, arguments.seconds)
        churn(report, address, _pid_of(address), arguments.seconds)
    report.print()


if __name__ == "__main__":
    main()
