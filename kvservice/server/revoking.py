"""Tokens behind capabilities: which a worker has in use, and which the manager has seen end."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from kvservice.clock import Clock


class TokensBehind:
    """What a worker knows of the bearer tokens behind the capabilities that it has issued.

    The worker does not have the tokens: it names them to the manager with each heartbeat, and is
    told which of them hold no more. What the manager has said last goes on to hold while it is not
    heard. Thread-safe.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until: dict[bytes, float] = {}  # when the last capability behind which it is ends
        self._ended: frozenset[bytes] = frozenset()

    def issued(self, token_id: bytes, ends_at: float) -> None:
        """Note that a capability has been issued. `ends_at`: in seconds since the epoch."""
        if token_id:
            with self._lock:
                self._until[token_id] = max(ends_at, self._until.get(token_id, 0.0))

    def have_ended(self, token_id: bytes) -> bool:
        """Return whether a token holds no more. Takes no lock: it is asked at every call."""
        return token_id in self._ended

    def in_use(self) -> list[bytes]:
        """Return the tokens behind which a capability may still hold, ended ones included."""
        now = self._clock.time()
        with self._lock:
            self._until = {one: until for one, until in self._until.items() if until > now}
            self._ended &= self._until.keys()
            return sorted(self._until)

    def settle(self, asked: Sequence[bytes], ended: Iterable[bytes]) -> None:
        """Take the manager's answer: of those that it was asked about, which hold no more."""
        with self._lock:
            self._ended = (self._ended - set(asked)) | (set(ended) & set(asked))
