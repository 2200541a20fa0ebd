"""What a run of the service is recorded by, so that another command can find and end it.

One private directory per service name, with the record, a lock, and logs. The record is written
before the first process starts and after every change, so that whatever is killed in between,
`down` finds what there is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, Self

from kvservice.cluster.processes import ProcessKey
from kvservice.config import Budget, Security
from kvservice.core.errors import Conflict, InvalidRequest

WORKER_PREFIX: Final = "kv-worker-"
GPU_WORKER_PREFIX: Final = "kv-gpu-worker-"

_FORMAT: Final = 1
_PORTS: Final = (
    *("port", "metrics_port", "health_port", "lane_port"),
    *("worker_port", "worker_metrics_port", "worker_health_port"),
)


class Kind(Enum):
    """Whose Ray it is. LOCAL: started by us, and ended with the service. JOINED: another's."""

    LOCAL = "local"
    JOINED = "joined"


@dataclass(frozen=True, slots=True)
class Actor:
    """A Ray actor that a run has started."""

    name: str
    actor_id: str


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Workers of a service that are alike; their names are the prefix and a number."""

    prefix: str
    device: str
    num_workers: int
    budget: Budget


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """What a service is started with. Sizes in bytes; port 0 is any free one.

    Fields:
        num_workers: On `device`.
        memory_bytes: For each worker's pages.
        memory_percent: Above 0: this share of the memory that a worker may use, instead.
        num_gpu_workers: On GPUs, beside those on the CPU.
        gpu_memory_percent: What the pages of each of these may take of its GPU.
        host: Where the servers listen; None: the loopback for a Ray of our own, else the address
            of the node that each runs on.
        health_port: The manager's for probes; None: none. Likewise `worker_health_port`.
        manager_address: Where workers find the manager, as host:port. Empty: at the address of
            its node, which another node has if the manager must move there.
        by_resource: Place by the resources kvmanager, kvworker and kvworker_gpu alone, also where
            no node has them yet.
        zero_freed_pages: Workers overwrite pages as soon as nobody holds them any more.
        log_level, log_format: Of manager and workers; see `kvservice.logs`.
        security: Who may connect and call. Workers get the paths, but not that of the tokens.
    """

    num_workers: int = 1
    memory_bytes: int = 2 << 30
    memory_percent: int = 0
    device: str = "cpu"
    num_gpu_workers: int = 0
    gpu_memory_percent: int = 80
    host: str | None = None
    port: int = 50051
    worker_port: int = 0
    lane_port: int = 0
    metrics_port: int = 0
    worker_metrics_port: int = 0
    health_port: int | None = None
    worker_health_port: int | None = None
    manager_address: str = ""
    by_resource: bool = False
    zero_freed_pages: bool = False
    security: Security = field(default_factory=Security)
    log_level: str = "info"
    log_format: str = "text"

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return what `dataclasses.asdict` has made a mapping of."""
        security = Security(**values.get("security", {}))
        return cls(**{**values, "security": security})

    def __post_init__(self) -> None:
        for name in ("num_workers", "num_gpu_workers"):
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.total_workers < 1:
            raise InvalidRequest(f"there must be at least 1 worker, got {self.total_workers}")
        if self.memory_bytes < 1 << 20:
            raise InvalidRequest(
                f"a worker's memory must be at least 1 MiB, got {self.memory_bytes} bytes"
            )
        for name, lowest in (("memory_percent", 0), ("gpu_memory_percent", 1)):
            if not lowest <= getattr(self, name) <= 95:
                raise InvalidRequest(
                    f"{name} must be between {lowest} and 95, got {getattr(self, name)}"
                )
        if self.device not in ("cpu", "cuda"):
            raise InvalidRequest(f'device must be "cpu" or "cuda", got "{self.device}"')
        if self.num_gpu_workers and self.device != "cpu":
            raise InvalidRequest(
                f'GPU workers are beside those on the CPU, but device is "{self.device}"'
            )
        for name in _PORTS:
            value: int = getattr(self, name) or 0
            if not 0 <= value <= 65535:
                raise InvalidRequest(f"{name} must be between 0 and 65535, got {value}")

    @property
    def total_workers(self) -> int:
        """How many workers there should be, over all groups."""
        return self.num_workers + self.num_gpu_workers

    @property
    def groups(self) -> tuple[WorkerGroup, ...]:
        """The groups of workers, empty ones included."""
        budget = Budget(self.memory_bytes, self.memory_percent)
        gpu_budget = Budget(percent=self.gpu_memory_percent)
        return (
            WorkerGroup(WORKER_PREFIX, self.device, self.num_workers, budget),
            WorkerGroup(GPU_WORKER_PREFIX, "cuda", self.num_gpu_workers, gpu_budget),
        )


@dataclass(frozen=True, slots=True)
class RunState:
    """One run of the service.

    manager_address: host:port, empty until the manager serves.
    metrics_address: The manager's for Prometheus, as host:port.
    tag: Carried by all processes of the run in their environment.
    head: The process that leads the session of our own Ray; None before it starts, and for JOINED.
    scratch: A directory to remove at the end; empty for none.
    actors: Those that this run has started.
    """

    name: str
    kind: Kind
    options: ServiceOptions
    ray_address: str
    tag: str
    manager_address: str = ""
    metrics_address: str = ""
    head: ProcessKey | None = None
    scratch: str = ""
    actors: tuple[Actor, ...] = ()


class StateStore:
    """The private directory of one service name.

    Args:
        directory: Holds one directory for each name; made with mode 0700 when first needed.
        name: Letters, digits, `-` and `_`.
    """

    def __init__(self, directory: Path, name: str) -> None:
        if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
            raise InvalidRequest(
                f'a service name must consist of letters, digits, "-" and "_", got "{name}"'
            )
        self.name = name
        self.directory = directory / name
        self._path = self.directory / "state.json"

    @property
    def log_path(self) -> Path:
        """Where the output of Ray's own processes goes. Survives the run; the next replaces it."""
        return self.directory / "ray.log"

    def find(self) -> RunState | None:
        """Return the record; None if no run is recorded.

        Raises:
            Conflict: The record is unreadable, or of another version.
        """
        try:
            text = self._path.read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return _decode(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise Conflict(
                f"the record {self._path} cannot be read ({error}): "
                "end what it names by hand, then remove it"
            ) from error

    def save(self, state: RunState) -> None:
        """Replace the record, all or nothing."""
        self._make_directory()
        temporary = self._path.with_suffix(".new")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
            json.dump(_encode(state), f, indent=2)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(self._path)

    def clear(self) -> None:
        """Remove the record. Without effect if there is none."""
        self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the name against other commands that start or end the service.

        Raises:
            Conflict: Another command holds it.
        """
        self._make_directory()
        descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Conflict(
                    f'another "kvservice up" or "down" of "{self.name}" is at work: wait for it'
                ) from None
            yield
        finally:
            os.close(descriptor)

    def _make_directory(self) -> None:
        for directory in (self.directory.parent, self.directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.directory.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise Conflict(
                f"{self.directory} must belong to the caller alone (mode 0700): change that, "
                "or name another place in KVSERVICE_RUN_DIR"
            )


def _encode(state: RunState) -> dict[str, object]:
    return {"format": _FORMAT, **dataclasses.asdict(state), "kind": state.kind.value}


def _decode(values: dict[str, object]) -> RunState:
    found = values.pop("format")
    if found != _FORMAT:
        raise ValueError(f"format {found}, expected {_FORMAT}")
    head, options, actors = values.pop("head"), values.pop("options"), values.pop("actors")
    if not isinstance(options, dict) or not isinstance(actors, list):
        raise ValueError("options or actors are missing")
    return RunState(
        kind=Kind(values.pop("kind")),
        options=ServiceOptions.from_json(options),
        head=ProcessKey(**head) if isinstance(head, dict) else None,
        actors=tuple(Actor(**actor) for actor in actors),
        **values,  # type: ignore[arg-type]
    )
