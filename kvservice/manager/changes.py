"""Structural changes of sessions on all their workers: Pop, Reset, Select, Attach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvservice.core.caller import Caller
from kvservice.core.directory import SessionKey
from kvservice.core.errors import PagesLost, StaleEpoch
from kvservice.core.extents import find_loss, is_empty, join_parts
from kvservice.core.failpoints import Failpoints
from kvservice.core.session import Extent
from kvservice.manager.calls import WorkerCalls, copy_of
from kvservice.manager.directory import SharedDirectory
from kvservice.manager.lookup import Lookup
from kvservice.manager.parts import Part, check_lengths, merged
from kvservice.v1 import types_pb2
from kvservice.wire.convert import session_from_pb, session_to_pb


class Changes:
    """Makes structural changes on all workers of a session, or on none. Thread-safe.

    What fails on the way is rolled forward by whoever repeats it.
    """

    def __init__(
        self,
        directory: SharedDirectory,
        calls: WorkerCalls,
        lookup: Lookup,
        failpoints: Failpoints,
    ) -> None:
        self._directory = directory
        self._calls = calls
        self._lookup = lookup
        self._failpoints = failpoints

    def pop(
        self, key: SessionKey, request: types_pb2.PopRequest, caller: Caller
    ) -> types_pb2.Session:
        parts = self._lookup.parts(
            key, caller, keep_at_most=max(request.keep, default=0), from_epoch=request.epoch
        )
        # A worker that has the change already does not look at what was expected.
        half_done = any(part.info.epoch != request.epoch for part in parts)
        if not half_done and find_loss([part.info for part in parts]) is None:
            expected = tuple(request.expected_lengths)
            check_lengths(parts, expected, parts[0].info.spec.num_rows)
        requests = {
            part.worker_id: copy_of(request, expected_lengths=_own_lengths(part)) for part in parts
        }
        return self._make("Pop", key, requests, caller)

    def reset(
        self, key: SessionKey, request: types_pb2.ResetRequest, caller: Caller
    ) -> types_pb2.Session:
        parts = self._lookup.parts(key, caller, keep_at_most=0, from_epoch=request.epoch)
        return self._make("Reset", key, {part.worker_id: request for part in parts}, caller)

    def select(
        self, key: SessionKey, request: types_pb2.SelectRequest, caller: Caller
    ) -> types_pb2.Session:
        parts = self._lookup.parts(key, caller, from_epoch=request.epoch)
        return self._make("Select", key, {part.worker_id: request for part in parts}, caller)

    def _make(
        self, method: str, key: SessionKey, requests: Mapping[str, Any], caller: Caller
    ) -> types_pb2.Session:
        """Make a structural change on all workers: first all check it, then all get it.

        In the order of positions: so of a change that is half done, those that are behind are the
        last.
        """
        if len(requests) > 1:
            for worker_id, request in requests.items():
                self._calls.ask(worker_id, method, copy_of(request, check_only=True), caller)
            self._failpoints.passed("manager.change.checked")
        parts: list[Part] = []
        for worker_id, request in requests.items():
            answer = self._calls.ask(worker_id, method, request, caller)
            parts.append(Part(worker_id, session_from_pb(answer.session)))
            self._directory.note(key, parts[-1:])
            self._failpoints.passed("manager.change.partly_applied")
        return merged(parts)

    # Another holder

    def attach(
        self, key: SessionKey, request: types_pb2.AttachRequest, caller: Caller
    ) -> types_pb2.Session:
        """Let a session have another holder, who goes on with what is left of it.

        Raises:
            SessionNotFound, StaleEpoch, TooLarge.
            PagesLost: Nothing is left.
        """
        try:
            parts = self._lookup.parts(key, caller)
        except PagesLost:  # of what is left it can be said how much still holds
            parts = self._what_holds(key, caller)
        for part in parts:
            part.info.check_padding_listed()  # before the first of them changes
        epoch = request.epoch if request.HasField("epoch") else min(p.info.epoch for p in parts)
        # Explicitly from one epoch, so that a repeat is told. Workers that are ahead come first:
        # if it was another change than Attach that has put them there, they refuse. Those that hold
        # nothing come last: alone at the next epoch, they would be taken for an empty session.
        parts.sort(key=lambda part: (-part.info.epoch, is_empty(part.info.extents[0])))
        ahead = [part for part in parts if part.info.epoch == parts[0].info.epoch]
        try:
            taken = self._attach(key, parts, epoch, request, caller)
        except StaleEpoch:
            if request.HasField("epoch") or len(ahead) == len(parts):
                raise
            if self._all_went_on(key, parts, epoch, request, caller):
                taken = self._attach(key, parts, epoch + 1, request, caller)
            else:
                # Nobody but the holder that is being replaced knows the change that is half done,
                # and it may be gone: what lacks it is as good as lost.
                taken = self._attach(key, ahead, ahead[0].info.epoch, request, caller)
        return _what_is_left(taken)

    def _what_holds(self, key: SessionKey, caller: Caller) -> list[Part]:
        """Return what is left of a session that is to be taken over.

        Raises:
            PagesLost: Nothing. Who still has something of before may free it.
        """
        try:
            return self._lookup.parts(key, caller, keep_at_most=0)
        except PagesLost:
            self._directory.give_up(key)
            raise

    def _all_went_on(
        self,
        key: SessionKey,
        parts: Sequence[Part],
        epoch: int,
        request: types_pb2.AttachRequest,
        caller: Caller,
    ) -> bool:
        """Finish what a holder has begun that has given up a copy; False: it was something else.

        Nothing depends on whether the holder does so itself: it has said nothing but its epoch.
        """
        try:
            self._attach(key, parts, epoch, copy_of(request, keep_step=True), caller)
        except StaleEpoch:
            return False
        return True

    def _attach(
        self,
        key: SessionKey,
        parts: Sequence[Part],
        epoch: int,
        request: types_pb2.AttachRequest,
        caller: Caller,
    ) -> list[Part]:
        taken: list[Part] = []
        for part in parts:
            answer = self._calls.ask(
                part.worker_id, "Attach", copy_of(request, epoch=epoch), caller
            )
            taken.append(Part(part.worker_id, session_from_pb(answer.session)))
            self._directory.note(key, taken[-1:])
        return taken


def _what_is_left(parts: Sequence[Part]) -> types_pb2.Session:
    """Return a session of which something may be lost: then an extent without a worker says from
    which position on."""
    infos = [part.info for part in parts]
    loss = find_loss(infos)
    if loss is None:
        return merged(parts)
    joined = join_parts(infos)
    num_rows = len(joined.lengths[0]) if joined.lengths else joined.spec.num_rows
    from_there = (loss.position,) * num_rows
    lost = Extent("", "", "", from_there, from_there)
    return session_to_pb(replace(joined, extents=(*joined.extents, lost)))


def _own_lengths(part: Part) -> tuple[int, ...]:
    """Return the lengths of a worker's rows, as it counts them: 0 before there is a start."""
    return part.info.extents[0].stops or (0,) * part.info.spec.num_rows
