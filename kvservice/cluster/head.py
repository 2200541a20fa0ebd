"""A Ray of our own on this machine: one head node in its own session, reachable by us alone.

Ray's servers listen on every interface, and whoever reaches them can run code here, so that even
a laptop's Ray gets a token that only its owner can read.
"""

from __future__ import annotations

import json
import os
import secrets
import site
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvservice.cluster.ports import free_ports
from kvservice.cluster.processes import TAG_VARIABLE

NODE_ADDRESS: Final = "127.0.0.2"
"""Ray replaces 127.0.0.1 by the address of an interface; this one it leaves alone."""

_OBJECT_STORE_BYTES: Final = 80_000_000  # pages never go through the object store
_MAX_TEMP_LENGTH: Final = 20  # a Unix socket's path has at most 107 bytes, and Ray's are long


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """How to start a head, and how to reach it.

    scratch: A private directory: Ray's files, the token, a home. To be removed at the end.
    environment: Of the head, which its processes inherit, and of whoever connects to it.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    address: str
    scratch: Path


def make_scratch() -> Path:
    """Return a new directory that is the caller's alone, with a path short enough for Ray."""
    parent = tempfile.gettempdir()
    if len(parent) > _MAX_TEMP_LENGTH:
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix="kv-", dir=parent))


def plan_head(
    scratch: Path, *, tag: str, num_workers: int, environment: Mapping[str, str]
) -> HeadPlan:
    """Return how to start a head with room for a manager and its workers.

    Args:
        scratch: From `make_scratch`.
        tag: What all its processes carry in `TAG_VARIABLE`.
        num_workers: How many workers there must be room for.
        environment: The caller's. Settings of another Ray in it are left out.

    Effects:
        Makes a home and a token in `scratch`.
    """
    home, token = scratch / "home", scratch / "token"
    home.mkdir(mode=0o700, exist_ok=True)
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    port, client_port = free_ports(NODE_ADDRESS, 2)
    own = {
        TAG_VARIABLE: tag,
        "HOME": str(home),
        "TMPDIR": str(scratch),  # so that what a killed worker leaves is removed with it
        "PYTHONUSERBASE": site.getuserbase(),  # else it would follow HOME
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # else SIGTERM takes 30 s
        # Ray would kill workers when memory is short, and with them the pages they hold.
        "RAY_memory_monitor_refresh_ms": "0",
        # Ray gives an actor without CPUs one thread.
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_workers)),
    }
    kept = {name: value for name, value in environment.items() if not name.startswith("RAY_")}
    if "OMP_NUM_THREADS" in kept:
        del own["OMP_NUM_THREADS"]
    return HeadPlan(
        command=_command(scratch, port, client_port, num_workers),
        environment=kept | own,
        address=f"{NODE_ADDRESS}:{port}",
        scratch=scratch,
    )


def start_head(plan: HeadPlan, log_path: Path) -> subprocess.Popen[bytes]:
    """Start the head as the leader of a new session. Its output replaces the log."""
    with os.fdopen(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as log:
        return subprocess.Popen(
            plan.command,
            env=dict(plan.environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=plan.scratch,
            start_new_session=True,
        )


def _command(scratch: Path, port: int, client_port: int, num_workers: int) -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        f"--node-ip-address={NODE_ADDRESS}",
        f"--port={port}",
        # Ray would take 10001 for this, which a second cluster could not.
        f"--ray-client-server-port={client_port}",
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--num-cpus=0",
        f"--resources={json.dumps({'kvmanager': 1, 'kvworker': num_workers})}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        "--include-dashboard=false",
        "--no-monitor",
        "--disable-usage-stats",
        f"--temp-dir={scratch / 'r'}",
    )
