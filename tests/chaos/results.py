"""The table of faults: what was lost, and how long recovery took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One fault.

    Fields:
        promises: Which of the promises it shows.
        recovery_s: Seconds until all was well again; None: nothing had to recover.
        bound_s: What they may be at most.
        num_checked: Answers that were compared with an oracle: as many were right.
        leaked_pages: Pages that were left when all had ended.
    """

    promises: str
    fault: str
    lost: str
    recovery_s: float | None
    bound_s: float | None
    num_checked: int
    leaked_pages: int = 0


HEADER = (
    "promise",
    "fault",
    "what was lost",
    "recovered in",
    "bound",
    "answers checked",
    "wrong",
    "leaked pages",
)


def as_table(rows: list[Row]) -> list[str]:
    """Return a table in Markdown, aligned for those who read it as text."""
    cells = [HEADER, *(_cells(row) for row in sorted(rows, key=_order))]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADER))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return [lines[0], rule, *lines[1:]]


def _order(row: Row) -> tuple[int, str]:
    return int(row.promises.split(",")[0].strip("P")), row.fault


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.promises,
        row.fault,
        row.lost,
        "-" if row.recovery_s is None else f"{row.recovery_s:.2f} s",
        "-" if row.bound_s is None else f"{row.bound_s:g} s",
        str(row.num_checked),
        "0",  # a wrong one fails its test, which then has no row
        str(row.leaked_pages),
    )
