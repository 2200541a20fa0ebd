"""Answering Attends: a call that says what the first layer of its step has said is not decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvservice.clock import Clock
from kvservice.config import ServerLimits
from kvservice.core.caller import Caller
from kvservice.core.errors import KVServiceError
from kvservice.core.recorder import MethodRecorder
from kvservice.core.said import Said
from kvservice.server.faults import explained
from kvservice.server.guard import Credential, Guard
from kvservice.server.rpc import Rpc
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


@dataclass(kw_only=True, eq=False, slots=True)
class Answers(ABC):
    """Answers the calls of one stream or lane, in order. A call's error travels in its result."""

    service: AttendService
    limits: ServerLimits
    recorder: MethodRecorder
    clock: Clock
    _wholes: Wholes = field(init=False)

    def __post_init__(self) -> None:
        self._wholes = Wholes(
            worker_pb2.AttendRequest, worker_pb2.AttendCall, self.limits.max_message_bytes
        )

    @abstractmethod
    def _admit(self, call: worker_pb2.AttendCall) -> Caller:
        """Return who makes a call."""

    @abstractmethod
    def _admit_said(self, said: Said) -> Caller:
        """As `_admit`, of a call that has not been decoded."""

    @abstractmethod
    def _mapped(self, error: Exception) -> KVServiceError:
        """Return what the caller is told."""

    @abstractmethod
    def _served(self, seconds: float) -> None:
        """Count a call that was served."""

    @abstractmethod
    def _refused(self, code: str, seconds: float) -> None:
        """Count a call that was not."""

    def answer(self, raw: bytes | memoryview) -> Iterable[bytes]:
        """Return the frames of the answer; none while a call has not come whole.

        Raises:
            InvalidRequest, TooLarge: Of the framing: nothing sensible can follow.
        """
        began = self.clock.monotonic()
        said = None if self._wholes.pending else self.service.read_attend(raw)
        if said is not None and not said.begins:
            try:
                frame = self.service.attend_steadily(said, self._admit_said(said))
            except Exception as error:
                return self._failed(said.call_id, error, began)
            if frame is not None:
                self._served(self.clock.monotonic() - began)
                return _whole_or_pieces(frame, self.limits.fragment_bytes)
        call = self._wholes.add(raw)
        if call is None:
            return ()
        try:
            result = self.service.attend(call, self._admit(call), said)
        except Exception as error:
            return self._failed(call.call_id, error, began)
        self._served(self.clock.monotonic() - began)
        return frames(result, self.limits.fragment_bytes)

    def end(self) -> None:
        """There are no more frames.

        Raises:
            InvalidRequest: The last one was within a call.
        """
        self._wholes.end()

    def _failed(self, call_id: int, error: Exception, began: float) -> Iterable[bytes]:
        told = self._mapped(error)
        self._refused(told.code.name, self.clock.monotonic() - began)
        result = worker_pb2.AttendResult(call_id=call_id, error=status.to_status(told))
        return frames(result, self.limits.fragment_bytes)


@dataclass(kw_only=True, eq=False, slots=True)
class LaneAnswers(Answers):
    """The answers of a lane, whose frames are counted with its calls."""

    credential: Credential
    guard: Guard

    def _admit(self, call: worker_pb2.AttendCall) -> Caller:
        return self.guard.admit_attend(self.credential, call)

    def _admit_said(self, said: Said) -> Caller:
        return self.guard.admit_attend(self.credential, said)

    def _mapped(self, error: Exception) -> KVServiceError:
        return explained(error, "Attend")

    def _served(self, seconds: float) -> None:
        self.recorder.carried(seconds)

    def _refused(self, code: str, seconds: float) -> None:
        self.recorder.received()
        self.recorder.sent()
        self.recorder.answered(code, seconds)


@dataclass(kw_only=True, eq=False, slots=True)
class StreamAnswers(Answers):
    """The answers of an Attend stream over gRPC, whose messages are counted as they pass."""

    rpc: Rpc

    def _admit(self, call: worker_pb2.AttendCall) -> Caller:
        return self.rpc.admit(call)

    def _admit_said(self, said: Said) -> Caller:
        return self.rpc.admit_streamed(said)

    def _mapped(self, error: Exception) -> KVServiceError:
        return self.rpc.mapped(error)

    def _served(self, seconds: float) -> None:
        self.recorder.answered("OK", seconds)

    def _refused(self, code: str, seconds: float) -> None:
        self.recorder.answered(code, seconds)


def _whole_or_pieces(frame: bytes, limit: int) -> Iterable[bytes]:
    """Return an `AttendResponse` as it is, or in fragments if it is larger than they may be."""
    if len(frame) <= limit:
        return (frame,)
    return frames(worker_pb2.AttendResponse.FromString(frame).result, limit)
