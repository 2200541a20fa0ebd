"""Putting together what streams bring in one frame or in many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kvservice.core.errors import Unavailable
from kvservice.wire import fragments

MAX_MESSAGE_BYTES: Final = 1 << 31
"""The largest message put together from fragments: protobuf's own limit."""


def join(responses: Iterator[Any], result: type[Any]) -> Any:
    """Return the next whole result of a stream of frames."""
    joiner: fragments.Joiner | None = None
    for response in responses:
        if response.WhichOneof("frame") != "fragment":
            return response.result
        joiner = joiner or fragments.Joiner(MAX_MESSAGE_BYTES)
        whole = joiner.add(response.fragment)
        if whole is not None:
            return result.FromString(bytes(whole))
    raise Unavailable("the server has ended the stream")
