"""Credentials for tests, in folders of their own, and servers that ask for them."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvservice.certificates import make_development_certificates
from kvservice.clock import Clock, SystemClock
from kvservice.config import ManagerSettings, Security, ServerLimits, WorkerSettings
from kvservice.core.caller import Caller, Role
from kvservice.core.liveness import WorkerState
from kvservice.credentials import hashed, replace_file
from kvservice.runtime.manager import ManagerServer
from kvservice.runtime.worker import WorkerServer
from kvservice_client import Client, Tls, connect
from tests.serving import until

CALLERS = (
    Caller("alice", Role.TENANT),
    Caller("bob", Role.TENANT),
    Caller("olga", Role.OPERATOR),
    Caller("prometheus", Role.METRICS),
)
LIMITS = ServerLimits(max_streams=16, unary_threads=4)


class Folder:
    """Certificates, a key and tokens, as an operator would have them."""

    def __init__(self, path: Path, *, days: float = 2.0, now: float | None = None) -> None:
        self.path = path
        self.tokens = {caller.tenant: f"token-{secrets.token_hex(16)}" for caller in CALLERS}
        self.issue(days=days, now=now)
        self.write_key(secrets.token_hex(32))
        self.write_tokens()

    def issue(self, *, days: float = 2.0, now: float | None = None) -> None:
        """Make the certificates, or make them anew with the same CA."""
        start = SystemClock().time() if now is None else now
        make_development_certificates(self.path, hosts=(), callers=CALLERS, days=days, now=start)

    def write_key(self, *keys: str) -> None:
        replace_file(self.path / "key", "\n".join(keys).encode(), 0o600)

    def write_tokens(self, without: Sequence[str] = ()) -> None:
        """Write the hashes of all tokens, but of some tenants'."""
        lines = [
            f"{hashed(self.tokens[caller.tenant])} {caller.tenant} {caller.role.value}"
            for caller in CALLERS
            if caller.tenant not in without
        ]
        replace_file(self.path / "tokens", "\n".join(lines).encode(), 0o600)

    def name(self, name: str) -> str:
        return str(self.path / name)

    def security(self, **changes: Any) -> Security:
        """Return tokens and a key, in plaintext; `changes` by the names of the fields."""
        fields = {"token_file": self.name("tokens"), "key_file": self.name("key"), **changes}
        return Security(**fields)

    def tls(self, **changes: Any) -> Security:
        """Return TLS, and the key."""
        fields = {
            "key_file": self.name("key"),
            "tls_cert": self.name("server.pem"),
            "tls_key": self.name("server.key"),
            "tls_ca": self.name("ca.pem"),
            **changes,
        }
        return Security(**fields)

    def mutual_tls(self, **changes: Any) -> Security:
        return self.tls(mutual_tls=True, **changes)

    def https(self) -> ssl.SSLContext:
        """Return what an HTTP client trusts servers by; it shows no certificate of its own."""
        return ssl.create_default_context(cafile=self.name("ca.pem"))

    def client_tls(self, caller: str | None = None, **changes: Any) -> Tls:
        """Return what a client is told; `caller` such as "tenant-alice": with that certificate."""
        fields: dict[str, Any] = {"ca_file": self.name("ca.pem")}
        if caller is not None:
            fields["cert_file"] = self.name(f"{caller}.pem")
            fields["key_file"] = self.name(f"{caller}.key")
        return Tls(**{**fields, **changes})


@dataclass
class SecuredService:
    """A manager and workers that know each other by a key."""

    manager: ManagerServer
    workers: list[WorkerServer]
    folder: Folder
    stack: ExitStack

    def connect(self, tenant: str | None = None, **options: Any) -> Client:
        """Return a client that presents a tenant's token; it is closed with the service."""
        token = None if tenant is None else self.folder.tokens[tenant]
        options = {"timeout_s": 10.0, **options}
        client = connect(self.manager.address, token=token, **options)
        return self.stack.enter_context(client)

    def num_alive(self) -> int:
        views = self.manager.manager.workers()
        return sum(view.state is WorkerState.ALIVE for view in views)


@contextmanager
def secured(
    folder: Folder,
    security: Security | None = None,
    *,
    num_workers: int = 1,
    clock: Clock | None = None,
    **settings: Any,
) -> Iterator[SecuredService]:
    """Run a manager and workers; `settings` are the workers'."""
    security = folder.security() if security is None else security
    with ExitStack() as stack:
        manager = ManagerServer(ManagerSettings(limits=LIMITS, security=security), clock=clock)
        stack.enter_context(manager)
        service = SecuredService(manager, [], folder, stack)
        workers_security = {"security": security, **settings}
        for index in range(num_workers):
            worker = WorkerServer(
                WorkerSettings(
                    f"w{index}",
                    1 << 24,
                    manager_address=manager.address,
                    limits=LIMITS,
                    **workers_security,
                ),
                clock=clock,
            )
            service.workers.append(stack.enter_context(worker))
        until(lambda: service.num_alive() == num_workers)
        yield service
        for worker in service.workers:
            worker.worker.check()
