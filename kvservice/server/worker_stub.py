"""Between manager and workers, over gRPC: calls one way, heartbeats the other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Final

import grpc
from google.protobuf import message_factory

from kvservice.clock import Clock
from kvservice.core.caller import SERVICE, Caller
from kvservice.core.errors import KVServiceError, Unavailable
from kvservice.logs import REQUEST, REQUEST_KEY
from kvservice.server.dialing import Dialer
from kvservice.server.heartbeat import HeartbeatSource
from kvservice.server.peers import metadata_of
from kvservice.server.speaking import Speaker
from kvservice.v1 import manager_pb2
from kvservice.wire import status
from kvservice.wire.convert import seconds_from_pb
from kvservice.wire.names import MANAGER, WORKER

LOG = logging.getLogger(__name__)

HEARTBEAT_S: Final = 1.0
MIN_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 0.5  # nobody opens a session before its workers are back
FAREWELL_S: Final = 2.0


class GrpcWorkerHandle:
    """The manager's way to a worker: one channel, connected at the first call. Thread-safe.

    Args:
        dialer: None: plaintext.
        speaker: Says on whose behalf a call is made. None: authentication is off.
    """

    def __init__(
        self, address: str, dialer: Dialer | None = None, speaker: Speaker | None = None
    ) -> None:
        self._address = address
        self._dialer = dialer if dialer is not None else Dialer()
        self._speaker = speaker
        self._lock = threading.Lock()
        self._closed = False
        self._dial()

    def _dial(self) -> None:
        self._generation = self._dialer.generation
        self._channel = self._dialer.dial(self._address)
        self._methods: dict[str, Callable[..., Any]] = {
            method.name: self._channel.unary_unary(
                f"/{WORKER.full_name}/{method.name}",
                message_factory.GetMessageClass(method.input_type).SerializeToString,
                message_factory.GetMessageClass(method.output_type).FromString,
            )
            for method in WORKER.methods
            if not (method.client_streaming or method.server_streaming)
        }

    def call(self, method: str, request: Any, timeout_s: float, caller: Caller) -> Any:
        """Make a unary call as the caller.

        Raises:
            KVServiceError: What the worker answers, or Unavailable, DeadlineExceeded.
        """
        if self._generation != self._dialer.generation:
            self._dial_again()
        if self._speaker is None:
            metadata = metadata_of(caller)
        else:
            metadata = self._speaker.metadata(caller)
        if (serving := REQUEST.get()) is not None:
            metadata = (*metadata, (REQUEST_KEY, serving.id))
        try:
            return self._methods[method](request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise status.from_rpc_error(error) from error
        except ValueError as error:  # the channel has been closed meanwhile
            raise Unavailable(f"the connection is closed: {error}") from error

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._channel.close()

    def _dial_again(self) -> None:
        """Connect with the certificates that there are now. Calls on the old channel go on."""
        with self._lock:
            if not self._closed and self._generation != self._dialer.generation:
                self._dial()


class HeartbeatLoop:
    """Tells the manager once a second what has changed, for as long as the worker lives.

    A stream that breaks is replaced by another, which begins with all sessions. The worker serves
    on without a manager, so what goes wrong here is logged and tried again.
    """

    def __init__(
        self,
        source: HeartbeatSource,
        manager_address: str,
        *,
        clock: Clock,
        dialer: Dialer | None = None,
        speaker: Speaker | None = None,
        drain: Callable[[float], None] = lambda _: None,
    ) -> None:
        """
        Args:
            dialer: None: plaintext.
            speaker: Says who we are. None: authentication is off.
            drain: Is told within how many seconds the worker is to leave, when the manager says so.
        """
        self._source = source
        self._drain = drain
        self._leaving = False
        self._address = manager_address
        self._dialer = dialer if dialer is not None else Dialer()
        self._speaker = speaker
        self._clock = clock
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._call: Any = None
        self._answered = False
        self._thread = threading.Thread(target=self._run, name="kvservice-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        """Let the next message be the last: `stop` waits a moment for it to be answered."""
        self._leaving = True

    def stop(self) -> None:
        """End the stream and the thread."""
        self._stop.set()
        if self._leaving and self._thread.is_alive():
            self._thread.join(FAREWELL_S)
        with self._lock:
            if self._call is not None:
                self._call.cancel()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        generation, channel = self._dialer.generation, self._dialer.dial(self._address)
        try:
            backoff_s = MIN_BACKOFF_S
            while not self._stop.is_set():
                if generation != self._dialer.generation:
                    channel.close()
                    generation = self._dialer.generation
                    channel = self._dialer.dial(self._address)
                try:
                    self._stream(channel)
                except KVServiceError as error:
                    LOG.warning("heartbeat to %s: %s", self._address, error)
                    # A stream that had been answered ends here too; begin again soon.
                    backoff_s = MIN_BACKOFF_S if self._answered else backoff_s
                except Exception:
                    LOG.exception("heartbeat to %s failed", self._address)
                self._clock.wait(self._stop, backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        finally:
            channel.close()

    def _stream(self, channel: grpc.Channel) -> None:
        """Send heartbeats until told to stop.

        Raises:
            KVServiceError: The stream has broken, or the manager refuses this worker.
        """
        self._answered = False
        self._source.begin()
        requests: SimpleQueue[manager_pb2.HeartbeatRequest | None] = SimpleQueue()
        answers = self._open(channel, iter(requests.get, None))
        try:
            while not self._stop.is_set():
                for message in self._source.messages():
                    requests.put(message)
                    self._take(next(answers))
                self._clock.wait(self._stop, HEARTBEAT_S)
            if self._leaving and self._answered:
                requests.put(self._source.farewell())
                next(answers)
        except grpc.RpcError as error:
            if not self._stop.is_set():
                raise status.from_rpc_error(error) from error
        except StopIteration:
            raise Unavailable("the manager has ended the stream") from None
        finally:
            requests.put(None)
            answers.cancel()

    def _take(self, answer: manager_pb2.HeartbeatResponse) -> None:
        if not self._answered:
            LOG.info("registered with the manager at %s", self._address)
        self._answered = True
        self._source.answered(answer)
        if answer.HasField("drain"):
            self._drain(seconds_from_pb(answer.drain, "drain"))

    def _open(self, channel: grpc.Channel, requests: Iterator[manager_pb2.HeartbeatRequest]) -> Any:
        method = channel.stream_stream(
            f"/{MANAGER.full_name}/Heartbeat",
            manager_pb2.HeartbeatRequest.SerializeToString,
            manager_pb2.HeartbeatResponse.FromString,
        )
        with self._lock:
            metadata = () if self._speaker is None else self._speaker.metadata(SERVICE)
            self._call = method(requests, metadata=metadata)
            if self._stop.is_set():
                self._call.cancel()
            return self._call
