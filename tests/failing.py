"""A service whose calls fail when told to, before or after they are carried out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from kvservice.core.errors import DeadlineExceeded, KVServiceError
from kvservice_client._transport import AttendStream, Dial, Transport


class Failing:
    """Stands between a client and its servers, and counts calls by method.

    Unlike `tests.faults`, it fails calls with any error, which nobody tries again.
    """

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._delayed: str | None = None
        self._late: list[Callable[[], Any]] = []
        self._next: list[tuple[str | None, type[KVServiceError], bool, int]] = []
        self.calls: list[str] = []

    def dial(self, address: str) -> Transport:
        return _Transport(self, self._dial(address))

    def fail(
        self,
        method: str | None,
        error: type[KVServiceError],
        *,
        carried_out: bool,
        after: int = 0,
    ) -> None:
        """Let one call of a method fail, after letting some through.

        Args:
            method: None: whichever comes, but no release.
            carried_out: The service does what is asked, and only the answer is lost.
        """
        self._next.append((method, error, carried_out, after))

    def delay(self, method: str) -> None:
        """Let the next call of a method take too long: it arrives with `arrive`, if at all."""
        self._delayed = method

    def arrive(self) -> None:
        """Carry out the calls that were delayed, whatever becomes of them."""
        while self._late:
            with contextlib.suppress(KVServiceError):
                self._late.pop()()

    def has_failed(self) -> bool:
        """Whether all calls that were to fail have failed."""
        return not self._next

    def heal(self) -> None:
        """Let no more calls fail."""
        self._next.clear()

    def carry(self, method: str, call: Callable[[], Any]) -> Any:
        self.calls.append(method)
        if self._delayed == method:
            self._delayed = None
            self._late.append(call)
            raise DeadlineExceeded("the call is late")
        for index, (name, error, carried_out, after) in enumerate(self._next):
            if name != method and (name or method in ("Release", "RenewLease")):
                continue
            if after:
                self._next[index] = (name, error, carried_out, after - 1)
                break
            del self._next[index]
            if carried_out:
                call()
            raise error("the call was made to fail")
        return call()


class _Transport:
    def __init__(self, failing: Failing, way: Transport) -> None:
        self._failing = failing
        self._way = way

    def call(self, service: str, method: str, request: Message, *, timeout_s: float) -> Any:
        return self._failing.carry(
            method, lambda: self._way.call(service, method, request, timeout_s=timeout_s)
        )

    def open_stream(self) -> AttendStream:
        return self._way.open_stream()

    def write(self, call: Any, *, timeout_s: float) -> Any:
        return self._failing.carry("Write", lambda: self._way.write(call, timeout_s=timeout_s))

    def read(self, request: Any, *, timeout_s: float) -> Any:
        return self._failing.carry("Read", lambda: self._way.read(request, timeout_s=timeout_s))

    def close(self) -> None:
        self._way.close()
