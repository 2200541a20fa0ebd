"""A network that can be made bad: a TCP proxy in a thread of the test process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
_CHUNK_BYTES = 64 << 10
_BUSY_BYTES = 16 << 10  # what no decoder's step sends back


class Proxy:
    """Listens at one address and passes everything on to another. `proxied` makes them.

    Connections live on through every change, as they do in a network that only misbehaves.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, target: tuple[str, int]) -> None:
        self._loop = loop
        self._target = target
        self._delay_s = 0.0
        self._bytes_per_s = float("inf")
        self._open = asyncio.Event()  # cleared: what is sent arrives when it is set again
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._num_answers_to_lose = 0

    def delay(self, seconds: float) -> None:
        """Let every piece of data take so much longer, in both directions."""
        self._delay_s = seconds

    def slow(self, bytes_per_s: float) -> None:
        """Let no more than so much come back on connections that bring a lot at once."""
        self._bytes_per_s = bytes_per_s

    def lose_next_answer(self) -> None:
        """Break the next connection on which something comes back, and pass that on to nobody."""
        self._num_answers_to_lose = 1

    def black_hole(self) -> None:
        """Take everything and pass nothing on, as long as `heal` is not called."""
        self._call(self._open.clear)

    def heal(self) -> None:
        self._delay_s, self._bytes_per_s, self._num_answers_to_lose = 0.0, float("inf"), 0
        self._call(self._open.set)

    def reset_all(self) -> None:
        """Break every connection, as a machine that has been switched off and on does."""
        self._call(self._abort_all)

    # -- in the loop's thread

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._open.wait()
            there = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there[1]}
        pumps = [
            asyncio.ensure_future(self._pump(reader, there[1], back=False)),
            asyncio.ensure_future(self._pump(there[0], writer, back=True)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for one in (writer, there[1]):
                self._writers.discard(one)
                one.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                await self._open.wait()
                if back and self._num_answers_to_lose:
                    self._num_answers_to_lose = 0
                    return
                if len(data) > _BUSY_BYTES and back:
                    await asyncio.sleep(len(data) / self._bytes_per_s)
                writer.write(data)
                await writer.drain()

    def _abort_all(self) -> None:
        for writer in list(self._writers):
            connection = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def _call(self, change: Any) -> None:
        done = threading.Event()

        def run() -> None:
            change()
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(10.0), "the proxy's loop hangs"


@contextmanager
def proxies() -> Iterator[Network]:
    """Yield what makes proxies; all of them end with the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="chaos-proxy", daemon=True)
    thread.start()
    network = Network(loop)
    try:
        yield network
    finally:
        network.run(network.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Network:
    """Makes proxies."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._servers: list[asyncio.Server] = []

    def proxy(self, target: str, *, at: str = "127.0.0.1:0") -> tuple[Proxy, str]:
        """Return a proxy to `target`, and the address where it listens."""
        there, here = (_split(address) for address in (target, at))

        async def listen() -> tuple[Proxy, str]:
            proxy = Proxy(self._loop, there)
            server = await asyncio.start_server(proxy.serve, *here)
            self._servers.append(server)
            host, port = server.sockets[0].getsockname()[:2]
            return proxy, f"{host}:{port}"

        return self.run(listen())

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(timeout=10)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
