"""Taking sessions over from other workers, page by page, while they are used there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvservice.clock import Clock
from kvservice.core.caller import SERVICE, Caller
from kvservice.core.errors import (
    Conflict,
    DeadlineExceeded,
    Draining,
    InternalError,
    KVServiceError,
    Moving,
    Overloaded,
    PagesLost,
    SessionMoved,
    SessionNotFound,
    StaleWorker,
    Unavailable,
)
from kvservice.core.failpoints import NO_FAILPOINTS, Failpoints
from kvservice.core.moving import CopiedPages, SessionState
from kvservice.core.session import SessionInfo
from kvservice.v1 import worker_pb2
from kvservice.wire import copies
from kvservice_workers.arrival import Arrival
from kvservice_workers.arriving_pages import Missing
from kvservice_workers.worker import PageWorker

LOG = logging.getLogger(__name__)

BATCH_BYTES: Final = 1 << 20
FEW_BYTES: Final = 1 << 18
SOON_S: Final = 0.15

MAX_ROUNDS: Final = 32
MAX_FREEZES: Final = 8
CALL_S: Final = 5.0
HAND_OVER_S: Final = 1.0
SILENCE_S: Final = 10.0
"""How long the other worker may not answer, before the session is its own."""

MAX_PULLS: Final = 16
MAX_REMEMBERED: Final = 1000
CONFIRMATIONS: Final = 5


class Peer(Protocol):
    """The way to another worker. Thread-safe."""

    def call(self, method: str, request: Any, timeout_s: float, caller: Caller) -> Any:
        """Make a unary call. Raises what the worker answers, or Unavailable, DeadlineExceeded."""

    def close(self) -> None:
        """Let go of the connection."""


Connect = Callable[[str], Peer]
Spawn = Callable[[Callable[[], None]], None]
"""Runs something beside everything else."""


@dataclass(eq=False, slots=True)
class Pull:
    """One session that is being taken over, and how that has ended."""

    request: worker_pb2.PullSessionRequest
    source_is_dead: bool = False
    copied_bytes: int = 0
    copying_s: float = 0.0
    info: SessionInfo | None = None
    error: KVServiceError | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.request.tenant, self.request.session_id

    @property
    def ended(self) -> bool:
        return self.info is not None or self.error is not None


class Puller:
    """Takes sessions over, each in a thread of its own. Thread-safe.

    It copies rounds of pages until few are missing, lets the session be frozen, fetches those, and
    then asks for the session. From that request on nobody but the other worker knows whose it is,
    until it has answered: nothing is served, and nothing given up, unless it is known to be dead.
    """

    def __init__(
        self,
        worker: PageWorker,
        connect: Connect,
        *,
        clock: Clock,
        spawn: Spawn | None = None,
        batch_bytes: int = BATCH_BYTES,
        few_bytes: int = FEW_BYTES,
        soon_s: float = SOON_S,
        failpoints: Failpoints = NO_FAILPOINTS,
    ) -> None:
        """
        Args:
            connect: Makes the way to the worker at an address. Must not block.
            spawn: None: in a thread.
            batch_bytes: What is fetched at once: while it is read, the session waits.
            few_bytes, soon_s: If no more is missing, or it will not take longer to fetch as far as
                can be told, the session may be frozen for it. At least the last page of each row
                is missing while somebody decodes, and pages may be large.
        """
        self._soon_s = soon_s
        self._batch_bytes = batch_bytes
        self._few_bytes = few_bytes
        self._worker = worker
        self._connect = connect
        self._clock = clock
        self._spawn = spawn if spawn is not None else self._in_thread
        self._passed = failpoints.passed
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._pulls: dict[tuple[str, str], Pull] = {}  # oldest first
        self._threads: set[threading.Thread] = set()
        self._num_made = 0

    def close(self) -> None:
        """Give up what is on its way, and wait for it."""
        self._stop.set()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def pull(self, request: worker_pb2.PullSessionRequest) -> Pull:
        """Begin to take a session over, or return how far that is.

        Raises:
            KVServiceError: It has failed, or cannot be begun.
        """
        key = (request.tenant, request.session_id)
        with self._lock:
            pull = self._pulls.get(key)
            if (
                pull is not None
                and pull.request.source_incarnation == request.source_incarnation
                and request.source_is_dead
            ):
                pull.source_is_dead = True
            if pull is not None and pull.request.move_id == request.move_id:
                if pull.error is not None:
                    raise _told(pull.error)
                return pull
            if pull is not None and not pull.ended:
                raise Conflict("another move of this session is under way", retry_delay_s=1.0)
            try:
                self._worker.arrivals.check_admitted(*key)
            except KVServiceError as error:
                self._worker.count_move(_outcome(error))
                raise
            if sum(not one.ended for one in self._pulls.values()) >= MAX_PULLS:
                raise Overloaded(f"{MAX_PULLS} sessions are on their way here", retry_delay_s=1.0)
            self._pulls.pop(key, None)
            pull = self._pulls[key] = Pull(request)
            self._forget_oldest()
        self._spawn(lambda: self._run(pull))
        return pull

    def _forget_oldest(self) -> None:
        ended = [key for key, pull in self._pulls.items() if pull.ended]
        for key in ended[: max(0, len(self._pulls) - MAX_REMEMBERED)]:
            del self._pulls[key]

    def _in_thread(self, run: Callable[[], None]) -> None:
        def whole() -> None:
            try:
                run()
            finally:
                with self._lock:
                    self._threads.discard(thread)

        self._num_made += 1
        thread = threading.Thread(
            target=whole, name=f"kvservice-pull-{self._num_made}", daemon=True
        )
        with self._lock:
            self._threads.add(thread)
        thread.start()

    # -- one session

    def _run(self, pull: Pull) -> None:
        began = self._clock.monotonic()
        source = Source(self._connect(pull.request.source_address), pull, self._clock, self._stop)
        try:
            info = self._take_over(pull, source)
        except KVServiceError as error:
            failure = error
        except Exception:
            LOG.exception("taking a session over has failed")
            failure = InternalError("taking the session over has failed: see the worker's log")
        else:
            self._worker.count_move("copied" if pull.request.keep else "moved")
            LOG.info(
                "session %s here from worker %s: %d bytes in %.3f s",
                "copied" if pull.request.keep else "moved",
                pull.request.source_worker_id,
                pull.copied_bytes,
                self._clock.monotonic() - began,
            )
            pull.info = info
            if not pull.request.keep:
                source.confirm(self._worker)
            source.close()
            return
        source.let_go()
        source.close()
        self._worker.count_move(_outcome(failure))
        LOG.info("session stays on worker %s: %s", pull.request.source_worker_id, failure.reason)
        pull.error = failure

    def _take_over(self, pull: Pull, source: Source) -> SessionInfo:
        worker, arrivals = self._worker, self._worker.arrivals
        state = source.state()
        self._check_the_same_part(pull, state)
        arrival = arrivals.begin(
            *pull.key, state, pull.request.source_incarnation, keeps=pull.request.keep
        )
        try:
            self._copy(pull, source, arrival, state)
            for _ in range(MAX_FREEZES):
                frozen_at = self._clock.monotonic()
                state = source.state(freeze=True)
                missing = worker.arriving_pages.sync(arrival, state)
                if not self._are_few(pull, missing):
                    self._copy(pull, source, arrival, source.state())
                    continue
                self._fetch(pull, source, arrival, missing)
                arrivals.complete(arrival, state, source.ticket)
                self._passed("move.complete")
                if self._is_ours(pull, source, arrival):
                    self._worker.note_handover(self._clock.monotonic() - frozen_at)
                    self._passed("move.arrived")
                    return worker.access.get(*pull.key, renew=False)
                arrivals.reopen(arrival)
            raise Conflict("the session could not be handed over in time")
        finally:
            arrivals.drop(arrival)  # unless it is here

    def _check_the_same_part(self, pull: Pull, state: SessionState) -> None:
        """Refuse a part of a session of which another part has left from here.

        Its holder may not know yet, and would take this part for that one.
        """
        tenant, session_id = pull.key
        has_left = self._worker.departures.moved_among(tenant, [session_id])
        if has_left and self._worker.config.incarnation not in state.replaces:
            raise Conflict(
                "another part of the session has left from here, and is still looked for"
            )

    def _copy(self, pull: Pull, source: Source, arrival: Arrival, state: SessionState) -> None:
        """Copy pages in rounds until few are missing.

        Raises:
            Conflict: The session changes faster than it can be copied.
        """
        for _ in range(MAX_ROUNDS):
            missing = self._worker.arriving_pages.sync(arrival, state)
            if self._are_few(pull, missing):
                return
            self._fetch(pull, source, arrival, missing)
            self._passed("move.copied")
            state = source.state()
        raise Conflict("the session changes faster than it can be copied", retry_delay_s=5.0)

    def _are_few(self, pull: Pull, missing: Sequence[Missing]) -> bool:
        """Whether what is missing can be fetched while the session waits."""
        num_bytes = sum(one.num_bytes for one in missing)
        takes_s = num_bytes * pull.copying_s / max(1, pull.copied_bytes)
        return num_bytes <= self._few_bytes or (0 < takes_s <= self._soon_s)

    def _fetch(
        self, pull: Pull, source: Source, arrival: Arrival, missing: Sequence[Missing]
    ) -> None:
        for one in missing:
            for pages in _batches(one, self._batch_bytes):
                oldest = [-1] * len(pages)
                began = self._clock.monotonic()
                for layers in _layers_at_once(one, len(pages), self._batch_bytes):
                    copied = source.pages(one.window, layers, pages)
                    self._worker.arriving_pages.store(arrival, one, pages, copied)
                    pull.copied_bytes += copied.num_bytes
                    oldest = [
                        at if before < 0 else min(at, before)
                        for at, before in zip(copied.written, oldest, strict=True)
                    ]
                pull.copying_s += self._clock.monotonic() - began
                self._worker.arriving_pages.stored(
                    arrival, one, pages, [max(0, at) for at in oldest]
                )

    def _is_ours(self, pull: Pull, source: Source, arrival: Arrival) -> bool:
        """Ask for a session until it is known whose it is. False: it goes on where it was.

        Raises:
            PagesLost: The other worker is dead: what it had not handed over is lost with it.
            SessionNotFound: It was released, or has expired.
        """
        arrivals = self._worker.arrivals
        while True:
            try:
                source.hand_over(self._worker)
            except StaleWorker:
                raise _lost() from None
            except SessionNotFound:
                raise
            except (Unavailable, DeadlineExceeded) as error:
                if arrival.here:
                    return True
                if arrival.gone:
                    raise SessionNotFound("the session was released, or has expired") from None
                if pull.source_is_dead or self._stop.is_set():
                    raise _lost() from error
                self._clock.wait(self._stop, 0.05)
            except Conflict:
                return arrival.here
            else:
                if not arrivals.arrive(arrival):
                    raise SessionNotFound("the session was released, or has expired")
                return True


class Source:
    """The worker that a session is taken from. Calls that may be repeated are."""

    def __init__(self, peer: Peer, pull: Pull, clock: Clock, stop: threading.Event) -> None:
        self.ticket = 0
        self._peer = peer
        self._pull = pull
        self._clock = clock
        self._stop = stop
        self._copy = 0

    def close(self) -> None:
        self._peer.close()

    def state(self, *, freeze: bool = False) -> SessionState:
        """Return what the session is made of; `freeze`: from now on, for a moment."""
        answer = self._ask("CopyState", self._state_request(freeze))
        self._copy, self.ticket = answer.copy, answer.ticket
        return copies.state_from_pb(answer.state)

    def let_go(self) -> None:
        """Let the session thaw, if it was frozen."""
        if self.ticket:
            try:
                self._peer.call("CopyState", self._state_request(False), HAND_OVER_S, SERVICE)
            except KVServiceError as error:
                LOG.debug("the session thaws by itself: %s", error)

    def pages(self, window: int | None, layers: Sequence[int], pages: Sequence[int]) -> CopiedPages:
        """Return contents of pages."""
        request = self._about(
            worker_pb2.CopyPagesRequest(
                copy=self._copy,
                window=window,
                layers=layers,
                pages=copies.page_numbers_to_pb(pages),
            )
        )
        return copies.pages_from_pb(self._ask("CopyPages", request))

    def hand_over(self, worker: PageWorker, *, confirmed: bool = False) -> None:
        """Ask for the session, once."""
        config = worker.config
        request = self._about(
            worker_pb2.HandOverRequest(
                ticket=self.ticket,
                worker_id=config.worker_id,
                worker_address=config.address,
                worker_incarnation=config.incarnation,
                confirmed=confirmed,
                keep=self._pull.request.keep,
            )
        )
        self._peer.call("HandOver", request, HAND_OVER_S, SERVICE)

    def confirm(self, worker: PageWorker) -> None:
        """Say that the session is served, for who waits for it; if that is heard."""
        for _ in range(CONFIRMATIONS):
            try:
                self.hand_over(worker, confirmed=True)
            except (Unavailable, DeadlineExceeded):
                self._clock.wait(self._stop, 0.1)
            except KVServiceError:
                return
            else:
                return

    def _state_request(self, freeze: bool) -> Any:
        return self._about(
            worker_pb2.CopyStateRequest(
                copier=self._pull.request.move_id, copy=self._copy, freeze=freeze
            )
        )

    def _about(self, request: Any) -> Any:
        asked = self._pull.request
        request.tenant, request.session_id = asked.tenant, asked.session_id
        request.incarnation = asked.source_incarnation
        return request

    def _ask(self, method: str, request: Any) -> Any:
        deadline = self._clock.monotonic() + SILENCE_S
        while True:
            try:
                return self._peer.call(method, request, CALL_S, SERVICE)
            except StaleWorker as error:
                raise _lost() from error
            except (Unavailable, DeadlineExceeded) as error:
                over = self._clock.monotonic() >= deadline or self._pull.source_is_dead
                if isinstance(error, Draining) or over or self._stop.is_set():
                    raise Unavailable(f"the other worker does not answer: {error}") from error
            if self._clock.wait(self._stop, 0.1):
                raise Unavailable("this worker is about to end")


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


def _lost() -> PagesLost:
    return PagesLost("the worker that held the session has died", from_position=0)


def _told(error: KVServiceError) -> KVServiceError:
    """Return how a failure is told to the manager, to whom `Unavailable` would say that this worker
    does not answer, when it is the other one."""
    if isinstance(error, (Unavailable, DeadlineExceeded)) and not isinstance(error, Draining):
        return Conflict(f"the worker that holds it cannot be reached: {error}", retry_delay_s=1.0)
    return error


def _outcome(error: KVServiceError) -> str:
    """Return what a failure counts as."""
    if isinstance(error, PagesLost):
        return "lost"
    if isinstance(error, (SessionMoved, Conflict, Moving)):
        return "conflict"
    if isinstance(error, (Unavailable, DeadlineExceeded, InternalError)) and not isinstance(
        error, Draining
    ):
        return "unavailable"
    return "refused"
