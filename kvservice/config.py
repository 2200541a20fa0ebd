"""The only reader of files and of the environment."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvservice.core.errors import InvalidRequest
from kvservice.core.failpoints import Failpoint, parse_failpoints

_UNITS: Final = {
    "": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", 1)},
    "B": 1,
}


class ConfigError(ValueError):
    """A setting that cannot be: one line with the value, the rule, and what to do."""


def parse_size(text: str) -> int:
    """Return a number of bytes: `2GiB`, `512MiB`, `1.5GB`, or plain digits.

    Raises:
        ConfigError: It is anything else, or below one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"not a size: {text!r}; write bytes, or a number with KiB, MiB, GiB, TiB")
    size = int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise ConfigError(f"a size must be at least 1 byte, got {text!r}")
    return size


@dataclass(frozen=True, slots=True)
class Budget:
    """What a worker's pages may take: a number of bytes or, if above 0, a share of what there is.

    Fields:
        num_bytes: Without meaning where `percent` is above 0.
        percent: Of the memory that the worker's process may use; on a GPU, of the GPU's.
    """

    num_bytes: int = 2 << 30
    percent: int = 0

    def of(self, available_bytes: int) -> int:
        """Return the number of bytes, where so many are available."""
        return available_bytes * self.percent // 100 if self.percent else self.num_bytes


def parse_budget(text: str) -> Budget:
    """Return a budget: a size as for `parse_size`, or whole percent: `70%`.

    Raises:
        ConfigError: It is anything else, or not within 1% to 95%.
    """
    match = re.fullmatch(r"(\d{1,4})\s*%", text.strip())
    if match is None:
        return Budget(parse_size(text))
    percent = int(match[1])
    if not 1 <= percent <= 95:
        raise ConfigError(f"a share of the memory must be 1% to 95%, got {text!r}")
    return Budget(percent=percent)


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Return how much memory this process may use: the tightest limit of its control groups.

    Without a limit, what the machine has. In a container that is the container's limit.

    Args:
        root: Where `proc` and `sys` are.
    """
    total = re.search(r"^MemTotal:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    assert total is not None
    limits = [int(total[1]) << 10]
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # A container may see its own group as the root, whatever the path says.
        group = mount / path.strip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(mount):
                limits += [int(text) for text in _read_lines(folder / name) if text.isdigit()]
    return min(limits)


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def format_size(num_bytes: int) -> str:
    """Return a number of bytes in the largest unit that keeps it readable: `1.5GiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes >= _UNITS[unit]:
            return f"{num_bytes / _UNITS[unit]:.4g}{unit}"
    return f"{num_bytes}B"


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server allows, so that no caller can take it all.

    Fields:
        max_frame_bytes: The largest frame, in both directions.
        fragment_bytes: Answers beyond this are sent in pieces of it.
        max_message_bytes: The largest message put together from fragments.
        max_streams: Streams at the same time, over all clients. Each takes a thread.
        unary_threads: Threads of other calls, which streams can never take. A manager's wait in
            them for workers, frozen ones too, so there are many; they are made as they are needed.
        queued_calls: Calls that may wait for a thread; more are refused.
        max_connections: Connections at the same time.
        idle_stream_s: A stream without a call for so long is closed; clients open another.
        answer_s: A stream whose peer takes longer to take an answer is closed; a lane, after
            `idle_stream_s`.
        default_deadline_s: For calls that state none, streams of Attend and Heartbeat excepted.
        ping_interval_s: Clients may send a keepalive ping so often.
    """

    max_frame_bytes: int = 16 << 20
    fragment_bytes: int = 4 << 20
    max_message_bytes: int = 1 << 30
    max_streams: int = 256
    unary_threads: int = 128
    queued_calls: int = 128
    max_connections: int = 1024
    idle_stream_s: float = 300.0
    answer_s: float = 60.0
    default_deadline_s: float = 60.0
    ping_interval_s: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.fragment_bytes > self.max_frame_bytes:
            raise ConfigError(
                f"fragment_bytes ({self.fragment_bytes}) must be at most max_frame_bytes "
                f"({self.max_frame_bytes})"
            )


@dataclass(frozen=True, slots=True)
class Security:
    """Who may connect, and who may call. Paths alone: what is in the files stays there.

    Authentication is on as soon as there are tokens, or certificates are asked for.

    Fields:
        token_file: Bearer tokens; see `kvservice.credentials.TokenFile`.
        key_file: What manager and workers share; see `kvservice.credentials.KeyFile`.
        metrics_token_file: Who may read numbers, where others can reach that port; see
            `kvservice.credentials.MetricsTokenFile`.
        quota_file: What tenants may take; see `kvservice.credentials.QuotaFile`.
        tls_cert, tls_key: The server's certificate and key, for gRPC and metrics. None: plaintext.
        tls_ca: Who signs the certificates of those whom it calls, and of callers.
        mutual_tls: Callers over gRPC must show a certificate.
        tls_server_name: What the certificates of manager and workers name, where it is not their
            addresses.
        insecure: Serve other machines without authentication, or tokens in plaintext.
    """

    token_file: str | None = None
    key_file: str | None = None
    metrics_token_file: str | None = None
    quota_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    mutual_tls: bool = False
    tls_server_name: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if (self.tls_cert is None) is not (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key go together: give both, or neither")
        if self.mutual_tls and (self.tls_cert is None or self.tls_ca is None):
            raise ConfigError("mutual_tls needs tls_cert, tls_key, and tls_ca to check callers by")
        if (self.tls_ca or self.tls_server_name) and self.tls_cert is None:
            raise ConfigError("tls_ca and tls_server_name go with tls_cert and tls_key: give those")

    @property
    def authenticates(self) -> bool:
        """Whether callers must say who they are."""
        return self.token_file is not None or self.mutual_tls or self.key_file is not None

    @property
    def encrypts(self) -> bool:
        return self.tls_cert is not None

    def check_shared_key(self) -> None:
        """Raise ConfigError where manager and workers could not know each other."""
        if self.authenticates and self.key_file is None:
            raise ConfigError(
                "manager and workers need a key to know each other by: give all of them the same "
                "--key, a file made by: (umask 077; openssl rand -hex 32 > FILE)"
            )

    def check_reach(self, host: str) -> None:
        """Raise ConfigError where others could reach what is open to everybody."""
        if self.insecure or is_loopback(host):
            return
        if not self.authenticates:
            raise ConfigError(
                f"host {host} can be reached from other machines, and nobody would be asked who "
                "they are: give --tokens or --mutual-tls, or say --insecure"
            )
        if not self.encrypts:
            raise ConfigError(
                f"host {host} can be reached from other machines, and tokens and pages would "
                "travel in plaintext: give --tls-cert and --tls-key, or say --insecure"
            )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host. Names other than localhost do not count."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    """How a manager process serves.

    Fields:
        host: Where to listen.
        port: 0: any free one.
        advertise_host: What others are to dial; needed where `host` is 0.0.0.0 or ::.
        metrics_port: Of the Prometheus endpoint, on `host`; 0: any free one. None: none.
        health_port: A second port, on `host`, that serves gRPC health and nothing else, always in
            plaintext; 0: any free one. None: none.
        workers_expected: How many workers should register; 0: unknown.
        security: Who may connect and call.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str | None = None
    metrics_port: int | None = None
    health_port: int | None = None
    workers_expected: int = 0
    limits: ServerLimits = field(default_factory=ServerLimits)
    security: Security = field(default_factory=Security)

    def __post_init__(self) -> None:
        _check_listening(self.host, self.port, self.advertise_host, self.metrics_port)
        _check_listening(self.host, self.health_port or 0, self.advertise_host, None)
        self.security.check_reach(self.host)
        self.security.check_shared_key()
        if self.workers_expected < 0:
            raise ConfigError(f"workers_expected must be at least 0, got {self.workers_expected}")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How a worker process serves; fields as in `ManagerSettings`, and:

    Fields:
        worker_id: Its name, the same after a restart.
        budget_bytes: What all its arenas together may take.
        device: Where the arenas are, as torch names it.
        lane_port: Of the lane beside gRPC; 0: any free one. None: no lane.
        manager_address: Whom to report to, as host:port. None: a lone worker.
        zero_freed_pages: Overwrite pages as soon as nobody holds them any more.
        drain_s: How long it may take, when its process is to end, to give its sessions away, or
            wait for them. 0: they are lost at once.
    """

    worker_id: str
    budget_bytes: int
    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str | None = None
    metrics_port: int | None = None
    health_port: int | None = None
    device: str = "cpu"
    max_sessions: int = 20_000
    lane_port: int | None = 0
    manager_address: str | None = None
    limits: ServerLimits = field(default_factory=ServerLimits)
    security: Security = field(default_factory=Security)
    zero_freed_pages: bool = False
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        _check_listening(self.host, self.port, self.advertise_host, self.metrics_port)
        if not 0 <= self.drain_s <= 86_400:
            raise ConfigError(f"drain_s must be 0 to 86400 s, got {self.drain_s:g} s")
        for port in (self.lane_port, self.health_port):
            _check_listening(self.host, port or 0, self.advertise_host, None)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", self.worker_id):
            raise ConfigError(
                f"worker_id must be 1 to 128 letters, digits, '.', '_', '-', got {self.worker_id!r}"
            )
        if self.budget_bytes < 1 << 16:
            raise ConfigError(
                f"budget_bytes must be at least 64KiB, got {self.budget_bytes}; give it more memory"
            )
        if self.max_sessions < 1:
            raise ConfigError(f"max_sessions must be at least 1, got {self.max_sessions}")
        self.security.check_reach(self.host)
        if self.manager_address is not None:
            self.security.check_shared_key()


def _check_listening(
    host: str, port: int, advertise_host: str | None, metrics_port: int | None
) -> None:
    for name, value in (("port", port), ("metrics_port", metrics_port or 0)):
        if not 0 <= value <= 65535:
            raise ConfigError(f"{name} must be 0 (any free one) to 65535, got {value}")
    if not host:
        raise ConfigError("host must be set, for example to 127.0.0.1 or 0.0.0.0")
    if host in ("0.0.0.0", "::") and not advertise_host:
        raise ConfigError(
            f"with host {host}, set advertise_host to the address that others reach this one by"
        )


def trace_exporter() -> str | None:
    """Return where spans go, by `OTEL_TRACES_EXPORTER`; None: nowhere."""
    stated = os.environ.get("OTEL_TRACES_EXPORTER", "")
    return None if stated in ("", "none") else stated


def revision() -> str:
    """Return the revision that this was built from, by `KVSERVICE_REVISION`. Empty: unknown."""
    return os.environ.get("KVSERVICE_REVISION", "")


def stated_failpoints() -> tuple[Failpoint, ...]:
    """Return where this process is to fail on purpose, by `KVSERVICE_FAILPOINTS`.

    Raises:
        ConfigError: Some are stated, but not `KVSERVICE_TESTING=1`; or they cannot be read.
    """
    stated = os.environ.get("KVSERVICE_FAILPOINTS", "")
    if stated and os.environ.get("KVSERVICE_TESTING") != "1":
        raise ConfigError(
            "KVSERVICE_FAILPOINTS makes a process fail on purpose, which is for tests alone: "
            "unset it, or set KVSERVICE_TESTING=1 as well"
        )
    try:
        return parse_failpoints(stated)
    except InvalidRequest as error:
        raise ConfigError(f"KVSERVICE_FAILPOINTS: {error}") from error


def failpoints() -> list[str]:
    """Return the names of all that injects faults into this process: Ray's settings, and our
    failpoints."""
    of_ray = sorted(name for name in os.environ if name.startswith("RAY_testing_"))
    return of_ray + [point.name for point in stated_failpoints()]


def environment() -> dict[str, str]:
    """Return a copy of this process's environment, for processes that it starts."""
    return dict(os.environ)


def run_directory() -> Path:
    """Return where running services are recorded: private to the user.

    `KVSERVICE_RUN_DIR`, else `$XDG_RUNTIME_DIR/kvservice`, else `~/.local/state/kvservice`.
    """
    if stated := os.environ.get("KVSERVICE_RUN_DIR"):
        return Path(stated).absolute()
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "kvservice"
    return Path.home() / ".local" / "state" / "kvservice"


def cache_directory() -> Path:
    """Return where things are kept that can be made again.

    `KVSERVICE_CACHE_DIR`, else `$XDG_CACHE_HOME/kvservice`, else `~/.cache/kvservice`.
    """
    if stated := os.environ.get("KVSERVICE_CACHE_DIR"):
        return Path(stated).absolute()
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "kvservice"
    return Path.home() / ".cache" / "kvservice"
