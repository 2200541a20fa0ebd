"""Where durations go: the shell hands a recorder to whoever measures."""

from __future__ import annotations

from typing import Protocol


class Recorder(Protocol):
    """Receives what counters of state cannot tell. Must be fast and thread-safe."""

    def attention(self, seconds: float, num_rows: int) -> None:
        """Note one attention call: seconds of compute, and rows in the batch."""


class NullRecorder:
    """Forgets everything."""

    def attention(self, seconds: float, num_rows: int) -> None:
        del seconds, num_rows
