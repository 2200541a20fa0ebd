"""What the port of the metrics shows over TLS: the certificate that gRPC shows, as it is now."""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvservice.config import ConfigError
from kvservice.credentials import CertificateFiles, Certificates


class HttpsContexts:
    """Makes a context of the certificate that files hold, and another one when it changes.

    Callers are asked for no certificate, also where gRPC asks them for one: Prometheus presents a
    token. Thread-safe.
    """

    def __init__(self, certificates: CertificateFiles) -> None:
        self._certificates = certificates
        self._lock = threading.Lock()
        self._shown = certificates.get()
        self._context = server_context("the certificate", self._shown)

    def get(self) -> ssl.SSLContext:
        """Return the context for a connection that begins now."""
        found = self._certificates.get()
        with self._lock:
            if found is not self._shown:
                self._context, self._shown = server_context("the certificate", found), found
            return self._context


def server_context(name: str, found: Certificates) -> ssl.SSLContext:
    """Return a context that shows a certificate, over TLS 1.2 or newer.

    Args:
        name: Of the certificate's file, for messages.

    Raises:
        ConfigError: OpenSSL does not take certificate or key, such as one that is too short.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # What has been read and checked, not what the files may hold by now.
        with _as_file(found.certificate) as chain, _as_file(found.private_key) as key:
            context.load_cert_chain(chain, key)
    except ssl.SSLError as error:
        reason = str(error.reason or error).replace("_", " ").lower()
        raise ConfigError(f"{name} cannot be shown over TLS: {reason}; make another one") from error
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be handed to OpenSSL: {error.strerror}; let this process make files in "
            "memory (memfd_create), and see /proc"
        ) from error
    return context


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Yield the path of a file in memory: the only way to give something to `ssl`."""
    descriptor = os.memfd_create("kvservice-tls", os.MFD_CLOEXEC)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{descriptor}"
