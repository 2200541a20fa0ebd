"""`kvservice manager` with `kvservice worker`: a service of plain processes, without Ray."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from kvservice.clock import SystemClock
from kvservice.cluster.processes import wait_until
from kvservice.config import memory_limit_bytes
from kvservice_client import connect
from tests.processes import signal_while_stopped

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.usefixtures("leaves_nothing")]


@contextmanager
def running(*arguments: str) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """Yield what a process says of itself, and the process; end it by SIGTERM."""
    command = [sys.executable, "-m", "kvservice", *arguments, "--port", "0", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, process.stderr and process.stderr.read()
            yield json.loads(line), process
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0


def test_workers_register_and_a_session_lies_on_both() -> None:
    """What a laptop gets from the compose file: three processes, one service."""
    with ExitStack() as stack:
        said, _ = stack.enter_context(running("manager", "--workers-expected", "2"))
        for name in ("one", "two"):
            stack.enter_context(
                running("worker", "--id", name, "--memory", "8MiB", "--manager", said["address"])
            )
        client = stack.enter_context(connect(said["address"]))
        assert wait_until(
            lambda: len(client.list_workers()) == 2, clock=SystemClock(), timeout_s=20
        )
        with client.open(num_rows=1, spread=2) as session:
            k = np.ones((1, 2, 40, 8), np.float32)
            v = np.broadcast_to(np.arange(40, dtype=np.float32)[:, None], k.shape).copy()
            out = session.attend(0, k, k, v)
            np.testing.assert_allclose(out[0, 0, :, 0], np.arange(40) / 2, atol=1e-5)
            used = [sum(pool.used_pages for pool in stats.pools) for stats in client.page_stats()]
            assert all(used), "the session should lie on both workers"


def test_ends_at_a_signal_that_comes_while_it_is_stopped() -> None:
    """As a worker does."""
    with running("manager") as (_, process):
        signal_while_stopped(process, signal.SIGTERM)
        assert process.wait(timeout=30) == 0


def test_a_worker_refuses_a_budget_that_is_not_there() -> None:
    """Before it serves, in one line with both numbers."""
    done = subprocess.run(
        [sys.executable, "-m", "kvservice", "worker", "--port", "0", "--memory", "500TiB"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "500TiB is more than the" in done.stderr


def test_a_share_is_of_what_the_process_may_use() -> None:
    """The budget that it reports is that part of the limit."""
    with running("worker", "--memory", "1%") as (said, _), connect(said["address"]) as client:
        (stats,) = client.page_stats()
    assert stats.budget_bytes == memory_limit_bytes() // 100
