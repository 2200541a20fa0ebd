"""Where sessions stand: the parts of one, from the workers that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from kvservice.clock import Clock
from kvservice.core.caller import SERVICE, Caller
from kvservice.core.directory import SessionKey
from kvservice.core.errors import (
    KVServiceError,
    Moving,
    SessionMoved,
    SessionNotFound,
    WorkerLost,
)
from kvservice.core.extents import (
    Loss,
    current,
    find_loss,
    in_order,
    is_left_behind,
    pages_lost,
    without_laggards,
)
from kvservice.core.liveness import WorkerState
from kvservice.core.session import SessionInfo
from kvservice.manager.calls import WorkerCalls
from kvservice.manager.directory import RETRY_DELAY_S, SharedDirectory
from kvservice.manager.parts import Part
from kvservice.manager.settling import Settling
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire.convert import session_from_pb

Asked = dict[str, SessionInfo | None]
"""By worker, what it has said of a session; None: it does not hold it."""


class Lookup:
    """Asks workers where sessions stand, and lets the directory know. Thread-safe."""

    def __init__(
        self, directory: SharedDirectory, calls: WorkerCalls, settling: Settling, clock: Clock
    ) -> None:
        self._directory = directory
        self._calls = calls
        self._settling = settling
        self._clock = clock

    def parts(
        self,
        key: SessionKey,
        caller: Caller,
        *,
        keep_at_most: int | None = None,
        from_epoch: int | None = None,
        look_only: bool = False,
    ) -> list[Part]:
        """Ask all workers that hold a session where it stands; return its parts in order.

        One that the directory does not know (yet), or not all of, is looked for at all workers.

        Args:
            keep_at_most: Go on with what is left of a session that has lost tokens, if none of
                those below this position are: for the change that cuts it to there.
            from_epoch: Of a structural change: parts that it has not reached yet belong to the
                session, even if those that it has reached are all that is left.
            look_only: Renew no lease: it is not the session's holder that asks.

        Raises:
            SessionNotFound, WorkerLost.
            Unavailable: Not all workers have reported yet, and no other knows the session.
            PagesLost: A worker that held a part of it is gone.
        """
        asked: Asked = {}
        self._ask_where(key, self._directory.holders(key), caller, asked, look_only=look_only)
        found = self._not_left_behind(key, asked)
        if not found or find_loss(list(found.values())) is not None:
            self._ask_where(key, self._directory.reachable(), caller, asked, look_only=look_only)
            found = self._not_left_behind(key, asked)
        if not found:
            self._check_not_lost(key)
            raise SessionNotFound(
                "no such session: it was never opened, was released, or has expired"
            )
        loss = find_loss(list(found.values()))
        if loss is not None and (keep_at_most is None or keep_at_most > loss.position):
            self._check_decided(loss)
            raise pages_lost(loss.position)
        mine = current(list(found.values()))
        if from_epoch is not None:
            behind = without_laggards(info for info in found.values() if info.epoch == from_epoch)
            mine += [info for info in behind if info not in mine]
        ids = {info.extents[0]: worker_id for worker_id, info in found.items()}
        epochs = sorted({info.epoch for info in mine}, reverse=True)
        # Those that lack a change may have other rows; they come behind those that have it.
        by_epoch = [in_order([one for one in mine if one.epoch == epoch]) for epoch in epochs]
        return [Part(ids[info.extents[0]], info) for infos in by_epoch for info in infos]

    # Asking

    def _ask_where(
        self,
        key: SessionKey,
        worker_ids: Iterable[str],
        caller: Caller,
        asked: Asked,
        *,
        look_only: bool,
    ) -> None:
        """Ask workers that were not asked yet where a session stands; the dead are passed over.

        Args:
            asked: Gets the answers.
        """
        directory = self._directory
        request = types_pb2.GetSessionRequest(session_id=key[1], look_only=look_only)
        waiting = [one for one in worker_ids if one not in asked and not directory.is_dead(one)]
        asked_at = self._clock.monotonic()
        failures: list[KVServiceError] = []
        moved: list[str] = []
        unsure: dict[str, KVServiceError] = {}
        for worker_id, answer in self._calls.ask_all(waiting, "GetSession", request, caller):
            if isinstance(answer, (SessionNotFound, SessionMoved)):
                directory.end(key, worker_id)
                asked[worker_id] = None
                if isinstance(answer, SessionMoved):
                    moved.append(worker_id)
            elif not isinstance(answer, KVServiceError):
                info = asked[worker_id] = session_from_pb(answer.session)
                directory.note(key, [Part(worker_id, info)], asked_at=asked_at)
            elif isinstance(answer, Moving):
                unsure[worker_id] = answer
            elif not directory.is_dead(worker_id):
                failures.append(answer)
        for worker_id in moved:
            self._follow(key, worker_id, caller, asked, look_only=look_only)
        for worker_id, error in unsure.items():
            if asked.get(worker_id) is None:
                self._give_up_waiting(key, worker_id, error)
                failures.append(error)
        if failures:
            raise failures[0]

    def _follow(
        self, key: SessionKey, worker_id: str, caller: Caller, asked: Asked, *, look_only: bool
    ) -> None:
        """Find a session that was moved from a worker, and let the one where it is believe it.

        Raises:
            PagesLost: The worker that took it over is dead.
        """
        directory = self._directory
        follow = worker_pb2.FollowSessionRequest(session_id=key[1])
        try:
            to = self._calls.ask(worker_id, "FollowSession", follow, caller)
        except SessionNotFound:
            return  # it is on its way back
        if asked.get(to.worker_id) is not None:
            return
        record = directory.find_worker(to.worker_id)
        if (
            record is None
            or record.incarnation != to.incarnation
            or directory.is_dead(to.worker_id)
        ):
            is_dead = directory.state_of_life(to.incarnation) is WorkerState.DEAD
            if is_dead and not any(asked.values()):
                raise pages_lost(0)
            return
        there = types_pb2.GetSessionRequest(
            session_id=key[1], ticket=to.ticket, look_only=look_only
        )
        with suppress(SessionNotFound, SessionMoved):  # it has ended, or gone further
            answer = self._calls.ask(to.worker_id, "GetSession", there, caller)
            asked[to.worker_id] = session_from_pb(answer.session)

    def _give_up_waiting(self, key: SessionKey, worker_id: str, error: KVServiceError) -> None:
        """Tell a worker that waits for another one's word that this one is dead, if it is."""
        source = error.metadata.get("source", "")
        if source and self._directory.state_of_life(source) is WorkerState.DEAD:
            request = worker_pb2.PullSessionRequest(
                tenant=key[0],
                session_id=key[1],
                move_id="none",
                source_address="none",
                source_incarnation=source,
                source_is_dead=True,
            )
            with suppress(KVServiceError):
                self._calls.ask(worker_id, "PullSession", request, SERVICE)

    # What the answers mean

    def _not_left_behind(
        self, key: SessionKey, asked: Mapping[str, SessionInfo | None]
    ) -> dict[str, SessionInfo]:
        """Return what workers hold of a session, as far as it can belong to it still.

        If nobody has the latest epoch that was heard of, and he who has said so is not there to
        take it back, what others have is of before.
        """
        found = {worker_id: info for worker_id, info in asked.items() if info is not None}
        latest = self._directory.latest(key)
        newest = max((info.epoch for info in found.values()), default=0)
        lives = {info.extents[0].incarnation for info in found.values()}
        if latest is not None and newest < latest.epoch and latest.incarnation not in lives:
            return {}
        return {
            worker_id: info
            for worker_id, info in found.items()
            if not is_left_behind(info.epoch, newest)
        }

    def _check_not_lost(self, key: SessionKey) -> None:
        """Let a session that no worker has which can be asked count as one that has ended.

        Raises:
            PagesLost: A worker was presumed dead while it held the session, or has died with it.
            Unavailable: Others may be on their way.
        """
        if self._directory.is_held_or_lost(key):
            raise pages_lost(0)
        self._settling.check()

    def _check_decided(self, loss: Loss) -> None:
        """Let a part that nobody has count as lost.

        Raises:
            WorkerLost, Unavailable: It is not known yet to be.
        """
        states = {self._directory.state_of_life(life) for life in loss.incarnations or ("",)}
        if WorkerState.SUSPECT in states:
            raise WorkerLost(
                f"a worker of this session is silent: from position {loss.position} on it is not "
                "known yet what is lost",
                retry_delay_s=RETRY_DELAY_S,
            )
        if None in states:
            self._settling.check_heard_of_all()
