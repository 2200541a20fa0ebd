"""Processes that die at the steps where it hurts, one named step after the other.

What must hold is the same at each: no wrong answer, all that a living worker holds is found again,
and no page is left of anything. The fixture looks for those after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from kvservice.clock import SystemClock
from kvservice.core.errors import DeadlineExceeded, OutOfPages, PagesLost, Unavailable
from kvservice.core.failpoints import MANAGER_POINTS, WORKER_POINTS
from kvservice.v1 import types_pb2
from kvservice_client import Client, DType, LayerGeometry
from kvservice_client._connections import FRONT
from tests.chaos.conftest import Report
from tests.chaos.decoding import DIM, KV_HEADS, NUM_LAYERS, Decoder, persist, workers_of
from tests.chaos.service import TTL_S, Process, Service, serving

CLOCK = SystemClock()
LAYERS = [LayerGeometry(KV_HEADS, DIM, DIM, DType.FLOAT32)] * NUM_LAYERS
MEMORY_BYTES = 256 << 10  # 256 pages of 4 tokens: sessions fill a worker
STARTING_S = 10.0  # a lease that outlives the start of a process
LENGTH = 40
GROWN = 1000  # tokens that a worker has room for, but not beside those

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

Operation = Callable[[Client, Decoder], object]


def write(decoder: Decoder) -> None:
    for layer in range(NUM_LAYERS):
        _, k, v = decoder.tokens.of(layer, decoder.length, decoder.length + 4)
        decoder.session.write(layer, k, v)


def grow(decoder: Decoder) -> None:
    """Feed more than fits beside what is there."""
    with suppress(OutOfPages):  # if the manager does not come back in time
        decoder.step(GROWN)


def ask_manager(client: Client, decoder: Decoder, keep: int) -> None:
    """Cut a session as those do who do not know its workers."""
    request = types_pb2.PopRequest(
        session_id=decoder.session.id,
        epoch=decoder.session.epoch,
        keep=[keep],
        expected_lengths=[decoder.length],
    )
    client._connections.ask(FRONT, "Pop", request)


OF_WORKERS: dict[str, Operation] = {
    "allocate.done": lambda client, _: Decoder(client, 9, ttl_s=TTL_S, spread=2),
    "fork.done": lambda _, decoder: decoder.session.fork(),
    "attend.pages_taken": lambda _, decoder: decoder.step(),
    "attend.stored": lambda _, decoder: decoder.step(),
    "write.stored": lambda _, decoder: write(decoder),
    "change.checked": lambda _, decoder: decoder.session.pop(3),
    "change.applied": lambda _, decoder: decoder.session.pop(3),
    "heartbeat.sending": lambda _, decoder: decoder.step(),
}
OF_THE_MANAGER: dict[str, Operation] = {
    "open.placed": lambda client, _: Decoder(client, 9, ttl_s=TTL_S).session.release(),
    "grow.opened": lambda _, decoder: grow(decoder),
    "grow.promised": lambda _, decoder: grow(decoder),
    "manager.change.checked": lambda client, decoder: ask_manager(client, decoder, LENGTH - 3),
    "manager.change.partly_applied": lambda client, decoder: ask_manager(client, decoder, 3),
    "manager.fork.partly_done": lambda client, decoder: client.fork(decoder.session.id).release(),
    "heartbeat.received": lambda _, decoder: decoder.step(),
}


@pytest.fixture(scope="module")
def small_service() -> Iterator[Service]:
    with serving(2, memory_bytes=MEMORY_BYTES) as service:
        yield service


@pytest.fixture
def whole(small_service: Service) -> Iterator[Service]:
    """Two workers that are soon full, and a manager; afterwards nothing is left of any session."""
    small_service.repair()
    yield small_service
    small_service.repair()
    small_service.settle(timeout_s=STARTING_S + 1.0)


def launch_with(process: Process, service: Service, point: str, hit: int) -> None:
    """Let a process begin another life, which ends when it passes a step for the `hit`-th time."""
    if process.running:
        process.kill()
    process.failpoints = f"{point}=crash@{hit}"
    process.start()
    process.failpoints = ""  # of the life after that
    if "heartbeat" not in point:  # with these it may have ended before all have heard of it
        service.wait_for(2)


def test_every_step_is_there() -> None:
    """None of the steps that have a name is left out, but for those of moves, which have a test."""
    named = {name for name in (*WORKER_POINTS, *MANAGER_POINTS) if "move" not in name}
    assert named == OF_WORKERS.keys() | OF_THE_MANAGER.keys()


@pytest.mark.parametrize("point", OF_WORKERS)
def test_a_worker_dies_at(point: str, whole: Service, report: Report) -> None:
    """Its sessions go on from what the other worker holds, with equal answers."""
    victim = whole.workers[1]
    launch_with(victim, whole, point, 3 if point.startswith(("attend", "heartbeat")) else 1)
    if point in ("allocate.done", "heartbeat.sending"):
        decoder = Decoder(whole.connect(), 1, ttl_s=TTL_S, layers=LAYERS)
    else:
        decoder = Decoder(whole.connect(), 1, ttl_s=TTL_S, layers=LAYERS, spread=2)
    lost = (PagesLost, Unavailable, DeadlineExceeded)
    with suppress(*lost):
        decoder.step(LENGTH)
        OF_WORKERS[point](whole.connect(timeout_s=3.0), decoder)
    victim.wait_until_ended()
    ended_at = CLOCK.monotonic()
    again = persist(decoder.resume)
    if decoder.length < LENGTH:
        persist(lambda: decoder.step(LENGTH - decoder.length))
    took = CLOCK.monotonic() - ended_at
    decoder.check_stored()
    assert victim.worker_id not in workers_of(decoder)
    report(
        "P12", f"worker crashes at {point}: all is fed again",
        lost=f"{max(0, again)} tokens", recovery_s=took, bound_s=5.0,
        num_checked=decoder.num_checked,
    )  # fmt: skip


@pytest.mark.parametrize("point", OF_THE_MANAGER)
def test_the_manager_dies_at(point: str, whole: Service, report: Report) -> None:
    """The call that it was at is carried out by the next one, once."""
    client = whole.connect()
    decoder = Decoder(
        client, 1, ttl_s=STARTING_S, layers=LAYERS, spread=1 if "grow" in point else 2
    )
    decoder.step(LENGTH)
    launch_with(whole.manager, whole, point, 5 if point == "heartbeat.received" else 1)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(OF_THE_MANAGER[point], client, decoder)
        whole.manager.wait_until_ended()
        whole.manager.start()
        serves_at = CLOCK.monotonic()
        asked.result(timeout=60.0)
    took = CLOCK.monotonic() - serves_at
    if "manager.change" in point:  # of which its holder knows nothing
        decoder = Decoder(client, 1, session=whole.connect().attach(decoder.session.id))
        (decoder.length,) = decoder.session.lengths(0)
        assert decoder.length == (3 if "partly" in point else LENGTH - 3)
    if "grow" in point:
        decoder.length = decoder.session.roll_back()[0]
        assert decoder.length in (LENGTH, LENGTH + GROWN)
        decoder.step()
    decoder.step(2)
    decoder.check_stored()
    report(
        "P4", f"manager crashes at {point}: the call is carried out (from its new start on)",
        recovery_s=took, bound_s=4.0, num_checked=decoder.num_checked,
    )  # fmt: skip
