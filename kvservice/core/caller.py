"""Who is calling, as the credentials say."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Role(Enum):
    """What a caller may do besides using its own sessions."""

    TENANT = "tenant"
    OPERATOR = "operator"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated peer. Sessions belong to its tenant."""

    tenant: str
    role: Role


ANONYMOUS: Final = Caller("default", Role.OPERATOR)
"""Everybody, where authentication is off."""
