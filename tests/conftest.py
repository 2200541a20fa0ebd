"""What every test gets: a private home, no network, a reason for each skip, and no leftovers."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import leaks

# With KVSERVICE_FAIL_ON_SKIP=1 (CI sets it) a skip for any other reason fails the run.
ACCEPTED_SKIPS = ("needs CUDA", "../shared is absent")

_QUIET = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("default", **_QUIET)
# The same examples each time: a change is not blamed for what an earlier one brought.
hypothesis.settings.register_profile("ci", **_QUIET, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("thorough", **_QUIET, max_examples=2000)
hypothesis.settings.register_profile("fuzz", **_QUIET, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default")
)

_home = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Set up the environment, before a test module imports anything that reads it."""
    if os.environ.get("KVSERVICE_FAIL_ON_SKIP") == "1":
        config.pluginmanager.register(SkipPolice())
    config.stash[_home] = home = tempfile.mkdtemp(prefix="kvservice-tests-")
    # Converted models are worth keeping between runs; all else goes to a home that is removed.
    os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    for name in ("KVSERVICE_RUN_DIR", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        os.environ.pop(name, None)
    os.environ["HOME"] = home
    # Ray would else turn authentication on by a token in the home, and report usage.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    leaks.mark_run()
    # A shell that runs us in the background has us ignore it, and so all that we start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_home], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail the session if it leaves a process, a thread that blocks its end, or a held port."""
    yield
    left = leaks.left_since(set(), timeout_s=10.0)
    assert not left, "left behind by the tests:\n" + "\n".join(left)


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Fail the test if it leaves a process, thread or port that was not there before.

    For tests that start servers. Ask for it first, so that it looks last.
    """
    before = leaks.snapshot()
    yield
    left = leaks.left_since(before, timeout_s=10.0)
    assert not left, "left behind by the test:\n" + "\n".join(left)


class SkipPolice:
    """Fails a run in which something was skipped for a reason that is not accepted."""

    def __init__(self) -> None:
        self.unexpected: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "wasxfail"):
            self._look_at(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look_at(report)

    def _look_at(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if not reason.startswith(ACCEPTED_SKIPS):
                self.unexpected.append(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unexpected:
            terminalreporter.section("skipped, but KVSERVICE_FAIL_ON_SKIP is set", red=True)
            for line in self.unexpected:
                terminalreporter.line(line)
