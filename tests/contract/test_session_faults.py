"""What is lost on the way is repeated, and acts once; what has died is said to be lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvservice.core.errors import QuotaExceeded, Unavailable
from kvservice_client import (
    Client,
    ClientConfig,
    DeadlineExceeded,
    DType,
    LayerGeometry,
    PagesLost,
    StaleEpoch,
    WorkerLost,
)
from kvservice_client._retry import RetryPolicy
from kvservice_client.testing import eventually
from tests.backends import Backend
from tests.contract.conftest import Start
from tests.driving import Driver
from tests.failing import Failing
from tests.faults import Faults

QUICK = ClientConfig(
    timeout_s=20.0,
    detection_s=0.2,
    silence_s=0.05,
    retry=RetryPolicy(first_delay_s=0.001, max_delay_s=0.02),
)

PATIENT = replace(QUICK, detection_s=10.0, silence_s=5.0)
"""Repeats what is lost, and nothing else, on a machine that is slow."""

IMPATIENT = ClientConfig(detection_s=60.0, retry=RetryPolicy(first_delay_s=1e3, max_delay_s=1e3))
"""Gives up at the first call that is lost, and has all the time that a call takes."""

VERBS: dict[str, Callable[[Driver], Any]] = {
    "Attend": lambda driver: driver.step(2, layers=[0]),
    "Pop": lambda driver: driver.pop(3),
    "Select": lambda driver: driver.select([1, 1, 0]),
    "Reset": lambda driver: driver.reset(),
    "Fork": lambda driver: driver.fork().check_stored(),
    "Read": lambda driver: driver.session.read(0),
    "Write": lambda driver: write(driver),
    "Release": lambda driver: driver.session.release(),
}


def write(driver: Driver) -> None:
    for layer in range(2):
        _, k, v = driver.tokens(2)
        driver.session.write(layer, k, v)
        driver.dense.attend(layer, driver.random(4, 2, 8), k, v)


def faulty(backend: Backend, config: ClientConfig = PATIENT) -> tuple[Faults, Client]:
    faults = Faults(backend.dial)
    return faults, backend.connect(dial=faults.dial, config=config)


@pytest.mark.parametrize("spread", [1, 2])
@pytest.mark.parametrize("what", ["request", "answer"])
@pytest.mark.parametrize("verb", VERBS)
def test_what_is_lost_is_repeated(start: Start, verb: str, what: str, spread: int) -> None:
    """A lost request or answer, at each worker in turn, is repeated with the same bytes."""
    faults, client = faulty(start(num_workers=2))
    for after in range(2 * spread):
        driver = Driver.open(client, page_size=4, spread=spread)
        driver.step(11)
        before = len(faults.sent(verb))
        faults.lose(verb, what, times=2, after=after)
        VERBS[verb](driver)
        sent = faults.sent(verb)[before:]
        assert len(sent) - len(set(sent)) in (0, 2), "repeats send the same bytes"
        faults.forget()
        if not driver.session.closed:
            driver.session.roll_back()
            if verb == "Attend":
                driver.pop(keep=11)
            driver.step(2)
            driver.check_stored()


@pytest.mark.parametrize("verb", ["Allocate", "Attach"])
@pytest.mark.parametrize("what", ["request", "answer"])
def test_opening_is_repeated(start: Start, verb: str, what: str) -> None:
    """Opening and attaching over a bad network give one session."""
    backend = start()
    faults, client = faulty(backend)
    faults.lose(verb, what, times=2)
    session = client.open(num_rows=1)
    if verb == "Attach":
        session = client.attach(session.detach())
    assert backend.num_sessions() == 1
    session.reset()
    assert len(faults.sent(verb)) == 3


def test_a_session_that_nobody_knows_of(start: Start) -> None:
    """If no answer to Allocate ever comes, what it may have opened is released."""
    backend = start()
    faults, client = faulty(backend)
    faults.lose("Allocate", "answer", times=10_000)
    with pytest.raises(Unavailable):
        backend.connect(dial=faults.dial, config=IMPATIENT).open(num_rows=1)
    faults.forget()
    client.close()
    backend.clients[-1].close()  # it waits no longer than for a call of its
    eventually(lambda: backend.num_sessions() == 0)


def test_what_nobody_knows_of_is_released_at_once(start: Start) -> None:
    """Not only when its client closes, which may be used for days."""
    backend = start()
    faults = Faults(backend.dial)
    client = backend.connect(dial=faults.dial, config=IMPATIENT)
    kept = client.open(num_rows=1)
    faults.lose("Allocate", "answer")
    with pytest.raises(Unavailable):
        client.open(num_rows=1)
    eventually(lambda: backend.num_sessions() == 1)
    assert len(faults.sent("Release")) == 1
    kept.release()


def test_only_the_unanswered_are_repeated(start: Start) -> None:
    """Of a call to two workers, the one that was answered is not sent again."""
    faults, client = faulty(start(num_workers=2))
    driver = Driver.open(client, page_size=4, spread=2, num_layers=1)
    driver.step(11)
    first, second = (extent.address for extent in driver.session._mirror.extents)
    faults.log.clear()
    faults.lose("Attend", "answer", after=1)
    driver.step()
    assert [address for address, verb, _ in faults.log if verb == "Attend"] == [
        first,
        second,
        second,
    ]


@pytest.mark.parametrize("verb", ["Pop", "Select", "Reset"])
def test_a_half_done_change_is_finished(start: Start, verb: str) -> None:
    """A change that one worker has and the other may not is rolled forward before all else."""
    backend = start(num_workers=2)
    faults = Faults(backend.dial)
    driver = Driver.open(backend.connect(dial=faults.dial, config=IMPATIENT), page_size=4, spread=2)
    driver.step(11)
    # Both check it, the first one gets it, then the second cannot be reached in time.
    faults.lose(verb, "request", times=10_000, after=3)
    change = {
        "Pop": lambda target: target.pop(keep=[3, 10]),
        "Select": lambda target: target.select([1, 0]),
        "Reset": lambda target: target.reset(),
    }[verb]
    with pytest.raises(WorkerLost):
        change(driver.session)
    with pytest.raises(WorkerLost):
        driver.session.attend(0, *driver.tokens(1))
    faults.forget()
    change(driver.dense)
    driver.step(2)
    driver.check_stored()


def test_a_change_that_one_refuses_is_made_nowhere(start: Start) -> None:
    """All workers check a change before the first one gets it."""
    backend = start(num_workers=2)
    driver = Driver.open(backend.connect(), page_size=4, spread=2, windows=[3, 3])
    driver.step(11, windows=[3, 3])
    for _ in range(6):
        driver.step(windows=[3, 3])
    epoch = driver.session.epoch
    with pytest.raises(Exception, match="evicted"):
        driver.session.pop(keep=10)
    assert driver.session.epoch == epoch
    driver.step(windows=[3, 3])


def test_an_attend_of_unknown_outcome(start: Start) -> None:
    """It may be repeated; or the step is rolled back, whatever the worker has stored of it."""
    for what, repeat in itertools.product(["request", "answer"], [True, False]):
        backend = start()
        faults = Faults(backend.dial)
        client = backend.connect(dial=faults.dial, config=IMPATIENT)
        driver = Driver.open(client, page_size=4)
        driver.step(5)
        driver.step(layers=[0])
        tokens = driver.tokens(1)
        faults.lose("Attend", what, times=10_000)
        with pytest.raises(WorkerLost):
            driver.session.attend(1, *tokens)
        faults.forget()
        if repeat:
            driver.attend(1, *tokens)
        else:
            driver.session.roll_back()
            driver.dense.pop(keep=5)
        driver.step(2)
        driver.check_stored()


def test_a_first_attend_of_unknown_outcome(start: Start) -> None:
    """The very first call of a session may be lost too."""
    for what in ("request", "answer"):
        backend = start()
        faults = Faults(backend.dial)
        client = backend.connect(dial=faults.dial, config=IMPATIENT)
        driver = Driver.open(client, page_size=4)
        padding = np.array([[True] * 2 + [False] * 3, [False] * 5])
        faults.lose("Attend", what, times=10_000)
        with pytest.raises(WorkerLost):
            driver.session.attend(0, *driver.tokens(5), padding=padding)
        faults.forget()
        driver.session.roll_back()
        driver.step(5)
        driver.check_stored()


@pytest.mark.parametrize("restarted", [True, False], ids=["restarted", "dead"])
def test_a_dead_worker(start: Start, restarted: bool) -> None:
    """Its sessions are told from where they are lost, and go on from there on another one."""
    backend = start(num_workers=2)
    client = backend.connect(config=QUICK)
    driver = Driver.open(client, page_size=4)
    driver.step(9)
    (stats,) = driver.session.page_stats()
    index = backend.index_of(stats.worker_id)
    backend.kill(index)
    if restarted:
        backend.restart(index)
    for call in (
        lambda: driver.session.attend(0, *driver.tokens(1)),
        lambda: driver.session.read(0),
        lambda: driver.session.select([0]),
        lambda: driver.session.pop(keep=2),
    ):
        with pytest.raises(PagesLost) as failure:
            call()
        assert failure.value.metadata["from_position"] == "0"
    driver.pop(keep=0)
    assert driver.session.lengths(0) == (0, 0)
    driver.step(5)
    driver.step()
    driver.check_stored()
    if not restarted:
        backend.restart(index)


def test_a_worker_that_the_manager_knows_to_be_dead(start: Start) -> None:
    """Its sessions need not wait until the connection has been silent for long."""
    backend = start(num_workers=2)
    client = backend.connect(config=ClientConfig(timeout_s=30.0, detection_s=25.0))
    driver = Driver.open(client, page_size=4)
    driver.step(9)
    (stats,) = driver.session.page_stats()
    index = backend.index_of(stats.worker_id)
    backend.kill(index)
    backend.bury(index)
    started = backend.clock.monotonic()
    with pytest.raises(PagesLost):
        driver.session.attend(0, *driver.tokens(1))
    assert backend.clock.monotonic() - started < 5.0
    driver.pop(keep=0)
    driver.step(3)
    driver.check_stored()
    backend.restart(index)


@pytest.mark.parametrize("dead", [0, 1])
def test_one_of_two_dead_workers(start: Start, dead: int) -> None:
    """What the other one holds below stays; what lies above is fed again."""
    backend = start(num_workers=2)
    client = backend.connect(config=QUICK)
    driver = Driver.open(client, page_size=4, spread=2)
    driver.step(13)
    others = [Driver.open(client, page_size=4, seed=seed) for seed in range(4)]
    for other in others:
        other.step(3)
    extents = driver.session._mirror.extents
    border = [0, extents[1].starts[0]][dead]
    index = backend.index_of(extents[dead].worker_id)
    backend.kill(index)
    with pytest.raises(PagesLost) as failure:
        driver.session.attend(0, *driver.tokens(1))
    assert int(failure.value.metadata["from_position"]) == border
    if border:
        with pytest.raises(PagesLost):
            driver.pop(keep=border + 1)
    driver.pop(keep=border)
    driver.step(5)
    driver.step()
    driver.check_stored()
    for other in others:  # those on the other worker have seen nothing
        if other.session._mirror.extents[0].worker_id != f"worker-{index}":
            other.step()
    backend.restart(index)


@pytest.mark.parametrize("dead", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)], ids=str)
def test_roll_back_after_a_loss(start: Start, dead: tuple[int, ...]) -> None:
    """One call says how much is left of each row, and the rest is fed again, elsewhere."""
    backend = start(num_workers=6 if len(dead) == 3 else 3)
    client = backend.connect(config=QUICK)
    driver = Driver.open(client, num_rows=3, page_size=4, spread=3)
    driver.ragged_step([12, 5, 11])
    extents = driver.session._mirror.extents
    epoch, left = driver.session.epoch, extents[dead[0]].starts
    indices = [backend.index_of(extents[one].worker_id) for one in dead]
    for index in indices:
        backend.kill(index)
    with pytest.raises(PagesLost):
        driver.session.attend(0, *driver.tokens(1))
    assert driver.session.roll_back() == driver.session.lengths(0) == left
    assert driver.session.epoch > epoch or not any(left)
    assert driver.session.roll_back() == left, "again is no error"
    driver.dense.pop(keep=left)
    driver.ragged_step([12 - left[0], 5 - left[1], 11 - left[2]])
    driver.step()
    driver.check_stored()
    for index in indices:
        backend.restart(index)


def test_a_refusal_after_a_lost_answer_proves_nothing(start: Start) -> None:
    """A change that may be made is made once, also if its repetition is turned away at the door."""
    for carried_out in (False, True):
        backend = start()
        failing = Failing(backend.dial)
        driver = Driver.open(backend.connect(dial=failing.dial), page_size=4)
        driver.step(6)
        failing.fail("Select", DeadlineExceeded, carried_out=carried_out)
        with pytest.raises(DeadlineExceeded):
            driver.session.select([1, 1, 0])
        failing.fail("Select", QuotaExceeded, carried_out=False)
        with pytest.raises(QuotaExceeded):
            driver.session.read(0)
        if carried_out:
            driver.dense.select([1, 1, 0])
        driver.check_stored()
        driver.step(2)
        driver.session.release()


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_attaching_after_a_loss(start: Start, dead: int) -> None:
    """Who takes over what is left is told so by every call, until it has rolled back."""
    backend = start(num_workers=3)
    patient = replace(QUICK, timeout_s=15.0)
    driver = Driver.open(backend.connect(config=patient), page_size=4, spread=3)
    driver.step(12)
    extents = driver.session._mirror.extents
    left = extents[dead].starts
    index = backend.index_of(extents[dead].worker_id)
    backend.kill(index)
    backend.bury(index)
    for _ in range(2):  # it may have to be done again
        driver.session = backend.connect(config=patient).attach(driver.session.detach())
        for call in (
            lambda: driver.session.attend(0, *driver.tokens(1)),
            lambda: driver.session.read(0, 0, 1),
            lambda: driver.session.fork(),
        ):
            with pytest.raises(PagesLost) as failure:
                call()
            assert failure.value.metadata["from_position"] == str(left[0])
    assert driver.session.roll_back() == left
    driver.dense.pop(keep=left)
    driver.step(12 - left[0])
    driver.step()
    driver.check_stored()
    heir = backend.connect(config=QUICK).attach(driver.session.id)
    assert heir.lengths(0) == (13, 13), "what was lost is forgotten"
    heir.release()
    backend.restart(index)


def test_another_loss_while_rolling_back(start: Start) -> None:
    """A worker that dies while the cut is made takes along what it holds, and no more is said to
    be left than is."""
    backend = start(num_workers=3)
    died: list[int] = []

    class Deadly(Faults):
        """Lets a worker die as it is about to be cut."""

        def carry(self, address: str, method: str, request: Any, *rest: Any) -> Any:
            if method == "Pop" and not request.check_only and address == second.address:
                died.append(backend.index_of(second.worker_id))
                backend.kill(died[-1])
            return super().carry(address, method, request, *rest)

    client = backend.connect(dial=Deadly(backend.dial).dial, config=QUICK)
    driver = Driver.open(client, page_size=4, spread=3)
    driver.step(12)
    second, third = driver.session._mirror.extents[1:]
    gone = backend.index_of(third.worker_id)
    backend.kill(gone)
    with pytest.raises(PagesLost) as failure:
        driver.session.attend(0, *driver.tokens(1))
    assert failure.value.metadata["from_position"] == "8"
    assert driver.session.roll_back() == (4, 4)
    driver.dense.pop(keep=4)
    driver.step(9)
    driver.check_stored()
    for index in (gone, died[0]):
        backend.restart(index)


def test_growing_after_a_loss(start: Start) -> None:
    """A session that was cut to what is left finds room again, whatever the manager knew of it."""
    memory = 24 * 512
    backend = start(num_workers=3, memory_bytes=memory)
    layers = [LayerGeometry(2, 8, 8, DType.FLOAT32)] * 2
    driver = Driver.open(backend.connect(config=QUICK), page_size=4, spread=2, layers=layers)
    driver.step(13)
    index = backend.index_of(driver.session._mirror.extents[1].worker_id)
    backend.kill(index)
    with pytest.raises(PagesLost):
        driver.session.attend(0, *driver.tokens(1))
    driver.pop(keep=8)
    backend.restart(index)
    while len(driver.session.page_stats()) == 1:
        driver.step()
    driver.step(2)
    driver.check_stored()


def test_a_reset_after_a_loss(start: Start) -> None:
    """Who does not want to resume begins anew."""
    backend = start(num_workers=2)
    client = backend.connect(config=QUICK)
    driver = Driver.open(client, page_size=4, spread=2)
    driver.step(13)
    index = backend.index_of(driver.session._mirror.extents[1].worker_id)
    backend.kill(index)
    with pytest.raises(PagesLost):
        driver.session.attend(0, *driver.tokens(1))
    driver.reset()
    driver.step(4)
    driver.step()
    backend.restart(index)


def test_a_release_after_a_death(start: Start) -> None:
    """What the others hold is freed; nobody minds the dead."""
    backend = start(num_workers=2)
    driver = Driver.open(backend.connect(config=QUICK), page_size=4, spread=2)
    driver.step(13)
    index = backend.index_of(driver.session._mirror.extents[0].worker_id)
    backend.kill(index)
    driver.session.release()
    assert backend.workers[1 - index].stats().num_sessions == 0
    backend.restart(index)


def test_a_cut_that_heals(start: Start) -> None:
    """A worker that is away for less than the detection time has never been away."""
    backend = start()
    faults = Faults(backend.dial)
    config = ClientConfig(
        timeout_s=5.0, detection_s=4.0, retry=RetryPolicy(first_delay_s=0.01, max_delay_s=0.01)
    )
    client = backend.connect(dial=faults.dial, config=config)
    driver = Driver.open(client, page_size=4)
    driver.step(5)
    faults.lose("Attend", "request", times=5)
    faults.lose("Attend", "answer", times=5)
    driver.step()
    driver.check_stored()


class Late(Faults):
    """Lets an Attend take too long: it arrives when it is told to."""

    late: Callable[[], Any] | None = None
    holding = False

    def carry(self, address: str, method: str, request: Any, *rest: Any) -> Any:
        if method == "Attend" and self.holding:
            carry = super().carry
            self.holding = False
            self.late = lambda: carry(address, method, request, *rest)
            raise DeadlineExceeded("the call is late")
        return super().carry(address, method, request, *rest)


@pytest.mark.parametrize("change", ["roll_back", "pop", "reset"])
@pytest.mark.parametrize("layer", [0, 1])
def test_an_attend_that_arrives_late(start: Start, change: str, layer: int) -> None:
    """After what was done instead it changes nothing, however it was answered before."""
    backend = start()
    late = Late(backend.dial)
    driver = Driver.open(backend.connect(dial=late.dial, config=QUICK), page_size=4)
    driver.step(5)
    if layer:
        driver.step(2, layers=[0])
        driver.dense.pop(keep=5)
    late.holding = True
    with pytest.raises(DeadlineExceeded):
        driver.session.attend(layer, *driver.tokens(2))
    if change == "pop":
        driver.session.pop(keep=5)
    else:
        getattr(driver.session, change)()
    if change == "reset":
        driver.dense.reset()
    assert late.late is not None
    with pytest.raises(StaleEpoch):
        late.late()
    driver.step(2)
    driver.step()
    driver.check_stored()


def test_a_cut_longer_than_the_detection_time(start: Start) -> None:
    """A worker that the manager hears is not lost because no way leads to it for a while."""
    backend = start()
    faults, client = faulty(backend, QUICK)
    driver = Driver.open(client, page_size=4)
    driver.step(5)
    started = backend.clock.monotonic()
    faults.lose("Attend", "request", times=60)
    driver.step()
    assert backend.clock.monotonic() - started > 2 * QUICK.detection_s
    driver.check_stored()


@pytest.mark.parametrize("lone", [False, True], ids=["manager", "lone"])
def test_broken_connections(start: Start, lone: bool) -> None:
    """Where only the old connection is broken, a new one takes its place, and nothing is lost."""
    backend = start()
    faults = Faults(backend.dial)
    config = replace(QUICK, detection_s=0.8)  # a quarter of it is for the new connection
    client = backend.connect(dial=faults.dial, config=config, lone=lone)
    driver = Driver.open(client, page_size=4)
    driver.step(5)
    for _ in range(2):
        faults.break_connections()
        driver.step()
    driver.check_stored()


def test_the_manager_may_be_away(start: Start) -> None:
    """Decoding, forks and changes go on without the manager."""
    backend = start()
    faults, client = faulty(backend)
    driver = Driver.open(client, page_size=4)
    faults.cut(backend.front)
    driver.step(5)
    child = driver.fork()
    child.step()
    driver.pop(2)
    driver.select([1, 0])
    driver.step()
    driver.check_stored()
    for one in (child, driver):
        one.session.release()
    assert backend.num_sessions() == 0


def test_stale_holders_are_told_by_the_first_call(start: Start) -> None:
    """Over several workers too."""
    backend = start(num_workers=2)
    driver = Driver.open(backend.connect(), page_size=4, spread=2)
    driver.step(11)
    holder = backend.connect().attach(driver.session.id)
    with pytest.raises(StaleEpoch):
        driver.session.attend(0, *driver.tokens(1))
    driver.session.release()
    assert holder.read(0)[0].shape == (2, 2, 11, 8)
