"""Failing on purpose: only where a test says so, at the place and the time it says."""

from __future__ import annotations

import pytest

from kvservice import config
from kvservice.core.errors import InternalError, InvalidRequest
from kvservice.core.failpoints import (
    NO_FAILPOINTS,
    Action,
    Failpoint,
    Failpoints,
    parse_failpoints,
)


def test_what_is_stated_is_read() -> None:
    """Places, actions, seconds, and which time."""
    stated = "attend.stored=crash@3; heartbeat.sending=delay:2.5;open.placed=error;"
    assert parse_failpoints(stated) == (
        Failpoint("attend.stored", Action.CRASH, at_hit=3),
        Failpoint("heartbeat.sending", Action.DELAY, 2.5),
        Failpoint("open.placed", Action.ERROR),
    )
    assert parse_failpoints("") == ()


@pytest.mark.parametrize(
    "stated",
    [
        "attend.stored",
        "attend.stored=",
        "attend.stored=explode",
        "attend.stored=delay",
        "attend.stored=delay:-1",
        "attend.stored=crash@",
        "nowhere=crash",
        "attend.stored=crash,open.placed=crash",
    ],
)
def test_anything_else_is_refused(stated: str) -> None:
    """A misspelt failpoint must not pass for a test that found nothing."""
    with pytest.raises(InvalidRequest, match="not a failpoint"):
        parse_failpoints(stated)


def test_each_does_what_it_says_when_it_says() -> None:
    """At the N-th time alone, or each time; other places are counted too."""
    done: list[object] = []
    points = Failpoints(
        parse_failpoints("fork.done=crash@2;fork.done=delay:0.5;write.stored=error@1"),
        crash=lambda: done.append("crash"),
        wait=done.append,
    )
    for _ in range(3):
        points.passed("fork.done")
    assert done == [0.5, "crash", 0.5, 0.5]
    with pytest.raises(InternalError):
        points.passed("write.stored")
    points.passed("write.stored")
    points.passed("open.placed")
    assert points.hits == {"fork.done": 3, "write.stored": 2, "open.placed": 1}


def test_none_is_passed_without_a_trace() -> None:
    """What runs in production has none, and counts nothing."""
    NO_FAILPOINTS.passed("attend.stored")
    assert not NO_FAILPOINTS.hits


def test_a_process_refuses_them_outside_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are seen in the metrics, and nobody sets them by accident."""
    assert config.stated_failpoints() == ()
    monkeypatch.setenv("KVSERVICE_FAILPOINTS", "fork.done=error")
    with pytest.raises(config.ConfigError, match="KVSERVICE_TESTING=1"):
        config.stated_failpoints()
    monkeypatch.setenv("KVSERVICE_TESTING", "1")
    assert config.stated_failpoints() == (Failpoint("fork.done", Action.ERROR),)
    assert config.failpoints() == ["fork.done"]
    monkeypatch.setenv("KVSERVICE_FAILPOINTS", "fork.done=now")
    with pytest.raises(config.ConfigError, match="not a failpoint"):
        config.stated_failpoints()
