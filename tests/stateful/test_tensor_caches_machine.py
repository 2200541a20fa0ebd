"""DynamicCache and StaticCache against plain lists of tensors, under any sequence of calls."""

from __future__ import annotations

import contextlib
import copy
import gc
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvservice.core.errors import DeadlineExceeded, KVServiceError, QuotaExceeded
from kvservice_client import DynamicCache, StaticCache
from tests.backends import embedded_backend
from tests.caching import assert_same, lengths
from tests.failing import Failing
from tests.tokens import random_states

NUM_LAYERS = 3
CAPACITY = 20
States = tuple[torch.Tensor, torch.Tensor]


class DynamicModel:
    """What a DynamicCache should be: a list of tensors by layer."""

    def __init__(self) -> None:
        self.layers: list[States] = []
        self.seen = 0

    def lengths(self) -> list[int]:
        return [k.shape[2] for k, _ in self.layers]

    def update(self, k: torch.Tensor, v: torch.Tensor, layer: int, _: Any) -> States:
        if layer == len(self.layers):
            self.layers.append((k, v))
        else:
            old_k, old_v = self.layers[layer]
            self.layers[layer] = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
        self.seen += k.shape[2] if layer == 0 else 0
        return self.layers[layer]

    def crop(self, n: int) -> None:
        length = self.lengths()[0] if self.layers else 0
        n = max(0, length + n) if n < 0 else n
        if n < length:
            self.layers = [(k[:, :, :n], v[:, :, :n]) for k, v in self.layers]
            self.seen = n

    def rows(self, rows: list[int]) -> None:
        self.layers = [(k[rows], v[rows]) for k, v in self.layers]

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


class StaticModel:
    """What a StaticCache should be: full tensors by layer, and counters."""

    def __init__(self) -> None:
        self.layers: list[States] = []
        self.counters: list[int] = []
        self.seen = 0

    def lengths(self) -> list[int]:
        return self.counters

    def update(
        self, k: torch.Tensor, v: torch.Tensor, layer: int, positions: list[int] | None
    ) -> States:
        rows, heads, tokens, dim = k.shape
        while len(self.layers) <= layer:
            self.layers.append(
                (torch.zeros(rows, heads, CAPACITY, dim), torch.zeros(rows, heads, CAPACITY, dim))
            )
            self.counters.append(0)
        first = self.counters[layer]
        new_k, new_v = (states.clone() for states in self.layers[layer])
        for token, position in enumerate(positions or range(first, first + tokens)):
            new_k[:, :, position], new_v[:, :, position] = k[:, :, token], v[:, :, token]
        self.layers[layer] = new_k, new_v
        self.counters[layer] += tokens
        self.seen += tokens if layer == 0 else 0
        return new_k, new_v

    def crop(self, n: int) -> None:
        self.counters = [max(0, min(one, one + n if n < 0 else n)) for one in self.counters]
        self.seen = self.counters[0] if self.counters else 0

    def rows(self, rows: list[int]) -> None:
        self.layers = [(k[rows], v[rows]) for k, v in self.layers]

    def reset(self) -> None:
        self.layers = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in self.layers]
        self.counters = [0] * len(self.counters)
        self.seen = 0


@dataclass(frozen=True)
class Fault:
    """One of the calls that a change makes fails, after `after` others."""

    carried_out: bool
    after: int


FAULTS = st.one_of(st.none(), st.builds(Fault, st.booleans(), st.sampled_from([0, 0, 0, 1, 1, 2])))


class TensorCacheMachine(RuleBasedStateMachine):
    """A cache and its model, on a service whose calls fail now and then."""

    static: bool

    @initialize(num_rows=st.integers(1, 3))
    def begin(self, num_rows: int) -> None:
        self.stack = ExitStack()
        self.backend = self.stack.enter_context(embedded_backend())
        self.failing = Failing(self.backend.dial)
        self.client = self.backend.connect(dial=self.failing.dial)
        self.num_rows = num_rows
        self.failed = False
        self.cache: Any = (
            StaticCache(CAPACITY, client=self.client)
            if self.static
            else DynamicCache(client=self.client)
        )
        self.model: Any = StaticModel() if self.static else DynamicModel()

    def both(self, call: Any, fault: Fault | None) -> None:
        """Make a change to the cache and its model, or, if the service fails, to neither."""
        if fault is not None:
            error = DeadlineExceeded if fault.carried_out else QuotaExceeded
            self.failing.fail(None, error, carried_out=fault.carried_out, after=fault.after)
        try:
            got = call(self.cache)
        except KVServiceError:
            self.failed = True
            return
        expected = call(self.model)
        if expected is not None:
            assert_same([got], [expected])

    @precondition(lambda self: self.failed)
    @rule()
    def look_at_pages(self) -> None:
        """After failures: the next call finds pages that are what the tensors are."""
        self.failing.heal()
        self.failed = False
        self.cache._follow()
        session = self.cache._pages.session
        for layer, states in enumerate(self.model.layers):
            stored = self.cache._pages.stored(layer)
            if stored and self.num_rows:
                assert session.lengths(layer) == (stored,) * self.num_rows
                got = session.read(layer, like=states[0])
                assert_same([got], [tuple(one[:, :, :stored] for one in states)])

    @rule(
        layer=st.integers(0, NUM_LAYERS - 1), tokens=st.integers(0, 7), data=st.data(), fault=FAULTS
    )
    def update(self, layer: int, tokens: int, data: st.DataObject, fault: Fault | None) -> None:
        """Append, or write at positions."""
        if not self.static:
            layer = min(layer, len(self.cache))
        tokens = min(tokens, CAPACITY - self.cache.get_seq_length(layer)) if self.static else tokens
        k, v = random_states(tokens, rows=self.num_rows, dim=3, v_dim=3 if self.static else 5)
        positions = None
        if self.static and tokens and data.draw(st.booleans()):
            positions = data.draw(
                st.lists(st.integers(0, CAPACITY - 1), min_size=tokens, max_size=tokens)
            )
        options = None if positions is None else {"cache_position": torch.tensor(positions)}
        self.both(
            lambda one: one.update(k, v, layer, options if one is self.cache else positions), fault
        )

    @rule(n=st.integers(-9, 25), fault=FAULTS)
    def crop(self, n: int, fault: Fault | None) -> None:
        self.both(lambda one: one.crop(n), fault)

    @precondition(lambda self: len(self.cache))
    @rule(data=st.data(), fault=FAULTS)
    def reorder(self, data: st.DataObject, fault: Fault | None) -> None:
        """Reorder, drop and repeat rows."""
        n = self.num_rows
        rows = data.draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=4))
        indices = torch.tensor(rows)
        self.both(
            lambda one: one.reorder_cache(indices) if one is self.cache else one.rows(rows), fault
        )
        self.num_rows = self.cache[0][0].shape[0]

    @precondition(lambda self: len(self.cache) and self.num_rows <= 2)
    @rule(r=st.integers(1, 2), fault=FAULTS)
    def repeat(self, r: int, fault: Fault | None) -> None:
        rows = [row for row in range(self.num_rows) for _ in range(r)]
        self.both(
            lambda one: one.batch_repeat_interleave(r) if one is self.cache else one.rows(rows),
            fault,
        )
        self.num_rows = self.cache[0][0].shape[0]

    @rule(num_rows=st.integers(1, 3), fault=FAULTS)
    def reset(self, num_rows: int, fault: Fault | None) -> None:
        self.both(lambda one: one.reset(), fault)
        if not len(self.cache):
            self.num_rows = num_rows

    @precondition(lambda self: len(self.cache))
    @rule(layer=st.integers(0, NUM_LAYERS - 1), in_place=st.booleans())
    def put_in_by_hand(self, layer: int, in_place: bool) -> None:
        """Replace a layer's tensors, or write into them."""
        layer %= len(self.cache)
        k, v = (states.clone() for states in self.cache[layer])
        k[:, :, 1::3] = 5.0
        if in_place:
            self.cache.key_cache[layer][:, :, 1::3] = 5.0
        else:
            self.cache.key_cache[layer], self.cache.value_cache[layer] = k, v
        self.model.layers[layer] = k, v

    @rule()
    def copy(self) -> None:
        """Go on with a deep copy."""
        with contextlib.suppress(KVServiceError):
            self.cache = copy.deepcopy(self.cache)

    @precondition(lambda self: self.cache.session_id)
    @rule()
    def die_and_attach(self) -> None:
        """Go on in another cache, which knows nothing but the session's id.

        What was never written is not there, nor are layers behind the last that holds something.
        """
        self.failing.heal()
        counters = self.cache._cumulative_length if self.static else None
        self.cache._follow()
        stored = [self.cache._pages.stored(layer) for layer in range(len(self.cache))]
        kept = max((layer + 1 for layer, one in enumerate(stored) if one), default=0)
        session_id = self.cache.session_id
        if self.static:
            self.cache = StaticCache.attach(
                session_id, CAPACITY, lengths=counters[:kept], client=self.client
            )
            self.model.counters = self.model.counters[:kept]
        else:
            self.cache = DynamicCache.attach(session_id, client=self.client)
        self.model.layers = self.model.layers[:kept]
        self.model.seen = self.model.lengths()[0] if kept else 0

    @invariant()
    def cache_is_what_the_model_is(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert_same(self.cache, self.model.layers)
        assert lengths(self.cache) == self.model.lengths()
        assert self.cache.seen_tokens == self.model.seen
        self.backend.workers[0].check()

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            del self.cache
            gc.collect()
            self.stack.close()


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_cache_is_what_plain_lists_are(static: bool) -> None:
    """Whatever is called, and whatever fails, tensors and counters are those of plain lists."""
    kind = type("Machine", (TensorCacheMachine,), {"static": static})
    run_state_machine_as_test(
        kind, settings=settings(max_examples=12, stateful_step_count=30, deadline=None)
    )
