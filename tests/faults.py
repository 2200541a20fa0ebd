"""A network that loses what it is told to lose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

from google.protobuf.message import Message

from kvservice.core.errors import Unavailable
from kvservice_client._transport import AttendStream, Dial, Transport, as_message


class Faults:
    """Stands between a client and its servers.

    Every call is noted, with its bytes, before it may be lost.
    """

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._losses: Counter[tuple[str, str]] = Counter()  # method, "request" or "answer"
        self._skip: Counter[str] = Counter()
        self._cut: set[str] = set()
        self._num_breaks = 0
        self.log: list[tuple[str, str, bytes]] = []  # address, method, request

    def dial(self, address: str) -> Transport:
        return _Transport(self, address, self._num_breaks)

    def break_connections(self) -> None:
        """Let nothing through on the connections that there are. New ones are as good as any."""
        self._num_breaks += 1

    def lose(self, method: str, what: str, *, times: int = 1, after: int = 0) -> None:
        """Lose the next requests or answers of a method, after letting some through."""
        self._losses[method, what] += times
        self._skip[method] += after

    def forget(self) -> None:
        """Lose nothing more."""
        self._losses.clear()
        self._skip.clear()

    def cut(self, address: str) -> None:
        """Let nothing through to an address, until `heal`."""
        self._cut.add(address)

    def heal(self, address: str) -> None:
        self._cut.discard(address)

    def sent(self, method: str) -> list[tuple[str, bytes]]:
        """Return address and bytes of a method's requests so far."""
        return [(address, request) for address, name, request in self.log if name == method]

    def carry(
        self,
        address: str,
        method: str,
        request: Message,
        call: Callable[[Transport], Any],
        made_at: int,
    ) -> Any:
        """Carry out a call, or lose it. `made_at` counts breaks when the connection was made."""
        self.log.append((address, method, request.SerializeToString(deterministic=True)))
        if address in self._cut or made_at < self._num_breaks:
            raise Unavailable("the connection is cut")
        if self._skip[method] > 0:
            self._skip[method] -= 1
            return self._carried(address, call)
        if self._take(method, "request"):
            raise Unavailable("the request was lost")
        answer = self._carried(address, call)
        if self._take(method, "answer"):
            raise Unavailable("the answer was lost")
        return answer

    def _carried(self, address: str, call: Callable[[Transport], Any]) -> Any:
        with closing(self._dial(address)) as way:  # whose threads end with it
            return call(way)

    def _take(self, method: str, what: str) -> bool:
        if not self._losses[method, what]:
            return False
        self._losses[method, what] -= 1
        return True


class _Transport:
    def __init__(self, faults: Faults, address: str, made_at: int) -> None:
        self._faults = faults
        self._address = address
        self._made_at = made_at

    def call(self, service: str, method: str, request: Message, *, timeout_s: float) -> Any:
        return self._faults.carry(
            self._address,
            method,
            request,
            lambda way: way.call(service, method, request, timeout_s=timeout_s),
            self._made_at,
        )

    def open_stream(self) -> AttendStream:
        return _Stream(self._faults, self._address, self._made_at)

    def write(self, call: Any, *, timeout_s: float) -> Any:
        return self._faults.carry(
            self._address,
            "Write",
            call,
            lambda way: way.write(call, timeout_s=timeout_s),
            self._made_at,
        )

    def read(self, request: Any, *, timeout_s: float) -> Any:
        return self._faults.carry(
            self._address,
            "Read",
            request,
            lambda way: way.read(request, timeout_s=timeout_s),
            self._made_at,
        )

    def close(self) -> None:
        pass


class _Stream:
    def __init__(self, faults: Faults, address: str, made_at: int) -> None:
        self._faults = faults
        self._address = address
        self._made_at = made_at
        self._sent: Any = None

    def attend(self, call: Any, *, timeout_s: float) -> Any:
        message = as_message(call)
        return self._faults.carry(
            self._address,
            "Attend",
            message,
            lambda way: way.open_stream().attend(message, timeout_s=timeout_s),
            self._made_at,
        )

    def send(self, call: Any, *, timeout_s: float) -> None:
        self._sent = as_message(call), timeout_s

    def receive(self) -> Any:
        call, timeout_s = self._sent
        return self.attend(call, timeout_s=timeout_s)

    def close(self) -> None:
        self._sent = None
