"""Changes of one session that its holder asks for: room, cuts, rows, and who holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvservice.clock import Clock
from kvservice.core.errors import InvalidRequest, KVServiceError, StaleEpoch
from kvservice.core.session import MAX_ROWS, MAX_TOKENS, SessionInfo
from kvservice_workers.counters import Counters
from kvservice_workers.promises import Promises
from kvservice_workers.session_access import SessionAccess
from kvservice_workers.session_state import GO_ON, WorkerSession
from kvservice_workers.session_table import SessionTable
from kvservice_workers.structure import Structure

Change = str | tuple[str, tuple[int, ...]]
"""A structural change's verb in lower case, and what it was asked for."""

CHANGE_DUE_S: Final = 120.0
"""How long a change that was checked keeps others from copying the session."""


class Changes:
    """Append, Pop, Reset, Select and Attach. Thread-safe.

    All but Append are structural: each begins the next epoch, and is recognised when it is
    repeated. Over several workers all are asked to check a change (`check_only`) before any makes
    it.
    """

    def __init__(
        self,
        access: SessionAccess,
        sessions: SessionTable,
        promises: Promises,
        structure: Structure,
        counters: Counters,
        clock: Clock,
    ) -> None:
        self._access = access
        self._sessions = sessions
        self._promises = promises
        self._structure = structure
        self._counters = counters
        self._clock = clock

    def append(
        self,
        tenant: str,
        session_id: str,
        epoch: int,
        token_count: int,
        expected_lengths: Sequence[int],
    ) -> SessionInfo:
        """Promise room for `token_count` tokens of each row beyond `expected_lengths`.

        An extent that holds nothing begins there from now on, unless it has been told to begin
        further behind: so the promise is of the very pages that the tokens need.

        Raises:
            SessionNotFound, StaleEpoch, Conflict, PositionOutOfRange, InvalidRequest.
            OutOfPages: There is not so much room. Nothing has changed.
        """
        if not 1 <= token_count <= MAX_TOKENS:
            raise InvalidRequest(f"token_count must be at least 1, got {token_count}")
        with self._access.changing(tenant, session_id) as session:
            session.check_holder(epoch)
            session.check_rows(expected_lengths, "expected_lengths")
            before = session.starts
            session.begin_behind(expected_lengths)
            try:
                session.check_lengths(expected_lengths)
                targets = [length + token_count for length in expected_lengths]
                for row, target in enumerate(targets):
                    session.check_bound(row, target)
                old = session.targets or [0] * session.num_rows
                targets = [max(pair) for pair in zip(old, targets, strict=True)]
                self._promises.promise(session, targets)
            except KVServiceError:
                session.starts = before
                raise
            return self._access.info(session)

    def go_on_elsewhere(
        self, tenant: str, session_id: str, epoch: int, followed_by: str
    ) -> SessionInfo:
        """Note on which incarnation of another worker a session goes on behind what is held here.

        Should that be gone one day, it can be told that something is missing. A cut to what is
        held here ends it, and each step's header says it again.

        Raises:
            SessionNotFound, StaleEpoch: Nothing has changed.
        """
        with self._access.changing(tenant, session_id) as session:
            session.check_holder(epoch)
            session.go_on_at(followed_by)
            self._promises.lapse(session)
            return self._access.info(session)

    def pop(
        self,
        tenant: str,
        session_id: str,
        epoch: int,
        keep: Sequence[int],
        expected_lengths: Sequence[int],
        *,
        check_only: bool = False,
    ) -> SessionInfo:
        """Cut every layer of row r to at most `keep[r]` tokens and free what becomes empty.

        Raises:
            SessionNotFound, StaleEpoch, InvalidRequest.
            Conflict: `expected_lengths` are not those of the longest layers; not of an extent
                that holds nothing.
            PositionOutOfRange: The next query could see an evicted position. Nothing has changed.
        """
        change = ("pop", tuple(keep))
        with self._access.changing(tenant, session_id) as session:
            if self._is_repeat(session, epoch, change):
                return self._access.info(session)
            session.check_rows(keep, "keep")
            if min(keep) < 0:
                raise InvalidRequest(f"keep must not be negative, got {list(keep)}")
            session.check_ends(expected_lengths)
            for group in session.groups.values():
                for row, length in enumerate(keep):
                    if length < session.longest(row):
                        session.check_visible_after_cut(group, row, length)
            if not check_only:
                before = sum(session.longest_of_all())
                self._structure.cut(session, keep, "pop")
                self._counters.popped_tokens += max(0, before - sum(session.longest_of_all()))
                self._apply(session, change)
            else:
                self._expect_change(session)
            return self._access.info(session)

    def reset(
        self, tenant: str, session_id: str, epoch: int, *, check_only: bool = False
    ) -> SessionInfo:
        """Drop all tokens; rows, lease and reservation stay.

        Raises:
            SessionNotFound, StaleEpoch: Nothing has changed.
        """
        with self._access.changing(tenant, session_id) as session:
            if self._is_repeat(session, epoch, "reset"):
                return self._access.info(session)
            if not check_only:
                self._structure.cut(session, [0] * session.num_rows, "reset")
                session.lengths.clear()
                session.starts = [0] * session.num_rows if session.begins_at_zero else None
                targets = self._promises.reserved_targets(session)
                self._promises.promise_again(session, targets)
                self._apply(session, "reset")
            else:
                self._expect_change(session)
            return self._access.info(session)

    def select(
        self,
        tenant: str,
        session_id: str,
        epoch: int,
        rows: Sequence[int],
        *,
        check_only: bool = False,
    ) -> SessionInfo:
        """Make new row i continue old row `rows[i]`, by sharing pages.

        Raises:
            SessionNotFound, StaleEpoch.
            InvalidRequest: No rows, too many, or one that does not exist.
            OutOfPages: A reservation does not fit the new rows. Nothing has changed.
        """
        change = ("select", tuple(rows))
        with self._access.changing(tenant, session_id) as session:
            if self._is_repeat(session, epoch, change):
                return self._access.info(session)
            if not 1 <= len(rows) <= MAX_ROWS:
                raise InvalidRequest(f"between 1 and {MAX_ROWS} rows, got {len(rows)}")
            if min(rows) < 0 or max(rows) >= session.num_rows:
                raise InvalidRequest(f"rows must be below {session.num_rows}, got {list(rows)}")
            session.quota.check("rows", len(rows))
            if check_only:
                self._promises.hold_room_for_rows(session, rows)
                self._expect_change(session)
            else:
                self._structure.select(session, rows)
                self._apply(session, change)
            return self._access.info(session)

    def attach(self, tenant: str, session_id: str, epoch: int | None = None) -> SessionInfo:
        """Take a session over: the next epoch begins, and older holders are refused.

        Raises:
            SessionNotFound, StaleEpoch: Nothing has changed.
            TooLarge: It has too many ranges of padding to be told. Nothing has changed.
        """
        with self._access.changing(tenant, session_id) as session:
            if epoch is None or not self._is_repeat(session, epoch, "attach"):
                self._access.info(session, with_padding=True).check_padding_listed()
                self._apply(session, "attach")
            return self._access.info(session, with_padding=True)

    def go_on(self, tenant: str, session_id: str, epoch: int) -> SessionInfo:
        """Begin the next epoch for the session's holder, in the middle of its step.

        It has given up another copy, which is told by being an epoch behind. Where the next epoch
        has begun with a copy already, what it has given up may be at that too: whoever asks where
        the session went is told so, until the holder has been heard from at this epoch.

        Raises:
            SessionNotFound, StaleEpoch: Nothing has changed.
        """
        with self._access.changing(tenant, session_id) as session:
            if not self._is_repeat(session, epoch, GO_ON):
                session.go_on()
                session.unheard_from = 0
                self._sessions.changed(session)
            return self._access.info(session)

    # -- inside

    def _is_repeat(self, session: WorkerSession, epoch: int, change: Change) -> bool:
        """Return whether a structural change has been applied already.

        Raises:
            StaleEpoch: The session is at neither of the two epochs, or came here otherwise.
        """
        if epoch == session.epoch:
            return False
        known = (session.epoch - 1, session.last_change), (session.epoch - 2, session.change_before)
        went_on = change == GO_ON and 0 < session.unheard_from <= epoch < session.epoch
        if went_on or (epoch, change) in known:
            verb = change if isinstance(change, str) else change[0]
            self._counters.replays[verb.capitalize()] += 1
            return True
        raise StaleEpoch(
            f"the session is at epoch {session.epoch}, the change starts from {epoch}",
            epoch=session.epoch,
        )

    def _expect_change(self, session: WorkerSession) -> None:
        """Note that a change was checked, which others may have by now."""
        session.change_due_by = self._clock.monotonic() + CHANGE_DUE_S

    def _apply(self, session: WorkerSession, change: Change) -> None:
        session.begin_epoch(change)
        self._sessions.changed(session)
