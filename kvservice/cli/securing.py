"""Subcommands that make credentials, and how the others present theirs."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path
from typing import Any, Final

from kvservice.cli.exits import OK
from kvservice.clock import SystemClock
from kvservice.config import ConfigError
from kvservice.core.caller import Caller, Role, check_tenant
from kvservice.core.errors import NotFound
from kvservice.credentials import hashed, replace_file
from kvservice_client import Tls

_TOKEN_BYTES: Final = 32
_KEY: Final = "capability.key"


def certs(arguments: argparse.Namespace) -> int:
    """Make a CA, certificates for servers and callers, and a key for manager and workers."""
    try:
        from kvservice.certificates import make_development_certificates
    except ImportError as error:
        raise NotFound(
            f"certificates need the package {error.name}: pip install 'kvservice[server]'"
        ) from error
    if arguments.days <= 0:
        raise ConfigError(f"--days must be above 0, got {arguments.days:g}")
    callers = [
        Caller(check_tenant(name), role)
        for role in (Role.TENANT, Role.OPERATOR, Role.METRICS)
        for name in getattr(arguments, role.value)
    ]
    folder: Path = arguments.folder
    written = make_development_certificates(
        folder,
        hosts=arguments.host,
        callers=callers,
        days=arguments.days,
        now=SystemClock().time(),
    )
    if not (folder / _KEY).exists():
        replace_file(folder / _KEY, f"{secrets.token_hex(_TOKEN_BYTES)}\n".encode(), 0o600)
        written.append(folder / _KEY)
    for path in written:
        print(path)
    return OK


def token(arguments: argparse.Namespace) -> int:
    """Make a bearer token; what a token file keeps of it is its hash."""
    tenant = check_tenant(arguments.tenant)
    made = f"kv_{secrets.token_urlsafe(_TOKEN_BYTES)}"
    line = f"{hashed(made)} {tenant} {arguments.role}"
    path: Path | None = arguments.file
    if path is None:
        print(made)
        print(line)
        return OK
    before = path.read_text() if path.exists() else ""
    if before and not before.endswith("\n"):
        before += "\n"
    replace_file(path, f"{before}{line}\n".encode(), 0o600)
    print(made)
    return OK


def calling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what `connect` is to be told of who asks.

    Raises:
        ConfigError: The token's file cannot be read, or holds none.
    """
    found: dict[str, Any] = {}
    if arguments.token_file is not None:
        try:
            words = Path(arguments.token_file).read_text().split()
        except OSError as error:
            raise ConfigError(f"{arguments.token_file} cannot be read: {error.strerror}") from error
        if not words:
            raise ConfigError(f"{arguments.token_file} is empty; it should hold the bearer token")
        found["token"] = words[0]
    if (tls := tls_of(arguments)) is not None:
        found["tls"] = tls
    return found


def tls_of(arguments: argparse.Namespace) -> Tls | None:
    """Return how servers are asked over TLS, for their metrics by HTTPS; None: in plaintext."""
    if not (arguments.tls_ca or arguments.tls_cert):
        return None
    return Tls(
        ca_file=arguments.tls_ca,
        cert_file=arguments.tls_cert,
        key_file=arguments.tls_key,
        server_name=arguments.tls_server_name,
    )
