"""Keys and values stored without attention, where the session is in several parts, and late copies
of such calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvservice_client import DType, LayerGeometry, OutOfPages
from kvservice_client._transport import Dial
from tests.contract.conftest import Start
from tests.driving import Driver
from tests.faults import Faults

# 2 KV heads of 8 + 8 float32: 512 bytes a page of 4 tokens, and layer.
LAYERS = [LayerGeometry(2, 8, 8, DType.FLOAT32)] * 2
PAGE_BYTES = 2 * 512


class Copies(Faults):
    """Keeps a copy of the newest call of a method that was answered."""

    def __init__(self, dial: Dial, method: str) -> None:
        super().__init__(dial)
        self.method = method
        self.deliver: Callable[[], Any] | None = None

    def carry(self, address: str, method: str, request: Any, *rest: Any) -> Any:
        answer = super().carry(address, method, request, *rest)
        if method == self.method:
            again = type(request).FromString(request.SerializeToString())
            carry = super().carry
            self.deliver = lambda: carry(address, method, again, *rest)
        return answer


def test_a_late_copy_of_a_write_leaves_the_step_in_progress(start: Start) -> None:
    """The next call is repeated, as its answer was lost, and is still known to be a repeat."""
    backend = start()
    copies = Copies(backend.dial, "Write")
    driver = Driver.open(backend.connect(dial=copies.dial), num_rows=1, num_layers=1, page_size=4)
    _, k, v = driver.tokens(3)
    driver.session.write(0, k, v)
    driver.dense.attend(0, driver.random(4, 3, 8), k, v)
    tokens = driver.tokens(1)
    first = driver.session.attend(0, *tokens, pos=3)
    assert copies.deliver is not None
    copies.deliver()
    again = driver.session.attend(0, *tokens, pos=3)
    np.testing.assert_array_equal(first, again)
    driver.dense.attend(0, *tokens)
    driver.step()
    driver.check_stored()


def test_first_tokens_may_leave_a_gap(start: Start) -> None:
    """Of a session that is spread, too: nothing is missing before them, and more can be written
    there, whoever attaches to it."""
    backend = start(num_workers=2)
    client = backend.connect()
    session = client.open(num_rows=2, page_size=4, spread=2)
    token = np.ones((1, 1, 1, 8), np.float32)
    session.write(0, token, token, positions=[3], rows=[1])
    session.write(0, 2 * token, 2 * token, positions=[1], rows=[0])
    backend.beat()
    taken = client.attach(session.detach())
    assert taken.lengths(0) == (2, 4)
    assert taken.padding().tolist() == [
        [True, False, False, False],
        [True, True, True, False],
    ]
    taken.write(0, 3 * token, 3 * token, positions=[0], rows=[0])
    k, _ = taken.read(0)
    assert k[:, 0, :, 0].tolist() == [[3, 2, 0, 0], [0, 0, 0, 1]]
    taken.release()


def test_a_write_that_some_workers_have_refused(start: Start) -> None:
    """The tail has stored its share, and the worker before has no page for a copy of one that is
    shared: what was added is dropped, or the same is written again when there is room."""
    backend = start(num_workers=2, memory_bytes=12 * PAGE_BYTES)
    client = backend.connect()

    def on(worker: str) -> Driver:
        while True:
            driver = Driver.open(client, num_rows=1, page_size=4, layers=LAYERS)
            if driver.session.page_stats()[0].worker_id == worker:
                return driver
            driver.session.release()

    driver = Driver.open(client, num_rows=1, page_size=4, spread=2, layers=LAYERS)
    driver.step(16)
    session = driver.session
    child = session.fork()
    backend.beat()
    other = on(session.page_stats()[0].worker_id)
    other.step(40)
    before, _ = session.read(0)
    _, k, v = driver.tokens(2)
    with pytest.raises(OutOfPages):
        session.write(0, k, v, positions=[1, 16])
    assert session.roll_back() == (16,)
    np.testing.assert_array_equal(session.read(0)[0], before)
    driver.step()
    driver.pop(1)
    with pytest.raises(OutOfPages):
        session.write(0, k, v, positions=[1, 16])
    other.session.release()
    session.write(0, k, v, positions=[1, 16])
    np.testing.assert_array_equal(session.read(0)[0][:, :, [1, 16]], k)
    np.testing.assert_array_equal(child.read(0)[0], before)
    child.release()
