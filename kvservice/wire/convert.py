"""Sessions, their specs and the workers' numbers: protobuf to and from the core's plain values.

What comes in is checked here, field by field, so that behind the wire every value has its range.
What a session or a layer must be like is its owner's business. `kvservice.wire.calls` does the
same for the data path.

Raises, everywhere: InvalidRequest, naming the field, the rule and what was got.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from google.protobuf import duration_pb2

from kvservice.core import session as core
from kvservice.core.directory import Report, SessionKey
from kvservice.core.distribution import Distribution
from kvservice.core.errors import InvalidRequest
from kvservice.core.geometry import (
    DEFAULT_PAGE_SIZE,
    MAX_LAYERS,
    LayerGeometry,
    LayerSpec,
)
from kvservice.core.liveness import WorkerRecord, WorkerState, WorkerView
from kvservice.v1 import manager_pb2, types_pb2
from kvservice.wire.tensors import dtype_from_pb, dtype_to_pb

DEFAULT_LIST_SIZE: Final = 100
MAX_LIST_SIZE: Final = 1000
MAX_INCARNATION: Final = 128

session_id_from_pb = lru_cache(maxsize=4096)(core.check_session_id)
"""`check_session_id`, remembering the valid ones: it is asked on every call."""


def at_least_one(value: int, name: str) -> int:
    """Return a number that must be set; on the wire 0 means that it is missing."""
    if value < 1:
        raise InvalidRequest(f"{name} must be set, and at least 1, got {value}")
    return value


def not_negative(values: Sequence[int], name: str) -> tuple[int, ...]:
    """Return numbers per row or token, of which none may be negative."""
    if not len(values):
        return ()
    numbers = tuple(values[:])  # the slice is a list, made in one go
    if min(numbers) < 0:
        raise InvalidRequest(f"{name} must not be negative, got {min(numbers)}")
    return numbers


def session_ids_from_pb(values: Iterable[str]) -> list[str]:
    """Return the ids without repeats, in order. At most 10,000."""
    ids = list(dict.fromkeys(values))
    if not 1 <= len(ids) <= 10_000:
        raise InvalidRequest(f"session_ids must be 1 to 10000, got {len(ids)}")
    return [session_id_from_pb(value) for value in ids]


def release_from_pb(pb: types_pb2.ReleaseRequest) -> tuple[dict[str, int], frozenset[str]]:
    """Return the ids of sessions to release, each with the epoch up to which, 0: any; and of which
    of them the next epoch counts too, if it came by a change of their holder's."""
    ids = session_ids_from_pb(pb.session_ids)
    unsettled = frozenset(pb.unsettled_ids)
    if not unsettled.issubset(ids):
        raise InvalidRequest("unsettled_ids must be among session_ids")
    if not pb.epochs:
        return dict.fromkeys(ids, 0), unsettled
    if len(pb.epochs) != len(pb.session_ids):
        raise InvalidRequest(
            f"epochs must be one for each of {len(pb.session_ids)} ids, got {len(pb.epochs)}"
        )
    epochs: dict[str, int] = {}
    for session_id, epoch in zip(pb.session_ids, not_negative(pb.epochs, "epochs"), strict=True):
        former = epochs.get(session_id, epoch)
        epochs[session_id] = max(former, epoch) if former and epoch else 0
    return epochs, unsettled


def stays_from_pb(pb: types_pb2.ReleaseRequest) -> dict[str, str]:
    """Return by session id the stay that is to end, where one is named."""
    if pb.stays and len(pb.stays) != len(pb.session_ids):
        raise InvalidRequest(
            f"stays must be one for each of {len(pb.session_ids)} ids, got {len(pb.stays)}"
        )
    return {
        session_id: incarnation_from_pb(stay)
        for session_id, stay in zip(pb.session_ids, pb.stays, strict=False)
        if stay
    }


def list_size_from_pb(pb: types_pb2.ListSessionsRequest) -> int:
    """Return how many sessions a list may have."""
    if not 0 <= pb.page_size <= MAX_LIST_SIZE:
        raise InvalidRequest(f"page_size must be 1 to {MAX_LIST_SIZE}, got {pb.page_size}")
    return pb.page_size or DEFAULT_LIST_SIZE


# Durations


def seconds_from_pb(duration: duration_pb2.Duration, name: str) -> float:
    if not 0 <= duration.nanos < 1_000_000_000:
        raise InvalidRequest(f"{name}: nanos must be 0 to 999999999, got {duration.nanos}")
    return float((duration.seconds * 1_000_000_000 + duration.nanos) / 1e9)


def seconds_to_pb(seconds: float) -> duration_pb2.Duration:
    whole, nanos = divmod(round(seconds * 1e9), 1_000_000_000)
    return duration_pb2.Duration(seconds=whole, nanos=nanos)


# What a session is opened with


def spec_from_pb(pb: types_pb2.SessionSpec) -> core.SessionSpec:
    if len(pb.layers) > MAX_LAYERS:
        raise InvalidRequest(f"at most {MAX_LAYERS} layers, got {len(pb.layers)}")
    optional = {
        "page_size": pb.page_size if pb.HasField("page_size") else DEFAULT_PAGE_SIZE,
        "replicas": pb.replica_count if pb.HasField("replica_count") else 1,
        "spread": pb.spread if pb.HasField("spread") else 1,
    }
    return core.SessionSpec(
        num_rows=pb.row_count,
        layers=tuple(
            _layer_from_pb(layer, f"layers[{index}]") for index, layer in enumerate(pb.layers)
        ),
        max_tokens=pb.max_tokens if pb.HasField("max_tokens") else None,
        reserve_tokens=pb.reserve_tokens if pb.HasField("reserve_tokens") else None,
        ttl_s=seconds_from_pb(pb.ttl, "ttl") if pb.HasField("ttl") else core.DEFAULT_TTL_S,
        **optional,
    )


def spec_to_pb(spec: core.SessionSpec) -> types_pb2.SessionSpec:
    return types_pb2.SessionSpec(
        row_count=spec.num_rows,
        layers=[_layer_to_pb(layer) for layer in spec.layers],
        page_size=spec.page_size,
        max_tokens=spec.max_tokens,
        reserve_tokens=spec.reserve_tokens,
        ttl=seconds_to_pb(spec.ttl_s),
        replica_count=spec.replicas,
        spread=spec.spread,
    )


def _layer_from_pb(pb: types_pb2.LayerSpec, name: str) -> LayerSpec:
    return LayerSpec(
        window=pb.window if pb.HasField("window") else None,
        geometry=geometry_from_pb(pb.geometry, name) if pb.HasField("geometry") else None,
    )


def geometry_from_pb(pb: types_pb2.LayerGeometry, name: str) -> LayerGeometry:
    dtype = dtype_from_pb(pb.dtype, f"{name}.geometry")
    return LayerGeometry(pb.kv_head_count, pb.k_dim, pb.v_dim, dtype)


def _layer_to_pb(layer: LayerSpec) -> types_pb2.LayerSpec:
    pb = types_pb2.LayerSpec(window=layer.window)
    if layer.geometry is not None:
        pb.geometry.CopyFrom(geometry_to_pb(layer.geometry))
    return pb


def geometry_to_pb(geometry: LayerGeometry) -> types_pb2.LayerGeometry:
    return types_pb2.LayerGeometry(
        kv_head_count=geometry.num_kv_heads,
        k_dim=geometry.k_dim,
        v_dim=geometry.v_dim,
        dtype=dtype_to_pb(geometry.dtype),
    )


# Padding


def padding_from_pb(ranges: Iterable[types_pb2.RowRange]) -> tuple[core.RowRange, ...]:
    padding = tuple(core.RowRange(item.row, item.start, item.stop) for item in ranges)
    for item in padding:
        if item.row < 0 or not 0 <= item.start <= item.stop:
            raise InvalidRequest(
                f"padding must have row >= 0 and 0 <= start <= stop, got row {item.row}, "
                f"[{item.start}, {item.stop})"
            )
    return padding


def padding_to_pb(padding: Iterable[core.RowRange]) -> list[types_pb2.RowRange]:
    return [types_pb2.RowRange(row=item.row, start=item.start, stop=item.stop) for item in padding]


# A session as the service knows it


def extent_to_pb(extent: core.Extent) -> types_pb2.Extent:
    return types_pb2.Extent(
        worker_id=extent.worker_id,
        address=extent.address,
        incarnation=extent.incarnation,
        starts=extent.starts,
        stops=extent.stops,
        followed_by=extent.followed_by,
        capability=extent.capability,
        group=extent.group,
        replaces=extent.replaces,
        stay=extent.stay,
    )


def extent_from_pb(pb: types_pb2.Extent) -> core.Extent:
    starts, stops = not_negative(pb.starts, "starts"), not_negative(pb.stops, "stops")
    if starts and len(starts) != len(stops):
        raise InvalidRequest(f"an extent has {len(starts)} starts, but {len(stops)} stops")
    return core.Extent(
        pb.worker_id,
        pb.address,
        pb.incarnation,
        starts,
        stops,
        incarnation_from_pb(pb.followed_by),
        pb.capability,
        not_negative([pb.group], "group")[0],
        tuple(incarnation_from_pb(one) for one in pb.replaces),
        incarnation_from_pb(pb.stay),
    )


def incarnation_from_pb(incarnation: str) -> str:
    """Return the name of one life of a worker, those of several with commas between, or nothing."""
    if len(incarnation) > MAX_INCARNATION:
        raise InvalidRequest(f"an incarnation has at most {MAX_INCARNATION} characters")
    return incarnation


def session_to_pb(info: core.SessionInfo) -> types_pb2.Session:
    return types_pb2.Session(
        session_id=info.session_id,
        epoch=info.epoch,
        step=info.step,
        spec=spec_to_pb(info.spec),
        extents=[extent_to_pb(extent) for extent in info.extents],
        layers=[types_pb2.LayerLengths(lengths=lengths) for lengths in info.lengths],
        padding=padding_to_pb(info.padding),
        padding_unlisted=info.padding_unlisted,
        last_write=info.last_write,
        current_step=info.current_step,
        same_since_epoch=info.same_since_epoch,
    )


def session_from_pb(pb: types_pb2.Session) -> core.SessionInfo:
    spec, padding = spec_from_pb(pb.spec), padding_from_pb(pb.padding)
    if any(item.row >= spec.num_rows for item in padding):
        raise InvalidRequest(f"padding must be of rows below {spec.num_rows}")
    return core.SessionInfo(
        session_id=session_id_from_pb(pb.session_id),
        epoch=at_least_one(pb.epoch, "epoch"),
        step=not_negative([pb.step], "step")[0],
        spec=spec,
        extents=tuple(extent_from_pb(extent) for extent in pb.extents),
        lengths=tuple(not_negative(layer.lengths, "lengths") for layer in pb.layers),
        padding=padding,
        padding_unlisted=pb.padding_unlisted,
        last_write=not_negative([pb.last_write], "last_write")[0],
        current_step=not_negative([pb.current_step], "current_step")[0],
        same_since_epoch=not_negative([pb.same_since_epoch], "same_since_epoch")[0],
    )


# A worker's numbers


def stats_to_pb(stats: core.WorkerStats) -> types_pb2.WorkerStats:
    return types_pb2.WorkerStats(
        worker_id=stats.worker_id,
        incarnation=stats.incarnation,
        address=stats.address,
        device=stats.device,
        budget_bytes=stats.budget_bytes,
        arena_bytes=stats.arena_bytes,
        used_bytes=stats.used_bytes,
        session_count=stats.num_sessions,
        pools=[_pool_to_pb(pool) for pool in stats.pools],
        page_allocation_count=stats.page_allocations,
        page_frees=_counts_to_pb(stats.page_frees),
        allocation_failures=_counts_to_pb(stats.allocation_failures),
        appended_token_count=stats.appended_tokens,
        popped_token_count=stats.popped_tokens,
        appended_bytes=stats.appended_bytes,
        read_bytes=stats.read_bytes,
        lease_expiration_count=stats.lease_expirations,
        draining=stats.draining,
        replays=_counts_to_pb(stats.replays),
        stale_epoch_count=stats.stale_epochs,
        page_discrepancies=_counts_to_pb(stats.page_discrepancies),
        attention_seconds=_distribution_to_pb(stats.attention_seconds),
        attention_rows=_distribution_to_pb(stats.attention_rows),
        session_pages=_distribution_to_pb(stats.session_pages),
        moves=_counts_to_pb(stats.moves),
        moved_bytes=stats.moved_bytes,
        handover_seconds=_distribution_to_pb(stats.handover_seconds),
        arriving_count=stats.num_arriving,
    )


def stats_from_pb(pb: types_pb2.WorkerStats) -> core.WorkerStats:
    return core.WorkerStats(
        worker_id=pb.worker_id,
        incarnation=pb.incarnation,
        address=pb.address,
        device=pb.device,
        budget_bytes=pb.budget_bytes,
        arena_bytes=pb.arena_bytes,
        used_bytes=pb.used_bytes,
        num_sessions=pb.session_count,
        pools=tuple(_pool_from_pb(pool) for pool in pb.pools),
        page_allocations=pb.page_allocation_count,
        page_frees={item.reason: item.count for item in pb.page_frees},
        allocation_failures={item.reason: item.count for item in pb.allocation_failures},
        appended_tokens=pb.appended_token_count,
        popped_tokens=pb.popped_token_count,
        appended_bytes=pb.appended_bytes,
        read_bytes=pb.read_bytes,
        lease_expirations=pb.lease_expiration_count,
        draining=pb.draining,
        replays={item.reason: item.count for item in pb.replays},
        stale_epochs=pb.stale_epoch_count,
        page_discrepancies={item.reason: item.count for item in pb.page_discrepancies},
        attention_seconds=_distribution_from_pb(pb.attention_seconds),
        attention_rows=_distribution_from_pb(pb.attention_rows),
        session_pages=_distribution_from_pb(pb.session_pages),
        moves={item.reason: item.count for item in pb.moves},
        moved_bytes=pb.moved_bytes,
        handover_seconds=_distribution_from_pb(pb.handover_seconds),
        num_arriving=pb.arriving_count,
    )


def _distribution_to_pb(found: Distribution) -> types_pb2.Distribution:
    return types_pb2.Distribution(bounds=found.bounds, counts=found.counts, sum=found.total)


def _distribution_from_pb(pb: types_pb2.Distribution) -> Distribution:
    return Distribution(tuple(pb.bounds), tuple(pb.counts) or (0,), pb.sum)


def _pool_to_pb(pool: core.PoolStats) -> types_pb2.PoolStats:
    return types_pb2.PoolStats(
        pool=pool.pool,
        page_size=pool.page_size,
        page_bytes=pool.page_bytes,
        used_page_count=pool.used_pages,
        reserved_page_count=pool.reserved_pages,
        free_page_count=pool.free_pages,
        token_count=pool.num_tokens,
    )


def _pool_from_pb(pb: types_pb2.PoolStats) -> core.PoolStats:
    return core.PoolStats(
        pool=pb.pool,
        page_size=pb.page_size,
        page_bytes=pb.page_bytes,
        used_pages=pb.used_page_count,
        reserved_pages=pb.reserved_page_count,
        free_pages=pb.free_page_count,
        num_tokens=pb.token_count,
    )


def _counts_to_pb(counts: dict[str, int]) -> list[types_pb2.ReasonCount]:
    return [types_pb2.ReasonCount(reason=name, count=count) for name, count in counts.items()]


# What workers and the manager tell each other of themselves

_STATE_TO_PB: Final = {
    WorkerState.ALIVE: manager_pb2.WORKER_STATE_ALIVE,
    WorkerState.SUSPECT: manager_pb2.WORKER_STATE_SUSPECT,
    WorkerState.DEAD: manager_pb2.WORKER_STATE_DEAD,
    WorkerState.DRAINING: manager_pb2.WORKER_STATE_DRAINING,
}


def record_from_pb(pb: manager_pb2.WorkerInfo) -> WorkerRecord:
    """Return what a heartbeat says of its worker."""
    for name in ("worker_id", "incarnation", "address"):
        if not getattr(pb, name):
            raise InvalidRequest(f"worker.{name} is missing")
    return WorkerRecord(
        worker_id=pb.worker_id,
        incarnation=pb.incarnation,
        address=pb.address,
        device=pb.device,
        budget_bytes=pb.budget_bytes,
        free_bytes=pb.free_bytes,
        draining=pb.state == manager_pb2.WORKER_STATE_DRAINING,
        metrics_address=pb.metrics_address,
    )


def view_to_pb(view: WorkerView) -> manager_pb2.WorkerInfo:
    """Return what is known of a worker, or what it says of itself in a heartbeat."""
    record = view.record
    return manager_pb2.WorkerInfo(
        worker_id=record.worker_id,
        incarnation=record.incarnation,
        address=record.address,
        device=record.device,
        budget_bytes=record.budget_bytes,
        free_bytes=record.free_bytes,
        session_count=view.num_sessions,
        state=_STATE_TO_PB[view.state],
        metrics_address=record.metrics_address,
    )


def record_to_pb(stats: core.WorkerStats, metrics_address: str) -> manager_pb2.WorkerInfo:
    """Return what a worker's numbers say of it."""
    promised = sum(pool.reserved_pages * pool.page_bytes for pool in stats.pools)
    draining = manager_pb2.WORKER_STATE_DRAINING
    return manager_pb2.WorkerInfo(
        worker_id=stats.worker_id,
        incarnation=stats.incarnation,
        address=stats.address,
        device=stats.device,
        budget_bytes=stats.budget_bytes,
        free_bytes=max(0, stats.budget_bytes - stats.used_bytes - promised),
        session_count=stats.num_sessions,
        state=draining if stats.draining else manager_pb2.WORKER_STATE_ALIVE,
        metrics_address=metrics_address,
    )


def report_from_pb(pb: manager_pb2.SessionReport) -> Report:
    """Return what a worker reports of a session that it holds."""
    key = (pb.tenant, pb.session.session_id)
    return Report(
        key,
        seconds_from_pb(pb.session.spec.ttl, "ttl"),
        pb.session.epoch,
        pb.session.spec.replica_count or 1,
        pb.session.extents[0].group if pb.session.extents else 0,
    )


def left_behind_to_pb(key: SessionKey, epoch: int) -> manager_pb2.SessionReport:
    """Return what a worker is told of a session to be freed, unless at a later epoch."""
    session = types_pb2.Session(session_id=key[1], epoch=epoch)
    return manager_pb2.SessionReport(tenant=key[0], session=session)


def report_to_pb(tenant: str, info: core.SessionInfo) -> manager_pb2.SessionReport:
    """Return a session as a heartbeat reports it: what the directory keeps, and no more."""
    spec = types_pb2.SessionSpec(row_count=info.spec.num_rows, ttl=seconds_to_pb(info.spec.ttl_s))
    session = types_pb2.Session(session_id=info.session_id, epoch=info.epoch, spec=spec)
    if info.spec.replicas > 1:
        session.spec.replica_count = info.spec.replicas
        session.extents.add(group=info.extents[0].group)
    return manager_pb2.SessionReport(tenant=tenant, session=session)
