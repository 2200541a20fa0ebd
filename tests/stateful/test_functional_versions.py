"""Versions of functional caches against numpy arrays, updated in any order, with failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.core.errors import (
    DeadlineExceeded,
    KVServiceError,
    PositionOutOfRange,
    QuotaExceeded,
)
from kvservice_client.functional import (
    KVLayerCache,
    init_kv_layer_cache,
    update_kv_layer_cache,
)
from tests.backends import embedded_backend
from tests.caching import assert_all_released
from tests.failing import Failing

MAX_LEN = 20
SHAPE = (2, 1, MAX_LEN, 3)  # rows, heads, positions, dim
Floats = npt.NDArray[np.float32]


@dataclass
class Version:
    """A version, and what it is in JAX: arrays of which a slice was replaced, and a length."""

    cache: KVLayerCache
    keys: Floats
    values: Floats
    length: int

    def check(self, *, from_the_service: bool) -> None:
        if from_the_service and self.cache._content is not None:
            self.cache._content._arrays = None  # what is at hand
        assert np.array_equal(np.asarray(self.cache.keys), self.keys)
        assert np.array_equal(np.asarray(self.cache.values), self.values)
        assert int(self.cache.length) == self.length


@dataclass(frozen=True)
class Update:
    """One update.

    Fields:
        parent: Which version: 0 the newest, and so on, around.
        start: None: at its length, as decoders do.
        cut: Cut the parent's length to this first, by `dataclasses.replace`.
        fault: None, or whether the call that fails is carried out all the same.
        after: Calls that go through before it.
        looked_at, dropped: Versions that are looked at, or let go, afterwards. None: none.
    """

    parent: int
    start: int | None
    tokens: int
    in_torch: bool
    cut: int | None
    fault: bool | None
    after: int
    looked_at: int | None
    dropped: int | None


def rarely(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), st.none(), st.none(), strategy)


UPDATES = st.builds(
    Update,
    parent=st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4, 5]),
    start=st.one_of(st.none(), st.integers(-1, MAX_LEN)),
    tokens=st.integers(0, 6),
    in_torch=st.booleans(),
    cut=rarely(st.integers(0, MAX_LEN)),
    fault=rarely(st.booleans()),
    after=st.integers(0, 1),
    looked_at=rarely(st.integers(0, 5)),
    dropped=rarely(st.integers(0, 5)),
)


def tokens(number: int, count: int) -> Floats:
    """Return tokens that no other update has."""
    rows, heads, _, dim = SHAPE
    values = number * 1000 + np.arange(rows * heads * count * dim, dtype=np.float32)
    return values.reshape(rows, heads, count, dim)


def apply(versions: list[Version], update: Update, number: int, failing: Failing) -> None:
    """Make an update, and add the new version, if there is one."""
    parent = versions[-1 - update.parent % len(versions)]
    if update.cut is not None:
        cache = dataclasses.replace(parent.cache, length=np.int32(update.cut))
        parent = Version(cache, parent.keys, parent.values, update.cut)
    start = parent.length if update.start is None else update.start
    keys, values = tokens(number, update.tokens), -tokens(number, update.tokens)
    new: tuple[Any, Any] = (keys, values)
    if update.in_torch:
        new = torch.from_numpy(keys), torch.from_numpy(values)
    if update.fault is not None:
        error = DeadlineExceeded if update.fault else QuotaExceeded
        failing.fail(None, error, carried_out=update.fault, after=update.after)
    try:
        cache = update_kv_layer_cache(parent.cache, *new, start)
    except PositionOutOfRange:
        assert start < 0 or start + update.tokens > MAX_LEN
        return
    except KVServiceError:
        assert update.fault is not None
        return
    finally:
        failing.heal()
    stop = start + update.tokens
    assert 0 <= start <= stop <= MAX_LEN
    new_keys, new_values = parent.keys.copy(), parent.values.copy()
    new_keys[:, :, start:stop], new_values[:, :, start:stop] = keys, values
    versions.append(Version(cache, new_keys, new_values, stop))


def run(updates: Sequence[Update], failing: Failing, client: Any) -> None:
    rows, heads, positions, dim = SHAPE
    empty = init_kv_layer_cache(rows, heads, dim, positions, np.float32, client=client)
    zeros = np.zeros(SHAPE, np.float32)
    versions = [Version(empty, zeros, zeros, 0)]
    for number, update in enumerate(updates, 1):
        apply(versions, update, number, failing)
        if update.looked_at is not None:
            version = versions[-1 - update.looked_at % len(versions)]
            version.check(from_the_service=bool(update.looked_at % 2))
        if update.dropped is not None and len(versions) > 1:
            del versions[-1 - update.dropped % len(versions)]
    for version in versions:
        version.check(from_the_service=True)


def test_every_version_shows_what_it_was_made_of() -> None:
    """Whatever is made of a version or of others, and whatever fails; and pages are given back."""
    with embedded_backend() as backend:
        failing = Failing(backend.dial)
        client = backend.connect(dial=failing.dial)

        @settings(max_examples=100)
        @given(st.lists(UPDATES, min_size=1, max_size=25))
        def try_out(updates: list[Update]) -> None:
            try:
                run(updates, failing, client)
            finally:
                failing.heal()
            assert_all_released(backend)
            backend.workers[0].check()

        try_out()
