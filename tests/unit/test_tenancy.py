"""What tenants have on all workers together: who is counted where, once, and while it lives."""

from __future__ import annotations

from kvservice.core.tenancy import LOOK_AGAIN_S, TenantUse, Use

SESSIONS = [
    ("alice", ["w0"]),
    ("alice", ["w0", "w1"]),  # on both
    ("alice", ["w1"]),
    ("alice", []),  # on a dead worker alone
    ("bob", ["w1"]),
    ("free", ["w1"]),
]


def test_sums_leave_out_the_worker_that_asks_and_the_dead() -> None:
    """Pages are added up; a session that lies here too is not elsewhere; no limit, no sum."""
    use = TenantUse()
    assert not use.is_due(100.0)  # nobody is limited
    use.reported("w0", {"alice": 5})
    use.reported("w1", {"alice": 7, "bob": 1})
    use.reported("w2", {"alice": 100})
    assert use.is_due(100.0)
    use.count(SESSIONS, 100.0)
    living = ["w0", "w1", "w3"]
    assert use.elsewhere("w0", living) == {"alice": Use(1, 7), "bob": Use(1, 1)}
    assert use.elsewhere("w1", living) == {"alice": Use(1, 5)}
    assert use.elsewhere("w3", living) == {"alice": Use(3, 12), "bob": Use(1, 1)}
    assert not use.is_due(100.0 + LOOK_AGAIN_S / 2)
    assert use.is_due(100.0 + LOOK_AGAIN_S)


def test_what_is_given_back_is_nobodys() -> None:
    """A worker that names a tenant no more has none of its pages, nor sessions to be counted."""
    use = TenantUse()
    use.reported("w0", {"alice": 5})
    use.count(SESSIONS, 100.0)
    use.reported("w0", {})
    assert not use.is_due(200.0)
    use.reported("w1", {"bob": 0})
    use.count(SESSIONS, 200.0)
    assert use.elsewhere("w0", ["w0", "w1"]) == {"bob": Use(1, 0)}
