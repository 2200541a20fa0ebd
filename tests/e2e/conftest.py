"""A service for each test, and a look at it afterwards: no page may be left."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from kvservice.clock import SystemClock
from kvservice.embedded import embedded
from kvservice_client import Client, connect
from tests.processes import running_service, stored_tokens

torch.set_num_threads(1)  # tiny models: threads only wait for each other


def used_pages(client: Client) -> int:
    """Return the pages in use on all workers."""
    return sum(pool.used_pages for worker in client.page_stats() for pool in worker.pools)


def assert_no_pages(client: Client) -> None:
    """Fail if pages stay in use. Releases travel in the background, so they may take a moment."""
    clock = SystemClock()
    deadline = clock.monotonic() + 10.0
    while (used := used_pages(client)) and clock.monotonic() < deadline:
        clock.wait(threading.Event(), 0.02)
    assert used == 0, f"{used} pages are still in use"


@pytest.fixture(scope="session")
def embedded_service() -> Iterator[Client]:
    """One worker in this process."""
    with embedded() as client:
        yield client


@pytest.fixture
def client(embedded_service: Client) -> Iterator[Client]:
    """A client of one worker in this process, which holds no page afterwards."""
    yield embedded_service
    assert_no_pages(embedded_service)


@pytest.fixture(scope="session")
def service_address() -> Iterator[str]:
    """A manager and two workers, each a process of its own."""
    with running_service() as address:
        yield address


@pytest.fixture(scope="session")
def grpc_service(service_address: str) -> Iterator[Client]:
    """A client of them that knows no other way than gRPC."""
    with connect(service_address, lane=False) as client:
        yield client


@pytest.fixture(scope="session")
def lane_service(service_address: str) -> Iterator[Client]:
    """A client of them as users have it: attention by the workers' lanes."""
    with connect(service_address) as client:
        yield client


@pytest.fixture
def grpc_client(grpc_service: Client) -> Iterator[Client]:
    """The client that takes gRPC; the workers hold no page afterwards."""
    yield grpc_service
    assert_no_pages(grpc_service)


@pytest.fixture
def striped_client(grpc_service: Client) -> Iterator[Client]:
    """As `grpc_client`; and both workers must have stored tokens in the meantime."""
    before = stored_tokens(grpc_service)
    assert len(before) == 2
    yield grpc_service
    assert_no_pages(grpc_service)
    after = stored_tokens(grpc_service)
    idle = [worker for worker in before if after[worker] == before[worker]]
    assert not idle, f"workers that were given no token: {idle}"
