"""Addressing requests to the workers that a session is on."""

from __future__ import annotations

from typing import Any

from kvservice.core import session as core
from kvservice_client._extents import Extent
from kvservice_client._leases import Lease
from kvservice_client._steady_call import SteadyCall


def address(request: Any, extent: Extent | core.Extent, lease: Lease) -> None:
    """Make a request one to the worker that an extent is on now, with the right to it."""
    capability = lease.capabilities.get(extent.address, b"")
    if isinstance(request, SteadyCall):
        request.go_to(extent.incarnation)
        request.capability = capability
        return
    fields = request.DESCRIPTOR.fields_by_name
    if "incarnation" in fields:
        request.incarnation = extent.incarnation
    if "stays" in fields and request.stays:
        request.stays[:] = [extent.stay]
    if "capability" in fields:
        request.capability = capability
    elif capability and "capabilities" in fields:
        request.capabilities[:] = [capability]
