"""The command line: its subcommands, and what `--help` says of each."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from kvservice import __version__
from kvservice.cli import doctor, draining, securing, serving, showing, top
from kvservice.cli import options_asking as asking
from kvservice.cli import options_serving as starting
from kvservice.cli.exits import EXPLAINED, USAGE


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

    starting.add_up(add("up", serving.up, "start a manager and workers on Ray"))
    starting.add_down(add("down", serving.down, "end what `up` has started, and nothing else"))
    asking.add_status(add("status", showing.status, "say whether the service is healthy"))
    asking.add_query(add("stats", showing.stats, "show how many pages and bytes are used"))
    asking.add_query(add("workers", showing.workers, "list the workers"))
    asking.add_query(add("sessions", showing.sessions, "list the sessions"))
    asking.add_top(add("top", top.top, "show workers, pages, sessions, speed and alerts, live"))
    asking.add_drain(add("drain", draining.drain, "let a worker give away its sessions, and leave"))
    asking.add_move(add("move", draining.move, "move a session to another worker"))
    asking.add_query(add("doctor", doctor.doctor, "say what is wrong, and what to do about it"))
    starting.add_manager(add("manager", serving.manager, "run a manager alone, in the foreground"))
    starting.add_worker(add("worker", serving.worker, "run one worker alone, in the foreground"))
    starting.add_demo(
        add("demo", serving.demo, "generate text by a model whose cache is on two workers")
    )
    asking.add_certs(add("certs", securing.certs, "make certificates for development"))
    asking.add_token(add("token", securing.token, "make a bearer token"))
    return parser
