"""Messages and plain values: what is well-formed survives the trip, what is not is named."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable

import numpy as np
import pytest
from google.protobuf import duration_pb2
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core import session as core
from kvservice.core.errors import InvalidRequest
from kvservice.core.geometry import DType, HostTensor, LayerGeometry, LayerSpec
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire import calls, convert
from kvservice.wire.tensors import from_numpy

SESSION_ID = str(uuid.UUID(int=0xABCDEF, version=4))
POSITIONS = st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple)
WINDOWS = st.none() | st.integers(1, 1 << 30)


def tensor(*shape: int, dtype: str = "f4") -> HostTensor:
    made = from_numpy(np.ones(shape, dtype))
    return HostTensor(made.dtype, made.shape, bytes(made.data))


@st.composite
def specs(draw: st.DrawFn) -> core.SessionSpec:
    geometry = st.builds(
        LayerGeometry,
        st.integers(1, 64),
        st.integers(1, 256),
        st.integers(1, 256),
        st.sampled_from([dtype for dtype in DType if dtype.is_float]),
    )
    layer = st.builds(LayerSpec, WINDOWS, geometry if draw(st.booleans()) else st.none())
    return core.SessionSpec(
        num_rows=draw(st.integers(1, 100)),
        layers=tuple(draw(st.lists(layer, max_size=4))),
        page_size=draw(st.integers(1, 1024)),
        max_tokens=draw(st.none() | st.integers(1000, 1 << 40)),
        reserve_tokens=draw(st.none() | st.integers(1, 1000)),
        ttl_s=draw(st.integers(1000, 3_600_000)) / 1000,
        replicas=draw(st.integers(1, 2)),
        spread=draw(st.integers(1, 4)),
    )


@given(spec=specs())
def test_spec_survives_the_wire(spec: core.SessionSpec) -> None:
    """Every field of a spec comes back."""
    sent = convert.spec_to_pb(spec).SerializeToString()
    assert convert.spec_from_pb(types_pb2.SessionSpec.FromString(sent)) == spec


def test_unset_fields_of_a_spec_take_their_defaults() -> None:
    """A spec of another language that states only its rows is the default one."""
    assert convert.spec_from_pb(types_pb2.SessionSpec(row_count=3)) == core.SessionSpec(3)


@given(spec=specs(), lengths=st.lists(POSITIONS, max_size=3), epoch=st.integers(1, 99))
def test_session_survives_the_wire(
    spec: core.SessionSpec, lengths: list[tuple[int, ...]], epoch: int
) -> None:
    """What a worker says about a session is what its client hears."""
    info = core.SessionInfo(
        session_id=SESSION_ID,
        epoch=epoch,
        step=5,
        spec=spec,
        extents=(
            core.Extent("w0", "host:1", "a", (0, 1), (4, 5)),
            core.Extent("w1", "host:2", "b"),
        ),
        lengths=tuple(lengths),
        padding=(core.RowRange(0, 0, 7), core.RowRange(0, 9, epoch + 10)),
        padding_unlisted=epoch % 2 == 0,
    )
    sent = convert.session_to_pb(info).SerializeToString()
    assert convert.session_from_pb(types_pb2.Session.FromString(sent)) == info


def test_stats_survive_the_wire() -> None:
    """The RPC carries every number of the snapshot."""
    pools = (core.PoolStats(0, 16, 4096, 1, 2, 3, 17), core.PoolStats(1, 8, 64, 4, 5, 6, 30))
    stats = core.WorkerStats(
        *("w", "inc", "host:1", "cpu", 1, 2, 3, 4, pools, 5, {"pop": 6}, {"out_of_pages": 7}),
        *(8, 9, 10, 11, 12, True),
    )
    sent = convert.stats_to_pb(stats).SerializeToString()
    assert convert.stats_from_pb(types_pb2.WorkerStats.FromString(sent)) == stats


MASKS = st.one_of(
    st.just(core.Mask(core.MaskKind.FULL)),
    st.builds(core.Mask, st.just(core.MaskKind.CAUSAL), window=WINDOWS),
    st.builds(core.Mask, st.just(core.MaskKind.CHUNK), chunk=st.integers(1, 1 << 20)),
    st.sampled_from([tensor(1, 1, 2, 3), tensor(2, 1, 2, 3, dtype="?")]).map(
        lambda dense: core.Mask(core.MaskKind.DENSE, dense=dense)
    ),
)
HEADERS = st.builds(
    core.StepHeader,
    counts=POSITIONS,
    padding=st.lists(
        st.builds(core.RowRange, st.integers(0, 9), st.integers(0, 9), st.integers(9, 99)),
        max_size=2,
    ).map(tuple),
    evict_before=st.lists(
        st.builds(core.EvictBefore, st.integers(1, 99), POSITIONS), max_size=2
    ).map(tuple),
)


@given(
    mask=MASKS,
    header=st.none() | HEADERS,
    positions=POSITIONS,
    with_kv=st.booleans(),
    partial=st.booleans(),
    softcap=st.none() | st.floats(0.5, 100),
    scale=st.floats(-10, 10),
    layer=st.integers(0, 1023),
)
def test_attend_call_survives_the_wire(
    mask: core.Mask,
    header: core.StepHeader | None,
    positions: tuple[int, ...],
    *,
    with_kv: bool,
    partial: bool,
    softcap: float | None,
    scale: float,
    layer: int,
) -> None:
    """Every field of a call comes back, whatever else is set."""
    call = core.AttendCall(
        session_id=SESSION_ID,
        epoch=3,
        step=9,
        layer=layer,
        q=tensor(2, 4, 8),
        scale=scale,
        mask=mask,
        k=tensor(2, 2, 8) if with_kv else None,
        v=tensor(2, 2, 6) if with_kv else None,
        header=header,
        positions=positions,
        query_counts=positions,
        query_positions=positions,
        softcap=softcap,
        sinks=None if partial else tensor(4),
        bias=tensor(1, 1, 2, 3),
        column_starts=tuple(-position for position in positions),
        partial=partial,
    )
    sent = calls.attend_call_to_pb(call, call_id=77, incarnation="i")
    received = worker_pb2.AttendCall.FromString(sent.SerializeToString())
    assert (received.call_id, received.incarnation) == (77, "i")
    assert calls.attend_call_from_pb(received) == call


def test_results_and_writes_survive_the_wire() -> None:
    """The other messages of the data path, too."""
    result = core.AttendResult(tensor(2, 4, 8), tensor(2, 4))
    assert calls.attend_result_from_pb(calls.attend_result_to_pb(result, 5)) == result
    write = core.WriteCall(
        *(SESSION_ID, 2, 3, tensor(2, 1, 4), tensor(2, 1, 4), (0, 1), (7, 5)),
        padding=(core.RowRange(1, 0, 3),),
        evict_before=(core.EvictBefore(4, (2, 0)),),
    )
    assert calls.write_call_from_pb(calls.write_call_to_pb(write)) == write
    nothing = core.HostTensor(tensor(1, 1, 4).dtype, (0, 1, 4), b"")
    evict = core.WriteCall(
        *(SESSION_ID, 2, 3, nothing, nothing, (), ()), evict_before=write.evict_before
    )
    assert calls.write_call_from_pb(calls.write_call_to_pb(evict)) == evict
    read = core.ReadResult(tensor(1, 2, 3, 4), tensor(1, 2, 3, 4), (3,))
    assert calls.read_result_from_pb(calls.read_result_to_pb(read)) == read


def call_pb() -> worker_pb2.AttendCall:
    """Return a call that is good as it stands."""
    return calls.attend_call_to_pb(
        core.AttendCall(
            session_id=SESSION_ID,
            epoch=1,
            step=1,
            layer=0,
            q=tensor(1, 2, 4),
            scale=0.5,
            mask=core.Mask(),
            k=tensor(1, 1, 4),
            v=tensor(1, 1, 4),
            header=core.StepHeader((1,)),
            positions=(0,),
        )
    )


Change = Callable[[worker_pb2.AttendCall], object]
BAD_CALLS: dict[str, tuple[Change, str]] = {
    "no session id": (lambda pb: pb.ClearField("session_id"), "session id"),
    "a path for an id": (lambda pb: setattr(pb, "session_id", "../../etc/passwd"), "session id"),
    "an upper-case id": (lambda pb: setattr(pb, "session_id", SESSION_ID.upper()), "session id"),
    "no epoch": (lambda pb: pb.ClearField("epoch"), "epoch"),
    "negative epoch": (lambda pb: setattr(pb, "epoch", -1), "epoch"),
    "no step": (lambda pb: pb.ClearField("step"), "step"),
    "layer below 0": (lambda pb: setattr(pb, "layer", -1), "layer"),
    "layer too high": (lambda pb: setattr(pb, "layer", 1024), "layer"),
    "no q": (lambda pb: pb.ClearField("q"), "q is missing"),
    "q of rank 2": (lambda pb: pb.q.shape.pop(), "q must have 3"),
    "q short of bytes": (lambda pb: setattr(pb.q, "data", b"1234"), "q: .* got 4"),
    "q of bools": (lambda pb: pb.q.CopyFrom(bools(1, 2, 4)), "float dtype"),
    "k without v": (lambda pb: pb.ClearField("v"), "k without v"),
    "v without k": (lambda pb: pb.ClearField("k"), "v without k"),
    "no scale": (lambda pb: pb.ClearField("scale"), "scale"),
    "scale NaN": (lambda pb: setattr(pb, "scale", math.nan), "scale"),
    "scale infinite": (lambda pb: setattr(pb, "scale", math.inf), "scale"),
    "softcap 0": (lambda pb: setattr(pb, "softcap", 0.0), "softcap"),
    "softcap NaN": (lambda pb: setattr(pb, "softcap", math.nan), "softcap"),
    "no mask": (lambda pb: pb.ClearField("mask"), "mask"),
    "unknown mask": (lambda pb: setattr(pb.mask, "kind", 99), "mask.*99"),
    "window 0": (lambda pb: setattr(pb.mask, "window", 0), "window"),
    "window of a full mask": (
        lambda pb: pb.mask.CopyFrom(worker_pb2.Mask(kind=worker_pb2.MASK_KIND_FULL, window=3)),
        "window",
    ),
    "chunk of a causal mask": (lambda pb: setattr(pb.mask, "chunk", 8), "chunk"),
    "a chunk mask without chunk": (
        lambda pb: setattr(pb.mask, "kind", worker_pb2.MASK_KIND_CHUNK),
        "chunk",
    ),
    "a dense mask without one": (
        lambda pb: setattr(pb.mask, "kind", worker_pb2.MASK_KIND_DENSE),
        "dense",
    ),
    "sinks in a partial": (
        lambda pb: (pb.sinks.CopyFrom(floats(2)), setattr(pb, "partial", True)),
        "sinks",
    ),
    "sinks of another dtype": (lambda pb: pb.sinks.CopyFrom(floats(2, dtype="f8")), "sinks"),
    "bias of bools": (lambda pb: pb.bias.CopyFrom(bools(1, 1, 1, 1)), "bias"),
    "negative position": (lambda pb: pb.positions.append(-1), "positions"),
    "negative count": (lambda pb: pb.header.counts.append(-1), "counts"),
    "negative query count": (lambda pb: pb.query_counts.append(-1), "query_counts"),
    "padding of row -1": (lambda pb: pb.header.padding.add(row=-1, stop=1), "padding"),
    "padding that ends first": (lambda pb: pb.header.padding.add(start=3, stop=2), "padding"),
    "padding from -1": (lambda pb: pb.header.padding.add(start=-1, stop=2), "padding"),
    "eviction without a window": (lambda pb: pb.header.evict_before.add(), "window"),
    "negative eviction": (
        lambda pb: pb.header.evict_before.add(window=1, positions=[-3]),
        "evict_before",
    ),
}


def floats(*shape: int, dtype: str = "f4") -> types_pb2.Tensor:
    return calls.tensor_to_pb(tensor(*shape, dtype=dtype))


def bools(*shape: int) -> types_pb2.Tensor:
    return calls.tensor_to_pb(tensor(*shape, dtype="?"))


def test_the_good_call_is_good() -> None:
    """What the bad ones are made from is accepted."""
    assert calls.attend_call_from_pb(call_pb()).positions == (0,)


@pytest.mark.parametrize("name", BAD_CALLS)
def test_malformed_call_is_named(name: str) -> None:
    """Each mistake is INVALID_REQUEST, with a text that names the field."""
    change, text = BAD_CALLS[name]
    bad = call_pb()
    change(bad)
    with pytest.raises(InvalidRequest, match=text):
        calls.attend_call_from_pb(bad)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda pb: pb.ClearField("k"), "k and v"),
        (lambda pb: pb.rows.append(0), "one row and one position"),
        (lambda pb: pb.positions.pop(), "one row and one position"),
        (lambda pb: pb.rows.__setitem__(0, -1), "rows"),
        (lambda pb: pb.positions.__setitem__(0, -1), "positions"),
        (lambda pb: pb.padding.add(row=-1, stop=1), "padding"),
        (lambda pb: pb.ClearField("epoch"), "epoch"),
    ],
)
def test_malformed_write_is_named(change: Callable[[object], object], text: str) -> None:
    """As for Attend."""
    bad = worker_pb2.WriteCall(
        session_id=SESSION_ID,
        epoch=1,
        k=floats(1, 2, 3),
        v=floats(1, 2, 3),
        rows=[0],
        positions=[4],
    )
    calls.write_call_from_pb(bad)
    change(bad)
    with pytest.raises(InvalidRequest, match=text):
        calls.write_call_from_pb(bad)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (types_pb2.SessionSpec(), "num_rows"),
        (types_pb2.SessionSpec(row_count=-1), "num_rows"),
        (types_pb2.SessionSpec(row_count=1, page_size=0), "page_size"),
        (types_pb2.SessionSpec(row_count=1, max_tokens=0), "max_tokens"),
        (types_pb2.SessionSpec(row_count=1, max_tokens=5, reserve_tokens=6), "reserve_tokens"),
        (types_pb2.SessionSpec(row_count=1, spread=0), "spread"),
        (types_pb2.SessionSpec(row_count=1, replica_count=0), "replicas"),
        (types_pb2.SessionSpec(row_count=1, ttl=duration_pb2.Duration()), "ttl"),
        (types_pb2.SessionSpec(row_count=1, ttl=duration_pb2.Duration(seconds=-5)), "ttl"),
        (types_pb2.SessionSpec(row_count=1, ttl=duration_pb2.Duration(seconds=10**9)), "ttl"),
        (
            types_pb2.SessionSpec(row_count=1, ttl=duration_pb2.Duration(seconds=5, nanos=-1)),
            "nanos",
        ),
        (types_pb2.SessionSpec(row_count=1, layers=[types_pb2.LayerSpec(window=0)]), "window"),
        (
            types_pb2.SessionSpec(
                row_count=1, layers=[types_pb2.LayerSpec(geometry=types_pb2.LayerGeometry())]
            ),
            r"layers\[0\].*dtype",
        ),
        (types_pb2.SessionSpec(row_count=1, layers=[types_pb2.LayerSpec()] * 1025), "1024 layers"),
    ],
)
def test_malformed_spec_is_named(spec: types_pb2.SessionSpec, text: str) -> None:
    """A session cannot be opened with what it could not be."""
    with pytest.raises(InvalidRequest, match=text):
        convert.spec_from_pb(spec)


def test_lists_of_ids_are_bounded_and_checked() -> None:
    """Repeats count once; none, too many, or anything but an id is refused."""
    assert convert.session_ids_from_pb([SESSION_ID] * 3) == [SESSION_ID]
    for bad in ([], ["x"], [SESSION_ID, ""], [str(number) for number in range(10_001)]):
        with pytest.raises(InvalidRequest):
            convert.session_ids_from_pb(bad)


def test_a_list_of_sessions_has_a_size() -> None:
    """Unset is the default; beyond the limit is refused, not clamped."""
    assert convert.list_size_from_pb(types_pb2.ListSessionsRequest()) == 100
    assert convert.list_size_from_pb(types_pb2.ListSessionsRequest(page_size=1000)) == 1000
    for size in (-1, 1001):
        with pytest.raises(InvalidRequest, match="page_size"):
            convert.list_size_from_pb(types_pb2.ListSessionsRequest(page_size=size))
