"""Processes of a run: finding exactly those that belong to it, and ending them. Linux only.

A process belongs to a run if it carries the run's tag in its environment, which it inherits from
the process that started the run, or if it is in the session of the run's leader while that still
lives. Ray puts its workers into process groups of their own, so a group alone is not enough.
A pid alone is never signalled: pids are used again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvservice.clock import Clock

TAG_VARIABLE: Final = "KVSERVICE_RUN"
"""Name of the environment variable that carries a run's tag."""

_PROC: Final = Path("/proc")
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """A process beyond doubt: its pid, when it started (in ticks since boot), and which boot."""

    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    session: int
    start_ticks: int


def find_process(pid: int) -> ProcessKey | None:
    """Return the key of the process that has this pid now; None if none does, or only a zombie."""
    stat = _stat(pid)
    if stat is None or stat.state in "ZX":
        return None
    return ProcessKey(pid, stat.start_ticks, _boot_id())


def is_alive(key: ProcessKey) -> bool:
    """Return whether exactly this process runs. A zombie does not."""
    return find_process(key.pid) == key


def members(tag: str, leader: ProcessKey | None) -> list[ProcessKey]:
    """Return the living processes of a run, the caller's own excepted.

    Args:
        tag: What the run's processes carry in `TAG_VARIABLE`.
        leader: The process that leads the run's session. None: the tag alone decides.
    """
    session = leader.pid if leader is not None and is_alive(leader) else None
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        # The key comes first: whatever is read next is of this process, or of none.
        key = find_process(int(entry.name))
        if key is not None and _belongs(key.pid, tag, session):
            found.append(key)
    return found


def find_listener(tag: str, leader: ProcessKey | None, port: int) -> ProcessKey | None:
    """Return the process of a run that listens at a TCP port; None: none does.

    Args:
        tag, leader: As for `members`.
    """
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for key in members(tag, leader):
        with contextlib.suppress(OSError):  # it has just ended
            for descriptor in (_PROC / str(key.pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor) in sockets:
                        return key
    return None


def kill(key: ProcessKey) -> None:
    """Send SIGKILL to exactly this process, or to none."""
    _send(key, signal.SIGKILL)


def end(tag: str, leader: ProcessKey | None, *, clock: Clock, grace_s: float) -> list[ProcessKey]:
    """End all processes of a run: ask the leader, ask what that leaves, then kill.

    Args:
        tag: As for `members`.
        leader: As for `members`. It is expected to end the others.
        clock: What tells the time.
        grace_s: Seconds that each of these steps may take at most.

    Returns:
        What is still there after that: nothing, unless a process hangs in the kernel.
    """
    known = members(tag, leader)
    if leader is not None and leader in known:
        _send(leader, signal.SIGTERM)
        wait_until(lambda: not is_alive(leader), clock=clock, timeout_s=grace_s)
    for number in (signal.SIGTERM, signal.SIGKILL):
        known = _left(known, tag, leader)
        for key in known:
            _send(key, number)
        known = _wait_for(known, tag, leader, clock=clock, timeout_s=grace_s)
    return known


def wait_until(condition: Callable[[], bool], *, clock: Clock, timeout_s: float) -> bool:
    """Look at a condition until it holds or the time is over; return whether it holds."""
    deadline = clock.monotonic() + timeout_s
    never = threading.Event()
    while not condition():
        if clock.monotonic() >= deadline:
            return False
        clock.wait(never, _POLL_S)
    return True


def _wait_for(
    known: list[ProcessKey],
    tag: str,
    leader: ProcessKey | None,
    *,
    clock: Clock,
    timeout_s: float,
) -> list[ProcessKey]:
    """Wait for the end of a run; return what of it is left when it has ended or time is over."""
    wait_until(lambda: not _left(known, tag, leader), clock=clock, timeout_s=timeout_s)
    return _left(known, tag, leader)


def _left(known: list[ProcessKey], tag: str, leader: ProcessKey | None) -> list[ProcessKey]:
    """Return those of the known that live, and whatever else belongs to the run now."""
    alive = {key for key in known if is_alive(key)}
    return sorted(alive.union(members(tag, leader)), key=lambda key: key.pid)


def _send(key: ProcessKey, number: signal.Signals) -> None:
    """Send a signal to exactly this process, or to none."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(key.pid)
        try:
            # The descriptor stays with one process, so what is checked now is what is signalled.
            if is_alive(key):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def _belongs(pid: int, tag: str, session: int | None) -> bool:
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or gone
        environment = []
    if f"{TAG_VARIABLE}={tag}".encode() in environment:
        return True
    stat = _stat(pid)
    return session is not None and stat is not None and stat.session == session


def _stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    # The name, in parentheses, may itself hold blanks and parentheses.
    fields = text.rpartition(")")[2].split()
    return _Stat(state=fields[0], session=int(fields[3]), start_ticks=int(fields[19]))


def _listening(port: int) -> set[str]:
    """Return the inodes of the sockets that listen at a TCP port."""
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found


def _boot_id() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
