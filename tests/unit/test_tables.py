"""Numbers and tables for people."""

from __future__ import annotations

import pytest

from kvservice.core.errors import InvalidRequest
from kvservice.tables import format_bytes, parse_bytes, table


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("0B", 0),
        ("2GiB", 2 << 30),
        ("1.5 MiB", 3 << 19),
        ("512KiB", 512 << 10),
        ("3GB", 3_000_000_000),
        ("1kB", 1000),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes_are_understood(text: str, num_bytes: int) -> None:
    """Powers of two and of ten are told apart."""
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 gib", "2G", "two", "1e9", "0x10", "1 2"])
def test_other_texts_are_no_sizes(text: str) -> None:
    """What could be misread is refused, and the message names the units."""
    with pytest.raises(InvalidRequest, match="GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 19, "1.5 MiB"),
        (2 << 30, "2.0 GiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_sizes_are_shown_short(num_bytes: int, text: str) -> None:
    """One decimal in the largest unit that fits."""
    assert format_bytes(num_bytes) == text


def test_table_aligns_numbers_to_the_right() -> None:
    """Columns of numbers end at the same place, others begin there; no line ends in blanks."""
    text = table(("name", "pages", "where"), [("a", 5, "x"), ("long", 1234, "")])
    assert text.splitlines() == [
        "name  pages  where",
        "a         5  x",
        "long   1234",
    ]


def test_table_without_rows_is_its_headers() -> None:
    """An empty list still says what would be listed."""
    assert table(("worker", "state"), []) == "worker  state"
