"""A client of the first release, against the server of today (P21).

It is made from the stored descriptors of that release alone: none of our generated code, of our
helpers, or of what has been added to the protocol since takes part.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from kvservice.config import ManagerSettings, WorkerSettings
from kvservice.runtime.manager import ManagerServer
from kvservice.runtime.worker import WorkerServer
from tests.securing import LIMITS
from tests.serving import until

pytestmark = pytest.mark.usefixtures("leaves_nothing")

BASELINE = Path(__file__).parents[2] / "proto" / "baseline.binpb"
MANAGER, WORKER = "kvservice.v1.PageManagerService", "kvservice.v1.PageWorkerService"
HEADS, KV_HEADS, DIM = 4, 2, 8


class OldClient:
    """Speaks what the first release spoke."""

    def __init__(self) -> None:
        files = descriptor_pb2.FileDescriptorSet.FromString(BASELINE.read_bytes())
        self.pool = descriptor_pool.DescriptorPool()
        self._files = {file.name: file for file in files.file}
        self._added: set[str] = set()
        for name in self._files:
            self._add(name)
        self._channels: dict[str, grpc.Channel] = {}

    def _add(self, name: str) -> None:
        if name in self._added:
            return
        self._added.add(name)
        file = self._files[name]
        for dependency in file.dependency:
            self._add(dependency)
        self.pool.Add(file)

    def new(self, name: str, **fields: Any) -> Any:
        descriptor = self.pool.FindMessageTypeByName(f"kvservice.v1.{name}")
        return message_factory.GetMessageClass(descriptor)(**fields)

    def call(self, address: str, service: str, method: str, request: Any) -> Any:
        """Make any call; streams carry one message each way."""
        descriptor = self.pool.FindServiceByName(service).methods_by_name[method]
        answer = message_factory.GetMessageClass(descriptor.output_type)
        channel = self._channels.setdefault(address, grpc.insecure_channel(address))
        kind = {
            (False, False): channel.unary_unary,
            (True, False): channel.stream_unary,
            (False, True): channel.unary_stream,
            (True, True): channel.stream_stream,
        }[descriptor.client_streaming, descriptor.server_streaming]
        stub = kind(f"/{service}/{method}", type(request).SerializeToString, answer.FromString)
        sent = iter([request]) if descriptor.client_streaming else request
        result = stub(sent, timeout=20)
        return next(iter(result)) if descriptor.server_streaming else result

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def tensor(self, array: np.ndarray) -> Any:
        return self.new("Tensor", dtype=1, shape=array.shape, data=array.tobytes())


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[OldClient, str]]:
    with ExitStack() as stack:
        manager = stack.enter_context(ManagerServer(ManagerSettings(limits=LIMITS)))
        settings = WorkerSettings("w0", 1 << 22, manager_address=manager.address, limits=LIMITS)
        stack.enter_context(WorkerServer(settings))
        until(lambda: len(manager.manager.workers()) == 1)
        client = OldClient()
        stack.callback(client.close)
        yield client, manager.address


def opened(client: OldClient, front: str) -> Any:
    spec = client.new("SessionSpec", row_count=1)
    request = client.new("AllocateRequest", session_id=str(uuid.uuid4()), spec=spec)
    return client.call(front, MANAGER, "Allocate", request).session


def attend(client: OldClient, session: Any, position: int, count: int, step: int) -> np.ndarray:
    """Append tokens in one layer, and return the attention output."""
    rng = np.random.default_rng(position)
    q, k, v = (
        rng.standard_normal((count, heads, DIM)).astype(np.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    extent = session.extents[-1]
    call = client.new(
        "AttendCall",
        call_id=step,
        session_id=session.session_id,
        incarnation=extent.incarnation,
        epoch=session.epoch,
        step=step,
        header=client.new("StepHeader", counts=[count]),
        q=client.tensor(q),
        k=client.tensor(k),
        v=client.tensor(v),
        positions=[position],
        mask=client.new("Mask", kind=2),
        scale=DIM**-0.5,
    )
    request = client.new("AttendRequest", call=call)
    result = client.call(extent.address, WORKER, "Attend", request).result
    assert not result.HasField("error"), result.error
    return np.frombuffer(result.out.data, np.float32).reshape(result.out.shape)


def test_an_old_client_decodes_and_changes_and_leaves(service: tuple[OldClient, str]) -> None:
    """Every verb of the first release does what it did, on manager and worker."""
    client, front = service
    session = opened(client, front)
    worker = session.extents[0].address
    out = attend(client, session, 0, 3, 1)
    assert out.shape == (3, HEADS, DIM)
    assert np.isfinite(out).all()
    attend(client, session, 3, 1, 2)
    sid = session.session_id

    def ask(where: str, name: str, method: str, **fields: Any) -> Any:
        request = client.new(f"{method}Request", **fields)
        return client.call(where, name, method, request)

    append = {"session_id": sid, "epoch": 1, "token_count": 1, "expected_lengths": [4]}
    ask(front, MANAGER, "Append", **append)
    popped = ask(
        worker, WORKER, "Pop", session_id=sid, epoch=1, keep=[3], expected_lengths=[4]
    ).session
    assert popped.epoch == 2
    assert ask(worker, WORKER, "Select", session_id=sid, epoch=2, rows=[0]).session.epoch == 3
    child = str(uuid.uuid4())
    ask(worker, WORKER, "Fork", session_id=sid, epoch=3, new_session_id=child)
    read = ask(worker, WORKER, "Read", session_id=sid, epoch=3, stop=3).result
    assert list(read.k.shape) == [1, KV_HEADS, 3, DIM]
    write = client.new(
        "WriteCall",
        session_id=sid,
        epoch=3,
        rows=[0],
        positions=[3],
        k=read_one(client, read.k),
        v=read_one(client, read.v),
    )
    request = client.new("WriteRequest", call=write)
    assert list(client.call(worker, WORKER, "Write", request).lengths) == [4]
    assert ask(front, MANAGER, "Attach", session_id=sid).session.epoch == 4
    assert ask(worker, WORKER, "Reset", session_id=sid, epoch=4).session.epoch == 5
    assert not ask(worker, WORKER, "RenewLease", session_ids=[sid, child]).missing_session_ids
    assert ask(front, MANAGER, "GetSession", session_id=sid).session.epoch == 5
    listed = {one.session_id for one in ask(front, MANAGER, "ListSessions").sessions}
    assert {sid, child} <= listed
    assert ask(front, MANAGER, "PageStats").workers[0].session_count == 2
    assert ask(front, MANAGER, "ListWorkers").workers[0].worker_id == "w0"
    assert len(ask(worker, WORKER, "OpenLane").token) == 32
    assert ask(front, MANAGER, "Release", session_ids=[sid, child]).released_count == 2


def read_one(client: OldClient, tensor: Any) -> Any:
    """Return the first token of what was read, as one to write."""
    whole = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
    return client.tensor(np.ascontiguousarray(whole[0, :, :1].transpose(1, 0, 2)))


def test_every_call_of_the_first_release_is_still_there(service: tuple[OldClient, str]) -> None:
    """Nothing answers UNIMPLEMENTED that did not then: names and kinds are as they were."""
    client, _ = service
    from kvservice.wire.names import MANAGER as MANAGER_NOW
    from kvservice.wire.names import WORKER as WORKER_NOW

    for now in (MANAGER_NOW, WORKER_NOW):
        then = client.pool.FindServiceByName(now.full_name)
        for method in then.methods:
            same = now.methods_by_name[method.name]
            assert (same.client_streaming, same.server_streaming) == (
                method.client_streaming,
                method.server_streaming,
            )
            assert same.input_type.full_name == method.input_type.full_name
