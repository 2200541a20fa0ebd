"""Which step a call belongs to, and what each worker is asked in it. No calls are made here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.core.errors import Conflict, InvalidRequest, OutOfOrder
from kvservice.core.session import RowRange
from kvservice.v1 import types_pb2, worker_pb2
from kvservice_client._arrays import to_bool
from kvservice_client._ask import FULL, Ask, Lengths
from kvservice_client._extents import Extent
from kvservice_client._mirror import Mirror, Step
from kvservice_client._padding import add_new, as_packed_or_whole


@dataclass(slots=True)
class Part:
    """What one worker is asked: its share of the new tokens, and the queries that concern it.

    Fields:
        starts, stops: Per row: the positions of new tokens that go there. Equal: none.
        first_query: Per row: how many of its queries are left out at the front.
    """

    extent: Extent
    starts: Lengths
    stops: Lengths
    first_query: Lengths

    @property
    def counts(self) -> Lengths:
        return tuple(map(int.__sub__, self.stops, self.starts))


def step_for_append(
    mirror: Mirror, ask: Ask, padding: Any, retain: int | None
) -> tuple[Step, Lengths]:
    """Return the step that an append belongs to, a new one if need be, and where it appends.

    The mirror is not changed: the step becomes the session's when a worker has accepted it.

    Raises:
        OutOfOrder: `ask.pos` is neither the layer's length nor where its last append stood.
        Conflict: It does not fit the step in progress, or that step has died half-way.
        InvalidRequest: The padding's shape is wrong, or padding turns back into tokens.
    """
    assert ask.tokens is not None
    step, layer, counts, pos = mirror.step, ask.layer, ask.tokens.counts, ask.pos
    before = mirror.layer_lengths(layer)
    if step is not None and layer in step.appended and pos is not None:
        stood = step.appended[layer]
        if pos == stood and before == _sum(stood, counts) and counts == step.counts:
            _check_same_padding(step, padding, stood, ask)
            return step, stood
    if pos is not None and pos != before:
        raise OutOfOrder(
            f"layer {layer} appends at its lengths {list(before)}, got pos {list(pos)}",
            lengths=",".join(map(str, before)),
            layer=layer,
        )
    if step is not None and step.appends and layer not in step.appended:
        _check_fits(step, layer, before, counts)
        _check_same_padding(step, padding, before, ask)
        return step, before
    if step is not None and step.failed_layer is not None:
        raise Conflict(
            f"the last step has failed at layer {step.failed_layer}: repeat that layer's call, or "
            "roll back before the next step",
            layer=step.failed_layer,
        )
    return _new_step(mirror, counts, before, padding, ask, retain), before


def step_for_queries(mirror: Mirror, ask: Ask, padding: Any) -> Step:
    """Return the step that a call without k and v belongs to: the current one, if there is one."""
    step = mirror.step
    nothing = (0,) * mirror.num_rows
    if step is not None and (padding is None or padding is step.given_padding):
        return step
    lengths = mirror.layer_lengths(ask.layer)
    if padding is not None:
        new = _new_step(mirror, nothing, lengths, padding, ask, retain=None)
        if step is None or new.new_padding:
            return new
        return step
    return _new_step(mirror, nothing, lengths, None, ask, retain=None)


def parts_of(mirror: Mirror, step: Step, ask: Ask, positions: Lengths) -> list[Part]:
    """Return what each worker is asked; the tail comes last.

    Args:
        positions: Per row: of the first new token, or where the layer ends, without new ones.
    """
    extents, counts = mirror.extents, step.counts if ask.tokens is not None else None
    if len(extents) == 1:
        stops = positions if counts is None else _sum(positions, counts)
        return [Part(extents[0], positions, stops, (0,) * len(positions))]
    parts = []
    for extent in extents:
        part = _share(extent, extent is mirror.tail, positions, counts)
        if counts is not None and ask.scoring.is_causal and ask.query_positions is None:
            # No query before the worker's own positions sees any of them.
            part.first_query = _skipped(ask, extent, positions)
        stored = map(min, mirror.stops_of(extent), mirror.layer_lengths(ask.layer))
        holds = any(map(int.__lt__, extent.starts, stored))
        if any(part.counts) or holds:
            parts.append(part)
    return parts or [_share(mirror.tail, True, positions, counts)]


def query_positions_of(ask: Ask, positions: Lengths) -> Lengths | None:
    """Return the position of each row's first query; None: where the new tokens are.

    Args:
        positions: Per row: of the first new token, or where the layer ends, without new ones.

    Raises:
        InvalidRequest: More queries than positions.
    """
    queries, tokens = ask.queries, ask.tokens
    if ask.query_positions is not None:
        return ask.query_positions
    if tokens is not None and tokens.counts == queries.counts:
        return None
    after = positions if tokens is None else _sum(positions, tokens.counts)
    if ask.scoring.mask.kind == FULL.kind:
        return after  # other tokens than those stored: they stand at none of their positions
    first = tuple(map(int.__sub__, after, queries.counts))
    if min(first) < 0:
        raise InvalidRequest(
            f"queries are the newest positions: {list(queries.counts)} queries, but "
            f"{list(after)} positions; say query_positions, or use mask 'full'"
        )
    return first


def header_for(mirror: Mirror, step: Step, part: Part) -> worker_pb2.StepHeader:
    """Return the step's header for one worker."""
    extent = part.extent
    ranges = step.new_padding if extent.knows_padding else step.padding.ranges()
    evict = mirror.evictions_on(extent, step.evict_before)
    return worker_pb2.StepHeader(
        counts=part.counts if step.appends else step.counts,
        padding=[types_pb2.RowRange(row=one.row, start=one.start, stop=one.stop) for one in ranges],
        evict_before=[
            worker_pb2.EvictBefore(window=group.window, positions=group.positions)
            for group in evict
        ],
        followed_by=mirror.follower_of(extent),
    )


def padded_queries(step: Step, ask: Ask, query_positions: Lengths) -> npt.NDArray[np.bool_] | None:
    """Return which queries stand at padding, packed; None: none does."""
    if step.padding.empty:
        return None
    bits = [
        step.padding.bits(row, first, first + count)
        for row, (first, count) in enumerate(zip(query_positions, ask.queries.counts, strict=True))
    ]
    packed = np.concatenate(bits)
    return packed if packed.any() else None


def packed_index(
    counts: Sequence[int], first: Sequence[int], stop: Sequence[int]
) -> npt.NDArray[np.int64] | None:
    """Return where the entries first[row]:stop[row] of each row are, in a packed array.

    None: they are all there are.
    """
    if not any(first) and tuple(stop) == tuple(counts):
        return None
    offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
    ranges = [
        np.arange(offset + begin, offset + end, dtype=np.int64)
        for offset, begin, end in zip(offsets.tolist(), first, stop, strict=True)
    ]
    return np.concatenate(ranges)


# -- steps


def _new_step(
    mirror: Mirror,
    counts: Lengths,
    before: Lengths,
    padding: Any,
    ask: Ask,
    retain: int | None,
) -> Step:
    padding_after, after = mirror.padding, _sum(before, counts)
    ranges: list[RowRange] = []
    if padding is not None:
        bits = to_bool(padding, "padding")
        given = as_packed_or_whole(bits, counts, after, ask.queries.packed)
        padding_after, ranges = add_new(mirror.padding, before, counts, given)
    return Step(
        number=mirror.last_step + 1,
        counts=counts,
        positions=before,
        after=after,
        padding=padding_after,
        new_padding=ranges,
        given_padding=padding,
        evict_before=mirror.evictions(retain),
        earlier_layers=frozenset(mirror.lengths),
    )


def _check_fits(step: Step, layer: int, before: Lengths, counts: Lengths) -> None:
    if counts != step.counts:
        raise Conflict(
            f"the step has {list(step.counts)} new tokens per row, layer {layer} brings "
            f"{list(counts)}",
            layer=layer,
        )
    if before is not step.positions and before != step.positions:
        # Layers of one step share its padding, so they share positions. Uneven layers are what a
        # forward pass leaves that has died half-way.
        raise Conflict(
            f"the step begins at {list(step.positions)}, but layer {layer} ends at "
            f"{list(before)}: an earlier step has left it behind; roll back first",
            layer=layer,
        )


def _check_same_padding(step: Step, padding: Any, before: Lengths, ask: Ask) -> None:
    if padding is None or padding is step.given_padding:
        return
    after = _sum(before, step.counts)
    bits = to_bool(padding, "padding")
    given = as_packed_or_whole(bits, step.counts, after, ask.queries.packed)
    first = before if given.ndim == 1 else (0,) * len(after)
    offset = 0
    for row, (start, stop) in enumerate(zip(first, after, strict=True)):
        size = stop - start
        mine = given[offset : offset + size] if given.ndim == 1 else given[row, :stop]
        offset += size
        if not np.array_equal(mine, step.padding.bits(row, start, stop)):
            raise Conflict(
                f"layers of one step share its padding: layer {ask.layer} brings another in row "
                f"{row}",
                layer=ask.layer,
                row=row,
            )


# -- parts


def _share(extent: Extent, is_tail: bool, positions: Lengths, counts: Lengths | None) -> Part:
    if counts is None:
        return Part(extent, positions, positions, (0,) * len(positions))
    after = _sum(positions, counts)
    stops = after if is_tail else tuple(map(min, after, extent.stops))
    starts = tuple(map(max, positions, extent.starts))
    stops = tuple(map(max, starts, stops))
    return Part(extent, starts, stops, (0,) * len(positions))


def _skipped(ask: Ask, extent: Extent, positions: Lengths) -> Lengths:
    before = (max(0, start - pos) for start, pos in zip(extent.starts, positions, strict=True))
    return tuple(map(min, before, ask.queries.counts))


def _sum(a: Lengths, b: Lengths) -> Lengths:
    return tuple(map(int.__add__, a, b))
