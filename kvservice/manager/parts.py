"""Parts of a session: what each worker says about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvservice.core.errors import Conflict
from kvservice.core.extents import merge_sessions, row_lengths
from kvservice.core.session import SessionInfo
from kvservice.v1 import types_pb2
from kvservice.wire.convert import session_to_pb


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker says about a session."""

    worker_id: str
    info: SessionInfo


def merged(parts: Sequence[Part]) -> types_pb2.Session:
    """Return the session of which these are the parts; raises as `merge_sessions` does."""
    return session_to_pb(merge_sessions([part.info for part in parts]))


def check_lengths(parts: Sequence[Part], expected: tuple[int, ...], num_rows: int) -> None:
    """Refuse to change a session of which more is stored, or less found, than its holder says.

    Args:
        num_rows: Of the session, where nothing is stored.
    """
    stored = row_lengths([part.info.extents[0] for part in parts]) or (0,) * num_rows
    if stored != expected:
        raise Conflict(
            f"expected_lengths are {list(expected)}, stored are {list(stored)}",
            lengths=",".join(map(str, stored)),
        )
