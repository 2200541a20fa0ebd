"""Two copies of every page: whichever worker dies, decoding goes on as if it had not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvservice.clock import SystemClock
from kvservice.core.caller import ANONYMOUS
from kvservice.core.errors import Conflict, Unavailable
from kvservice.manager import moves
from kvservice.wire import convert
from kvservice_client import (
    Client,
    ClientConfig,
    DType,
    DynamicCache,
    InvalidRequest,
    LayerGeometry,
    OutOfPages,
    PagedCache,
    PagesLost,
    StaleEpoch,
    StaticCache,
    WorkerLost,
    functional,
)
from kvservice_client._extents import Extent
from kvservice_client._retry import RetryPolicy
from kvservice_client.testing import DenseSession, eventually
from kvservice_workers.long_way import LongWay
from tests.backends import FILLER, Backend, fill_up
from tests.contract.conftest import BACKENDS, Start
from tests.driving import Driver
from tests.faults import Faults

QUICK = ClientConfig(
    timeout_s=20.0,
    detection_s=0.4,
    silence_s=0.05,
    retry=RetryPolicy(first_delay_s=0.001, max_delay_s=0.02),
)
IMPATIENT = ClientConfig(timeout_s=1.5, detection_s=0.3, silence_s=0.05, retry=QUICK.retry)
LAYERS = [LayerGeometry(2, 8, 8, DType.FLOAT32)] * 2
TENANT = ANONYMOUS.tenant
PAGE_BYTES = 512  # of 4 tokens and one layer

CHANGES: dict[str, Callable[[Driver], Any]] = {
    "pop": lambda driver: driver.pop(3),
    "select": lambda driver: driver.select([1, 1, 0]),
    "reset": lambda driver: driver.reset(),
    "fork": lambda driver: driver.fork().check_stored(),
    "read": lambda driver: driver.check_stored(),
    "write": lambda driver: write(driver),
    "query": lambda driver: driver.query(0),
    "roll_back": lambda driver: driver.session.roll_back(),
}


@pytest.fixture(params=["embedded", "lane"])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts services, in this process and behind gRPC with lanes."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(BACKENDS[request.param](**options))


@pytest.fixture
def start_here() -> Iterator[Start]:
    """Starts services in this process."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(BACKENDS["embedded"](**options))


def write(driver: Driver) -> None:
    for layer in range(2):
        _, k, v = driver.tokens(2)
        driver.session.write(layer, k, v)
        driver.dense.attend(layer, driver.random(4, 2, 8), k, v)


def copies(driver: Driver) -> list[list[Extent]]:
    """Return the copies of each part of a session, the one that is asked first."""
    return [list(extent.copies) for extent in driver.session._mirror.extents]


def faulty(backend: Backend, config: ClientConfig = QUICK) -> tuple[Faults, Client]:
    faults = Faults(backend.dial)
    return faults, backend.connect(dial=faults.dial, config=config)


def clean_up(backend: Backend, driver: Driver) -> None:
    """Let go of a session everywhere, also where only its lease would end it."""
    driver.session.release()
    for worker in backend.workers:
        worker.leases.release(TENANT, [driver.session.id])


def check_equal(backend: Backend, driver: Driver, *, first: int = 0) -> None:
    """Assert that all copies hold the same, bit for bit, at the holder's epoch.

    Args:
        first: The first position to look at: what was evicted cannot be read.
    """
    session = driver.session
    for group in copies(driver):
        held = []
        for copy in group:
            worker = backend.workers[backend.index_of(copy.worker_id)]
            info = worker.access.get(TENANT, session.id)
            assert info.epoch == session.epoch
            assert info.extents[0].group == copy.group
            parts = [
                worker.tokens.read(TENANT, session.id, session.epoch, layer, start, max(of_layer))
                for layer, of_layer in enumerate(info.lengths)
                for start in [max(first, min(info.extents[0].starts))]
                if start < max(of_layer)
            ]
            extent = info.extents[0]
            held.append(
                (
                    info.lengths,
                    info.current_step,
                    info.padding,
                    extent.starts,
                    extent.followed_by,
                    parts,
                )
            )
        assert held.count(held[0]) == len(held)


@pytest.mark.parametrize("spread", [1, 2])
def test_two_copies_equal_one(start: Start, spread: int) -> None:
    """All that is stored and changed is so on both, and the answers are those of one."""
    backend = start(num_workers=2 * spread)
    client = backend.connect()
    driver = Driver.open(client, num_rows=3, replicas=2, spread=spread, page_size=4)
    padding = np.zeros((3, 9), np.bool_)
    padding[0, :3] = padding[1, 4:6] = True
    driver.step(9, padding=padding)
    check_equal(backend, driver)
    assert [len(group) for group in copies(driver)] == [2] * spread
    for change in CHANGES.values():
        change(driver)
        driver.step(2)
        check_equal(backend, driver)
    driver.ragged_step([2, 0, 1])
    driver.check_stored()
    check_equal(backend, driver)


def test_windows_and_masks(start: Start) -> None:
    """What leaves a window leaves it on both; arrays as masks go to the one that is asked."""
    backend = start(num_workers=2)
    windows = [5, None]
    driver = Driver.open(backend.connect(), replicas=2, page_size=4, windows=windows)
    for count in (9, 1, 1, 6, 1):
        driver.step(count, windows=windows)
    check_equal(backend, driver, first=16)
    other = Driver.open(backend.connect(), replicas=2, page_size=4)
    other.step(4)
    other.step(2, mask=other.rng.random((2, 1, 2, 6)) < 0.7)
    check_equal(backend, other)
    assert len({worker.stats().pools[0].used_pages for worker in backend.workers}) == 1


def test_later_layers_take_the_short_way(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both copies: the long way is for each worker's first layer of a step, and of a failure."""
    long_way: list[str] = []

    def attend(self: LongWay, *args: Any) -> Any:
        long_way.append(names[self])
        return original(self, *args)

    original = LongWay.attend
    backend = start(num_workers=2)
    names = {worker.long_way: worker.config.worker_id for worker in backend.workers}
    driver = Driver.open(backend.connect(config=QUICK), replicas=2, num_layers=5)
    driver.step(3)
    driver.step()
    monkeypatch.setattr(LongWay, "attend", attend)
    has_lanes = not backend.front.startswith("embedded")
    for _ in range(3):
        del long_way[:]
        driver.step()
        assert not has_lanes or sorted(long_way) == ["worker-0", "worker-1"]
    check_equal(backend, driver)
    dead = copies(driver)[0][0].worker_id
    driver.step(layers=[0, 1])
    backend.kill(backend.index_of(dead))
    driver.step(layers=[2, 3, 4])
    del long_way[:]
    driver.step()
    assert not has_lanes or len(long_way) == 1
    driver.check_stored()
    backend.restart(backend.index_of(dead))


def test_too_few_workers(start: Start) -> None:
    """Two copies need two workers for each part; otherwise nothing is opened."""
    backend = start(num_workers=3)
    client = backend.connect(config=IMPATIENT)
    with pytest.raises(Unavailable):
        client.open(num_rows=1, replicas=2, spread=2)
    with pytest.raises(InvalidRequest, match="replicas"):
        client.open(num_rows=1, replicas=3)
    client.close()
    assert backend.num_sessions() == 0


@pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("after", [0, 1, 2], ids=["step", "layer", "last"])
def test_a_copy_dies_within_a_step(start: Start, which: int, after: int) -> None:
    """Before, in the middle, or at the end of it: the step goes on, and so does the session."""
    backend = start(num_workers=2)
    driver = Driver.open(backend.connect(config=QUICK), replicas=2, page_size=4)
    driver.step(6)
    driver.step()
    survivor, dead = copies(driver)[0][1 - which], copies(driver)[0][which].worker_id
    for layer in range(2):
        if layer == after:
            backend.kill(backend.index_of(dead))
        driver.step(layers=[layer])
    if after == 2:
        backend.kill(backend.index_of(dead))
    for _ in range(3):
        driver.step()
    assert copies(driver) == [[survivor]]
    assert driver.session._mirror.misses_copies
    driver.check_stored()
    check_equal(backend, driver)
    for change in CHANGES.values():
        change(driver)
        driver.step()
    driver.check_stored()
    backend.restart(backend.index_of(dead))


@pytest.mark.parametrize("what", ["request", "answer"])
@pytest.mark.parametrize("after", range(4))
def test_an_answer_never_comes(start: Start, after: int, what: str) -> None:
    """Whichever copy has stored or has not: the other one answers the same call."""
    backend = start(num_workers=2)
    faults, client = faulty(backend)
    driver = Driver.open(client, replicas=2, page_size=4)
    driver.step(5)
    faults.lose("Attend", what, times=3, after=after)
    driver.step()
    faults.forget()
    driver.step()
    driver.check_stored()
    check_equal(backend, driver)
    clean_up(backend, driver)


@pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_is_cut_off_at_a_change(start_here: Start, change: str, which: int) -> None:
    """It stays an epoch behind, so that nobody takes it for the session when it is back."""
    backend = start_here(num_workers=2)
    faults, client = faulty(backend)
    driver = Driver.open(client, replicas=2, page_size=4)
    driver.step(6)
    cut, survivor = copies(driver)[0][which], copies(driver)[0][1 - which]
    faults.cut(cut.address)
    CHANGES[change](driver)
    driver.step()
    assert copies(driver) == [[survivor]]
    faults.heal(cut.address)
    driver.check_stored()
    backend.beat()
    other = Driver(backend.connect().attach(driver.session.id), dense=driver.dense)
    assert [copy.worker_id for copy in copies(other)[0]] == [survivor.worker_id]
    other.check_stored()
    other.step()
    with pytest.raises(StaleEpoch):
        driver.session.reset()
    clean_up(backend, other)


def test_a_copy_that_comes_back_alone(start: Start) -> None:
    """What the session has gone on without is never taken for it: all is lost, and said to be."""
    backend = start(num_workers=2)
    faults, client = faulty(backend)
    driver = Driver.open(client, replicas=2, page_size=4, num_layers=1)
    driver.step(6)
    cut, survivor = copies(driver)[0]
    faults.cut(cut.address)
    driver.step()
    backend.kill(backend.index_of(survivor.worker_id))
    backend.bury(backend.index_of(survivor.worker_id))
    with pytest.raises(PagesLost):
        backend.connect(config=QUICK).attach(driver.session.id)
    faults.heal(cut.address)
    clean_up(backend, driver)
    backend.restart(backend.index_of(survivor.worker_id))


def test_nobody_is_given_up_by_one_who_is_cut_off(start: Start) -> None:
    """A decoder that reaches neither copy waits, and goes on with both."""
    backend = start(num_workers=2)
    faults, client = faulty(backend, IMPATIENT)
    driver = Driver.open(client, replicas=2, page_size=4)
    driver.step(6)
    for _ in range(2):
        tokens = driver.tokens(1)
        for copy in copies(driver)[0]:
            faults.cut(copy.address)
        with pytest.raises(WorkerLost):
            driver.session.attend(0, *tokens)
        for copy in copies(driver)[0]:
            faults.heal(copy.address)
        driver.attend(0, *tokens)
        driver.step(layers=[1])
    assert [len(group) for group in copies(driver)] == [2]
    driver.check_stored()
    check_equal(backend, driver)


def test_one_after_the_other(start: Start) -> None:
    """When the second copy dies as well, the pages are gone; feeding them again goes on."""
    backend = start(num_workers=3)
    driver = Driver.open(backend.connect(config=QUICK), replicas=2, page_size=4)
    driver.step(6)
    first, second = copies(driver)[0]
    backend.kill(backend.index_of(first.worker_id))
    driver.step()
    backend.kill(backend.index_of(second.worker_id))
    backend.bury(backend.index_of(second.worker_id))
    with pytest.raises(PagesLost):
        driver.session.attend(0, *driver.tokens(1))
    for one in (first, second):
        backend.restart(backend.index_of(one.worker_id))
    backend.beat()
    assert driver.session.roll_back() == (0, 0)
    driver.dense = DenseSession(2)
    driver.step(3)
    driver.check_stored()


@pytest.mark.parametrize("full", [0, 1], ids=["first", "second"])
def test_only_one_copy_has_room(start: Start, full: int) -> None:
    """A step for which one of the two has no room is stored by none; on others it is by two."""
    backend = start(num_workers=4, memory_bytes=6 * 2 * PAGE_BYTES)
    client = backend.connect()
    driver = Driver.open(client, num_rows=1, replicas=2, page_size=4, layers=LAYERS)
    driver.step(4)
    index = backend.index_of(copies(driver)[0][full].worker_id)
    worker = backend.workers[index]
    fill_up(worker, LAYERS)
    driver.step(3)
    assert [len(group) for group in copies(driver)] == [2, 2]
    driver.step(2)
    driver.check_stored()
    check_equal(backend, driver)
    worker.leases.release(TENANT, [FILLER])


def test_no_room_for_two_copies(start: Start) -> None:
    """If only one copy can grow, and there are no others, nothing is stored."""
    backend = start(num_workers=2, memory_bytes=6 * 2 * PAGE_BYTES)
    driver = Driver.open(backend.connect(), num_rows=1, replicas=2, page_size=4, layers=LAYERS)
    driver.step(4)
    worker = backend.workers[backend.index_of(copies(driver)[0][1].worker_id)]
    fill_up(worker, LAYERS)
    with pytest.raises(OutOfPages):
        driver.session.attend(0, *driver.tokens(2))
    check_equal(backend, driver)
    worker.leases.release(TENANT, [FILLER])
    driver.step(2)
    driver.check_stored()
    check_equal(backend, driver)


def test_a_fork_and_a_new_holder_have_both(start: Start) -> None:
    """Who attaches to a session, or forks it by its id, has two copies of it as well."""
    backend = start(num_workers=2)
    client = backend.connect()
    driver = Driver.open(client, replicas=2, page_size=4)
    driver.step(6)
    forked = Driver(client.fork(driver.session.id), dense=driver.dense.fork())
    taken = Driver(client.attach(driver.session.id), dense=driver.dense)
    for one in (forked, taken):
        assert [len(group) for group in copies(one)] == [2]
        one.step(2)
        one.check_stored()
        check_equal(backend, one)


def test_caches_that_keep_tensors(start_here: Start) -> None:
    """The other caches take the option too: what they store outlives a worker."""
    backend = start_here(num_workers=2)
    client = backend.connect(config=QUICK)
    k, v = torch.randn(2, 1, 2, 6, 8)
    for cache in (
        DynamicCache(client=client, replicas=2),
        StaticCache(12, client=client, replicas=2),
    ):
        cache.update(k, v, 0)
        assert all(worker.stats().num_sessions for worker in backend.workers)
        backend.kill(0)
        backend.bury(0)
        cache.update(k, v, 0)
        attach = (cache.session_id, 12) if isinstance(cache, StaticCache) else (cache.session_id,)
        heir = type(cache).attach(*attach, client=client)
        stored = heir.key_cache[0][:, :, :12]
        torch.testing.assert_close(stored, torch.cat([k, k], 2))
        heir.reset()
        backend.restart(0)


def test_caches_that_attend_or_are_values(start_here: Start) -> None:
    """PagedCache and the functional form, likewise."""
    backend = start_here(num_workers=2)
    client = backend.connect(config=QUICK)
    paged = PagedCache(1, max_seq_len=32, replicas=2, client=client)
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    before = paged.attention(0, q, k, v, 0, 1.0)
    version = functional.init_kv_layer_cache(1, 2, 8, 32, torch.float32, client=client, replicas=2)
    version = functional.update_kv_layer_cache(version, k, v, 0)
    assert backend.num_sessions() == 4
    backend.kill(1)
    after = paged.attention(0, q, k, v, 4, 1.0)
    twice = [torch.cat([one, one], 2) for one in (k, v)]
    seen = torch.ones(4, 8, dtype=torch.bool).tril(4)
    wanted = scaled_dot_product_attention(q, *twice, attn_mask=seen, scale=1.0)
    torch.testing.assert_close(after, wanted)
    assert before.shape == after.shape
    torch.testing.assert_close(version.keys[:, :, :4], k)
    with pytest.raises(InvalidRequest):
        PagedCache(1, max_seq_len=32, replicas=3, client=client)
    del version
    paged.release()
    client.close()
    backend.restart(1)


def held_at(backend: Backend, session_id: str) -> list[int]:
    """Return the epochs at which workers hold a session."""
    return [
        info.epoch
        for worker in backend.workers
        for _, info in worker.list_sessions(None)
        if info.session_id == session_id
    ]


def restore(backend: Backend, driver: Driver, times: int = 1) -> None:
    """Wait until the manager has had the copy made that a session lacks.

    Args:
        times: The how many-th since its holder has heard of one.
    """
    before = driver.session.epoch

    def is_there() -> bool:
        backend.manager.look_after_moves()
        is_over = not backend.manager._moves._looked_after
        return is_over and held_at(backend, driver.session.id) == [before + times] * 2

    backend.beat()
    eventually(is_there, timeout_s=20.0)


def lose_one(backend: Backend, driver: Driver, which: int = 0) -> None:
    """Kill a worker with a copy, step on without it, and let it live again."""
    index = backend.index_of(copies(driver)[0][which].worker_id)
    backend.kill(index)
    driver.step()
    backend.restart(index)


def test_a_copy_is_made_again_and_again(start: Start) -> None:
    """Whichever worker dies, one after the other, with time to copy between."""
    backend = start(num_workers=2)
    driver = Driver.open(backend.connect(config=QUICK), num_rows=3, replicas=2, page_size=4)
    padding = np.zeros((3, 9), np.bool_)
    padding[0, :3] = padding[1, 4:6] = True
    driver.step(9, padding=padding)
    for which in (0, 1, 0):
        lose_one(backend, driver, which)
        assert [len(group) for group in copies(driver)] == [1]
        restore(backend, driver)
        driver.step()
        assert [len(group) for group in copies(driver)] == [2]
        check_equal(backend, driver)
        driver.check_stored()
    driver.step(3)
    check_equal(backend, driver)


@pytest.mark.parametrize("is_forked", [False, True])
@pytest.mark.parametrize("times", [2, 3])
def test_a_holder_that_was_idle_for_long(
    start_here: Start, times: int, is_forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody renews the lease of a copy of which the holder has not heard, and it is made again:
    the session is the holder's as before, also if others have forked it meanwhile."""
    monkeypatch.setattr(moves, "MISSING_FOR_S", 0.1)
    backend = start_here(num_workers=2)
    driver = Driver.open(backend.connect(config=QUICK), num_rows=1, replicas=2, page_size=4)
    driver.step(6)
    lose_one(backend, driver)
    source = driver.session._mirror.tail.worker_id
    other = backend.workers[1 - backend.index_of(source)]
    for time in range(times):
        restore(backend, driver, time + 1)
        if is_forked:
            backend.connect(config=QUICK).fork(driver.session.id).release()
        if time < times - 1:
            other.leases.release(TENANT, [driver.session.id])
    driver.step()
    assert [len(group) for group in copies(driver)] == [2]
    driver.pop(2)
    driver.step(3)
    check_equal(backend, driver)
    driver.check_stored()


@pytest.mark.parametrize("dies", [True, False])
def test_a_copy_that_has_come_where_one_was(
    start_here: Start, dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease was over while its holder was cut off from it, and it was made again, by a worker
    that may have died since."""
    monkeypatch.setattr(moves, "MISSING_FOR_S", 0.1)
    backend = start_here(num_workers=2)
    driver = Driver.open(backend.connect(config=QUICK), num_rows=1, replicas=2, page_size=4)
    driver.step(6)
    [[asked, other]] = copies(driver)
    backend.workers[backend.index_of(asked.worker_id)].leases.release(TENANT, [driver.session.id])
    restore(backend, driver)
    if dies:
        backend.kill(backend.index_of(other.worker_id))
    driver.step()
    if dies:
        backend.restart(backend.index_of(other.worker_id))
    restore(backend, driver)
    driver.step()
    assert [len(group) for group in copies(driver)] == [2]
    check_equal(backend, driver)
    driver.check_stored()


def test_what_a_copy_was_made_of_is_given_up(
    start_here: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder finishes a change with the copy that has come where one was, and hears of that
    only as it leaves the other one behind, which is at the same epoch: it goes on to one that
    nobody else has."""
    monkeypatch.setattr(moves, "MISSING_FOR_S", 0.1)
    backend = start_here(num_workers=2)
    faults, client = faulty(backend, replace(IMPATIENT, timeout_s=5.0))
    driver = Driver.open(client, num_rows=2, replicas=2, page_size=4)
    driver.step(6)
    [[source, anew]] = copies(driver)
    faults.lose("Select", "answer", times=1000, after=2)  # both have checked it, and one has it
    faults.lose("GetSession", "request", times=1000)
    with pytest.raises(Unavailable):
        driver.session.select([1, 1])

    def is_made_anew() -> bool:
        backend.beat()
        backend.manager.look_after_moves()
        first, *others = held_at(backend, driver.session.id)
        return first > 2 and others == [first]

    eventually(is_made_anew, timeout_s=20.0)  # for it is behind
    faults.forget()
    faults.cut(source.address)
    driver.dense.select([1, 1])  # it is made as soon as a worker answers
    driver.step()
    assert [copy.worker_id for copy in copies(driver)[0]] == [anew.worker_id]
    left = backend.workers[backend.index_of(source.worker_id)].access.get(TENANT, driver.session.id)
    assert left.epoch < driver.session.epoch
    driver.check_stored()
    faults.heal(source.address)
    clean_up(backend, driver)


@pytest.mark.parametrize("opens", [True, False], ids=["opened", "attached"])
def test_what_is_missing_is_left_behind(start_here: Start, opens: bool) -> None:
    """A session of which only one copy is told may have another one, which nobody has reached: it
    goes on at an epoch of its own before it stores anything."""
    backend = start_here(num_workers=2)
    driver = Driver.open(backend.connect(config=QUICK), num_rows=1, replicas=2, page_size=4)
    first, second = (backend.index_of(copy.worker_id) for copy in copies(driver)[0])
    if not opens:
        driver.step(6)
    session_id = driver.session.detach()
    hidden = backend.workers[second].access.get(TENANT, session_id)
    backend.bury(second)
    holder = backend.connect(config=QUICK)
    if opens:
        told = backend.workers[first].access.get(TENANT, session_id)
        session = holder._session(convert.session_to_pb(told))
    else:
        session = holder.attach(session_id)
    other = Driver(session, dense=driver.dense)
    assert len(copies(other)[0]) == 1
    other.step(2)
    assert session.epoch == hidden.epoch + (1 if opens else 2)
    other.check_stored()
    clean_up(backend, other)


@pytest.mark.parametrize("is_in_doubt", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_is_found_by_any_call(start_here: Start, change: str, is_in_doubt: bool) -> None:
    """Its holder learns of it by whatever it does next, also in the middle of a step, and where it
    first asks what is stored."""
    backend = start_here(num_workers=2)
    driver = Driver.open(backend.connect(config=QUICK), replicas=2, page_size=4)
    driver.step(6)
    lose_one(backend, driver)
    if change == "roll_back":
        driver.step(layers=[0])
    restore(backend, driver)
    if change == "roll_back":
        driver.step(layers=[1])
    driver.session._mirror.uncertain = is_in_doubt
    CHANGES[change](driver)
    driver.step()
    assert [len(group) for group in copies(driver)] == [2]
    driver.check_stored()
    check_equal(backend, driver)


@pytest.fixture
def missed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the manager make a copy as soon as it is missing."""
    monkeypatch.setattr(moves, "MISSING_FOR_S", 0.0)


@pytest.mark.usefixtures("missed_soon")
@pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_made_while_a_decoder_rests(start_here: Start, change: str, which: int) -> None:
    """Its holder learns at once of the worker that has died and of the copy made since, in
    whichever order, and goes on with the new one: that holds the session when the other dies."""
    backend = start_here(num_workers=2)
    driver = Driver.open(backend.connect(config=QUICK), replicas=2, page_size=4)
    driver.step(6)
    survivor, dead = (backend.index_of(copies(driver)[0][n].worker_id) for n in (1 - which, which))
    backend.kill(dead)
    backend.restart(dead)
    restore(backend, driver)
    CHANGES[change](driver)
    driver.step()
    assert [len(group) for group in copies(driver)] == [2]
    check_equal(backend, driver)
    backend.kill(survivor)
    driver.step()
    driver.check_stored()
    backend.restart(survivor)


@pytest.mark.usefixtures("missed_soon")
@pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_third_copy(change: str, which: int) -> None:
    """The manager takes a worker for dead that lives, and has a copy made in its place. The session
    goes on with that one, and leaves nothing where it was that might be taken for it."""
    with BACKENDS["grpc"](num_workers=3) as backend:
        driver = Driver.open(backend.connect(config=QUICK), replicas=2, page_size=4)
        driver.step(6)
        before, missed = driver.session.epoch, copies(driver)[0][which]
        backend.bury(backend.index_of(missed.worker_id))

        def is_there() -> bool:
            backend.manager.look_after_moves()
            return sorted(held_at(backend, driver.session.id)) == [before, before + 1, before + 1]

        eventually(is_there, timeout_s=20.0)
        CHANGES[change](driver)
        driver.step()
        assert len(copies(driver)[0]) == 2
        assert missed.worker_id not in [copy.worker_id for copy in copies(driver)[0]]
        assert held_at(backend, driver.session.id) == [driver.session.epoch] * 2
        check_equal(backend, driver)
        driver.check_stored()


@pytest.mark.usefixtures("missed_soon")
def test_who_forks_need_not_wait_for_the_holder(start_here: Start) -> None:
    """A copy of one part of a session was made while its holder rests: the parts are at different
    epochs, and the same session."""
    backend = start_here(num_workers=4)
    driver = Driver.open(backend.connect(config=QUICK), spread=2, replicas=2, page_size=4)
    driver.step(11)
    lost = copies(driver)[0][1]
    backend.kill(backend.index_of(lost.worker_id))
    backend.restart(backend.index_of(lost.worker_id))
    before = driver.session.epoch

    def is_there() -> bool:
        backend.beat()
        backend.manager.look_after_moves()
        return sorted(held_at(backend, driver.session.id)) == [before] * 2 + [before + 1] * 2

    eventually(is_there, timeout_s=20.0)
    other = backend.connect(config=QUICK)
    for token_count in (None, 7, 2):
        dense = driver.dense.fork()
        if token_count is not None:
            dense.pop(keep=token_count)
        child = Driver(other.fork(driver.session.id, token_count), dense=dense)
        child.check_stored()
        child.step()
        child.check_stored()
        child.session.release()
    driver.step()
    assert [len(group) for group in copies(driver)] == [2, 2]
    check_equal(backend, driver)
    driver.check_stored()


@pytest.mark.usefixtures("missed_soon")
def test_no_copy_of_what_is_being_opened(start_here: Start) -> None:
    """While a session is open in part its copies are not missing: they are about to come."""
    backend = start_here(num_workers=3)
    driver = Driver.open(backend.connect(config=QUICK), replicas=2, page_size=4)
    driver.step(3)
    key, before = (TENANT, driver.session.id), driver.session.epoch
    free = next(
        index
        for index, worker in enumerate(backend.workers)
        if worker.config.worker_id not in [copy.worker_id for copy in copies(driver)[0]]
    )
    with backend.manager._turns.take(key):
        backend.manager._directory.end(key, copies(driver)[0][0].worker_id)
        backend.manager.look_after_moves()
        assert not backend.manager._moves._under_way
        with pytest.raises(Conflict):
            backend.move(
                driver.session.id, free, source=backend.index_of(copies(driver)[0][1].worker_id)
            )
    assert held_at(backend, driver.session.id) == [before] * 2
    driver.step()
    driver.check_stored()


def test_a_copy_is_made_while_a_decoder_goes_on(start: Start) -> None:
    """On a worker that was not there before. The decoder sees nothing but its own tokens."""
    backend = start(num_workers=3)
    driver = Driver.open(backend.connect(config=QUICK), replicas=2, page_size=4)
    driver.step(40)
    dead = [backend.index_of(copies(driver)[0][0].worker_id)]
    backend.kill(dead[0])
    backend.bury(dead[0])
    deadline = SystemClock().monotonic() + 20.0
    driver.step()
    while driver.session._mirror.misses_copies:
        assert SystemClock().monotonic() < deadline, "no copy is made"
        backend.manager.look_after_moves()
        driver.step()
        if max(driver.session.lengths(0)) > 80:
            driver.pop(40)
    driver.step()
    check_equal(backend, driver)
    dead.append(backend.index_of(copies(driver)[0][0].worker_id))
    backend.kill(dead[1])
    driver.step()
    driver.check_stored()
    driver.session.release()
    for index in dead:
        backend.restart(index)
