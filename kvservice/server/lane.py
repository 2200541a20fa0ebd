"""The worker's lane: Attend on a plain Unix or TCP socket, for those whom gRPC has let in.

`OpenLane` hands out a token that can be used once, within a few seconds. Whoever begins a
connection with it is served as its caller: the same messages, checks and errors as gRPC's stream,
by one thread a connection, without a hand-off between threads.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvservice.clock import Clock
from kvservice.config import ConfigError, ServerLimits
from kvservice.core.caller import Caller
from kvservice.core.errors import KVServiceError, Overloaded
from kvservice.core.recorder import RpcRecorder
from kvservice.server.attends import AttendService, LaneAnswers
from kvservice.server.guard import Credential, Guard, OpenGuard
from kvservice.server.streams import PERIOD_S
from kvservice.wire.lane import TOKEN_BYTES, UNIX_PREFIX, LanePipe

LOG = logging.getLogger(__name__)

TOKEN_LIFE_S: Final = 10.0
MAX_TOKENS: Final = 1024
MAX_STRANGERS: Final = 64
"""Connections that have shown no token yet. Beyond, the one that has waited longest is closed: who
has a token shows it at once."""

_PAUSE_S: Final = 0.1  # after a failure to accept, which may be one of many
_BACKLOG: Final = 128

LaneOffer = tuple[tuple[str, ...], bytes]
"""Where to connect, and what to say first."""


@dataclass(frozen=True, slots=True)
class _Admission:
    credential: Credential
    ends_at: float


class LaneServer:
    """Listens on a Unix socket and a TCP port of this worker. `start` once, `stop` once.

    Args:
        host: Where to listen.
        port: 0: any free one.
        advertised: What others are to dial, if not `host`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        advertised: str | None,
        limits: ServerLimits,
        clock: Clock,
        recorder: RpcRecorder,
        guard: Guard | None = None,
    ) -> None:
        self._guard = guard if guard is not None else OpenGuard(clock)
        self._host, self._wanted_port = host, port
        self._advertised = advertised or host
        self._limits = limits
        self._clock = clock
        self._recorder = recorder.method("bidi_stream", "kvservice.lane", "Attend")
        self._lock = threading.Lock()
        self._admissions: dict[bytes, _Admission] = {}
        self._open: set[_Connection] = set()
        self._threads: set[threading.Thread] = set()
        self._listeners: list[socket.socket] = []
        self._stopping = False
        self._stop = threading.Event()
        self._service: AttendService | None = None
        self.addresses: tuple[str, ...] = ()

    # -- life

    def start(self, service: AttendService) -> None:
        """Listen, and serve Attend.

        Raises:
            ConfigError: The port is taken, or the host is not this machine's.
        """
        self._service = service
        tcp = self._listen_tcp()
        # In Linux's abstract namespace: no file is left behind by a worker that is killed.
        name = f"kvservice-lane-{uuid.uuid4().hex}"
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(f"\0{name}")
        unix.listen(_BACKLOG)
        self._listeners = [tcp, unix]
        port = tcp.getsockname()[1]
        host = f"[{self._advertised}]" if ":" in self._advertised else self._advertised
        self.addresses = (f"{UNIX_PREFIX}{name}", f"{host}:{port}")
        for listener in self._listeners:
            self._spawn(partial(self._accept, listener), "kvservice-lane-accept")
        self._spawn(self._watch, "kvservice-lane-watch")

    def stop(self) -> None:
        """Close everything and wait for the threads to end."""
        self._stop.set()
        with self._lock:
            self._stopping = True
            connections = list(self._open)
            threads = list(self._threads)
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the one who accepts
            listener.close()
        for connection in connections:
            connection.pipe.close()
        for thread in threads:
            thread.join()

    def admit(self, caller: Caller) -> LaneOffer:
        """Return where to connect, and a token that lets the caller in, once.

        Raises:
            Overloaded: Too many tokens wait to be used.
        """
        credential = caller.credential
        if not isinstance(credential, Credential):  # inside this process, or in a test
            credential = Credential(caller)
        now = self._clock.monotonic()
        with self._lock:
            for token in [t for t, one in self._admissions.items() if one.ends_at < now]:
                del self._admissions[token]
            if len(self._admissions) >= MAX_TOKENS:
                raise Overloaded("too many lanes are being opened", retry_delay_s=1.0)
            token = secrets.token_bytes(TOKEN_BYTES)
            self._admissions[token] = _Admission(credential, now + TOKEN_LIFE_S)
        return self.addresses, token

    # -- connections

    def _listen_tcp(self) -> socket.socket:
        try:
            family, *_, address = socket.getaddrinfo(
                self._host, self._wanted_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            tcp = socket.socket(family)
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tcp.bind(address)
            tcp.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"the lane cannot listen on {self._host}:{self._wanted_port}: {error.strerror}; "
                "choose another lane port"
            ) from error
        return tcp

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:
                if self._stopping:
                    return
                LOG.exception("accepting a lane failed")
                self._clock.wait(self._stop, _PAUSE_S)
                continue
            pipe = LanePipe(accepted, self._limits.max_frame_bytes)
            pipe.set_timeout(TOKEN_LIFE_S)
            connection = _Connection(pipe, self._clock.monotonic())
            too_much = self._take_in(connection)
            if too_much is not None:
                too_much.pipe.close()
            if too_much is not connection:
                self._spawn(partial(self._serve, connection), "kvservice-lane")

    def _take_in(self, connection: _Connection) -> _Connection | None:
        """Note a connection; return the one that is to be closed for it, which may be itself."""
        with self._lock:
            strangers = [one for one in self._open if one.credential is None]
            if self._stopping or len(self._open) - len(strangers) >= self._limits.max_streams:
                return connection
            self._open.add(connection)
            if len(strangers) < MAX_STRANGERS:
                return None
            return min(strangers, key=lambda one: one.opened_at)

    def _spawn(self, target: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                target()
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def _serve(self, connection: _Connection) -> None:
        self._recorder.started()
        started, code = self._clock.monotonic(), "OK"
        try:
            credential = self._let_in(connection.pipe)
            if credential is None or credential.caller is None:
                code = "UNAUTHENTICATED"
                self._recorder.turned_away("invalid")
                return
            assert self._service is not None
            connection.credential = credential
            connection.pipe.set_timeout(self._limits.idle_stream_s)
            with self._guard.calls.one(credential.caller.tenant):
                answers = LaneAnswers(
                    credential=credential,
                    guard=self._guard,
                    service=self._service,
                    limits=self._limits,
                    recorder=self._recorder,
                    clock=self._clock,
                )
                connection.serve(answers)
        except KVServiceError as error:  # of the framing: nothing sensible can follow
            code = error.code.name
            LOG.info("a lane is closed: %s", error)
        except OSError:
            code = "CANCELLED"  # the peer has gone, or has been silent for too long
        except Exception:
            code = "INTERNAL"
            LOG.exception("serving a lane failed")
        finally:
            connection.pipe.close()
            with self._lock:
                self._open.discard(connection)
            self._recorder.handled(code, self._clock.monotonic() - started)

    def _watch(self) -> None:
        """Close the lanes whose credential has ended, and those that show none for too long."""
        while not self._clock.wait(self._stop, PERIOD_S):
            with self._lock:
                connections = list(self._open)
            for connection in connections:
                credential = connection.credential
                if credential is None:
                    # However little by little it says something, for which each time it has time.
                    if self._clock.monotonic() > connection.opened_at + TOKEN_LIFE_S:
                        connection.pipe.close()
                elif self._guard.has_ended(credential):
                    LOG.info("a lane is closed: its credential has ended")
                    connection.pipe.close()

    def _let_in(self, pipe: LanePipe) -> Credential | None:
        token = pipe.receive_token()
        with self._lock:
            admission = self._admissions.pop(token, None) if token is not None else None
        if admission is None or admission.ends_at < self._clock.monotonic():
            return None
        return admission.credential


class _Connection:
    """One lane: frames in, answers out, in order.

    Fields:
        credential: What let it in. None: nothing has yet.
    """

    def __init__(self, pipe: LanePipe, opened_at: float) -> None:
        self.pipe = pipe
        self.opened_at = opened_at
        self.credential: Credential | None = None

    def serve(self, answers: LaneAnswers) -> None:
        """Answer calls until the peer closes."""
        pipe = self.pipe
        while (raw := pipe.receive()) is not None:
            pipe.send(answers.answer(raw))
