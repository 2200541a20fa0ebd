"""Clients that die, freeze, repeat themselves, and ask for more than there is."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from kvservice.clock import SystemClock
from kvservice.core.errors import (
    AlreadyExists,
    OutOfPages,
    SessionNotFound,
    StaleEpoch,
)
from kvservice.v1 import types_pb2
from kvservice.wire.tensors import tensor_from_pb, to_numpy
from kvservice_client import DType, LayerGeometry
from tests.chaos.conftest import Report
from tests.chaos.decoding import Decoder, under_load
from tests.chaos.service import TTL_S, Service
from tests.programs import ROOT
from tests.serving import (
    Peer,
    allocate_request,
    attend_call,
    attention,
    manager_peer,
    new_id,
    spec,
    until,
    worker_peer,
)

CLOCK = SystemClock()

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


def test_killed_clients(service: Service, report: Report) -> None:
    """What they had open comes back within a lease; those of living clients stay."""
    count, each = 8, 50
    with ExitStack() as stack, under_load(service, 2) as load:
        command = (sys.executable, "-m", "tests.chaos.client_process", service.address)
        clients = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(each), str(TTL_S)],
                    cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )
            )
            for _ in range(count)
        ]  # fmt: skip
        for client in clients:
            assert says(client) == "ready\n"
        assert num_sessions(service) == count * each + 2
        for client in clients[::2]:
            client.kill()
        killed_at = CLOCK.monotonic()
        until(lambda: num_sessions(service) == count * each // 2 + 2, 15.0)
        took = CLOCK.monotonic() - killed_at
        load.run_for(lambda: CLOCK.monotonic() - killed_at > 3 * TTL_S)
        for client in clients[1::2]:
            assert client.stdin is not None
            client.stdin.write("\n")
            client.stdin.flush()
            assert says(client) == "alive\n", "a living client has lost a session"
        for client in clients[1::2]:
            assert client.stdin is not None
            client.stdin.close()
            assert client.wait(30) == 0
        until(lambda: num_sessions(service) == 2, 10.0)
    report(
        "P2", f"{count // 2} of {count} clients SIGKILL, {each} leases of {TTL_S:g} s each",
        lost="the dead clients' sessions", recovery_s=took, bound_s=TTL_S + 1.0,
        num_checked=load.num_checked + each * count // 2,
    )  # fmt: skip


def says(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    return client.stdout.readline()


def num_sessions(service: Service) -> int:
    return sum(stats.num_sessions for stats in service.stats())


def test_a_holder_that_comes_back_late(service: Service, report: Report) -> None:
    """Who was away while another took the session over is refused, and changes nothing."""
    old = Decoder(service.connect(), 3, ttl_s=TTL_S)
    old.step(12)
    new = Decoder(service.connect(), 3, session=service.connect().attach(old.session.id))
    new.length = 12
    new.step(3)
    for call in (
        old.step,
        lambda: old.session.pop(keep=1),
        lambda: old.session.reset(),
        lambda: old.session.write(0, *old.tokens.of(0, 0, 1)[1:], positions=[0]),
        lambda: old.session.select([0, 0]),
    ):
        with pytest.raises(StaleEpoch):
            call()
    old.session.release()  # which is not its any more
    new.step()
    new.check_stored()
    assert new.session.lengths(0) == (16,)
    report("P1", "an old holder goes on after another has attached", num_checked=new.num_checked)


def test_a_client_that_sleeps_longer_than_its_lease(service: Service, report: Report) -> None:
    """Its session is gone, and so it is told; nothing else is ever answered."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.client_process", service.address, "5", "1"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as client:  # fmt: skip
        assert says(client) == "ready\n"
        client.send_signal(signal.SIGSTOP)
        stopped_at = CLOCK.monotonic()
        until(lambda: num_sessions(service) == 0)
        took = CLOCK.monotonic() - stopped_at
        client.send_signal(signal.SIGCONT)
        _, errors = client.communicate("\n", timeout=30)
    assert SessionNotFound.__name__ in errors
    report(
        "P2", "client SIGSTOP for longer than its lease of 1 s", lost="its 5 sessions",
        recovery_s=took, bound_s=2.0, num_checked=1,
    )  # fmt: skip


# -- requests that arrive more than once


def three_times(call: Callable[[], Any]) -> Any:
    """Make a call three times at once; return the answer, which all must have got."""
    with ThreadPoolExecutor(3) as threads:
        answers = [future.result() for future in [threads.submit(call) for _ in range(3)]]
    assert answers[0] == answers[1] == answers[2]
    return answers[0]


def test_requests_that_arrive_three_times(service: Service, report: Report) -> None:
    """At once, at manager and worker: each acts once, and all get the same answer."""
    num_checked = 0
    for _ in range(10):
        with manager_peer(service.address) as manager:
            num_checked += all_verbs_three_times(service, manager)
    report("P11", "every request 3 times at once, 10 rounds", num_checked=num_checked)


def all_verbs_three_times(service: Service, manager: Peer) -> int:
    """Return how many answers were compared."""
    session_id, child_id = new_id(), new_id()
    opening = allocate_request(session_id, spec(page_size=4, ttl_s=TTL_S))
    session = three_times(lambda: manager.call("Allocate", opening)).session
    (extent,) = session.extents
    with pytest.raises(AlreadyExists):
        manager.call("Allocate", allocate_request(session_id, spec(page_size=8, ttl_s=TTL_S)))
    with worker_peer(extent.address) as worker:

        def sent(method: str, request: Any, peer: Peer = worker) -> Any:
            return three_times(lambda: peer.call(method, request)).session

        def stored(expected: int, num_rows: int = 1) -> None:
            asked = types_pb2.GetSessionRequest(session_id=session_id)
            now = manager.call("GetSession", asked).session
            assert list(now.layers[0].lengths) == [expected] * num_rows

        call = attend_call(session_id, 0, 9, step=1)
        out = three_times(lambda: worker.attend_once(call)).out
        np.testing.assert_allclose(
            to_numpy(tensor_from_pb(out, "out")), attention(9), atol=2e-5, rtol=2e-5
        )
        stored(9)
        room = types_pb2.AppendRequest(
            session_id=session_id, epoch=1, token_count=5, expected_lengths=[9]
        )
        sent("Append", room, manager)
        promised = sum(pool.reserved_page_count for pool in pools(worker))
        sent("Append", room, manager)
        assert sum(pool.reserved_page_count for pool in pools(worker)) == promised
        fork = types_pb2.ForkRequest(
            session_id=session_id, epoch=1, new_session_id=child_id, token_count=6
        )
        sent("Fork", fork)
        pop = types_pb2.PopRequest(session_id=session_id, epoch=1, keep=[7], expected_lengths=[9])
        assert sent("Pop", pop).epoch == 2
        stored(7)
        assert (
            sent(
                "Select", types_pb2.SelectRequest(session_id=session_id, epoch=2, rows=[0, 0])
            ).epoch
            == 3
        )
        stored(7, 2)
        assert sent("Reset", types_pb2.ResetRequest(session_id=session_id, epoch=3)).epoch == 4
        attach = types_pb2.AttachRequest(session_id=session_id, epoch=4)
        assert sent("Attach", attach, manager).epoch == 5
        releasing = types_pb2.ReleaseRequest(session_ids=[session_id, child_id])
        with ThreadPoolExecutor(3) as threads:
            freed = list(threads.map(lambda _: worker.call("Release", releasing), range(3)))
        assert sum(answer.released_count for answer in freed) == 2
        assert not any(pool.used_page_count + pool.reserved_page_count for pool in pools(worker))
    return 3 * 10


def pools(worker: Peer) -> list[types_pb2.PoolStats]:
    (stats,) = worker.call("PageStats", types_pb2.PageStatsRequest()).workers
    return list(stats.pools)


# -- more than there is


def test_full_arenas(service: Service, report: Report) -> None:
    """32 clients fill all there is: refused with nothing stored, everything else still answered,
    and room again at once when somebody leaves."""
    layers = [LayerGeometry(2, 64, 64, DType.FLOAT32)] * 2
    part = np.ones((1, 2, 256, 64), np.float32)
    sessions, refused, errors = [], [], []
    lock = threading.Lock()

    def fill() -> None:
        try:
            client = service.connect(timeout_s=5.0)
            while True:
                session = client.open(num_rows=1, layers=layers, page_size=16, ttl_s=30.0)
                with lock:
                    sessions.append(session)
                for layer in range(2):
                    session.write(layer, part, part)
        except OutOfPages as error:
            with lock:
                refused.append(error)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=fill, daemon=True) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
        assert not thread.is_alive(), "a client hangs"
    assert not errors, errors
    assert len(refused) == 32
    assert all(error.retry_delay_s is not None for error in refused)
    for stats in service.stats():
        assert stats.arena_bytes <= stats.budget_bytes
        assert not any(pool.free_pages for pool in stats.pools), "it is not full"
    for session in sessions:  # all or nothing, in each layer
        assert {session.lengths(layer)[0] for layer in range(2)} <= {0, 256}
    full = [session for session in sessions if session.lengths(1) == (256,)]
    slowest_s = 0.0
    for session in full[:20]:
        began = CLOCK.monotonic()
        k, _ = session.read(1, 0, 256)
        np.testing.assert_array_equal(k, part)
        service.stats()
        slowest_s = max(slowest_s, CLOCK.monotonic() - began)
    began = CLOCK.monotonic()
    victim, waiting = full[0], full[1]
    victim.reset()
    while True:
        try:
            for layer in range(2):
                waiting.write(layer, part[:, :, :16], part[:, :, :16])
            break
        except OutOfPages:
            assert CLOCK.monotonic() - began < 10.0
    took = CLOCK.monotonic() - began
    report(
        "P13", f"arenas 100 % full by 32 clients ({len(full)} sessions): a reset gives room",
        recovery_s=took, bound_s=1.0, num_checked=len(sessions) + 20,
    )  # fmt: skip
    report(
        "P13", "arenas 100 % full: the slowest read and look at the stats",
        recovery_s=slowest_s, bound_s=1.0, num_checked=20,
    )  # fmt: skip
