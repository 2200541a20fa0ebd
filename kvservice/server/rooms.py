"""How many calls there may be: places, taken as calls arrive, and refusals, which take nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc

from kvservice.core.errors import Overloaded
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
