"""What a server's log lines look like, and which call they belong to.

Levels: `debug` every call; `info` what changes, and calls that are refused, with why; `warning` a
human should look; `error` something is broken or lost. What is logged never has credentials,
tensors or session contents in it.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
import uuid
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final, TextIO

REQUEST_KEY: Final = "x-request-id"
FORMATS: Final = ("text", "json")
LEVELS: Final = ("debug", "info", "warning", "error")

_VALID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FIELDS: Final = ("rpc_method", "rpc_outcome", "duration_s", "trace_id")


class Request:
    """One call, as the log knows it: by the caller's own id, or one made when first asked for."""

    __slots__ = ("_id",)

    def __init__(self, stated: object = None) -> None:
        valid = isinstance(stated, str) and _VALID.fullmatch(stated) is not None
        self._id: str | None = str(stated) if valid else None

    @property
    def id(self) -> str:
        if self._id is None:
            self._id = uuid.uuid4().hex
        return self._id


TRACE_ID: ContextVar[str] = ContextVar("kvservice-trace", default="")
"""The trace that this thread's call is part of, where it is traced."""

REQUEST: ContextVar[Request | None] = ContextVar("kvservice-request", default=None)
"""The call that this thread serves."""


class _OfRequest(logging.Filter):
    """Notes on each record which call it belongs to."""

    def filter(self, record: logging.LogRecord) -> bool:
        request = REQUEST.get()
        record.request_id = "" if request is None else request.id
        record.trace_id = TRACE_ID.get()
        return True


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, request_id, and what a record adds."""

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("request_id", *_FIELDS):
            value = record.__dict__.get(name)
            if value not in (None, ""):
                found[name] = value
        if record.exc_info and record.exc_info[0] is not None:
            found["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(found, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """One line for people; an exception follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        request_id = record.__dict__.get("request_id")
        return f"{line} [{request_id}]" if request_id else line


def configure(level: str, style: str, stream: TextIO | None = None) -> None:
    """Send this process's log to stderr. What was configured before is replaced.

    Args:
        level: One of LEVELS.
        style: One of FORMATS. Times are UTC in JSON, and local in text.
        stream: Where it goes instead.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    formatter: logging.Formatter
    if style == "json":
        formatter = JsonFormatter()
    else:
        formatter = TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(formatter)
    handler.addFilter(_OfRequest())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
