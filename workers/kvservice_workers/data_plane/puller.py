"""All sessions that a worker is to take over from others: begun, watched, and remembered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from kvservice.clock import Clock
from kvservice.core.errors import Conflict, InternalError, KVServiceError, Overloaded
from kvservice.core.failpoints import NO_FAILPOINTS, Failpoints
from kvservice.v1 import worker_pb2
from kvservice_workers.data_plane.peer import Peer, Source
from kvservice_workers.data_plane.pull import Pull, outcome, told
from kvservice_workers.data_plane.takeover import Pace, Takeover
from kvservice_workers.worker import PageWorker

LOG = logging.getLogger(__name__)

PACE: Final = Pace(batch_bytes=1 << 20, few_bytes=1 << 18, soon_s=0.15)

MAX_PULLS: Final = 16
MAX_REMEMBERED: Final = 1000

Connect = Callable[[str], Peer]
Spawn = Callable[[Callable[[], None]], None]
"""Runs something beside everything else."""


class Puller:
    """Takes sessions over, each in a thread of its own. Thread-safe."""

    def __init__(
        self,
        worker: PageWorker,
        connect: Connect,
        *,
        clock: Clock,
        spawn: Spawn | None = None,
        pace: Pace = PACE,
        failpoints: Failpoints = NO_FAILPOINTS,
    ) -> None:
        """
        Args:
            connect: Makes the way to the worker at an address. Must not block.
            spawn: None: in a thread.
            pace: How pages are fetched.
        """
        self._worker = worker
        self._pace = pace
        self._connect = connect
        self._clock = clock
        self._spawn = spawn if spawn is not None else self._in_thread
        self._failpoints = failpoints
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
                    raise told(pull.error)
                return pull
            if pull is not None and not pull.ended:
                raise Conflict("another move of this session is under way", retry_delay_s=1.0)
            try:
                self._worker.arrivals.check_admitted(*key)
            except KVServiceError as error:
                self._worker.count_move(outcome(error))
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

    def _run(self, pull: Pull) -> None:
        began = self._clock.monotonic()
        peer = self._connect(pull.request.source_address)
        source = Source(peer, pull, self._worker.config, self._clock, self._stop)
        takeover = Takeover(
            self._worker,
            pull,
            source,
            self._pace,
            clock=self._clock,
            stop=self._stop,
            failpoints=self._failpoints,
        )
        try:
            info = takeover.run()
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
                source.confirm()
            source.close()
            return
        source.let_go()
        source.close()
        self._worker.count_move(outcome(failure))
        LOG.info("session stays on worker %s: %s", pull.request.source_worker_id, failure.reason)
        pull.error = failure
