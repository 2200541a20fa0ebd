"""Structural changes: Pop, Reset, Select. Numbered by the epoch they start from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvservice.core.errors import (
    Conflict,
    Draining,
    InvalidRequest,
    KVServiceError,
    Overloaded,
    PagesLost,
    PermissionDenied,
    QuotaExceeded,
    StaleEpoch,
    Unauthenticated,
)
from kvservice.v1 import types_pb2
from kvservice.wire import convert
from kvservice_client._arrays import to_int, to_ints
from kvservice_client._ask import read_positions
from kvservice_client._connections import FRONT
from kvservice_client._extents import Extent, Lengths, adopt
from kvservice_client._leases import Leases
from kvservice_client._links import Links
from kvservice_client._mirror import Mirror, Step
from kvservice_client._outcomes import FAILED, OUTCOME_UNKNOWN, CopiesChanged
from kvservice_client._refresh import refresh
from kvservice_client._release import settle_extents

T = TypeVar("T")

MAX_LATE: Final = 8
"""How many calls that were given up may arrive one by one while a cut is made."""

TELL_TIMEOUT_S: Final = 1.0
"""How long a manager is waited for that decoding does not need."""

LET_KNOW_S: Final = 0.2
"""How long decoding waits for a manager to look at a session that goes on with one copy."""

TURNED_AWAY: Final = (QuotaExceeded, Overloaded, Unauthenticated, PermissionDenied, Draining)
"""Refusals that may come before a worker has looked at the session."""


@dataclass(slots=True)
class Change:
    """A change on its way to the workers.

    Fields:
        requests: Still without an answer. A retry sends the same bytes.
        adopt: Makes the mirror what the workers are, once all have it.
        begun: Whether a worker has it for certain.
        perhaps_made: Whether the worker that is asked next may have it: an answer is missing.
        leaves_behind: Whether somebody may come back with what is of before.
    """

    method: str
    requests: list[tuple[Extent, Any]]
    adopt: Callable[[], None]
    begun: bool = False
    perhaps_made: bool = False
    leaves_behind: bool = False


class Changes:
    """Makes structural changes on all workers of one session, or on none.

    With several workers, all check a change before the first one gets it. A change that some may
    have is rolled forward: `settle` repeats it, and nothing else may be done before.
    """

    def __init__(self, mirror: Mirror, links: Links, leases: Leases) -> None:
        self._mirror = mirror
        self._links = links
        self._leases = leases
        self._pending: Change | None = None

    def settle(self) -> None:
        """Finish a change whose outcome is unknown.

        If copies were given up meanwhile, the others go to the next epoch: so that those, should
        they come back, are known to be old. If one was made, all go to the epoch at which it is.

        Raises:
            KVServiceError: It is still unknown; call again.
        """
        mirror = self._mirror
        while self._pending is not None or mirror.num_changed > mirror.num_settled:
            self._finish(self._pending or self._going_on())
        if not mirror.extents:
            self._open_again()

    def _finish(self, change: Change) -> None:
        self._expect(change)
        while change.requests:
            extent, request = change.requests[0]
            if not extent.lost:
                try:
                    self._send(change, extent, request)
                    if change.leaves_behind:
                        self._links.copies.look_for(extent)
                except CopiesChanged:
                    if not extent.lost:
                        # It was refused, and is asked again at the next epoch. No worker has it:
                        # who has checked a change takes no copy before the change has come.
                        self._expect(None)
                        raise
            change.requests.pop(0)
        may_come_back = self._mirror.may_come_back
        change.adopt()
        self._expect(None)
        settle_extents(self._mirror, self._links)
        if may_come_back and self._mirror.extents:
            self._tell_front()
        elif change.leaves_behind and not self._links.connections.lone_worker:
            self._let_front_know()

    def _going_on(self) -> Change:
        """Return the change that leaves behind copies that were given up."""
        mirror = self._mirror
        number = mirror.num_changed
        requests = [
            (
                extent,
                types_pb2.AttachRequest(
                    session_id=mirror.id,
                    incarnation=extent.incarnation,
                    epoch=mirror.epoch,
                    keep_step=True,
                ),
            )
            for extent in mirror.everywhere
        ]

        def adopt() -> None:
            mirror.go_on(number)
            self._links.lease.taken = False  # whoever refused us has us now

        return Change("Attach", requests, adopt, leaves_behind=True)

    def pop(self, num_tokens: int | None, keep: int | Sequence[int] | None) -> None:
        """Drop `num_tokens` of each row's longest layer, or cut to `keep`; see `Session.pop`."""
        if (num_tokens is None) == (keep is None):
            raise InvalidRequest("say either num_tokens or keep")
        mirror = self._mirror
        if mirror.uncertain and mirror.find_lost() is None:
            refresh(mirror, self._links)
        longest = mirror.longest()
        if keep is not None:
            lengths = read_positions(keep, mirror.num_rows, "keep")
        elif (count := to_int(num_tokens)) is not None and count >= 0:
            lengths = tuple(max(0, length - count) for length in longest)
        else:
            raise InvalidRequest(f"num_tokens must be at least 0, got {num_tokens!r}")
        nothing_to_do = mirror.find_lost() is None and not mirror.is_late_possible
        if nothing_to_do and all(map(int.__ge__, lengths, longest)):
            step = mirror.step
            if step is not None and step.failed_layer is not None and not step.appended:
                mirror.step = None  # it has stored nothing, and is not to be repeated
            return
        self._cut(lengths)

    def _cut(self, keep: Sequence[int]) -> None:
        """Cut every layer of row r to `keep[r]`, and forget lost extents above.

        Raises:
            PagesLost: Something of a lost extent would have to stay.
            PositionOutOfRange: A later query could see an evicted position. Nothing has changed.
        """
        mirror, links = self._mirror, self._links
        lost = mirror.find_lost()
        if lost is not None and any(map(int.__gt__, keep, lost.starts)):
            raise mirror.pages_lost()
        self._despite_late_calls(
            lambda: self._pop(keep, refresh(mirror, links) if mirror.uncertain else {})
        )

    def _despite_late_calls(self, cut: Callable[[], T]) -> T:
        """Cut again where a call that was given up has arrived between the question how much is
        stored and the cut, which was refused as that is not so any more."""
        for _ in range(MAX_LATE):
            try:
                return cut()
            except Conflict:
                if self._pending is not None or not self._mirror.is_late_possible:
                    raise
                self._mirror.uncertain = True
        return cut()

    def _pop(self, keep: Sequence[int], stored: dict[Extent, Lengths]) -> None:
        mirror = self._mirror
        # No row is kept beyond its end: so a worker can tell when it holds all that is left.
        keep = tuple(map(min, keep, mirror.longest()))

        def request(extent: Extent, check_only: bool) -> types_pb2.PopRequest:
            return types_pb2.PopRequest(
                session_id=mirror.id,
                incarnation=extent.incarnation,
                epoch=mirror.epoch,
                keep=keep,
                expected_lengths=stored.get(extent) or mirror.stops_of(extent),
                check_only=check_only,
            )

        self._make("Pop", request, lambda: mirror.cut(keep))

    def roll_back(self) -> Lengths:
        """Finish what is in progress, cut each row to what all its layers still hold, and return
        those lengths."""
        while True:
            known = self._mirror.num_lost
            try:
                self.settle()
                return self._despite_late_calls(self._roll_back)
            except PagesLost:
                if self._mirror.num_lost == known:
                    raise
                # One more has died meanwhile; less is left.

    def _roll_back(self) -> Lengths:
        mirror, links = self._mirror, self._links
        marks_older = mirror.step is not None and mirror.step.marks_older
        stored = refresh(mirror, links, is_cut_next=not marks_older) if mirror.uncertain else {}
        lost = mirror.find_lost()
        keep = mirror.shortest()
        if lost is not None:
            keep = tuple(map(min, keep, lost.starts))
        too_long = any(map(int.__lt__, keep, mirror.longest()))
        if lost is not None or mirror.is_late_possible or too_long:
            self._pop(keep, stored)
        mirror.step = None
        return keep

    def reset(self) -> None:
        """Drop all tokens."""
        mirror = self._mirror
        if mirror.find_lost() is not None:
            self._cut((0,) * mirror.num_rows)
            return

        def request(extent: Extent, check_only: bool) -> types_pb2.ResetRequest:
            return types_pb2.ResetRequest(
                session_id=mirror.id,
                incarnation=extent.incarnation,
                epoch=mirror.epoch,
                check_only=check_only,
            )

        self._make("Reset", request, mirror.reset)

    def select(self, rows: Sequence[int]) -> None:
        """Let new row i continue old row rows[i]."""
        mirror = self._mirror
        chosen = to_ints(rows, "rows")
        if not chosen or min(chosen) < 0 or max(chosen) >= mirror.num_rows:
            raise InvalidRequest(
                f"rows must be below {mirror.num_rows}, at least one, got {chosen}"
            )
        if chosen == list(range(mirror.num_rows)):
            return
        if mirror.uncertain:
            refresh(mirror, self._links)

        def request(extent: Extent, check_only: bool) -> types_pb2.SelectRequest:
            return types_pb2.SelectRequest(
                session_id=mirror.id,
                incarnation=extent.incarnation,
                epoch=mirror.epoch,
                rows=chosen,
                check_only=check_only,
            )

        self._make("Select", request, lambda: mirror.select(chosen))

    def undo(self, step: Step) -> None:
        """Take back the first call of a step, which one copy has stored and the other has not.

        Raises:
            CopiesChanged: It has said more than can be taken back.
        """
        mirror, links, is_cut_next = self._mirror, self._links, not step.marks_older
        self._despite_late_calls(
            lambda: self._pop(step.positions, refresh(mirror, links, is_cut_next=is_cut_next))
        )

    # -- on all workers, or on none

    def _make(
        self, method: str, request: Callable[[Extent, bool], Any], adopt: Callable[[], None]
    ) -> None:
        everywhere = self._mirror.everywhere
        if len(everywhere) > 1:
            for extent in everywhere:
                self._ask(extent, method, request(extent, True))
        requests = [(extent, request(extent, False)) for extent in everywhere]
        self._expect(Change(method, requests, adopt))
        self.settle()

    def _expect(self, change: Change | None) -> None:
        """Note what may be on its way, also for whoever releases the session then."""
        self._pending = change
        lease = self._links.lease
        if change is None:
            lease.epoch = self._mirror.epoch
        lease.unsettled = change is not None

    def _send(self, change: Change, extent: Extent, request: Any) -> None:
        try:
            self._ask(extent, change.method, request)
        except OUTCOME_UNKNOWN:
            change.perhaps_made = True
            raise
        except KVServiceError as error:
            # A worker that has the change does not refuse it; so this one has not, nor has any
            # that comes after it. But what turns callers away before it looks proves nothing.
            if change.begun or (
                change.perhaps_made
                and isinstance(error, TURNED_AWAY)
                and not self._is_unchanged(extent, request.epoch)
            ):
                raise
            self._expect(None)
            raise
        change.begun, change.perhaps_made = True, False

    def _is_unchanged(self, extent: Extent, epoch: int) -> bool:
        """Whether a worker is known to be still at an epoch."""
        request = types_pb2.GetSessionRequest(session_id=self._mirror.id)
        try:
            answer = self._links.unary(extent, "GetSession", request)
        except FAILED:
            return False
        return bool(answer.session.epoch == epoch)

    def _ask(self, extent: Extent, method: str, request: Any) -> None:
        try:
            self._links.unary(extent, method, request)
        except KVServiceError:
            # A dead spare had nothing of the session, and is missed by nobody.
            if not (extent.lost and extent in self._mirror.spares):
                raise

    # -- after a loss

    def _open_again(self) -> None:
        """Open the session anew, empty, where there is room, under another id.

        By the old one something may still arrive: a copy of a release, which would end the new
        session, one of the request that had opened the old one, which would then hide that, and a
        worker that was given up.

        Raises:
            StaleEpoch: Somebody had taken the session over: what is lost is theirs.
        """
        mirror, links = self._mirror, self._links
        if links.lease.taken:
            raise StaleEpoch("the session was taken over by another holder", epoch=mirror.epoch)
        spec = convert.spec_to_pb(mirror.spec)
        spec.row_count = mirror.num_rows
        new_id = links.connections.new_id()
        request = types_pb2.AllocateRequest(session_id=new_id, spec=spec)
        try:
            session = links.connections.ask(FRONT, "Allocate", request).session
        except KVServiceError:  # it may have been opened all the same, with the answer lost
            self._leases.let_go(new_id, mirror.spec.ttl_s)
            raise
        if not mirror.haunted:
            # What nobody here knows of: a copy in the making, or that the session is lost.
            self._leases.let_go(mirror.id, mirror.spec.ttl_s, epoch=mirror.epoch)
        mirror.reset()
        mirror.id, mirror.haunted = new_id, False
        mirror.epoch, mirror.last_step = session.epoch, session.step
        mirror.extents, mirror.spares = adopt(
            (), links.connections.extents_of(session), mirror.longest(), mirror.spec.spread
        )
        mirror.go_on_where_missing()
        links.whereabouts.follow_extents()

    def _tell_front(self) -> None:
        """Let the manager see that the session goes on without what may come back.

        It would hear of it anyway, with the next heartbeat, if the worker lives that long.
        """
        request = types_pb2.GetSessionRequest(session_id=self._mirror.id)
        with suppress(KVServiceError):
            self._links.connections.ask(FRONT, "GetSession", request, timeout_s=TELL_TIMEOUT_S)

    def _let_front_know(self) -> None:
        """As `_tell_front`, of a copy: what answers is noted, even if the copy is waited for."""
        request = types_pb2.GetSessionRequest(session_id=self._mirror.id)
        with suppress(KVServiceError):
            self._links.connections.ask_once("GetSession", request, timeout_s=LET_KNOW_S)
