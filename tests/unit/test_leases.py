"""Renewing what is idle, in few calls, and giving back what nobody needs."""

from __future__ import annotations

from typing import Any

import pytest

from kvservice.clock import ManualClock
from kvservice.core.errors import Unavailable
from kvservice.v1 import types_pb2
from kvservice_client._connections import ClientConfig, Connections
from kvservice_client._leases import MAX_BATCH, Lease, Leases
from kvservice_client._retry import RetryPolicy
from kvservice_client.testing import eventually


class Network:
    """Servers that note what they are asked, and may be away."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, list[str]]] = []
        self.away: set[str] = set()
        self.patience_s = 0.0  # of whoever called last

    def dial(self, address: str) -> Any:
        return Server(self, address)

    def take(self) -> list[tuple[str, str, list[str]]]:
        taken, self.log = sorted(self.log), []
        return taken


class Server:
    def __init__(self, network: Network, address: str) -> None:
        self.network, self.address = network, address

    def call(self, service: str, method: str, request: Any, *, timeout_s: float) -> Any:
        if self.address in self.network.away:
            raise Unavailable("away")
        self.network.log.append((self.address, method, sorted(request.session_ids)))
        self.network.patience_s = timeout_s
        return {
            "Release": types_pb2.ReleaseResponse,
            "RenewLease": types_pb2.RenewLeaseResponse,
        }[method]()

    def close(self) -> None:
        pass


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(0.0)


@pytest.fixture
def leases(network: Network, clock: ManualClock) -> Leases:
    """Leases whose thread is not started: the tests make it look."""
    config = ClientConfig(retry=RetryPolicy(first_delay_s=10.0, max_delay_s=10.0))
    leases = Leases(Connections("front", network.dial, config=config, clock=clock))
    leases._closed = True
    return leases


def lease(leases: Leases, name: str, *addresses: str, ttl_s: float = 60.0) -> Lease:
    made = Lease(name, ttl_s, addresses, 0.0)
    made.renewed(leases._clock.monotonic())
    leases.add(made)
    return made


def test_renewed_every_third(leases: Leases, network: Network, clock: ManualClock) -> None:
    """After a third of its time, and not before; a call in between moves it on."""
    mine = lease(leases, "a", "w0")
    assert leases.renew_due() == pytest.approx(20.0)
    clock.advance(14.0)
    leases.renew_due()
    assert network.take() == []
    mine.renewed(clock.monotonic())
    clock.advance(14.0)
    leases.renew_due()
    assert network.take() == []
    clock.advance(6.0)
    assert leases.renew_due() == pytest.approx(20.0)
    assert network.take() == [("w0", "RenewLease", ["a"])]


def test_one_call_for_each_worker(leases: Leases, network: Network, clock: ManualClock) -> None:
    """What is due, and what will be soon, goes together; a session asks all its workers."""
    lease(leases, "a", "w0")
    lease(leases, "b", "w0", "w1")
    clock.advance(4.0)
    lease(leases, "c", "w1")
    lease(leases, "later", "w1", ttl_s=600.0)
    clock.advance(16.0)
    leases.renew_due()
    assert network.take() == [("w0", "RenewLease", ["a", "b"]), ("w1", "RenewLease", ["b", "c"])]


def test_calls_are_bounded(leases: Leases, network: Network, clock: ManualClock) -> None:
    """Very many sessions are several calls."""
    for number in range(MAX_BATCH + 1):
        lease(leases, str(number), "w0")
    clock.advance(20.0)
    leases.renew_due()
    assert sorted(len(ids) for _, _, ids in network.take()) == [1, MAX_BATCH]


def test_ten_thousand_sessions_are_renewed_in_a_few_calls(
    leases: Leases, network: Network, clock: ManualClock
) -> None:
    """At a ttl of 10 s, on four workers: no lease runs out, by at most 50 calls a second."""
    for number in range(10_000):
        lease(leases, str(number), f"w{number % 4}", ttl_s=10.0)
        if number % 1000 == 0:
            clock.advance(0.3)  # they do not begin all at once
    renewed: dict[str, float] = {}
    calls = 0
    began = clock.monotonic()
    while clock.monotonic() < began + 60.0:
        left_s = leases.renew_due()
        now = clock.monotonic()
        taken = network.take()
        calls += len(taken)
        for _, _, ids in taken:
            assert all(now - renewed.get(one, now) < 10.0 for one in ids), "a lease has run out"
            renewed.update(dict.fromkeys(ids, now))
        assert left_s is not None
        clock.advance(max(left_s, 0.05))
    assert len(renewed) == 10_000
    assert calls <= 60 * 50


def test_what_could_not_be_renewed(leases: Leases, network: Network, clock: ManualClock) -> None:
    """It is tried again soon, by way of the manager at once, and keeps no others from it."""
    lease(leases, "a", "w0")
    lease(leases, "b", "w1")
    network.away.add("w0")
    clock.advance(20.0)
    assert leases.renew_due() == pytest.approx(5.0)
    assert network.take() == [("front", "RenewLease", ["a"]), ("w1", "RenewLease", ["b"])]
    network.away.clear()
    clock.advance(5.0)
    leases.renew_due()
    assert network.take() == [("w0", "RenewLease", ["a"])]


def test_what_is_not_ours_any_more(leases: Leases, network: Network, clock: ManualClock) -> None:
    """What was detached, or others have taken over, is neither renewed nor released."""
    leases.forget(lease(leases, "detached", "w0"))
    lease(leases, "taken", "w0").taken = True
    lease(leases, "handed over", "w0")
    leases.hand_over("handed over")
    clock.advance(100.0)
    leases.renew_due()
    leases.close_soon()
    leases._run()
    assert network.take() == []


def test_releases_go_together(leases: Leases, network: Network) -> None:
    """Notes of finalizers become one call for each worker; unknown places are the front's."""
    for made in (lease(leases, "a", "w0"), lease(leases, "b", "w0", "w1"), lease(leases, "c")):
        leases.release_soon(made)
    lease(leases, "open", "w0")
    leases.close_soon()
    leases._run()
    assert network.take() == [
        ("front", "Release", ["c"]),
        ("w0", "Release", ["a", "b", "open"]),
        ("w1", "Release", ["b"]),
    ]


@pytest.mark.parametrize(("ttl_s", "patience_s"), [(60.0, 5.0), (12.0, 2.0), (3.0, 1.0)])
def test_releases_keep_nobody_waiting(
    leases: Leases, network: Network, ttl_s: float, patience_s: float
) -> None:
    """A worker that is slow has some seconds, as far as leases that are to be renewed have them."""
    lease(leases, "held", "w0", ttl_s=ttl_s)
    leases.release_soon(lease(leases, "let go", "w1"))
    leases.look()
    assert network.take() == [("w1", "Release", ["let go"])]
    assert network.patience_s == patience_s


def test_the_thread(network: Network) -> None:
    """It begins with the first session, and ends with `close`, everything released."""
    leases = Leases(Connections("front", network.dial))
    leases.close(1.0)
    leases = Leases(Connections("front", network.dial))
    assert leases._thread is None
    first = lease(leases, "a", "w0")
    lease(leases, "b", "w0")
    leases.release_soon(first)
    eventually(lambda: network.log)
    leases.close(5.0)
    assert leases._thread is not None
    assert not leases._thread.is_alive()
    assert network.take() == [("w0", "Release", ["a"]), ("w0", "Release", ["b"])]
