"""The protocol: committed code is current, sources are clean, everything is explained."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import ServiceDescriptor

from kvservice.v1 import manager_pb2, types_pb2, worker_pb2
from tests.programs import GENERATOR, needs, needs_generator

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "proto"
SCRIPT = ROOT / ".ci" / "proto.py"

SHARED_VERBS = {
    "Allocate", "Append", "Pop", "Reset", "Select", "Fork", "Attach", "Release", "RenewLease",
    "GetSession", "ListSessions", "PageStats",
}  # fmt: skip
MANAGER_VERBS = SHARED_VERBS | {"ListWorkers", "DrainWorker", "MoveSession", "Heartbeat"}
WORKER_VERBS = SHARED_VERBS | {"Attend", "Write", "Read", "OpenLane", "FollowSession"}
WORKER_VERBS |= {"PullSession", "CopyState", "CopyPages", "HandOver"}

MANAGER = manager_pb2.DESCRIPTOR.services_by_name["PageManagerService"]
WORKER = worker_pb2.DESCRIPTOR.services_by_name["PageWorkerService"]


def run(*command: str | Path) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_generator
def test_generated_code_is_current() -> None:
    """`make proto` would change nothing."""
    run(GENERATOR, SCRIPT, "compare")


@needs("buf")
def test_sources_are_clean_and_compatible() -> None:
    """buf lint and format find nothing, and nothing breaks the released protocol."""
    run(sys.executable, SCRIPT, "lint")


def test_baseline_is_committed() -> None:
    """There is a released protocol to compare with, and it has both services."""
    image = descriptor_pb2.FileDescriptorSet.FromString((SOURCES / "baseline.binpb").read_bytes())
    services = {service.name for file in image.file for service in file.service}
    assert {"PageManagerService", "PageWorkerService"} <= services


@pytest.mark.parametrize(("service", "verbs"), [(MANAGER, MANAGER_VERBS), (WORKER, WORKER_VERBS)])
def test_services_have_their_verbs(service: ServiceDescriptor, verbs: set[str]) -> None:
    """Each service has exactly the verbs of the design."""
    assert {method.name for method in service.methods} == verbs


def test_shared_verbs_have_one_request() -> None:
    """Manager and workers take the same request for the same verb, so it can be forwarded."""
    for verb in SHARED_VERBS:
        ours, theirs = MANAGER.methods_by_name[verb], WORKER.methods_by_name[verb]
        assert ours.input_type.full_name == theirs.input_type.full_name
        assert ours.output_type.full_name == theirs.output_type.full_name


def test_streams_are_where_the_data_is() -> None:
    """Only the data path and the heartbeat stream."""
    streams = {
        method.name: (method.client_streaming, method.server_streaming)
        for service in (MANAGER, WORKER)
        for method in service.methods
        if method.client_streaming or method.server_streaming
    }
    assert streams == {
        "Heartbeat": (True, True),
        "Attend": (True, True),
        "Write": (True, False),
        "Read": (False, True),
    }


def test_tensors_are_raw_bytes() -> None:
    """A tensor is a dtype, a shape and bytes: nothing that would have to be unpickled."""
    fields = {field.name: field.type for field in types_pb2.Tensor.DESCRIPTOR.fields}
    kinds = descriptor_pb2.FieldDescriptorProto
    assert fields == {
        "dtype": kinds.TYPE_ENUM,
        "shape": kinds.TYPE_INT64,
        "data": kinds.TYPE_BYTES,
    }
    assert {"D_TYPE_BFLOAT16", "D_TYPE_FLOAT16", "D_TYPE_FLOAT32"} <= set(types_pb2.DType.keys())


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pb2.FileDescriptorSet:
    """Return the sources with their comments, as buf compiles them."""
    target = tmp_path_factory.mktemp("image") / "image.binpb"
    run(sys.executable, SCRIPT, "build", target)
    return descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes())


@needs("buf")
def test_everything_is_explained(described: descriptor_pb2.FileDescriptorSet) -> None:
    """Every service, RPC, message and enum has a comment."""
    bare = []
    for file in described.file:
        if file.package != "kvservice.v1":
            continue
        comments = {tuple(loc.path): loc.leading_comments for loc in file.source_code_info.location}
        # Paths are field numbers of FileDescriptorProto and indices, in turn.
        named = [((4, i), message.name) for i, message in enumerate(file.message_type)]
        named += [((5, i), enum.name) for i, enum in enumerate(file.enum_type)]
        for s, service in enumerate(file.service):
            named.append(((6, s), service.name))
            named += [((6, s, 2, m), method.name) for m, method in enumerate(service.method)]
        bare += [f"{file.name}: {name}" for path, name in named if not comments.get(path)]
    assert bare == []


def test_generated_modules_import_alone() -> None:
    """Each generated module can be imported first."""
    for name in ("types_pb2", "manager_pb2_grpc", "worker_pb2_grpc"):
        importlib.import_module(f"kvservice.v1.{name}")
