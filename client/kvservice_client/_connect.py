"""Finding a service behind an address."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvservice.clock import SystemClock
from kvservice.core.errors import InvalidRequest, NotFound, Unavailable
from kvservice.wire.names import MANAGER, WORKER
from kvservice.wire.tracing import find_tracer
from kvservice_client._client import Client
from kvservice_client._connections import ClientConfig, Connections
from kvservice_client._transport import Transport
from kvservice_client._transport_grpc import GrpcTransport, Tls
from kvservice_client._transport_lane import LaneTransport
from kvservice_client._transport_traced import TracedTransport
from kvservice_client._watchdog import Watchdog

HANDSHAKE_S: Final = 2.0
"""For finding out why there is no connection."""


def connect(
    address: str,
    *,
    token: str | None = None,
    tls: Tls | None = None,
    timeout_s: float = 30.0,
    lane: bool = True,
    config: ClientConfig | None = None,
) -> Client:
    """Find a manager, or a lone worker, behind an address.

    Args:
        address: host:port, [IPv6]:port, or unix:PATH.
        token: Presented as a bearer token with every call to this address. Workers behind a
            manager never see it: what they have issued for each session goes there.
        tls: None: plaintext.
        timeout_s: For each call, and for finding the server now, retries included.
        lane: Take the workers' lanes for Attend where they have one. Not with TLS.
        config: Further time limits; its own timeout_s gives way to `timeout_s`.

    Raises:
        Unavailable: Nobody answers there.
        NotFound: Somebody does, but not a kvservice.
    """
    if not address:
        raise InvalidRequest("the address is empty; say host:port, or unix:PATH")
    clock = SystemClock()
    watchdog = Watchdog(clock)
    config = replace(config or ClientConfig(), timeout_s=timeout_s)
    tracer = find_tracer()

    def dial_grpc(target: str) -> GrpcTransport:
        # Workers are shown what they have issued themselves: they never see the token.
        shown = token if target == address else None
        return GrpcTransport(
            target, clock=clock, watchdog=watchdog, token=shown, tls=tls, tracer=tracer
        )

    def dial(target: str) -> Transport:
        over_grpc = dial_grpc(target)
        way = LaneTransport(over_grpc, clock=clock) if lane and tls is None else over_grpc
        return way if tracer is None else TracedTransport(way, tracer, target)

    connections = Connections(address, dial, config=config, clock=clock, on_close=watchdog.close)
    try:
        connections.lone_worker = _is_lone_worker(connections, dial_grpc(address))
    except BaseException:
        connections.close()
        raise
    return Client(connections)


class _HandshakeFailed(Exception):
    """The connection is refused, for a reason that stays. Never leaves this file."""


def _is_lone_worker(connections: Connections, transport: GrpcTransport) -> bool:
    """Ask the server's health service what it serves."""
    timeout_s = connections.config.timeout_s
    try:
        for service, lone in ((MANAGER, False), (WORKER, True)):
            name = service.full_name

            def attempt(left_s: float, name: str = name) -> bool:
                try:
                    return transport.serves(name, timeout_s=left_s)
                except Unavailable as error:
                    refusal = transport.find_refusal(min(left_s, HANDSHAKE_S))
                    if refusal is not None:
                        raise _HandshakeFailed(refusal) from error
                    raise

            if connections.retrier.run(attempt, timeout_s):
                return lone
    except _HandshakeFailed as error:  # asking again would not help
        raise Unavailable(f"{connections.front}: {error}") from error
    finally:
        transport.close()
    raise NotFound(f"what answers at {connections.front} is neither a manager nor a worker")
