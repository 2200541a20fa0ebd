"""What the workers have stored, asked for after a call whose outcome is unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvservice.core.errors import StaleEpoch
from kvservice.core.extents import num_stored
from kvservice.core.session import SessionInfo
from kvservice.v1 import types_pb2
from kvservice.wire import convert
from kvservice_client._extents import Extent, Lengths
from kvservice_client._links import Links
from kvservice_client._mirror import Mirror
from kvservice_client._outcomes import CopiesChanged
from kvservice_client._padding import Padding


def refresh(mirror: Mirror, links: Links, *, is_cut_next: bool = False) -> dict[Extent, Lengths]:
    """Ask all workers what they have stored, and make it the mirror's.

    Args:
        is_cut_next: To where all copies are alike. Otherwise one that lacks what the other one
            has is given up.

    Returns:
        What each extent's worker says its rows end at.

    Raises:
        StaleEpoch: Somebody has taken the session over.
        CopiesChanged: Of two copies one was behind, or there is one more.
    """
    nothing = (0,) * mirror.num_rows
    # Nobody can be asked what a lost extent held; it was at least what is known.
    has_gap = mirror.find_lost() is not None
    lengths = dict(mirror.lengths) if has_gap else {}
    padding, stored = mirror.padding, dict[Extent, Lengths]()
    for extent in mirror.extents:
        if extent.lost:
            continue
        infos = {copy: _ask_where(mirror, links, copy) for copy in extent.copies}
        behind = _find_behind(infos, is_cut_next=is_cut_next)
        if behind is not None:
            raise links.copies.give_up(behind)
        mirror.last_step = max(mirror.last_step, *(info.step for info in infos.values()))
        stored |= {copy: info.extents[0].stops or nothing for copy, info in infos.items()}
        if has_gap:  # what lies beside it need not reach as far as the next one begins
            extent.stops = stored[extent]
        for info in infos.values():
            padding = padding.united(Padding.of(mirror.num_rows, info.padding))
        # What one of the copies lacks is nothing to count on.
        for layer, of_copies in enumerate(
            zip(*(info.lengths for info in infos.values()), strict=False)
        ):
            known, of_layer = lengths.get(layer, nothing), _lowest(of_copies)
            lengths[layer] = tuple(map(max, known, of_layer))
    mirror.lengths = {layer: one for layer, one in lengths.items() if any(one)}
    mirror.padding = padding
    mirror.uncertain, mirror.is_late_possible = False, True
    return stored


def _ask_where(mirror: Mirror, links: Links, extent: Extent) -> SessionInfo:
    """Ask a worker where the session stands there."""
    answer = links.unary(extent, "GetSession", types_pb2.GetSessionRequest(session_id=mirror.id))
    info = convert.session_from_pb(answer.session)
    if info.epoch != mirror.epoch:
        if mirror.spec.replicas > 1 and links.copies.finds_new(extent):
            raise CopiesChanged("the session has a copy more")
        raise StaleEpoch(
            f"the session is at epoch {info.epoch}, this holder at {mirror.epoch}",
            epoch=info.epoch,
        )
    return info


def _find_behind(infos: Mapping[Extent, SessionInfo], *, is_cut_next: bool) -> Extent | None:
    """Return a copy that lacks what the other one has, unless a cut takes it from that too."""
    seen = {
        copy: (info.last_write, *(() if is_cut_next else (info.current_step, num_stored(info))))
        for copy, info in infos.items()
    }
    behind = min(seen, key=lambda copy: seen[copy])
    return behind if seen[behind] < max(seen.values()) else None


def _lowest(lengths: Sequence[Lengths]) -> Lengths:
    return tuple(map(min, *lengths)) if len(lengths) > 1 else lengths[0]
