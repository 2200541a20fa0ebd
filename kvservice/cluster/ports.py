"""Which ports are free on this machine, just now."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Final

from kvservice.core.errors import Conflict, InvalidRequest, Unavailable

_CONNECT_TIMEOUT_S: Final = 5.0


def free_ports(host: str, num_ports: int) -> list[int]:
    """Return different ports that nobody listens at.

    Nothing keeps them free: another process may take one before the caller does.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_bound(host, 0)) for _ in range(num_ports)]
        return [int(bound.getsockname()[1]) for bound in sockets]


def check_port_free(host: str, port: int, option: str) -> None:
    """Raise unless a server can listen at this port.

    Args:
        host: One of this machine's addresses, or a name for one.
        port: What is asked for.
        option: Which option asks for it, for the message.

    Raises:
        Conflict: Somebody listens there.
        InvalidRequest: The host isn't this machine's, or the port may not be used by this user.
    """
    try:
        _bound(host, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Conflict(
                f"port {port} of {host} is in use: choose another by {option}, 0 for any"
            ) from error
        raise InvalidRequest(f"cannot listen at {host}:{port}: {error.strerror}") from error


def check_listening(ray_address: str) -> None:
    """Raise unless somebody listens there; Ray itself would wait for long. "auto" is not checked.

    Raises:
        InvalidRequest: The address is malformed.
        Unavailable: Nobody listens.
    """
    if ray_address == "auto" or "://" in ray_address:
        return
    host, _, port = ray_address.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidRequest(f'--address must be local, auto or HOST:PORT, got "{ray_address}"')
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise Unavailable(f"no Ray cluster answers at {ray_address}: {error}") from error


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        # As servers do: connections of a server that has just ended don't count.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(1)
    except OSError:
        bound.close()
        raise
    return bound
