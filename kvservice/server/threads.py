"""Threads that serve calls, how long calls wait for one, and what takes none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from kvservice.clock import Clock
from kvservice.core.recorder import NullQueueRecorder, QueueRecorder

B = TypeVar("B", bound=Callable[..., Any])


class RpcThreads(ThreadPoolExecutor):
    """A pool that tells a recorder of each call that waits. `recorder` may be set before use."""

    def __init__(self, num_threads: int, clock: Clock) -> None:
        super().__init__(num_threads, thread_name_prefix="kvservice-rpc")
        self.recorder: QueueRecorder = NullQueueRecorder()
        self._clock = clock

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        recorder, since = self.recorder, self._clock.monotonic()

        def run() -> Any:
            recorder.left(self._clock.monotonic() - since)
            return fn(*args, **kwargs)

        recorder.entered()
        try:
            return super().submit(run)
        except BaseException:  # the pool has been shut down
            recorder.left(0.0)
            raise


class AtOnce(ThreadPoolExecutor):
    """Runs what it is given at once, in gRPC's own thread: for what is short and never waits.

    That thread takes all that arrives, so refusing there costs no thread and no turn in a queue.
    """

    def __init__(self) -> None:
        super().__init__(1)  # which is never started

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


def served_by(threads: ThreadPoolExecutor, behaviour: B) -> B:
    """Return a handler's function, to be run by these threads rather than by the server's own.

    By an attribute that gRPC looks for; without it, the server's own would do.
    """
    behaviour.experimental_thread_pool = threads  # type: ignore[attr-defined]
    return behaviour
