"""What one tenant may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

from kvservice.core.errors import InvalidRequest, QuotaExceeded


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one tenant. None: no limit of its own.

    Fields:
        sessions: Open at the same time, on all workers.
        pages: Used by or promised to its sessions, on all workers.
        rows: Of one session.
        tokens: The length of a row.
        calls: In progress at the same time, on each server; a stream or a lane is one.
    """

    sessions: int | None = None
    pages: int | None = None
    rows: int | None = None
    tokens: int | None = None
    calls: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and (type(value) is not int or value < 0):
                raise InvalidRequest(f"{field.name} must be a whole number, at least 0: {value!r}")

    def check(self, name: str, wanted: int) -> None:
        """Raise QuotaExceeded if `wanted` of a field is more than the tenant may have."""
        limit: int | None = getattr(self, name)
        if limit is not None and wanted > limit:
            raise QuotaExceeded(
                f"this tenant may have {limit} {name}, {wanted} would be needed",
                quota=name,
                limit=limit,
                needed=wanted,
            )


UNLIMITED: Final = Quota()

QuotaOf = Callable[[str], Quota]
"""Returns the quota of a tenant, as it is now."""


def unlimited(tenant: str) -> Quota:
    """Return no limits, whoever asks."""
    del tenant
    return UNLIMITED
