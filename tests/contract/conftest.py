"""The client's suite runs three times: on a service in this process, over gRPC, and by lane."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest
import torch

from kvservice_client import Client
from tests.backends import Backend, embedded_backend, grpc_backend
from tests.caching import assert_all_released

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other

BACKENDS = {
    "embedded": embedded_backend,
    "grpc": grpc_backend,
    "lane": partial(grpc_backend, lane=True),
}

# These write and read, and never attend: nothing of what they do takes a lane.
WITHOUT_ATTEND = ("test_dynamic_cache.py", "test_static_cache.py")

Start = Callable[..., Backend]


def _variant(item: pytest.Item) -> list[str]:
    callspec = getattr(item, "callspec", None)
    return [] if callspec is None else callspec.id.split("-")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out lanes where none would be taken."""
    left_out = [
        item for item in items if item.path.name in WITHOUT_ATTEND and "lane" in _variant(item)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        dropped = set(left_out)
        items[:] = [item for item in items if item not in dropped]


@pytest.fixture(params=sorted(BACKENDS))
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts services. Afterwards no session may be open and no page in use."""
    with ExitStack() as stack:

        def start(**options: object) -> Backend:
            return stack.enter_context(BACKENDS[request.param](**options))

        yield start


@pytest.fixture
def backend(start: Start) -> Backend:
    """A manager with one worker."""
    return start()


@pytest.fixture
def client(backend: Backend) -> Client:
    """A client of a manager with one worker."""
    return backend.connect()


@pytest.fixture
def cache_client(backend: Backend, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client whose caches free their pages by themselves, once nobody holds them."""
    yield backend.connect()
    request.node.funcargs.clear()  # pytest would hold on to caches that are fixtures
    assert_all_released(backend)
