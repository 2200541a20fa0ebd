"""The page ids of one geometry on one worker: free list, reference counts, promised room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvservice.core.errors import OutOfPages


class PagePool:
    """Page ids from 0 to `total - 1`. Integers only: it never touches a tensor.

    A page is *used* while something holds a reference to it. Room can be promised without naming
    pages: others get a page only while more are unused than promised. So the three states always
    sum to the total: used, reserved (promised) and free (the rest).

    Invariants (asserted by `check`):
      1. `0 <= num_reserved` and `num_used + num_reserved <= total`.
      2. A page is in the free list exactly if its reference count is 0, and is there once.
    """

    def __init__(
        self,
        page_size: int,
        total: int = 0,
        *,
        on_unused: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """
        Args:
            on_unused: Told of pages that have become unused, before anybody can take them.
        """
        self.page_size = page_size
        self._on_unused = on_unused
        self._refcounts: list[int] = []
        self._unused: list[int] = []
        self._num_reserved = 0
        self.grow(total)

    @property
    def total(self) -> int:
        return len(self._refcounts)

    @property
    def num_used(self) -> int:
        return len(self._refcounts) - len(self._unused)

    @property
    def num_reserved(self) -> int:
        return self._num_reserved

    @property
    def num_free(self) -> int:
        return len(self._unused) - self._num_reserved

    def refcount(self, page: int) -> int:
        return self._refcounts[page]

    def refcounts(self) -> Sequence[int]:
        """Return all pages' reference counts, in order; to be read only."""
        return self._refcounts

    def is_shared(self, page: int) -> bool:
        """Whether more than one table holds the page, so that a write must copy it first."""
        return self._refcounts[page] > 1

    def grow(self, num_pages: int) -> None:
        """Add free pages. Their ids follow the existing ones."""
        first = len(self._refcounts)
        self._refcounts.extend([0] * num_pages)
        # Taken from the end, so the lowest new id goes first.
        self._unused[:0] = range(first + num_pages - 1, first - 1, -1)

    def shortage(self, num_pages: int, *, promise_change: int = 0) -> int:
        """Return how many pages are missing to take `num_pages` (less than 0: to give back) while
        the sum of all promises changes by `promise_change`; 0 if none."""
        return max(0, num_pages + promise_change - self.num_free)

    def take(self, num_pages: int, *, promise_change: int = 0) -> list[int]:
        """Take unused pages, each with one reference, and change the sum of promises with it.

        Whoever takes pages that were promised to it lowers its promise in the same call.

        Raises:
            OutOfPages: Others' promises would no longer hold. Nothing has changed.
        """
        if missing := self.shortage(num_pages, promise_change=promise_change):
            raise OutOfPages(
                f"{num_pages} pages needed, {missing} too many: {self.num_free} of {self.total} "
                "are free",
                retry_delay_s=1.0,
                needed=num_pages,
                free=self.num_free,
            )
        assert self._num_reserved + promise_change >= 0, "more promised room given up than held"
        self._num_reserved += promise_change
        keep = len(self._unused) - num_pages
        pages = self._unused[keep:][::-1]
        del self._unused[keep:]
        for page in pages:
            self._refcounts[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add one reference to each page, all of which are used."""
        counts = self._refcounts
        for page in pages:
            count = counts[page]
            assert count > 0, f"page {page} is not used"
            counts[page] = count + 1

    def release(self, pages: Sequence[int]) -> int:
        """Drop one reference to each page; return how many became unused."""
        freed, counts = [], self._refcounts
        for page in reversed(pages):
            count = counts[page]
            assert count > 0, f"page {page} is not used"
            counts[page] = count - 1
            if count == 1:
                freed.append(page)
        if freed and self._on_unused is not None:
            self._on_unused(freed)
        self._unused += freed
        return len(freed)

    def clear(self) -> None:
        """Forget all pages, none of which is used or promised."""
        assert self.num_free == self.total, "pages are used or promised"
        self._refcounts.clear()
        self._unused.clear()

    def check(self) -> None:
        assert self._num_reserved >= 0, "negative promise"
        assert self.num_free >= 0, "promised more than there is"
        unused = set(self._unused)
        assert len(unused) == len(self._unused), "a page is twice in the free list"
        assert unused == {page for page, count in enumerate(self._refcounts) if count == 0}
