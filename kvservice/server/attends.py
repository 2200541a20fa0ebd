"""Answering Attends: a call that says what the first layer of its step has said is not decoded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvservice.clock import Clock
from kvservice.config import ServerLimits
from kvservice.core.caller import Caller
from kvservice.core.recorder import MethodRecorder
from kvservice.core.said import Said
from kvservice.server.faults import explained
from kvservice.server.guard import Credential, Guard
from kvservice.server.wholes import Wholes
from kvservice.v1 import worker_pb2
from kvservice.wire import status
from kvservice.wire.fragments import frames


class AttendService(Protocol):
    """Who answers: `WorkerService`, which says more."""

    def attend(
        self, call: worker_pb2.AttendCall, caller: Caller, said: Said | None = None
    ) -> worker_pb2.AttendResult:
        """Serve a call. `said`: the same, where `attend_steadily` could not serve it."""

    def read_attend(self, frame: bytes | memoryview) -> Said | None:
        """Look at a frame; None: it is to be decoded. The result aliases it."""

    def attend_steadily(self, said: Said, caller: Caller) -> bytes | None:
        """Return the frame of the answer; None: take `attend`, nothing has changed."""


class LaneAnswers:
    """Answers the calls of one lane, in order. A call's error travels in its result."""

    def __init__(
        self,
        credential: Credential,
        *,
        guard: Guard,
        service: AttendService,
        limits: ServerLimits,
        recorder: MethodRecorder,
        clock: Clock,
    ) -> None:
        self._credential = credential
        self._guard = guard
        self._service = service
        self._fragment_bytes = limits.fragment_bytes
        self._recorder = recorder
        self._clock = clock
        self._wholes = Wholes(
            worker_pb2.AttendRequest, worker_pb2.AttendCall, limits.max_message_bytes
        )

    def answer(self, raw: memoryview) -> Iterable[bytes]:
        """Return the frames of the answer; none while a call has not come whole.

        Raises:
            InvalidRequest, TooLarge: Of the framing: nothing sensible can follow.
        """
        began = self._clock.monotonic()
        said = None if self._wholes.pending else self._service.read_attend(raw)
        if said is not None and not said.begins:
            try:
                caller = self._guard.admit_attend(self._credential, said)
                frame = self._service.attend_steadily(said, caller)
            except Exception as error:
                return self._failed(said.call_id, error, began)
            if frame is not None:
                self._recorder.carried(self._clock.monotonic() - began)
                return whole_or_pieces(frame, self._fragment_bytes)
        call = self._wholes.add(raw)
        if call is None:
            return ()
        try:
            caller = self._guard.admit_attend(self._credential, call)
            result = self._service.attend(call, caller, said)
        except Exception as error:
            return self._failed(call.call_id, error, began)
        self._recorder.carried(self._clock.monotonic() - began)
        return frames(result, self._fragment_bytes)

    def _failed(self, call_id: int, error: Exception, began: float) -> Iterable[bytes]:
        told = explained(error, "Attend")
        result = worker_pb2.AttendResult(call_id=call_id, error=status.to_status(told))
        self._recorder.received()
        self._recorder.sent()
        self._recorder.answered(told.code.name, self._clock.monotonic() - began)
        return frames(result, self._fragment_bytes)


def whole_or_pieces(frame: bytes, limit: int) -> Iterable[bytes]:
    """Return an `AttendResponse` as it is, or in fragments if it is larger than they may be."""
    if len(frame) <= limit:
        return (frame,)
    return frames(worker_pb2.AttendResponse.FromString(frame).result, limit)
