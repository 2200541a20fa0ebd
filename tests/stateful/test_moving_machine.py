"""Sessions that are copied from worker to worker while they change, against plain lists.

What is fetched is fetched piece by piece, with any changes between two pieces. Pages hold NaN where
they are taken, so that one that was not fetched, or not again, is seen at once.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvservice.core.errors import CapacityError, Conflict, Moving, SessionMoved, SessionNotFound
from kvservice.core.moving import MovedTo, SessionState
from kvservice.core.session import WriteCall
from kvservice_workers.arrival import Arrival
from kvservice_workers.arriving_pages import Missing
from kvservice_workers.worker import PageWorker, WorkerConfig
from tests.stateful.test_worker_machine import (
    NUM_PAGES,
    PAGE_BYTES,
    Model,
    WorkerMachine,
    tensor,
)


class RoutedPart:
    """A part of two workers as one."""

    def __init__(self, router: Router, part: str) -> None:
        self.router = router
        self.part = part

    def __getattr__(self, name: str) -> Any:
        def call(tenant: str, about: Any, *values: Any, **options: Any) -> Any:
            if name == "release":
                [session_id] = about
            else:
                session_id = about if isinstance(about, str) else about.session_id
            worker = self.router.home(session_id)
            if name == "fork":
                self.router.homes.setdefault(values[1], self.router.workers.index(worker))
            return getattr(getattr(worker, self.part), name)(tenant, about, *values, **options)

        return call


class Router:
    """Two workers as one: calls go to where a session is."""

    def __init__(self, workers: list[PageWorker]) -> None:
        self.workers = workers
        self.homes: dict[str, int] = {}

    def home(self, session_id: str) -> PageWorker:
        return self.workers[self.homes.setdefault(session_id, len(self.homes) % 2)]

    def __getattr__(self, part: str) -> Any:
        return RoutedPart(self, part)

    def stats(self) -> Any:
        both = [worker.stats() for worker in self.workers]
        frees = {
            reason: sum(one.page_frees[reason] for one in both) for reason in both[0].page_frees
        }
        return SimpleNamespace(
            pools=[pool for one in both for pool in one.pools],
            arena_bytes=sum(one.arena_bytes for one in both),
            page_allocations=sum(one.page_allocations for one in both),
            page_frees=frees,
        )

    def check(self) -> None:
        for worker in self.workers:
            worker.check()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


class MovingMachine(WorkerMachine):
    """The machine of one worker, on two, between which sessions move."""

    def __init__(self) -> None:
        super().__init__()
        budget = NUM_PAGES * PAGE_BYTES
        self.workers = [
            PageWorker(WorkerConfig(f"w{i}", f"life{i}", budget_bytes=budget), clock=self.clock)
            for i in range(2)
        ]
        self.worker = Router(self.workers)  # type: ignore[assignment]
        self.copied: Model | None = None
        self.arrival: Arrival | None = None
        self.number = 0

    # -- by hand, what a `Puller` does

    @property
    def source(self) -> PageWorker:
        assert self.copied is not None
        return self.worker.home(self.copied.session_id)  # type: ignore[attr-defined]

    @property
    def target(self) -> PageWorker:
        return next(worker for worker in self.workers if worker is not self.source)

    def state(self, *, freeze: bool = False) -> tuple[int, SessionState]:
        assert self.copied is not None
        self.number, ticket, state = self.source.departures.state(
            "t", self.copied.session_id, "copier", self.number, freeze=freeze
        )
        return ticket, state

    def sync(self, state: SessionState) -> list[Missing]:
        assert self.arrival is not None
        before = {
            window: {one.page for one in pages.values()}
            for window, pages in self.arrival.copied.items()
        }
        missing = self.target.arriving_pages.sync(self.arrival, state)
        for window, pages in self.arrival.copied.items():
            fresh = {one.page for one in pages.values()} - before[window]
            for arena in self.arrival.groups[window].pool.arenas.values():
                for page in fresh:
                    arena.k[page] = arena.v[page] = math.nan
        return missing

    def fetch(self, missing: Missing, pages: tuple[int, ...]) -> None:
        assert self.copied is not None
        assert self.arrival is not None
        if not pages:
            return
        copied = self.source.departures.pages(
            "t",
            self.copied.session_id,
            self.number,
            missing.window,
            missing.layers,
            pages,
        )
        self.target.arriving_pages.store(self.arrival, missing, pages, copied)
        self.target.arriving_pages.stored(self.arrival, missing, pages, copied.written)

    def is_gone(self) -> bool:
        """Whether the session has ended meanwhile; then the copy is given up."""
        if self.copied in self.models:
            return False
        if self.arrival is not None:
            self.target.arrivals.drop(self.arrival)
        self.copied = self.arrival = None
        return True

    @precondition(lambda self: self.copied is None)
    @rule(model=WorkerMachine.sessions, whole=st.booleans(), data=st.data())
    def begin(self, model: Model, whole: bool, data: st.DataObject) -> None:
        """Begin to copy a session, and fetch all that there is just now, or some."""
        if model not in self.models:
            return
        self.copied, self.number = model, 0
        _, state = self.state()
        source = self.source.config.incarnation
        self.arrival = self.target.arrivals.begin("t", model.session_id, state, source)
        self.copy_some(whole, data)

    @precondition(lambda self: self.copied is not None)
    @rule(whole=st.booleans(), data=st.data())
    def copy_some(self, whole: bool, data: st.DataObject) -> None:
        """Fetch some of what is missing; the rest may have changed by the next time."""
        if self.is_gone():
            return
        _, state = self.state()
        try:
            missing = self.sync(state)
        except CapacityError:
            self.give_up()
            return
        for one in missing:
            count = len(one.pages) if whole else data.draw(st.integers(0, len(one.pages)))
            self.fetch(one, one.pages[:count])

    @precondition(lambda self: self.copied is not None)
    @rule(really=st.integers(0, 3))
    def perhaps_give_up(self, really: int) -> None:
        if not really:
            self.give_up()

    def give_up(self) -> None:
        if not self.is_gone():
            self.target.arrivals.drop(self.arrival)
            self.copied = self.arrival = None

    @precondition(lambda self: self.copied is not None)
    @rule(late=st.booleans(), twice=st.booleans())
    def finish(self, late: bool, twice: bool) -> None:
        """Freeze it, fetch the rest, and take it; or come too late, and leave it where it is."""
        if self.is_gone():
            return
        assert self.copied is not None
        assert self.arrival is not None
        source, target, session_id = self.source, self.target, self.copied.session_id
        ticket, state = self.state(freeze=True)
        try:
            with np.testing.assert_raises(Moving):
                source.tokens.write("t", self.a_write())
            for one in self.sync(state):
                self.fetch(one, one.pages)
            target.arrivals.complete(self.arrival, state, ticket)
        except CapacityError:
            self.state()  # thaws
            self.give_up()
            return
        with np.testing.assert_raises(Moving):
            target.access.get("t", session_id)
        target.check()
        to = MovedTo(target.config.worker_id, "", target.config.incarnation, ticket)
        if late:
            self.clock.advance(0.6)
            with np.testing.assert_raises(Conflict):
                source.departures.hand_over("t", session_id, to)
            target.arrivals.reopen(self.arrival)
            with np.testing.assert_raises((SessionNotFound, SessionMoved)):
                target.access.get("t", session_id)
            return
        for _ in range(2 if twice else 1):
            source.departures.hand_over("t", session_id, to)
        with np.testing.assert_raises(SessionMoved):
            source.access.get("t", session_id)
        if twice:
            target.arrivals.arrive_by("t", session_id, ticket + 1)
            with np.testing.assert_raises(Moving):
                target.access.get("t", session_id)
            target.arrivals.arrive_by("t", session_id, ticket)
        assert target.arrivals.arrive(self.arrival)
        self.worker.homes[session_id] = self.workers.index(target)  # type: ignore[attr-defined]
        self.copied = self.arrival = None

    def a_write(self) -> Any:
        assert self.copied is not None
        one = tensor([1.0])
        model = self.copied
        return WriteCall(model.session_id, model.epoch, 0, one, one, (0,), (model.lengths[0],))


MovingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestMoving = MovingMachine.TestCase
