"""Forking a session on the workers that hold it."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from kvservice.core.errors import AlreadyExists, KVServiceError, PositionOutOfRange
from kvservice.v1 import types_pb2
from kvservice.wire import convert
from kvservice_client._extents import Extent
from kvservice_client._leases import Leases
from kvservice_client._links import Links
from kvservice_client._mirror import Mirror
from kvservice_client._outcomes import FAILED
from kvservice_client._refresh import refresh

GIVE_BACK_S: Final = 1.0
MAX_FORK_TRIES: Final = 5


def fork_mirror(parent: Mirror, links: Links, leases: Leases, token_count: int | None) -> Mirror:
    """Fork a session on all its workers, and return the picture of the child.

    What is made before a failure is released in the background. Where a child has moved before the
    answer came that it was made, another one is.

    Args:
        token_count: Leading tokens of each row to share. None: all of each.

    Raises:
        PositionOutOfRange: A row is shorter.
    """
    for _ in range(MAX_FORK_TRIES - 1):
        with suppress(AlreadyExists):
            return _fork(parent, links, leases, token_count)
    return _fork(parent, links, leases, token_count)


def _fork(parent: Mirror, links: Links, leases: Leases, token_count: int | None) -> Mirror:
    if parent.uncertain:
        refresh(parent, links)
    shortest = min(parent.longest())
    if token_count is not None and not 1 <= token_count <= shortest:
        raise PositionOutOfRange(
            f"token_count must be 1 to the shortest row's length, {shortest}, got {token_count}",
            length=shortest,
        )
    child_id = links.connections.new_id()
    extents = [
        extent
        for extent in parent.extents
        if token_count is None or min(extent.starts) < token_count
    ]
    opened: list[types_pb2.Session] = []
    copies = [copy for extent in extents for copy in extent.copies]
    try:
        for extent in copies:
            address = extent.address
            request = types_pb2.ForkRequest(
                session_id=parent.id,
                incarnation=extent.incarnation,
                epoch=parent.epoch,
                new_session_id=child_id,
                token_count=token_count,
                clip=len(parent.extents) > 1,
            )
            opened.append(links.unary(extent, "Fork", request).session)
            if extent.address != address:
                _give_back(links, child_id, address)
    except FAILED:
        # A copy may have been given up since it has answered, and live.
        addresses = tuple(
            extent.address
            for index, extent in enumerate(copies)
            if index < len(opened) or not extent.lost
        )
        leases.let_go(child_id, parent.spec.ttl_s, addresses)
        raise
    keep = parent.longest() if token_count is None else (token_count,) * parent.num_rows
    child = Mirror(convert.session_from_pb(opened[0]))
    child.num_rows = parent.num_rows
    child.lengths = {
        layer: tuple(map(min, lengths, keep)) for layer, lengths in parent.lengths.items()
    }
    child.padding = parent.padding.cut(keep)
    answers = dict(zip(copies, opened, strict=True))
    for extent in extents:
        mine = _child_of(extent, answers[extent])
        mine.starts, mine.stops = extent.starts, extent.stops
        mine.knows_padding = extent.knows_padding
        mine.cut(keep)
        if extent.twin is not None:
            mine.twin = _child_of(extent.twin, answers[extent.twin])
        child.extents.append(mine)
    return child


def _child_of(extent: Extent, answer: types_pb2.Session) -> Extent:
    told = answer.extents[0]
    return Extent(
        extent.address,
        extent.incarnation,
        (),
        (),
        extent.worker_id,
        capability=told.capability,
        group=told.group,
        stay=told.stay,
    )


def _give_back(links: Links, child_id: str, address: str) -> None:
    """Release a child where its parent was before it moved: it may have been forked there too,
    without an answer. What cannot be reached will expire.

    The child that is used may have come there since: what has moved in is that one.
    """
    look = types_pb2.GetSessionRequest(session_id=child_id, look_only=True)
    with suppress(KVServiceError):
        found = links.connections.ask(address, "GetSession", look, timeout_s=GIVE_BACK_S)
        extent = found.session.extents[0]
        if not extent.replaces:
            request = types_pb2.ReleaseRequest(session_ids=[child_id], stays=[extent.stay])
            links.connections.ask(address, "Release", request, timeout_s=GIVE_BACK_S)
