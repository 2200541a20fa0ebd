"""What stands behind a PagedCache: its session, the pass in progress, what windows let go of."""

from __future__ import annotations

import contextlib
from typing import Final

from kvservice.core.errors import (
    Conflict,
    InvalidRequest,
    KVServiceError,
    PagesLost,
    SessionNotFound,
)
from kvservice.core.geometry import cdiv
from kvservice_client._ask import Lengths
from kvservice_client._client import Client
from kvservice_client._outcomes import OUTCOME_UNKNOWN
from kvservice_client._session import Session

_FIRST_ARENA_PAGES: Final = 32


class PagedState:
    """A session opened for a cache, and what it does not know itself.

    Lengths are the session's, and layer 0's are the cache's.

    Attributes:
        session: None before the first call, and after `release`.
        materialized: Layers without a window that were called.
        pages_materialized: See `PageStats`.
    """

    def __init__(
        self,
        client: Client,
        *,
        windows: tuple[int | None, ...],
        max_seq_len: int,
        page_size: int,
        rollback: int,
        replicas: int,
    ) -> None:
        self._client = client
        self._replicas = replicas
        self._windows = windows
        self._least_window = min((one for one in windows if one is not None), default=None)
        self._max_seq_len = max_seq_len
        self._page_size = page_size
        self._rollback = rollback
        self.session: Session | None = None
        self.materialized: set[int] = set()
        self.pages_materialized = 0
        # Where the last pass began, or what is left of that; and whether it can go on.
        self._pass_start: Lengths = ()
        self._in_pass = False
        # The greatest length that each row had before it was cut.
        self._peak: Lengths = ()
        # A cut that comes before anything else; until then lengths are told as if it were made.
        self._cut_to: Lengths | None = None
        self._begin()

    # -- what is known without asking

    @property
    def num_rows(self) -> int:
        """Rows of the session; 1 before there is one."""
        return 1 if self.session is None else self.session.num_rows

    @property
    def num_pages(self) -> int:
        """The pages that all rows together may use."""
        return self.num_rows * cdiv(self._max_seq_len, self._page_size)

    def stored(self, layer: int, num_rows: int | None = None) -> Lengths:
        """Return a layer's lengths.

        Args:
            num_rows: What a call brings; if the session has another number, nothing is stored.
        """
        session = self.session
        if session is None or num_rows not in (None, session.num_rows):
            return (0,) * (num_rows or 1)
        lengths = session.lengths(layer)
        return lengths if self._cut_to is None else tuple(map(min, lengths, self._cut_to))

    def any_stored(self) -> bool:
        return any(any(self.stored(layer)) for layer in range(len(self._windows)))

    def pages_of(self, lengths: Lengths) -> int:
        """Return the pages of rows of these lengths."""
        return sum(cdiv(length, self._page_size) for length in lengths)

    def find_pass(self) -> Lengths | None:
        """Return where the current pass has begun; None if layer 0 has to begin one."""
        return self._pass_start if self._in_pass else None

    def has_evicted(self, keep: Lengths) -> bool:
        """Return whether, after a cut to `keep`, a query would see what a window has evicted.

        Said of the windows, not of what the service really holds, which may be more.
        """
        if self._least_window is None:
            return False
        # A window keeps what a query at `oldest`, or one after it, can see.
        oldest = [length - self._rollback for length in self._peak_with(self.stored(0))]
        return any(
            self._least_window - 1 < position and length < position
            for position, length in zip(oldest, keep, strict=True)
        )

    # -- the session

    def opened(self, num_rows: int) -> Session:
        """Return the session; a new one before the first pass, and for another number of rows."""
        if self.session is None or self.session.num_rows != num_rows:
            self.release()
            self.session = self._client.open(
                num_rows=num_rows,
                windows=self._windows,
                page_size=self._page_size,
                max_tokens=self._max_seq_len,
                replicas=self._replicas,
            )
            self.session.retain = self._rollback
            self._begin()
        return self.session

    def release(self) -> None:
        session, self.session = self.session, None
        self._begin()
        if session is not None:
            session.release()

    # -- passes

    def note(self, layer: int, first: Lengths, after: Lengths) -> None:
        """Take over what a call of a layer has done.

        Args:
            first, after: Per row: where its tokens begin and end.
        """
        if layer == 0:
            self._pass_start, self._in_pass = first, True
        if self._windows[layer] is None:
            self.materialized.add(layer)
            used = self.pages_of(after)
            if used > self.pages_materialized:
                grown = max(2 * self.pages_materialized, used)
                self.pages_materialized = min(self.num_pages, grown)

    def void(self, start: Lengths, error: BaseException) -> None:
        """Drop the tokens of a pass in which a call has failed, unless the call was refused.

        Args:
            start: Per row: where the pass began.
        """
        if isinstance(error, (InvalidRequest, Conflict)):
            return
        if isinstance(error, KVServiceError):
            self._cut_to = start
            with contextlib.suppress(KVServiceError):
                self.settle()
        elif not isinstance(error, Exception):
            self._cut_to = start  # interrupted, so this is not the time for another call

    def roll_back(self) -> Lengths:
        """Drop what an unfinished pass has appended, and what went with a worker.

        Returns:
            Per row: the length that is left.
        """
        try:
            self.settle()
            lengths = self.stored(0)
            if any(self.stored(layer) != lengths for layer in range(len(self._windows))):
                self._cut(self._pass_start, self._peak)
        except PagesLost:
            assert self.session is not None, "nothing can be lost"
            peak = self._peak_with(self.stored(0))
            left = self.session.roll_back()
            self._cut(tuple(map(min, left, self._cut_to or left)), peak)
        return self.stored(0)

    # -- cuts

    def cut(self, keep: Lengths) -> None:
        """Cut all layers to at most `keep`. If its outcome is unknown, `settle` repeats it."""
        self._cut(keep, self._peak_with(self.stored(0)))

    def settle(self) -> None:
        """Make a cut that is due."""
        if self._cut_to is not None:
            self._cut(self._cut_to, self._peak)

    def reset(self) -> None:
        """Drop all tokens. Keep the session, if it still exists."""
        session = self.session
        if session is None:
            return
        empty = (0,) * session.num_rows
        try:
            if self._cut_to is not None or self.any_stored():
                session.reset()
        except SessionNotFound:
            self.session = None
            self._begin()
        except OUTCOME_UNKNOWN:
            self._now_at(empty, peak=empty)
            self._cut_to = empty
            raise
        else:
            self._now_at(empty, peak=empty)

    def _cut(self, keep: Lengths, peak: Lengths) -> None:
        session = self.session
        assert session is not None, "there is nothing to cut"
        try:
            session.pop(keep=keep)
        except OUTCOME_UNKNOWN:
            self._now_at(keep, peak=peak)
            self._cut_to = keep
            raise
        self._now_at(keep, peak=peak)

    def _now_at(self, lengths: Lengths, *, peak: Lengths) -> None:
        """Take over what a cut has done."""
        self._cut_to, self._peak = None, peak
        self._pass_start, self._in_pass = tuple(map(min, self._pass_start, lengths)), False

    def _begin(self) -> None:
        """Start anew, with what a session begins with."""
        self._pass_start = empty = (0,) * self.num_rows
        self._now_at(empty, peak=empty)
        self.materialized = set()
        self.pages_materialized = min(self.num_pages, _FIRST_ARENA_PAGES)

    def _peak_with(self, lengths: Lengths) -> Lengths:
        return tuple(map(max, self._peak, lengths))
