"""What `kvservice top` and the status page show, out of what the service has said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvservice.core.distribution import EMPTY, Distribution
from kvservice.core.session import WorkerStats

NEARLY_FULL: Final = 0.9
SLOW_S: Final = 0.25
_NAMES: Final = {"tokens_per_s": "tokensPerSecond", "layers_per_s": "layersPerSecond"}


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as the manager has it. `state`: alive, suspect, dead, draining."""

    worker_id: str
    state: str
    address: str
    num_sessions: int


@dataclass(frozen=True, slots=True)
class Reading:
    """All that was said at one moment. `at`: monotonic, in seconds."""

    at: float
    members: Sequence[Member]
    stats: Sequence[WorkerStats]


@dataclass(frozen=True, slots=True)
class Row:
    """One worker. Rates are per second since the reading before; None: there was none.

    Fields:
        reserved_bytes: What promised pages take.
        p99_s: Of the compute of one layer of one step; None: nothing was computed.
    """

    worker_id: str
    state: str
    address: str
    sessions: int
    used_pages: int
    reserved_pages: int
    free_pages: int
    used_bytes: int
    reserved_bytes: int
    budget_bytes: int
    tokens_per_s: float | None
    layers_per_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert of `deploy/prometheus/rules.yml` whose condition holds now.

    `worker_id` is empty where it concerns the service.
    """

    name: str
    worker_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Board:
    """What is shown: a row for each worker, and for all of them."""

    rows: Sequence[Row]
    total: Row
    alerts: Sequence[Alert]


def make_board(now: Reading, before: Reading | None, *, expected: int = 0) -> Board:
    """Return the board of a reading, with rates since another.

    Args:
        expected: How many workers there should be; 0: unknown.
    """
    old = {} if before is None else {stats.worker_id: stats for stats in before.stats}
    seconds = 0.0 if before is None else now.at - before.at
    by_id = {stats.worker_id: stats for stats in now.stats}
    rows, seen, alerts = [], EMPTY, list(_of_members(now.members, expected))
    for member in now.members:
        stats = by_id.get(member.worker_id)
        if stats is None:
            rows.append(_silent(member))
            continue
        earlier = _same_life(old.get(member.worker_id), stats)
        attention = _recent(stats, earlier)
        seen = seen.plus(attention)
        rows.append(_row(member, stats, earlier, seconds, attention))
        alerts += _of_stats(stats, earlier, attention)
    return Board(rows, _total(rows, seen), alerts)


def json_of(board: Board) -> dict[str, Any]:
    """Return a board for scripts and browsers."""
    return {
        "workers": [_json(row) for row in board.rows],
        "total": _json(board.total),
        "alerts": [_json(alert) for alert in board.alerts],
    }


def _json(part: Row | Alert) -> dict[str, Any]:
    return {_NAMES.get(name, _camel(name)): value for name, value in asdict(part).items()}


def _camel(name: str) -> str:
    if name.endswith("_s"):
        name = name.removesuffix("_s") + "_seconds"
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _same_life(earlier: WorkerStats | None, stats: WorkerStats) -> WorkerStats | None:
    """Return the earlier numbers, if they are of the same incarnation."""
    if earlier is None or earlier.incarnation != stats.incarnation:
        return None
    return earlier


def _recent(stats: WorkerStats, earlier: WorkerStats | None) -> Distribution:
    """Return the durations since the reading before; where there are none, all of them."""
    if earlier is None:
        return stats.attention_seconds
    since = stats.attention_seconds.since(earlier.attention_seconds)
    return since if since.num_values else stats.attention_seconds


def _row(
    member: Member,
    stats: WorkerStats,
    earlier: WorkerStats | None,
    seconds: float,
    attention: Distribution,
) -> Row:
    tokens = layers = None
    if earlier is not None and seconds > 0:
        tokens = (stats.appended_tokens - earlier.appended_tokens) / seconds
        calls = stats.attention_seconds.num_values - earlier.attention_seconds.num_values
        layers = calls / seconds
    return Row(
        worker_id=member.worker_id,
        state=member.state,
        address=member.address,
        sessions=stats.num_sessions,
        used_pages=sum(pool.used_pages for pool in stats.pools),
        reserved_pages=sum(pool.reserved_pages for pool in stats.pools),
        free_pages=sum(pool.free_pages for pool in stats.pools),
        used_bytes=stats.used_bytes,
        reserved_bytes=sum(pool.reserved_pages * pool.page_bytes for pool in stats.pools),
        budget_bytes=stats.budget_bytes,
        tokens_per_s=tokens,
        layers_per_s=layers,
        p99_s=attention.quantile(0.99),
    )


def _silent(member: Member) -> Row:
    return Row(
        *(member.worker_id, member.state, member.address, member.num_sessions),
        *(0, 0, 0, 0, 0, 0),
        *(None, None, None),
    )


def _total(rows: Sequence[Row], attention: Distribution) -> Row:
    def summed(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    return Row(
        worker_id="all",
        state="",
        address="",
        sessions=sum(row.sessions for row in rows),
        used_pages=sum(row.used_pages for row in rows),
        reserved_pages=sum(row.reserved_pages for row in rows),
        free_pages=sum(row.free_pages for row in rows),
        used_bytes=sum(row.used_bytes for row in rows),
        reserved_bytes=sum(row.reserved_bytes for row in rows),
        budget_bytes=sum(row.budget_bytes for row in rows),
        tokens_per_s=summed([row.tokens_per_s for row in rows]),
        layers_per_s=summed([row.layers_per_s for row in rows]),
        p99_s=attention.quantile(0.99),
    )


def _of_members(members: Sequence[Member], expected: int) -> list[Alert]:
    found = [
        Alert("KVServiceHeartbeatStale", member.worker_id, f"is {member.state}")
        for member in members
        if member.state in ("suspect", "dead")
    ]
    there = sum(member.state in ("alive", "draining") for member in members)
    wanted = expected or len(members)
    if there < wanted:
        found.append(Alert("KVServiceWorkerDown", "", f"{there} of {wanted} workers can be had"))
    return found


def _of_stats(
    stats: WorkerStats, earlier: WorkerStats | None, attention: Distribution
) -> list[Alert]:
    found = []

    def alert(name: str, text: str) -> None:
        found.append(Alert(name, stats.worker_id, text))

    if stats.used_bytes > NEARLY_FULL * stats.budget_bytes:
        alert("KVServiceArenaNearlyFull", f"{stats.used_bytes / stats.budget_bytes:.0%} is used")
    if earlier is not None:
        refused = _out_of_pages(stats) - _out_of_pages(earlier)
        if refused > 0:
            alert("KVServiceArenaFull", f"{refused} calls were refused for lack of pages")
    leaked = stats.page_allocations - sum(stats.page_frees.values())
    leaked -= sum(pool.used_pages for pool in stats.pools)
    if leaked or any(stats.page_discrepancies.values()):
        alert("KVServicePageLeak", "its page accounts do not add up")
    p99 = attention.quantile(0.99)
    if p99 is not None and p99 > SLOW_S:
        alert("KVServiceSlow", f"99 % of layers take up to {p99:.2g} s")
    return found


def _out_of_pages(stats: WorkerStats) -> int:
    return stats.allocation_failures.get("out_of_pages", 0)
