"""The command's side of the conversation with the driver.

A shell script stands where the driver would, as these are about how the conversation ends.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

from kvservice.cli.exits import Interrupted
from kvservice.clock import SystemClock
from kvservice.cluster import dialogue
from kvservice.core.errors import InvalidRequest, Unavailable

_ANSWERING: Final = """#!/bin/sh
cat >/dev/null
echo '{"note": 1}'
echo '{"result": {"done": 1}}'
"""


class _Interruption:
    """Raises at the n-th line of the module that runs after the start of a process.

    A trace function. Before, Python itself may lose the process: it then ends with the command,
    as its stdin does. The line that leaves a `with` is not one, as no signal raises there.
    """

    def __init__(self, line: int) -> None:
        self._lines_left = line
        self._body = 0
        self.has_raised = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        if frame.f_code.co_filename != dialogue.__file__:
            return None
        leaves = frame.f_code.co_name == "_driver" and frame.f_lineno < self._body
        if event == "line" and self._body and not leaves and not self.has_raised:
            self._lines_left -= 1
            if self._lines_left < 0:
                self.has_raised = True
                raise Interrupted(2)
        if not self._body and "process" in frame.f_locals:
            self._body = frame.f_lineno
        return self


class _Conversation:
    """One with a script, as often as asked."""

    def __init__(self, directory: Path, script: str) -> None:
        self._log_path = directory / "log"
        self.driver = directory / "driver"
        self.driver.touch(mode=0o700)
        self.driver.write_text(script)
        self.heard: list[dict[str, Any]] = []

    def __call__(
        self, timeout_s: float = 60.0, check: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        return dialogue.converse(
            {"ray_address": "127.0.0.1:1"},
            environment=os.environ,
            log_path=self._log_path,
            clock=SystemClock(),
            timeout_s=timeout_s,
            margin_s=60.0,
            heard=self.heard.append,
            check=check,
        )


@pytest.fixture
def converse(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> _Conversation:
    conversation = _Conversation(tmp_path, request.param)
    monkeypatch.setattr(sys, "executable", str(conversation.driver))
    return conversation


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


@pytest.mark.parametrize("converse", [_ANSWERING], indirect=True)
def test_interrupted_anywhere(converse: _Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal raises between any two instructions, and leaves no process, thread or word."""
    failed_threads: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failed_threads.append)
    children, threads = _children(), set(threading.enumerate())
    before = sys.gettrace()
    line = 0
    while True:
        interruption = _Interruption(line)
        sys.settrace(interruption)
        try:
            assert converse() == {"done": 1}
        except Interrupted:
            pass
        finally:
            sys.settrace(before)
        assert _children() <= children
        assert set(threading.enumerate()) <= threads
        assert failed_threads == []
        if not interruption.has_raised:
            break
        line += 1
    assert line > 20  # so that it did go through the module


@pytest.mark.parametrize(
    "converse",
    [
        """#!/bin/sh
           printf '{"connected": true}\\n{"note": "in '
           read request
           while ! test -e "$0.go"; do :; done
           printf 'parts"}\\n{"result": {"request": %s}}' "$request"
           echo
        """
    ],
    indirect=True,
)
def test_line_that_comes_in_parts(converse: _Conversation) -> None:
    """A line counts when it is whole, however it is cut up on the way."""

    def check() -> None:
        if converse.heard:
            Path(f"{converse.driver}.go").touch()

    assert converse(check=check) == {"request": {"ray_address": "127.0.0.1:1"}}
    assert converse.heard == [{"connected": True}, {"note": "in parts"}]


@pytest.mark.parametrize(
    ("converse", "error", "words"),
    [
        ("#!/bin/sh\necho '{\"note\": 1}'; printf '{\"resu'", Unavailable, "ended without"),
        (
            '#!/bin/sh\necho \'{"error": {"reason": "INVALID_REQUEST", "message": "no"}}\'',
            InvalidRequest,
            "no",
        ),
        ("#!/bin/sh\nexec tail -f /dev/null", Unavailable, "not answered within 0.2 s"),
    ],
    ids=["ends", "refuses", "stays silent"],
    indirect=["converse"],
)
def test_without_a_result(converse: _Conversation, error: type[Exception], words: str) -> None:
    """What the driver refuses with is raised; Unavailable if it ends or says nothing."""
    children = _children()
    with pytest.raises(error, match=words):
        converse(timeout_s=0.2 if "within" in words else 60.0)
    assert _children() <= children
