"""A call that was refused for want of room stays refused, however late a copy of it arrives.

A connection breaks, and the call is sent again over another one, which is faster: the first copy
comes when all is over, and may by then find room. Its holder has been told that nothing is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvservice_client import Conflict, DType, LayerGeometry, OutOfPages
from kvservice_client._transport import Dial
from tests.backends import Backend
from tests.contract.conftest import Start
from tests.driving import Driver
from tests.faults import Faults

# One layer, 2 KV heads of 8 + 8 float32: 512 bytes a page of 4 tokens.
LAYERS = [LayerGeometry(2, 8, 8, DType.FLOAT32)]
BUDGET_BYTES = 8 * 512


class Copies(Faults):
    """Keeps a copy of the newest refused call of a method."""

    def __init__(self, dial: Dial, method: str) -> None:
        super().__init__(dial)
        self.method = method
        self.copy: Callable[[], Any] | None = None

    def carry(self, address: str, method: str, request: Any, *rest: Any) -> Any:
        try:
            return super().carry(address, method, request, *rest)
        except OutOfPages:
            if method == self.method:
                again = type(request).FromString(request.SerializeToString())
                carry = super().carry
                self.copy = lambda: carry(address, method, again, *rest)
            raise

    def deliver(self) -> None:
        """Let the copy arrive: it must be refused, whatever room there is now."""
        assert self.copy is not None
        with pytest.raises((OutOfPages, Conflict)):
            self.copy()


def open_one(backend: Backend, copies: Copies) -> Driver:
    return Driver.open(
        backend.connect(dial=copies.dial), num_rows=1, num_layers=1, layers=LAYERS, page_size=4
    )


def worker_of(driver: Driver) -> str:
    return driver.session.page_stats()[-1].worker_id


def write(driver: Driver, count: int) -> None:
    _, k, v = driver.tokens(count)
    driver.session.write(0, k, v)
    driver.dense.attend(0, driver.random(4, count, 8), k, v)


@pytest.mark.parametrize("method", ["Attend", "Write"])
def test_where_nobody_has_room(start: Start, method: str) -> None:
    """The session is what its holder takes it for, and takes the tokens when asked again."""
    backend = start(memory_bytes=BUDGET_BYTES)
    copies = Copies(backend.dial, method)
    driver, other = open_one(backend, copies), open_one(backend, copies)
    driver.step(3)
    other.step(20)
    feed = driver.step if method == "Attend" else partial(write, driver)
    with pytest.raises(OutOfPages):
        feed(13)
    driver.query(0)  # the step before is not over
    other.session.release()
    copies.deliver()
    driver.check_stored()
    feed(12)
    copies.deliver()
    driver.pop(13)
    driver.check_stored()


def test_where_another_worker_has_room(start: Start) -> None:
    """Tokens that went there instead are stored once."""
    backend = start(num_workers=2, memory_bytes=BUDGET_BYTES)
    copies = Copies(backend.dial, "Attend")
    driver = open_one(backend, copies)
    driver.step(3)
    tail = worker_of(driver)
    while worker_of(other := open_one(backend, copies)) != tail:
        pass
    other.step(20)
    driver.step(13)
    assert worker_of(driver) != tail
    other.session.release()
    copies.deliver()
    driver.step(2)
    driver.check_stored()
