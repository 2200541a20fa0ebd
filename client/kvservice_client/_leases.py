"""Leases of a client's sessions: renewed while idle, given back when nobody needs them.

One thread a client does it all, so that a finalizer, which may run anywhere at any time, never
makes a call or takes a lock: it leaves a note in a queue.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Final

from kvservice.core.errors import KVServiceError
from kvservice.v1 import types_pb2
from kvservice_client._connections import FRONT, Connections
from kvservice_client._retry import Detection, ServerDead

EXIT_TIMEOUT_S: Final = 2.0
"""How long the interpreter's end may wait for releases. Leases see to what is left."""

MAX_RELEASE_S: Final = 5.0
"""How long one call may take that releases sessions, but at the interpreter's end."""

DEAD_AT_THE_END: Final = Detection(dead_after_s=1.0, silence_s=1.0)
"""After so long without any connection, a worker's sessions are left to their leases."""

CAPABILITY_AGE_S: Final = 100.0
"""Capabilities are renewed at a third of the time that they live at least."""

MAX_BATCH: Final = 1000  # sessions in one call

_log = logging.getLogger("kvservice_client")


class Note(Enum):
    """What the thread is told, besides leases to release."""

    LOOK = "a lease is new"
    END = "release all, and end"


@dataclass(eq=False, slots=True)
class Lease:
    """One session's lease, as its owner and the renewing thread share it.

    Fields:
        addresses: Of the workers that hold the session. Empty: ask whoever opened it.
        capabilities: What to show each of them, by address, where they want something shown.
        due_at: When to renew, in the clock's monotonic seconds. Every call moves it on.
        open: Whether there is something to renew and to release.
        taken: Somebody else has attached to the session: it is theirs to renew and to release.
        epoch: The owner's: whoever has attached since is at a later one, and is not to be
            released. 0: nobody else knows of the session.
        unsettled: It is not known whether the owner's last change, from that epoch, was made.
    """

    session_id: str
    ttl_s: float
    addresses: tuple[str, ...]
    due_at: float
    open: bool = True
    taken: bool = False
    epoch: int = 0
    unsettled: bool = False
    capabilities: dict[str, bytes] = field(default_factory=dict, repr=False)
    capabilities_due_at: float = math.inf

    def renewed(self, now: float) -> None:
        self.due_at = now + self.ttl_s / 3

    def entitled(self, capabilities: Mapping[str, bytes], now: float) -> None:
        """Take over what a worker has issued. It lives for five minutes at least."""
        fresh = {address: one for address, one in capabilities.items() if one}
        if fresh:
            self.capabilities.update(fresh)
            self.capabilities_due_at = now + CAPABILITY_AGE_S

    def look_at(self) -> float:
        """Return when it is to be renewed, though calls may renew the lease itself."""
        return min(self.due_at, self.capabilities_due_at)


class Leases:
    """The leases of one client's sessions. Thread-safe.

    The thread starts with the first session and ends with `close`, or after `close_soon`.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._clock = connections.clock
        self._lock = threading.Lock()
        self._leases: dict[Lease, None] = {}  # in the order in which they came
        self._notes: SimpleQueue[Lease | Note] = SimpleQueue()  # a lease: to be released
        self._thread: threading.Thread | None = None
        self._closed = False
        self._release_s = MAX_RELEASE_S
        self._pid = os.getpid()

    def add(self, lease: Lease) -> None:
        """Renew this lease from now on."""
        with self._lock:
            self._leases[lease] = None
            if self._thread is None and not self._closed and self._connections.background:
                self._thread = threading.Thread(
                    target=self._run, name="kvservice-leases", daemon=True
                )
                self._thread.start()
                _ALIVE.add(self)
        self._notes.put(Note.LOOK)  # it may be shorter than those we have

    def forget(self, lease: Lease) -> None:
        """Neither renew nor release it any more."""
        lease.open = False
        with self._lock:
            self._leases.pop(lease, None)

    def hand_over(self, session_id: str) -> None:
        """Leave a session to whoever has just attached to it, though an object of ours holds it."""
        with self._lock:
            for lease in [one for one in self._leases if one.session_id == session_id]:
                lease.taken = True
                del self._leases[lease]

    def release_soon(self, lease: Lease) -> None:
        """Release a session in the background. For finalizers: takes no lock, makes no call."""
        self._notes.put(lease)

    def let_go(
        self, session_id: str, ttl_s: float, addresses: tuple[str, ...] = (), *, epoch: int = 0
    ) -> None:
        """Release in the background what nobody here holds: what was given up, or may have been
        opened, with the answer lost. The arguments are as the fields of Lease."""
        lease = Lease(session_id, ttl_s, addresses, math.inf, epoch=epoch)
        self.add(lease)  # there may be no thread yet
        self.release_soon(lease)

    def close_soon(self) -> None:
        """Release all and end the thread, in the background. For finalizers."""
        self._notes.put(Note.END)

    def close(self, timeout_s: float) -> None:
        """Release all that is open, and end the thread, or leave it after `timeout_s`.

        Whoever closes waits for a worker that is slow, but not long for one that is dead.
        """
        if os.getpid() != self._pid:
            return  # a forked child: the sessions are its parent's
        with self._lock:
            self._closed = True
            thread = self._thread
            self._release_s = min(MAX_RELEASE_S, timeout_s / 2)
        self._notes.put(Note.END)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def renew_due(self) -> float | None:
        """Renew what is due, and what will be soon. Return the seconds until the next is due."""
        now = self._clock.monotonic()
        with self._lock:
            leases = [lease for lease in self._leases if lease.open and not lease.taken]
        # What is due within a twelfth of its time goes along, so that calls are few.
        due = [lease for lease in leases if lease.look_at() - lease.ttl_s / 12 <= now]
        if due:
            self._renew(due)
        earliest = min((lease.look_at() for lease in leases), default=math.inf)
        left_s = earliest - self._clock.monotonic()
        return None if left_s == math.inf else max(0.0, left_s)

    # -- the thread

    def look(self) -> float | None:
        """Do what is to be done now: what the thread does, where there is none.

        Returns:
            The seconds until something is due; None: nothing is.
        """
        if not self._notes.empty():
            self._heed(self._wait_for_notes(0.0))
        return self.renew_due()

    def _run(self) -> None:
        while not self._heed(self._wait_for_notes(self.renew_due())):
            pass
        _ALIVE.discard(self)

    def _heed(self, notes: Sequence[Lease | Note]) -> bool:
        """Release what notes say; return whether they say that this is the end."""
        ending = Note.END in notes
        with self._lock:
            self._closed |= ending
            released = dict(self._leases) if ending else {}
            released.update((note, None) for note in notes if isinstance(note, Lease))
            for lease in released:
                self._leases.pop(lease, None)
        self._release([lease for lease in released if lease.open and not lease.taken])
        return ending

    def _wait_for_notes(self, timeout_s: float | None) -> list[Lease | Note]:
        notes: list[Lease | Note] = []
        try:
            notes.append(self._notes.get(timeout=timeout_s))
            while True:
                notes.append(self._notes.get_nowait())
        except Empty:
            return notes

    def _release(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            lease.open = False
        for address, batch in _batches(leases):
            try:
                moved = self._release_at(address, batch)
                if moved:  # the manager knows where
                    self._release_at(FRONT, moved)
            except (KVServiceError, ServerDead) as error:
                _log.warning("%d sessions are left to their leases: %s", len(batch), error)

    def _release_at(self, address: str, leases: Sequence[Lease]) -> list[Lease]:
        """Release sessions; return those that were moved from there."""
        request = types_pb2.ReleaseRequest(
            session_ids=[lease.session_id for lease in leases],
            capabilities=_capabilities(address, leases),
            epochs=[lease.epoch for lease in leases],
            unsettled_ids=[lease.session_id for lease in leases if lease.unsettled],
        )
        with self._lock:  # those that are to be renewed do not wait for long
            shortest_s = min((lease.ttl_s for lease in self._leases), default=math.inf)
        timeout_s = min(self._release_s, max(1.0, shortest_s / 6))
        answer = self._connections.ask(
            address, "Release", request, timeout_s=timeout_s, detection=DEAD_AT_THE_END
        )
        moved = set(answer.moved_session_ids)
        return [lease for lease in leases if lease.session_id in moved]

    def _renew(self, leases: Sequence[Lease]) -> None:
        timeout_s = max(0.1, min(lease.ttl_s for lease in leases) / 12)
        failed: set[str] = set()
        strayed: dict[Lease, None] = {}
        for address, batch in _batches(leases):
            ids = [lease.session_id for lease in batch]
            request = types_pb2.RenewLeaseRequest(
                session_ids=ids, capabilities=_capabilities(address, batch)
            )
            try:
                answer = self._connections.ask(address, "RenewLease", request, timeout_s=timeout_s)
                now = self._clock.monotonic()
                for lease, capability in zip(batch, answer.capabilities, strict=False):
                    lease.entitled({address: capability}, now)
                missing = set(answer.missing_session_ids)
                strayed.update((one, None) for one in batch if one.session_id in missing)
            except KVServiceError as error:
                failed.add(address)
                strayed.update((one, None) for one in batch)
                _log.info("%d leases at %s could not be renewed: %s", len(ids), address, error)
        self._renew_elsewhere([one for one in strayed if one.addresses], timeout_s)
        now = self._clock.monotonic()
        for lease in leases:
            if failed.isdisjoint(lease.addresses or ("",)):
                lease.renewed(now)
            else:
                lease.due_at = now + lease.ttl_s / 12
            if lease.capabilities_due_at <= now:
                lease.capabilities_due_at = now + lease.ttl_s / 12

    def _renew_elsewhere(self, leases: Sequence[Lease], timeout_s: float) -> None:
        """Renew leases of sessions that may have moved while nobody used them, or whose workers
        nobody reaches from here. The manager knows where they are."""
        if not leases or self._connections.lone_worker:
            return
        for start in range(0, len(leases), MAX_BATCH):
            ids = [lease.session_id for lease in leases[start : start + MAX_BATCH]]
            request = types_pb2.RenewLeaseRequest(session_ids=ids)
            try:
                self._connections.ask(FRONT, "RenewLease", request, timeout_s=timeout_s)
            except KVServiceError as error:
                _log.info("%d leases could not be renewed by the manager: %s", len(ids), error)


def _capabilities(address: str, leases: Sequence[Lease]) -> list[bytes]:
    shown = (lease.capabilities.get(address, b"") for lease in leases)
    return [capability for capability in shown if capability]


def _batches(leases: Iterable[Lease]) -> Iterator[tuple[str, list[Lease]]]:
    """Yield addresses with the leases to name there; "" is the client's own server."""
    at: defaultdict[str, list[Lease]] = defaultdict(list)
    for lease in leases:
        for address in lease.addresses or ("",):
            at[address].append(lease)
    for address, listed in at.items():
        for start in range(0, len(listed), MAX_BATCH):
            yield address, listed[start : start + MAX_BATCH]


_ALIVE: weakref.WeakSet[Leases] = weakref.WeakSet()


@atexit.register
def _release_at_exit() -> None:
    for leases in list(_ALIVE):
        leases.close(EXIT_TIMEOUT_S)
