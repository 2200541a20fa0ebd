"""The port for probes: what a server says of its health, in plaintext, and nothing else."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Callable, Iterator
from typing import NoReturn

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvservice.clock import SystemClock
from kvservice.cluster.processes import wait_until
from kvservice.config import ConfigError, ManagerSettings, WorkerSettings
from kvservice.runtime.manager import ManagerServer
from kvservice.runtime.process import ProcessServer
from kvservice.runtime.worker import WorkerServer
from kvservice.server.app import GrpcServer
from kvservice.server.health import HealthServer
from kvservice.wire.names import MANAGER, WORKER

pytestmark = pytest.mark.usefixtures("leaves_nothing")

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Nothing:
    """A service that is never called."""

    def __getattr__(self, method: str) -> Callable[..., NoReturn]:
        def serve(*arguments: object) -> NoReturn:
            raise AssertionError(f"{method} has been called")

        return serve


def ask(address: str, service: str) -> int:
    """Ask as a probe does: one call on a connection of its own."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
        return int(answer.status)


@pytest.fixture(params=["manager", "worker"])
def process(request: pytest.FixtureRequest) -> Iterator[ProcessServer]:
    """A manager or a worker with a port for probes."""
    server: ProcessServer
    if request.param == "manager":
        server = ManagerServer(ManagerSettings(health_port=0))
    else:
        server = WorkerServer(WorkerSettings("w", 1 << 20, health_port=0))
    with server:
        yield server


def test_tells_that_it_serves_and_offers_nothing_else(process: ProcessServer) -> None:
    """The service by its name; every other method is unknown there, reflection too."""
    assert process.health_address is not None
    assert process.health_address != process.address
    own, other = (MANAGER, WORKER) if isinstance(process, ManagerServer) else (WORKER, MANAGER)
    assert ask(process.health_address, own.full_name) == SERVING
    with pytest.raises(grpc.RpcError) as unknown:
        ask(process.health_address, other.full_name)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    paths = [f"/{own.full_name}/{method.name}" for method in own.methods]
    paths.append("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    with grpc.insecure_channel(process.health_address) as channel:
        for path in paths:
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(path)(b"", timeout=5)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED, path


def test_without_a_port_there_is_none() -> None:
    """Nobody gets one who has not asked for it."""
    with ManagerServer(ManagerSettings()) as server:
        assert server.health_address is None


def test_a_used_port_refuses_the_start(process: ProcessServer) -> None:
    """With the port in the message; nothing of the second server is left."""
    assert process.health_address is not None
    port = int(process.health_address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=str(port)):
        ManagerServer(ManagerSettings(health_port=port)).start()


def test_says_no_before_the_start_and_during_the_end() -> None:
    """A server that has only bound its port is not ready; one that ends tells probes first."""
    server = GrpcServer()
    server.listen("127.0.0.1", 0)
    probes = HealthServer(server.health, "127.0.0.1", 0)
    address = f"127.0.0.1:{probes.port}"
    with pytest.raises(grpc.RpcError) as unknown:
        ask(address, MANAGER.full_name)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    server.start(Nothing(), MANAGER)
    assert ask(address, MANAGER.full_name) == SERVING
    server.stop(0)
    assert ask(address, MANAGER.full_name) == NOT_SERVING
    probes.close()
    assert wait_until(lambda: _refuses(address), clock=SystemClock(), timeout_s=5)


def test_stays_in_plaintext_beside_tls() -> None:
    """Kubernetes' probes know no TLS; a plaintext call to the service itself gets nowhere."""
    key, certificate = self_signed()
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    server = GrpcServer(credentials=credentials)
    port = server.listen("127.0.0.1", 0)
    probes = HealthServer(server.health, "127.0.0.1", 0)
    try:
        server.start(Nothing(), WORKER)
        assert ask(f"127.0.0.1:{probes.port}", WORKER.full_name) == SERVING
        with pytest.raises(grpc.RpcError) as refused:
            ask(f"127.0.0.1:{port}", WORKER.full_name)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        probes.close()
        server.stop(0)


def _refuses(address: str) -> bool:
    try:
        ask(address, "")
    except grpc.RpcError as error:
        return bool(error.code() is grpc.StatusCode.UNAVAILABLE)
    return False


def self_signed() -> tuple[bytes, bytes]:
    """Return key and certificate for 127.0.0.1, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=36500))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(pem)
