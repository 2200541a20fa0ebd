"""A service in processes of its own: a manager and workers, as operators start them without Ray."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvservice.clock import SystemClock
from kvservice_client import Client, connect
from tests.serving import until

MANAGER = """
import sys
from kvservice.config import ManagerSettings
from kvservice.runtime.manager import ManagerServer
with ManagerServer(ManagerSettings(workers_expected=int(sys.argv[1]))) as server:
    print(server.address, flush=True)
    sys.stdin.readline()
"""


@contextmanager
def running_service(*, num_workers: int = 2, memory: str = "256MiB") -> Iterator[str]:
    """Yield the manager's address, once all workers have registered with it."""
    with ExitStack() as running:
        manager = running.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", MANAGER, str(num_workers)],
                stdin=subprocess.PIPE,  # its end ends the manager
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert manager.stdout is not None
        address = manager.stdout.readline().strip()
        assert address, "the manager has not started"
        for number in range(num_workers):
            worker = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvservice", "worker", "--port", "0"),
                    *("--id", f"worker-{number}", "--memory", memory, "--manager", address),
                ],
                stdout=subprocess.DEVNULL,
            )
            running.enter_context(worker)  # waits for its end
            running.callback(worker.terminate)
        with connect(address) as client:
            _wait_for_workers(client, num_workers)
        yield address


def _wait_for_workers(client: Client, num_workers: int) -> None:
    clock = SystemClock()
    deadline = clock.monotonic() + 110.0
    while len(client.list_workers()) < num_workers:
        assert clock.monotonic() < deadline, "the workers have not registered"
        clock.wait(threading.Event(), 0.05)


def stored_tokens(client: Client) -> dict[str, int]:
    """Return how many tokens each worker has stored since its start."""
    return {stats.worker_id: stats.appended_tokens for stats in client.page_stats()}


def signal_while_stopped(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to a process that is stopped, and let it go on."""
    process.send_signal(signal.SIGSTOP)
    until(lambda: stands_still(process.pid))
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)


def stands_still(pid: int) -> bool:
    """Whether all threads of a process are stopped or dead, as a signal makes them in its time."""
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # a thread has just ended: look again
        return False
    return all(stat.rpartition(")")[2].split()[0] in "TZX" for stat in stats)
