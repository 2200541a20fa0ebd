"""The client over real connections: deadlines, broken and busy servers, large messages, the end."""

from __future__ import annotations

import datetime
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health, health_pb2_grpc

from kvservice.clock import SystemClock
from kvservice.config import ServerLimits
from kvservice.core.caller import Caller
from kvservice.core.said import Said
from kvservice.server.app import GrpcServer
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire.names import WORKER
from kvservice_client import (
    Client,
    ClientConfig,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    PagesLost,
    Tls,
    Unavailable,
    connect,
)
from kvservice_client.testing import DenseSession, eventually
from kvservice_workers.data_plane.service import WorkerService
from kvservice_workers.worker import PageWorker, WorkerConfig
from tests.backends import grpc_backend
from tests.driving import Driver, close
from tests.processes import stands_still

pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Hooked(WorkerService):
    """A worker's service that can be made to hang, or to answer another call."""

    def __init__(self, worker: PageWorker) -> None:
        super().__init__(worker)
        self.go_on = threading.Event()
        self.go_on.set()
        self.confused = False
        self.num_attends = 0
        self.before_pop: Callable[[], None] = lambda: None

    def pop(self, request: types_pb2.PopRequest, caller: Caller) -> types_pb2.PopResponse:
        self.before_pop()
        return super().pop(request, caller)

    def attend_steadily(self, said: Said, caller: Caller) -> None:
        """Have all calls come to `attend`."""

    def attend(
        self, call: worker_pb2.AttendCall, caller: Caller, said: Said | None = None
    ) -> worker_pb2.AttendResult:
        self.num_attends += 1
        assert self.go_on.wait(30.0)
        result = super().attend(call, caller, said)
        if self.confused:
            result.call_id += 1
        return result


class Running:
    """A lone worker behind a server."""

    def __init__(self, server: GrpcServer, address: str, service: Hooked, worker: PageWorker):
        self.server, self.address = server, address
        self.service, self.worker = service, worker


@contextmanager
def lone_worker(
    limits: ServerLimits | None = None,
    *,
    host: str = "127.0.0.1",
    unix: Path | None = None,
    credentials: Any = None,
) -> Iterator[Running]:
    server = GrpcServer(limits, credentials=credentials)
    if unix is None:
        port = server.listen(host, 0)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    else:
        address = f"unix:{unix}"
        assert server._server.add_insecure_port(address)
    config = WorkerConfig(
        worker_id="w", incarnation="i", budget_bytes=1 << 28, address="nowhere.invalid:1"
    )
    worker = PageWorker(config, clock=SystemClock())
    service = Hooked(worker)
    server.start(service, WORKER)
    running = Running(server, address, service, worker)
    try:
        yield running
    finally:
        service.go_on.set()
        running.server.stop(0.0)
        worker.close()


@pytest.fixture
def running() -> Iterator[Running]:
    with lone_worker() as running:
        yield running


def over_grpc(running: Running, **options: Any) -> Client:
    return connect(running.address, lane=False, **options)


def test_a_prompt_larger_than_a_frame(running: Running) -> None:
    """Messages of any size travel, in pieces, both ways."""
    with over_grpc(running, timeout_s=60.0) as client:
        session = client.open(num_rows=1)
        driver = Driver(session, num_layers=1, num_heads=9, num_kv_heads=3, k_dim=64, v_dim=64)
        q, k, v = driver.tokens(2300)
        assert q.nbytes > 4 << 20
        out = session.attend(0, q, k, v)
        dense = DenseSession(1)
        dense.attend(0, q[:, :, :1], k, v, mask="full")
        close(out[:, :, -2:], dense.attend(0, q[:, :, -2:]))
        got_k, got_v = session.read(0)
        assert np.array_equal(got_k, k)
        assert np.array_equal(got_v, v)
        session.write(0, v, k, positions=list(range(2300)))
        assert np.array_equal(session.read(0)[0], v)


def test_a_hanging_call_ends_at_its_deadline(running: Running) -> None:
    """An answer that does not come in time is an error in time, and is not taken for the next."""
    with over_grpc(running, timeout_s=1.5) as client:
        driver = Driver.open(client, num_layers=1)
        driver.step(3)
        tokens = driver.tokens(1)
        running.service.go_on.clear()
        started = SystemClock().monotonic()
        with pytest.raises(DeadlineExceeded):
            driver.session.attend(0, *tokens)
        assert 1.4 < SystemClock().monotonic() - started < 10.0
        running.service.go_on.set()
        driver.attend(0, *tokens)
        driver.step()


def test_an_answer_to_another_call(running: Running) -> None:
    """It is refused, and the connection that brought it is not used again."""
    with over_grpc(running) as client:
        driver = Driver.open(client, num_layers=1)
        driver.step(3)
        running.service.confused = True
        with pytest.raises(InternalError, match="answer to call"):
            driver.session.attend(0, *driver.tokens(1))
        running.service.confused = False
        driver.session.roll_back()
        driver.step()


def test_one_stream_serves_many_sessions(running: Running) -> None:
    """Sessions of one thread share a stream; threads have one each."""
    with over_grpc(running) as client:
        drivers = [Driver.open(client, num_layers=1, seed=seed) for seed in range(5)]
        for driver in drivers:
            driver.step(2)
        transport: Any = client._connections.to(running.address)
        assert len(transport._idle) == 1


def test_streams_that_the_server_has_closed() -> None:
    """An idle stream may be gone when it is needed again; nobody notices."""
    with lone_worker(ServerLimits(idle_stream_s=0.1)) as running, over_grpc(running) as client:
        driver = Driver.open(client, num_layers=1)
        driver.step(2)
        transport: Any = client._connections.to(running.address)
        eventually(lambda: not transport._idle[0].active)
        driver.step()


def test_a_busy_server_is_waited_for() -> None:
    """Where every stream is taken, calls wait for one, within their time."""
    limits = ServerLimits(max_streams=1, idle_stream_s=0.2)
    with lone_worker(limits) as running, over_grpc(running) as first, over_grpc(running) as second:
        drivers = [Driver.open(client, num_layers=1) for client in (first, second)]
        for _ in range(2):
            for driver in drivers:
                driver.step(2)


def test_a_server_that_comes_back(running: Running) -> None:
    """A connection that was refused for a moment is made again."""
    with over_grpc(running, config=ClientConfig(detection_s=30.0)) as client:
        driver = Driver.open(client, num_layers=1)
        driver.step(3)
        host, _, port = running.address.rpartition(":")
        running.server.stop(0.0)
        threading.Timer(0.5, lambda: restart(running, host, int(port))).start()
        driver.step()
        driver.check_stored()


def restart(running: Running, host: str, port: int) -> None:
    running.server = GrpcServer()
    running.server.listen(host, port)
    running.server.start(running.service, WORKER)


def test_addresses(tmp_path: Path) -> None:
    """Unix sockets and IPv6; and a lone worker is where it was found, whatever it says."""
    for options in ({"unix": tmp_path / "worker.sock"}, {"host": "::1"}):
        with lone_worker(**options) as running, over_grpc(running) as client:
            driver = Driver.open(client)
            driver.step(3)
            driver.session = client.attach(driver.session.detach())
            driver.step()


def test_connect_finds_what_is_there() -> None:
    """A manager, or a lone worker."""
    with grpc_backend(num_workers=2) as backend:
        with connect(backend.front) as client:
            assert {one.worker_id for one in client.list_workers()} == {"worker-0", "worker-1"}
        with connect(backend.workers[1].config.address) as client:
            assert [one.worker_id for one in client.list_workers()] == ["worker-1"]


def test_connect_to_nobody() -> None:
    """Nobody there is an error in time, that names the address."""
    with pytest.raises(InvalidRequest, match="empty"):
        connect("")
    started = SystemClock().monotonic()
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        connect("127.0.0.1:1", timeout_s=0.5)
    assert SystemClock().monotonic() - started < 5.0


class Witness(grpc.GenericRpcHandler):
    """Serves nothing, and notes who asked."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def service(self, details: Any) -> None:
        self.seen.append((details.method, dict(details.invocation_metadata)))


@contextmanager
def another_server(*, healthy: bool) -> Iterator[tuple[str, Witness]]:
    with ThreadPoolExecutor(2) as threads:
        server, witness = grpc.server(threads), Witness()
        server.add_generic_rpc_handlers((witness,))
        if healthy:
            health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}", witness
        server.stop(None).wait()


def test_connect_to_something_else() -> None:
    """A gRPC server that serves neither a manager nor a worker."""
    with another_server(healthy=True) as (address, _), pytest.raises(NotFound, match="neither"):
        connect(address)
    with another_server(healthy=False) as (address, _), pytest.raises(NotFound, match="neither"):
        connect(address)


def test_a_token_is_presented() -> None:
    """Every call carries it."""
    with another_server(healthy=False) as (address, witness):
        with pytest.raises(NotFound):
            connect(address, token="s3cret")
        assert witness.seen
        assert all(seen["authorization"] == "Bearer s3cret" for _, seen in witness.seen)


@contextmanager
def a_certificate(folder: Path, name: str) -> Iterator[tuple[Path, Path]]:
    """A self-signed certificate of a name, and its key, as files."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.fromtimestamp(SystemClock().time(), datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / f"{name}.crt", folder / f"{name}.key"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    yield cert_file, key_file


def test_mutual_tls(tmp_path: Path) -> None:
    """With certificates on both sides; without the client's own nobody is let in."""
    with (
        a_certificate(tmp_path, "worker.test") as (cert, key),
        a_certificate(tmp_path, "client.test") as (mine, my_key),
    ):
        credentials = grpc.ssl_server_credentials(
            [(key.read_bytes(), cert.read_bytes())], mine.read_bytes(), require_client_auth=True
        )
        tls = Tls(
            ca_file=str(cert), cert_file=str(mine), key_file=str(my_key), server_name="worker.test"
        )
        with lone_worker(credentials=credentials) as running:
            with connect(running.address, tls=tls) as client:
                driver = Driver.open(client)
                driver.step(3)
                driver.step()
            for wrong in (None, replace(tls, cert_file=None, key_file=None)):
                with pytest.raises(Unavailable):
                    connect(running.address, tls=wrong, timeout_s=0.3)


FROZEN = """
import sys
from kvservice.config import WorkerSettings
from kvservice.runtime.worker import WorkerServer
with WorkerServer(WorkerSettings(worker_id="w", budget_bytes=1 << 24)) as server:
    print(server.address, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("lane", [False, True], ids=["grpc", "lane"])
@pytest.mark.parametrize("what", ["SIGSTOP", "SIGKILL"])
def test_a_worker_that_freezes_or_dies(lane: bool, what: str) -> None:
    """Within the detection time its sessions are told that their pages are lost."""
    process = subprocess.Popen(
        [sys.executable, "-c", FROZEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        with connect(process.stdout.readline().strip(), lane=lane) as client:
            driver = Driver.open(client, num_layers=1)
            driver.step(3)
            process.send_signal(getattr(signal, what))
            eventually(lambda: stands_still(process.pid))
            started = SystemClock().monotonic()
            with pytest.raises(PagesLost) as failure:
                driver.session.attend(0, *driver.tokens(1))
            assert failure.value.metadata == {"from_position": "0"}
            assert 2.0 < SystemClock().monotonic() - started < 8.0
            process.kill()
    finally:
        process.kill()
        process.communicate()


LEAVING = """
import sys, numpy as np
from kvservice_client import connect
client = connect(sys.argv[1], lane=False)
sessions = [client.open(num_rows=1) for _ in range(3)]
x = np.ones((1, 1, 4, 8), np.float32)
for session in sessions:
    session.attend(0, x, x, x)
{}
"""


@pytest.mark.parametrize(
    ("ending", "left"),
    [
        ("", 0),
        ("raise SystemExit(0)", 0),
        ("sessions[0].detach()", 1),
        ("client.close()", 0),
        ("import os; os._exit(0)", 3),
        ("import os; pid = os.fork(); pid and os.waitpid(pid, 0); pid or sys.exit(0); "
         "print(len(client.list_sessions())); os._exit(0)", 3),
    ],
    ids=["end", "exit", "detached", "closed", "killed", "forked"],
)  # fmt: skip
def test_the_end_of_a_process(running: Running, ending: str, left: int) -> None:
    """A process that ends normally gives its sessions back; a child of it does not."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LEAVING.format(ending), running.address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert running.worker.stats().num_sessions == left


def test_the_end_of_a_process_whose_server_is_gone(running: Running) -> None:
    """It ends all the same, and soon."""
    code = LEAVING.format("print('ready', flush=True); sys.stdin.readline()")
    process = subprocess.Popen(
        [sys.executable, "-c", code, running.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    running.server.stop(0.0)
    started = SystemClock().monotonic()
    process.communicate("\n", timeout=30)
    assert process.returncode == 0
    assert SystemClock().monotonic() - started < 10.0


def test_interrupted_calls(running: Running) -> None:
    """Ctrl-C during a call leaves a session that can be rolled back."""
    with over_grpc(running, timeout_s=10.0) as client:
        driver = interrupted(running, client)
        assert driver.session.roll_back() == (3, 3)
        running.service.go_on.set()  # it comes after the cut, and is refused
        driver.step()
        driver.check_stored()


def test_an_interrupted_call_arrives_before_the_cut(running: Running) -> None:
    """After the client was told what is stored: it cuts again, what is stored by now."""

    def arrive() -> None:
        running.service.go_on.set()
        eventually(lambda: running.worker.stats().appended_tokens == 2 * 4)

    with over_grpc(running, timeout_s=10.0) as client:
        driver = interrupted(running, client)
        running.service.before_pop = arrive
        assert driver.session.roll_back() == (3, 3)
        assert running.worker.stats().popped_tokens == 2
        driver.step()
        driver.check_stored()


def interrupted(running: Running, client: Client) -> Driver:
    """Return a driver of three tokens whose next one the worker has, and has not looked at yet."""
    driver = Driver.open(client, num_layers=1)
    driver.step(3)
    running.service.go_on.clear()
    interrupt_when(lambda: running.service.num_attends == 2)
    with pytest.raises(KeyboardInterrupt):
        driver.session.attend(0, *driver.tokens(1))
    return driver


def interrupt_when(condition: Callable[[], bool]) -> None:
    def wait() -> None:
        eventually(condition)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=wait).start()
