"""Pages that have been given to somebody else are nobody else's, by whichever call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvservice.clock import ManualClock
from kvservice.core.caller import ANONYMOUS
from kvservice_client import Client, DType, LayerGeometry, SessionNotFound
from tests.contract.conftest import Start
from tests.driving import Driver

# Sessions that state the same layers take their pages from one pool.
SHARED_POOL: dict[str, Any] = {
    "page_size": 4,
    "layers": [LayerGeometry(2, 8, 8, DType.FLOAT32)] * 2,
}

CALLS: dict[str, Callable[[Driver, Client], Any]] = {
    "append": lambda old, _: old.session.attend(0, *old.tokens(1)),
    "query": lambda old, _: old.session.attend(0, old.random(4, 1, 8)),
    "read": lambda old, _: old.session.read(0),
    "write": lambda old, _: old.session.write(0, *old.tokens(1)[1:], positions=[0]),
    "pop": lambda old, _: old.session.pop(1),
    "select": lambda old, _: old.session.select([0, 0]),
    "reset": lambda old, _: old.session.reset(),
    "fork": lambda old, _: old.session.fork(),
    "fork by id": lambda old, client: client.fork(old.session.id),
    "attach": lambda old, client: client.attach(old.session.id),
}


@pytest.mark.parametrize("why", ["expired", "released"])
def test_every_call_after_the_end(start: Start, why: str) -> None:
    """A session whose lease is over, or that somebody has released, is found by no call, although
    its pages are in use again; and who has them now is undisturbed."""
    clock = ManualClock()
    backend = start(clock=clock)
    client = backend.connect()
    old = {name: Driver.open(client, ttl_s=30.0, **SHARED_POOL) for name in CALLS}
    for driver in old.values():
        driver.step(7)
    before = backend.used_pages()
    if why == "expired":
        clock.advance(31.0)
        backend.workers[0].leases.expire()
    else:
        backend.workers[0].leases.release(
            ANONYMOUS.tenant, [driver.session.id for driver in old.values()]
        )
    assert backend.used_pages() == 0
    new = Driver.open(backend.connect(), num_rows=2 * len(old), seed=1, **SHARED_POOL)
    new.step(7)
    assert backend.used_pages() == before
    for name, call in CALLS.items():
        with pytest.raises(SessionNotFound):
            call(old[name], client)
    new.step()
    new.check_stored()
