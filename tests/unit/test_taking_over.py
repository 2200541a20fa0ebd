"""A session that somebody has attached to is no business of its former holder any more."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from kvservice.core.errors import StaleEpoch
from kvservice.embedded import MANAGER_ADDRESS, EmbeddedService
from kvservice_client import Client
from kvservice_client._connections import Connections

TOKENS = np.ones((1, 2, 3, 4), np.float32)


@pytest.fixture
def service() -> Iterator[EmbeddedService]:
    """One worker in this process, for several clients."""
    service = EmbeddedService(num_workers=1, memory_bytes=1 << 24, device="cpu")
    service.start()
    yield service
    service.close()


def a_client(service: EmbeddedService) -> Client:
    return Client(Connections(MANAGER_ADDRESS, service.dial, clock=service.clock))


@pytest.mark.parametrize("released", [True, False])
def test_former_holder_of_the_same_client_leaves_it_alone(
    service: EmbeddedService, released: bool
) -> None:
    """Attaching takes the session from the client's older object, whatever becomes of that."""
    with a_client(service) as client:
        former = client.open(num_rows=1)
        former.write(0, TOKENS, TOKENS)
        with a_client(service) as other:
            holder = other.attach(client.attach(former.id).detach())
            if released:
                former.release()
            del former
            gc.collect()
            client.close()  # waits for what is released in the background
            assert holder.read(0)[0].shape == TOKENS.shape


@pytest.mark.parametrize("released", [True, False])
def test_former_holder_of_another_client_leaves_it_alone(
    service: EmbeddedService, released: bool
) -> None:
    """A holder that has met StaleEpoch neither releases the session, nor does its client."""
    with a_client(service) as client, a_client(service) as other:
        former = client.open(num_rows=1)
        former.write(0, TOKENS, TOKENS)
        holder = other.attach(former.id)
        with pytest.raises(StaleEpoch):
            former.write(0, TOKENS, TOKENS)
        if released:
            former.release()
        del former
        gc.collect()
        client.close()
        assert holder.read(0)[0].shape == TOKENS.shape
