"""A network between simulated processes: it delays, loses, doubles, reorders and cuts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from kvservice.core.caller import Caller
from kvservice.core.errors import DeadlineExceeded, KVServiceError, Unavailable
from kvservice.v1 import worker_pb2
from kvservice.wire.names import WORKER
from kvservice_client._transport import AnyCall, AttendStream, as_message
from tests.simulation.loop import Loop, Process

KEEPALIVE_S = 3.0
REGISTER = "Heartbeat, the first"
REPORT = "Heartbeat"
IN_ORDER = (REGISTER, REPORT)  # messages of one stream, which keeps their order


@dataclass
class Weather:
    """How bad the network is. Shares of all messages."""

    lost: float = 0.0
    doubled: float = 0.0
    slow: float = 0.0
    slow_s: float = 0.5


@dataclass
class Server:
    """Who answers at an address.

    Fields:
        handle: (method, request, caller) -> answer, or raises KVServiceError.
        waits: Handling may wait for others, so it is a task of its own.
    """

    process: Process
    handle: Callable[[str, Any, Caller], Message]
    waits: bool


@dataclass(eq=False)
class Call:
    """A request on its way, from the caller's point of view. `outcome` is set once."""

    server: Process | None = None
    outcome: Message | KVServiceError | None = None
    wake: Callable[[], None] | None = None

    def give_up(self) -> None:
        """Note that the caller waits no longer."""
        if self.outcome is None:
            self.settle(DeadlineExceeded("no answer in time"))

    def settle(self, outcome: Message | KVServiceError) -> None:
        if self.outcome is None:
            self.outcome = outcome
            if self.wake is not None:
                self.wake()


@dataclass
class Network:
    """Carries calls between addresses; each is that of a process's server."""

    loop: Loop
    weather: Weather = field(default_factory=Weather)
    servers: dict[str, Server] = field(default_factory=dict)
    cuts: set[frozenset[str]] = field(default_factory=set)
    refusing: set[str] = field(default_factory=set)  # addresses that take no connection
    waiting: list[Call] = field(default_factory=list)

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self.cuts

    def call(
        self,
        source: Process,
        address: str,
        method: str,
        request: Message,
        timeout_s: float,
        caller: Caller,
    ) -> Any:
        """Make a call from a task of `source`, and wait for its outcome.

        Raises:
            KVServiceError: What the server answers; Unavailable, or DeadlineExceeded.
        """
        return self.outcome(source, self.send(source, address, method, request, caller), timeout_s)

    def send(
        self, source: Process, address: str, method: str, request: Message, caller: Caller
    ) -> Call:
        """Let a request go; it is copied now."""
        raw, kind = request.SerializeToString(), type(request)
        call = Call()
        self.waiting.append(call)
        delivered = [self._delay()]
        if method not in IN_ORDER and self._happens(self.weather.doubled):
            # A copy that was given up, or is handled late. It is no answer to anybody.
            delivered.append(delivered[0] + self.loop.rng.uniform(0.0, 4.0))
        lost = self._happens(self.weather.lost)
        for index, delay in enumerate(delivered):
            mine = call if index == 0 else Call()
            if index == 0 and (lost or self.is_cut(source.name, address)):
                self._lose(call, reset=lost and self._happens(0.5))
                continue
            arrive = self._arrival(source, address, method, kind, raw, mine, caller)
            self.loop.later(delay, arrive)
        return call

    def outcome(self, source: Process, call: Call, timeout_s: float) -> Any:
        """Wait for a call's outcome."""
        loop = self.loop
        if call.outcome is None:
            call.wake = loop.waker(source)
            loop.later(timeout_s, call.give_up)
            loop.park()
        if call in self.waiting:
            self.waiting.remove(call)
        outcome = call.outcome
        assert outcome is not None
        if isinstance(outcome, KVServiceError):
            raise outcome
        return outcome

    def reset(self, process: Process) -> None:
        """Break the connections to a process that has crashed."""
        for call in self.waiting:
            if call.server is process:
                self._lose(call, reset=True)

    # -- on the way

    def _arrival(
        self,
        source: Process,
        address: str,
        method: str,
        kind: type[Message],
        raw: bytes,
        call: Call,
        caller: Caller,
    ) -> Callable[[], None]:
        def arrive() -> None:
            server = self.servers.get(address)
            if server is None or not server.process.alive or address in self.refusing:
                self.loop.later(0.0005, lambda: call.settle(Unavailable("connection refused")))
                return
            call.server = server.process

            def handle() -> None:
                self._handle(server, source, address, method, kind.FromString(raw), call, caller)

            if server.waits:
                self.loop.spawn(server.process, handle)
            else:
                self.loop.happen(handle, server.process)

        return arrive

    def _handle(
        self,
        server: Server,
        source: Process,
        address: str,
        method: str,
        request: Message,
        call: Call,
        caller: Caller,
    ) -> None:
        self.loop.note(source.name, ">", address, method)
        answer: Message | KVServiceError
        try:
            handled = server.handle(method, request, caller)
            answer = type(handled).FromString(handled.SerializeToString())
        except KVServiceError as error:
            self.loop.note(address, "refuses", method, error.reason)
            answer = error
        call.server = None
        if self.is_cut(source.name, address) or self._happens(self.weather.lost):
            self._lose(call, reset=self._happens(0.3))
        else:
            self.loop.later(self._delay(), lambda: call.settle(answer))

    def _lose(self, call: Call, *, reset: bool) -> None:
        delay = self.loop.rng.uniform(0.0, 0.1) if reset else KEEPALIVE_S
        self.loop.later(delay, lambda: call.settle(Unavailable("the connection has broken")))

    def _delay(self) -> float:
        rng = self.loop.rng
        if self._happens(self.weather.slow):
            return rng.uniform(0.0, self.weather.slow_s)
        return rng.uniform(0.0002, 0.002)

    def _happens(self, share: float) -> bool:
        return share > 0.0 and self.loop.rng.random() < share


class SimTransport:
    """A client's way to an address."""

    def __init__(self, network: Network, source: Process, address: str, caller: Caller) -> None:
        self._network = network
        self._source = source
        self._address = address
        self._caller = caller

    def call(self, service: str, method: str, request: Message, *, timeout_s: float) -> Any:
        del service
        return self._network.call(
            self._source, self._address, method, request, timeout_s, self._caller
        )

    def open_stream(self) -> AttendStream:
        return _SimStream(self._network, self._source, self._address, self._caller)

    def write(self, call: worker_pb2.WriteCall, *, timeout_s: float) -> Any:
        return self.call(WORKER.full_name, "Write", call, timeout_s=timeout_s)

    def read(self, request: worker_pb2.ReadRequest, *, timeout_s: float) -> Any:
        return self.call(WORKER.full_name, "Read", request, timeout_s=timeout_s)

    def close(self) -> None:
        pass


class _SimStream:
    def __init__(self, network: Network, source: Process, address: str, caller: Caller) -> None:
        self._network = network
        self._source = source
        self._address = address
        self._caller = caller
        self._sent: tuple[Call, int, float] | None = None

    def attend(self, call: AnyCall, *, timeout_s: float) -> Any:
        self.send(call, timeout_s=timeout_s)
        return self.receive()

    def send(self, call: AnyCall, *, timeout_s: float) -> None:
        message = as_message(call)
        sent = self._network.send(self._source, self._address, "Attend", message, self._caller)
        self._sent = sent, call.call_id, timeout_s

    def receive(self) -> Any:
        assert self._sent is not None
        sent, call_id, timeout_s = self._sent
        self._sent = None
        result = self._network.outcome(self._source, sent, timeout_s)
        assert result.call_id == call_id
        return result

    def close(self) -> None:
        self._sent = None
