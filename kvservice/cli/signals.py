"""Signals that ask a command to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from kvservice.cli.exits import Interrupted

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Raise Interrupted at the first signal that asks to end; later ones don't disturb the end.

    Signals that are ignored, as by `nohup`, stay so. Without effect outside the main thread.
    """
    before = {
        number: handler
        for number in _NUMBERS
        if (handler := signal.getsignal(number)) is not signal.SIG_IGN
    }
    with _interrupting(before):
        yield


@contextmanager
def signals_interrupt_again() -> Iterator[None]:
    """Raise Interrupted once more, after a first signal has: for an end that takes its time."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    with _interrupting({number: signal.getsignal(number) for number in numbers}):
        yield


@contextmanager
def _interrupting(before: dict[signal.Signals, Any]) -> Iterator[None]:
    """Raise Interrupted at the first of some signals, of which this is what they did before."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        del frame
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    if threading.current_thread() is not threading.main_thread():
        before.clear()
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
