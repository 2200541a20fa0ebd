"""Calls on workers, each for the life of the worker that the directory lists."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, Final, Protocol

from kvservice.core.caller import ANONYMOUS, Caller
from kvservice.core.errors import (
    DeadlineExceeded,
    Draining,
    KVServiceError,
    Moving,
    SessionMoved,
    StaleWorker,
    Unavailable,
    WorkerLost,
)
from kvservice.core.liveness import WorkerRecord, WorkerState
from kvservice.manager.directory import RETRY_DELAY_S, SharedDirectory
from kvservice.v1 import types_pb2

MAX_PARALLEL: Final = 8
KNOCK_S: Final = 0.3
SUSPECT_TIMEOUT_S: Final = 1.0
FOLLOWS: Final = {"GetSession", "Allocate"}
"""Where it matters that a session has moved; others are told to ask again."""

NOBODYS_SESSION: Final = "00000000-0000-4000-8000-000000000000"


class WorkerHandle(Protocol):
    """The manager's way to one worker. Thread-safe."""

    def call(self, method: str, request: Any, timeout_s: float, caller: Caller) -> Any:
        """Make a unary call, by its name in the descriptor, as the caller.

        Raises:
            KVServiceError: What the worker answers, or Unavailable, DeadlineExceeded.
        """

    def close(self) -> None:
        """Let go of the connection."""


class WorkerCalls:
    """Calls on the workers that the directory lists, which hears what becomes of them.

    Thread-safe. The lock guards the handles, and is never held during a call. Whoever has it may
    take the directory's, never the other way round.
    """

    def __init__(
        self,
        connect: Callable[[str], WorkerHandle],
        directory: SharedDirectory,
        *,
        timeout_s: float,
        executor: Executor | None,
    ) -> None:
        """
        Args:
            connect: Makes the handle of the worker at an address. Must not block.
            timeout_s: Deadline of each call.
            executor: Runs calls on several workers at once. None: threads of this object's own.
        """
        self._connect = connect
        self._directory = directory
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._handles: dict[str, tuple[str, WorkerHandle]] = {}  # worker id -> address, handle
        self._executor = executor or ThreadPoolExecutor(
            MAX_PARALLEL, thread_name_prefix="kvservice-manager"
        )

    def close(self) -> None:
        """End the threads and the connections. Calls in progress may fail."""
        self._executor.shutdown(wait=True)
        with self._lock:
            handles, self._handles = self._handles, {}
        for _, handle in handles.values():
            handle.close()

    def ask(self, worker_id: str, method: str, request: Any, caller: Caller) -> Any:
        """Call a worker, for the incarnation of it that is registered.

        Raises:
            WorkerLost: It does not answer, or another incarnation does.
            KVServiceError: What it answers.
        """
        with self._lock:  # so that no older record than another caller's brings its address back
            record, state = self._directory.record_and_state(worker_id)
            stale, handle = self._handle(record)
        if stale is not None:
            stale.close()
        if "incarnation" in request.DESCRIPTOR.fields_by_name:
            request = copy_of(request, incarnation=record.incarnation)
        try:
            timeout_s = SUSPECT_TIMEOUT_S if state is WorkerState.SUSPECT else self._timeout_s
            return handle.call(method, request, min(timeout_s, self._timeout_s), caller)
        except (Draining, Moving):
            raise
        except SessionMoved as error:
            if method in FOLLOWS:
                raise
            # It went while this call was on its way: the next one finds it.
            raise Moving(error.message, retry_delay_s=RETRY_DELAY_S) from error
        except (Unavailable, DeadlineExceeded, StaleWorker) as error:
            if isinstance(error, StaleWorker):  # another one answers, so this one is no more
                self._directory.bury(worker_id, record.incarnation)
            raise WorkerLost(
                f"worker {worker_id} does not answer: {error.reason}",
                retry_delay_s=RETRY_DELAY_S,
                worker_id=worker_id,
            ) from error

    def ask_all(
        self, worker_ids: Sequence[str], method: str, request: Any, caller: Caller
    ) -> list[tuple[str, Any]]:
        """Call workers at the same time; return worker id and answer, or error, of each."""

        def ask(worker_id: str) -> Any:
            try:
                return self.ask(worker_id, method, request, caller)
            except KVServiceError as error:
                return error

        # One is asked by this thread: most sessions are on one worker.
        if len(worker_ids) <= 1:
            return [(worker_id, ask(worker_id)) for worker_id in worker_ids]
        # The others know what call they are part of, as this one does.
        contexts = [copy_context() for _ in worker_ids]
        answers = self._executor.map(
            lambda context, worker_id: context.run(ask, worker_id), contexts, worker_ids
        )
        return list(zip(worker_ids, answers, strict=True))

    def probe(self) -> None:
        """Knock at the workers whose heartbeats have ended, to tell the dead from the cut off."""
        for record in self._directory.find_cut_off():
            self._knock(record)

    def _knock(self, record: WorkerRecord) -> None:
        """Ask a worker something cheap, and note whether anybody is there."""
        # Of a session that nobody has, so that the answer is an error that says who answers.
        request = types_pb2.ResetRequest(
            session_id=NOBODYS_SESSION, incarnation=record.incarnation, epoch=1, check_only=True
        )
        with self._lock:
            stale, handle = self._handle(record)
        if stale is not None:
            stale.close()
        life = (record.worker_id, record.incarnation)
        try:
            handle.call("Reset", request, KNOCK_S, ANONYMOUS)
        except DeadlineExceeded:
            return  # silence says nothing yet
        except StaleWorker:
            self._directory.replaced(*life)
            return
        except KVServiceError as error:
            if isinstance(error, Unavailable) and not isinstance(error, Draining):
                self._directory.refused(*life)
                return
        self._directory.answered(*life)  # with whatever error

    def _handle(self, record: WorkerRecord) -> tuple[WorkerHandle | None, WorkerHandle]:
        """Return a handle to close, and that of the worker. The lock is held."""
        address, handle = self._handles.get(record.worker_id, ("", None))
        if handle is not None and address == record.address:
            return None, handle
        fresh = self._connect(record.address)
        self._handles[record.worker_id] = (record.address, fresh)
        return handle, fresh


def copy_of(request: Any, **changes: Any) -> Any:
    """Return a copy of a message with other values in some fields."""
    copy = type(request)()
    copy.CopyFrom(request)
    for name, value in changes.items():
        copy.ClearField(name)
        if isinstance(value, (list, tuple)):
            getattr(copy, name).extend(value)
        else:
            setattr(copy, name, value)
    return copy
