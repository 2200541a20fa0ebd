"""Finds what a test run has left behind: processes, threads, listening ports.

Linux only (/proc). A process is the run's own if it descends from this one, or was started by
somebody who had the run's mark in the environment: a detached process that init has adopted is
found by its mark.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

from kvservice.clock import SystemClock

MARK = "KVSERVICE_TEST_RUN"

# Started by multiprocessing once per process, and ended with it.
HELPERS = (b"multiprocessing.resource_tracker",)


def mark_run() -> None:
    """Mark this process's environment, and so that of everything it starts from now on."""
    os.environ[MARK] = uuid.uuid4().hex


def processes() -> dict[int, str]:
    """Return pid and command line of every live process that the run has started."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    parents: dict[int, int] = {}
    marked: set[int] = set()
    for pid in _pids():
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is not ours to look at
            state, parent = _state_and_parent(pid)
            if state in ("Z", "X"):
                continue
            parents[pid] = parent
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                marked.add(pid)
    ours = {pid for pid in parents if pid in marked or _descends(pid, parents)}
    found: dict[int, str] = {}
    for pid in sorted(ours - {os.getpid()}):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if not any(helper in command for helper in HELPERS):
                found[pid] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def threads() -> list[str]:
    """Return the names of threads that would keep this process from ending."""
    return [
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not thread.daemon
    ]


def listening_ports() -> list[int]:
    """Return the TCP ports that this process listens on."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # LISTEN
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return sorted(ports)


def snapshot() -> set[str]:
    """Return all of the above, one line each."""
    lines = {f"process {pid}: {command}" for pid, command in processes().items()}
    lines |= {f"thread: {name}" for name in threads()}
    lines |= {f"listening on port {port}" for port in listening_ports()}
    return lines


def left_since(before: set[str], *, timeout_s: float) -> list[str]:
    """Return what is there now and was not before, after up to `timeout_s` for it to go."""
    clock = SystemClock()
    deadline = clock.monotonic() + timeout_s
    while (left := snapshot() - before) and clock.monotonic() < deadline:
        clock.wait(threading.Event(), 0.05)
    return sorted(left)


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _state_and_parent(pid: int) -> tuple[str, int]:
    # The command, in parentheses, may contain anything; state and parent follow the last one.
    state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    return state, int(parent)


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == os.getpid():
            return True
    return False
