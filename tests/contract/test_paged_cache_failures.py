"""PagedCache when the service fails: a pass is whole, or void, and the cache says which."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from kvservice_client import (
    ClientConfig,
    Conflict,
    InvalidRequest,
    OutOfOrder,
    OutOfPages,
    PagedCache,
    PagesLost,
    SessionNotFound,
    Unavailable,
    WorkerLost,
)
from kvservice_client._retry import RetryPolicy
from tests.backends import Backend
from tests.contract.conftest import Start
from tests.faults import Faults
from tests.paged import Pair

# Does not ask again, and never believes that a worker is dead.
IMPATIENT = ClientConfig(detection_s=60.0, retry=RetryPolicy(first_delay_s=1e3, max_delay_s=1e3))
# Believes it soon.
SUSPICIOUS = ClientConfig(timeout_s=10.0, detection_s=0.1, silence_s=0.05)

WINDOWS = (None, 4, None)


class Hindrance(Faults):
    """Faults that last: Attend calls without an answer, or an interrupted caller.

    Attributes:
        losing: "request" or "answer": each one of Attend is lost.
        interrupting: The next Attend is carried out, and its caller interrupted as by Ctrl-C.
    """

    losing = ""
    interrupting = False

    def carry(self, address: str, method: str, request: Message, *rest: Any) -> Any:
        if method == "Attend" and self.losing == "request":
            raise Unavailable("the request was lost")
        answer = super().carry(address, method, request, *rest)
        if method == "Attend" and self.losing == "answer":
            raise Unavailable("the answer was lost")
        if method == "Attend" and self.interrupting:
            self.interrupting = False
            raise KeyboardInterrupt
        return answer


def worker_address(faults: Faults) -> str:
    return next(address for address, method, _ in faults.log if method == "Attend")


def faulty(backend: Backend, config: ClientConfig = IMPATIENT) -> tuple[Hindrance, Pair]:
    """Return a cache of three layers with 7 tokens, and what stands between it and its worker."""
    faults = Hindrance(backend.dial)
    pair = Pair(backend.connect(dial=faults.dial, config=config), 3, windows=WINDOWS)
    pair.feed(7)
    return faults, pair


@pytest.mark.parametrize("what", ["request", "answer"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_what_is_lost_is_repeated(backend: Backend, what: str, layer: int) -> None:
    """A request or answer that the network loses is not noticed by the decoder."""
    faults = Faults(backend.dial)
    pair = Pair(backend.connect(dial=faults.dial), 3, windows=WINDOWS)
    pair.feed(7)
    faults.lose("Attend", what, after=layer)
    pair.feed(3)
    pair.feed(1)
    pair.reset()
    pair.feed(3)
    faults.lose("Pop", what)
    pair.popn(1)
    pair.feed(1)


@pytest.mark.parametrize("what", ["request", "answer"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_failed_pass_is_void(backend: Backend, what: str, layer: int) -> None:
    """If the service fails in any layer, the pass is dropped, and can be fed again.

    Although windows have let go of tokens, so that `popn` would be refused.
    """
    faults, pair = faulty(backend)
    before = pair.cache.page_stats()
    tokens = pair.draw(3)
    for earlier in range(layer):
        pair.cache.attention(earlier, *tokens, 7, pair.scale)
    faults.losing = what
    with pytest.raises(WorkerLost):
        pair.cache.attention(layer, *tokens, 7, pair.scale)
    faults.losing = ""
    assert pair.cache.seq_len() == 7
    assert pair.cache.page_stats() == before
    pair.feed(3, tokens=tokens)
    pair.feed(1)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_void_pass_is_dropped_once_there_is_an_answer(backend: Backend, layer: int) -> None:
    """With the service gone for long, lengths are told at once, and the next call settles it."""
    faults, pair = faulty(backend)
    tokens = pair.draw(3)
    for earlier in range(layer):
        pair.cache.attention(earlier, *tokens, 7, pair.scale)
    faults.cut(worker_address(faults))
    with pytest.raises(WorkerLost):
        pair.cache.attention(layer, *tokens, 7, pair.scale)
    assert pair.cache.seq_len() == 7
    assert pair.cache.pages_used() == 2
    with pytest.raises(WorkerLost):
        pair.cache.attention(0, *tokens, 7, pair.scale)
    with pytest.raises(WorkerLost):
        pair.cache.roll_back()
    assert pair.cache.seq_len() == 7
    faults.heal(worker_address(faults))
    pair.feed(3, tokens=tokens)
    pair.feed(1)


def test_an_uncertain_pop_counts_as_made(backend: Backend) -> None:
    """A pop without an answer is finished before anything else is done."""
    faults = Faults(backend.dial)
    pair = Pair(backend.connect(dial=faults.dial, config=IMPATIENT), 3, windows=(None, 40, None))
    pair.feed(7)
    faults.cut(worker_address(faults))
    with pytest.raises(WorkerLost):
        pair.cache.popn(3)
    assert pair.cache.seq_len() == 4
    pair.plain.popn([3])
    pair.check()
    with pytest.raises(WorkerLost):
        pair.cache.popn(1)
    pair.plain.popn([1])
    faults.heal(worker_address(faults))
    pair.check()
    pair.feed(2)
    pair.popn(4)
    pair.feed(1)


def test_an_uncertain_reset_counts_as_made(backend: Backend) -> None:
    """So is a reset."""
    faults, pair = faulty(backend)
    faults.cut(worker_address(faults))
    with pytest.raises(WorkerLost):
        pair.cache.reset()
    assert pair.cache.seq_len() == 0
    pair.plain.reset()
    pair.check()
    faults.heal(worker_address(faults))
    pair.feed(5)
    assert pair.popn(1) == (0,)


def test_reset_of_a_void_pass(backend: Backend) -> None:
    """A reset needs no settling first."""
    faults, pair = faulty(backend)
    faults.cut(worker_address(faults))
    with pytest.raises(WorkerLost):
        pair.cache.attention(0, *pair.draw(3), 7, pair.scale)
    faults.heal(worker_address(faults))
    pair.reset()
    pair.feed(5)


def test_reset_of_a_void_first_pass(backend: Backend) -> None:
    """Although the cache is empty, the service may hold something."""
    faults = Hindrance(backend.dial)
    pair = Pair(backend.connect(dial=faults.dial, config=IMPATIENT))
    faults.losing = "answer"
    faults.lose("GetSession", "request")  # with which it is found out what is stored
    with pytest.raises(WorkerLost):
        pair.cache.attention(0, *pair.draw(3), 0, pair.scale)
    faults.losing = ""
    assert backend.used_pages() == 1
    pair.reset()
    assert backend.used_pages() == 0
    pair.feed(5)


@pytest.mark.parametrize("layer", [0, 2])
def test_an_interrupted_pass_is_void(backend: Backend, layer: int) -> None:
    """Ctrl-C in the middle of a call: what it may have stored is dropped before the next."""
    faults, pair = faulty(backend)
    tokens = pair.draw(3)
    for earlier in range(layer):
        pair.cache.attention(earlier, *tokens, 7, pair.scale)
    faults.interrupting = True
    with pytest.raises(KeyboardInterrupt):
        pair.cache.attention(layer, *tokens, 7, pair.scale)
    assert pair.cache.seq_len() == 7
    pair.check()
    pair.feed(3, tokens=tokens)
    pair.feed(1)


def test_no_room(start: Start) -> None:
    """Without pages a pass is refused whole, and goes once there is room again."""
    # 256 bytes a token and layer, so 1 KiB a page; two layers.
    backend = start(memory_bytes=40_000)
    client = backend.connect()
    pair, other = (Pair(client, max_seq_len=200, windows=[None, 4], seed=i) for i in (1, 2))
    pair.feed(9)
    other.feed(30)
    with pytest.raises(OutOfPages):
        pair.cache.attention(0, *pair.draw(150), 9, pair.scale)
    pair.check()
    other.cache.release()
    pair.feed(30)


def test_no_room_in_a_later_layer_of_the_first_pass(start: Start) -> None:
    """The one pass that can find it out late is dropped like any other."""
    backend = start(memory_bytes=24_000)
    pair = Pair(backend.connect(), 8, max_seq_len=200)
    tokens = pair.draw(16)

    def feed() -> None:
        for layer in range(8):
            pair.cache.attention(layer, *tokens, 0, pair.scale)

    with pytest.raises(OutOfPages):
        feed()
    assert pair.cache.seq_len() == 0
    assert pair.cache.pages_used() == 0


def test_a_dead_worker(backend: Backend) -> None:
    """With the worker the tokens are gone: PagesLost says so until the cache is reset."""
    pair = Pair(backend.connect(config=SUSPICIOUS))
    pair.feed(7)
    backend.kill(0)
    with pytest.raises(PagesLost) as caught:
        pair.cache.attention(0, *pair.draw(1), 7, pair.scale)
    assert caught.value.metadata["from_position"] == "0"
    with pytest.raises(PagesLost):
        pair.cache.attention(0, *pair.draw(1), 7, pair.scale)
    assert pair.cache.seq_len() == 7
    backend.restart(0)
    pair.reset()
    pair.feed(5)


def test_pop_to_what_a_dead_worker_has_left(backend: Backend) -> None:
    """Without windows, a pop to `from_position` does what a reset does."""
    pair = Pair(backend.connect(config=SUSPICIOUS))
    pair.feed(7)
    backend.kill(0)
    with pytest.raises(PagesLost) as caught:
        pair.cache.attention(0, *pair.draw(1), 7, pair.scale)
    backend.restart(0)
    assert pair.popn(7 - int(caught.value.metadata["from_position"])) == (7,)
    pair.feed(5)


def test_a_worker_that_cannot_be_reached(backend: Backend) -> None:
    """One that lives, but that no way leads to, has lost nothing: the cache goes on with it."""
    faults, pair = faulty(backend, replace(SUSPICIOUS, timeout_s=1.5))
    faults.cut(worker_address(faults))
    with pytest.raises(WorkerLost):
        pair.cache.attention(0, *pair.draw(1), 7, pair.scale)
    faults.heal(worker_address(faults))
    pair.check()
    pair.feed(5)


def test_an_expired_session(backend: Backend) -> None:
    """A session that is gone is a typed error; after a reset the cache has a new one."""
    pair = Pair(backend.connect(), windows=[None, 4])
    pair.feed(7)
    (worker,) = backend.workers
    ((tenant, info),) = worker.list_sessions(None)
    worker.leases.release(tenant, [info.session_id])
    for _ in range(2):
        with pytest.raises(SessionNotFound):
            pair.cache.attention(0, *pair.draw(1), 7, pair.scale)
        assert pair.cache.seq_len() == 7
    pair.cache.reset()
    pair.plain.reset()
    pair.plain.called.clear()
    pair.feed(5)


def test_roll_back_after_the_decoder_has_failed(backend: Backend) -> None:
    """A pass that the decoder itself gives up is dropped on request, whatever the windows."""
    pair = Pair(backend.connect(), 3, windows=WINDOWS)
    pair.feed(7)
    before = pair.cache.page_stats()
    tokens = pair.draw(9)
    for layer in (0, 1):
        pair.cache.attention(layer, *tokens, 7, pair.scale)
    assert pair.cache.pop(9).refused
    pair.cache.roll_back()
    assert pair.cache.page_stats() == before
    pair.cache.roll_back()  # nothing is unfinished
    pair.feed(9, tokens=tokens)
    pair.cache.roll_back()
    pair.check()
    pair.feed(1)
    PagedCache(1, max_seq_len=4, client=backend.connect()).roll_back()


def test_roll_back_after_a_loss(start: Start) -> None:
    """What went with a worker is dropped in one call, and fed again to another one."""
    backend = start(num_workers=2)
    pair = Pair(backend.connect(config=SUSPICIOUS), 2)
    pair.feed(9)
    session = pair.cache._state.session
    assert session is not None
    index = backend.index_of(session._mirror.tail.worker_id)
    backend.kill(index)
    with pytest.raises(PagesLost):
        pair.cache.attention(0, *pair.draw(1), 9, pair.scale)
    assert pair.cache.roll_back() == (0,)
    assert pair.cache.seq_len() == 0
    pair.plain.popn([9])
    pair.feed(9)
    pair.feed(1)
    pair.check()
    backend.restart(index)


def test_roll_back_leaves_the_right_to_pop(backend: Backend) -> None:
    """What only an unfinished pass would have evicted is there, and can be popped."""
    pair = Pair(backend.connect(), windows=[None, 4])
    pair.feed(3)
    pair.cache.attention(0, *pair.draw(5), 3, pair.scale)
    assert pair.cache.pop(1).refused
    pair.cache.roll_back()
    assert pair.popn(2) == (2,)
    pair.feed(3)


def test_refusals_leave_the_pass_going(backend: Backend) -> None:
    """A layer's call that is wrong can be made again, right; the pass goes on."""
    pair = Pair(backend.connect(), 3, windows=WINDOWS)
    pair.feed(7)
    tokens = pair.draw(2)
    q, k, v = tokens
    pair.call(0, 2, tokens=tokens)
    for wrong in [
        (1, q, k[..., :5], v, 7, 1.0),
        (1, q[..., :5], k[..., :5], v, 7, 1.0),  # which only the worker can tell
        (1, q, k, v[..., :5], 7, 1.0),
        (1, np.concatenate([q, q]), k, v, 7, 1.0),
        (1, q, k, v, 7, float("inf")),
    ]:
        with pytest.raises(InvalidRequest):
            pair.cache.attention(*wrong)  # type: ignore[arg-type]
    with pytest.raises(OutOfOrder):
        pair.cache.attention(0, *tokens, 7, 1.0)
    with pytest.raises(Conflict):
        pair.cache.attention(2, *tokens, 8, 1.0)
    pair.call(1, 2, tokens=tokens)
    pair.call(2, 2, tokens=tokens)
    pair.feed(1)


def test_a_pop_ends_a_pass(backend: Backend) -> None:
    """No layer goes on with it, or comes again; what a pop has left uneven, a roll-back drops."""
    pair = Pair(backend.connect(), 3)
    pair.feed(2)
    tokens = pair.draw(5)
    pair.call(0, 5, tokens=tokens)
    assert pair.cache.popn(2) == 2
    q, k, v = (array[:, :, :3] for array in tokens)
    with pytest.raises(Conflict, match="begins with layer 0"):
        pair.cache.attention(1, q, k, v, 2, pair.scale)
    pair.cache.roll_back()
    assert pair.cache.seq_len() == 2
    pair.plain.popn([5])
    pair.feed(3)
    assert pair.popn(1) == (1,)
    with pytest.raises(Conflict):
        pair.cache.attention(1, *pair.draw(2), 2, pair.scale)
    pair.check()
    pair.feed(2)


def test_nothing_is_sent_for_a_wrong_first_call(backend: Backend) -> None:
    """What is wrong is found out before a session is opened for it."""
    faults = Faults(backend.dial)
    cache = PagedCache(2, max_seq_len=8, client=backend.connect(dial=faults.dial))
    q, k, v = Pair(backend.connect()).draw(2)
    for wrong in [
        (0, q[..., :3], k, v, 0, 1.0),
        (0, q, k[:, :, :1], v, 0, 1.0),
        (0, q[:, :3], k, v, 0, 1.0),
        (0, q, k, v.astype(int), 0, 1.0),
        (0, q, k, v, 1, 1.0),
        (1, q, k, v, 0, 1.0),
    ]:
        with pytest.raises((InvalidRequest, Conflict)):
            cache.attention(*wrong)
    assert not faults.log
