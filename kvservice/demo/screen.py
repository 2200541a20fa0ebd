"""What the demo shows while it runs: progress, and texts as they come.

On a terminal with `rich` installed, as bars and panes; otherwise as plain lines.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from kvservice.clock import Clock

try:
    from rich.columns import Columns
    from rich.console import Console
    from rich.live import Live
    from rich.panel import Panel
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text
except ImportError:  # an optional extra
    HAS_RICH = False
else:
    HAS_RICH = True

_PLAIN_WIDTH: Final = 60


class Screen(Protocol):
    """Where the demo shows things."""

    def say(self, text: str) -> None:
        """Show a line, or several."""

    def stage(self, what: str) -> contextlib.AbstractContextManager[Callable[[str], None]]:
        """Show that something slow is going on; the function it yields says how far it is."""

    def stream(
        self, title: str, prompts: Sequence[str]
    ) -> contextlib.AbstractContextManager[Callable[[Sequence[str]], None]]:
        """Show texts that grow; the function it yields is told all of them, again and again."""


def make_screen(clock: Clock) -> Screen:
    """Return the best screen for this process's standard output."""
    if HAS_RICH and sys.stdout.isatty():
        return RichScreen(Console(highlight=False))
    return PlainScreen(clock)


class PlainScreen:
    """Lines, for pipes and logs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def say(self, text: str) -> None:
        print(text, flush=True)

    @contextlib.contextmanager
    def stage(self, what: str) -> Iterator[Callable[[str], None]]:
        start = self._clock.monotonic()
        self.say(f"{what} ...")
        yield lambda detail: self.say(f"  {self._clock.monotonic() - start:5.1f} s  {detail}")
        self.say(f"  {self._clock.monotonic() - start:5.1f} s  done")

    @contextlib.contextmanager
    def stream(
        self, title: str, prompts: Sequence[str]
    ) -> Iterator[Callable[[Sequence[str]], None]]:
        self.say(f"{title}:")
        for row, prompt in enumerate(prompts):
            self.say(f"  {row}? {prompt}")
        shown = [0] * len(prompts)
        texts: Sequence[str] = [""] * len(prompts)

        def show(row: int, min_length: int) -> None:
            """Show what is new in a row, if it is enough for a line."""
            new = texts[row][shown[row] :]
            if len(new) >= min_length and new.strip():
                self.say(f"  {row}> {' '.join(new.split())}")
                shown[row] = len(texts[row])

        def update(current: Sequence[str]) -> None:
            nonlocal texts
            texts = current
            for row in range(len(prompts)):
                show(row, _PLAIN_WIDTH)

        yield update
        for row in range(len(prompts)):
            show(row, 1)


class RichScreen:
    """Bars and panes, for terminals."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    @contextlib.contextmanager
    def stage(self, what: str) -> Iterator[Callable[[str], None]]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(what, total=None, detail="")
            yield lambda detail: progress.update(task, detail=detail)
            progress.update(task, total=1, completed=1, detail="done")

    @contextlib.contextmanager
    def stream(
        self, title: str, prompts: Sequence[str]
    ) -> Iterator[Callable[[Sequence[str]], None]]:
        width = max(24, self._console.width // len(prompts) - 1)

        headings = [
            prompt if len(prompt) <= width - 6 else f"{prompt[: width - 7]}…" for prompt in prompts
        ]

        def panes(texts: Sequence[str]) -> Any:
            # As Text, or brackets in it would be taken for markup.
            parts = zip(headings, texts, strict=True)
            return Columns(
                Panel(Text(text), title=Text(heading), title_align="left", width=width)
                for heading, text in parts
            )

        empty = [""] * len(prompts)
        self.say(title)
        with Live(panes(empty), console=self._console, refresh_per_second=12) as live:
            yield lambda texts: live.update(panes(texts))
