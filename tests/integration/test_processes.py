"""Which processes belong to a run, and that exactly those are ended. With real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvservice.clock import SystemClock
from kvservice.cluster.processes import (
    TAG_VARIABLE,
    ProcessKey,
    end,
    find_process,
    is_alive,
    members,
    wait_until,
)

CLOCK = SystemClock()

# Prints its own pid and that of a child, in this order, once both are as they should be. The
# child is in a process group (`setpgid`) or even a session (`setsid`) of its own.
FAMILY = """
import os, signal, sys
child = os.fork()
if child == 0:
    os.{separate}
    signal.signal(signal.SIGTERM, signal.{reaction})
    print(os.getpid(), flush=True)
    signal.pause()
    os._exit(0)
signal.pause()
"""

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("leaves_nothing")]


def start(source: str, tag: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", source],
        env=os.environ | {TAG_VARIABLE: tag},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def tag() -> str:
    return str(uuid.uuid4())


@pytest.fixture
def bystander() -> Iterator[ProcessKey]:
    """A process with another run's tag."""
    process = start("import signal; signal.pause()", "another")
    key = find_process(process.pid)
    assert key is not None
    try:
        yield key
        assert is_alive(key), "a process of another run was ended"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("separate", "reaction"),
    [("setpgid(0, 0)", "SIG_DFL"), ("setsid()", "SIG_DFL"), ("setsid()", "SIG_IGN")],
)
def test_all_of_a_run_are_found_and_ended(
    tag: str, bystander: ProcessKey, separate: str, reaction: str
) -> None:
    """Children in groups and sessions of their own too, and those that ignore SIGTERM."""
    source = FAMILY.format(separate=separate, reaction=reaction)
    with start(source, tag) as leader:
        assert leader.stdout is not None
        child = int(leader.stdout.readline())
        key = find_process(leader.pid)
        assert key is not None
        assert {found.pid for found in members(tag, key)} == {leader.pid, child}
        assert end(tag, key, clock=CLOCK, grace_s=0.5 if reaction == "SIG_IGN" else 10) == []
        assert members(tag, key) == []
        assert not is_alive(key)
        assert find_process(child) is None
        assert is_alive(bystander)


def test_what_a_dead_leader_has_left_is_ended(tag: str, bystander: ProcessKey) -> None:
    """Its children are found by their tag."""
    source = FAMILY.format(separate="setpgid(0, 0)", reaction="SIG_DFL")
    with start(source, tag) as leader:
        assert leader.stdout is not None
        child = int(leader.stdout.readline())
        key = find_process(leader.pid)
        leader.kill()
        leader.wait()
        assert [found.pid for found in members(tag, key)] == [child]
        assert end(tag, key, clock=CLOCK, grace_s=10) == []
        assert wait_until(lambda: find_process(child) is None, clock=CLOCK, timeout_s=10)


def test_a_pid_that_is_used_again_is_left_alone(tag: str, bystander: ProcessKey) -> None:
    """A process with the recorded pid, but another start or boot, is somebody else."""
    for recycled in (
        replace(bystander, start_ticks=bystander.start_ticks - 1),
        replace(bystander, boot_id="another boot"),
    ):
        assert not is_alive(recycled)
        assert members(tag, recycled) == []
        assert end(tag, recycled, clock=CLOCK, grace_s=1) == []


def test_zombies_are_no_processes() -> None:
    """What has ended, but whose parent hasn't noticed, has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        key = find_process(process.pid)
        assert key is not None
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert find_process(process.pid) is None
        assert not is_alive(key)


def test_a_name_with_blanks_and_parentheses_is_read_right() -> None:
    """Some processes choose their own name, as Ray's do."""
    source = 'open("/proc/self/comm", "w").write("a) R 1 (b"); print(flush=True); input()'
    with subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        before = find_process(process.pid)
        process.stdout.readline()
        assert find_process(process.pid) == before
