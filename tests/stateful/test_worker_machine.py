"""A worker against plain lists: every session reads and attends to exactly what it stored."""

from __future__ import annotations

import copy
import uuid
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvservice.clock import ManualClock
from kvservice.core.errors import OutOfPages, PositionOutOfRange, StaleEpoch
from kvservice.core.geometry import DType, HostTensor
from kvservice.core.session import (
    AttendCall,
    EvictBefore,
    LayerSpec,
    Mask,
    MaskKind,
    RowRange,
    SessionSpec,
    StepHeader,
    WorkerStats,
    WriteCall,
)
from kvservice_workers.worker import PageWorker, WorkerConfig

PAGE_SIZE = 3
WINDOW = 4
LAYERS = (LayerSpec(), LayerSpec(window=WINDOW))
PAGE_BYTES = 2 * PAGE_SIZE * 4  # one layer, one head, K and V of one float32
NUM_PAGES = 40  # of both layers together


@dataclass
class Row:
    """What one sequence should hold: a value per layer and position, None where a gap is."""

    values: list[list[float | None]] = field(default_factory=lambda: [[], []])
    padding: list[bool] = field(default_factory=list)
    evicted: int = 0  # of the windowed layer

    def cut(self, length: int) -> None:
        for values in self.values:
            del values[length:]
        del self.padding[length:]

    @property
    def length(self) -> int:
        return len(self.padding)


@dataclass
class Model:
    """What one session should be."""

    session_id: str
    epoch: int = 1
    step: int = 0
    rows: list[Row] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]


def tensor(values: list[float]) -> HostTensor:
    array = np.array(values, np.float32).reshape(-1, 1, 1)
    return HostTensor(DType.FLOAT32, array.shape, array.tobytes())


def numbers(host: HostTensor) -> np.ndarray:
    return np.frombuffer(host.data, np.float32).reshape(host.shape)


def pages_of(stats: WorkerStats) -> dict[int, tuple[int, int]]:
    """Return used and promised pages by pool, of those that have any."""
    return {
        pool.pool: (pool.used_pages, pool.reserved_pages)
        for pool in stats.pools
        if pool.used_pages or pool.reserved_pages
    }


class WorkerMachine(RuleBasedStateMachine):
    """Sessions of two layers, one of them with a window, on a worker that is soon full."""

    device = "cpu"

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        config = WorkerConfig("w", "life", budget_bytes=NUM_PAGES * PAGE_BYTES, device=self.device)
        self.worker = PageWorker(config, clock=self.clock)
        self.models: list[Model] = []
        self.next_value = 1.0

    def fresh(self, count: int) -> list[float]:
        self.next_value += count
        return [self.next_value - count + i for i in range(count)]

    @rule(target=sessions, num_rows=st.integers(1, 3), reserve=st.sampled_from([None, None, 4]))
    def allocate(self, num_rows: int, reserve: int | None) -> Model:
        model = Model(str(uuid.uuid4()), rows=[Row() for _ in range(num_rows)])
        spec = SessionSpec(num_rows, LAYERS, page_size=PAGE_SIZE, reserve_tokens=reserve)
        self.worker.opening.allocate("t", model.session_id, spec)
        self.models.append(model)
        return model

    @rule(model=sessions, data=st.data(), evict=st.booleans())
    def step(self, model: Model, data: st.DataObject, evict: bool) -> None:
        """One forward pass over both layers, with any number of tokens in each row."""
        if model not in self.models:
            return
        counts = [data.draw(st.integers(0, 5)) for _ in model.rows]
        if not sum(counts):
            counts[0] = 1
        padding = [[data.draw(st.integers(0, 3)) == 0 for _ in range(n)] for n in counts]
        lengths = model.lengths
        before = [max(0, length - (WINDOW - 1)) for length in lengths]
        header = StepHeader(
            tuple(counts),
            tuple(
                RowRange(r, lengths[r] + i, lengths[r] + i + 1)
                for r, bits in enumerate(padding)
                for i, bit in enumerate(bits)
                if bit
            ),
            (EvictBefore(WINDOW, tuple(before)),) if evict else (),
        )
        snapshot = copy.deepcopy(model.rows)
        model.step += 1
        for r, bits in enumerate(padding):
            model.rows[r].padding += bits
            if evict:
                floor = before[r] // PAGE_SIZE * PAGE_SIZE
                model.rows[r].evicted = max(model.rows[r].evicted, floor)
        for layer in range(2):
            values = [self.fresh(n) for n in counts]
            for r, new in enumerate(values):
                model.rows[r].values[layer] += new
            flat = [value for row in values for value in row]
            call = AttendCall(
                model.session_id,
                model.epoch,
                model.step,
                layer,
                q=tensor([0.0] * len(flat)),
                scale=1.0,
                mask=Mask(MaskKind.CAUSAL, window=WINDOW if layer else None),
                k=tensor(flat),
                v=tensor(flat),
                header=header if layer == 0 else None,
                positions=tuple(lengths),
            )
            try:
                result = self.worker.long_way.attend("t", call)
            except OutOfPages:
                # Unstated layers: the second one's arena may be refused; then roll back.
                model.rows[:] = snapshot
                if layer == 1 or self.worker.access.get("t", model.session_id).step == model.step:
                    self.pop_to(
                        model, model.lengths, [a + b for a, b in zip(lengths, counts, strict=True)]
                    )
                else:
                    model.step -= 1
                return
            expected = self.means(model, layer, lengths, counts)
            np.testing.assert_allclose(numbers(result.out).ravel(), expected, rtol=1e-5)
            again = self.worker.long_way.attend("t", call)
            assert again == result, "the same bytes give the same answer"

    def means(self, model: Model, layer: int, lengths: list[int], counts: list[int]) -> list[float]:
        """With q = 0 all visible keys weigh the same: the output is the mean of visible values."""
        out = []
        for r, row in enumerate(model.rows):
            for position in range(lengths[r], lengths[r] + counts[r]):
                first = max(0, position - WINDOW + 1) if layer else 0
                seen = [
                    row.values[layer][p] for p in range(first, position + 1) if not row.padding[p]
                ]
                hidden = row.padding[position] or not seen
                out.append(0.0 if hidden else float(np.mean(seen)))
        return out

    def pop_to(self, model: Model, keep: list[int], lengths: list[int]) -> None:
        self.worker.changes.pop("t", model.session_id, model.epoch, keep, lengths)
        model.epoch += 1

    @rule(model=sessions, data=st.data())
    def pop(self, model: Model, data: st.DataObject) -> None:
        if model not in self.models:
            return
        keep = [data.draw(st.integers(0, row.length + 1)) for row in model.rows]
        stats = self.worker.stats()
        try:
            self.pop_to(model, keep, model.lengths)
        except PositionOutOfRange:
            assert any(
                min(row.evicted, k) > max(0, k - WINDOW + 1)
                for row, k in zip(model.rows, keep, strict=True)
                if k < row.length
            )
            assert self.worker.stats() == stats, "a refused pop changes nothing"
            return
        with pytest.raises(StaleEpoch):
            self.worker.changes.pop("t", model.session_id, model.epoch - 1, [0] * 9, model.lengths)
        for row, k in zip(model.rows, keep, strict=True):
            row.cut(k)
            row.evicted = min(row.evicted, -(-k // PAGE_SIZE) * PAGE_SIZE)

    @rule(model=sessions, data=st.data())
    def select(self, model: Model, data: st.DataObject) -> None:
        if model not in self.models:
            return
        rows = data.draw(st.lists(st.integers(0, len(model.rows) - 1), min_size=1, max_size=3))
        try:
            first = self.worker.changes.select("t", model.session_id, model.epoch, rows)
        except OutOfPages:
            return
        again = self.worker.changes.select("t", model.session_id, model.epoch, rows)
        assert again == first, "the same change again is answered as before"
        model.epoch += 1
        model.rows[:] = [copy.deepcopy(model.rows[r]) for r in rows]

    @rule(target=sessions, model=sessions, data=st.data())
    def fork(self, model: Model, data: st.DataObject) -> Model:
        child = Model(str(uuid.uuid4()), model.epoch, model.step, copy.deepcopy(model.rows))
        child.epoch, child.step = 1, 0
        if model not in self.models:
            return child
        shortest = min(model.lengths)
        count = data.draw(st.none() | st.integers(1, max(1, shortest)))
        try:
            self.worker.opening.fork(
                "t", model.session_id, model.epoch, child.session_id, token_count=count
            )
        except (OutOfPages, PositionOutOfRange):
            return child
        if count is not None:
            for row in child.rows:
                row.cut(count)
                row.evicted = min(row.evicted, -(-count // PAGE_SIZE) * PAGE_SIZE)
        self.models.append(child)
        return child

    @rule(model=sessions)
    def reset(self, model: Model) -> None:
        if model not in self.models:
            return
        self.worker.changes.reset("t", model.session_id, model.epoch)
        model.epoch += 1
        model.rows[:] = [Row() for _ in model.rows]

    @rule(model=sessions, data=st.data(), evict=st.booleans())
    def write(self, model: Model, data: st.DataObject, evict: bool) -> None:
        """Store at any positions of both layers, leaving gaps, with repeats; maybe evict first."""
        if model not in self.models:
            return
        at = data.draw(
            st.lists(
                st.tuples(st.integers(0, len(model.rows) - 1), st.integers(0, 14)),
                min_size=1,
                max_size=6,
            )
        )
        before = [max(0, length - (WINDOW - 1)) if evict else 0 for length in model.lengths]
        evicted = [
            max(row.evicted, position // PAGE_SIZE * PAGE_SIZE)
            for row, position in zip(model.rows, before, strict=True)
        ]
        refused = [(r, p) for r, p in at if p < evicted[r]]
        at = [(r, p) for r, p in at if p >= evicted[r]]
        if refused:
            self.write_is_refused(model, refused[0], before)
        if not at:
            return
        for layer in range(2):
            values = self.fresh(len(at))
            call = WriteCall(
                model.session_id,
                model.epoch,
                layer,
                tensor(values),
                tensor(values),
                rows=tuple(r for r, _ in at),
                positions=tuple(p for _, p in at),
                evict_before=(EvictBefore(WINDOW, tuple(before)),) if evict else (),
            )
            stats = self.worker.stats()
            try:
                self.worker.tokens.write("t", call)
            except OutOfPages:
                # Memory may have been made, for a layer's first tokens; pages are as they were.
                assert pages_of(self.worker.stats()) == pages_of(stats)
                lengths = [max(len(v) for v in row.values) for row in model.rows]
                self.pop_to(model, [min(len(v) for v in row.values) for row in model.rows], lengths)
                for row in model.rows:
                    row.cut(min(len(v) for v in row.values))
                return
            for row, position in zip(model.rows, evicted, strict=True):
                row.evicted = position
            for (r, p), value in zip(at, values, strict=True):
                row = model.rows[r]
                row.values[layer] += [None] * (p + 1 - len(row.values[layer]))
                row.values[layer][p] = value
            if layer == 0:
                for r, row in enumerate(model.rows):
                    written = {p for s, p in at if s == r}
                    for p in range(len(row.padding), len(row.values[0])):
                        row.padding.append(p not in written)

    def write_is_refused(self, model: Model, at: tuple[int, int], before: list[int]) -> None:
        """What is evicted, or would be by the same call, cannot be written."""
        call = WriteCall(
            *(model.session_id, model.epoch, 1, tensor([1.0]), tensor([1.0]), (at[0],), (at[1],)),
            evict_before=(EvictBefore(WINDOW, tuple(before)),),
        )
        stats = self.worker.stats()
        with pytest.raises(PositionOutOfRange):
            self.worker.tokens.write("t", call)
        after = self.worker.stats()
        assert [pool.used_pages for pool in after.pools] == [
            pool.used_pages for pool in stats.pools
        ]

    @rule(model=sessions)
    def only_evict(self, model: Model) -> None:
        """A write without tokens frees pages, and does nothing else."""
        if model not in self.models:
            return
        nothing = HostTensor(DType.FLOAT32, (0, 1, 1), b"")
        before = [max(0, length - (WINDOW - 1)) for length in model.lengths]
        call = WriteCall(
            *(model.session_id, model.epoch, 1, nothing, nothing, (), ()),
            evict_before=(EvictBefore(WINDOW, tuple(before)),),
        )
        self.worker.tokens.write("t", call)
        for row, position in zip(model.rows, before, strict=True):
            row.evicted = max(row.evicted, position // PAGE_SIZE * PAGE_SIZE)

    @rule(model=consumes(sessions))
    def release(self, model: Model) -> None:
        if model in self.models:
            assert self.worker.leases.release("t", [model.session_id]) == 1
            self.models.remove(model)
        assert self.worker.leases.release("t", [model.session_id]) == 0

    @invariant()
    def every_session_reads_back(self) -> None:
        for model in self.models:
            info = self.worker.access.get("t", model.session_id)
            assert info.epoch == model.epoch
            for layer, lengths in enumerate(info.lengths):
                assert list(lengths) == [len(row.values[layer]) for row in model.rows]
                self.reads_back(model, layer, lengths)

    def reads_back(self, model: Model, layer: int, lengths: tuple[int, ...]) -> None:
        start = max((row.evicted for row in model.rows), default=0) if layer else 0
        if max(lengths, default=0) <= start:
            return
        k = self.worker.tokens.read(
            "t", model.session_id, model.epoch, layer, start, max(lengths)
        ).k
        for r, row in enumerate(model.rows):
            stored = numbers(k)[r, 0, :, 0]
            for offset, value in enumerate(row.values[layer][start:]):
                hole = row.padding[start + offset] and stored[offset] == 0
                assert hole or stored[offset] == (value or 0.0), "somebody else's, or lost"
            assert not stored[max(0, len(row.values[layer]) - start) :].any(), "beyond the row"

    @invariant()
    def everything_is_accounted_for(self) -> None:
        self.worker.check()
        stats = self.worker.stats()
        for pool in stats.pools:
            assert min(pool.used_pages, pool.reserved_pages, pool.free_pages) >= 0
        used = sum(pool.used_pages for pool in stats.pools)
        assert stats.page_allocations - sum(stats.page_frees.values()) == used

    def teardown(self) -> None:
        self.worker.close()
        self.worker.check()
        assert sum(pool.used_pages for pool in self.worker.stats().pools) == 0


WorkerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestWorker = WorkerMachine.TestCase
