"""The command `kvservice`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence

from kvservice.cli.exits import FAILED, NOT_RUNNING, USAGE, Interrupted, NotRunning
from kvservice.cli.parser import make_parser
from kvservice.cli.signals import signals_interrupt
from kvservice.config import ConfigError
from kvservice.core.errors import InvalidRequest, KVServiceError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        argv: Without the program's name. None: this process's.
    """
    try:
        arguments = make_parser().parse_args(argv)
    except SystemExit as end:  # argparse has printed what there is to say
        return end.code if isinstance(end.code, int) else USAGE
    run: Callable[..., int] = arguments.run
    try:
        with signals_interrupt():
            return run(arguments)
    except Interrupted as interruption:
        return 128 + interruption.number
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        return _complain(f"kvservice {arguments.command}", error)


def _complain(command: str, error: Exception) -> int:
    """Print one line about an error and return the exit code."""
    if isinstance(error, BrokenPipeError):
        return FAILED  # whoever reads our output has gone, and nobody is left to complain to
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, KVServiceError | NotRunning | OSError | ValueError):
        text = f"{type(error).__name__}: {text} (--debug shows where)"
    print(f"{command}: {text}", file=sys.stderr)
    if isinstance(error, NotRunning):
        return NOT_RUNNING
    return USAGE if type(error) in (InvalidRequest, ConfigError) else FAILED
