"""How far sessions have come: the latest epoch that was heard of each, and from whom."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, NamedTuple, TypeVar

from kvservice.core.lease import LeaseTable

K = TypeVar("K", bound=Hashable)


class Latest(NamedTuple):
    """The latest epoch of a session.

    Fields:
        incarnation: Of the worker that has said so last.
        ended: That worker has said since that it holds the session no more.
    """

    epoch: int
    incarnation: str
    ended: bool = False


class LatestEpochs(Generic[K]):
    """The latest epochs of sessions, by key. Seconds of one monotonic clock are passed in.

    Invariants (asserted by `check`):
      1. What is held by nobody is forgotten at a time that is known, and nothing else is.
    """

    def __init__(self) -> None:
        self._latest: dict[K, Latest] = {}
        self._until: LeaseTable[K] = LeaseTable()  # of those that nobody holds

    def get(self, key: K, now: float) -> Latest | None:
        """Return the latest epoch that was heard of; None if of none, or too long ago."""
        if key in self._until and self._until.deadline(key) <= now:
            return None
        return self._latest.get(key)

    def heard(self, key: K, epoch: int, incarnation: str) -> int:
        """Note that a worker holds a session at an epoch; return the latest one."""
        if key in self._until:
            self._until.revoke(key)
        known = self._latest.get(key)
        if known is None or known.epoch <= epoch:
            known = self._latest[key] = Latest(epoch, incarnation)
        return known.epoch

    def ended(self, key: K, incarnation: str) -> None:
        """Note that a worker does not hold a session any more."""
        known = self._latest.get(key)
        if known is not None and known.incarnation == incarnation:
            self._latest[key] = known._replace(ended=True)

    def begins_anew(self, key: K, epoch: int, incarnation: str) -> bool:
        """Whether a worker that says this epoch has begun another session by an old one's id.

        Epochs never go back: who has said a later one must have ended that session.
        """
        known = self._latest.get(key)
        return (
            known is not None
            and known.ended
            and known.incarnation == incarnation
            and known.epoch > epoch
        )

    def begin(self, key: K) -> None:
        """Forget a session: another one is opened by its id."""
        self._latest.pop(key, None)
        if key in self._until:
            self._until.revoke(key)

    def forget_at(self, key: K, deadline: float) -> None:
        """Remember a session until then: nobody holds it any more."""
        self._until.grant(key, deadline)

    def expire(self, now: float) -> None:
        """Forget what has been held by nobody for long enough."""
        for key in self._until.expired(now):
            self._until.revoke(key)
            del self._latest[key]

    def check(self, held: Collection[K]) -> None:
        remembered = {key for key in self._latest if key in self._until}
        assert len(remembered) == len(self._until), "forgotten, and to be forgotten"
        assert set(held) | remembered == self._latest.keys(), "an epoch for ever, or for none"
        assert remembered.isdisjoint(held), "held, and to be forgotten"
        self._until.check()
