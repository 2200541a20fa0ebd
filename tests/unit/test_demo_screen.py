"""What the demo shows, on a terminal and in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvservice.clock import ManualClock
from kvservice.demo.screen import PlainScreen, RichScreen, make_screen

WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


def grown(text: str) -> list[str]:
    """Return the text as it comes, word by word."""
    words = text.split(" ")
    return [" ".join(words[: count + 1]) for count in range(len(words))]


def test_plain_lines_come_as_the_text_grows(capsys: pytest.CaptureFixture[str]) -> None:
    """A line when there is enough for one; at the end what is left; together the whole text."""
    screen = PlainScreen(ManualClock())
    with screen.stream("Title", ["first?", "second?"]) as update:
        for text in grown(WORDS):
            update([text, "short"])
        before_end = capsys.readouterr().out
    lines = (before_end + capsys.readouterr().out).splitlines()
    assert lines[:3] == ["Title:", "  0? first?", "  1? second?"]
    assert "  0> " in before_end, "nothing was shown while the text grew"
    for row, text in enumerate((WORDS, "short")):
        shown = [line.removeprefix(f"  {row}> ") for line in lines if line.startswith(f"  {row}>")]
        assert " ".join(shown) == text


def test_plain_stage_says_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Each detail with the seconds since the beginning."""
    clock = ManualClock()
    with PlainScreen(clock).stage("Starting") as detail:
        clock.advance(2.5)
        detail("half of it")
        clock.advance(1)
    assert capsys.readouterr().out.splitlines() == [
        "Starting ...",
        "    2.5 s  half of it",
        "    3.5 s  done",
    ]


def test_panes_show_text_as_it_is() -> None:
    """Brackets are no markup, long prompts are cut, and every row has a pane."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120, highlight=False)
    screen = RichScreen(console)
    with screen.stage("Starting Ray") as detail:
        detail("half of it")
    with screen.stream("Title", ["first?", "second?", "third " * 20]) as update:
        update(["[bold]a[/bold]", "[/] b", "c"])
    shown = output.getvalue()
    for part in ("Starting Ray", "Title", "first?", "second?", "third", "[bold]a[/bold]", "[/] b"):
        assert part in shown
    assert "third " * 20 not in shown


def test_a_pipe_gets_plain_lines() -> None:
    """Where the output is captured, it is no terminal."""
    assert isinstance(make_screen(ManualClock()), PlainScreen)
