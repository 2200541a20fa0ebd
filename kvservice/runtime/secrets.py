"""A process's secret files, opened once, and what is made of them."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from kvservice.clock import Clock
from kvservice.config import ConfigError, Security
from kvservice.core.caller import Caller
from kvservice.core.capability import Keyring
from kvservice.core.quota import QuotaOf, unlimited
from kvservice.credentials import (
    CertificateFiles,
    Certificates,
    KeyFile,
    MetricsTokenFile,
    QuotaFile,
    TokenFile,
)
from kvservice.runtime.https import HttpsContexts, server_context
from kvservice.runtime.numbers import Page, guarded, is_open
from kvservice.server.dialing import Dialer, ServerCredentials, server_credentials
from kvservice.server.guard import Guard, OpenGuard
from kvservice.server.speaking import Speaker


class Secrets:
    """All that `Security` names, read and checked.

    Raises:
        ConfigError: At construction, where something is missing or wrong.
    """

    def __init__(self, security: Security, clock: Clock) -> None:
        self._security = security
        self._clock = clock
        self._tokens: TokenFile | None = None
        if security.token_file is not None:
            self._tokens = TokenFile(Path(security.token_file), clock)
        self._keys: KeyFile | None = None
        if security.key_file is not None:
            self._keys = KeyFile(Path(security.key_file), clock)
        self.quota_of: QuotaOf = unlimited
        self._quotas: QuotaFile | None = None
        if security.quota_file is not None:
            self._quotas = QuotaFile(Path(security.quota_file), clock)
            self.quota_of = self._quotas.of
        self._metrics_token: MetricsTokenFile | None = None
        if security.metrics_token_file is not None:
            self._metrics_token = MetricsTokenFile(Path(security.metrics_token_file), clock)
        self._certificates = self._open_certificates()

    def up_to_date(self) -> bool:
        """Whether what holds is what the files say now: False if one has become unreadable."""
        files = (
            *(self._tokens, self._keys, self._quotas, self._metrics_token),
            self._certificates,
        )
        return all(file.up_to_date() for file in files if file is not None)

    def certificate_ends(self) -> dict[str, float]:
        """Return when our certificates expire, in seconds since the epoch: `server`, and `ca`."""
        if self._certificates is None:
            return {}
        from kvservice.certificates import end_of

        found = self._certificates.get()
        ends = {"server": end_of(found.certificate)}
        if found.ca:
            ends["ca"] = end_of(found.ca)
        return ends

    def token_finder(self) -> Callable[[str], Caller | None] | None:
        """Return what tells whose a token is that reads numbers; None: there are no tokens."""
        finds = [one.find for one in (self._tokens, self._metrics_token) if one is not None]
        if not finds:
            return None
        return lambda token: next(filter(None, (find(token) for find in finds)), None)

    def numbers_guard(self, host: str) -> Callable[[Page], Page]:
        """Return what stands before the numbers of a process that serves them on this host."""
        if is_open(self._security, host):
            return lambda page: page
        return partial(guarded, find_caller=self.token_finder())

    def ended_tokens(self, token_ids: Iterable[bytes]) -> list[bytes]:
        """Return those of these tokens, named as in capabilities, that hold no more."""
        if not self._security.authenticates:
            return []
        return list(token_ids) if self._tokens is None else self._tokens.ended(token_ids)

    def named_tenants(self) -> tuple[str, ...]:
        """Return the tenants that an operator has named: those with quotas of their own."""
        return () if self._quotas is None else self._quotas.tenants()

    def guard(self, name: str) -> Guard:
        """Return what stands before a server.

        Args:
            name: A worker's incarnation, or "manager".
        """
        if not self._security.authenticates:
            return OpenGuard(self._clock, self.quota_of)
        # A lone worker issues its own capabilities, by a key that ends with it.
        own = Keyring([secrets.token_bytes(32)])
        name_of: Callable[[str], Caller | None] | None = None
        if self._security.mutual_tls:
            from kvservice.certificates import caller_of_name

            name_of = caller_of_name
        return Guard(
            name,
            clock=self._clock,
            keys=(lambda: own) if self._keys is None else self._keys.get,
            tokens=self._tokens,
            name_of=name_of,
            quota_of=self.quota_of,
        )

    def server_credentials(self) -> ServerCredentials | None:
        """Return what a server shows; None: plaintext."""
        if self._certificates is None:
            return None
        return server_credentials(self._certificates, mutual=self._security.mutual_tls)

    def https_context(self) -> Callable[[], ssl.SSLContext] | None:
        """Return what an HTTP port shows over TLS, for each connection anew; None: plaintext."""
        return None if self._certificates is None else HttpsContexts(self._certificates).get

    def dialer(self) -> Dialer:
        """Return how to connect to the manager, or to workers."""
        return Dialer(self._certificates, server_name=self._security.tls_server_name)

    def speaker(self, audience: str) -> Speaker | None:
        """Return what says who we are; None where nobody asks."""
        if self._keys is None:
            return None
        return Speaker(self._keys.get, audience, self._clock)

    def _open_certificates(self) -> CertificateFiles | None:
        security = self._security
        if security.tls_cert is None or security.tls_key is None:
            return None
        try:
            from kvservice.certificates import check_certificates
        except ImportError as error:
            raise ConfigError(
                f"TLS needs the package {error.name}: pip install 'kvservice[server]'"
            ) from error

        def check(name: str, found: Certificates) -> None:
            check_certificates(name, found, self._clock.time())
            server_context(name, found)

        return CertificateFiles(
            Path(security.tls_cert),
            Path(security.tls_key),
            None if security.tls_ca is None else Path(security.tls_ca),
            check=check,
            clock=self._clock,
        )
