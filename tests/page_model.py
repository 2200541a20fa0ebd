"""A worker's page accounts as a model: pages are objects, and tables are lists of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

PAGE_SIZE = 16


@dataclass(eq=False)
class Page:
    """One page, and how many tables list it."""

    owners: int = 1


@dataclass
class Row:
    """One sequence: its length, and its pages; None where a page was evicted."""

    length: int = 0
    pages: list[Page | None] = field(default_factory=list)

    def shared(self, length: int) -> Row:
        pages = self.pages[: -(-length // PAGE_SIZE)]
        for page in pages:
            if page is not None:
                page.owners += 1
        return Row(length, list(pages))


class PageModel:
    """What a worker must report of sessions whose layers share one window."""

    def __init__(self, *, num_layers: int, token_bytes: int) -> None:
        self.num_layers = num_layers
        self.token_bytes = token_bytes  # k and v of one layer
        self.sessions: dict[str, list[Row]] = {}
        self.allocations = 0
        self.frees: Counter[str] = Counter()
        self.replays: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.stale_epochs = 0
        self.appended_tokens = self.popped_tokens = 0
        self.appended_bytes = self.read_bytes = 0
        self.attention_rows: list[int] = []  # of each call
        self.ended_pages: list[int] = []  # of each session that has ended
        self.expirations = 0

    # What the worker is asked to do

    def open(self, session_id: str, num_rows: int) -> None:
        self.sessions[session_id] = [Row() for _ in range(num_rows)]

    def append(self, session_id: str, count: int) -> None:
        """`count` tokens of each row, in all layers."""
        rows = self.sessions[session_id]
        for row in rows:
            if row.length % PAGE_SIZE and (last := row.pages[-1]) is not None and last.owners > 1:
                last.owners -= 1
                row.pages[-1] = self._take()
            row.length += count
            while len(row.pages) * PAGE_SIZE < row.length:
                row.pages.append(self._take())
        self.appended_tokens += count * len(rows)
        self.appended_bytes += count * len(rows) * self.token_bytes * self.num_layers
        self.attended(session_id, self.num_layers)

    def attended(self, session_id: str, num_calls: int) -> None:
        self.attention_rows += [len(self.sessions[session_id])] * num_calls

    def pop(self, session_id: str, keep: int) -> None:
        rows = self.sessions[session_id]
        self.popped_tokens += sum(max(0, row.length - keep) for row in rows)
        self._cut(rows, keep, "pop")

    def reset(self, session_id: str) -> None:
        self._cut(self.sessions[session_id], 0, "reset")

    def select(self, session_id: str, indices: list[int]) -> None:
        old = self.sessions[session_id]
        self.sessions[session_id] = [old[index].shared(old[index].length) for index in indices]
        self._cut(old, 0, "select")

    def fork(self, session_id: str, child_id: str, token_count: int) -> None:
        self.sessions[child_id] = [row.shared(token_count) for row in self.sessions[session_id]]

    def evict(self, session_id: str, before: int) -> None:
        for row in self.sessions[session_id]:
            for index in range(before // PAGE_SIZE):
                page, row.pages[index] = row.pages[index], None
                self._drop(page, "evict")

    def read(self, session_id: str, count: int) -> None:
        self.read_bytes += count * len(self.sessions[session_id]) * self.token_bytes

    def end(self, session_id: str, reason: str) -> None:
        rows = self.sessions.pop(session_id)
        self.ended_pages.append(sum(page is not None for row in rows for page in row.pages))
        self.expirations += reason == "lease_expired"
        self._cut(rows, 0, reason)

    # What it must say then

    @property
    def used(self) -> int:
        tables = [row.pages for rows in self.sessions.values() for row in rows]
        return len({id(page) for pages in tables for page in pages if page is not None})

    @property
    def held(self) -> int:
        """Pages in tables; a shared one counts for each."""
        tables = [row.pages for rows in self.sessions.values() for row in rows]
        return sum(page is not None for pages in tables for page in pages)

    @property
    def tokens(self) -> int:
        """Tokens in pages; one in a shared page counts for each row."""
        total = 0
        for row in (row for rows in self.sessions.values() for row in rows):
            total += sum(page is not None for page in row.pages) * PAGE_SIZE
            if row.pages and row.pages[-1] is not None:
                total -= -row.length % PAGE_SIZE
        return total

    def _take(self) -> Page:
        self.allocations += 1
        return Page()

    def _drop(self, page: Page | None, reason: str) -> None:
        if page is not None:
            page.owners -= 1
            self.frees[reason] += page.owners == 0

    def _cut(self, rows: list[Row], keep: int, reason: str) -> None:
        for row in rows:
            row.length = min(row.length, keep)
            while len(row.pages) > -(-row.length // PAGE_SIZE):
                self._drop(row.pages.pop(), reason)
