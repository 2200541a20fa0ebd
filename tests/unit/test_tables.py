"""Tables for people."""

from __future__ import annotations

from kvservice.tables import table


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
