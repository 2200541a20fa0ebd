"""A service for each test, and a look at it afterwards: no page may be left."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from kvservice.clock import SystemClock
from kvservice.embedded import embedded
from kvservice_client import Client

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


@pytest.fixture(scope="session")
def embedded_three() -> Iterator[Client]:
    """Three workers in this process."""
    with embedded(num_workers=3) as client:
        yield client


@pytest.fixture
def client(embedded_service: Client) -> Iterator[Client]:
    """A client of one worker in this process, which holds no page afterwards."""
    yield embedded_service
    assert_no_pages(embedded_service)
