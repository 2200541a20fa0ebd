"""Releases of what a session needs no more on a worker, of which a copy arrives late: the session
may be there again by then, and is used."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import numpy as np
import pytest

from kvservice.core.caller import ANONYMOUS
from kvservice.core.errors import InvalidRequest, OutOfPages
from kvservice.core.session import LayerSpec, SessionSpec
from kvservice.v1 import types_pb2
from kvservice.wire import convert
from kvservice.wire.names import MANAGER, WORKER
from kvservice_client import Client, DType, LayerGeometry
from tests.backends import FILLER, Backend, fill_up
from tests.contract.conftest import Start
from tests.driving import Driver
from tests.faults import Faults

# 2 KV heads of 8 + 8 float32: 512 bytes a page of 4 tokens, and layer.
LAYERS = [LayerGeometry(2, 8, 8, DType.FLOAT32)] * 2
PAGE_BYTES = 2 * 512
TENANT = ANONYMOUS.tenant
OTHER = str(uuid.UUID(int=4712, version=4))


def late_copy(backend: Backend, faults: Faults) -> Callable[[], types_pb2.ReleaseResponse]:
    """Return what delivers a copy of the newest release once more."""
    address, raw = faults.sent("Release")[-1]
    request = types_pb2.ReleaseRequest.FromString(raw)

    def deliver() -> types_pb2.ReleaseResponse:
        transport = backend.dial(address)
        try:
            answer: types_pb2.ReleaseResponse = transport.call(
                WORKER.full_name, "Release", request, timeout_s=5.0
            )
        finally:
            transport.close()
        return answer

    return deliver


def gone_back(backend: Backend, client: Client) -> tuple[Driver, int, int]:
    """Return a session that has grown to a second worker and was cut, and the two, by index."""
    driver = Driver.open(client, num_rows=1, page_size=4, layers=LAYERS)
    driver.step(4)
    first = backend.index_of(driver.session._mirror.tail.worker_id)
    fill_up(backend.workers[first], LAYERS)
    driver.step(3)
    second = backend.index_of(driver.session._mirror.tail.worker_id)
    assert first != second
    driver.pop(keep=3)
    backend.workers[first].leases.release(TENANT, [FILLER])
    backend.beat()
    return driver, first, second


@pytest.mark.parametrize("lives", [1, 2])
def test_of_an_extent_that_was_given_back(start: Start, lives: int) -> None:
    """What is moved there afterwards stays, in the same life of the worker or in the next one."""
    backend = start(num_workers=2, memory_bytes=12 * PAGE_BYTES)
    faults = Faults(backend.dial)
    driver, _, second = gone_back(backend, backend.connect(dial=faults.dial))
    deliver = late_copy(backend, faults)
    if lives == 2:
        backend.kill(second)
        backend.restart(second)
        backend.beat()
    backend.move(driver.session.id, second)
    driver.step()
    assert deliver().released_count == 0
    driver.step()
    driver.check_stored()


def test_of_a_copy_that_was_given_up(start: Start) -> None:
    """The other one goes on at the next epoch, and is moved to where that copy was."""
    backend = start(num_workers=2, memory_bytes=12 * PAGE_BYTES)
    faults = Faults(backend.dial)
    client = backend.connect(dial=faults.dial)
    driver = Driver.open(client, num_rows=1, replicas=2, page_size=4, layers=LAYERS)
    driver.step(4)
    twin = driver.session._mirror.tail.twin
    assert twin is not None
    index = backend.index_of(twin.worker_id)
    fill_up(backend.workers[index], LAYERS)
    for layer in range(2):
        _, k, v = driver.tokens(2)
        driver.session.write(layer, k, v)
        driver.dense.attend(layer, driver.random(4, 2, 8), k, v)
    assert driver.session._mirror.tail.twin is None
    deliver = late_copy(backend, faults)
    backend.workers[index].leases.release(TENANT, [FILLER])
    backend.beat()
    backend.move(driver.session.id, index)
    assert deliver().released_count == 0
    driver.step()
    driver.check_stored()


def test_of_a_session_that_found_no_room(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager frees what it had opened on the way, and the same request comes again."""
    backend = start(num_workers=2, memory_bytes=12 * PAGE_BYTES)
    fill_up(backend.workers[1], LAYERS)
    backend.beat()
    asked: list[tuple[str, types_pb2.ReleaseRequest]] = []
    calls = backend.manager._leases._calls
    ask = calls.ask

    def listen(worker_id: str, method: str, request: object, caller: object) -> object:
        if isinstance(request, types_pb2.ReleaseRequest):
            asked.append((worker_id, request))
        return ask(worker_id, method, request, caller)  # type: ignore[arg-type]

    monkeypatch.setattr(calls, "ask", listen)
    layers = tuple(LayerSpec(geometry=one) for one in LAYERS)
    spec = SessionSpec(1, layers, page_size=4, reserve_tokens=8, spread=2)
    request = types_pb2.AllocateRequest(session_id=OTHER, spec=convert.spec_to_pb(spec))
    transport = backend.dial(backend.front)
    with pytest.raises(OutOfPages):
        transport.call(MANAGER.full_name, "Allocate", request, timeout_s=5.0)
    [(worker_id, late)] = asked
    backend.workers[1].leases.release(TENANT, [FILLER])
    transport.call(MANAGER.full_name, "Allocate", request, timeout_s=5.0)
    address = backend.workers[backend.index_of(worker_id)].config.address
    at_worker = backend.dial(address)
    answer = at_worker.call(WORKER.full_name, "Release", late, timeout_s=5.0)
    assert answer.released_count == 0
    session = backend.connect().attach(OTHER)
    token = np.ones((1, 2, 8, 8), np.float32)
    session.write(0, token, token)
    session.release()
    for one in (transport, at_worker):
        one.close()


def test_a_release_that_names_no_stay_is_of_any(start: Start) -> None:
    """As it was before there were stays. To a manager they say nothing."""
    backend = start()
    session = backend.connect().open(num_rows=1)
    worker = backend.dial(backend.workers[0].config.address)
    front = backend.dial(backend.front)
    request = types_pb2.ReleaseRequest(session_ids=[session.id], stays=["another"])
    assert worker.call(WORKER.full_name, "Release", request, timeout_s=5.0).released_count == 0
    with pytest.raises(InvalidRequest):
        front.call(MANAGER.full_name, "Release", request, timeout_s=5.0)
    request.stays[:] = ["one", "two"]
    with pytest.raises(InvalidRequest):
        worker.call(WORKER.full_name, "Release", request, timeout_s=5.0)
    del request.stays[:]
    assert worker.call(WORKER.full_name, "Release", request, timeout_s=5.0).released_count == 1
    for one in (worker, front):
        one.close()
