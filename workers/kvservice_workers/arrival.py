"""One session on its way here from another worker, and the table of all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvservice.core.geometry import HOLE
from kvservice_workers.layer_group import LayerGroup
from kvservice_workers.session_state import SessionKey, WorkerSession, moving
from kvservice_workers.session_table import SessionTable

NEVER: Final = -1  # before any page was written


@dataclass(slots=True)
class Copied:
    """A page that is here already: its number here, and when what it holds was written there."""

    page: int
    written: int = NEVER


@dataclass(eq=False, slots=True)
class Arrival:
    """One session on its way here. Until it is `complete` it is pages without an order, all in
    one table a group; from then on it is the session, but for the other worker's word.

    Fields:
        session: As it will be.
        source: The incarnation that it comes from.
        copied: By window, then by the page's number there.
        layers: By window, those in which pages are copied.
        ticket: By which it is to be had, once complete.
        ends_at: When its lease is over, once complete.
        keeps: The other worker holds it too, from then on.
        here: It has arrived, and is in the worker's table.
        gone: It was given up.
    """

    session: WorkerSession
    source: str
    keeps: bool = False
    copied: dict[int | None, dict[int, Copied]] = field(default_factory=dict)
    layers: dict[int | None, tuple[int, ...]] = field(default_factory=dict)
    complete: bool = False
    ticket: int = 0
    ends_at: float = 0.0
    here: bool = False
    gone: bool = False

    @property
    def key(self) -> SessionKey:
        return self.session.key

    @property
    def tenant(self) -> str:
        return self.session.tenant

    @property
    def groups(self) -> Mapping[int | None, LayerGroup]:
        return self.session.groups

    def check(self) -> None:
        """Assert that the pages are those that were taken for it."""
        if self.complete:
            self.session.check()
        for window, group in self.groups.items():
            listed = {page for table in group.tables for page in table.entries if page != HOLE}
            mine = [one.page for one in self.copied.get(window, {}).values()]
            assert len(set(mine)) == len(mine), "a page here stands for two there"
            assert listed == set(mine), "pages that stand for none"


class ArrivalTable:
    """Everything that is on its way to a worker, by its session's key.

    The worker's lock is held by the caller. An arrival leaves the table when it is here, or gone.
    """

    def __init__(self, sessions: SessionTable) -> None:
        self._sessions = sessions
        self._arrivals: dict[SessionKey, Arrival] = {}

    def __len__(self) -> int:
        return len(self._arrivals)

    def all(self) -> Collection[Arrival]:
        return self._arrivals.values()

    def find(self, key: SessionKey) -> Arrival | None:
        """Return what is on its way by this key; None if nothing is."""
        return self._arrivals.get(key)

    def add(self, arrival: Arrival) -> None:
        self._arrivals[arrival.key] = arrival

    def remove(self, arrival: Arrival) -> None:
        del self._arrivals[arrival.key]

    def check_not_arriving(self, key: SessionKey) -> None:
        """Raise Moving if it is not known whether a session is here."""
        arrival = self._arrivals.get(key)
        if arrival is not None and arrival.complete:
            raise moving(arrival.source)

    def check_id_is_free(self, key: SessionKey) -> None:
        """Raise Moving if a session by this id is on its way here."""
        arrival = self._arrivals.get(key)
        if arrival is not None:
            raise moving(arrival.source)

    def check_copying(self, arrival: Arrival) -> None:
        """Refuse to go on with what is here, or was given up.

        Raises:
            SessionNotFound, SessionMoved: As for any session that is not here.
        """
        if arrival.gone or arrival.here:
            raise self._sessions.missing(arrival.key)
        assert not arrival.complete, "it goes on copying"
