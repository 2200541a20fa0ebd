"""The service inside this process: the same sessions, without network and threads to spare."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvservice.clock import ManualClock
from kvservice.core.errors import InvalidRequest, OutOfPages, SessionNotFound
from kvservice.embedded import EmbeddedService, embedded
from kvservice_client import Client, Session
from kvservice_client._connections import Connections
from tests.oracles import causal_visible, dense_attention
from tests.serving import until

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def tokens(num_tokens: int, heads: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, heads, num_tokens, 16), np.float32)


def test_attention_is_attention() -> None:
    """What a session answers is dense attention over all that it was given."""
    with embedded() as client, client.open(num_rows=1) as session:
        q, k, v = tokens(30, 4, 0), tokens(30, 2, 1), tokens(30, 2, 2)
        parts = [
            session.attend(0, q[:, :, a:b], k[:, :, a:b], v[:, :, a:b])
            for a, b in ((0, 20), (20, 21), (21, 30))
        ]
        out = np.concatenate(parts, axis=2)
        positions = np.arange(30)
        visible = causal_visible(positions, positions)
        expected = dense_attention(
            q[0].transpose(1, 0, 2),
            k[0].transpose(1, 0, 2),
            v[0].transpose(1, 0, 2),
            visible,
            scale=0.25,
        )
        np.testing.assert_allclose(out[0].transpose(1, 0, 2), expected[0], atol=1e-5)


def test_session_grows_over_workers_until_all_are_full() -> None:
    """Room on any worker is room for the session; when there is none, nothing has changed."""
    with embedded(num_workers=3, memory_bytes=200_000) as client:
        session = client.open(num_rows=1)
        with pytest.raises(OutOfPages):
            fill(session)
        stats = client.page_stats()
        assert [worker.num_sessions for worker in stats] == [1, 1, 1]
        assert sum(worker.appended_tokens for worker in stats) == session.lengths(0)[0]
        session.release()
        assert all(not worker.used_bytes for worker in client.page_stats())


def fill(session: Session) -> None:
    for seed in range(200):
        session.attend(0, tokens(64, 4, seed), tokens(64, 2, seed), tokens(64, 2, seed))


def test_everything_ends_with_the_block() -> None:
    """No thread is left, and what was not released is freed."""
    before = set(threading.enumerate())
    with embedded(num_workers=2) as client:
        client.open(num_rows=1)
        assert any(t.name == "kvservice-embedded" for t in threading.enumerate())
    assert set(threading.enumerate()) <= before


def test_leases_end_here_too() -> None:
    """A session that nobody renews is gone after its ttl, and the manager knows."""
    clock = ManualClock()
    service = EmbeddedService(num_workers=1, memory_bytes=1 << 20, device="cpu", clock=clock)
    service.start()
    try:
        client = Client(Connections("embedded:manager", service.dial, clock=clock))
        with client:
            session_id = client.open(num_rows=1, ttl_s=2.0).detach()
            until(lambda: clock.advance(1.0) or not service.workers[0].stats().num_sessions)  # type: ignore[func-returns-value]
            with pytest.raises(SessionNotFound):
                client.attach(session_id)
    finally:
        service.close()


def test_a_worker_that_counts_as_dead_silences_no_other() -> None:
    """What it reports is refused; leases and heartbeats of the others go on."""
    clock = ManualClock()
    service = EmbeddedService(num_workers=2, memory_bytes=1 << 20, device="cpu", clock=clock)
    service.start()
    try:
        dead, other = (worker.config for worker in service.workers)
        service.manager.worker_died(dead.worker_id, dead.incarnation)
        with Client(Connections("embedded:manager", service.dial, clock=clock)) as client:
            session = client.open(num_rows=1, ttl_s=2.0)
            (stats,) = session.page_stats()
            assert stats.worker_id == other.worker_id
            session_id = session.detach()
            until(lambda: clock.advance(1.0) or not service.workers[1].stats().num_sessions)  # type: ignore[func-returns-value]
            with pytest.raises(SessionNotFound):
                client.attach(session_id)
    finally:
        service.close()


def test_there_is_at_least_one_worker() -> None:
    """None would be a service that can do nothing."""
    with pytest.raises(InvalidRequest, match="num_workers"), embedded(num_workers=0):
        pass
