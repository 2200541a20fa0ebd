"""What a caller is told of an exception, and what only the log says."""

from __future__ import annotations

import logging
import uuid

from kvservice.core.errors import InternalError, KVServiceError

LOG = logging.getLogger(__name__)


def explained(error: Exception, method: str) -> KVServiceError:
    """Return the error that a caller gets.

    One of the tree is itself. Any other becomes InternalError with an id and nothing else; the
    log explains the id.
    """
    if isinstance(error, KVServiceError):
        return error
    error_id = uuid.uuid4().hex[:16]
    LOG.error("internal error id=%s in %s", error_id, method, exc_info=error)
    return InternalError(f"internal error id={error_id}", error_id=error_id)
