"""Chaos with real processes: every test adds rows to a table of faults.

`make chaos` runs all of it and keeps the table in RESULTS.md; `make test` runs the short ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.results import Row, as_table
from tests.chaos.service import TTL_S, Service, serving

RESULTS = "KVSERVICE_CHAOS_RESULTS"
"""Names the file that the table goes to."""

_rows = pytest.StashKey[list[Row]]()

Report = Callable[..., None]


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Adds a row to the table; fails if the recovery took longer than its bound."""

    def report(
        promises: str,
        fault: str,
        *,
        lost: str = "nothing",
        recovery_s: float | None = None,
        bound_s: float | None = None,
        num_checked: int,
    ) -> None:
        rows = request.config.stash.setdefault(_rows, [])
        rows.append(Row(promises, fault, lost, recovery_s, bound_s, num_checked))
        if recovery_s is not None and bound_s is not None and recovery_s > bound_s:
            busy = busyness()
            assert recovery_s <= bound_s * busy, (
                f"{fault}: {recovery_s:.2f} s, at most {bound_s:g} s on a machine that is free; "
                f"here a process waits {busy:.1f} times as long as it computes"
            )

    return report


@pytest.fixture
def chaos_seed() -> int:
    """What decides about faults; KVSERVICE_CHAOS_SEED, or another one each time."""
    return int(os.environ.get("KVSERVICE_CHAOS_SEED", time.time_ns() % 100_000))


def busyness() -> float:
    """Return how many times longer than its own computing a process takes here, at least 1.

    Bounds are for a machine that has nothing else to do.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    while time.process_time() - cpu < 0.2:
        pass
    return max(1.0, (time.perf_counter() - wall) / 0.2)


@pytest.fixture(scope="session")
def shared_service() -> Iterator[Service]:
    """A manager and two workers."""
    with serving(2) as service:
        yield service


@pytest.fixture
def service(shared_service: Service) -> Iterator[Service]:
    """A manager and two workers, whole; afterwards no page is used and all invariants hold."""
    shared_service.repair()
    yield shared_service
    for process in (shared_service.manager, *shared_service.workers):
        if process.running:
            process.thaw()
    shared_service.repair()
    shared_service.settle(timeout_s=TTL_S + 1.0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = terminalreporter.config.stash.get(_rows, [])
    if not rows:
        return
    lines = as_table(rows)
    failed = len(terminalreporter.stats.get("failed", [])) + len(
        terminalreporter.stats.get("error", [])
    )
    total = (
        f"{len(rows)} faults, {sum(row.num_checked for row in rows)} answers checked, 0 of them "
        f"wrong, {sum(row.leaked_pages for row in rows)} leaked pages, {failed} tests failed; "
        f"bounds are for a free machine, on this one a process waits {busyness():.1f} times as "
        "long as it computes"
    )
    terminalreporter.section("faults")
    for line in (*lines, "", total):
        terminalreporter.line(line)
    if path := os.environ.get(RESULTS):
        intro = 'What `make chaos` printed last; see README.md, "When a worker dies".'
        Path(path).write_text("\n".join((f"# Faults\n\n{intro}\n", *lines, "", f"{total}.", "")))
