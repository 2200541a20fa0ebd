"""A session on its way from worker to worker: protobuf to and from the core's plain values.

As `kvservice.wire.convert`, whose module docstring holds here too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from kvservice.core.errors import CapacityError, InvalidRequest
from kvservice.core.geometry import HOLE
from kvservice.core.moving import (
    CopiedPages,
    GroupState,
    MovedTo,
    Refused,
    SessionState,
    StepState,
)
from kvservice.core.session import RowRange
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire import convert
from kvservice.wire.calls import header_from_pb, header_to_pb, layer_from_pb
from kvservice.wire.convert import at_least_one, not_negative
from kvservice.wire.status import from_status, to_status
from kvservice.wire.tensors import tensor_from_pb, tensor_to_pb


def state_to_pb(state: SessionState) -> worker_pb2.SessionState:
    verb, values = _change_to_pb(state.last_change)
    verb_before, values_before = _change_to_pb(state.change_before)
    return worker_pb2.SessionState(
        spec=convert.spec_to_pb(state.spec),
        row_count=state.num_rows,
        epoch=state.epoch,
        origin=_origin_to_pb(state.origin),
        last_change=verb,
        last_change_values=values,
        change_before=verb_before,
        change_before_values=values_before,
        unheard_from=state.unheard_from,
        shared_with=None if state.copied is None else _shared_to_pb(*state.copied),
        last_step=state.last_step,
        step=None if state.step is None else _step_to_pb(state.step),
        begins_at_zero=state.begins_at_zero,
        starts=state.starts or (),
        layers=[
            worker_pb2.LayerState(
                layer=layer,
                geometry=convert.geometry_to_pb(geometry),
                lengths=state.lengths.get(layer, ()),
            )
            for layer, geometry in state.geometries.items()
        ],
        groups=[_group_to_pb(group) for group in state.groups],
        padding=convert.padding_to_pb(state.padding),
        targets=state.targets or (),
        followed_by=state.followed_by,
        last_write=state.last_write,
        refused_step=_refused_to_pb(state.refused_step),
        refused_write=_refused_to_pb(state.refused_write),
        group=state.group,
        replaces=state.replaces,
        left=convert.seconds_to_pb(max(0.0, state.left_s)),
    )


def state_from_pb(pb: worker_pb2.SessionState) -> SessionState:
    num_rows = at_least_one(pb.row_count, "row_count")
    lengths = {
        layer_from_pb(one.layer): _per_row(one.lengths, num_rows, "lengths")
        for one in pb.layers
        if one.lengths
    }
    return SessionState(
        spec=convert.spec_from_pb(pb.spec),
        num_rows=num_rows,
        origin=_origin_from_pb(pb.origin),
        epoch=at_least_one(pb.epoch, "epoch"),
        last_change=_change_from_pb(pb.last_change, pb.last_change_values),
        change_before=_change_from_pb(pb.change_before, pb.change_before_values),
        unheard_from=not_negative([pb.unheard_from], "unheard_from")[0],
        copied=_shared_from_pb(pb.shared_with) if pb.HasField("shared_with") else None,
        last_step=not_negative([pb.last_step], "last_step")[0],
        step=_step_from_pb(pb.step) if pb.HasField("step") else None,
        begins_at_zero=pb.begins_at_zero,
        starts=_per_row(pb.starts, num_rows, "starts") if pb.starts else None,
        lengths=lengths,
        geometries={
            layer_from_pb(one.layer): convert.geometry_from_pb(one.geometry, f"layer {one.layer}")
            for one in pb.layers
        },
        groups=tuple(_group_from_pb(group, num_rows) for group in pb.groups),
        padding=_padding_from_pb(pb.padding, num_rows),
        targets=_per_row(pb.targets, num_rows, "targets") if pb.targets else None,
        followed_by=convert.incarnation_from_pb(pb.followed_by),
        last_write=not_negative([pb.last_write], "last_write")[0],
        refused_step=_refused_from_pb(pb, "refused_step"),
        refused_write=_refused_from_pb(pb, "refused_write"),
        group=not_negative([pb.group], "group")[0],
        replaces=tuple(convert.incarnation_from_pb(one) for one in pb.replaces),
        left_s=convert.seconds_from_pb(pb.left, "left"),
    )


def pages_to_pb(copied: CopiedPages) -> worker_pb2.CopyPagesResponse:
    return worker_pb2.CopyPagesResponse(
        written_at=copied.written,
        layers=[
            worker_pb2.LayerPages(layer=layer, k=tensor_to_pb(k), v=tensor_to_pb(v))
            for layer, (k, v) in copied.layers.items()
        ],
    )


def pages_from_pb(pb: worker_pb2.CopyPagesResponse) -> CopiedPages:
    return CopiedPages(
        not_negative(pb.written_at, "written_at"),
        {
            layer_from_pb(one.layer): (
                tensor_from_pb(one.k, "k", 3),
                tensor_from_pb(one.v, "v", 3),
            )
            for one in pb.layers
        },
    )


def page_numbers_to_pb(pages: Iterable[int]) -> list[int]:
    """Return pages as they are numbered between workers: from 1, and 0 for a hole."""
    return [page + 1 for page in pages]


def page_numbers_from_pb(numbers: Iterable[int]) -> tuple[int, ...]:
    """Return what `page_numbers_to_pb` was given."""
    return tuple(number - 1 for number in numbers)


assert HOLE == -1, "pages are counted from 1 between workers, and 0 is a hole"


def _per_row(values: Any, num_rows: int, name: str) -> tuple[int, ...]:
    if len(values) != num_rows:
        raise InvalidRequest(f"{name} must have {num_rows} entries, got {len(values)}")
    return not_negative(values, name)


def _group_to_pb(group: GroupState) -> worker_pb2.GroupState:
    return worker_pb2.GroupState(
        window=group.window,
        in_use=group.in_use,
        rows=[worker_pb2.RowPages(pages=page_numbers_to_pb(table)) for table in group.tables],
        evicted=group.evicted,
        written_pages=page_numbers_to_pb(group.written),
        written_at=list(group.written.values()),
    )


def _group_from_pb(pb: worker_pb2.GroupState, num_rows: int) -> GroupState:
    if not len(pb.rows) == len(pb.evicted) == num_rows:
        raise InvalidRequest(f"a group must have {num_rows} rows, got {len(pb.rows)}")
    if len(pb.written_pages) != len(pb.written_at):
        raise InvalidRequest("written_pages and written_at must have the same length")
    pages = page_numbers_from_pb(pb.written_pages)
    return GroupState(
        window=pb.window if pb.HasField("window") else None,
        tables=tuple(page_numbers_from_pb(row.pages) for row in pb.rows),
        evicted=not_negative(pb.evicted, "evicted"),
        in_use=pb.in_use,
        written=dict(zip(pages, not_negative(pb.written_at, "written_at"), strict=True)),
    )


def _padding_from_pb(ranges: Iterable[types_pb2.RowRange], num_rows: int) -> tuple[RowRange, ...]:
    padding = convert.padding_from_pb(ranges)
    if any(item.row >= num_rows for item in padding):
        raise InvalidRequest(f"padding must be of rows below {num_rows}")
    return padding


def _step_to_pb(step: StepState) -> worker_pb2.StepState:
    return worker_pb2.StepState(
        number=step.number,
        header=header_to_pb(step.header),
        positions=step.positions,
        appended=[
            worker_pb2.LayerPositions(layer=layer, positions=positions)
            for layer, positions in step.appended.items()
        ],
    )


def _step_from_pb(pb: worker_pb2.StepState) -> StepState:
    return StepState(
        number=at_least_one(pb.number, "step"),
        header=header_from_pb(pb.header),
        positions=not_negative(pb.positions, "positions"),
        appended={
            layer_from_pb(one.layer): not_negative(one.positions, "positions")
            for one in pb.appended
        },
    )


def _refused_to_pb(refused: Refused | None) -> worker_pb2.RefusedCall | None:
    if refused is None:
        return None
    return worker_pb2.RefusedCall(number=refused[0], error=to_status(refused[1]))


def _refused_from_pb(pb: worker_pb2.SessionState, name: str) -> Refused | None:
    if not pb.HasField(name):
        return None
    refused = getattr(pb, name)
    error = from_status(refused.error)
    if not isinstance(error, CapacityError):
        raise InvalidRequest(f"{name} must say that there was no room, got {error.reason}")
    return at_least_one(refused.number, name), error


def _change_to_pb(change: Hashable) -> tuple[str, tuple[int, ...]]:
    if change is None:
        return "", ()
    if isinstance(change, str):
        return change, ()
    assert isinstance(change, tuple), "a verb, or a verb with what it was asked for"
    return change[0], change[1]


def _change_from_pb(verb: str, values: Iterable[int]) -> Hashable:
    listed = tuple(values)
    if not verb:
        return None
    return (verb, listed) if listed or verb in ("pop", "select") else verb


def _shared_to_pb(to: MovedTo, epoch: int) -> worker_pb2.SharedWith:
    return worker_pb2.SharedWith(
        worker_id=to.worker_id,
        address=to.address,
        incarnation=to.incarnation,
        ticket=to.ticket,
        stay=to.stay,
        epoch=epoch,
    )


def _shared_from_pb(pb: worker_pb2.SharedWith) -> tuple[MovedTo, int]:
    incarnation, stay = map(convert.incarnation_from_pb, (pb.incarnation, pb.stay))
    to = MovedTo(pb.worker_id, pb.address, incarnation, pb.ticket, stay)
    return to, at_least_one(pb.epoch, "epoch")


def _origin_to_pb(origin: Hashable) -> worker_pb2.SessionOrigin:
    assert isinstance(origin, tuple), "a verb, and what it was asked for"
    if origin[0] == "allocate":
        _, spec, starts, epoch = origin
        allocate = types_pb2.AllocateRequest(
            spec=convert.spec_to_pb(spec), extent_starts=starts, epoch=epoch
        )
        return worker_pb2.SessionOrigin(allocate=allocate)
    _, session_id, epoch, token_count, ttl_s = origin
    fork = types_pb2.ForkRequest(session_id=session_id, epoch=epoch, token_count=token_count)
    if ttl_s is not None:
        fork.ttl.CopyFrom(convert.seconds_to_pb(ttl_s))
    return worker_pb2.SessionOrigin(fork=fork)


def _origin_from_pb(pb: worker_pb2.SessionOrigin) -> Hashable:
    if pb.HasField("allocate"):
        allocate = pb.allocate
        return (
            "allocate",
            convert.spec_from_pb(allocate.spec),
            not_negative(allocate.extent_starts, "extent_starts"),
            allocate.epoch,
        )
    if not pb.HasField("fork"):
        raise InvalidRequest("origin is missing")
    fork = pb.fork
    return (
        "fork",
        fork.session_id,
        fork.epoch,
        fork.token_count if fork.HasField("token_count") else None,
        convert.seconds_from_pb(fork.ttl, "ttl") if fork.HasField("ttl") else None,
    )
