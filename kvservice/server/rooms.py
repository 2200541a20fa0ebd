"""How many calls there may be: places, taken as calls arrive, and refusals, which take nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from kvservice.core.errors import Overloaded
from kvservice.core.quota import QuotaOf
from kvservice.server.threads import AtOnce, served_by
from kvservice.wire import status

A = TypeVar("A")

_AT_ONCE = AtOnce()


class Room:
    """How many calls of one kind there may be at the same time. Thread-safe.

    A call takes its place as it arrives, before anything of it is read or any thread is taken, and
    gives it back when it is over.
    """

    def __init__(self, size: int, refusal: Overloaded) -> None:
        """
        Args:
            refusal: What those are told for whom there is no place.
        """
        self.refusal = refusal
        self._lock = threading.Lock()
        self._left = size
        self._refused = 0

    def take(self) -> bool:
        """Take a place; return False if there is none."""
        with self._lock:
            if not self._left:
                self._refused += 1
                return False
            self._left -= 1
            return True

    def give_back(self) -> None:
        with self._lock:
            self._left += 1

    def num_refused(self) -> int:
        """Return how many have found no place since this was asked last."""
        with self._lock:
            number, self._refused = self._refused, 0
        return number


def in_room(room: Room, behaviour: Callable[[Iterator[bytes], Any], A]) -> Any:
    """Return what answers once, and gives back the place that was taken for it."""

    def handle(raws: Iterator[bytes], context: Any) -> A:
        try:
            return behaviour(raws, context)
        finally:
            room.give_back()

    return handle


def streaming_in_room(
    room: Room, behaviour: Callable[[Iterator[bytes], Any], Iterator[A]]
) -> Callable[[Iterator[bytes], Any], Iterator[A]]:
    """As `in_room`, for what answers by a stream, with which gRPC begins in any case."""

    def handle(raws: Iterator[bytes], context: Any) -> Iterator[A]:
        try:
            yield from behaviour(raws, context)
        finally:
            room.give_back()

    return handle


def refusing(error: Overloaded) -> Any:
    """Return the handler of calls for which there is no place: it reads nothing, and is run by
    gRPC's own thread."""
    code, answer = status.to_code(error), status.to_trailer_status(error)
    trailers = ((status.DETAILS_KEY, answer.SerializeToString()),)

    def refuse(raws: Iterator[bytes], context: Any) -> Iterator[bytes]:
        del raws
        context.set_code(code)
        context.set_details(answer.message)
        context.set_trailing_metadata(trailers)
        return iter(())

    return grpc.stream_stream_rpc_method_handler(served_by(_AT_ONCE, refuse))


class CallCounts:
    """Calls in progress, by tenant, and how many there may be. Thread-safe."""

    def __init__(self, quota_of: QuotaOf) -> None:
        self._quota_of = quota_of
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def begin(self, tenant: str) -> None:
        """Count a call.

        Raises:
            QuotaExceeded: The tenant has as many in progress as it may. Nothing was counted.
        """
        quota = self._quota_of(tenant)
        with self._lock:
            count = self._counts.get(tenant, 0) + 1
            quota.check("calls", count)
            self._counts[tenant] = count

    def end(self, tenant: str) -> None:
        with self._lock:
            left = self._counts[tenant] - 1
            if left:
                self._counts[tenant] = left
            else:
                del self._counts[tenant]

    @contextmanager
    def one(self, tenant: str) -> Iterator[None]:
        """Count a call for as long as the block lasts."""
        self.begin(tenant)
        try:
            yield
        finally:
            self.end(tenant)
