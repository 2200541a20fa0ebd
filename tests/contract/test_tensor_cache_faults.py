"""What a failing service does to tensor caches: an error, and nothing else; pages never differ."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvservice.core.errors import (
    DeadlineExceeded,
    InternalError,
    KVServiceError,
    PagesLost,
    QuotaExceeded,
    WorkerLost,
)
from kvservice_client import Client, ClientConfig, DynamicCache, EncoderDecoderCache, StaticCache
from kvservice_client.testing import eventually
from tests.backends import Backend, embedded_backend
from tests.caching import assert_all_released, assert_same, contents, fails_without_change, lengths
from tests.failing import Failing
from tests.tokens import random_states

# Whether the service has done what was asked when the call fails, and with what.
FAILURES: dict[str, tuple[type[KVServiceError], bool]] = {
    "refused": (QuotaExceeded, False),
    "not carried out": (DeadlineExceeded, False),
    "carried out": (DeadlineExceeded, True),
    "broken": (InternalError, True),
}
OPERATIONS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "update": ("Write", lambda cache: cache.update(*random_states(2, rows=2), 0)),
    "update of a later layer": ("Write", lambda cache: cache.update(*random_states(2, rows=2), 1)),
    "first update of a layer": ("Write", lambda cache: cache.update(*random_states(2, rows=2), 2)),
    "reorder_cache": ("Select", lambda cache: cache.reorder_cache(torch.tensor([1, 0]))),
    "batch_select_indices": (
        "Select",
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
    ),
    "batch_repeat_interleave": ("Select", lambda cache: cache.batch_repeat_interleave(2)),
    "reset": ("Reset", lambda cache: cache.reset()),
}
DYNAMIC_ONLY: dict[str, tuple[str, Callable[[Any], object]]] = {
    "crop": ("Pop", lambda cache: cache.crop(-2)),
}
STATIC_ONLY: dict[str, tuple[str, Callable[[Any], object]]] = {
    "update at positions": (
        "Write",
        lambda cache: cache.update(
            *random_states(2, rows=2), 0, {"cache_position": torch.tensor([1, 9])}
        ),
    ),
}
CASES = [
    *(("dynamic", name) for name in OPERATIONS | DYNAMIC_ONLY),
    *(("static", name) for name in OPERATIONS | STATIC_ONLY),
]


@dataclass
class Service:
    backend: Backend
    failing: Failing
    client: Client


@pytest.fixture
def service() -> Iterator[Service]:
    """A service of one worker, whose calls can be made to fail."""
    with embedded_backend() as backend:
        failing = Failing(backend.dial)
        client = backend.connect(dial=failing.dial)
        yield Service(backend, failing, client)
        assert_all_released(backend)


def a_cache(kind: str, client: Client) -> Any:
    return DynamicCache(client=client) if kind == "dynamic" else StaticCache(16, client=client)


def attach(cache: Any, client: Client) -> Any:
    """Return a cache that goes on where this one has left off."""
    session_id, counters = cache.detach(), lengths(cache)
    if isinstance(cache, DynamicCache):
        return DynamicCache.attach(session_id, client=client)
    return StaticCache.attach(session_id, 16, lengths=counters, client=client)


def filled_cache(kind: str, client: Client) -> Any:
    """Return a cache of two layers of different length."""
    cache = a_cache(kind, client)
    cache.update(*random_states(5, rows=2), 0)
    cache.update(*random_states(4, rows=2), 1)
    return cache


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize(("kind", "operation"), CASES, ids=str)
@pytest.mark.parametrize("then", ["detach", "again", "something else"])
def test_failing_call_changes_nothing(
    service: Service, kind: str, operation: str, failure: str, then: str
) -> None:
    """Tensors and counters are as before, and so is what survives, whatever follows."""
    method, call = (OPERATIONS | DYNAMIC_ONLY | STATIC_ONLY)[operation]
    error, carried_out = FAILURES[failure]
    cache = filled_cache(kind, service.client)
    service.failing.fail(method, error, carried_out=carried_out)
    fails_without_change(cache, error, lambda: call(cache))
    if then == "again":
        call(cache)
    elif then == "something else":
        cache.update(*random_states(1, rows=2), 0)
    if operation == "reset" and then == "again":
        for layer in range(2):
            cache.update(*random_states(1, rows=2), layer)
    expected, counters = contents(cache), lengths(cache)
    twin = attach(cache, service.client)
    assert_same(twin, expected)
    assert lengths(twin) == counters


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("method", ["Allocate", "Write"])
@pytest.mark.parametrize("failure", FAILURES)
def test_failing_first_update_leaves_no_session(
    service: Service, kind: str, method: str, failure: str
) -> None:
    """A session that was opened in vain is released, and the cache can begin again."""
    error, carried_out = FAILURES[failure]
    cache = a_cache(kind, service.client)
    service.failing.fail(method, error, carried_out=carried_out)
    states = random_states(3)
    fails_without_change(cache, error, lambda: cache.update(*states, 0))
    assert cache.session_id is None
    cache.update(*states, 0)
    eventually(lambda: service.backend.num_sessions() == 1)
    expected = contents(cache)
    assert_same(attach(cache, service.client), expected)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("after", range(3))
def test_failing_repair_is_repeated(service: Service, kind: str, after: int) -> None:
    """Bringing pages back to the tensors may fail as well, at any call, as often as it likes."""
    cache = filled_cache(kind, service.client)
    service.failing.fail("Select", DeadlineExceeded, carried_out=True)
    fails_without_change(cache, DeadlineExceeded, lambda: cache.batch_repeat_interleave(2))
    for method in ("Reset", "Select", "Write"):
        service.failing.fail(
            method, DeadlineExceeded, carried_out=True, after=after if method == "Write" else 0
        )
    for _ in range(4):
        before = contents(cache)
        try:
            cache.update(*random_states(1, rows=2), 0)
        except DeadlineExceeded:
            assert_same(cache, before)
    service.failing.heal()
    cache.update(*random_states(1, rows=2), 0)
    expected = contents(cache)
    assert_same(attach(cache, service.client), expected)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("after", range(2))
def test_attach_that_fails_keeps_the_session(service: Service, kind: str, after: int) -> None:
    """A session that could not be read is not released: attaching again gives all of it."""
    cache = filled_cache(kind, service.client)
    expected = contents(cache)
    service.failing.fail("Read", InternalError, carried_out=False, after=after)
    with pytest.raises(InternalError):
        attach(cache, service.client)
    gc.collect()
    if kind == "dynamic":
        twin: Any = DynamicCache.attach(cache.session_id, client=service.client)
    else:
        twin = StaticCache.attach(cache.session_id, 16, client=service.client)
    assert_same(twin, expected)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_dead_worker_is_made_up_for(kind: str) -> None:
    """After a worker's death the call that has met it is fed again; nothing is recomputed."""
    with embedded_backend(num_workers=2) as backend:
        client = backend.connect(config=ClientConfig(timeout_s=5.0, detection_s=0.2, silence_s=0.1))
        cache = filled_cache(kind, client)
        (info,) = client.list_sessions()
        holder = backend.index_of(info.extents[0].worker_id)
        backend.kill(holder)
        backend.restart(holder)
        states = random_states(1, rows=2)
        fails_without_change(
            cache,
            (PagesLost, WorkerLost),
            lambda: cache.update(*states, 0),  # type: ignore[arg-type]
        )
        cache.update(*states, 0)
        expected = contents(cache)
        assert_same(attach(cache, client), expected)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("operation", ["reorder_cache", "batch_repeat_interleave", "reset"])
@pytest.mark.parametrize("part", [0, 1])
def test_both_parts_or_none(service: Service, operation: str, failure: str, part: int) -> None:
    """If one part of an EncoderDecoderCache fails, the other is as before, here and there."""
    method, call = OPERATIONS[operation]
    error, carried_out = FAILURES[failure]
    own, cross = (filled_cache("dynamic", service.client) for _ in range(2))
    cache = EncoderDecoderCache(own, cross)
    before = [contents(one) for one in (own, cross)]
    service.failing.fail(method, error, carried_out=carried_out, after=part)
    with pytest.raises(KVServiceError):
        call(cache)
    assert cache.is_updated == {0: True, 1: True}
    for one, expected in zip((own, cross), before, strict=True):
        assert_same(one, expected)
        assert one.seen_tokens == 5
        assert_same(attach(one, service.client), expected)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("stored", [0, 1, 5])
def test_call_that_arrives_late_changes_nothing(service: Service, kind: str, stored: int) -> None:
    """What was given up on, and arrives behind what was done instead, is refused."""
    cache = a_cache(kind, service.client)
    cache.update(*random_states(5, rows=2), 0)
    cache.update(*random_states(stored, rows=2), 1)
    service.failing.delay("Write")
    with pytest.raises(DeadlineExceeded):
        cache.update(*random_states(2, rows=2), 1)
    cache.update(*random_states(2, rows=2), 1)
    service.failing.arrive()
    expected = contents(cache)
    assert_same(attach(cache, service.client), expected)
