"""`kvservice doctor`: what is wrong with an installation or a service, and what to do about it."""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import platform
import re
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from importlib import metadata
from ipaddress import ip_address
from typing import Any, Final

from kvservice import __version__, config
from kvservice.cli.exits import FAILED, OK
from kvservice.cli.securing import tls_of
from kvservice.cli.showing import connect_to, find_state
from kvservice.clock import SystemClock
from kvservice.cluster.ports import check_port_free
from kvservice.core.errors import KVServiceError
from kvservice_client import Tls

FINE: Final = "ok"
WARNING: Final = "warning"
WRONG: Final = "wrong"

_TIMEOUT_S: Final = 3.0
_MAX_SKEW_S: Final = 2.0
_MIN_FILES: Final = 4096
_MIN_DAYS: Final = 7
_PORT: Final = 50051
_SHOWN: Final = ("grpcio", "protobuf", "numpy", "torch", "transformers", "ray", "jax")


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check says.

    Fields:
        outcome: ok; warning: it works, but; wrong: it does not, or will not.
        advice: What to do. Empty if there is nothing to do.
    """

    check: str
    outcome: str
    found: str
    advice: str = ""


def doctor(arguments: argparse.Namespace) -> int:
    """Check this installation and, if one runs or is named, a service."""
    findings: list[Finding] = []
    for finding in _all(arguments):
        findings.append(finding)
        if not arguments.json:
            print(_text(finding), flush=True)
    if arguments.json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
    return FAILED if any(finding.outcome == WRONG for finding in findings) else OK


def _text(finding: Finding) -> str:
    head = {FINE: "ok     ", WARNING: "WARNING", WRONG: "WRONG  "}[finding.outcome]
    lines = [f"{head}  {finding.check:<11}  {finding.found}"]
    if finding.advice:
        lines.append(f"{'':20}    do: {finding.advice}")
    return "\n".join(lines)


def _all(arguments: argparse.Namespace) -> Iterator[Finding]:
    yield check_versions(_installed, _requirements())
    yield _check_kernel()
    yield _check_files()
    yield _check_memory(arguments)
    if arguments.address is None and find_state(arguments.name) is None:
        yield _check_port()
        yield Finding("service", FINE, "none runs here under this name, and none was named")
        return
    yield from _of_service(arguments)


# -- this installation


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> list[str] | None:
    """Return what our metadata asks for; None if we run from sources that were never installed."""
    try:
        return metadata.requires("kvservice") or []
    except metadata.PackageNotFoundError:
        return None


def check_versions(installed: Callable[[str], str | None], requires: list[str] | None) -> Finding:
    """Check that what is installed has the versions that this package asks for.

    Args:
        installed: Returns a package's version; None: it is not there.
        requires: Requirements as package metadata has them, those of extras too. None: unknown.
    """
    shown = [f"kvservice {__version__}", f"Python {platform.python_version()}"]
    shown += [f"{name} {version}" for name in _SHOWN if (version := installed(name))]
    if requires is None:
        shown.append("not installed as a package, so that requirements are not checked")
        return Finding("versions", WARNING, ", ".join(shown), "pip install, or make setup")
    wrong = []
    for requirement in requires:
        name, spec = _parsed(requirement)
        version = installed(name)
        if version is None and "extra ==" not in requirement:
            wrong.append(f"{name} is missing")
        elif version is not None and not _satisfies(version, spec):
            wrong.append(f"{name} {version} is installed, {spec} is needed")
    if wrong:
        advice = "pip install --upgrade 'kvservice[server]', or the extras that you use"
        return Finding("versions", WRONG, "; ".join(dict.fromkeys(wrong)), advice)
    return Finding("versions", FINE, ", ".join(shown))


def _parsed(requirement: str) -> tuple[str, str]:
    """Return name and versions of a requirement: `grpcio`, `>=1.73.1`."""
    match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*)", requirement)
    assert match is not None, requirement
    return match[1], match[2].strip(" ()")


def _satisfies(version: str, spec: str) -> bool:
    """Whether a version is within a specification of `>=` and `<` alone, which all of ours are."""
    have = _numbers(version)
    for part in filter(None, (part.strip() for part in spec.split(","))):
        limit = _numbers(part.lstrip("<>=~!"))
        if part.startswith(">=") and have < limit:
            return False
        if part.startswith("<") and have >= limit:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


def _check_kernel() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("kernel", FINE, "the client alone is installed, which computes nothing")
    from kvservice_workers.attention import native

    if native.available():
        return Finding("kernel", FINE, f"native, for {', '.join(native.instruction_sets())}")
    return Finding(
        "kernel",
        WARNING,
        f"the native kernel is missing ({native.why_missing()}): torch's serve, several times "
        "slower",
        "install a C++ compiler and Python's headers (g++, python3-dev), then install kvservice "
        "again",
    )


def _check_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _MIN_FILES:
        return Finding(
            "open files",
            WARNING,
            f"a process may have {soft} files open, and each connection is one",
            f"ulimit -n {min(hard, 65536)} before starting workers",
        )
    return Finding("open files", FINE, f"a process may have {soft}")


def _check_memory(arguments: argparse.Namespace) -> Finding:
    limit = config.memory_limit_bytes()
    text = f"this process may use {config.format_size(limit)}"
    state = find_state(arguments.name) if arguments.address is None else None
    if state is None or state.options.memory_percent:
        return Finding("memory", FINE, text)
    budgets = state.options.num_workers * state.options.memory_bytes
    text += f", the workers' budgets are {config.format_size(budgets)} together"
    if budgets > limit:
        advice = (
            "start fewer workers, or give them less by --memory: pages that do not fit kill them"
        )
        return Finding("memory", WRONG, text, advice)
    if budgets > 0.75 * limit:
        return Finding("memory", WARNING, text, "leave a quarter to everything else: --memory 70%")
    return Finding("memory", FINE, text)


def _check_port() -> Finding:
    try:
        check_port_free("127.0.0.1", _PORT, "--port")
    except KVServiceError as error:
        return Finding("port", WARNING, error.message, "state another to `up`, by --port")
    return Finding("port", FINE, f"{_PORT}, which `up` takes, is free")


# -- a service


def _of_service(arguments: argparse.Namespace) -> Iterator[Finding]:
    state = find_state(arguments.name) if arguments.address is None else None
    address = arguments.address or (state and state.manager_address) or ""
    clock = SystemClock()
    began = clock.monotonic()
    try:
        with connect_to(arguments) as client:
            workers = client.list_workers()
            client.page_stats()
    except KVServiceError as error:
        yield Finding("manager", WRONG, f"{address}: {error.message}", _advice_for(address))
        return
    took_ms = 1000 * (clock.monotonic() - began)
    yield Finding("manager", FINE, f"{address} answers, {took_ms:.0f} ms for three questions")
    yield check_encryption(address)
    for worker in workers:
        yield _check_worker(worker)
    endpoints = [worker.metrics_address for worker in workers if worker.metrics_address]
    if state is not None and state.metrics_address:
        endpoints.insert(0, state.metrics_address)
    yield _check_metrics(endpoints, tls_of(arguments))


def _advice_for(address: str) -> str:
    host, port = _split(address)
    try:
        socket.create_connection((host, port), _TIMEOUT_S).close()
    except OSError as error:
        return (
            f"nobody accepts connections there ({error}): start it by `kvservice up`, or look at "
            "the address and at firewalls in between"
        )
    return "somebody accepts connections there: does it speak TLS, or want a token, or hang?"


def check_encryption(address: str) -> Finding:
    """Check whether what goes to an address can be read on the way, and how long it cannot."""
    host, port = _split(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only looked at
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), _TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as encrypted,
        ):
            certificate = encrypted.getpeercert(binary_form=True)
            protocol = encrypted.version()
    except (OSError, ssl.SSLError):
        if _is_loopback(host):
            return Finding("TLS", FINE, f"none at {address}, which is this machine's alone")
        return Finding(
            "TLS",
            WARNING,
            f"none at {address}: whoever is on the way can read, and take over, every session",
            "start the servers with certificates; see SECURITY.md",
        )
    if certificate is None:
        return Finding("TLS", WARNING, f"{address} speaks {protocol} without a certificate")
    return _check_certificate(address, f"{protocol}", ssl.DER_cert_to_PEM_cert(certificate))


def _check_certificate(address: str, protocol: str, pem: str) -> Finding:
    try:
        from kvservice.certificates import end_of
    except ImportError as error:
        return Finding("TLS", FINE, f"{address} speaks {protocol} ({error.name} would tell more)")
    days = (end_of(pem.encode()) - SystemClock().time()) / 86400
    text = f"{address} speaks {protocol}, its certificate holds for {days:.0f} days"
    if days < _MIN_DAYS:
        return Finding("TLS", WARNING if days > 0 else WRONG, text, "renew the certificate")
    return Finding("TLS", FINE, text)


def _check_worker(worker: Any) -> Finding:
    name, address = f"worker {worker.worker_id}", worker.address
    host, port = _split(address)
    try:
        socket.create_connection((host, port), _TIMEOUT_S).close()
    except OSError as error:
        return Finding(
            "reachable",
            WRONG,
            f"{name} at {address}: {error}",
            "clients send Attend to workers directly: open the way from here to there, or start "
            "it with an --advertise-host that can be reached",
        )
    return Finding("reachable", FINE, f"{name} at {address}")


def _check_metrics(endpoints: list[str], tls: Tls | None) -> Finding:
    """Check that numbers can be had and, by the servers' own dates, that clocks agree.

    Args:
        tls: How they are asked, as gRPC is. None: in plaintext.
    """
    if not endpoints:
        return Finding("clocks", FINE, "not compared: no endpoint for metrics is known")
    skews: dict[str, float] = {}
    failures: list[str] = []
    for endpoint in endpoints:
        try:
            date = parsedate_to_datetime(_date_at(endpoint, tls)).timestamp()
        except (OSError, http.client.HTTPException, TypeError, ValueError) as error:
            failures.append(f"{endpoint}: {error}")
            continue
        # The header has whole seconds, rounded down.
        skews[endpoint] = date + 0.5 - SystemClock().time()
    if failures:
        advice = "Prometheus must reach them; that this machine does not may be as it should be"
        return Finding("metrics", WARNING, "; ".join(failures), advice)
    endpoint, skew = max(skews.items(), key=lambda item: abs(item[1]))
    if abs(skew) > _MAX_SKEW_S:
        return Finding(
            "clocks",
            WARNING,
            f"that of {endpoint} is {skew:+.0f} s off this machine's",
            "let both follow NTP: tokens and certificates are judged by the clock (leases are not)",
        )
    return Finding("clocks", FINE, f"{len(skews)} compared, none more than {_MAX_SKEW_S:g} s off")


def _date_at(endpoint: str, tls: Tls | None) -> str:
    """Return what a server dates its answer, such as: metrics are for Prometheus' token alone."""
    host, port = _split(endpoint)
    with closing(http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)) as connection:
        connection.connect()
        if tls is not None:
            context = ssl.create_default_context(cafile=tls.ca_file)
            name = tls.server_name or host
            connection.sock = context.wrap_socket(connection.sock, server_hostname=name)
        connection.request("GET", "/metrics")
        return connection.getresponse().headers["Date"] or ""


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port) if port.isdigit() else 0


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
