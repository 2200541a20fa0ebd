"""A plain gRPC client for tests of the servers, and calls that are good as they stand."""

from __future__ import annotations

import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor

from kvservice.clock import SystemClock
from kvservice.core import session as core
from kvservice.core.geometry import DType, LayerGeometry, LayerSpec
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire import calls, convert, status
from kvservice.wire.names import MANAGER, WORKER
from kvservice.wire.tensors import from_numpy, to_numpy
from tests.oracles import causal_visible, dense_attention

HEADS, KV_HEADS, DIM = 4, 2, 16
GEOMETRY = LayerGeometry(KV_HEADS, DIM, DIM, DType.FLOAT32)
PAGE_BYTES = 16 * GEOMETRY.token_bytes
"""Of a page of one layer."""


class Peer:
    """One channel to one server; every call raises errors of the tree. A context manager."""

    def __init__(
        self, address: str, service: ServiceDescriptor, *, tenant: str | None = None
    ) -> None:
        self.channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self.service = service
        self.metadata = () if tenant is None else (("x-kvservice-tenant", tenant),)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.channel.close()

    def call(self, method: str, request: Any, timeout_s: float = 10.0) -> Any:
        """Make a unary call; a request may also be bytes."""
        descriptor = self.service.methods_by_name[method]
        raw = request if isinstance(request, bytes) else request.SerializeToString()
        answer = self.raw(f"/{self.service.full_name}/{method}", raw, timeout_s)
        return message_factory.GetMessageClass(descriptor.output_type).FromString(answer)

    def raw(self, path: str, request: bytes, timeout_s: float = 10.0) -> bytes:
        try:
            answer: bytes = self.channel.unary_unary(path)(
                request, timeout=timeout_s, metadata=self.metadata
            )
            return answer
        except grpc.RpcError as error:
            raise status.from_rpc_error(error) from error

    def attend(
        self, frames: Iterable[bytes], timeout_s: float = 20.0
    ) -> Iterator[worker_pb2.AttendResponse]:
        """Open a stream of frames and yield its answers."""
        method = self.channel.stream_stream(
            f"/{self.service.full_name}/Attend", None, worker_pb2.AttendResponse.FromString
        )
        try:
            yield from method(iter(frames), timeout=timeout_s, metadata=self.metadata)
        except grpc.RpcError as error:
            raise status.from_rpc_error(error) from error

    def attend_once(self, call: worker_pb2.AttendCall) -> worker_pb2.AttendResult:
        """Make one call on a stream of its own, raising the error that its result carries."""
        frame = worker_pb2.AttendRequest(call=call).SerializeToString()
        (answer,) = self.attend([frame])
        if answer.result.HasField("error"):
            raise status.from_status(answer.result.error)
        return answer.result


@contextmanager
def worker_peer(address: str, tenant: str | None = None) -> Iterator[Peer]:
    with Peer(address, WORKER, tenant=tenant) as peer:
        yield peer


@contextmanager
def manager_peer(address: str, tenant: str | None = None) -> Iterator[Peer]:
    with Peer(address, MANAGER, tenant=tenant) as peer:
        yield peer


def new_id() -> str:
    return str(uuid.uuid4())


def spec(num_layers: int = 1, num_rows: int = 1, **fields: Any) -> core.SessionSpec:
    return core.SessionSpec(num_rows, layers=(LayerSpec(geometry=GEOMETRY),) * num_layers, **fields)


def allocate_request(session_id: str, opened: core.SessionSpec) -> types_pb2.AllocateRequest:
    return types_pb2.AllocateRequest(session_id=session_id, spec=convert.spec_to_pb(opened))


def attend_call(
    session_id: str,
    position: int,
    num_tokens: int,
    *,
    step: int,
    layer: int = 0,
    epoch: int = 1,
    call_id: int = 1,
    seed: int = 0,
    **fields: Any,
) -> worker_pb2.AttendCall:
    """Return a call that appends tokens to the one row of a session, and attends causally."""
    rng = np.random.default_rng((seed, position, layer))
    q, k, v = (
        from_numpy(rng.standard_normal((num_tokens, heads, DIM), np.float32))
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    call = core.AttendCall(
        session_id=session_id,
        epoch=epoch,
        step=step,
        layer=layer,
        q=q,
        scale=DIM**-0.5,
        mask=core.Mask(),
        k=k,
        v=v,
        header=core.StepHeader((num_tokens,)),
        positions=(position,),
        **fields,
    )
    return calls.attend_call_to_pb(call, call_id=call_id)


def attention(num_tokens: int, *, seed: int = 0) -> np.ndarray:
    """Return what a session must answer that got `num_tokens` in one `attend_call` at 0."""
    call = calls.attend_call_from_pb(attend_call(new_id(), 0, num_tokens, step=1, seed=seed))
    assert call.k is not None
    assert call.v is not None
    q, k, v = (to_numpy(x).astype(np.float64) for x in (call.q, call.k, call.v))
    positions = np.arange(num_tokens)
    visible = np.broadcast_to(causal_visible(positions, positions), (HEADS, num_tokens, num_tokens))
    return dense_attention(q, k, v, visible, scale=call.scale)[0]


def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Return what a condition returns as soon as that is true."""
    clock, never = SystemClock(), threading.Event()
    deadline = clock.monotonic() + timeout_s
    while not (value := condition()):
        assert clock.monotonic() < deadline, "it did not become true in time"
        clock.wait(never, 0.02)
    return value


def scrape(metrics_address: str) -> dict[str, float]:
    """Return all samples of a metrics endpoint, by name with labels as exposed."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}
