"""Workers, and bare echoes to compare with, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kvservice.clock import SystemClock
from kvservice.config import ManagerSettings
from kvservice.runtime.manager import ManagerServer
from kvservice_client import Client, connect


@contextmanager
def process(*arguments: str) -> Iterator[str]:
    """Run a Python module that prints one line when it is ready; yield the line."""
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield child.stdout.readline()
        finally:
            child.terminate()


@contextmanager
def lone_worker(memory: str = "2GiB") -> Iterator[str]:
    """Yield the address of a worker without Ray and manager."""
    with process("kvservice", "worker", "--port", "0", "--json", "--memory", memory) as line:
        yield json.loads(line)["address"]


@contextmanager
def two_workers(memory: str = "2GiB") -> Iterator[str]:
    """Yield the address of a manager, in this process, with two worker processes."""
    with ExitStack() as stack:
        manager = stack.enter_context(ManagerServer(ManagerSettings(workers_expected=2)))
        for name in ("worker-0", "worker-1"):
            arguments = ("--port", "0", "--json", "--id", name, "--memory", memory)
            stack.enter_context(
                process("kvservice", "worker", *arguments, "--manager", manager.address)
            )
        with connect(manager.address) as client:
            _await_workers(client)
        yield manager.address


def _await_workers(client: Client) -> None:
    clock = SystemClock()
    deadline = clock.monotonic() + 60
    while len(client.list_workers()) < 2:
        assert clock.monotonic() < deadline, "the workers have not registered"
