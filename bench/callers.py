"""Callers of a worker, in processes of their own: many at once, patient ones, and rude ones.

`python -m bench.callers KIND ADDRESS SECONDS` reads a JSON list of requests, in hexadecimal, from
stdin, and prints what it has noted as JSON:

attend    keeps a stream open for each request, and makes one call after the other on it
ask       keeps a call of GetSession in flight for each request
knock     opens a stream, looks how it ends, makes an empty RPC; over and over, one at a time
deaf      asks once on a stream for each request, and has no window for any answer
reset     opens streams and resets them, as fast as they are taken
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, Final

import grpc

from bench.peers import Peer
from kvservice.clock import now_ns
from kvservice.wire.names import WORKER

ATTEND: Final = f"/{WORKER.full_name}/Attend"
GET: Final = f"/{WORKER.full_name}/GetSession"
EMPTY: Final = "/grpc.health.v1.Health/Check"
ENDED_MEANWHILE: Final = "Internal error from Core"
BACKOFF_S: Final = 1.0  # what a refusal says in its RetryInfo; waited for half to one and a half
KNOCK_PAUSE_S: Final = 0.02
SETTLE_S: Final = 1.0
RESET_BATCH: Final = 100  # of stream ids, which are odd
START_S: Final = 60.0


class Noted:
    """Durations of answers, refusals and empty RPCs, in ms, and how often else what happened."""

    def __init__(self) -> None:
        self.good: list[float] = []
        self.refused: list[float] = []
        self.first: list[float] = []  # refusals of the first second, when all others come too
        self.empty: list[float] = []
        self.others: dict[str, int] = {}

    def failed(self, code: grpc.StatusCode, began: int, details: str | None = None) -> None:
        # Its library calls it INTERNAL where the end of a stream meets what is being written.
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED or details == ENDED_MEANWHILE:
            self.refused.append(_ms_since(began))
        else:
            self.count(code.name)

    def count(self, name: str, number: int = 1) -> None:
        self.others[name] = self.others.get(name, 0) + number


def _ms_since(began: int) -> float:
    return (now_ns() - began) / 1e6


async def _ask(method: Any, request: bytes, until: int, noted: Noted) -> None:
    while now_ns() < until:
        began = now_ns()
        try:
            await method(request, timeout=10)
            noted.good.append(_ms_since(began))
        except grpc.aio.AioRpcError as error:
            noted.failed(error.code(), began)
            await asyncio.sleep(random.uniform(0.5, 1.5) * BACKOFF_S)


async def _attend(method: Any, request: bytes, until: int, noted: Noted) -> None:
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
                noted.good.append(_ms_since(began))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            noted.failed(await stream.code(), began, await stream.details())
            await asyncio.sleep(random.uniform(0.5, 1.5) * BACKOFF_S)
        finally:
            stream.cancel()


async def _knock(channel: Any, request: bytes, until: int, noted: Noted) -> None:
    attend, empty = channel.stream_stream(ATTEND), channel.unary_unary(EMPTY)

    async def requests() -> AsyncIterator[bytes]:
        yield request

    settled = now_ns() + int(SETTLE_S * 1e9)
    while now_ns() < until:
        began = now_ns()
        stream = attend(requests(), timeout=30)
        try:
            await stream.read()
            noted.count("let in")
            stream.cancel()
        except grpc.aio.AioRpcError as error:
            noted.failed(error.code(), began, error.details())
        if began < settled:
            noted.first, noted.refused = noted.first + noted.refused, []
        began = now_ns()
        await empty(b"", timeout=30)
        noted.empty.append(_ms_since(began))
        await asyncio.sleep(KNOCK_PAUSE_S)


async def _call(kind: str, address: str, requests: Sequence[bytes], until: int) -> Noted:
    noted = Noted()
    async with grpc.aio.insecure_channel(address) as channel:
        if kind == "knock":
            await _knock(channel, requests[0], until, noted)
        elif kind in ("ask", "empty"):
            method = channel.unary_unary(GET if kind == "ask" else EMPTY)
            await asyncio.gather(*(_ask(method, one, until, noted) for one in requests))
        else:
            method = channel.stream_stream(ATTEND)
            await asyncio.gather(*(_attend(method, one, until, noted) for one in requests))
    return noted


def call(kind: str, address: str, requests: Sequence[bytes], *, seconds: float) -> Noted:
    """Call from this process: `attend`, `ask`, or `empty` for empty RPCs."""
    return asyncio.run(_call(kind, address, requests, now_ns() + int(seconds * 1e9)))


# -- what no library would do: by hand


def _deaf(address: str, requests: Sequence[bytes], until: int) -> Noted:
    noted = Noted()
    with Peer(address, ATTEND, window=0) as peer:
        for number, request in enumerate(requests):
            peer.open(range(2 * number + 1, 2 * number + 2))
            peer.ask(2 * number + 1, request)
            noted.count("asked")
        while (left_s := (until - now_ns()) / 1e9) > 0:
            if not peer.listen(left_s):
                noted.count("closed")
                break
        noted.others.update(peer.came)
    return noted


def _reset(address: str, until: int) -> Noted:
    """Open streams, and reset each a batch later; connect anew if the worker has had enough."""
    noted, came = Noted(), Counter[str]()
    while now_ns() < until:
        noted.count("connections")
        with suppress(OSError), Peer(address, ATTEND) as peer:
            first = 1
            while now_ns() < until and peer.listen(0.0):
                peer.open(range(first, first + RESET_BATCH, 2))
                peer.reset(range(max(1, first - RESET_BATCH), first, 2))
                first += RESET_BATCH
                noted.count("reset", RESET_BATCH // 2)
        came += peer.came
    noted.others.update(came)
    return noted


# -- processes


class Callers:
    """Some processes that call at once, from `open` until their time is over."""

    def __init__(self, children: list[subprocess.Popen[str]], seconds: float) -> None:
        self._children = children
        self._seconds = seconds

    @classmethod
    def start(
        cls, kind: str, address: str, requests: Sequence[bytes], *, number: int, seconds: float
    ) -> Callers:
        """Start `number` processes, each with its share of the requests; they begin at once."""
        command = [sys.executable, "-m", "bench.callers", kind, address, str(seconds)]
        children = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(number)
        ]
        for child in children:  # they have imported what they need
            assert child.stdout is not None
            child.stdout.readline()
        for index, child in enumerate(children):
            assert child.stdin is not None
            child.stdin.write(json.dumps([one.hex() for one in requests[index::number]]) + "\n")
            child.stdin.flush()
        return cls(children, seconds)

    def wait(self, seconds: float) -> None:
        """Let them call for so long."""
        with suppress(subprocess.TimeoutExpired):
            self._children[0].wait(seconds)

    def noted(self) -> list[Noted]:
        """Wait until they have finished; return what each has noted."""
        found = []
        for child in self._children:
            one = Noted()
            vars(one).update(json.loads(child.communicate(timeout=self._seconds + START_S)[0]))
            found.append(one)
        return found


def _main() -> None:
    kind, address, seconds = sys.argv[1:]
    print("ready", flush=True)
    requests = [bytes.fromhex(one) for one in json.loads(sys.stdin.readline())]
    until = now_ns() + int(float(seconds) * 1e9)
    if kind == "reset":
        noted = _reset(address, until)
    elif kind == "deaf":
        noted = _deaf(address, requests, until)
    else:
        noted = asyncio.run(_call(kind, address, requests, until))
    print(json.dumps(vars(noted)))


if __name__ == "__main__":
    _main()
