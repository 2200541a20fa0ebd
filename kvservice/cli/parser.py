"""The command line: its options, and what `--help` says."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from kvservice import __version__, logs
from kvservice.cli import doctor, draining, securing, serving, showing, top
from kvservice.cli.exits import EXPLAINED, USAGE
from kvservice.cluster.launch import LOCAL
from kvservice.config import Budget, ConfigError, parse_budget


class _Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; what it returns has `run`, the subcommand's function."""
    parser = _Parser(
        prog="kvservice",
        description="Remote KV-cache pages, with attention where the pages are.",
        epilog=EXPLAINED,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvservice {__version__}")
    subparsers = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_Parser
    )

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> _Parser:
        sub: _Parser = subparsers.add_parser(
            name,
            help=text,
            description=f"{text}.",
            epilog=EXPLAINED,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run)
        sub.add_argument("--debug", action="store_true", help="show where an error comes from")
        return sub

    _add_up(add("up", serving.up, "start a manager and workers on Ray"))
    _add_down(add("down", serving.down, "end what `up` has started, and nothing else"))
    _add_status(add("status", showing.status, "say whether the service is healthy"))
    _add_query(add("stats", showing.stats, "show how many pages and bytes are used"))
    _add_query(add("workers", showing.workers, "list the workers"))
    _add_query(add("sessions", showing.sessions, "list the sessions"))
    _add_top(add("top", top.top, "show workers, pages, sessions, speed and alerts, live"))
    _add_drain(add("drain", draining.drain, "let a worker end what it has, and leave"))
    _add_query(add("doctor", doctor.doctor, "say what is wrong, and what to do about it"))
    _add_manager(add("manager", serving.manager, "run a manager alone, in the foreground"))
    _add_worker(add("worker", serving.worker, "run one worker alone, in the foreground"))
    _add_demo(add("demo", serving.demo, "generate text by a model whose cache is on two workers"))
    _add_certs(add("certs", securing.certs, "make certificates for development"))
    _add_token(add("token", securing.token, "make a bearer token"))
    return parser


def _add_up(parser: argparse.ArgumentParser) -> None:
    _add_name(parser)
    _add_json(parser)
    _add_serving(parser)
    _add_logging(parser, "info")
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
        help="the manager's for Prometheus (default: any; `status` shows where)",
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
    _add_placing(parser)
    _add_security(parser)
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


def _add_placing(parser: argparse.ArgumentParser) -> None:
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
        type=_share,
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
        type=_address,
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


def _add_down(parser: argparse.ArgumentParser) -> None:
    _add_name(parser)
    _add_json(parser)
    parser.add_argument(
        "--forget",
        action="store_true",
        help="only drop the record, for a cluster that no longer exists",
    )


def _add_query(parser: argparse.ArgumentParser) -> None:
    _add_name(parser)
    _add_json(parser)
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="of a manager or a lone worker (default: the one that `up` has started)",
    )
    _add_calling(parser)


def _add_top(parser: argparse.ArgumentParser) -> None:
    _add_query(parser)
    parser.description = (
        "show workers, their pages as bars, sessions, tokens and layers per second, the slowest "
        "percent of a layer's attention, and which alerts hold now. Ctrl-C ends it; into a pipe it "
        "prints once."
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="between two looks; rates are of this time (default: 1)",
    )
    parser.add_argument("--once", action="store_true", help="show it once, and end")


def _add_drain(parser: argparse.ArgumentParser) -> None:
    _add_query(parser)
    parser.description = (
        "take a worker out of service: it opens no more sessions, goes on with those it has until "
        "they end, and then leaves for good. What is left when the time is over is lost to its "
        "decoders, which compute it again."
    )
    parser.add_argument(
        "worker", metavar="WORKER", help="its id, its address, or the host in its address"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long it waits for its sessions (default: 300)",
    )
    parser.add_argument(
        "--no-wait", action="store_true", help="return as soon as it drains, not when it has left"
    )


def _add_status(parser: argparse.ArgumentParser) -> None:
    _add_query(parser)
    parser.add_argument(
        "--expect-workers",
        type=int,
        metavar="N",
        help="with fewer alive it is not healthy (default: what `up` was told, else 1)",
    )


def _add_manager(parser: argparse.ArgumentParser) -> None:
    _add_json(parser)
    _add_listening(parser, port=50051)
    parser.add_argument(
        "--workers-expected",
        type=int,
        default=0,
        metavar="N",
        help="how many will register; nothing is opened before they have, or 3 s are over "
        "(default: unknown)",
    )


def _add_worker(parser: argparse.ArgumentParser) -> None:
    _add_json(parser)
    _add_serving(parser)
    _add_listening(parser, port=50061)
    parser.add_argument(
        "--manager", type=_address, metavar="HOST:PORT", help="where to register (default: nowhere)"
    )
    parser.add_argument("--id", metavar="NAME", help="of the worker (default: a random one)")


def _add_demo(parser: argparse.ArgumentParser) -> None:
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


def _add_logging(parser: argparse.ArgumentParser, level: str) -> None:
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


def _add_listening(parser: argparse.ArgumentParser, port: int) -> None:
    """Of one server that is started alone."""
    _add_logging(parser, "warning")
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
        help="for Prometheus (default: any free one)",
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
    _add_security(parser)


def _add_security(parser: argparse.ArgumentParser) -> None:
    """Of servers. Secrets are in files: nothing of them is ever part of a command line."""
    group = parser.add_argument_group("who may connect and call")
    group.add_argument(
        "--tokens",
        type=_path,
        metavar="FILE",
        help="bearer tokens, a line `TOKEN TENANT ROLE` each; see `kvservice token`",
    )
    group.add_argument(
        "--key",
        type=_path,
        metavar="FILE",
        help="what manager and workers know each other by: 64 hexadecimal digits, the same for all",
    )
    group.add_argument(
        "--quotas", type=_path, metavar="FILE", help="what tenants may take; see SECURITY.md"
    )
    group.add_argument(
        "--tls-cert", type=_path, metavar="FILE", help="the server's certificate, for TLS"
    )
    group.add_argument("--tls-key", type=_path, metavar="FILE", help="its private key")
    group.add_argument(
        "--tls-ca",
        type=_path,
        metavar="FILE",
        help="who signs the certificates of manager, workers and callers",
    )
    group.add_argument("--mutual-tls", action="store_true", help="callers must show a certificate")
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


def _add_calling(parser: argparse.ArgumentParser) -> None:
    """Of commands that ask a server."""
    group = parser.add_argument_group("who asks")
    group.add_argument(
        "--token-file", type=_path, metavar="FILE", help="holds the bearer token to present"
    )
    group.add_argument(
        "--tls-ca", type=_path, metavar="FILE", help="who signs the server's certificate, for TLS"
    )
    group.add_argument(
        "--tls-cert", type=_path, metavar="FILE", help="our own certificate, for mutual TLS"
    )
    group.add_argument("--tls-key", type=_path, metavar="FILE", help="its private key")
    group.add_argument(
        "--tls-server-name",
        metavar="NAME",
        help="what the server's certificate names (default: its address)",
    )


def _add_certs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="where to; a CA that is there already signs the others anew",
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="under which servers are reached, beside localhost; may be repeated",
    )
    for role in ("tenant", "operator", "metrics"):
        parser.add_argument(
            f"--{role}",
            action="append",
            default=[],
            metavar="NAME",
            help=f"for a caller of the role {role}; may be repeated",
        )
    parser.add_argument(
        "--days", type=float, default=30.0, metavar="N", help="how long they hold (default: 30)"
    )


def _add_token(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", metavar="TENANT", help="whose it is")
    parser.add_argument(
        "--role",
        choices=("tenant", "operator", "metrics"),
        default="tenant",
        help="what it is for (default: tenant)",
    )
    parser.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="a token file to add its hash to (default: the line is printed after the token)",
    )


def _add_serving(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lane-port",
        type=int,
        default=0,
        metavar="PORT",
        help="of a worker's fast pipe beside gRPC (default: any free one)",
    )
    parser.add_argument(
        "--memory",
        type=_budget,
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


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--name", default="default", help="of the service, where several run (default: default)"
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for scripts")


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f'expected HOST:PORT, got "{text}"')
    return text


def _path(text: str) -> str:
    return str(Path(text).absolute())  # whoever reads it may be elsewhere


def _budget(text: str) -> Budget:
    try:
        return parse_budget(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _share(text: str) -> int:
    percent = _budget(text).percent
    if not percent:
        raise argparse.ArgumentTypeError(f"expected whole percent, such as 80%, got {text!r}")
    return percent
