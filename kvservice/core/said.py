"""An Attend call as it came over the wire, read where it lies instead of decoded."""

from __future__ import annotations

from typing import Protocol


class Said(Protocol):
    """What a server looks at before it knows whether the call must be decoded.

    It aliases the bytes that it was read from, which must stay as they are.
    """

    @property
    def session_id(self) -> str: ...

    @property
    def capability(self) -> bytes:
        """What the caller shows; may be empty."""

    @property
    def call_id(self) -> int: ...

    @property
    def layer(self) -> int: ...

    @property
    def stores(self) -> bool:
        """Whether it brings keys."""

    @property
    def begins(self) -> bool:
        """Whether it carries a step's header."""

    @property
    def traced(self) -> bool:
        """Whether it belongs to a trace."""

    def tensors(self) -> tuple[bytes, bytes, bytes]:
        """Return copies of the bytes of q, k and v; empty where there are none."""
