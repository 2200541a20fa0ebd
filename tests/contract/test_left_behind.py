"""Sessions that have gone on without somebody: a worker that comes back, a holder that is late."""

from __future__ import annotations

import gc

import pytest

from kvservice.core.caller import ANONYMOUS
from kvservice.v1 import types_pb2
from kvservice.wire import convert
from kvservice_client import (
    DeadlineExceeded,
    InvalidRequest,
    PagesLost,
    SessionNotFound,
    StaleEpoch,
    StaleWorker,
    WorkerLost,
)
from kvservice_client._connections import FRONT
from kvservice_client.testing import eventually
from tests.backends import Backend
from tests.contract.conftest import Start
from tests.contract.test_session_faults import IMPATIENT, QUICK, faulty
from tests.driving import Driver
from tests.failing import Failing


@pytest.mark.parametrize("taken_over", [False, True])
def test_old_parts_are_never_the_session(start: Start, taken_over: bool) -> None:
    """A worker that is back has what the session held before: beside newer parts it is passed
    over, and when those are gone, all is lost."""
    backend = start(num_workers=2)
    faults, client = faulty(backend, QUICK)
    driver = Driver.open(client, spread=2, page_size=4)
    driver.step(8)
    extent = driver.session._mirror.extents[0]
    first = backend.index_of(extent.worker_id)
    for address in (extent.address, backend.front):  # which would say that it lives
        faults.cut(address)
    with pytest.raises(PagesLost):
        driver.session.attend(0, *driver.tokens(1))
    faults.heal(backend.front)
    assert driver.session.roll_back() == (0, 0)
    driver.dense.pop(keep=(0, 0))
    driver.step(3)
    faults.heal(extent.address)
    assert backend.workers[first].list_sessions(None), "it has its part still"
    if taken_over:
        driver.session = backend.connect(config=QUICK).attach(driver.session.detach())
        driver.check_stored()
        driver.step()
    session_id = driver.session.detach()
    backend.kill(1 - first)
    backend.bury(1 - first)
    late = backend.connect(config=QUICK)
    for call in (late.attach, late.fork):
        with pytest.raises(PagesLost) as failure:
            call(session_id)
        assert failure.value.metadata["from_position"] == "0"
    backend.workers[first].leases.release(ANONYMOUS.tenant, [session_id])
    backend.restart(1 - first)
    with pytest.raises((PagesLost, SessionNotFound)):
        late.attach(session_id)


@pytest.mark.parametrize("spread", [1, 2])
@pytest.mark.parametrize("how", ["release", "drop", "close"])
def test_a_late_holder_releases_nothing(start: Start, how: str, spread: int) -> None:
    """Whoever has taken a session over keeps it, however the one before ends, and unaware."""
    backend = start(num_workers=spread)
    former = backend.connect()
    old, another = (Driver.open(former, spread=spread, page_size=4) for _ in range(2))
    for driver in (old, another):
        driver.step(8)
    new = Driver(backend.connect().attach(old.session.id), dense=old.dense.fork())
    if how == "release":
        old.session.release()
        another.session.release()
    elif how == "drop":
        del old, another, driver
        gc.collect()
    else:
        former.close()
    eventually(lambda: backend.num_sessions() == spread)  # the other one is gone
    new.step()
    new.check_stored()
    new.session.release()
    assert backend.num_sessions() == 0


@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("verb", ["Pop", "Select", "Reset"])
def test_who_does_not_know_how_far_it_is_releases_its_own(
    start: Start, verb: str, carried_out: bool
) -> None:
    """A holder whose last change may have been made frees the session at either epoch, on every
    worker, however it ends; but not from under somebody who has taken it over since."""
    backend = start(num_workers=2)
    failing = Failing(backend.dial)
    client = backend.connect(dial=failing.dial)
    drivers = [Driver.open(client, spread=2, page_size=4) for _ in range(4)]
    for after, driver in enumerate(drivers):
        driver.step(8)
        # The second worker is asked with the first one's answer known, or not; both check first.
        failing.fail(verb, DeadlineExceeded, carried_out=carried_out, after=2 + after % 2)
        change = {"Pop": lambda one: one.pop(3), "Select": lambda one: one.select([1, 0])}
        with pytest.raises(DeadlineExceeded):
            change.get(verb, lambda one: one.reset())(driver.session)
        assert failing.has_failed()
    others = [backend.connect().attach(driver.session.id) for driver in drivers[:2]]
    ids = [driver.session.id for driver in drivers]
    drivers[0].session.release()
    drivers[2].session.release()
    assert ids[2] not in held_by(backend)
    del drivers, driver
    gc.collect()
    client.close()
    eventually(lambda: held_by(backend) == set(ids[:2]))
    for other in others:
        assert other.roll_back() == other.lengths(0)
        other.release()
    assert backend.num_sessions() == 0


def test_a_late_copy_opens_nothing_anew(start: Start) -> None:
    """An empty session by its id would hide that one was lost, whoever is asked for it."""
    backend = start()
    faults, client = faulty(backend, QUICK)
    driver = Driver.open(client, page_size=4)
    driver.step(5)
    request = types_pb2.AllocateRequest.FromString(faults.sent("Allocate")[0][1])
    extent = driver.session._mirror.extents[0]
    backend.kill(0)
    backend.bury(0)
    backend.restart(0)
    ask = backend.connect(config=IMPATIENT)._connections.ask
    with pytest.raises(WorkerLost):
        ask(FRONT, "Allocate", request)
    request.incarnation = extent.incarnation  # as the manager has forwarded it
    with pytest.raises(StaleWorker):
        ask(extent.address, "Allocate", request)
    with pytest.raises(PagesLost):
        client.attach(driver.session.id)
    with pytest.raises(PagesLost):
        driver.session.attend(0, *driver.tokens(1))
    assert driver.session.roll_back() == (0, 0)
    driver.dense.pop(keep=(0, 0))
    driver.step(3)
    driver.check_stored()


def test_nothing_late_meets_the_session_that_goes_on(start: Start) -> None:
    """Copies of what was asked by the old id, a release and the opening: neither ends the session
    that was opened again, nor hides that the old one is gone."""
    backend = start()
    client = backend.connect(config=QUICK)
    driver = Driver.open(client, page_size=4)
    driver.step(5)
    session = driver.session
    old_id, epoch = session.id, session.epoch
    backend.kill(0)
    backend.restart(0)
    with pytest.raises(PagesLost):
        session.attend(0, *driver.tokens(1))
    assert session.roll_back() == (0, 0)
    driver.dense.pop(keep=(0, 0))
    driver.step(3)
    assert session.id != old_id
    # The client's own release of the old one is over when that of one dropped after it is.
    client.open(num_rows=1)
    gc.collect()
    eventually(lambda: held_by(backend) == {session.id})
    release(backend, lone=False, ids=[old_id], epochs=[epoch])
    spec = convert.spec_to_pb(session._mirror.spec)
    request = types_pb2.AllocateRequest(session_id=old_id, spec=spec)
    backend.connect()._connections.ask(FRONT, "Allocate", request)
    heir = backend.connect().attach(session.id)
    assert heir.lengths(0) == (3, 3)
    with pytest.raises(StaleEpoch):
        session.attend(0, *driver.tokens(1))
    assert release(backend, lone=False, ids=[old_id], epochs=[0]) == 1
    assert not heir.closed


def test_workers_that_all_live_again(start: Start) -> None:
    """What they held is lost, and said to be, not unknown: the session goes on from nothing."""
    backend = start(num_workers=2)
    driver = Driver.open(backend.connect(config=QUICK), spread=2, page_size=4)
    driver.step(8)
    for index in range(2):
        backend.kill(index)
        backend.restart(index)
    with pytest.raises(PagesLost):
        driver.session.attend(0, *driver.tokens(1))
    assert driver.session.roll_back() == (0, 0)
    driver.dense.pop(keep=(0, 0))
    driver.step(3)
    driver.check_stored()


def held_by(backend: Backend) -> set[str]:
    """Return the ids of the sessions of which a worker holds something."""
    return {
        info.session_id for worker in backend.workers for *_, info in worker.list_sessions(None)
    }


def release(backend: Backend, *, lone: bool, ids: list[str], epochs: list[int]) -> int:
    request = types_pb2.ReleaseRequest(session_ids=ids, epochs=epochs)
    connections = backend.connect(lone=lone)._connections
    released: int = connections.ask(FRONT, "Release", request).released_count
    return released


@pytest.mark.parametrize("lone", [False, True], ids=["manager", "worker"])
def test_release_up_to_an_epoch(backend: Backend, lone: bool) -> None:
    """Each session has its own; 0, and none at all, stand for any."""
    client = backend.connect()
    drivers = [Driver.open(client) for _ in range(4)]
    for driver in drivers:
        driver.step(2)
        driver.pop(1)
    ids = [driver.session.id for driver in drivers]
    for epochs in ([1], [-1, 2, 2, 2]):
        with pytest.raises(InvalidRequest, match="epochs"):
            release(backend, lone=lone, ids=ids, epochs=epochs)
    assert backend.num_sessions() == 4
    assert release(backend, lone=lone, ids=ids, epochs=[1, 2, 0, 1]) == 2
    for driver in (drivers[0], drivers[3]):
        driver.step()
        driver.check_stored()
    assert release(backend, lone=lone, ids=[ids[0]] * 2, epochs=[1, 2]) == 1, "the later counts"
    assert release(backend, lone=lone, ids=ids, epochs=[]) == 1
    assert backend.num_sessions() == 0
