"""Numbers and tables for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from kvservice.core.errors import InvalidRequest

_UNITS: Final = {
    "": 1,
    "B": 1,
    **{f"{prefix}iB": 1 << 10 * power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", start=1)},
}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """Return the bytes that a text like "2GiB", "1.5GB" or "4096" means.

    Raises:
        InvalidRequest: It means none.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        raise InvalidRequest(
            f'a size must be a number and one of {", ".join(filter(None, _UNITS))}, got "{text}"'
        )
    return int(float(match[1]) * _UNITS[match[2]])


def format_bytes(num_bytes: int) -> str:
    """Return a short form such as "1.5 GiB"; exact up to 1023 bytes."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024 or unit == "TiB":
            break
    return f"{value:.1f} {unit}"


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
