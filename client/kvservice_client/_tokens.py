"""Write and Read: keys and values to and from positions, without attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.core.errors import CapacityError, InvalidRequest, OutOfPages, PositionOutOfRange
from kvservice.core.geometry import DType
from kvservice.core.session import EvictBefore, RowRange
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire.tensors import dtype_from_pb
from kvservice_client._arrays import Kind, from_host, to_bool, to_ints
from kvservice_client._ask import (
    Tokens,
    check_layer,
    read_positions,
    read_tokens,
    set_tensor,
    tensor_data,
)
from kvservice_client._extents import Extent
from kvservice_client._links import Links
from kvservice_client._mirror import Mirror
from kvservice_client._outcomes import FAILED, OUTCOME_UNKNOWN
from kvservice_client._padding import Padding
from kvservice_client._room import find_room

Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


@dataclass(slots=True)
class Placed:
    """Tokens with the row and position of each, packed, and which of them are padding."""

    tokens: Tokens
    rows: Ints
    positions: Ints
    padding: npt.NDArray[np.bool_] | None


def _read_rows(rows: Any, num_rows: int) -> list[int]:
    """Return the session's rows that are written. None: all."""
    if rows is None:
        return list(range(num_rows))
    listed = to_ints(rows, "rows")
    if not listed or min(listed) < 0 or max(listed) >= num_rows or len(set(listed)) < len(listed):
        raise InvalidRequest(f"rows must be different ones below {num_rows}, got {listed}")
    return listed


def _place(
    tokens: Tokens, rows: Sequence[int], lengths: Sequence[int], positions: Any, padding: Any
) -> Placed:
    """Say where each token goes.

    Args:
        tokens: With one count for each of `rows`, all equal.
        lengths: Per row of the session: where a row appends.
        positions: None: append. A list for all rows, or one list for each.
        padding: None, or bool[len(rows), tokens].
    """
    num_rows, num_tokens = len(rows), tokens.counts[0]
    where: Sequence[Sequence[int]]
    if positions is None:
        where = [range(lengths[row], lengths[row] + num_tokens) for row in rows]
    else:
        where = _read_positions(positions, num_rows, num_tokens)
    bits = None
    if padding is not None:
        bits = to_bool(padding, "padding")
        if bits.shape != (num_rows, num_tokens):
            raise InvalidRequest(
                f"padding must be [{num_rows}, {num_tokens}], the tokens written, got "
                f"{list(bits.shape)}"
            )
        bits = bits.reshape(-1)
    return Placed(
        tokens,
        np.repeat(np.array(rows, np.int64), num_tokens),
        np.array([list(one) for one in where], np.int64).reshape(-1),
        bits,
    )


class TokenAccess:
    """Carries out Write and Read of one session. The session's lock is held by the caller."""

    def __init__(self, mirror: Mirror, links: Links) -> None:
        self._mirror = mirror
        self._links = links
        self._told: dict[Extent, list[EvictBefore]] = {}  # by those that got no tokens with it

    def write(
        self, layer: int, k: Any, v: Any, positions: Any, rows: Any, padding: Any, queries_from: Any
    ) -> None:
        """Store tokens where they belong, with new ones on another worker if the tail is full.

        Args:
            ...: As for `Session.write`.
        """
        mirror = self._mirror
        chosen = _read_rows(rows, mirror.num_rows)
        tokens = read_tokens(k, v, len(chosen), None)
        lengths = mirror.layer_lengths(check_layer(layer))
        placed = _place(tokens, chosen, lengths, positions, padding)
        evict_before = []  # what all workers of the session may free
        if queries_from is not None:
            first = read_positions(queries_from, mirror.num_rows, "queries_from")
            evict_before = mirror.unseen_from(first)
        if not mirror.lengths and len(mirror.extents) > 1:
            while len(mirror.extents) > 1:
                mirror.spare(mirror.extents.pop())
        try:
            self._write_all(layer, placed, evict_before)
        except OutOfPages as error:
            longest = mirror.longest()
            beyond = int((placed.positions + 1 - np.array(longest)[placed.rows]).max())
            if beyond < 1 or mirror.uncertain:  # the tail has had room, and another one has not
                raise
            cause = find_room(mirror, self._links, beyond)
            if cause is not None:
                raise error from cause
            self._write_all(layer, placed, evict_before)
        self._note(layer, placed)

    def read(self, layer: int, start: int, stop: int | None, kind: Kind) -> tuple[Any, Any]:
        """Return K and V of positions [start, stop) of every row, put together from all workers.

        Args:
            stop: None: the longest row's length.
            kind: Of the arrays that are returned.
        """
        mirror = self._mirror
        longest = max(mirror.layer_lengths(check_layer(layer)))
        stop = longest if stop is None else stop
        if not 0 <= start < stop:
            raise InvalidRequest(f"positions must be a range, got [{start}, {stop})")
        if stop > longest:
            raise PositionOutOfRange(
                f"positions up to {stop} were asked for, the longest row has {longest}",
                length=longest,
            )
        if len(mirror.extents) == 1:
            result = self._read_from(mirror.tail, layer, start, stop)
            dtype = dtype_from_pb(result.k.dtype, "k")
            k, v = tensor_data(result.k, dtype), tensor_data(result.v, dtype)
        else:
            k, v, dtype = self._read_from_all(layer, start, stop)
        return from_host(k, dtype, kind), from_host(v, dtype, kind)

    def _read_from_all(self, layer: int, start: int, stop: int) -> tuple[Array, Array, DType]:
        mirror = self._mirror
        lengths = mirror.layer_lengths(layer)
        whole: tuple[Array, Array] | None = None
        dtype = DType.FLOAT32
        for extent in mirror.extents:
            stops = tuple(map(min, lengths, mirror.stops_of(extent)))
            first, last = max(start, min(extent.starts)), min(stop, max(stops))
            if first >= last or not any(map(int.__lt__, extent.starts, stops)):
                continue
            result = self._read_from(extent, layer, first, last)
            dtype = dtype_from_pb(result.k.dtype, "k")
            part = tensor_data(result.k, dtype), tensor_data(result.v, dtype)
            if whole is None:
                whole = _blank(part[0], stop - start), _blank(part[1], stop - start)
            # Rows may begin and end unevenly: of each, what this worker holds.
            for row, (begin, end) in enumerate(zip(extent.starts, stops, strict=True)):
                begin, end = max(begin, first), min(end, last)
                if begin < end:
                    for into, out_of in zip(whole, part, strict=True):
                        here = slice(begin - start, end - start)
                        into[row, :, here] = out_of[row, :, begin - first : end - first]
        if whole is None:
            raise InvalidRequest(f"layer {layer} has stored nothing in [{start}, {stop})")
        return *whole, dtype

    # -- one worker each

    def _write_all(self, layer: int, placed: Placed, evict_before: list[EvictBefore]) -> None:
        parts = self._by_extent(placed)
        if evict_before and len(self._mirror.extents) > 1:
            self._evict_elsewhere(layer, placed, evict_before, [extent for extent, _ in parts])
        for index, (extent, chosen) in enumerate(parts):
            call = self._write_call(extent, layer, placed, chosen, evict_before)
            try:
                self._write_to(extent, call)
            except FAILED as error:
                if index or isinstance(error, OUTCOME_UNKNOWN):
                    self._mirror.uncertain = True
                raise

    def _write_to(self, extent: Extent, call: worker_pb2.WriteCall) -> None:
        """Store the same on all copies.

        Raises:
            CapacityError: The first has no room; then none has stored anything.
            CopiesChanged: Another one has no room.
        """
        self._links.write(extent, call)
        if extent.twin is not None:
            call.incarnation = extent.twin.incarnation
            try:
                self._links.write(extent.twin, call)
            except CapacityError as error:
                raise self._links.copies.give_up(extent.twin) from error

    def _evict_elsewhere(
        self,
        layer: int,
        placed: Placed,
        evict_before: list[EvictBefore],
        written: Sequence[Extent],
    ) -> None:
        """Tell the workers that get no tokens what they may free, once each."""
        told, self._told = self._told, {}
        for extent in self._mirror.extents:
            if extent in written:
                continue
            self._told[extent] = self._mirror.evictions_on(extent, evict_before)
            if told.get(extent) != self._told[extent]:
                nothing = np.zeros(0, np.int64)
                call = self._write_call(extent, layer, placed, nothing, evict_before)
                self._write_to(extent, call)

    def _by_extent(self, placed: Placed) -> list[tuple[Extent, Any]]:
        """Return which tokens go to which worker; the tail, which may be full, comes first."""
        extents = self._mirror.extents
        if len(extents) == 1:
            return [(extents[0], slice(None))]
        result = []
        remaining = np.ones(len(placed.rows), np.bool_)
        for extent in reversed(extents):
            here = remaining & (placed.positions >= np.array(extent.starts)[placed.rows])
            if here.any():
                result.append((extent, np.flatnonzero(here)))
            remaining &= ~here
        return result

    def _write_call(
        self,
        extent: Extent,
        layer: int,
        placed: Placed,
        chosen: Any,
        evict_before: list[EvictBefore],
    ) -> worker_pb2.WriteCall:
        mirror, tokens = self._mirror, placed.tokens
        rows, positions = placed.rows[chosen], placed.positions[chosen]
        mirror.num_writes += 1
        call = worker_pb2.WriteCall(
            session_id=mirror.id,
            incarnation=extent.incarnation,
            epoch=mirror.epoch,
            layer=layer,
            rows=rows.tolist(),
            positions=positions.tolist(),
            number=mirror.num_writes,
            evict_before=[
                worker_pb2.EvictBefore(window=group.window, positions=group.positions)
                for group in mirror.evictions_on(extent, evict_before)
            ],
            # Where there may be no start yet, a gap would be taken to lie before the extent.
            extent_starts=extent.starts if extent.is_empty(mirror.stops_of(extent)) else (),
        )
        set_tensor(call.k, tokens.k[chosen], tokens.dtype)
        set_tensor(call.v, tokens.v[chosen], tokens.dtype)
        ranges: list[RowRange] = []
        if not extent.knows_padding:
            ranges += mirror.padding.ranges()
        if placed.padding is not None:
            bits = placed.padding[chosen]
            ranges += [
                RowRange(row, position, position + 1)
                for row, position in zip(rows[bits].tolist(), positions[bits].tolist(), strict=True)
            ]
        call.padding.extend(
            types_pb2.RowRange(row=one.row, start=one.start, stop=one.stop) for one in ranges
        )
        return call

    def _read_from(
        self, extent: Extent, layer: int, start: int, stop: int
    ) -> worker_pb2.ReadResult:
        request = worker_pb2.ReadRequest(
            session_id=self._mirror.id,
            incarnation=extent.incarnation,
            epoch=self._mirror.epoch,
            layer=layer,
            start=start,
            stop=stop,
        )
        return self._links.read(extent, request)

    def _note(self, layer: int, placed: Placed) -> None:
        """Take over what a write has done: lengths, gaps, padding."""
        mirror = self._mirror
        lengths, longest = list(mirror.layer_lengths(layer)), mirror.longest()
        padding = mirror.padding
        for row in np.unique(placed.rows).tolist():
            mine = placed.rows == row
            where = placed.positions[mine]
            highest = int(where.max())
            lengths[row] = max(lengths[row], highest + 1)
            padding = _with_gaps(padding, row, longest[row], where, highest + 1)
            if placed.padding is not None:
                bits = np.zeros(highest + 1, np.bool_)
                bits[where[placed.padding[mine]]] = True
                padding, _ = padding.marked(row, 0, bits)
        mirror.padding = padding
        if mirror.step is not None:
            mirror.step.padding = padding  # calls that still belong to it find what is padding now
        mirror.lengths[layer] = tuple(lengths)
        for extent in mirror.extents:
            extent.knows_padding = extent.knows_padding or extent is mirror.tail


def _with_gaps(padding: Padding, row: int, before: int, where: Ints, after: int) -> Padding:
    """Mark as padding what a write has jumped over beyond a row's longest layer."""
    if after <= before:
        return padding
    gap = np.ones(after - before, np.bool_)
    gap[where[where >= before] - before] = False
    return padding.marked(row, before, gap)[0]


def _read_positions(positions: Any, num_rows: int, num_tokens: int) -> list[list[int]]:
    listed = positions.tolist() if isinstance(positions, np.ndarray) else list(positions)
    per_row = bool(listed) and not isinstance(listed[0], (int, np.integer))
    where = (
        [to_ints(one, "positions") for one in listed]
        if per_row
        else [to_ints(listed, "positions")] * num_rows
    )
    if len(where) != num_rows or any(len(one) != num_tokens for one in where):
        raise InvalidRequest(
            f"positions must be {num_tokens} for all rows, or so many for each of {num_rows} rows"
        )
    if any(position < 0 for one in where for position in one):
        raise InvalidRequest(f"positions must be at least 0, got {where}")
    return where


def _blank(like: npt.NDArray[Any], num_positions: int) -> npt.NDArray[Any]:
    rows, heads, _, dim = like.shape
    return np.zeros((rows, heads, num_positions, dim), like.dtype)
