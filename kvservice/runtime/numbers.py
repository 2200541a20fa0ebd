"""Who may read a process's numbers over HTTP, where not everybody may.

On the loopback interface, and where authentication is off or `--insecure` is said, everybody who
reaches the port. Elsewhere whoever shows a bearer token: the one of `--metrics-token`, or at the
manager one of the roles `metrics` and `operator`. Where there is neither, this machine alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address
from typing import Any, Final

from kvservice.config import Security, is_loopback
from kvservice.core.caller import Caller, Role

READERS: Final = (Role.OPERATOR, Role.METRICS)

Page = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""As `kvservice.metrics.endpoint` has it, which those who only look do not load."""

FindCaller = Callable[[str], Caller | None]
"""Returns whose a bearer token is; None: nobody's."""


def is_open(security: Security, host: str) -> bool:
    """Return whether whoever reaches a port on this host may read its numbers."""
    return not security.authenticates or security.insecure or is_loopback(host)


def refusal_of(environ: Mapping[str, Any], find_caller: FindCaller | None) -> str | None:
    """Return why numbers are not for whoever asks, as an HTTP status; None: they are.

    Args:
        find_caller: None: no token is known here.
    """
    if find_caller is None:
        return None if is_local(environ.get("REMOTE_ADDR", "")) else "403 Forbidden"
    scheme, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
    caller = find_caller(token) if scheme.lower() == "bearer" and token else None
    if caller is None:
        return "401 Unauthorized"
    return None if caller.role in READERS else "403 Forbidden"


def guarded(page: Page, find_caller: FindCaller | None) -> Page:
    """Return a page that only those see who may read numbers."""

    def serve(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        refusal = refusal_of(environ, find_caller)
        if refusal is None:
            return page(environ, start)
        kind = ("Content-Type", "text/plain; charset=utf-8")
        start(refusal, [kind, ("WWW-Authenticate", "Bearer")])
        return [f"{refusal}\n".encode()]

    return serve


def is_local(address: str) -> bool:
    """Return whether an address is this machine's own, for itself."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False
