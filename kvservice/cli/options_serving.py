"""Options of the subcommands that start, keep and end servers."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvservice import logs
from kvservice.cli.options import add_json, add_name, address, path
from kvservice.cluster.launch import LOCAL
from kvservice.config import Budget, ConfigError, parse_budget


def add_up(parser: argparse.ArgumentParser) -> None:
    """Of `up`."""
    add_name(parser)
    add_json(parser)
    add_serving(parser)
    add_logging(parser, "info")
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="how many workers (default: 1)"
    )
    parser.add_argument(
        "--address",
        default=LOCAL,
        metavar="RAY",
        help="the Ray cluster to run on: local (one of our own on this machine, the default), "
        "auto (the one that runs on this machine), or HOST:PORT",
    )
    parser.add_argument(
        "--host",
        help="where to listen (default: 127.0.0.1 in a cluster of our own, elsewhere the "
        "address of the node)",
    )
    parser.add_argument(
        "--port", type=int, default=50051, help="the manager's (default: 50051; 0: any free one)"
    )
    parser.add_argument(
        "--worker-port",
        type=int,
        default=0,
        metavar="PORT",
        help="each worker's (default: any); on one machine the first worker's, and the others "
        "get the next ones",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=0,
        metavar="PORT",
        help="the manager's for Prometheus, over HTTPS if there is a certificate (default: any; "
        "`status` shows where)",
    )
    parser.add_argument(
        "--worker-metrics-port",
        type=int,
        default=0,
        metavar="PORT",
        help="each worker's for Prometheus (default: any; `workers` shows where)",
    )
    parser.add_argument(
        "--health-port",
        type=int,
        metavar="PORT",
        help="the manager's for probes: gRPC health in plaintext, nothing else (default: none)",
    )
    parser.add_argument(
        "--worker-health-port",
        type=int,
        metavar="PORT",
        help="each worker's for probes (default: none)",
    )
    add_placing(parser)
    add_security(parser)
    staying = parser.add_mutually_exclusive_group()
    staying.add_argument(
        "--detach", action="store_true", help="return as soon as the service is healthy"
    )
    staying.add_argument(
        "--keep",
        action="store_true",
        help="stay, in a cluster that is there: start whatever is missing again, also after "
        "nodes came or went, and end nothing when ended",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="until when everything must serve (default: 120)",
    )


def add_placing(parser: argparse.ArgumentParser) -> None:
    """For clusters of many nodes."""
    parser.add_argument(
        "--gpu-workers",
        type=int,
        default=0,
        metavar="N",
        help="workers on a GPU each, beside those on the CPU (default: 0)",
    )
    parser.add_argument(
        "--gpu-memory",
        type=share,
        default=80,
        metavar="N%",
        help="what the pages of a GPU worker may take of its GPU (default: 80%%)",
    )
    parser.add_argument(
        "--by-resource",
        action="store_true",
        help="place by the Ray resources kvmanager, kvworker and kvworker_gpu alone, also where "
        "no node has them yet (default: where the cluster has them)",
    )
    parser.add_argument(
        "--manager-address",
        type=address,
        metavar="HOST:PORT",
        help="where workers find the manager, whatever node it is on (default: the address of "
        "its node)",
    )
    parser.add_argument(
        "--scale-file",
        type=Path,
        metavar="FILE",
        help='with --keep: holds {"workers": N, "gpuWorkers": N}, and is looked at again and '
        "again (default: the numbers of the command line)",
    )


def add_down(parser: argparse.ArgumentParser) -> None:
    """Of `down`."""
    add_name(parser)
    add_json(parser)
    parser.add_argument(
        "--forget",
        action="store_true",
        help="only drop the record, for a cluster that no longer exists",
    )


def add_manager(parser: argparse.ArgumentParser) -> None:
    """Of `manager`."""
    add_json(parser)
    add_listening(parser, port=50051)
    parser.add_argument(
        "--workers-expected",
        type=int,
        default=0,
        metavar="N",
        help="how many will register; nothing is opened before they have, or 3 s are over "
        "(default: unknown)",
    )


def add_worker(parser: argparse.ArgumentParser) -> None:
    """Of `worker`."""
    add_json(parser)
    add_serving(parser)
    add_listening(parser, port=50061)
    parser.add_argument(
        "--manager", type=address, metavar="HOST:PORT", help="where to register (default: nowhere)"
    )
    parser.add_argument("--id", metavar="NAME", help="of the worker (default: a random one)")
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="at SIGTERM: how long its sessions may take to move or to end (default: 30); a second "
        "signal ends it at once",
    )


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Of `demo`."""
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="what to ask; may be repeated (default: three questions)",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=48, metavar="N", help="per answer (default: 48)"
    )
    parser.add_argument(
        "--workers", type=int, default=2, metavar="N", help="how many workers (default: 2)"
    )
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="a running service (default: start one, end it)"
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="a folder with another model (default: SmolLM2-135M-Instruct)",
    )
    parser.add_argument(
        "--kill-worker",
        action="store_true",
        help="keep two copies of every page, and kill a worker (SIGKILL) in mid-sentence",
    )


def add_logging(parser: argparse.ArgumentParser, level: str) -> None:
    """Of servers: what their logs look like, and what is in them."""
    parser.add_argument(
        "--log-format",
        choices=logs.FORMATS,
        default="text",
        help="of the servers' logs: lines for people, or an object a line (default: text)",
    )
    parser.add_argument(
        "--log-level",
        choices=logs.LEVELS,
        default=level,
        help="debug: every call; info: what changes, and refusals; warning: a human should look; "
        f"error: something is broken or lost (default: {level})",
    )


def add_listening(parser: argparse.ArgumentParser, port: int) -> None:
    """Of one server that is started alone."""
    add_logging(parser, "warning")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1)")
    parser.add_argument(
        "--port",
        type=int,
        default=port,
        help=f"where to listen (default: {port}; 0: any free one)",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=0,
        metavar="PORT",
        help="for Prometheus, over HTTPS if there is a certificate (default: any free one)",
    )
    parser.add_argument(
        "--health-port",
        type=int,
        metavar="PORT",
        help="for probes: gRPC health in plaintext, nothing else (default: none)",
    )
    parser.add_argument(
        "--advertise-host",
        metavar="HOST",
        help="what others are to connect to, where --host is 0.0.0.0 or ::",
    )
    add_security(parser)


def add_security(parser: argparse.ArgumentParser) -> None:
    """Of servers. Secrets are in files: nothing of them is ever part of a command line."""
    group = parser.add_argument_group("who may connect and call")
    group.add_argument(
        "--tokens",
        type=path,
        metavar="FILE",
        help="bearer tokens, a line `TOKEN TENANT ROLE` each; see `kvservice token`",
    )
    group.add_argument(
        "--key",
        type=path,
        metavar="FILE",
        help="what manager and workers know each other by: 64 hexadecimal digits, the same for all",
    )
    group.add_argument(
        "--metrics-token",
        type=path,
        metavar="FILE",
        help="the token that Prometheus presents where others can reach the metrics",
    )
    group.add_argument(
        "--quotas", type=path, metavar="FILE", help="what tenants may take; see SECURITY.md"
    )
    group.add_argument(
        "--tls-cert", type=path, metavar="FILE", help="the server's certificate, for TLS"
    )
    group.add_argument("--tls-key", type=path, metavar="FILE", help="its private key")
    group.add_argument(
        "--tls-ca",
        type=path,
        metavar="FILE",
        help="who signs the certificates of manager, workers and callers",
    )
    group.add_argument(
        "--mutual-tls", action="store_true", help="callers over gRPC must show a certificate"
    )
    group.add_argument(
        "--tls-server-name",
        metavar="NAME",
        help="what the servers' certificates name (default: their addresses)",
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="serve other machines without authentication, or in plaintext",
    )


def add_serving(parser: argparse.ArgumentParser) -> None:
    """Of whatever starts workers."""
    parser.add_argument(
        "--lane-port",
        type=int,
        default=0,
        metavar="PORT",
        help="of a worker's fast pipe beside gRPC (default: any free one)",
    )
    parser.add_argument(
        "--memory",
        type=budget,
        default=Budget(),
        metavar="SIZE",
        help="for each worker's pages, such as 512MiB, or 70%% of what its process may use "
        "(in a container: of the container's limit) (default: 2GiB)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where pages are (default: cpu)"
    )
    parser.add_argument(
        "--zero-freed-pages",
        action="store_true",
        help="overwrite pages as soon as nobody holds them any more",
    )


def budget(text: str) -> Budget:
    """Return what a worker's pages may take."""
    try:
        return parse_budget(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def share(text: str) -> int:
    """Return a share of a GPU's memory, in percent."""
    percent = budget(text).percent
    if not percent:
        raise argparse.ArgumentTypeError(f"expected whole percent, such as 80%, got {text!r}")
    return percent
