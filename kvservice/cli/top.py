"""`kvservice top`: the service at a glance, again and again."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

from kvservice.cli.exits import OK, Interrupted
from kvservice.cli.showing import connect_to
from kvservice.clock import Clock, SystemClock
from kvservice.config import format_size
from kvservice.core.board import Alert, Board, Member, Reading, Row, json_of, make_board
from kvservice.core.errors import InvalidRequest, KVServiceError, NotFound
from kvservice.tables import table
from kvservice.wire.json_form import json_form
from kvservice_client import Client

MIN_INTERVAL_S: Final = 0.1
_BAR_WIDTH: Final = 24


def top(arguments: argparse.Namespace) -> int:
    """Show workers, pages, sessions, speed and alerts until a signal; with `--once`, once."""
    if arguments.interval < MIN_INTERVAL_S:
        raise InvalidRequest(f"--interval must be at least {MIN_INTERVAL_S} s")
    live = not arguments.once and not arguments.json and sys.stdout.isatty()
    with connect_to(arguments) as client:
        boards = _boards(client, arguments, SystemClock())
        if arguments.json:
            _print_json(boards, once=arguments.once)
        elif live:
            _show_live(boards)
        else:
            print(_plain(next(boards)))
    return OK


def read(client: Client, clock: Clock) -> Reading:
    """Ask a service for what a board needs."""
    members = []
    for info in client.list_workers():
        form = json_form(info)
        state = form["state"].removeprefix("WORKER_STATE_").lower()
        members.append(Member(info.worker_id, state, info.address, info.session_count))
    return Reading(clock.monotonic(), members, client.page_stats())


def _boards(client: Client, arguments: argparse.Namespace, clock: Clock) -> Iterator[Board]:
    """Yield a board after each interval. What goes wrong ends it only at the first."""
    never = threading.Event()
    before = read(client, clock)
    while True:
        clock.wait(never, arguments.interval)
        try:
            now, expected = read(client, clock), client.workers_expected()
        except KVServiceError as error:
            alert = Alert("KVServiceManagerDown", "", error.message)
            yield dataclasses.replace(make_board(before, None), alerts=(alert,))
            continue
        yield make_board(now, before, expected=expected)
        before = now


def _print_json(boards: Iterator[Board], *, once: bool) -> None:
    """Print a JSON object for each board, a line each."""
    with contextlib.suppress(Interrupted):
        for board in boards:
            print(json.dumps(json_of(board)), flush=True)
            if once:
                return


_HEADERS: Final = (
    *("worker", "state", "sessions", "pages", "used", "reserved"),
    *("of budget", "tokens/s", "layers/s", "p99/layer"),
)


def _cells(row: Row, bar: str) -> tuple[str, ...]:
    return (
        row.worker_id,
        row.state,
        str(row.sessions),
        bar,
        str(row.used_pages),
        str(row.reserved_pages),
        f"{format_size(row.used_bytes)} of {format_size(row.budget_bytes)}",
        "-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
        "-" if row.layers_per_s is None else f"{row.layers_per_s:,.0f}",
        "-" if row.p99_s is None else f"{row.p99_s * 1000:.3g} ms",
    )


def parts_of_bar(row: Row, width: int = _BAR_WIDTH) -> tuple[int, int, int]:
    """Return how many of `width` characters are used, reserved, and the rest of the budget.

    What is there is seen: anything above nothing has a character.
    """
    if not row.budget_bytes:
        return 0, 0, width
    used = min(width, -(-row.used_bytes * width // row.budget_bytes))
    reserved = min(width - used, -(-row.reserved_bytes * width // row.budget_bytes))
    return used, reserved, width - used - reserved


def _plain(board: Board) -> str:
    def bar(row: Row) -> str:
        used, reserved, rest = parts_of_bar(row)
        return f"[{'#' * used}{'+' * reserved}{'.' * rest}]"

    lines = [table(_HEADERS, [_cells(row, bar(row)) for row in (*board.rows, board.total)])]
    lines += [f"{alert.name}: {_said(alert)}" for alert in board.alerts] or ["no alerts"]
    return "\n".join(lines)


def _said(alert: Alert) -> str:
    return f"{alert.worker_id}: {alert.text}" if alert.worker_id else alert.text


def _show_live(boards: Iterator[Board]) -> None:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise NotFound(
            f"a live view needs the package {error.name}: pip install 'kvservice[server]'; "
            "--once and --json do without"
        ) from error
    console = Console()
    with (
        contextlib.suppress(Interrupted),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        for board in boards:
            live.update(rendered(board), refresh=True)


def rendered(board: Board) -> Any:
    """Return a board as rich shows it."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    shown = Table(expand=True, box=None, header_style="bold")
    for header in _HEADERS:
        right = header in ("sessions", "used", "reserved", "tokens/s", "layers/s", "p99/layer")
        shown.add_column(header, justify="right" if right else "left", no_wrap=True)
    for row in (*board.rows, board.total):
        used, reserved, rest = parts_of_bar(row)
        bar = Text.assemble(("█" * used, "green"), ("█" * reserved, "yellow"), ("░" * rest, "dim"))
        name, state, *others = _cells(row, "")
        style = {"alive": "green", "draining": "yellow"}.get(state, "red" if state else "")
        numbers: list[Any] = list(others)
        numbers[1] = bar
        shown.add_row(Text(name, "bold"), Text(state, style), *numbers)
    alerts: Any = Text("no alerts", "green")
    if board.alerts:
        lines = [(f"{alert.name}  ", "bold red") for alert in board.alerts]
        parts = [
            part
            for head, alert in zip(lines, board.alerts, strict=True)
            for part in (head, f"{_said(alert)}\n")
        ]
        alerts = Text.assemble(*parts)
    key = Text("used ", "dim") + Text("█", "green") + Text("  reserved ", "dim")
    key += Text("█", "yellow") + Text("  rest of the budget ░   Ctrl-C ends", "dim")
    return Group(Panel(shown, title="kvservice"), Panel(alerts, title="alerts"), key)
