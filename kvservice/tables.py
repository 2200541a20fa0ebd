"""Tables for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return lines with aligned columns: numbers to the right, other things to the left."""
    cells = [list(headers), *([str(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(headers))]
    numeric = [
        bool(rows) and all(isinstance(row[column], int | float) for row in rows)
        for column in range(len(headers))
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    )
