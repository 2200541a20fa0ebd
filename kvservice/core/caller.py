"""Who is calling, as the credentials say."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvservice.core.errors import InvalidRequest

MAX_TENANT_LENGTH: Final = 128


class Role(Enum):
    """What a caller may do besides using its own sessions; see `kvservice.core.access`."""

    TENANT = "tenant"
    OPERATOR = "operator"
    METRICS = "metrics"
    SERVICE = "service"  # the manager and the workers, by the key they share


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated peer. Sessions belong to its tenant.

    Fields:
        token_id: Names the bearer token that let it in, and is of no use in its place. Empty: none.
        credential: What it has shown, for what outlives the call: whoever has put it there looks
            at it again.
    """

    tenant: str
    role: Role
    token_id: bytes = field(default=b"", compare=False, repr=False)
    credential: object | None = field(default=None, compare=False, repr=False)


ANONYMOUS: Final = Caller("default", Role.OPERATOR)
"""Everybody, where authentication is off."""

SERVICE: Final = Caller("kvservice", Role.SERVICE)
"""The manager, and the workers, in calls of their own."""


def check_tenant(tenant: str) -> str:
    """Return a tenant's name.

    Raises:
        InvalidRequest: It is not 1 to 128 letters, digits, '.', '_', '-', beginning with one of
            the first two.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", tenant) or len(tenant) > MAX_TENANT_LENGTH:
        raise InvalidRequest(
            f"a tenant must have 1 to {MAX_TENANT_LENGTH} letters, digits, '.', '_', '-'"
        )
    return tenant
