"""What a worker does when too much is asked of it, and when connections come and go.

All on one machine: callers and worker share its cores. An empty RPC is the health check.

control_*       a GetSession, by an empty RPC, 8 in flight
goodput_*       Attends answered a second while three processes try to have 120 streams each, more
                than a worker takes, by what three processes of 3 streams get
reject_*        how long a refusal takes a caller of its own meanwhile, by an empty RPC of the
                same caller without load (`_vs_empty`), and at the same time (`_vs_empty_then`)
recovery_s      seconds after that until an Attend takes what it took before
deaf_*          Attends of three streams beside 64 that ask and take no answer, by these alone
reset_*         the same beside a peer that opens streams and resets them as fast as it can
connect_*       connecting, one empty RPC, and closing, by an empty RPC alone
churn_*         connections a second, and what the worker keeps of them
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import uuid
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np

from bench.callers import EMPTY, Callers, Noted, call
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
DEAF_STREAMS: Final = 64
SLICE_S: Final = 0.5
PAIRS: Final = 9


def p99(values: list[float]) -> float:
    return float(np.percentile(values, 99))


def control(report: Report, address: str, request: bytes) -> float:
    """Compare a GetSession with an empty RPC; return the empty one's median, in ms."""
    ours, empty = [], []
    for _ in range(PAIRS):
        ours.append(call("ask", address, [request] * HELD, seconds=SLICE_S).good)
        empty.append(call("empty", address, [b""] * HELD, seconds=SLICE_S).good)
    halves = [median(one) for one in empty]
    note = "GetSession / health check, 8 in flight"
    report.ratio("control_p50_vs_empty", [median(one) for one in ours], halves, note)
    report.ratio("control_p99_vs_empty", [p99(one) for one in ours], halves, f"{note}: p99 / p50")
    rates = [len(one) / SLICE_S for one in ours]
    report.figure("control_rps", median(rates), "GetSession, 8 in flight, one process", rates)
    report.figure("empty_p50_ms", median(halves), "health check, 8 in flight", halves)
    return median(halves)


def flood(
    address: str, requests: list[bytes], seconds: float
) -> tuple[list[float], Noted, dict[str, int]]:
    """Let several processes attend, and another one knock meanwhile.

    Returns:
        How long the answers took, in ms; what the one that knocks has noted; other codes.
    """
    crowd = Callers.start("attend", address, requests, number=FLOOD_PROCESSES, seconds=seconds)
    knocking = Callers.start("knock", address, requests[:1], number=1, seconds=seconds)
    found = crowd.noted()
    others: dict[str, int] = {}
    for one in found:
        for name, count in one.others.items():
            others[name] = others.get(name, 0) + count
    return [ms for one in found for ms in one.good], knocking.noted()[0], others


def overload(report: Report, address: str, requests: list[bytes], seconds: float) -> None:
    """Ask for far more than there is, by turns with what is held; look how soon that is over."""
    idle = Callers.start("knock", address, requests[:1], number=1, seconds=2.0).noted()[0]
    before = median(call("attend", address, requests[:1], seconds=SLICE_S).good)
    held, rates, waits = [], [], []
    refused: list[float] = []
    first: list[float] = []
    empty: list[float] = []
    others: dict[str, int] = {}
    for _ in range(PAIRS):
        good, _, _ = flood(address, requests[: FLOOD_PROCESSES * 3], seconds / 5)
        held.append(len(good) / (seconds / 5))
        good, knocked, codes = flood(address, requests, seconds / 5)
        rates.append(len(good) / (seconds / 5))
        waits.append(_recovered(address, requests[0], before))
        refused += knocked.refused
        first += knocked.first
        empty += knocked.empty
        for name, count in codes.items():
            others[name] = others.get(name, 0) + count
    by = median(idle.empty)
    note = f"{FLOOD_PROCESSES} processes of 3 streams for {seconds / 5:g} s"
    report.figure("held_rps", median(held), f"Attends answered, {note}", held)
    note = f"{FLOOD_PROCESSES} x {FLOOD_STREAMS} streams for {seconds / 5:g} s"
    report.ratio("goodput_vs_held", rates, held, f"answers a second / held, {note}")
    report.figure("overload_rps", median(rates), f"answered, {note}", rates)
    report.figure("other_errors", sum(others.values()), f"not RESOURCE_EXHAUSTED: {others}")
    report.figure("empty_idle_ms", by, "an empty RPC without load, p50")
    report.figure("reject_p50_ms", median(refused), f"a refusal, p50 of {len(refused)}", refused)
    report.figure("reject_p99_ms", p99(refused), "the same, p99")
    note = f"the longest of {len(first)} of the first second, in which all come at once"
    report.figure("reject_first_ms", max(first, default=0.0), note)
    report.figure("reject_p50_vs_empty", median(refused) / by, "p50 / an empty RPC without load")
    report.figure("reject_p99_vs_empty", p99(refused) / by, "p99 / an empty RPC without load")
    report.figure(
        "reject_p99_vs_empty_then",
        p99(refused) / p99(empty),
        "p99 / p99 of an empty RPC, by turns with it",
    )
    report.figure("recovery_s", max(waits), "until an Attend takes what it took before, at most")


def _recovered(address: str, request: bytes, before: float) -> float:
    """Return after how many seconds an Attend takes at most twice what it took before, in ms."""
    began = now_ns()
    while True:
        took = call("attend", address, [request], seconds=0.1).good
        waited = (now_ns() - began) / 1e9
        if (took and median(took) <= 2 * before) or waited > 30:
            return waited


def beside(
    report: Report, kind: str, what: str, address: str, requests: list[bytes], seconds: float
) -> None:
    """Compare the Attends of three streams before and after, and beside, callers of another kind.

    Args:
        requests: Three of those who attend, then the others'.
    """

    def attends() -> list[float]:
        mine = Callers.start("attend", address, requests[:3], number=1, seconds=seconds / 3)
        return mine.noted()[0].good

    alone = attends()
    rude = Callers.start(kind, address, requests[3:], number=1, seconds=seconds)
    rude.wait(seconds / 9)  # for them to begin
    together = attends()
    did = rude.noted()[0].others
    alone += attends()
    rate = len(together) / (len(alone) / 2)
    report.figure(f"{kind}_rate_vs_alone", rate, f"Attends of three streams {what} / alone")
    ratio = median(together) / median(alone)
    report.figure(f"{kind}_p50_vs_alone", ratio, f"how long these take, p50; meanwhile {did}")
    report.figure(f"{kind}_p99_vs_alone", p99(together) / p99(alone), "how long these take, p99")


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


PARTS: Final = ("control", "overload", "deaf", "reset", "churn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part")
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS, help="some parts")
    arguments = parser.parse_args()
    report, seconds = Report("overload"), arguments.seconds
    with process("kvservice", "worker", "--port", "0", "--json") as line:
        address = json.loads(line)["address"]
        with grpc.insecure_channel(address) as channel:
            allocate = channel.unary_unary(f"/{WORKER.full_name}/Allocate")
            ids = [opened(allocate) for _ in range(FLOOD_PROCESSES * FLOOD_STREAMS)]
            requests = [attend(one) for one in ids]
            # A session's first call makes its pages: that is not what is measured here.
            stream = channel.stream_stream(f"/{WORKER.full_name}/Attend")
            assert len(list(stream(iter(requests), timeout=60))) == len(requests)
        if "control" in arguments.only:
            asked = types_pb2.GetSessionRequest(session_id=ids[0]).SerializeToString()
            control(report, address, asked)
        if "overload" in arguments.only:
            overload(report, address, requests, seconds)
        if "deaf" in arguments.only:
            some = requests[: 3 + DEAF_STREAMS]
            beside(report, "deaf", "beside streams that are not read", address, some, seconds)
        if "reset" in arguments.only:
            some = requests[:4]
            beside(report, "reset", "beside streams that are reset", address, some, seconds)
        if "churn" in arguments.only:
            churn(report, address, _pid_of(address), seconds)
    report.print()


if __name__ == "__main__":
    main()
