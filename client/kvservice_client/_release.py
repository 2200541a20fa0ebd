"""Giving back what workers hold of a session."""

from __future__ import annotations

from contextlib import suppress

from kvservice.core.errors import KVServiceError
from kvservice.v1 import types_pb2
from kvservice_client._extents import Extent
from kvservice_client._links import Links
from kvservice_client._mirror import Mirror
from kvservice_client._outcomes import FAILED, CopiesChanged


def release(mirror: Mirror, links: Links) -> None:
    """Free the session on all its workers.

    Raises:
        WorkerLost: One does not answer; what it holds goes when the lease ends.
    """
    request = types_pb2.ReleaseRequest(session_ids=[mirror.id], epochs=[mirror.epoch])
    if links.lease.unsettled:
        request.unsettled_ids.append(mirror.id)
    failures: list[KVServiceError] = []
    for extent in mirror.everywhere:
        try:
            with suppress(CopiesChanged):
                links.unary(extent, "Release", request)
        except KVServiceError as error:
            if not extent.lost:  # with a dead worker its pages are gone
                failures.append(error)
    if failures:
        raise failures[0]


def settle_extents(mirror: Mirror, links: Links) -> None:
    """Give back extents that hold nothing, and renew and release the session where it is now.

    As many workers as the session spreads over stay with it. One that cannot be reached stays
    too, and is asked another time.
    """
    while mirror.spares and len(mirror.extents) + len(mirror.spares) > mirror.spec.spread:
        if not all(_give_back(mirror, links, copy) for copy in mirror.spares[-1].copies):
            break
        mirror.spares.pop().close_streams()
    links.whereabouts.follow_extents()


def _give_back(mirror: Mirror, links: Links, extent: Extent) -> bool:
    """Release what a worker holds of the session; return False if it cannot be reached."""
    request = types_pb2.ReleaseRequest(
        session_ids=[mirror.id], epochs=[mirror.epoch], stays=[extent.stay]
    )
    try:
        links.unary(extent, "Release", request)
    except FAILED:
        return extent.lost
    return True
