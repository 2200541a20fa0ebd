"""The short way through a step gives the long way's bits, and steps aside for everything else."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvservice.clock import ManualClock
from kvservice.core.caller import ANONYMOUS
from kvservice.core.errors import Conflict, GeometryMismatch, KVServiceError, OutOfOrder
from kvservice.core.geometry import DType, HostTensor, LayerSpec
from kvservice.core.session import (
    AttendCall,
    AttendResult,
    Mask,
    MaskKind,
    RowRange,
    SessionSpec,
    StepHeader,
    WriteCall,
)
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire import calls
from kvservice.wire.fragments import frames
from kvservice_workers.attention import native
from kvservice_workers.data_plane.service import WorkerService
from kvservice_workers.short_way import ShortWay
from kvservice_workers.worker import PageWorker, WorkerConfig

TENANT = ANONYMOUS.tenant
SESSION = str(uuid.UUID(int=7, version=4))
LAYERS = 3
NUMPY = {DType.FLOAT32: np.float32, DType.FLOAT16: np.float16, DType.BFLOAT16: np.uint16}

pytestmark = pytest.mark.skipif(
    not native.available(), reason="the native extension was not built: no compiler"
)


def tensor(rng: np.random.Generator, dtype: DType, *shape: int) -> HostTensor:
    values = rng.standard_normal(shape).astype(np.float32)
    if dtype is DType.BFLOAT16:
        return HostTensor(dtype, shape, (values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return HostTensor(dtype, shape, values.astype(NUMPY[dtype]).tobytes())


class Pair:
    """Two workers that are asked the same: one may take the short way, one never does."""

    def __init__(self, spec: SessionSpec, seed: int = 1) -> None:
        config = WorkerConfig("w", "life", budget_bytes=1 << 24)
        self.short = PageWorker(config, clock=ManualClock())
        self.long = PageWorker(config, clock=ManualClock())
        self.service = WorkerService(self.short)
        self.rng = np.random.default_rng(seed)
        self.lengths = [0] * spec.num_rows
        self.step = 0
        for worker in (self.short, self.long):
            worker.opening.allocate(TENANT, SESSION, spec)

    def ask(self, call: AttendCall) -> worker_pb2.AttendResult:
        """Return the short worker's answer, having compared it with the long one's."""
        pb = calls.attend_call_to_pb(call, call_id=3)
        try:
            expected = self.long.long_way.attend(TENANT, call)
        except KVServiceError as error:
            expected_error = error
        else:
            return self.same_answer(pb, expected)
        with pytest.raises(type(expected_error)) as raised:
            self.service.attend(pb, ANONYMOUS)
        assert raised.value.metadata == expected_error.metadata
        raise expected_error

    def same_answer(
        self, pb: worker_pb2.AttendCall, expected: AttendResult
    ) -> worker_pb2.AttendResult:
        answer = self.service.attend(pb, ANONYMOUS)
        assert answer == calls.attend_result_to_pb(expected, 3), "another answer"
        self.short.check()
        assert self.short.stats() == self.long.stats()
        return answer

    def calls(
        self, counts: list[int], dtype: DType, heads: int, dims: tuple[int, int], **options: Any
    ) -> list[AttendCall]:
        """Return the calls of a step, one a layer."""
        self.step += 1
        total, kv_heads, (k_dim, v_dim) = sum(counts), 2, dims
        header = StepHeader(tuple(counts), options.pop("padding", ()))
        positions = tuple(self.lengths)
        self.lengths = [a + b for a, b in zip(self.lengths, counts, strict=True)]
        return [
            AttendCall(
                SESSION,
                1,
                self.step,
                layer,
                q=tensor(self.rng, dtype, total, heads, k_dim),
                k=tensor(self.rng, dtype, total, kv_heads, k_dim),
                v=tensor(self.rng, dtype, total, kv_heads, v_dim),
                scale=0.3 + 0.1 * layer,
                header=header if layer == 0 else None,
                positions=positions,
                **{"mask": Mask(), **options},
            )
            for layer in range(LAYERS)
        ]


def count_short_ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note for each call without a header whether the short way served it."""
    served: list[bool] = []
    original = ShortWay.attend

    def noting(self: ShortWay, *args: Any) -> bytes | None:
        out = original(self, *args)
        served.append(out is not None)
        return out

    monkeypatch.setattr(ShortWay, "attend", noting)
    return served


@pytest.mark.parametrize("dtype", list(NUMPY))
@pytest.mark.parametrize("dims", [(8, 8), (16, 5)])
@pytest.mark.parametrize(
    "mask",
    [Mask(), Mask(window=5), Mask(MaskKind.CHUNK, chunk=4), Mask(MaskKind.FULL)],
    ids=["causal", "window", "chunk", "full"],
)
def test_layers_after_the_first_get_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: DType, dims: tuple[int, int], mask: Mask
) -> None:
    """Ragged rows, padding in front and in the middle, several queries a row."""
    served = count_short_ways(monkeypatch)
    pair = Pair(SessionSpec(3, page_size=4))
    padding = (RowRange(0, 0, 5), RowRange(1, 3, 4))
    for counts in ([7, 6, 2], [1, 1, 1], [3, 1, 2], [1, 0, 5], [1, 1, 1]):
        for call in pair.calls(counts, dtype, 4, dims, mask=mask, padding=padding):
            pair.ask(call)
        padding = (RowRange(2, pair.lengths[2], pair.lengths[2] + 1),)
    first_step = [False] * 2  # learns the other layers' shapes
    assert served == first_step + [True] * 8


def test_each_layer_group_has_its_own_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with and without a window alternate."""
    served = count_short_ways(monkeypatch)
    pair = Pair(SessionSpec(2, (LayerSpec(window=4), LayerSpec(), LayerSpec(window=4)), 4))
    for counts in ([6, 5], [1, 1], [1, 1]):
        for call in pair.calls(counts, DType.FLOAT32, 2, (8, 8)):
            window = 4 if call.layer != 1 else None
            pair.ask(replace(call, mask=Mask(window=window)))
    first_step = [False, False]  # the second layer is its group's first; the third's shape is new
    assert served == first_step + [False, True] * 2


def ready(monkeypatch: pytest.MonkeyPatch) -> tuple[Pair, list[AttendCall], list[bool]]:
    """Return a pair whose second step has had its first layer, and the calls of the others."""
    pair = Pair(SessionSpec(2, page_size=4))
    for call in pair.calls([5, 3], DType.FLOAT32, 4, (8, 8)):
        pair.ask(call)
    first, *others = pair.calls([1, 1], DType.FLOAT32, 4, (8, 8))
    served = count_short_ways(monkeypatch)
    pair.ask(first)
    return pair, others, served


def test_partials_and_queries_alone_get_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail of a session on several workers, and those before it, which store nothing."""
    served = count_short_ways(monkeypatch)
    pair = Pair(SessionSpec(2, page_size=4))
    for call in pair.calls([6, 5], DType.BFLOAT16, 4, (8, 8)):
        pair.ask(replace(call, partial=True))
    served.clear()
    for _ in range(2):
        for call in pair.calls([1, 1], DType.BFLOAT16, 4, (8, 8)):
            tail = {"query_counts": (1, 1), "query_positions": call.positions}
            answer = pair.ask(replace(call, partial=True, **tail))
            assert answer.out.dtype == answer.lse.dtype == 1
    assert served == [True] * (2 * (LAYERS - 1))
    served.clear()
    for _ in range(2):  # may be repeated freely
        pair.step += 1
        for layer in range(LAYERS):
            alone = AttendCall(
                SESSION,
                1,
                pair.step,
                layer,
                q=tensor(pair.rng, DType.BFLOAT16, 2, 4, 8),
                scale=0.5,
                mask=Mask(),
                header=StepHeader((0, 0)) if layer == 0 else None,
                query_counts=(1, 1),
                query_positions=(9, 9),
                partial=True,
            )
            for _ in range(2 if layer else 1):
                pair.ask(alone)
    assert served == [True] * (2 * 2 * (LAYERS - 1))


def test_a_repeat_goes_the_long_way_and_gives_the_same_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lost reply: the same bytes again."""
    pair, [call, _], served = ready(monkeypatch)
    first = pair.ask(call)
    assert pair.ask(call) == first
    assert served == [True, False]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda call: {"positions": (6, 3)}, OutOfOrder),
        (lambda call: {"step": call.step - 1}, Conflict),
        (lambda call: {"epoch": 2}, Conflict),
        (
            lambda call: {"k": HostTensor(DType.FLOAT32, (2, 4, 4), call.k.data)},
            GeometryMismatch,
        ),
        (
            lambda call: {"q": HostTensor(DType.FLOAT32, (2, 8, 4), call.q.data)},
            GeometryMismatch,
        ),
    ],
)
def test_what_differs_is_refused_in_the_long_ways_words(
    monkeypatch: pytest.MonkeyPatch, change: Any, error: type[KVServiceError]
) -> None:
    """Same number of bytes, other shapes; other positions; another step or epoch."""
    pair, [call, _], served = ready(monkeypatch)
    with pytest.raises(error):
        pair.ask(replace(call, **change(call)))
    assert not any(served)
    pair.ask(call)
    assert served[-1:] == [True], "nothing has changed"


@pytest.mark.parametrize(
    "change",
    [
        {"softcap": 3.0},
        {"mask": Mask(MaskKind.FULL)},
        {"partial": True},
        {"query_positions": (5, 3)},
        {"sinks": HostTensor(DType.FLOAT32, (4,), np.ones(4, np.float32).tobytes())},
    ],
)
def test_what_is_asked_otherwise_goes_the_long_way(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """Legal, but not what the step's first layer asked."""
    pair, [call, other], served = ready(monkeypatch)
    pair.ask(replace(call, **change))
    assert served == [False]
    pair.ask(other)
    assert served == [False, True]


def test_a_write_in_the_middle_of_a_step_ends_the_short_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have changed tables and padding."""
    pair, [call, _], served = ready(monkeypatch)
    k = tensor(pair.rng, DType.FLOAT32, 2, 2, 8)
    for worker in (pair.short, pair.long):
        worker.tokens.write(TENANT, WriteCall(SESSION, 1, 0, k, k, rows=(0, 1), positions=(1, 0)))
    pair.ask(call)
    assert served == [False]


def test_an_arena_that_moves_meanwhile_keeps_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another session makes the pool grow beyond its address space during the native call."""
    pair, [call, _], served = ready(monkeypatch)
    session = pair.short._sessions.peek(TENANT, SESSION)
    assert session is not None
    arena = session.groups[None].pool.arenas[1]
    steady = next(iter(session.step.steady.values()))  # type: ignore[union-attr]

    class Moving:
        def answer(self, *args: Any) -> bytes | None:
            arena._place(arena.room + 1)  # new memory, without what the call is about to store
            return steady.call.answer(*args)

    moving = replace(steady, call=Moving())
    session.step.steady[None, True] = moving  # type: ignore[union-attr]
    pair.service.attend(calls.attend_call_to_pb(call), ANONYMOUS)
    assert served == [True]
    assert call.k is not None
    stored = pair.short.tokens.read(TENANT, SESSION, 1, 1, 5, 6).k
    assert stored.data[: 2 * 8 * 4] == call.k.data[: 2 * 8 * 4]


def test_what_is_read_is_what_was_written() -> None:
    """The fields that may differ between layers, of calls with and without each of them."""
    q = types_pb2.Tensor(dtype=1, shape=[1, 2, 4], data=bytes(32))
    for fields in (
        {"call_id": 7, "session_id": "a", "layer": 3, "q": q, "scale": 0.5},
        {"call_id": -1, "session_id": "ä", "q": q, "k": q, "v": q, "capability": b"\0\1"},
        {"header": worker_pb2.StepHeader(counts=[1]), "trace_parent": "00-x"},
        {},
    ):
        pb = worker_pb2.AttendCall(**fields)
        for said in (
            native.read_call(pb.SerializeToString()),
            native.read_frame(b"".join(frames(pb))),
        ):
            assert said is not None
            assert (said.call_id, said.layer) == (pb.call_id, pb.layer)
            assert (said.session_id, said.capability) == (pb.session_id, pb.capability)
            assert said.stores == pb.HasField("k")
            assert said.begins == pb.HasField("header")
            assert said.traced == bool(pb.trace_parent)
            assert said.tensors() == (pb.q.data, pb.k.data, pb.v.data)


def test_what_is_unusual_is_left_to_protobuf() -> None:
    """Fields that come twice, numbers out of range, text that is none, and anything cut short."""
    q = types_pb2.Tensor(dtype=1, shape=[1, 2, 4], data=bytes(32))
    pb = worker_pb2.AttendCall(call_id=300, session_id="a", layer=3, q=q, k=q, scale=0.5)
    raw = pb.SerializeToString()
    [frame] = frames(pb)
    assert native.read_call(raw) is not None
    for more in (
        b"\x30\x04",  # a second layer
        worker_pb2.AttendCall(q=q).SerializeToString(),
        worker_pb2.AttendCall(scale=1.0).SerializeToString(),
        b"\x50",  # a tag without its value
        b"\x03",  # a group
        b"\x00\x00",  # field 0
        b"\xff" * 11,
    ):
        assert native.read_call(raw + more) is None
    assert native.read_call(b"\x12\x01\xff") is None
    assert native.read_call(worker_pb2.AttendCall(layer=-1).SerializeToString()) is None
    assert native.read_frame(frame + b"\0") is None
    assert native.read_frame(b"") is None
    for stop in range(len(frame)):
        assert native.read_frame(frame[:stop]) is None
    rng = np.random.default_rng(0)
    for _ in range(2000):  # whatever it says, it must not read beyond the end
        noise = bytearray(raw)
        for at in rng.integers(0, len(raw), 3):
            noise[at] = rng.integers(256)
        native.read_call(bytes(noise[: rng.integers(len(raw) + 1)]))
