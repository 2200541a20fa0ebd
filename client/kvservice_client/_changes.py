"""Structural changes: Pop, Reset, Select. Numbered by the epoch they start from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvservice.core.errors import KVServiceError, StaleEpoch
from kvservice.v1 import types_pb2
from kvservice.wire import convert
from kvservice_client._extents import Extent, Lengths, adopt
from kvservice_client._links import OUTCOME_UNKNOWN, Links
from kvservice_client._mirror import Mirror


@dataclass(slots=True)
class Change:
    """A change on its way to the workers.

    Fields:
        requests: Still without an answer. A retry sends the same bytes.
        adopt: Makes the mirror what the workers are, once all have it.
        begun: Whether a worker has it, or may have it.
    """

    method: str
    requests: list[tuple[Extent, Any]]
    adopt: Callable[[], None]
    begun: bool = False


class Changes:
    """Makes structural changes on all workers of one session, or on none.

    With several workers, all check a change before the first one gets it. A change that some may
    have is rolled forward: `settle` repeats it, and nothing else may be done before.
    """

    def __init__(self, mirror: Mirror, links: Links) -> None:
        self._mirror = mirror
        self._links = links
        self._pending: Change | None = None

    def settle(self) -> None:
        """Finish a change whose outcome is unknown.

        Raises:
            KVServiceError: It is still unknown; call again.
        """
        change = self._pending
        if change is None:
            return
        while change.requests:
            extent, request = change.requests[0]
            if not extent.lost:
                self._send(change, extent, request)
            change.requests.pop(0)
        self._pending = None
        change.adopt()
        self._links.follow_extents()

    def pop(self, keep: Sequence[int]) -> None:
        """Cut every layer of row r to `keep[r]`. With lost extents: drop these.

        Raises:
            PagesLost: Something of a lost extent would have to stay.
            PositionOutOfRange: A later query could see an evicted position. Nothing has changed.
        """
        mirror = self._mirror
        stored = self.refresh() if mirror.uncertain else None
        lost = mirror.find_lost()
        if lost is not None:
            if any(map(int.__gt__, map(min, keep, mirror.longest()), lost.starts)):
                raise mirror.pages_lost()
            self._drop_from(lost)
            if not mirror.extents:
                self._open_again()
                return

        def request(extent: Extent, check_only: bool) -> types_pb2.PopRequest:
            expected = mirror.stops_of(extent)
            if lost is not None and extent is mirror.tail:
                expected = extent.stops  # what follows it was on the lost workers
            if stored is not None:
                expected = stored[extent]
            return types_pb2.PopRequest(
                session_id=mirror.id,
                incarnation=extent.incarnation,
                epoch=mirror.epoch,
                keep=keep,
                expected_lengths=expected,
                check_only=check_only,
            )

        self._make("Pop", request, lambda: self._links.let_go(mirror.cut(keep)))

    def reset(self) -> None:
        """Drop all tokens."""
        mirror = self._mirror
        if mirror.find_lost() is not None:
            mirror.uncertain = False
            self.pop((0,) * mirror.num_rows)
            return

        def request(extent: Extent, check_only: bool) -> types_pb2.ResetRequest:
            return types_pb2.ResetRequest(
                session_id=mirror.id,
                incarnation=extent.incarnation,
                epoch=mirror.epoch,
                check_only=check_only,
            )

        self._make("Reset", request, lambda: self._links.let_go(mirror.reset()))

    def select(self, rows: Sequence[int]) -> None:
        """Let new row i continue old row rows[i]."""
        mirror = self._mirror
        if mirror.uncertain:
            self.refresh()

        def request(extent: Extent, check_only: bool) -> types_pb2.SelectRequest:
            return types_pb2.SelectRequest(
                session_id=mirror.id,
                incarnation=extent.incarnation,
                epoch=mirror.epoch,
                rows=rows,
                check_only=check_only,
            )

        self._make("Select", request, lambda: mirror.select(rows))

    def refresh(self) -> dict[Extent, Lengths]:
        """Ask the workers what they have stored, after a call whose outcome is unknown.

        Returns:
            What each extent's worker says its rows end at.

        Raises:
            StaleEpoch: Somebody has taken the session over.
        """
        mirror = self._mirror
        nothing = (0,) * mirror.num_rows
        lengths: dict[int, Lengths] = {}
        stored: dict[Extent, Lengths] = {}
        for extent in mirror.extents:
            if extent.lost:
                continue
            request = types_pb2.GetSessionRequest(session_id=mirror.id)
            answer = self._links.unary(extent, "GetSession", request)
            info = convert.session_from_pb(answer.session)
            if info.epoch != mirror.epoch:
                raise StaleEpoch(
                    f"the session is at epoch {info.epoch}, this holder at {mirror.epoch}",
                    epoch=info.epoch,
                )
            mirror.last_step = max(mirror.last_step, info.step)
            stored[extent] = info.extents[0].stops or nothing
            for layer, of_layer in enumerate(info.lengths):
                known = lengths.get(layer, nothing)
                lengths[layer] = tuple(map(max, known, of_layer))
        mirror.lengths = {layer: one for layer, one in lengths.items() if any(one)}
        mirror.uncertain = False
        return stored

    # -- on all workers, or on none

    def _make(
        self, method: str, request: Callable[[Extent, bool], Any], adopt: Callable[[], None]
    ) -> None:
        extents = list(self._mirror.extents)
        if len(extents) > 1:
            for extent in extents:
                self._links.unary(extent, method, request(extent, True))
        self._pending = Change(method, [(one, request(one, False)) for one in extents], adopt)
        self.settle()

    def _send(self, change: Change, extent: Extent, request: Any) -> None:
        try:
            self._links.unary(extent, change.method, request)
        except OUTCOME_UNKNOWN:
            change.begun = True
            raise
        except KVServiceError:
            if not change.begun:
                self._pending = None  # refused by the first who was asked: nothing has changed
            raise
        change.begun = True

    # -- after a loss

    def _drop_from(self, lost: Extent) -> None:
        """Forget the extents from a lost one on. Those that live are let go."""
        mirror = self._mirror
        first = mirror.extents.index(lost)
        dropped = mirror.extents[first:]
        del mirror.extents[first:]
        self._links.let_go(dropped)

    def _open_again(self) -> None:
        """Open the session anew, empty, where there is room. Its id stays."""
        mirror = self._mirror
        spec = convert.spec_to_pb(mirror.spec)
        spec.row_count = mirror.num_rows
        # Whoever still holds something of it holds nothing that anybody needs.
        self._links.ask_front("Release", types_pb2.ReleaseRequest(session_ids=[mirror.id]))
        request = types_pb2.AllocateRequest(session_id=mirror.id, spec=spec)
        session = self._links.ask_front("Allocate", request).session
        mirror.reset()
        mirror.epoch, mirror.last_step = session.epoch, session.step
        mirror.extents = adopt((), self._links.told_extents(session), mirror.longest())
        self._links.follow_extents()
