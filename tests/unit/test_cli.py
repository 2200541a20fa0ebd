"""The command line: what it accepts, what it says, and its exit codes. Nothing is started here."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvservice import __version__
from kvservice.cli import main
from kvservice.cli.exits import FAILED, NOT_RUNNING, OK, USAGE, Interrupted
from kvservice.cli.signals import signals_interrupt
from kvservice.cluster.ports import free_ports
from kvservice.cluster.processes import ProcessKey
from kvservice.cluster.state import Kind, RunState, ServiceOptions, StateStore

COMMANDS = (
    "up",
    "down",
    "status",
    "stats",
    "workers",
    "sessions",
    "manager",
    "worker",
    "demo",
    "top",
    "drain",
    "move",
    "doctor",
)


@pytest.fixture(autouse=True)
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records go where no real service is recorded."""
    monkeypatch.setenv("KVSERVICE_RUN_DIR", str(tmp_path))
    return tmp_path


def record(run_directory: Path, **changes: object) -> None:
    values = {
        "name": "default",
        "kind": Kind.LOCAL,
        "options": ServiceOptions(),
        "ray_address": "127.0.0.2:1",
        "tag": "nobody-has-this-tag",
        "manager_address": "127.0.0.1:1",
        "head": ProcessKey(1, 1, "an earlier boot"),
        **changes,
    }
    StateStore(run_directory, "default").save(RunState(**values))  # type: ignore[arg-type]


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is on stderr, which must be one line; stdout must be empty."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


class TestHelp:
    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The version is the package's."""
        assert main(["--version"]) == OK
        assert capsys.readouterr().out == f"kvservice {__version__}\n"

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_explains_itself(
        self, command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """What it does, its options, and the exit codes."""
        assert main([command, "--help"]) == OK
        text = capsys.readouterr().out
        assert f"usage: kvservice {command}" in text
        assert "exit codes:" in text
        assert "--debug" in text

    def test_main_help_names_all_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Each with a line."""
        assert main(["--help"]) == OK
        text = capsys.readouterr().out
        assert all(f"\n    {command} " in text for command in COMMANDS)

    def test_looking_needs_neither_ray_nor_torch(self) -> None:
        """So that a look is quick, and works where only the client is installed."""
        heavy = "{'ray', 'torch', 'transformers', 'prometheus_client'}"
        source = f"import sys, kvservice.cli; sys.exit(bool({heavy} & set(sys.modules)))"
        assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ([], "COMMAND"),
            (["dance"], "dance"),
            (["up", "--workers", "many"], "many"),
            (["up", "--workers", "0"], "at least 1 worker, got 0"),
            (["up", "--memory", "2 gigs"], "GiB"),
            (["up", "--memory", "10"], "1 MiB, got 10"),
            (["up", "--device", "tpu"], "tpu"),
            (["up", "--port", "70000"], "70000"),
            (["up", "--address", "somewhere"], "HOST:PORT"),
            (["up", "--address", "auto", "--port", "0"], "must be stated"),
            (["up", "--name", "a/b"], "letters"),
            (["status", "--name", ".."], "letters"),
            (["demo", "--model", "/nowhere"], "/nowhere"),
            (["demo", "--max-new-tokens", "0"], "at least 1"),
            (["demo", "--kill-worker", "--address", "kv:1"], "--address"),
            (["demo", "--kill-worker", "--workers", "1"], "2 workers"),
            (["worker", "--memory", "10"], "64KiB"),
            (["drain"], "WORKER"),
            (["move"], "SESSION"),
            (["move", "s"], "WORKER"),
            (["move", "s", "w", "--timeout", "0", "--address", "127.0.0.1:1"], "above 0"),
            (["drain", "w0", "--timeout", "-1", "--address", "127.0.0.1:1"], "negative"),
            (["top", "--interval", "0", "--address", "127.0.0.1:1"], "at least 0.1"),
            (["worker", "--manager", "nowhere"], "HOST:PORT"),
        ],
    )
    def test_mistakes_are_told_in_one_line(
        self, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """With the value or the rule in it, and exit code 2. Nothing is recorded or started."""
        assert main(arguments) == USAGE
        assert says in one_line(capsys)
        assert main(["status"]) == NOT_RUNNING

    def test_debug_adds_where(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A traceback, before the line."""
        assert main(["up", "--workers", "0", "--debug"]) == USAGE
        assert "Traceback" in capsys.readouterr().err


class TestNothingRuns:
    def test_status(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Says so, by exit code 3 too, and for scripts."""
        assert main(["status"]) == NOT_RUNNING
        assert capsys.readouterr().out == "not running\n"
        assert main(["status", "--json"]) == NOT_RUNNING
        assert json.loads(capsys.readouterr().out) == {
            "name": "default",
            "healthy": False,
            "reason": "not running",
        }

    @pytest.mark.parametrize("command", ["stats", "workers", "sessions", "top"])
    def test_others_say_how_to_start(
        self, command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """With the same exit code."""
        assert main([command]) == NOT_RUNNING
        assert "kvservice up" in one_line(capsys)

    def test_down_is_done_at_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        """As often as one likes."""
        for _ in range(2):
            assert main(["down"]) == OK
        assert "nothing was running" in capsys.readouterr().out
        assert main(["down", "--json"]) == OK
        assert json.loads(capsys.readouterr().out)["wasRunning"] is False

    def test_an_address_where_nobody_listens(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A failure for `stats`; for `status` the answer to what was asked."""
        address = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
        assert main(["stats", "--address", address]) == FAILED
        assert one_line(capsys).startswith("kvservice stats: ")
        assert main(["status", "--address", address]) == 4


class TestRecords:
    def test_a_dead_service_is_told_apart(
        self, run_directory: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The record of a machine's earlier life: not running, and `down` cleans up."""
        record(run_directory)
        assert main(["status"]) == NOT_RUNNING
        assert "died" in capsys.readouterr().out
        assert main(["down"]) == OK
        assert main(["status"]) == NOT_RUNNING
        assert "not running" in capsys.readouterr().out

    def test_a_cluster_that_is_gone_can_be_forgotten(
        self, run_directory: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """`down` cannot end what it cannot reach; the record stays until told otherwise."""
        record(run_directory, kind=Kind.JOINED, head=None)
        assert main(["status"]) == 4
        assert main(["down", "--forget"]) == OK
        assert main(["status"]) == NOT_RUNNING
        capsys.readouterr()

    def test_a_used_port_fails_in_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Before anything is started, with what to do about it."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            for option in ("--port", "--metrics-port"):
                assert main(["up", "--detach", option, str(port)]) == FAILED
                line = one_line(capsys)
                assert f"port {port} of 127.0.0.1 is in use" in line
                assert option in line
        assert main(["status"]) == NOT_RUNNING

    def test_a_ray_that_is_not_there_fails_in_one_line(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """At once, and nothing is recorded."""
        port = free_ports("127.0.0.1", 1)[0]
        assert main(["up", "--detach", "--address", f"127.0.0.1:{port}"]) == FAILED
        assert "no Ray cluster answers" in one_line(capsys)
        assert main(["status"]) == NOT_RUNNING


def test_the_first_signal_interrupts_and_later_ones_do_not() -> None:
    """So that ending in an orderly way is not itself interrupted. Handlers are put back."""
    before = signal.getsignal(signal.SIGTERM)
    with signals_interrupt():
        with pytest.raises(Interrupted) as caught:
            signal.raise_signal(signal.SIGTERM)
        assert caught.value.number == signal.SIGTERM
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before
