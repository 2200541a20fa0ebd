"""Options of the subcommands that ask a service, and of those that make what is asked with."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from kvservice.cli.options import add_json, add_name, path


def add_query(parser: argparse.ArgumentParser) -> None:
    """Of commands that ask a service: which, how, and as whom."""
    add_name(parser)
    add_json(parser)
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="of a manager or a lone worker (default: the one that `up` has started)",
    )
    add_calling(parser)


def add_status(parser: argparse.ArgumentParser) -> None:
    """Of `status`."""
    add_query(parser)
    parser.add_argument(
        "--expect-workers",
        type=int,
        metavar="N",
        help="with fewer alive it is not healthy (default: what `up` was told, else 1)",
    )


def add_top(parser: argparse.ArgumentParser) -> None:
    """Of `top`."""
    add_query(parser)
    parser.description = textwrap.fill(
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


def add_drain(parser: argparse.ArgumentParser) -> None:
    """Of `drain`."""
    add_query(parser)
    parser.description = textwrap.fill(
        "take a worker out of service: it opens no more sessions, those it has move to other "
        "workers while they are used, or go on where nobody has room for them until they end, and "
        "then it leaves for good. What is left when the time is over is lost to its decoders, "
        "which compute it again."
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


def add_move(parser: argparse.ArgumentParser) -> None:
    """Of `move`."""
    add_query(parser)
    parser.description = textwrap.fill(
        "move a session to another worker, page by page, while it is used; whoever uses it does "
        "not notice. Ends when the session is there."
    )
    parser.add_argument("session", metavar="SESSION", help="its id")
    parser.add_argument(
        "worker", metavar="WORKER", help="where to: its id, its address, or the host in its address"
    )
    parser.add_argument(
        "--from",
        dest="source",
        default="",
        metavar="WORKER",
        help="the id of the worker whose part of it is to move, where several have one",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for it (default: 600)",
    )


def add_calling(parser: argparse.ArgumentParser) -> None:
    """Of commands that ask a server."""
    group = parser.add_argument_group("who asks")
    group.add_argument(
        "--token-file", type=path, metavar="FILE", help="holds the bearer token to present"
    )
    group.add_argument(
        "--tls-ca", type=path, metavar="FILE", help="who signs the server's certificate, for TLS"
    )
    group.add_argument(
        "--tls-cert", type=path, metavar="FILE", help="our own certificate, for mutual TLS"
    )
    group.add_argument("--tls-key", type=path, metavar="FILE", help="its private key")
    group.add_argument(
        "--tls-server-name",
        metavar="NAME",
        help="what the server's certificate names (default: its address)",
    )


def add_certs(parser: argparse.ArgumentParser) -> None:
    """Of `certs`."""
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


def add_token(parser: argparse.ArgumentParser) -> None:
    """Of `token`."""
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
