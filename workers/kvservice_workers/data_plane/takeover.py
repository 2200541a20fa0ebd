"""Taking one session over from another worker, page by page, while it is used there."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvservice.clock import Clock
from kvservice.core.errors import (
    Conflict,
    DeadlineExceeded,
    SessionNotFound,
    StaleWorker,
    Unavailable,
)
from kvservice.core.failpoints import Failpoints
from kvservice.core.moving import SessionState
from kvservice.core.session import SessionInfo
from kvservice_workers.arrival import Arrival
from kvservice_workers.arriving_pages import Missing
from kvservice_workers.data_plane.peer import Source, lost
from kvservice_workers.data_plane.pull import Pull
from kvservice_workers.worker import PageWorker

MAX_ROUNDS: Final = 32
MAX_FREEZES: Final = 8


@dataclass(frozen=True, slots=True)
class Pace:
    """How much is fetched at once, and how little while a session waits.

    Fields:
        batch_bytes: What is fetched at once: while it is read, the session waits.
        few_bytes, soon_s: If no more is missing, or it will not take longer to fetch as far as
            can be told, the session may be frozen for it. At least the last page of each row
            is missing while somebody decodes, and pages may be large.
    """

    batch_bytes: int
    few_bytes: int
    soon_s: float


class Takeover:
    """Copies rounds of pages until few are missing, lets the session be frozen, fetches those, and
    then asks for the session. From that request on nobody but the other worker knows whose it is,
    until it has answered: nothing is served, and nothing given up, unless it is known to be dead.
    """

    def __init__(
        self,
        worker: PageWorker,
        pull: Pull,
        source: Source,
        pace: Pace,
        *,
        clock: Clock,
        stop: threading.Event,
        failpoints: Failpoints,
    ) -> None:
        """
        Args:
            stop: This worker is about to end.
        """
        self._worker = worker
        self._arrivals, self._pages = worker.arrivals, worker.arriving_pages
        self._pull = pull
        self._source = source
        self._pace = pace
        self._clock = clock
        self._stop = stop
        self._passed = failpoints.passed

    def run(self) -> SessionInfo:
        """Take the session over; return it as it is here.

        Raises:
            KVServiceError: It stays where it was, or is lost; see `_is_ours`. Nothing is kept.
        """
        worker, pull, source, arrivals = self._worker, self._pull, self._source, self._arrivals
        state = source.state()
        self._check_the_same_part(state)
        arrival = arrivals.begin(
            *pull.key, state, pull.request.source_incarnation, keeps=pull.request.keep
        )
        try:
            self._copy(arrival, state)
            for _ in range(MAX_FREEZES):
                frozen_at = self._clock.monotonic()
                state = source.state(freeze=True)
                missing = self._pages.sync(arrival, state)
                if not self._are_few(missing):
                    self._copy(arrival, source.state())
                    continue
                self._fetch(arrival, missing)
                arrivals.complete(arrival, state, source.ticket)
                self._passed("move.complete")
                if self._is_ours(arrival):
                    self._worker.note_handover(self._clock.monotonic() - frozen_at)
                    self._passed("move.arrived")
                    return worker.access.get(*pull.key, renew=False)
                arrivals.reopen(arrival)
            raise Conflict("the session could not be handed over in time")
        finally:
            arrivals.drop(arrival)  # unless it is here

    # -- inside

    def _check_the_same_part(self, state: SessionState) -> None:
        """Refuse a part of a session of which another part has left from here.

        Its holder may not know yet, and would take this part for that one.
        """
        tenant, session_id = self._pull.key
        has_left = self._worker.departures.moved_among(tenant, [session_id])
        if has_left and self._worker.config.incarnation not in state.replaces:
            raise Conflict(
                "another part of the session has left from here, and is still looked for"
            )

    def _copy(self, arrival: Arrival, state: SessionState) -> None:
        """Copy pages in rounds until few are missing.

        Raises:
            Conflict: The session changes faster than it can be copied.
        """
        for _ in range(MAX_ROUNDS):
            missing = self._pages.sync(arrival, state)
            if self._are_few(missing):
                return
            self._fetch(arrival, missing)
            self._passed("move.copied")
            state = self._source.state()
        raise Conflict("the session changes faster than it can be copied", retry_delay_s=5.0)

    def _are_few(self, missing: Sequence[Missing]) -> bool:
        """Whether what is missing can be fetched while the session waits."""
        num_bytes = sum(one.num_bytes for one in missing)
        takes_s = num_bytes * self._pull.copying_s / max(1, self._pull.copied_bytes)
        return num_bytes <= self._pace.few_bytes or (0 < takes_s <= self._pace.soon_s)

    def _fetch(self, arrival: Arrival, missing: Sequence[Missing]) -> None:
        pull, batch_bytes = self._pull, self._pace.batch_bytes
        for one in missing:
            for pages in _batches(one, batch_bytes):
                oldest = [-1] * len(pages)
                began = self._clock.monotonic()
                for layers in _layers_at_once(one, len(pages), batch_bytes):
                    copied = self._source.pages(one.window, layers, pages)
                    self._pages.store(arrival, one, pages, copied)
                    pull.copied_bytes += copied.num_bytes
                    oldest = [
                        at if before < 0 else min(at, before)
                        for at, before in zip(copied.written, oldest, strict=True)
                    ]
                pull.copying_s += self._clock.monotonic() - began
                self._pages.stored(arrival, one, pages, [max(0, at) for at in oldest])

    def _is_ours(self, arrival: Arrival) -> bool:
        """Ask for a session until it is known whose it is. False: it goes on where it was.

        Raises:
            PagesLost: The other worker is dead: what it had not handed over is lost with it.
            SessionNotFound: It was released, or has expired.
        """
        while True:
            try:
                self._source.hand_over()
            except StaleWorker:
                raise lost() from None
            except SessionNotFound:
                raise
            except (Unavailable, DeadlineExceeded) as error:
                if arrival.here:
                    return True
                if arrival.gone:
                    raise SessionNotFound("the session was released, or has expired") from None
                if self._pull.source_is_dead or self._stop.is_set():
                    raise lost() from error
                self._clock.wait(self._stop, 0.05)
            except Conflict:
                return arrival.here
            else:
                if not self._arrivals.arrive(arrival):
                    raise SessionNotFound("the session was released, or has expired")
                return True


def _batches(missing: Missing, batch_bytes: int) -> Iterator[tuple[int, ...]]:
    """Yield pages to be fetched at once."""
    size = max(1, batch_bytes // max(1, missing.page_bytes))
    for start in range(0, len(missing.pages), size):
        yield missing.pages[start : start + size]


def _layers_at_once(
    missing: Missing, num_pages: int, batch_bytes: int
) -> Iterator[tuple[int, ...]]:
    """Yield layers to be fetched at once: all, unless one page of them is too much."""
    layers = missing.layers
    each = max(1, missing.page_bytes * num_pages // max(1, len(layers)))
    size = max(1, batch_bytes // each)
    for start in range(0, len(layers), size):
        yield layers[start : start + size]
