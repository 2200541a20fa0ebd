"""Why a connection does not come about: gRPC says little, so the handshake is tried once more.

For people alone. Nothing depends on what is found, and a server that is merely down is none of it.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from dataclasses import dataclass
from typing import Final

_ALPN: Final = ["h2"]
_PLAINTEXT: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING")


@dataclass(frozen=True, slots=True)
class Shown:
    """What we connect with: paths of PEM files, and the name that we expect.

    ca: None: the system's roots. name: None: the address's host.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    name: str | None = None


def find_refusal(address: str, *, tls: Shown | None = None, timeout_s: float) -> str | None:
    """Return why a server refuses us, or we it, in one line; None: for no such reason.

    Args:
        address: host:port, or unix:PATH.
        tls: None: we speak plaintext.
        timeout_s: For each of the few steps.
    """
    try:
        if tls is None:
            if _speaks_tls(address, timeout_s):
                return "the server speaks TLS, and this client plaintext: say tls="
            return None
        return _refusal_of_tls(address, tls, timeout_s)
    except OSError:  # nobody is there, or says anything
        return None


def _speaks_tls(address: str, timeout_s: float) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(_ALPN)
    with contextlib.closing(_connected(address, timeout_s)) as connection:
        try:
            context.wrap_socket(connection, do_handshake_on_connect=True).close()
        except ssl.SSLError as error:
            # It has answered in TLS, if only to refuse.
            return "ALERT" in (error.reason or "")
        except OSError:
            return False
    return True


def _refusal_of_tls(address: str, tls: Shown, timeout_s: float) -> str | None:
    context = ssl.create_default_context(cafile=tls.ca)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.set_alpn_protocols(_ALPN)
    if tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    name = tls.name or address.rpartition(":")[0].strip("[]")
    with contextlib.closing(_connected(address, timeout_s)) as connection:
        try:
            with context.wrap_socket(connection, server_hostname=name) as wrapped:
                # A server that does not take our certificate ends the connection only now; one
                # that does speaks first.
                if wrapped.recv(1):
                    return None
        except ssl.SSLCertVerificationError as error:
            return f"its certificate is refused: {error.verify_message or error.reason}"
        except ssl.SSLError as error:
            if (error.reason or "") in _PLAINTEXT:
                return "the server does not speak TLS, and this client does: leave out tls="
            return f"the handshake fails: {error.reason}"
        except TimeoutError:
            return None
        except ConnectionError:
            return "the server does not speak TLS, and this client does: leave out tls="
    if tls.certificate is None:
        return "the server wants a client certificate: say tls=Tls(cert_file=..., key_file=...)"
    return (
        f"the server does not take {tls.certificate}: it must be signed by the CA that the server "
        "trusts, and be valid now"
    )


def _connected(address: str, timeout_s: float) -> socket.socket:
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect(address.removeprefix("unix:").removeprefix("//"))
        except OSError:
            connection.close()
            raise
        return connection
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise OSError(f"not host:port: {address}")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
