"""How manager and workers connect to each other: with or without TLS, by files that may change."""

from __future__ import annotations

import grpc

from kvservice.config import ServerLimits
from kvservice.credentials import CertificateFiles
from kvservice.wire.tracing import find_tracer

ServerCredentials = grpc.ServerCredentials


class Dialer:
    """Makes channels. Thread-safe.

    Args:
        certificates: What this process shows, and whom it trusts. None: plaintext.
        server_name: What the others' certificates name, where it is not their addresses.
    """

    def __init__(
        self, certificates: CertificateFiles | None = None, *, server_name: str | None = None
    ) -> None:
        self._certificates = certificates
        self._server_name = server_name

    @property
    def generation(self) -> int:
        """Rises when channels should be made anew, since the certificates have changed."""
        return 0 if self._certificates is None else self._certificates.generation

    def dial(self, address: str) -> grpc.Channel:
        """Return a channel; it connects at the first call."""
        channel = self._dial(address)
        tracer = find_tracer()
        return channel if tracer is None else tracer.channel(channel, address)

    def _dial(self, address: str) -> grpc.Channel:
        options: list[tuple[str, object]] = list(channel_options())
        if self._certificates is None:
            return grpc.insecure_channel(address, options)
        found = self._certificates.get()
        credentials = grpc.ssl_channel_credentials(
            found.ca or None, found.private_key, found.certificate
        )
        if self._server_name:
            options.append(("grpc.ssl_target_name_override", self._server_name))
        return grpc.secure_channel(address, credentials, options)


def server_credentials(certificates: CertificateFiles, *, mutual: bool) -> grpc.ServerCredentials:
    """Return credentials that follow the files: each handshake takes what they hold then.

    Args:
        mutual: Callers must show a certificate that the files' CA has signed.
    """
    shown = certificates.generation

    def configuration() -> grpc.ServerCertificateConfiguration:
        found = certificates.get()
        return grpc.ssl_server_certificate_configuration(
            [(found.private_key, found.certificate)], found.ca if mutual else None
        )

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        if (now := certificates.generation) == shown:
            return None
        shown = now
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), fetch, mutual)


def channel_options() -> list[tuple[str, int]]:
    """Return how manager and workers connect: a dead peer is noticed within seconds."""
    frame = ServerLimits().max_frame_bytes + (64 << 10)
    return [
        ("grpc.keepalive_time_ms", 2000),
        ("grpc.keepalive_timeout_ms", 1000),
        # Without it a peer that acknowledges TCP but answers nothing is noticed after a minute.
        ("grpc.http2.ping_timeout_ms", 1000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_send_message_length", frame),
        ("grpc.max_receive_message_length", frame),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
