"""Who is calling, out of what a call carries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvservice.core.caller import ANONYMOUS, Caller
from kvservice.core.errors import InvalidRequest

TENANT_KEY: Final = "x-kvservice-tenant"
"""Metadata by which the manager says on whose behalf it forwards, where authentication is off."""

MAX_TENANT_LENGTH: Final = 128


def caller_of(metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
    """Return the caller. Authentication is off: everybody may be anybody.

    Raises:
        InvalidRequest: The tenant is not a name, or stated twice.
    """
    tenants = [value for key, value in metadata if key == TENANT_KEY]
    if not tenants:
        return ANONYMOUS
    tenant = tenants[0]
    if len(tenants) > 1 or not isinstance(tenant, str):
        raise InvalidRequest(f"{TENANT_KEY} must be stated once")
    if not 1 <= len(tenant) <= MAX_TENANT_LENGTH:
        raise InvalidRequest(f"a tenant must have 1 to {MAX_TENANT_LENGTH} characters")
    return Caller(tenant, ANONYMOUS.role)


def metadata_of(caller: Caller) -> tuple[tuple[str, str], ...]:
    """Return what the manager sends along with a call that it forwards."""
    return ((TENANT_KEY, caller.tenant),)
