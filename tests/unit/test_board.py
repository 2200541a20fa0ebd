"""What `kvservice top` makes of what the service says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvservice.cli import top
from kvservice.core.board import Board, Member, Reading, json_of, make_board
from kvservice.core.distribution import SECONDS, Histogram
from kvservice.core.session import PoolStats, WorkerStats

POOL = PoolStats(0, 16, 1000, used_pages=30, reserved_pages=20, free_pages=10, num_tokens=400)


def durations(*seconds: float) -> Any:
    histogram = Histogram(SECONDS)
    for one in seconds:
        histogram.observe(one)
    return histogram.snapshot()


def stats(worker_id: str = "w0", **changes: Any) -> WorkerStats:
    found = WorkerStats(
        *(worker_id, "life-1", "host:1", "cpu", 100_000, 60_000, 30_000, 3, (POOL,)),
        *(70, {"pop": 40}, {"out_of_pages": 0}, 500, 0, 0, 0, 0),
        attention_seconds=durations(0.001, 0.001),
    )
    return replace(found, **changes)


def reading(at: float, *found: WorkerStats, **states: str) -> Reading:
    members = [Member(s.worker_id, states.get(s.worker_id, "alive"), "host:1", 3) for s in found]
    return Reading(at, members, found)


def names(board: Board) -> set[tuple[str, str]]:
    return {(alert.name, alert.worker_id) for alert in board.alerts}


def test_rates_are_of_the_time_between_readings() -> None:
    """Tokens and layers per second; the slowest percent of what came meanwhile."""
    later = stats(appended_tokens=560, attention_seconds=durations(0.001, 0.001, 0.08, 0.08))
    board = make_board(reading(12.0, later), reading(10.0, stats()))
    [row] = board.rows
    assert row.tokens_per_s == 30.0
    assert row.layers_per_s == 1.0
    assert row.p99_s == pytest.approx(0.1, abs=0.01)
    assert (row.used_bytes, row.reserved_bytes, row.budget_bytes) == (30_000, 20_000, 100_000)
    assert board.alerts == []


def test_first_reading_has_no_rates() -> None:
    """Nor has one of another life: its counters began at 0."""
    [row] = make_board(reading(10.0, stats()), None).rows
    assert (row.tokens_per_s, row.layers_per_s) == (None, None)
    reborn = stats(incarnation="life-2", appended_tokens=0)
    [row] = make_board(reading(12.0, reborn), reading(10.0, stats())).rows
    assert (row.tokens_per_s, row.layers_per_s) == (None, None)


def test_total_is_of_all_workers() -> None:
    """Sums; and the slowest percent over all of them together."""
    board = make_board(reading(1.0, stats("a"), stats("b", num_sessions=4)), None)
    assert board.total.sessions == 7
    assert board.total.used_pages == 60
    assert board.total.budget_bytes == 200_000
    assert board.total.p99_s == pytest.approx(0.001, abs=0.001)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"used_bytes": 90_001}, "KVServiceArenaNearlyFull"),
        ({"allocation_failures": {"out_of_pages": 2}}, "KVServiceArenaFull"),
        ({"page_allocations": 71}, "KVServicePageLeak"),
        ({"page_discrepancies": {"missing": 1}}, "KVServicePageLeak"),
        ({"attention_seconds": durations(0.001, 0.001, 0.9)}, "KVServiceSlow"),
    ],
)
def test_alerts_hold_by_the_numbers(change: dict[str, Any], name: str) -> None:
    """Each under the name that Prometheus' rules have for it, and only that."""
    board = make_board(reading(12.0, stats(**change)), reading(10.0, stats()))
    assert names(board) == {(name, "w0")}


def test_missing_workers_are_an_alert() -> None:
    """One that is dead, and one that should be there; not one that drains."""
    two = (stats("a"), stats("b"))
    assert names(make_board(reading(1.0, *two, b="draining"), None)) == set()
    assert names(make_board(reading(1.0, *two, b="dead"), None)) == {
        ("KVServiceHeartbeatStale", "b"),
        ("KVServiceWorkerDown", ""),
    }
    assert names(make_board(reading(1.0, *two), None, expected=3)) == {("KVServiceWorkerDown", "")}


def test_worker_that_says_nothing_has_a_row() -> None:
    """It is listed, with what the manager knows of it."""
    silent = Reading(1.0, [Member("w9", "suspect", "host:9", 5)], ())
    [row] = make_board(silent, None).rows
    assert (row.worker_id, row.state, row.sessions, row.used_bytes) == ("w9", "suspect", 5, 0)


@pytest.mark.parametrize(
    ("used", "reserved", "parts"),
    [(0, 0, (0, 0, 10)), (1, 0, (1, 0, 9)), (500, 250, (5, 3, 2)), (1000, 0, (10, 0, 0))],
)
def test_bar_shows_what_is_there(used: int, reserved: int, parts: tuple[int, int, int]) -> None:
    """Its parts make up its width, and anything above nothing is seen."""
    board = make_board(reading(1.0, stats()), None)
    row = replace(board.rows[0], used_bytes=used, reserved_bytes=reserved, budget_bytes=1000)
    assert top.parts_of_bar(row, 10) == parts


def test_json_is_plain() -> None:
    """With names that say the unit."""
    form = json.loads(json.dumps(json_of(make_board(reading(1.0, stats()), None))))
    assert form["workers"][0]["workerId"] == "w0"
    assert {"tokensPerSecond", "layersPerSecond", "p99Seconds", "usedBytes"} <= set(form["total"])
    assert form["alerts"] == []


def test_rich_shows_every_worker_and_alert() -> None:
    """On a terminal of a hundred and twenty columns nothing is cut off."""
    from rich.console import Console

    board = make_board(reading(1.0, stats("kv-worker-0"), stats("b"), b="dead"), None)
    console = Console(width=140, record=True, file=None, force_terminal=True, quiet=False)
    with console.capture() as captured:
        console.print(top.rendered(board))
    shown = captured.get()
    for text in ("kv-worker-0", "dead", "KVServiceHeartbeatStale", "29.3KiB of 97.66KiB", "█", "░"):
        assert text in shown
