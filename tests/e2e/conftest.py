"""A service for each test, and a look at it afterwards: no page may be left."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from kvservice.clock import SystemClock
from kvservice.config import ManagerSettings
from kvservice.embedded import embedded
from kvservice.runtime.manager import ManagerServer
from kvservice_client import Client, connect

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


@pytest.fixture(scope="session")
def cluster() -> Iterator[Client]:
    """Two workers in processes of their own, and a manager, all behind real connections."""
    with ExitStack() as running:
        manager = running.enter_context(ManagerServer(ManagerSettings()))
        for name in ("one", "two"):
            worker = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvservice", "worker", "--id", name, "--port", "0"),
                    *("--memory", "256MiB", "--manager", manager.address),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            running.enter_context(worker)  # waits for its end
            running.callback(worker.terminate)
        client = running.enter_context(connect(manager.address))
        clock = SystemClock()
        deadline = clock.monotonic() + 110.0
        while len(client.list_workers()) < 2:
            assert clock.monotonic() < deadline, "the workers have not registered"
            clock.wait(threading.Event(), 0.05)
        yield client
