"""Credentials that change while servers run, lanes, quotas, and whose pages were whose."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from kvservice.config import ConfigError, ManagerSettings, Security, WorkerSettings
from kvservice.core import errors
from kvservice.core.capability import Keyring
from kvservice.core.geometry import DType, LayerGeometry
from kvservice.core.tenancy import Use
from kvservice.runtime.worker import WorkerServer
from kvservice.server.guard import MIN_LIFE_S
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire.lane import LanePipe
from kvservice.wire.names import WORKER
from kvservice_client import Client, Session, connect
from kvservice_client._transport_lane import _connect
from tests.driving import Driver
from tests.securing import LIMITS, Folder, SecuredService, secured
from tests.serving import Peer, allocate_request, attend_call, new_id, spec, until

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def service(folder: Folder) -> Iterator[SecuredService]:
    with secured(folder, num_workers=2) as service:
        yield service


class BearerPeer(Peer):
    """A plain client that presents a token."""

    def __init__(self, address: str, token: str) -> None:
        super().__init__(address, WORKER)
        self.metadata = (("authorization", f"Bearer {token}"),)


@pytest.mark.parametrize("lane", [True, False])
def test_a_decoder_needs_nothing_but_its_token(service: SecuredService, lane: bool) -> None:
    """Over several workers, by lane and by gRPC, through every change that there is."""
    client = service.connect("alice", lane=lane)
    driver = Driver.open(client, num_rows=2, spread=2)
    for count in (40, 5, 1):
        driver.step(count)
    driver.select([1, 0])
    driver.step()
    driver.pop(3)
    branch = driver.fork()
    branch.step(2)
    driver.step(2)
    driver.check_stored()
    assert len(driver.session.page_stats()) == 2
    session_id = driver.session.detach()
    taken = client.attach(session_id)
    assert taken.lengths(0) == driver.dense.lengths(0)
    taken.release()
    branch.session.release()
    with pytest.raises(errors.PermissionDenied):
        client.page_stats()


def test_the_token_is_shown_to_nobody_but_the_front(service: SecuredService) -> None:
    """A worker that asked for it would get what it has issued itself, and no more."""
    client = service.connect("alice")
    session = client.open(num_rows=1)
    worker = next(
        one for one in service.workers if one.address == session._mirror.extents[0].address
    )
    transport = client._connections.to(worker.address)
    inner = getattr(transport, "_grpc", transport)
    assert inner._metadata == ()
    session.release()


def test_a_token_that_is_taken_back_opens_nothing_any_more(
    service: SecuredService, folder: Folder
) -> None:
    """Within a second or so, without a restart; other tokens go on to hold."""
    alice, bob = service.connect("alice"), service.connect("bob")
    session = alice.open(num_rows=1)
    folder.write_tokens(without=["alice"])

    def refused() -> bool:
        try:
            alice.list_sessions()
        except errors.Unauthenticated:
            return True
        return False

    until(refused)
    assert bob.list_sessions() == []
    folder.write_tokens()
    until(lambda: not refused())
    session.release()


def test_a_key_is_changed_without_a_stop(service: SecuredService, folder: Folder) -> None:
    """First both, the old one signing; then both, the new one signing; then the new one."""
    client = service.connect("alice")
    driver = Driver.open(client)
    old, new = (folder.path / "key").read_text(), secrets.token_hex(32)
    for keys in ((old, new), (new, old), (new,)):
        folder.write_key(*keys)
        # Every server has looked again once its capabilities are of the key that signs now.
        for server in (service.manager, *service.workers):
            ring = server.secrets._keys
            assert ring is not None
            until(lambda ring=ring, keys=keys: keys_of(ring.get()) == keys)
        if len(keys) == 1:  # what the old key has signed ends with it: attach for a new one
            with pytest.raises(errors.Unauthenticated):
                driver.session.attend(0, *driver.tokens(1))
            client.attach(driver.session.id).release()
        else:
            driver.step()


def keys_of(ring: Keyring) -> tuple[str, ...]:
    """Return the keys, the one that signs first."""
    signing = ring._keys[ring._first]
    others = [key for key in ring._keys.values() if key != signing]
    return tuple(key.hex() for key in (signing, *others))


def test_a_lone_worker_issues_its_own_rights(folder: Folder) -> None:
    """It needs no key of others; its tokens, or its own word, let callers in."""
    security = Security(token_file=folder.name("tokens"))
    with WorkerServer(WorkerSettings("alone", 1 << 22, limits=LIMITS, security=security)) as worker:
        with pytest.raises(errors.Unauthenticated), connect(worker.address) as client:
            client.open(num_rows=1)
        with connect(worker.address, token=folder.tokens["alice"]) as client:
            driver = Driver.open(client)
            driver.step(3)
            driver.session.release()


def open_lane(peer: Peer, request: worker_pb2.OpenLaneRequest) -> LanePipe:
    answer = peer.call("OpenLane", request)
    pipe = _connect(answer.addresses[0], 5.0)
    pipe.sendall(answer.token)
    return LanePipe(pipe, 1 << 20)


def ask(pipe: LanePipe, call: worker_pb2.AttendCall) -> worker_pb2.AttendResult | None:
    """Return the answer to a call on a lane; None if the lane is closed."""
    try:
        pipe.socket.settimeout(10.0)
        pipe.send([worker_pb2.AttendRequest(call=call).SerializeToString()])
        raw = pipe.receive()
    except OSError:
        return None
    if raw is None:
        return None
    return worker_pb2.AttendResponse.FromString(bytes(raw)).result


def test_a_lane_ends_with_the_credential_behind_it(folder: Folder) -> None:
    """Idle or not: the token is taken back, and the lane is closed."""
    security = Security(token_file=folder.name("tokens"))
    settings = WorkerSettings("alone", 1 << 22, limits=LIMITS, security=security)
    with (
        WorkerServer(settings) as worker,
        BearerPeer(worker.address, folder.tokens["alice"]) as alice,
        BearerPeer(worker.address, folder.tokens["bob"]) as bob,
    ):
        session_id = new_id()
        alice.call("Allocate", allocate_request(session_id, spec()))
        lanes = [open_lane(peer, worker_pb2.OpenLaneRequest()) for peer in (alice, alice, bob)]
        idle, busy, others = lanes
        answer = ask(busy, attend_call(session_id, 0, 2, step=1))
        assert answer is not None
        assert not answer.HasField("error")
        # It is bound to the tenant: with bob's, alice's session does not exist.
        answer = ask(others, attend_call(session_id, 2, 1, step=2))
        assert answer is not None
        assert answer.error.code == errors.SessionNotFound.code.value
        folder.write_tokens(without=["alice"])
        until(lambda: ask(busy, attend_call(session_id, 0, 2, step=1)) is None)
        idle.socket.settimeout(10.0)
        assert idle.receive() is None
        answer = ask(others, attend_call(new_id(), 0, 1, step=1))
        assert answer is not None
        for lane in lanes:
            lane.close()


def test_a_right_is_renewed_before_it_ends(folder: Folder) -> None:
    """By the lease's renewal, also while calls keep the lease itself alive."""
    with secured(folder) as service:
        client = service.connect("alice")
        session = client.open(num_rows=1)
        [lease] = client._leases._leases
        [(address, before)] = lease.capabilities.items()
        now = client._connections.clock.monotonic()
        assert lease.look_at() <= now + MIN_LIFE_S / 3
        lease.capabilities_due_at = now
        client._leases.renew_due()
        assert lease.capabilities[address] != before
        session.release()


# -- quotas


QUOTAS = """
[default]
calls = 3

[tenants.alice]
sessions = 2
rows = 2
pages = 4
tokens = 100
"""


def test_quotas_bound_what_a_tenant_takes(folder: Folder, tmp_path: Path) -> None:
    """Each field, with the error that says so; others are not touched, and it can be raised."""
    quotas = tmp_path / "quotas.toml"
    quotas.write_text(QUOTAS)
    security = folder.security(quota_file=str(quotas))
    with secured(folder, security) as service:
        alice, bob = service.connect("alice"), service.connect("bob")
        first, second = alice.open(num_rows=1), alice.open(num_rows=2)
        for bad in (
            lambda: alice.open(num_rows=1),
            lambda: first.fork() if first.lengths()[0] else alice.open(num_rows=1),
        ):
            with pytest.raises(errors.QuotaExceeded) as caught:
                bad()
            assert caught.value.metadata["quota"] == "sessions"
            assert caught.value.retry_delay_s is None
        second.release()
        with pytest.raises(errors.QuotaExceeded, match="rows"):
            alice.open(num_rows=3)
        k = np.ones((1, 2, 64, 8), np.float32)
        first.attend(0, k, k, k)  # four pages
        for count, name in ((1, "pages"), (37, "tokens")):
            with pytest.raises(errors.QuotaExceeded) as caught:
                first.attend(0, *(k[:, :, :1].repeat(count, 2),) * 3)
            assert caught.value.metadata["quota"] == name
        first.pop(1)
        first.attend(0, *(k[:, :, :1],) * 3)
        others = bob.open(num_rows=8)
        quotas.write_text(QUOTAS.replace("pages = 4", "pages = 5"))
        until(lambda: service.workers[0].secrets.quota_of("alice").pages == 5)
        first.attend(0, *(k[:, :, :1],) * 3)
        for session in (first, others):
            session.release()


def test_quotas_are_for_all_workers_together(folder: Folder, tmp_path: Path) -> None:
    """What a tenant has on one worker counts on the other, by the next heartbeat; what it gives
    back there is free here; a session on both counts once."""
    quotas = tmp_path / "quotas.toml"
    quotas.write_text("[default]\nsessions = 3\npages = 6\n")
    with secured(folder, folder.security(quota_file=str(quotas)), num_workers=2) as service:
        alice, bob = service.connect("alice"), service.connect("bob")
        k = np.ones((1, 2, 64, 8), np.float32)

        def usage(number: int, tenant: str) -> tuple[int, int]:
            with (worker := service.workers[number].worker)._lock:
                found = worker._pools.usage
                elsewhere = found.elsewhere.get(tenant, Use())
                return elsewhere.num_sessions, elsewhere.num_pages

        def opened_on(number: int, client: Client, **options: int) -> Session:
            while True:  # the manager chooses; the other one's is given back
                session = client.open(num_rows=1, layers=[GEOMETRY], **options)
                [extent] = session._mirror.extents
                if extent.address == service.workers[number].address:
                    return session
                others.append(session)

        others: list[Session] = []
        first, second = opened_on(0, bob), opened_on(1, bob)
        for session in others:
            session.release()
        until(lambda: usage(0, "bob") == (1, 0))
        until(lambda: usage(1, "bob") == (1, 0))
        first.attend(0, k, k, k)  # four pages
        until(lambda: usage(1, "bob") == (1, 4))
        second.attend(0, *(k[:, :, :32],) * 3)  # two
        for session in (second, first):
            until(lambda: usage(0, "bob") == (1, 2))
            with pytest.raises(errors.QuotaExceeded) as caught:
                session.attend(0, *(k[:, :, :1],) * 3)
            assert caught.value.metadata["quota"] == "pages"
            assert caught.value.metadata["needed"] == "7"
        second.reset()
        until(lambda: usage(0, "bob") == (1, 0))
        first.attend(0, *(k[:, :, :32],) * 3)
        third = bob.open(num_rows=1)
        until(lambda: all(usage(number, "bob")[0] >= 1 for number in (0, 1)))
        until(lambda: sum(usage(number, "bob")[0] for number in (0, 1)) == 3)
        with pytest.raises(errors.QuotaExceeded) as caught:
            bob.open(num_rows=1)
        assert caught.value.metadata["quota"] == "sessions"
        both = [alice.open(num_rows=1, spread=2) for _ in range(3)]
        for session in (first, second, third, *both):
            session.release()


def test_calls_in_progress_are_bounded(folder: Folder, tmp_path: Path) -> None:
    """A stream or lane is one as long as it is open; when it ends there is room again."""
    quotas = tmp_path / "quotas.toml"
    quotas.write_text("[default]\ncalls = 2\n")
    security = Security(token_file=folder.name("tokens"), quota_file=str(quotas))
    settings = WorkerSettings("alone", 1 << 22, limits=LIMITS, security=security)
    with (
        WorkerServer(settings) as worker,
        BearerPeer(worker.address, folder.tokens["alice"]) as alice,
    ):
        asked = types_pb2.ListSessionsRequest()

        def served() -> LanePipe | None:
            """Return a lane that is served; None while the call that opened one is counted yet."""
            with suppress(errors.QuotaExceeded):
                lane = open_lane(alice, worker_pb2.OpenLaneRequest())
                if ask(lane, worker_pb2.AttendCall(session_id=new_id())) is not None:
                    return lane
                lane.close()
            return None

        def full() -> bool:
            try:
                alice.call("ListSessions", asked)
            except errors.QuotaExceeded:
                return True
            return False

        with closing(until(served)) as first, closing(until(served)):
            until(full)
            first.close()
            until(lambda: not full())


# -- whose pages were whose

GEOMETRY = LayerGeometry(2, 8, 8, DType.FLOAT32)
"""Stated, so that both tenants' pages come from one pool."""


@pytest.mark.parametrize("zero", [False, True])
def test_pages_of_a_freed_session_are_never_read_by_the_next(folder: Folder, zero: bool) -> None:
    """Filled by one tenant, freed, taken by another: nothing shows that was not written anew."""
    with secured(folder, zero_freed_pages=zero) as service:
        worker = service.workers[0]
        alice, bob = service.connect("alice"), service.connect("bob")
        canary = np.full((1, 2, 40, 8), 1234.5, np.float32)
        with alice.open(num_rows=1, layers=[GEOMETRY]) as session:
            session.attend(0, canary, canary, canary)
            session.reset()
            assert holds(worker, 1234.5) is not zero
            session.attend(0, canary, canary, canary)
        assert holds(worker, 1234.5) is not zero
        with bob.open(num_rows=1, layers=[GEOMETRY]) as session:
            one = np.ones((1, 2, 1, 8), np.float32)
            session.write(0, one, one, positions=[20])
            k, v = session.read(0)
            assert k.shape[2] == 21
            assert not k[:, :, :20].any()
            assert not v[:, :, :20].any()
            with pytest.raises(errors.PositionOutOfRange):
                session.read(0, 0, 22)
            out = session.attend(0, one, one, one)
            assert np.abs(out).max() <= 1.0


def holds(worker: WorkerServer, value: float) -> bool:
    """Return whether any page that nobody uses holds a value."""
    for pool in worker.worker._pools:
        for arena in pool.arenas.values():
            for page in range(pool.pages.total):
                if not pool.pages.refcount(page) and (arena.k[page] == value).any():
                    return True
    return False


# -- where nobody is asked


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "example.org"])
def test_what_others_can_reach_needs_credentials(folder: Folder, host: str) -> None:
    """Nothing at all, or tokens in plaintext, is refused in one line; `--insecure` allows it."""
    for security, text in (
        (Security(), "give --tokens or --mutual-tls, or say --insecure"),
        (folder.security(), "give --tls-cert and --tls-key, or say --insecure"),
    ):
        for make in (
            lambda s: ManagerSettings(host=host, advertise_host="a", security=s),
            lambda s: WorkerSettings("w", 1 << 20, host=host, advertise_host="a", security=s),
        ):
            with pytest.raises(ConfigError, match=text) as caught:
                make(security)
            assert "\n" not in str(caught.value)
    for security in (Security(insecure=True), folder.mutual_tls()):
        assert ManagerSettings(host=host, advertise_host="a", security=security).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_on_loopback_nobody_is_asked(host: str) -> None:
    """What only this machine reaches."""
    assert ManagerSettings(host=host).host == host


def test_manager_and_workers_need_a_key(folder: Folder) -> None:
    """Tokens alone would leave them unknown to each other."""
    security = Security(token_file=folder.name("tokens"))
    with pytest.raises(ConfigError, match="--key"):
        ManagerSettings(security=security)
    with pytest.raises(ConfigError, match="--key"):
        WorkerSettings("w", 1 << 20, manager_address="m:1", security=security)


def test_a_worker_with_another_key_is_not_let_in(folder: Folder, tmp_path: Path) -> None:
    """It is told so, and says so; the manager knows nothing of it."""
    with secured(folder) as service:
        other = Folder(tmp_path / "other")
        settings = WorkerSettings(
            "stranger",
            1 << 20,
            manager_address=service.manager.address,
            limits=LIMITS,
            security=other.security(),
        )
        with WorkerServer(settings) as stranger:
            with connect(stranger.address, token=other.tokens["alice"]) as client:
                client.open(num_rows=1).release()
            views = service.manager.manager.workers()
            assert [view.record.worker_id for view in views] == ["w0"]
