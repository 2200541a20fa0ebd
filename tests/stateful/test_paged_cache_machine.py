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

from kvservice_client import Conflict, InvalidRequest, OutOfOrder, PositionOutOfRange
from tests.backends import Backend, embedded_backend
from tests.paged import Pair, PlainPagedCache

MAX_SEQ_LEN = 30

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
        heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
        dims=st.sampled_from([(1, 1), (4, 4), (3, 2)]),
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
        # What an unfinished pass began with, and the layers that have not had it.
        self.before: PlainPagedCache | None = None
        self.missing: list[int] = []

    def begin(self, data: st.DataObject) -> tuple[int, list[int] | None]:
        """Draw how many tokens a pass brings, to each row."""
        plain = self.pair.plain
        room = [MAX_SEQ_LEN - length for length in plain.lengths]
        counts = [data.draw(st.integers(0, min(left, 12))) for left in room]
        if not any(counts):
            return 0, None
        num_tokens = max(counts)
        plain_call = len(set(counts)) == 1 and data.draw(st.booleans())
        return num_tokens, None if plain_call else counts

    @precondition(lambda self: not self.missing)
    @rule(data=st.data(), window=st.one_of(st.none(), st.integers(1, 9)))
    def feed(self, data: st.DataObject, window: int | None) -> None:
        """A whole pass; layers after the first in any order."""
        num_tokens, counts = self.begin(data)
        if not num_tokens:
            return
        others = list(range(1, self.pair.cache.num_layers))
        for layer in [0, *data.draw(st.permutations(others))]:
            self.pair.call(layer, num_tokens, counts=counts, window=window)

    @precondition(lambda self: not self.missing and self.pair.cache.num_layers > 1)
    @rule(data=st.data())
    def break_off(self, data: st.DataObject) -> None:
        """A pass of which only some layers are called."""
        before = copy.deepcopy(self.pair.plain)
        num_tokens, counts = self.begin(data)
        if not num_tokens:
            return
        num_layers = self.pair.cache.num_layers
        self.missing = data.draw(
            st.lists(st.integers(1, num_layers - 1), min_size=1, max_size=num_layers, unique=True)
        )
        self.before, self.began = before, (num_tokens, counts)
        for layer in range(num_layers):
            if layer not in self.missing:
                self.pair.call(layer, num_tokens, counts=counts)

    @precondition(lambda self: self.missing)
    @rule()
    def go_on(self) -> None:
        """The pass is finished after all."""
        num_tokens, counts = self.began
        for layer in self.missing:
            self.pair.call(layer, num_tokens, counts=counts)
        self.missing = []

    @rule()
    def roll_back(self) -> None:
        self.pair.cache.roll_back()
        if self.missing:
            assert self.before is not None
            called = self.pair.plain.called
            self.pair.plain, self.missing = self.before, []
            self.pair.plain.called = called

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
        assert self.before is not None
        asked = [
            now - then
            for now, then in zip(self.pair.plain.lengths, self.before.lengths, strict=True)
        ]
        if any(self.pair.popn(asked)):
            self.missing = []

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

    @rule(data=st.data(), off=st.sampled_from([-1, 1, 5]))
    def out_of_order(self, data: st.DataObject, off: int) -> None:
        """Refused, with nothing changed, which the next rules would notice."""
        plain = self.pair.plain
        row = data.draw(st.integers(0, plain.num_rows - 1))
        pos = list(plain.lengths)
        pos[row] += off
        wrong = (OutOfOrder, InvalidRequest) if min(pos) < 0 else OutOfOrder
        with pytest.raises(wrong):
            self.pair.cache.attention(0, *self.pair.draw(1), pos, 1.0)
        if self.pair.cache.num_layers > 1:
            with pytest.raises((Conflict, InvalidRequest)):
                self.pair.cache.attention(1, *self.pair.draw(2), pos, 1.0)

    @precondition(lambda self: not self.missing)
    @rule(more=st.integers(1, 20))
    def too_long(self, more: int) -> None:
        plain = self.pair.plain
        tokens = self.pair.draw(MAX_SEQ_LEN - min(plain.lengths) + more)
        with pytest.raises(PositionOutOfRange):
            self.pair.cache.attention(0, *tokens, plain.lengths, 1.0)

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
@pytest.mark.parametrize("num_workers", [1, 2])
def test_paged_cache(num_workers: int) -> None:
    """Any sequence of calls; with two workers, whose pages do not suffice for one alone."""
    with embedded_backend(num_workers=num_workers) as backend:
        backend.connect()
        run_state_machine_as_test(
            lambda: PagedCacheMachine(backend),
            settings=settings(max_examples=60, stateful_step_count=25, deadline=None),
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
