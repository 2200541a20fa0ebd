"""Versions of functional caches against numpy arrays, updated in any order, with failures."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)

from kvservice.core.errors import (
    DeadlineExceeded,
    KVServiceError,
    PositionOutOfRange,
    QuotaExceeded,
)
from kvservice_client.functional import (
    init_kv_layer_cache,
    update_kv_layer_cache,
)
from tests.backends import embedded_backend
from tests.caching import assert_all_released
from tests.failing import Failing

MAX_LEN = 24
SHAPE = (2, 1, MAX_LEN, 3)  # rows, heads, positions, dim
Floats = npt.NDArray[np.float32]


@dataclass(eq=False)
class Version:
    """A version, and what it is in JAX: arrays of which a slice was replaced, and a length."""

    cache: Any  # KVLayerCache; None once it was dropped
    keys: Floats
    values: Floats
    length: int

    def look_again(self) -> None:
        """Forget what is at hand, so that it is read from the service."""
        if self.cache._content is not None:
            self.cache._content._arrays = None

    def check(self) -> None:
        assert np.array_equal(np.asarray(self.cache.keys), self.keys)
        assert np.array_equal(np.asarray(self.cache.values), self.values)
        assert int(self.cache.length) == self.length


class FunctionalMachine(RuleBasedStateMachine):
    """Every version shows what it was made of, whatever is made of it or of others."""

    versions = Bundle("versions")

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.backend = self.stack.enter_context(embedded_backend())
        self.failing = Failing(self.backend.dial)
        self.client = self.backend.connect(dial=self.failing.dial)
        self.made: list[Version] = []
        self.next_value = 0

    def fresh(self, tokens: int) -> Floats:
        self.next_value += 1000
        rows, heads, _, dim = SHAPE
        size = rows * heads * tokens * dim
        numbers = np.arange(self.next_value, self.next_value + size, dtype=np.float32)
        return numbers.reshape(rows, heads, tokens, dim)

    @rule(target=versions)
    def init(self) -> Version:
        rows, heads, positions, dim = SHAPE
        cache = init_kv_layer_cache(rows, heads, dim, positions, np.float32, client=self.client)
        zeros = np.zeros(SHAPE, np.float32)
        self.made.append(Version(cache, zeros, zeros, 0))
        return self.made[-1]

    @rule(
        target=versions,
        parent=versions,
        where=st.one_of(st.none(), st.integers(-2, MAX_LEN)),
        tokens=st.integers(0, 6),
        in_torch=st.booleans(),
        fault=st.one_of(st.none(), st.none(), st.tuples(st.booleans(), st.integers(0, 1))),
    )
    def update(
        self,
        parent: Version,
        where: int | None,
        tokens: int,
        in_torch: bool,
        fault: tuple[bool, int] | None,
    ) -> Version:
        """Write at the length, as decoders do, or anywhere. Returns the parent if that fails."""
        if parent.cache is None:
            return parent
        start = parent.length if where is None else where
        keys, values = self.fresh(tokens), self.fresh(tokens)
        given: Any = (keys, values)
        if in_torch:
            given = torch.from_numpy(keys), torch.from_numpy(values)
        if fault is not None:
            error = DeadlineExceeded if fault[0] else QuotaExceeded
            self.failing.fail(None, error, carried_out=fault[0], after=fault[1])
        try:
            cache = update_kv_layer_cache(parent.cache, *given, start)
        except PositionOutOfRange:
            assert start < 0 or start + tokens > MAX_LEN
            return parent
        except KVServiceError:
            return parent
        finally:
            self.failing.heal()
        assert 0 <= start <= start + tokens <= MAX_LEN
        new_keys, new_values = parent.keys.copy(), parent.values.copy()
        new_keys[:, :, start : start + tokens] = keys
        new_values[:, :, start : start + tokens] = values
        self.made.append(Version(cache, new_keys, new_values, start + tokens))
        return self.made[-1]

    @rule(target=versions, parent=versions, length=st.integers(0, MAX_LEN))
    def cut_back(self, parent: Version, length: int) -> Version:
        if parent.cache is None:
            return parent
        cache = dataclasses.replace(parent.cache, length=np.int32(length))
        self.made.append(Version(cache, parent.keys, parent.values, length))
        return self.made[-1]

    @rule(version=versions, from_the_service=st.booleans())
    def look(self, version: Version, from_the_service: bool) -> None:
        if version.cache is None:
            return
        if from_the_service:
            version.look_again()
        version.check()

    @rule(version=consumes(versions))
    def drop(self, version: Version) -> None:
        """Let go of a version. Those that it was put into a bundle twice under go as well."""
        version.cache = None

    @invariant()
    def worker_is_sound(self) -> None:
        self.backend.workers[0].check()

    def teardown(self) -> None:
        for version in self.made:
            if version.cache is not None:
                version.look_again()
                version.check()
                version.cache = None  # Hypothesis may hold on to the version
        assert_all_released(self.backend)
        self.stack.close()


TestFunctionalMachine = FunctionalMachine.TestCase
TestFunctionalMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
