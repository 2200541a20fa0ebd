"""Sessions move where everybody is asked who they are: by tokens, and by certificates."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvservice.core.errors import PermissionDenied, Unauthenticated
from kvservice_client import Client, Session
from kvservice_client.testing import eventually
from tests.securing import Folder, SecuredService, secured


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("moves"))


@pytest.fixture(params=["tokens", "mutual TLS"])
def service(request: pytest.FixtureRequest, folder: Folder) -> Iterator[SecuredService]:
    """A manager and two workers."""
    security = folder.security() if request.param == "tokens" else folder.mutual_tls()
    with secured(folder, security, num_workers=2) as service:
        yield service


def client_of(service: SecuredService, name: str, role: str = "tenant") -> Client:
    if service.workers[0].settings.security.mutual_tls:
        return service.connect(tls=service.folder.client_tls(f"{role}-{name}"))
    return service.connect(name)


def other_of(service: SecuredService, session: Session) -> str:
    held = session._mirror.tail.worker_id
    return next(
        worker.settings.worker_id for worker in service.workers if worker.settings.worker_id != held
    )


def test_a_session_moves_and_its_holder_follows(service: SecuredService) -> None:
    """The holder gets the right to it on the new worker, with the manager away, and only there."""
    session = client_of(service, "alice").open(num_rows=1)
    twin = client_of(service, "alice").open(num_rows=1)
    tokens = [np.full((1, heads, 5, 16), heads, np.float32) for heads in (4, 2, 2)]
    for one in (session, twin):
        one.attend(0, *tokens)
    operator = client_of(service, "olga", "operator")
    with pytest.raises(PermissionDenied):
        client_of(service, "alice").move_session(session.id, other_of(service, session))
    there = other_of(service, session)
    moved = operator.move_session(session.id, there)
    assert [extent.worker_id for extent in moved.extents] == [there]
    service.manager.stop()
    for _ in range(3):
        np.testing.assert_array_equal(*(one.attend(0, *tokens) for one in (session, twin)))
    assert session._mirror.tail.worker_id == there
    session.release()
    twin.release()


def test_workers_ask_who_takes_a_session(service: SecuredService) -> None:
    """What workers ask of each other they tell no tenant, nor an operator."""
    from kvservice.v1 import worker_pb2
    from kvservice.wire.names import WORKER

    for name, role in (("alice", "tenant"), ("olga", "operator")):
        client = client_of(service, name, role)
        transport = client._connections.to(service.workers[0].address)
        for method, request in (
            ("CopyState", worker_pb2.CopyStateRequest(tenant="alice", copier="me")),
            ("PullSession", worker_pb2.PullSessionRequest(tenant="alice")),
        ):
            with pytest.raises((PermissionDenied, Unauthenticated)):
                transport.call(WORKER.full_name, method, request, timeout_s=5.0)


def test_a_drained_worker_is_empty(service: SecuredService) -> None:
    """Its sessions go to the other one, which has been told of their holders' tokens by then."""
    session = client_of(service, "alice").open(num_rows=1)
    ones = [np.ones((1, heads, 3, 16), np.float32) for heads in (4, 2, 2)]
    session.attend(0, *ones)
    held = session._mirror.tail.worker_id
    client_of(service, "olga", "operator").drain_worker(held, timeout_s=60.0)
    leaving = next(one for one in service.workers if one.settings.worker_id == held)
    eventually(lambda: leaving.worker.is_empty)
    session.attend(0, *ones)
    assert session.lengths(0) == (6,)
    assert session._mirror.tail.worker_id != held
    session.release()
