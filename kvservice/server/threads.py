"""Threads that serve calls, and how long calls wait for one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvservice.clock import Clock
from kvservice.core.recorder import NullQueueRecorder, QueueRecorder


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
