"""`kvservice worker`: one worker alone, as a process, without Ray and manager."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvservice.cluster.ports import check_port_free
from kvservice.core.errors import OutOfPages, PagesLost
from kvservice_client import connect
from tests.processes import signal_while_stopped

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("leaves_nothing")]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvservice", "worker", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def running(*arguments: str) -> Iterator[tuple[dict[str, str], subprocess.Popen[str]]]:
    """Yield what a worker says of itself, and its process; end it by SIGTERM."""
    with start("--port", "0", "--memory", "1MiB", "--json", *arguments) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, process.stderr and process.stderr.read()
            yield json.loads(line), process
        finally:
            process.terminate()
            assert process.wait(timeout=30) == 0


def test_serves_a_session_directly() -> None:
    """`connect` takes a lone worker as it takes a manager; its memory is what was stated."""
    with running("--id", "alone") as (said, _), connect(said["address"]) as client:
        assert said["workerId"] == "alone"
        assert [worker.worker_id for worker in client.list_workers()] == ["alone"]
        assert [stats.budget_bytes for stats in client.page_stats()] == [1 << 20]
        session = client.open(num_rows=1)
        k = np.ones((1, 2, 3, 8), np.float32)
        v = np.broadcast_to(np.arange(3, dtype=np.float32)[:, None], k.shape).copy()
        out = session.attend(0, k, k, v)
        np.testing.assert_allclose(out[0, 0, :, 0], [0, 0.5, 1], atol=1e-6)
        large = np.ones((1, 2, 100_000, 8), np.float32)
        with pytest.raises(OutOfPages):
            session.attend(0, large, large, large)
        session.release()


def test_commands_look_at_it_by_its_address(tmp_path: Path) -> None:
    """`status`, `stats` and `workers` need no record where the address is stated."""
    with running("--id", "alone") as (said, _):
        for command in ("status", "stats", "workers"):
            done = subprocess.run(
                [sys.executable, "-m", "kvservice", command, "--address", said["address"]],
                env=os.environ | {"KVSERVICE_RUN_DIR": str(tmp_path)},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert "alone" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ends_at_a_signal(number: signal.Signals) -> None:
    """In an orderly way, silently, and its port is free again."""
    with running() as (said, process):
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert err == ""
        host, port = said["address"].split(":")
        check_port_free(host, int(port), "--port")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ends_at_a_signal_that_comes_while_it_is_stopped(number: signal.Signals) -> None:
    """As of a container that was paused: the kernel may give the signal to any of its threads."""
    with running() as (_, process):
        signal_while_stopped(process, number)
        assert process.wait(timeout=30) == 0


def test_a_used_port_fails_in_one_line() -> None:
    """With the port and the option in it."""
    with running() as (said, _):
        port = said["address"].split(":")[1]
        with start("--port", port) as second:
            out, err = second.communicate(timeout=60)
        assert second.returncode == 1
        assert out == ""
        assert err.count("\n") == 1
        assert f"port {port}" in err
        assert "--port" in err


def test_failpoints_are_for_tests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the flag a worker refuses to start; with it, it dies where and when it is to."""
    monkeypatch.setenv("KVSERVICE_FAILPOINTS", "attend.stored=crash@2")
    with start("--port", "0", "--memory", "1MiB") as process:
        assert process.wait(timeout=30) != 0
        assert process.stderr is not None
        assert "KVSERVICE_TESTING=1" in process.stderr.read()
    monkeypatch.setenv("KVSERVICE_TESTING", "1")
    with start("--port", "0", "--memory", "1MiB", "--json") as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        k = np.ones((1, 1, 1, 8), np.float32)
        with connect(said["address"]) as client:
            session = client.open(num_rows=1)
            session.attend(0, k, k, k)
            with pytest.raises(PagesLost):
                session.attend(0, k, k, k)
            session.detach()
        assert process.wait(timeout=30) == -signal.SIGKILL
