"""One call on its way: who makes it, how it ends, and that it is counted and logged once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import grpc

from kvservice.clock import Clock
from kvservice.config import ServerLimits
from kvservice.core.access import Rule
from kvservice.core.caller import Caller
from kvservice.core.errors import Code, KVServiceError
from kvservice.core.recorder import MethodRecorder, auth_reason
from kvservice.server.faults import explained
from kvservice.server.guard import Attend, Credential, Guard
from kvservice.server.wholes import Wholes
from kvservice.wire import status

LOG = logging.getLogger(__name__)

OURS: Final = {Code.INTERNAL, Code.DATA_LOSS}


@dataclass(frozen=True, slots=True)
class Method:
    """One method: how to decode, serve and count it.

    Fields:
        name: As in the path.
        whole: For framed requests, the type of the message that the frames carry.
        rule: Who may call it.
    """

    name: str
    serve: Callable[..., Any]
    request: type[Any]
    response: type[Any]
    whole: type[Any] | None
    recorder: MethodRecorder
    rule: Rule

    def wholes(self, limits: ServerLimits) -> Wholes:
        """Return what puts the requests of a stream together."""
        assert self.whole is not None, f"the requests of {self.name} are not framed"
        return Wholes(self.request, self.whole, limits.max_message_bytes)


class Rpc:
    """One call on its way: who calls, how it ends, and that it is counted and logged once."""

    __slots__ = (
        *("_clock", "_context", "_counted", "_credential", "_ended"),
        *("_guard", "_method", "_sent", "_started"),
    )

    def __init__(self, method: Method, context: Any, clock: Clock, guard: Guard) -> None:
        self._method = method
        self._guard = guard
        self._context = context
        self._clock = clock
        self._started = clock.monotonic()
        self._credential: Credential | None = None
        self._counted: str | None = None
        self._ended = False
        self._sent = False

    def sent(self) -> None:
        """A message of a stream goes out."""
        if not self._sent:
            self._sent = True
            self._method.recorder.first_sent(self._clock.monotonic() - self._started)
        self._method.recorder.sent()

    def identify(self) -> Callable[[], bool]:
        """Find out who calls; return what says whether that has ended meanwhile.

        Raises:
            Unauthenticated, PermissionDenied, InvalidRequest: Before anything is read.
            QuotaExceeded: The tenant has as many calls in progress as it may.
        """
        credential = self._credential = self._guard.identify(self._context)
        if credential.caller is not None:
            self._count(credential.caller.tenant)
        return partial(self._guard.has_ended, credential)

    def admit(self, request: Any, *, again: bool = False) -> Caller:
        """Return who makes a request. It counts as the tenant's call in progress, once.

        Args:
            again: Of a conversation that has been admitted: only its first message needs a
                credential that still holds.
        """
        assert self._credential is not None, "identified before"
        if again and self._credential.caller is not None:
            return self._credential.caller
        caller = self._guard.admit(self._credential, self._method.rule, request)
        self._count(caller.tenant)
        return caller

    def admit_streamed(self, call: Attend) -> Caller:
        """As `admit`, of an Attend that has not been decoded."""
        assert self._credential is not None, "identified before"
        caller = self._guard.admit_streamed(self._credential, self._method.rule, call)
        self._count(caller.tenant)
        return caller

    def _count(self, tenant: str) -> None:
        if self._counted is None:
            self._guard.calls.begin(tenant)
            self._counted = tenant

    def mapped(self, error: Exception) -> KVServiceError:
        """Return what the client is told; what nobody expected is explained in the log alone."""
        if isinstance(error, KVServiceError):
            if reason := auth_reason(error):
                self._method.recorder.turned_away(reason)
            level = logging.ERROR if error.code in OURS else logging.INFO
            self._log(level, error.reason, error.message)
            return error
        return explained(error, self._method.name)

    def fail(self, error: Exception) -> None:
        if isinstance(error, grpc.RpcError):  # the client has gone, or its deadline has passed
            self.end()
            return
        ours = self.mapped(error)
        answer = status.to_trailer_status(ours)
        self._context.set_code(status.to_code(ours))
        self._context.set_details(answer.message)
        self._context.set_trailing_metadata(((status.DETAILS_KEY, answer.SerializeToString()),))
        self._end(ours.code.name)

    def succeed(self) -> None:
        self._end("OK" if self._context.is_active() else self._cut_off())

    def end(self) -> None:
        """The call is over, however it was; no effect if that has been said already."""
        self._end(self._cut_off())

    def _cut_off(self) -> str:
        left = self._context.time_remaining()
        return "DEADLINE_EXCEEDED" if left is not None and left <= 0 else "CANCELLED"

    def _end(self, code: str) -> None:
        if not self._ended:
            self._ended = True
            if self._counted is not None:
                self._guard.calls.end(self._counted)
            seconds = self._clock.monotonic() - self._started
            self._method.recorder.handled(code, seconds)
            self._log(logging.DEBUG, code, f"{seconds:.6f} s", duration_s=round(seconds, 6))

    def _log(self, level: int, outcome: str, text: str, **more: object) -> None:
        if LOG.isEnabledFor(level):
            fields = {"rpc_method": self._method.name, "rpc_outcome": outcome, **more}
            LOG.log(level, "%s %s: %s", self._method.name, outcome, text, extra=fields)
