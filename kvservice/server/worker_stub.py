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
from kvservice.config import ServerLimits
from kvservice.core.caller import Caller
from kvservice.core.errors import KVServiceError, Unavailable
from kvservice.server.heartbeat import HeartbeatSource
from kvservice.server.peers import metadata_of
from kvservice.v1 import manager_pb2
from kvservice.wire import status
from kvservice.wire.convert import seconds_from_pb
from kvservice.wire.names import MANAGER, WORKER

LOG = logging.getLogger(__name__)

HEARTBEAT_S: Final = 1.0
MIN_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 2.0
FAREWELL_S: Final = 2.0


class GrpcWorkerHandle:
    """The manager's way to a worker: one channel, connected at the first call. Thread-safe."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, channel_options())
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
        try:
            return self._methods[method](request, timeout=timeout_s, metadata=metadata_of(caller))
        except grpc.RpcError as error:
            raise status.from_rpc_error(error) from error
        except ValueError as error:  # the channel has been closed meanwhile
            raise Unavailable(f"the connection is closed: {error}") from error

    def close(self) -> None:
        self._channel.close()


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
        drain: Callable[[float], None] = lambda _: None,
    ) -> None:
        """
        Args:
            drain: Is told within how many seconds the worker is to leave, when the manager says so.
        """
        self._source = source
        self._drain = drain
        self._leaving = False
        self._address = manager_address
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
        channel = grpc.insecure_channel(self._address, channel_options())
        try:
            backoff_s = MIN_BACKOFF_S
            while not self._stop.is_set():
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
        self._source.answered(answer.manager_incarnation)
        if answer.HasField("drain"):
            self._drain(seconds_from_pb(answer.drain, "drain"))

    def _open(self, channel: grpc.Channel, requests: Iterator[manager_pb2.HeartbeatRequest]) -> Any:
        method = channel.stream_stream(
            f"/{MANAGER.full_name}/Heartbeat",
            manager_pb2.HeartbeatRequest.SerializeToString,
            manager_pb2.HeartbeatResponse.FromString,
        )
        with self._lock:
            self._call = method(requests)
            if self._stop.is_set():
                self._call.cancel()
            return self._call


def channel_options() -> list[tuple[str, int]]:
    """Return how manager and workers connect: a dead peer is noticed within seconds."""
    frame = ServerLimits().max_frame_bytes + (64 << 10)
    return [
        ("grpc.keepalive_time_ms", 2000),
        ("grpc.keepalive_timeout_ms", 1000),
        # Without it a peer that acknowledges TCP but answers nothing is noticed after a minute.
        ("grpc.http2.ping_timeout_ms", 1000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_send_message_length", frame),
        ("grpc.max_receive_message_length", frame),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
