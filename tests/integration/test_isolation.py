"""Who is let in, and whose sessions are whose: on every RPC that there is, by the descriptors.

A new RPC that this file does not know fails it, as one without a rule fails the server's start.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvservice.core.access import RULES, Rights
from kvservice.core.caller import Caller, Role
from kvservice.core.capability import Claims, Keyring, Kind, digest_of
from kvservice.server.guard import SIGNED
from kvservice.v1 import manager_pb2, types_pb2, worker_pb2
from kvservice.wire import convert, status
from kvservice.wire.fragments import frames
from kvservice.wire.names import MANAGER, WORKER
from tests.securing import Folder, SecuredService, secured
from tests.serving import allocate_request, attend_call, new_id, spec

SERVICES = (MANAGER, WORKER)
RPCS = [(service, method) for service in SERVICES for method in service.methods]
IDS = [f"{service.name}.{method.name}" for service, method in RPCS]

FREE = {"grpc.health.v1.Health"}
"""What anybody may call."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("isolation"))


@pytest.fixture(scope="module")
def service(folder: Folder) -> Iterator[SecuredService]:
    """A manager and a worker that ask who calls."""
    with secured(folder) as service:
        yield service


@dataclass(frozen=True)
class Answer:
    """What a caller is told: a response, or an error."""

    code: str
    text: str
    response: Any = None


class Wire:
    """Bare calls, with whatever metadata."""

    def __init__(self, service: SecuredService) -> None:
        self.service = service
        self.channels = {
            MANAGER.full_name: grpc.insecure_channel(service.manager.address),
            WORKER.full_name: grpc.insecure_channel(service.workers[0].address),
        }

    def call(
        self, rpc: tuple[ServiceDescriptor, MethodDescriptor], request: Any, *metadata: tuple
    ) -> Answer:
        """Make a call, of whatever kind; an error in a result counts as the call's."""
        owner, method = rpc
        path = f"/{owner.full_name}/{method.name}"
        response = message_factory.GetMessageClass(method.output_type)
        kind = {
            (False, False): "unary_unary",
            (True, False): "stream_unary",
            (False, True): "unary_stream",
            (True, True): "stream_stream",
        }[method.client_streaming, method.server_streaming]
        stub = getattr(self.channels[owner.full_name], kind)(path, None, response.FromString)
        framed = method.client_streaming and method.name != "Heartbeat"
        raw = list(frames(request)) if framed else [request.SerializeToString()]
        try:
            answer = stub(
                iter(raw) if method.client_streaming else raw[0], timeout=10, metadata=metadata
            )
            if method.server_streaming:
                answer = next(iter(answer))
        except grpc.RpcError as error:
            told = status.from_rpc_error(error)
            return Answer(error.code().name, str(told))
        result = getattr(answer, "result", None)
        fails = result is not None and "error" in result.DESCRIPTOR.fields_by_name
        if fails and result.HasField("error"):
            told = status.from_status(result.error)
            return Answer(told.code.name, str(told))
        return Answer("OK", "", answer)


@pytest.fixture(scope="module")
def wire(service: SecuredService) -> Iterator[Wire]:
    wire = Wire(service)
    yield wire
    for channel in wire.channels.values():
        channel.close()


def bearer(folder: Folder, tenant: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {folder.tokens[tenant]}")


def opened(wire: Wire, folder: Folder, tenant: str = "alice") -> types_pb2.Session:
    """Open a session with 20 tokens, through the manager, and return it."""
    rpc = (MANAGER, MANAGER.methods_by_name["Allocate"])
    request = allocate_request(new_id(), spec(ttl_s=3600))
    answer = wire.call(rpc, request, bearer(folder, tenant))
    assert answer.code == "OK", answer.text
    session: types_pb2.Session = answer.response.session
    call = attend_call(session.session_id, 0, 20, step=1)
    call.capability = session.extents[0].capability
    assert wire.call((WORKER, WORKER.methods_by_name["Attend"]), call).code == "OK"
    return session


# How each RPC is asked about a session. One that is missing here fails the tests below.
ABOUT: dict[str, Callable[[str, int], Any]] = {
    "Allocate": lambda one, epoch: allocate_request(one, spec(ttl_s=3600)),
    "Append": lambda one, epoch: types_pb2.AppendRequest(
        session_id=one, epoch=epoch, token_count=1, expected_lengths=[20]
    ),
    "Pop": lambda one, epoch: types_pb2.PopRequest(
        session_id=one, epoch=epoch, keep=[0], expected_lengths=[20]
    ),
    "Reset": lambda one, epoch: types_pb2.ResetRequest(session_id=one, epoch=epoch),
    "Select": lambda one, epoch: types_pb2.SelectRequest(session_id=one, epoch=epoch, rows=[0]),
    "Fork": lambda one, epoch: types_pb2.ForkRequest(
        session_id=one, epoch=epoch, new_session_id=new_id()
    ),
    "Attach": lambda one, epoch: types_pb2.AttachRequest(session_id=one),
    "Release": lambda one, epoch: types_pb2.ReleaseRequest(session_ids=[one]),
    "RenewLease": lambda one, epoch: types_pb2.RenewLeaseRequest(session_ids=[one]),
    "GetSession": lambda one, epoch: types_pb2.GetSessionRequest(session_id=one),
    "ListSessions": lambda one, epoch: types_pb2.ListSessionsRequest(),
    "PageStats": lambda one, epoch: types_pb2.PageStatsRequest(),
    "ListWorkers": lambda one, epoch: manager_pb2.ListWorkersRequest(),
    "DrainWorker": lambda one, epoch: manager_pb2.DrainWorkerRequest(worker_id="nobody"),
    "MoveSession": lambda one, epoch: manager_pb2.MoveSessionRequest(session_id=one, worker_id="w"),
    "Heartbeat": lambda one, epoch: manager_pb2.HeartbeatRequest(
        worker=manager_pb2.WorkerInfo(worker_id="mallory", incarnation="i", address="x:1")
    ),
    "Attend": lambda one, epoch: attend_call(one, 20, 1, step=2, epoch=epoch),
    "Write": lambda one, epoch: write_call(one, epoch),
    "Read": lambda one, epoch: worker_pb2.ReadRequest(session_id=one, epoch=epoch, stop=20),
    "OpenLane": lambda one, epoch: worker_pb2.OpenLaneRequest(session_id=one),
    "FollowSession": lambda one, epoch: worker_pb2.FollowSessionRequest(session_id=one),
    "PullSession": lambda one, epoch: worker_pb2.PullSessionRequest(
        tenant="alice",
        session_id=one,
        move_id="m",
        source_address="localhost:1",
        source_incarnation="i",
    ),
    "CopyState": lambda one, epoch: worker_pb2.CopyStateRequest(
        tenant="alice", session_id=one, copier="c", freeze=True
    ),
    "CopyPages": lambda one, epoch: worker_pb2.CopyPagesRequest(
        tenant="alice", session_id=one, copy=1
    ),
    "HandOver": lambda one, epoch: worker_pb2.HandOverRequest(
        tenant="alice", session_id=one, ticket=1, worker_address="x:1", worker_incarnation="i"
    ),
}

# Those that answer another tenant without an error, and what they must not say then.
SILENT = {"Allocate", "Release", "RenewLease", "ListSessions", "ListWorkers", "OpenLane"}
# Those that no tenant may call.
PRIVILEGED = {
    name
    for rules in RULES.values()
    for name, rule in rules.items()
    if Role.TENANT not in rule.roles
}


def write_call(session_id: str, epoch: int) -> worker_pb2.WriteCall:
    call = attend_call(session_id, 0, 1, step=1)
    return worker_pb2.WriteCall(
        session_id=session_id, epoch=epoch, k=call.k, v=call.v, rows=[0], positions=[0]
    )


def test_every_rpc_has_a_rule_and_a_place_in_these_tests() -> None:
    """A new one without either fails here."""
    for service in SERVICES:
        names = {method.name for method in service.methods}
        assert names == set(RULES[service.full_name])
        assert names <= set(ABOUT)


@pytest.mark.parametrize("rpc", RPCS, ids=IDS)
@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ((), "not known"),
        ((("authorization", "Bearer nobody-has-this-token"),), "not valid"),
        ((("authorization", "Basic YWxpY2U6eA=="),), "Bearer TOKEN"),
        ((("authorization", "Bearer "),), "Bearer TOKEN"),
        ((("authorization", "Bearer eyJhbGciOiJub25lIn0.e30."),), "not valid"),
        ((("authorization", f"Bearer {SIGNED}AAAA"),), "not issued by this service"),
        ((("authorization", f"Bearer {SIGNED}%%%"),), "not valid|not issued"),
        ((("x-kvservice-tenant", "alice"),), "not the tenant of the credential"),
    ],
)
def test_nobody_gets_in_without_a_credential(
    wire: Wire, folder: Folder, rpc: tuple, metadata: tuple, text: str
) -> None:
    """Whatever the RPC, whatever is shown instead of a credential; and nothing happens."""
    session = opened(wire, folder)
    answer = wire.call(rpc, ABOUT[rpc[1].name](session.session_id, session.epoch), *metadata)
    wanted = "PERMISSION_DENIED" if "tenant" in text else "UNAUTHENTICATED"
    assert answer.code == wanted, answer
    assert errors_match(text, answer.text)
    check_untouched(wire, folder, session)


def errors_match(pattern: str, text: str) -> bool:
    return any(part in text for part in pattern.split("|"))


@pytest.mark.parametrize("rpc", RPCS, ids=IDS)
def test_two_credentials_are_none(wire: Wire, folder: Folder, rpc: tuple) -> None:
    """It is not for the server to choose one."""
    session = opened(wire, folder)
    both = (bearer(folder, "alice"), bearer(folder, "olga"))
    answer = wire.call(rpc, ABOUT[rpc[1].name](session.session_id, session.epoch), *both)
    assert answer.code == "UNAUTHENTICATED"


@pytest.mark.parametrize("rpc", RPCS, ids=IDS)
def test_anothers_session_is_as_one_that_never_was(wire: Wire, folder: Folder, rpc: tuple) -> None:
    """Same code, same words, no effect, whichever RPC asks. At the worker too, by bob's right."""
    method = rpc[1]
    session = opened(wire, folder)
    theirs = as_bob(wire, folder, rpc, session.session_id, session.epoch)
    nobodys = as_bob(wire, folder, rpc, new_id(), session.epoch)
    if method.name in PRIVILEGED:
        assert theirs.code == "PERMISSION_DENIED"
    elif method.name not in SILENT:
        assert theirs.code in ("NOT_FOUND", "PERMISSION_DENIED")
    assert (theirs.code, theirs.text) == (nobodys.code, nobodys.text)
    if method.name in SILENT and theirs.response is not None:
        assert session.session_id not in described(method.name, theirs.response)
    check_untouched(wire, folder, session)


def as_bob(wire: Wire, folder: Folder, rpc: tuple, session_id: str, epoch: int) -> Answer:
    """Ask as another tenant: of the manager with its token, of the worker with what the worker
    takes from him: what the manager says on his behalf, as that is the most that he could have."""
    owner, method = rpc
    request = ABOUT[method.name](session_id, epoch)
    if owner is MANAGER:
        return wire.call(rpc, request, bearer(folder, "bob"))
    keys = Keyring([bytes.fromhex((folder.path / "key").read_text())])
    now = wire.service.manager._clock.time()
    claims = Claims(
        Kind.CALLER,
        Caller("bob", Role.TENANT),
        "",
        Rights.WRITE,
        digest_of("worker"),
        now,
        now + 60,
    )
    token = base64.urlsafe_b64encode(keys.sign(claims)).decode()
    return wire.call(rpc, request, ("authorization", f"Bearer {SIGNED}{token}"))


def described(name: str, response: Any) -> str:
    if name == "RenewLease":
        return ""  # repeats the ids that were asked about, as missing
    if name == "Allocate":
        return ""  # his own, under the same id: ids are scoped by tenant
    return str(response)


def check_untouched(wire: Wire, folder: Folder, session: types_pb2.Session) -> None:
    """Assert that a session is as `opened` has left it, and release it."""
    get = (MANAGER, MANAGER.methods_by_name["GetSession"])
    request = types_pb2.GetSessionRequest(session_id=session.session_id)
    now = wire.call(get, request, bearer(folder, "alice")).response.session
    assert (now.epoch, list(now.layers[0].lengths)) == (1, [20])
    release = (MANAGER, MANAGER.methods_by_name["Release"])
    asked = types_pb2.ReleaseRequest(session_ids=[session.session_id])
    assert wire.call(release, asked, bearer(folder, "alice")).response.released_count == 1


CAPABLE = [
    (service, method)
    for service, method in RPCS
    if service is WORKER and RULES[service.full_name][method.name].capability is not None
]


def forged(folder: Folder, session: types_pb2.Session, **changes: Any) -> bytes:
    """Return a session's capability with other claims, signed with the service's own key."""
    keys = Keyring([bytes.fromhex((folder.path / "key").read_text())])
    claims = keys.verify(session.extents[0].capability)
    return keys.sign(replace(claims, **changes))


def ask_with(wire: Wire, rpc: tuple, session: types_pb2.Session, capability: bytes) -> Answer:
    request = ABOUT[rpc[1].name](session.session_id, session.epoch)
    if "capabilities" in request.DESCRIPTOR.fields_by_name:
        request.capabilities.append(capability)
    else:
        request.capability = capability
        request.session_id = session.session_id
    return wire.call(rpc, request)


@pytest.mark.parametrize("rpc", CAPABLE, ids=[method.name for _, method in CAPABLE])
def test_capabilities_are_for_one_session_one_worker_and_a_while(
    wire: Wire, folder: Folder, rpc: tuple
) -> None:
    """The right one opens its session; any other is refused for what is wrong with it."""
    session, other = opened(wire, folder), opened(wire, folder)
    good = session.extents[0].capability
    flipped = bytes([*good[:-1], good[-1] ^ 1])
    foreign = Keyring([b"another key, of 32 bytes or more!"])
    claims = Keyring([bytes.fromhex((folder.path / "key").read_text())]).verify(good)
    for bad, code in (
        (flipped, "UNAUTHENTICATED"),
        (good[:-1], "UNAUTHENTICATED"),
        (b"\0" * 200, "UNAUTHENTICATED"),
        (foreign.sign(claims), "UNAUTHENTICATED"),
        (forged(folder, session, ends_at=claims.issued_at), "UNAUTHENTICATED"),
        (forged(folder, session, issued_at=claims.ends_at - 1), "UNAUTHENTICATED"),
        (other.extents[0].capability, "PERMISSION_DENIED"),
        (forged(folder, session, audience=digest_of("an old life")), "ABORTED"),
    ):
        assert ask_with(wire, rpc, session, bad).code == code
    if RULES[WORKER.full_name][rpc[1].name].capability is Rights.WRITE:
        only_reading = forged(folder, session, rights=Rights.READ)
        assert ask_with(wire, rpc, session, only_reading).code == "PERMISSION_DENIED"
    check_untouched(wire, folder, other)
    # One that is here has gone nowhere.
    served = "NOT_FOUND" if rpc[1].name == "FollowSession" else "OK"
    assert ask_with(wire, rpc, session, good).code == served


def test_a_captured_capability_is_no_use_to_another_tenant(wire: Wire, folder: Folder) -> None:
    """Whoever shows who they are cannot use a right of somebody else."""
    session = opened(wire, folder)
    keys = Keyring([bytes.fromhex((folder.path / "key").read_text())])
    now = wire.service.manager._clock.time()
    bob = Claims(
        Kind.CALLER, Caller("bob", Role.TENANT), "", Rights.WRITE, digest_of("worker"), now, now + 9
    )
    token = base64.urlsafe_b64encode(keys.sign(bob)).decode()
    request = types_pb2.GetSessionRequest(
        session_id=session.session_id, capability=session.extents[0].capability
    )
    rpc = (WORKER, WORKER.methods_by_name["GetSession"])
    answer = wire.call(rpc, request, ("authorization", f"Bearer {SIGNED}{token}"))
    assert answer.code == "UNAUTHENTICATED"
    check_untouched(wire, folder, session)


def test_what_is_signed_for_one_side_is_not_taken_by_the_other(wire: Wire, folder: Folder) -> None:
    """A worker's heartbeat credential opens nothing at workers; a session's is no credential."""
    keys = Keyring([bytes.fromhex((folder.path / "key").read_text())])
    now = wire.service.manager._clock.time()
    session = opened(wire, folder)
    for_manager = keys.sign(
        Claims(
            Kind.CALLER,
            Caller("alice", Role.OPERATOR),
            "",
            Rights.WRITE,
            digest_of("manager"),
            now,
            now + 60,
        )
    )
    rpc = (WORKER, WORKER.methods_by_name["PageStats"])
    for signed in (for_manager, session.extents[0].capability):
        token = base64.urlsafe_b64encode(signed).decode()
        answer = wire.call(
            rpc, types_pb2.PageStatsRequest(), ("authorization", f"Bearer {SIGNED}{token}")
        )
        assert answer.code == "UNAUTHENTICATED"


def test_roles_open_what_they_are_for(wire: Wire, folder: Folder) -> None:
    """Numbers for metrics and operators, operations for operators, sessions for neither's eyes."""
    session = opened(wire, folder)

    def code(tenant: str, name: str) -> str:
        rpc = (MANAGER, MANAGER.methods_by_name[name])
        request = ABOUT[name](session.session_id, session.epoch)
        return wire.call(rpc, request, bearer(folder, tenant)).code

    assert code("prometheus", "PageStats") == "OK"
    assert code("prometheus", "ListWorkers") == "OK"
    assert code("prometheus", "Allocate") == "PERMISSION_DENIED"
    assert code("prometheus", "ListSessions") == "PERMISSION_DENIED"
    assert code("olga", "PageStats") == "OK"
    assert code("olga", "DrainWorker") == "NOT_FOUND"
    assert code("olga", "GetSession") == "NOT_FOUND"
    assert code("olga", "Heartbeat") == "PERMISSION_DENIED"
    assert code("alice", "PageStats") == "PERMISSION_DENIED"
    assert code("alice", "DrainWorker") == "PERMISSION_DENIED"
    rpc = (MANAGER, MANAGER.methods_by_name["ListSessions"])
    request = types_pb2.ListSessionsRequest()
    listed = wire.call(rpc, request, bearer(folder, "olga")).response.sessions
    assert session.session_id in [one.session_id for one in listed]
    bobs = wire.call(rpc, request, bearer(folder, "bob")).response.sessions
    assert session.session_id not in [one.session_id for one in bobs]
    workers = (MANAGER, MANAGER.methods_by_name["ListWorkers"])
    asked = manager_pb2.ListWorkersRequest()
    [told] = wire.call(workers, asked, bearer(folder, "alice")).response.workers
    assert (told.worker_id, told.session_count, told.free_bytes) == ("w0", 0, 0)
    [seen] = wire.call(workers, asked, bearer(folder, "olga")).response.workers
    assert seen.free_bytes > 0
    check_untouched(wire, folder, session)


def test_health_is_for_everybody_and_reflection_is_not(
    service: SecuredService, folder: Folder
) -> None:
    """What is served beside our services, too, is looked at one by one."""
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    for address in (service.manager.address, service.workers[0].address):
        with grpc.insecure_channel(address) as channel:
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                next(reflection.ServerReflectionInfo(iter([asked]), timeout=10))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
            health = health_pb2_grpc.HealthStub(channel)
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with grpc.insecure_channel(service.manager.address) as channel:
        known = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([asked]), timeout=10, metadata=(bearer(folder, "olga"),)
        )
        served = {one.name for one in next(known).list_services_response.service}
    others = served - {"grpc.reflection.v1alpha.ServerReflection"}
    assert others == FREE | {MANAGER.full_name}


def test_convert_keeps_capabilities_out_of_what_is_printed(wire: Wire, folder: Folder) -> None:
    """A session that is logged or shown does not give itself away."""
    session = opened(wire, folder)
    info = convert.session_from_pb(session)
    assert info.extents[0].capability
    assert repr(info.extents[0].capability) not in repr(info)
    check_untouched(wire, folder, session)
