"""On whose behalf a call is made, where authentication is off."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvservice.core.caller import ANONYMOUS, MAX_TENANT_LENGTH, Caller
from kvservice.core.errors import InvalidRequest

TENANT_KEY: Final = "x-kvservice-tenant"
"""Metadata by which the manager says on whose behalf it forwards, where authentication is off."""

Metadata = Iterable[tuple[str, str | bytes]]


def stated_tenant(metadata: Metadata) -> str | None:
    """Return the tenant that a call states; None if it states none.

    Raises:
        InvalidRequest: The tenant is not a name, or stated twice.
    """
    tenants = [value for key, value in metadata if key == TENANT_KEY]
    if not tenants:
        return None
    tenant = tenants[0]
    if len(tenants) > 1 or not isinstance(tenant, str):
        raise InvalidRequest(f"{TENANT_KEY} must be stated once")
    if not 1 <= len(tenant) <= MAX_TENANT_LENGTH:
        raise InvalidRequest(f"a tenant must have 1 to {MAX_TENANT_LENGTH} characters")
    return tenant


def caller_of(metadata: Metadata) -> Caller:
    """Return the caller. Authentication is off: everybody may be anybody.

    Raises:
        InvalidRequest: The tenant is not a name, or stated twice.
    """
    tenant = stated_tenant(metadata)
    return ANONYMOUS if tenant is None else Caller(tenant, ANONYMOUS.role)


def metadata_of(caller: Caller) -> tuple[tuple[str, str], ...]:
    """Return what the manager sends along with a call that it forwards."""
    return ((TENANT_KEY, caller.tenant),)
