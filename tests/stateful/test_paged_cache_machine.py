"""PagedCache, whatever it is told, is a plain cache of lists."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvservice_client import Conflict, InvalidRequest, OutOfOrder, OutOfPages, PositionOutOfRange
from tests.backends import Backend, embedded_backend
from tests.paged import Pair

MAX_SEQ_LEN = 70

windows_of = st.one_of(st.none(), st.integers(2, 9))


class PagedCacheMachine(RuleBasedStateMachine):
    """Passes of ragged rows, whole and broken off; pops, roll-backs, resets and wrong calls.

    Each output is compared with dense attention over lists, each count with the lists' lengths.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.client = backend.clients[0]

    @initialize(
        windows=st.lists(windows_of, min_size=1, max_size=3),
        num_rows=st.integers(1, 3),
        page_size=st.sampled_from([1, 2, 3, 5, 16]),
        rollback=st.sampled_from([0, 0, 1, 4]),
        heads=st.sampled_from([(4, 2), (2, 2), (6, 2)]),
        dims=st.sampled_from([(4, 4), (3, 5)]),
        seed=st.integers(0, 1000),
    )
    def make(
        self,
        windows: list[int | None],
        num_rows: int,
        page_size: int,
        rollback: int,
        heads: tuple[int, int],
        dims: tuple[int, int],
        seed: int,
    ) -> None:
        self.pair = Pair(
            self.client,
            len(windows),
            windows=windows,
            num_rows=num_rows,
            max_seq_len=MAX_SEQ_LEN,
            page_size=page_size,
            rollback=rollback,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            k_dim=dims[0],
            v_dim=dims[1],
            seed=seed,
        )
        # The last pass: what it brings, what was before it, the layers that have not had it yet.
        self.began: tuple[int, list[int] | None] = (0, None)
        self.before = copy.deepcopy(self.pair.plain)
        self.missing: list[int] = []

    @property
    def has_room(self) -> bool:
        """Whether a pass can begin."""
        return not self.missing and min(self.pair.plain.lengths) < MAX_SEQ_LEN

    def begin(self, data: st.DataObject) -> tuple[int, list[int] | None]:
        """Draw how many tokens a pass brings, to each row."""
        room = [min(8, MAX_SEQ_LEN - length) for length in self.pair.plain.lengths]
        if min(room) and data.draw(st.booleans()):
            return data.draw(st.integers(1, min(room))), None
        counts = data.draw(st.tuples(*(st.integers(0, left) for left in room)).filter(any))
        return max(counts), list(counts)

    def call(self, layers: Sequence[int], window: int | None = None) -> None:
        """Feed layers the pass that has begun. What there is no room for is dropped as a whole."""
        num_tokens, counts = self.began
        try:
            for layer in layers:
                self.pair.call(layer, num_tokens, counts=counts, window=window)
        except OutOfPages:
            self.undo()

    def undo(self) -> None:
        """Let the plain cache be what it was before the pass, which is dropped."""
        self.before.called = self.pair.plain.called
        self.pair.plain, self.missing = self.before, []
        self.pair.check()

    @precondition(lambda self: self.has_room)
    @rule(data=st.data(), window=st.one_of(st.none(), st.integers(1, 9)))
    def feed(self, data: st.DataObject, window: int | None) -> None:
        """A whole pass; layers after the first in any order."""
        self.before, self.began = copy.deepcopy(self.pair.plain), self.begin(data)
        others = data.draw(st.permutations(range(1, self.pair.cache.num_layers)))
        self.call([0, *others], window)

    @precondition(lambda self: self.has_room)
    @rule(num_passes=st.integers(1, 5))
    def decode(self, num_passes: int) -> None:
        """Passes of one token in every row that has room."""
        for _ in range(num_passes):
            counts = [int(length < MAX_SEQ_LEN) for length in self.pair.plain.lengths]
            if any(counts):
                self.before, self.began = copy.deepcopy(self.pair.plain), (1, counts)
                self.call(range(self.pair.cache.num_layers))

    @precondition(lambda self: self.has_room and self.pair.cache.num_layers > 1)
    @rule(data=st.data())
    def break_off(self, data: st.DataObject) -> None:
        """A pass of which only some layers are called."""
        self.before, self.began = copy.deepcopy(self.pair.plain), self.begin(data)
        num_layers = self.pair.cache.num_layers
        self.missing = data.draw(
            st.lists(st.integers(1, num_layers - 1), min_size=1, max_size=num_layers, unique=True)
        )
        self.call([layer for layer in range(num_layers) if layer not in self.missing])

    @precondition(lambda self: self.missing)
    @rule()
    def go_on(self) -> None:
        """The pass is finished after all."""
        self.call(self.missing)
        self.missing = []

    @precondition(lambda self: any(self.pair.plain.lengths))
    @rule()
    def roll_back(self) -> None:
        self.pair.cache.roll_back()
        if self.missing:
            self.undo()

    @precondition(lambda self: not self.missing and any(self.pair.plain.lengths))
    @rule(data=st.data())
    def popn(self, data: st.DataObject) -> None:
        rows = self.pair.plain.num_rows
        each = st.lists(st.integers(0, 6), min_size=rows, max_size=rows)
        self.pair.popn(data.draw(st.one_of(each, st.integers(0, 6), st.just(100))))

    @precondition(lambda self: self.missing)
    @rule()
    def pop_the_unfinished_pass(self) -> None:
        """Or a refusal, after which it is unfinished still."""
        asked = [
            now - then
            for now, then in zip(self.pair.plain.lengths, self.before.lengths, strict=True)
        ]
        if any(self.pair.popn(asked)):
            self.missing = []

    @precondition(lambda self: any(self.pair.plain.lengths))
    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        """The next pass may have another number of rows."""
        self.pair.reset()
        self.missing = []
        num_rows = data.draw(st.integers(1, 3))
        if num_rows != self.pair.plain.num_rows:
            self.pair.plain.num_rows = num_rows
            self.pair.plain.reset()
            self.pair.cache.release()
            self.pair.plain.called.clear()

    @rule(data=st.data(), off=st.sampled_from([-1, 1, 5]), more=st.integers(1, 20))
    def refuse(self, data: st.DataObject, off: int, more: int) -> None:
        """Wrong positions and too many tokens change nothing, which the next rules would notice."""
        pair, lengths = self.pair, self.pair.plain.lengths
        pos = list(lengths)
        pos[data.draw(st.integers(0, len(pos) - 1))] += off
        with pytest.raises(InvalidRequest if min(pos) < 0 else OutOfOrder):
            pair.cache.attention(0, *pair.draw(1), pos, 1.0)
        if pair.cache.num_layers > 1:
            with pytest.raises(InvalidRequest if min(pos) < 0 else Conflict):
                pair.cache.attention(1, *pair.draw(2), pos, 1.0)
        tokens = pair.draw(MAX_SEQ_LEN - min(lengths) + more)
        with pytest.raises(PositionOutOfRange):
            pair.cache.attention(0, *tokens, lengths, 1.0)

    @invariant()
    def counts_agree(self) -> None:
        self.pair.check()

    @invariant()
    def workers_are_sound(self) -> None:
        for worker in self.backend.workers:
            worker.check()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.cache.release()
        assert self.backend.used_pages() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "memory_bytes"), [(1, 1 << 26), (3, 9_000)], ids=["ample", "scarce"]
)
def test_paged_cache(num_workers: int, memory_bytes: int) -> None:
    """Any sequence of calls; also with little room, so that caches reach over several workers.

    What there is no room for is dropped, as a whole pass.
    """
    with embedded_backend(num_workers=num_workers, memory_bytes=memory_bytes) as backend:
        backend.connect()
        run_state_machine_as_test(
            lambda: PagedCacheMachine(backend),
            settings=settings(max_examples=25, stateful_step_count=30, deadline=None),
        )


@settings(max_examples=30)
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    window=st.integers(2, 12),
    page_size=st.sampled_from([1, 3, 4, 16]),
    seed=st.integers(0, 1000),
)
def test_sliding_equals_masked(
    counts: Sequence[int], window: int, page_size: int, seed: int
) -> None:
    """Evicting what a window has passed gives the same as keeping and masking it."""
    with embedded_backend() as backend:
        client = backend.connect()
        sliding = Pair(client, 1, windows=[window], max_seq_len=80, page_size=page_size, seed=seed)
        masked = Pair(client, 1, max_seq_len=80, page_size=page_size)
        for count in counts:
            tokens = sliding.draw(count)
            (out,) = sliding.feed(count, tokens=tokens)
            (expected,) = masked.feed(count, tokens=tokens, window=window)
            assert np.abs(out - expected).max() <= 1e-5
