"""Attend: build the calls of one layer, send them, and put what returns together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from kvservice.core.errors import (
    CapacityError,
    InternalError,
    OutOfPages,
)
from kvservice.core.geometry import DType
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire.tensors import dtype_to_pb
from kvservice_client._arrays import cast_float32, from_host
from kvservice_client._ask import FULL, Ask, Lengths, set_tensor, tensor_data
from kvservice_client._changes import Changes
from kvservice_client._extents import Extent, cut_into_parts
from kvservice_client._links import Links, Outcome
from kvservice_client._merge import Partial, merge
from kvservice_client._mirror import Mirror, Step
from kvservice_client._outcomes import FAILED, OUTCOME_UNKNOWN, Failure, find_worst
from kvservice_client._room import find_room
from kvservice_client._steady import Asked, Options, SteadyAsk, Told, settle
from kvservice_client._steady_call import SteadyAnswer, SteadyCall
from kvservice_client._steps import (
    Part,
    header_for,
    packed_index,
    padded_queries,
    parts_of,
    query_positions_of,
    step_for_append,
    step_for_queries,
)

MAX_TAILS_TRIED: Final = 3
"""How often one call asks the manager for room."""


class Attender:
    """Carries out the Attend calls of one session. The session's lock is held by the caller."""

    def __init__(self, mirror: Mirror, links: Links, changes: Changes) -> None:
        self._mirror = mirror
        self._links = links
        self._changes = changes
        self._num_ids = 0
        self._last_asked: Asked = ()
        self._last_told: Told = ()
        self._steady: dict[Options, SteadyAsk] = {}  # of one step, by what its layers ask

    def attend(self, ask: Ask, padding: Any, retain: int | None) -> Any:
        """Return the attention output of a call, as the kind of array that q was; of one that asks
        for a partial, that and its lse.

        Raises:
            OutOfPages, PagesLost, ...: See `Session.attend`.
        """
        mirror = self._mirror
        if ask.tokens is None:
            step = step_for_queries(mirror, ask, padding)
            positions = mirror.layer_lengths(ask.layer)
        else:
            step, positions = step_for_append(mirror, ask, padding, retain)
            if not mirror.lengths and len(mirror.extents) > 1:
                self._spread(step)
        return self._attend_in(step, ask, positions)

    def is_steady(self, padding: Any) -> bool:
        """Return whether the next call is worth trying the short way.

        Args:
            padding: As the call says it. It may be left unsaid, or be the step's own.
        """
        if not self._steady:
            return False
        return padding is None or padding is next(iter(self._steady.values())).step.given_padding

    def settle(self, ask: Ask, tensors: tuple[Any, Any, Any], options: Options) -> None:
        """Let later layers of the step that ask as the last call did go the short way."""
        asked, self._last_asked = self._last_asked, ()
        told, self._last_told = self._last_told, ()
        for other in self._steady.values():
            if other.step is not self._mirror.step:
                self._steady = {}
            break
        steady = settle(self._mirror, ask, tensors, asked, told) if asked else None
        if steady is not None:
            self._steady[options] = steady
        else:
            self._steady.pop(options, None)

    def attend_steadily(
        self,
        layer: int,
        tensors: tuple[Any, Any, Any],
        pos: Any,
        scale: float | None,
        options: Options,
    ) -> Any:
        """Carry out a call the short way; return None if it must go the long one.

        Raises:
            As `attend`.
        """
        steady, mirror = self._steady.get(options), self._mirror
        if steady is None or not steady.fits(mirror, layer, tensors, pos):
            return None
        if scale is not None and not math.isfinite(scale):
            return None
        calls = steady.fill(self._next_ids(len(steady.calls)), layer, tensors, scale)
        try:
            outcomes = self._links.attend_steadily(calls)
        except BaseException:  # interrupted: what was sent may be stored
            mirror.uncertain = True
            raise
        answers = [outcome for outcome in outcomes if isinstance(outcome, SteadyAnswer)]
        if len(answers) < len(calls):
            self._fail_steadily(calls, outcomes)
        steady.step.appended[layer] = steady.step.positions
        mirror.lengths[layer] = steady.step.after
        return steady.output(answers)

    def _fail_steadily(
        self,
        calls: Sequence[tuple[Extent, SteadyCall]],
        outcomes: Sequence[SteadyAnswer | Failure],
    ) -> NoReturn:
        """Note what is known after calls of which not all were answered, and raise the error."""
        errors = [outcome for outcome in outcomes if isinstance(outcome, FAILED)]
        for (_, call), outcome in zip(calls, outcomes, strict=True):
            stored = isinstance(outcome, (SteadyAnswer, *OUTCOME_UNKNOWN))
            if call.stores and stored:
                self._mirror.uncertain = True
        error = find_worst(errors)
        assert error is not None, "an answer or an error for each call"
        raise error

    def _next_ids(self, count: int) -> int:
        """Take so many call ids; return the first."""
        first = self._num_ids + 1
        self._num_ids += count
        return first

    def _attend_in(self, step: Step, ask: Ask, positions: Lengths) -> Any:
        """Carry the call out, on another worker if the tail has no room for the step."""
        mirror = self._mirror
        cause: Exception | None = None
        for _ in range(MAX_TAILS_TRIED):
            parts = parts_of(mirror, step, ask, positions)
            calls = [self._call(step, ask, positions, part) for part in parts]
            copies = _for_twins(calls)
            mirror.last_step = max(mirror.last_step, step.number)
            try:
                outcomes = self._links.attend([*calls, *copies], ask.meanwhile)
            except BaseException:  # interrupted: what was sent may be stored
                if ask.tokens is not None:
                    mirror.uncertain, mirror.step = True, step
                raise
            error = find_worst(outcomes)
            if error is None:
                self._last_asked = [
                    (part, call) for part, (_, call) in zip(parts, calls, strict=True)
                ]
                self._last_told = copies
                self._commit(step, ask, positions, parts)
                return self._output(step, ask, positions, parts, outcomes[: len(calls)])
            spread = sum(any(part.counts) for part in parts) > 1
            if isinstance(error, CapacityError) and not step.begun and not spread:
                if copies and any(not isinstance(one, FAILED) for one in outcomes):
                    # One of the two copies had room, the other had not.
                    mirror.uncertain, mirror.step = True, step
                    self._changes.undo(step)
                    step = _again(step)
                    outcomes = [error] * len(outcomes)
                if isinstance(error, OutOfPages):
                    cause = find_room(mirror, self._links, max(step.counts))
                    if cause is None:
                        step.number = mirror.last_step + 1  # what was refused stays refused
                        continue
            break
        assert error is not None
        self._fail(step, ask, [*calls, *copies], outcomes, error)
        raise error from cause

    # -- before

    def _spread(self, step: Step) -> None:
        """Share the session's first tokens out among its workers; some may be left over."""
        mirror = self._mirror
        starts = cut_into_parts(step.counts, len(mirror.extents), mirror.spec.page_size)
        while len(mirror.extents) > len(starts):
            mirror.spare(mirror.extents.pop())
        for extent, first, stop in zip(
            mirror.extents, starts, [*starts[1:], step.counts], strict=True
        ):
            extent.starts, extent.stops = first, stop

    def _call(
        self, step: Step, ask: Ask, positions: Lengths, part: Part
    ) -> tuple[Extent, worker_pb2.AttendCall]:
        mirror, scoring = self._mirror, ask.scoring
        call = worker_pb2.AttendCall(
            call_id=self._next_ids(1),
            session_id=mirror.id,
            incarnation=part.extent.incarnation,
            epoch=mirror.epoch,
            step=step.number,
            layer=ask.layer,
            mask=scoring.mask,
            scale=scoring.scale,
            softcap=scoring.softcap,
            bias=scoring.bias,
            partial=ask.partial or len(mirror.extents) > 1,
        )
        if part.extent not in step.greeted:
            call.header.CopyFrom(header_for(mirror, step, part))
        if scoring.sinks is not None and not call.partial:
            set_tensor(call.sinks, scoring.sinks, DType.FLOAT32)
        if scoring.num_columns is not None:
            newest = positions if ask.tokens is None else step.after
            call.column_starts[:] = scoring.column_starts or [
                length - scoring.num_columns for length in newest
            ]
        self._add_tokens(call, ask, positions, part)
        self._add_queries(call, ask, positions, part)
        return part.extent, call

    def _add_tokens(
        self, call: worker_pb2.AttendCall, ask: Ask, positions: Lengths, part: Part
    ) -> None:
        tokens = ask.tokens
        if tokens is None or not any(part.counts):
            return
        k, v = tokens.k, tokens.v
        if call.partial:
            index = packed_index(
                tokens.counts, _minus(part.starts, positions), _minus(part.stops, positions)
            )
            if index is not None:
                k, v = k[index], v[index]
        set_tensor(call.k, k, tokens.dtype)
        set_tensor(call.v, v, tokens.dtype)
        call.positions[:] = part.starts

    def _add_queries(
        self, call: worker_pb2.AttendCall, ask: Ask, positions: Lengths, part: Part
    ) -> None:
        queries = ask.queries
        first = query_positions_of(ask, positions)
        index = packed_index(queries.counts, part.first_query, queries.counts)
        set_tensor(call.q, queries.q if index is None else queries.q[index], queries.dtype)
        if call.partial or first is not None:
            base = positions if first is None else first
            call.query_counts[:] = _minus(queries.counts, part.first_query)
            call.query_positions[:] = map(int.__add__, base, part.first_query)

    # -- after

    def _commit(self, step: Step, ask: Ask, positions: Lengths, parts: Sequence[Part]) -> None:
        """Take over what a call has done."""
        mirror = self._mirror
        step.begun = True
        mirror.step, mirror.padding = step, step.padding
        for part in parts:
            if part.extent not in step.greeted:
                step.greeted += part.extent.copies
                part.extent.knows_padding = True
        if ask.tokens is not None and ask.layer not in step.appended:
            step.appended[ask.layer] = positions
            mirror.lengths[ask.layer] = step.after
        if step.failed_layer == ask.layer:
            step.failed_layer = None

    def _fail(
        self,
        step: Step,
        ask: Ask,
        calls: Sequence[tuple[Extent, worker_pb2.AttendCall]],
        outcomes: Sequence[Outcome],
        error: Failure,
    ) -> None:
        """Note what is known after a call that has failed."""
        mirror = self._mirror
        if ask.tokens is None:
            return
        stores = [call.HasField("k") for _, call in calls]
        stored = any(
            stores[i] and not isinstance(outcome, FAILED) for i, outcome in enumerate(outcomes)
        )
        unknown = any(
            stores[i] and isinstance(outcome, OUTCOME_UNKNOWN) for i, outcome in enumerate(outcomes)
        )
        if stored and isinstance(error, OutOfPages) and not mirror.lengths:
            # The first tokens of a spread session: some workers had room, one had not.
            self._changes.reset()
            return
        if stored or unknown:
            mirror.uncertain = True
            mirror.step = step

    def _output(
        self,
        step: Step,
        ask: Ask,
        positions: Lengths,
        parts: Sequence[Part],
        outcomes: Sequence[Outcome],
    ) -> Any:
        """Return the output as the caller's kind of array; of a partial, that and its lse."""
        queries, several = ask.queries, len(self._mirror.extents) > 1
        if not several and not ask.partial:
            out = _tensor(outcomes[0], "out", queries.dtype)
            return from_host(queries.shape_out(out), queries.dtype, queries.kind)
        partials = [
            Partial(
                _tensor(outcome, "out", DType.FLOAT32),
                _tensor(outcome, "lse", DType.FLOAT32),
                packed_index(queries.counts, part.first_query, queries.counts),
            )
            for part, outcome in zip(parts, outcomes, strict=True)
        ]
        whole = partials[0]
        if several:
            whole = merge(partials, sum(queries.counts), ask.scoring.sinks)
            first = query_positions_of(ask, positions)
            padded = padded_queries(step, ask, positions if first is None else first)
            if padded is not None:  # a worker knows only of padding that it holds itself
                whole.out[padded] = 0.0
                whole.lse[padded] = -np.inf
        if not ask.partial:
            out = cast_float32(whole.out, queries.dtype)
            return from_host(queries.shape_out(out), queries.dtype, queries.kind)
        lse = queries.shape_out(whole.lse[..., None])[..., 0]
        return tuple(
            from_host(one, DType.FLOAT32, queries.kind)
            for one in (queries.shape_out(whole.out), lse)
        )


def _for_twins(
    calls: Sequence[tuple[Extent, worker_pb2.AttendCall]],
) -> list[tuple[Extent, worker_pb2.AttendCall]]:
    """Return what the other copies are told: all that changes anything, and no queries.

    So their state is that of the copy which is asked, by epoch, step and layer.
    """
    told: list[tuple[Extent, worker_pb2.AttendCall]] = []
    for extent, call in calls:
        if extent.twin is None or not (call.HasField("k") or call.HasField("header")):
            continue
        copy = worker_pb2.AttendCall(
            call_id=call.call_id,
            session_id=call.session_id,
            incarnation=extent.twin.incarnation,
            epoch=call.epoch,
            step=call.step,
            layer=call.layer,
            header=call.header if call.HasField("header") else None,
            q=types_pb2.Tensor(dtype=call.q.dtype, shape=[0, *call.q.shape[1:]]),
            positions=call.positions,
            query_counts=[0] * len(call.positions or call.query_counts or call.header.counts),
            mask=FULL,
            scale=call.scale,
        )
        if call.HasField("k"):
            copy.k.CopyFrom(call.k)
            copy.v.CopyFrom(call.v)
        told.append((extent.twin, copy))
    return told


def _again(step: Step) -> Step:
    """Return a step as it was before anybody had heard of it."""
    return replace(step, begun=False, failed_layer=None, greeted=[])


def _tensor(outcome: Outcome, name: str, dtype: DType) -> npt.NDArray[Any]:
    assert isinstance(outcome, worker_pb2.AttendResult), "errors were dealt with before"
    tensor: types_pb2.Tensor = outcome.out if name == "out" else outcome.lse
    if tensor.dtype != dtype_to_pb(dtype):
        raise InternalError(f"expected {name} in {dtype.value}, got dtype number {tensor.dtype}")
    return tensor_data(tensor, dtype)


def _minus(a: Lengths, b: Lengths) -> Lengths:
    return tuple(map(int.__sub__, a, b))
