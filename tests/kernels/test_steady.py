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
from kvservice.v1 import worker_pb2
from kvservice.wire import calls
from kvservice_workers.attention import native
from kvservice_workers.data_path import DataPath
from kvservice_workers.data_plane.service import WorkerService
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
            worker.allocate(TENANT, SESSION, spec)

    def ask(self, call: AttendCall) -> worker_pb2.AttendResult:
        """Return the short worker's answer, having compared it with the long one's."""
        pb = calls.attend_call_to_pb(call, call_id=3)
        try:
            expected = self.long.attend(TENANT, call)
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
    """Note for each attempt at the short way whether it served."""
    served: list[bool] = []
    original = DataPath.attend_steadily

    def noting(self: DataPath, *args: Any) -> bytes | None:
        out = original(self, *args)
        served.append(out is not None)
        return out

    monkeypatch.setattr(DataPath, "attend_steadily", noting)
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
    assert served == [False, True, True], "the third layer; in the first step its shape is new"


def ready(monkeypatch: pytest.MonkeyPatch) -> tuple[Pair, list[AttendCall], list[bool]]:
    """Return a pair whose second step has had its first layer, and the calls of the others."""
    pair = Pair(SessionSpec(2, page_size=4))
    for call in pair.calls([5, 3], DType.FLOAT32, 4, (8, 8)):
        pair.ask(call)
    first, *others = pair.calls([1, 1], DType.FLOAT32, 4, (8, 8))
    served = count_short_ways(monkeypatch)
    pair.ask(first)
    return pair, others, served


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
    assert served == []
    pair.ask(other)
    assert served == [True]


def test_a_write_in_the_middle_of_a_step_ends_the_short_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have changed tables and padding."""
    pair, [call, _], served = ready(monkeypatch)
    k = tensor(pair.rng, DType.FLOAT32, 2, 2, 8)
    for worker in (pair.short, pair.long):
        worker.write(TENANT, WriteCall(SESSION, 1, 0, k, k, rows=(0, 1), positions=(1, 0)))
    pair.ask(call)
    assert served == []


def test_an_arena_that_moves_meanwhile_keeps_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another session makes the pool grow beyond its address space during the native call."""
    pair, [call, _], served = ready(monkeypatch)
    session = pair.short._sessions.peek(TENANT, SESSION)
    assert session is not None
    arena = session.groups[None].pool.arenas[1]
    steady = next(iter(session.step.steady.values()))  # type: ignore[union-attr]

    class Moving:
        def attend(self, *args: Any) -> bytes:
            arena._place(arena.room + 1)  # new memory, without what the call is about to store
            return steady.call.attend(*args)

    moving = replace(steady, call=Moving())
    session.step.steady[None] = moving  # type: ignore[union-attr]
    pair.service.attend(calls.attend_call_to_pb(call), ANONYMOUS)
    assert served == [True]
    assert call.k is not None
    stored = pair.short.read(TENANT, SESSION, 1, 1, 5, 6).k
    assert stored.data[: 2 * 8 * 4] == call.k.data[: 2 * 8 * 4]
