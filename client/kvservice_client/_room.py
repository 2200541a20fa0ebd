"""Room on another worker, when the tail is full."""

from __future__ import annotations

from kvservice.core.errors import KVServiceError, OutOfPages
from kvservice.v1 import types_pb2
from kvservice_client._connections import FRONT
from kvservice_client._extents import adopt
from kvservice_client._links import Links
from kvservice_client._mirror import Mirror
from kvservice_client._release import settle_extents


def find_room(mirror: Mirror, links: Links, token_count: int) -> KVServiceError | None:
    """Ask the manager for room for more tokens in each row, and adopt the extents it names.

    Returns:
        None if there is room now, or else why there is none; then nothing has changed.
    """
    if links.connections.lone_worker:
        return OutOfPages("there is no manager, so no other worker to go to")
    request = types_pb2.AppendRequest(
        session_id=mirror.id,
        epoch=mirror.epoch,
        token_count=token_count,
        expected_lengths=mirror.longest(),
    )
    try:
        session = links.connections.ask(FRONT, "Append", request).session
    except KVServiceError as error:
        return error
    before = mirror.living
    mirror.extents, mirror.spares = adopt(
        before, links.connections.extents_of(session), mirror.longest(), mirror.spec.spread
    )
    for extent in before:
        if extent not in mirror.living:
            extent.close_streams()
    mirror.go_on_where_missing()
    settle_extents(mirror, links)
    return None
