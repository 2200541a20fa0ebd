"""What calls on a session's workers end with, instead of their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvservice.core.errors import (
    DeadlineExceeded,
    InternalError,
    KVServiceError,
    PagesLost,
    Unavailable,
)


class CopiesChanged(Exception):
    """A copy was given up, or made, and another one has all that was acknowledged:
    `Changes.settle`, and the same call again. Never leaves the client."""


Failure = KVServiceError | CopiesChanged

FAILED: Final = (KVServiceError, CopiesChanged)
"""What a call on a worker may end with, instead of its result."""

OUTCOME_UNKNOWN: Final = (PagesLost, CopiesChanged, Unavailable, DeadlineExceeded, InternalError)
"""After these it is not known whether a call was carried out. The worst comes first."""


def find_worst(outcomes: Sequence[object]) -> Failure | None:
    """Return the error that says most about the session, or None. The tail's comes last."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, FAILED)]
    for kind in OUTCOME_UNKNOWN:
        for error in errors:
            if isinstance(error, kind):
                return error
    return errors[-1] if errors else None
