"""Sessions on several workers: the first tokens shared out, and tails that are full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvservice_client import Client, DType, InvalidRequest, LayerGeometry, OutOfPages
from kvservice_client._room import find_room
from tests.backends import Backend
from tests.contract.conftest import Start
from tests.driving import Driver, close

# 2 KV heads of 8 + 8 float32: 128 bytes a token and layer, 512 a page of 4 tokens.
PAGE_BYTES = 512
LAYERS = [LayerGeometry(2, 8, 8, DType.FLOAT32)] * 2


@pytest.fixture
def two(start: Start) -> Client:
    """A client of a manager with two workers."""
    return start(num_workers=2).connect()


def num_workers(driver: Driver) -> int:
    return len(driver.session.page_stats())


def exhaust(call: Callable[[], object]) -> None:
    """Call again and again, until it raises."""
    while True:
        call()


def fill(driver: Driver) -> None:
    """Feed tokens until there is no room for more; the driver stands before the refused step."""

    def feed() -> None:
        tokens = driver.tokens(1)
        out = driver.session.attend(0, *tokens)
        close(out, driver.dense.attend(0, *tokens))
        driver.step(layers=[1])

    with pytest.raises(OutOfPages):
        exhaust(feed)


@pytest.mark.parametrize("count", [1, 4, 5, 8, 11, 30])
def test_spread_equals_one_worker(two: Client, count: int) -> None:
    """A prompt of any length, shared out, gives what one worker gives."""
    spread, alone = (Driver.open(two, spread=spread, page_size=4) for spread in (2, 1))
    for tokens in (count, 1, 3):
        outs = [driver.step(tokens) for driver in (spread, alone)]
        for one, other in zip(*outs, strict=True):
            close(one, other.astype(np.float64), tolerance=2e-6)
    assert num_workers(spread) == (2 if count > 4 else 1)
    assert num_workers(alone) == 1
    spread.check_stored()


def test_spread_over_three(start: Start) -> None:
    """Parts are even, page by page, and the last one goes on."""
    driver = Driver.open(start(num_workers=3).connect(), spread=3, page_size=4)
    driver.step(20)
    for _ in range(6):
        driver.step()
    assert num_workers(driver) == 3
    driver.check_stored()


@pytest.mark.parametrize(
    "options",
    [
        {"window": 5},
        {"mask": "full"},
        {"mask": "chunk", "chunk": 6},
        {"softcap": 3.0, "scale": 0.7},
        {"sinks": np.array([0.5, -1.0, 2.0, 0.0], np.float32)},
    ],
    ids=["window", "full", "chunk", "scores", "sinks"],
)
def test_spread_with(two: Client, options: dict[str, Any]) -> None:
    """Masks and scores are the same over several workers, also with padding in two of them."""
    driver = Driver.open(two, num_rows=3, spread=2, page_size=4)
    padding = np.zeros((3, 14), np.bool_)
    padding[0, :3] = padding[1, :10] = padding[2, 6:9] = True
    driver.step(14, padding=padding, **options)
    for count in (1, 2, 1):
        driver.step(count, **options)


def test_spread_with_arrays(two: Client) -> None:
    """Mask arrays and bias reach over all workers."""
    driver = Driver.open(two, spread=2, page_size=4)
    for count, length in ((11, 11), (1, 12), (3, 15)):
        seen = driver.rng.random((2, 1, count, length)) < 0.7
        bias = driver.rng.standard_normal((1, 4, count, length)).astype(np.float32)
        driver.step(count, mask=seen, bias=bias)


def test_spread_ragged(two: Client) -> None:
    """Rows of different lengths are cut at the same offset; short ones have nothing behind it."""
    driver = Driver.open(two, num_rows=3, spread=2, page_size=4)
    driver.ragged_step([12, 3, 9])
    driver.ragged_step([1, 1, 0])
    driver.step(2)
    driver.check_stored()
    driver.select([1, 1, 2, 0])
    driver.step()
    driver.pop(keep=[4, 2, 9, 9])
    driver.step(3)
    driver.check_stored()


def test_spread_queries_alone(two: Client) -> None:
    """Attending without new tokens asks all workers."""
    driver = Driver.open(two, spread=2, page_size=4)
    driver.step(11)
    driver.query(0, 2)
    driver.query(1, 1, query_positions=[3, 9])
    driver.query(0, 3, mask="full")
    driver.step()


def test_spread_of_windowed_layers(two: Client) -> None:
    """Eviction goes on over the workers' border."""
    windows = [5, None]
    driver = Driver.open(two, spread=2, page_size=4, windows=windows)
    driver.step(15, windows=windows)
    for _ in range(14):
        driver.step(windows=windows)
    driver.pop(0)
    driver.step(4, windows=windows)


def test_writes_evict_on_all_workers(start: Start) -> None:
    """A worker that gets no more tokens frees what has left the windows all the same."""
    backend = start(num_workers=2)
    driver = Driver.open(backend.connect(), spread=2, page_size=4, windows=[6, 6])
    driver.step(24, windows=[6, 6])
    assert all(worker.stats().pools[0].used_pages for worker in backend.workers)
    for length in range(24, 36):
        for layer in range(2):
            q, k, v = driver.tokens(1)
            driver.session.write(layer, k, v, queries_from=length)
            driver.dense.attend(layer, q, k, v, window=6)
    used = [sum(pool.used_pages for pool in worker.stats().pools) for worker in backend.workers]
    assert min(used) == 0
    assert max(used) <= 2 * 3
    driver.step(windows=[6, 6])


def test_spread_narrow_dtypes(two: Client) -> None:
    """Partials are put together in float32 and rounded once."""
    session = two.open(num_rows=1, spread=2, page_size=4)
    driver = Driver(session, num_layers=1)
    q, k, v = (array.astype(np.float16) for array in driver.tokens(11))
    out = session.attend(0, q, k, v)
    assert out.dtype == np.float16
    close(out, driver.dense.attend(0, q, k, v), tolerance=2e-3)


def test_a_full_tail_goes_on_elsewhere(start: Start) -> None:
    """When the worker has no page left, new tokens go to the other one, and all are attended."""
    backend = start(num_workers=2, memory_bytes=24 * PAGE_BYTES)
    client = backend.connect()
    driver = Driver.open(client, layers=LAYERS, page_size=4)
    padding = np.array([[True] * 3 + [False] * 3, [False] * 6])
    driver.step(6, padding=padding, mask="chunk", chunk=7)
    while num_workers(driver) == 1:
        driver.step(mask="chunk", chunk=7)
    for count in (1, 3, 1):
        driver.step(count)
    driver.step(mask="chunk", chunk=7)
    driver.check_stored()
    driver.pop(keep=7)
    assert num_workers(driver) == 1
    driver.step()
    driver.check_stored()


def test_nobody_has_room(start: Start) -> None:
    """When all are full the step fails with nothing stored; after a pop it goes on."""
    backend = start(num_workers=2, memory_bytes=24 * PAGE_BYTES)
    driver = Driver.open(backend.connect(), layers=LAYERS, page_size=4)
    fill(driver)
    lengths = driver.dense.lengths(0)
    assert driver.session.lengths(0) == driver.session.lengths(1) == lengths
    assert num_workers(driver) == 2
    driver.check_stored()
    with pytest.raises(OutOfPages):
        driver.session.attend(0, *driver.tokens(1))
    driver.pop(10)
    for _ in range(8):
        driver.step()
    driver.check_stored()


def test_a_tail_that_a_selection_has_emptied_goes_back(start: Start) -> None:
    """Rows without tokens are all that is left: what is fed then is refused by nobody."""
    backend = start(num_workers=2)
    driver = Driver.open(backend.connect(), page_size=4, spread=2)
    driver.step(13)
    driver.pop(keep=(13, 0))
    driver.select([1, 1])
    driver.step(7)
    driver.step()
    driver.pop(keep=(3, 8))
    driver.step(9)
    driver.check_stored()


def test_a_tail_that_was_never_filled_is_cut(start: Start) -> None:
    """It has taken no token, or a selection has left it none: a cut of the rows is none of it."""
    backend = start(num_workers=2)
    driver = Driver.open(backend.connect(), page_size=4, spread=2)
    driver.step(13)
    driver.pop(keep=(13, 5))
    driver.select([1, 1])
    driver.pop(keep=(3, 4))
    driver.step(9)
    driver.check_stored()


def find_room_behind(backend: Backend, count: int) -> tuple[Driver, Driver]:
    """Return a session of 3 tokens on a worker that is full, with room for more on another one; and
    the one that fills it."""
    client = backend.connect()
    driver = Driver.open(client, num_rows=1, page_size=4, spread=2, layers=LAYERS)
    driver.step(3)
    session = driver.session
    tail = session._mirror.tail
    while True:
        kept = Driver.open(client, num_rows=1, page_size=4, layers=LAYERS)
        if kept.session._mirror.tail.worker_id == tail.worker_id:
            break
    kept.step(28)  # all that is left there
    backend.beat()
    assert find_room(session._mirror, session._links, count) is None
    assert session._mirror.tail is not tail
    return driver, kept


def test_room_that_was_found_and_not_used(start: Start) -> None:
    """A step that has found room on another worker, and was stored nowhere: the rows are cut."""
    backend = start(num_workers=2, memory_bytes=8 * 2 * PAGE_BYTES)
    driver, kept = find_room_behind(backend, 4)
    driver.pop(1)
    driver.step(2)
    driver.check_stored()
    kept.check_stored()


@pytest.mark.parametrize("counts", [(4,), (1, 3), (2, 1, 1)])
def test_room_that_was_found_is_there(start: Start, counts: tuple[int, ...]) -> None:
    """On a worker that got none of a short prompt, though the next tokens begin in the middle of a
    page: whoever else comes, and in however many steps they are fed."""
    backend = start(num_workers=2, memory_bytes=8 * 2 * PAGE_BYTES)
    driver, kept = find_room_behind(backend, sum(counts))
    other = Driver.open(backend.connect(), num_rows=1, page_size=4, layers=LAYERS)
    with pytest.raises(OutOfPages):
        exhaust(other.step)
    for count in counts:
        driver.step(count)
    driver.check_stored()
    kept.check_stored()


def test_a_tail_that_has_gone_back_grows_again(start: Start) -> None:
    """After pops, a session finds the second worker's room again, as often as it needs it."""
    backend = start(num_workers=2, memory_bytes=24 * PAGE_BYTES)
    driver = Driver.open(backend.connect(), layers=LAYERS, page_size=4)
    padding = np.array([[True] * 6, [False] * 6])
    driver.step(6, padding=padding)
    border = 0
    for keep in ((5, 5), (9, 2), None, (1, 6)):
        while num_workers(driver) == 1:
            border = driver.session.lengths(0)[0]
            driver.step(mask="chunk", chunk=9)
        driver.step(2)
        driver.select([1, 0])
        if keep is None:
            driver.pop(keep=border)  # exactly where the second one begins
        else:
            driver.pop(keep=keep)
        backend.beat()
        driver.step(mask="chunk", chunk=9)
        driver.check_stored()
    driver.session = backend.connect().attach(driver.session.detach())
    driver.step(3)
    driver.check_stored()


def test_a_short_prompt_of_a_spread_session_grows(start: Start) -> None:
    """Workers that got none of a short prompt are there when they are needed."""
    backend = start(num_workers=2, memory_bytes=24 * PAGE_BYTES)
    driver = Driver.open(backend.connect(), layers=LAYERS, page_size=4, spread=2)
    driver.step(3, padding=np.array([[True, True, False], [False] * 3]))
    backend.beat()
    while num_workers(driver) == 1:
        driver.step()
    for _ in range(3):  # the second worker counts chunks from the end of the first one's padding
        driver.step(mask="chunk", chunk=25)
    driver.check_stored()


def test_a_first_step_that_is_too_long(start: Start) -> None:
    """A prompt that no worker can hold fails, and the session can take a shorter one."""
    backend = start(num_workers=2, memory_bytes=24 * PAGE_BYTES)
    for spread in (1, 2):
        driver = Driver.open(backend.connect(), layers=LAYERS, page_size=4, spread=spread)
        with pytest.raises((OutOfPages, InvalidRequest)):
            driver.session.attend(0, *driver.tokens(100))
        assert driver.session.lengths(0) == (0, 0)
        driver.step(5)
        driver.step()
        driver.check_stored()
        driver.session.release()


def test_a_later_layer_without_room(start: Start) -> None:
    """A session that has not stated its layers may be refused in its first step; it rolls back."""
    backend = start(memory_bytes=40 * PAGE_BYTES)
    driver = Driver.open(backend.connect(), page_size=4, num_rows=1, num_layers=8)
    layers = iter(range(8))
    with pytest.raises(OutOfPages):
        exhaust(lambda: driver.session.attend(next(layers), *driver.tokens(8)))
    assert next(layers) > 1
    driver.session.roll_back()
    assert driver.session.lengths(0) == (0,)
    driver.num_layers = 2
    driver.step(3)
    driver.check_stored()


def test_written_tokens_go_on_elsewhere(start: Start) -> None:
    """Write finds room on another worker too."""
    backend = start(num_workers=2, memory_bytes=24 * PAGE_BYTES)
    driver = Driver.open(backend.connect(), layers=LAYERS, page_size=4)
    driver.step(4)
    while num_workers(driver) == 1:
        for layer in range(2):
            _, k, v = driver.tokens(5)
            driver.session.write(layer, k, v)
            driver.dense.attend(layer, driver.random(4, 5, 8), k, v)
    driver.step()
    driver.check_stored()


def test_reservations(start: Start) -> None:
    """A reservation holds, or fails at once."""
    client = start(memory_bytes=24 * PAGE_BYTES).connect()
    kept = Driver.open(client, layers=LAYERS, page_size=4, reserve_tokens=12)
    with pytest.raises(OutOfPages):
        client.open(num_rows=2, layers=LAYERS, page_size=4, reserve_tokens=16)
    other = Driver.open(client, layers=LAYERS, page_size=4)
    with pytest.raises(OutOfPages):
        other.session.attend(0, *other.tokens(24))
    for _ in range(12):
        kept.step()


def test_a_reservation_over_several_workers_is_the_tails(start: Start) -> None:
    """Until the first tokens any may become the tail; then the others keep what they hold, and
    the room is promised again where the tail comes back to."""
    backend = start(num_workers=2, memory_bytes=64 * PAGE_BYTES)
    driver = Driver.open(
        backend.connect(), layers=LAYERS, page_size=4, spread=2, num_rows=1, reserve_tokens=32
    )

    def pages(reserved: bool) -> list[int]:
        return [
            sum(pool.reserved_pages if reserved else pool.used_pages for pool in stats.pools)
            for stats in driver.session.page_stats()
        ]

    assert pages(reserved=True) == [8, 8]
    driver.step(16)
    assert pages(reserved=False) == [2, 2]
    assert pages(reserved=True) == [0, 4]
    driver.pop(keep=8)
    assert pages(reserved=True) == [6]
    driver.reset()
    assert sorted(pages(reserved=True)) == [8, 8]
    driver.step(3)
    driver.check_stored()


def test_a_lone_worker(start: Start) -> None:
    """Without a manager a client has one worker, and its bounds surface."""
    backend = start(memory_bytes=24 * PAGE_BYTES)
    client = backend.connect(lone=True)
    driver = Driver.open(client, layers=LAYERS, page_size=4)
    fill(driver)
    driver.pop(5)
    driver.step()
    assert [worker.worker_id for worker in client.list_workers()] == ["worker-0"]
    assert [info.session_id for info in client.list_sessions()] == [driver.session.id]
    child = client.fork(driver.session.id, 3)
    assert child.lengths(0) == (3, 3)
    driver.session.detach()
    driver.session = client.attach(driver.session.id)
    driver.step()
