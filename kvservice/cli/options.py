"""Options that many subcommands have."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_name(parser: argparse.ArgumentParser) -> None:
    """Which service, where several run."""
    parser.add_argument(
        "--name", default="default", help="of the service, where several run (default: default)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for scripts")


def address(text: str) -> str:
    """Return a host and a port, as HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f'expected HOST:PORT, got "{text}"')
    return text


def path(text: str) -> str:
    """Return a path, absolute."""
    return str(Path(text).absolute())  # whoever reads it may be elsewhere
