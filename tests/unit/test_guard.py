"""A stream's capability is verified once, and is admitted no longer than it holds."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace

import pytest

from kvservice.clock import ManualClock
from kvservice.core.access import RULES, Rights
from kvservice.core.caller import Caller, Role
from kvservice.core.capability import Keyring, token_id_of
from kvservice.core.errors import KVServiceError, PermissionDenied, Unauthenticated
from kvservice.server.guard import Credential, Guard
from kvservice.wire.names import WORKER

ALICE, BOB = Caller("alice", Role.TENANT), Caller("bob", Role.TENANT)
S, T = (str(uuid.UUID(int=number, version=4)) for number in (1, 2))
RULE = RULES[WORKER.full_name]["Attend"]


@dataclass
class Shown:
    session_id: str
    capability: bytes


class Door:
    """A guard whose keys can be changed, and who comes to it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.keys = Keyring([b"a" * 32])
        self.guard = Guard("w", clock=self.clock, keys=lambda: self.keys)
        self.credential = Credential(None)

    def issue(self, caller: Caller = ALICE, session: str = S, ttl_s: float = 600.0) -> bytes:
        return self.guard.issue(caller, session, ttl_s, Rights.WRITE)

    def admit(self, session: str, capability: bytes) -> Caller:
        """Come by lane, and by stream: both say the same."""
        shown = Shown(session, capability)
        try:
            by_lane = self.guard.admit_attend(self.credential, shown)
        except KVServiceError as error:
            with pytest.raises(type(error)):
                self.guard.admit_streamed(self.credential, RULE, shown)
            raise
        assert self.guard.admit_streamed(self.credential, RULE, shown) == by_lane
        return by_lane


@pytest.fixture
def door() -> Door:
    door = Door()
    assert door.admit(S, door.issue()) == ALICE  # remembered from now on
    return door


def test_what_was_admitted_is_admitted_again(door: Door) -> None:
    """The same, another session's, and the first one again."""
    first, second = door.issue(), door.issue(BOB, T)
    for _ in range(2):
        assert door.admit(S, first) == ALICE
        assert door.admit(T, second) == BOB


def test_it_ends_with_its_time(door: Door) -> None:
    """To the second."""
    capability = door.issue()
    door.admit(S, capability)
    door.clock.advance(599.0)
    door.admit(S, capability)
    door.clock.advance(1.0)
    with pytest.raises(Unauthenticated, match="expired"):
        door.admit(S, capability)


def test_it_ends_with_its_key(door: Door) -> None:
    """A key is added, then the old one is gone."""
    capability = door.issue()
    door.admit(S, capability)
    door.keys = Keyring([b"b" * 32, b"a" * 32])
    door.admit(S, capability)
    door.keys = Keyring([b"b" * 32])
    with pytest.raises(Unauthenticated):
        door.admit(S, capability)


def test_it_is_one_sessions(door: Door) -> None:
    """Shown for another session right after its own."""
    capability = door.issue()
    door.admit(S, capability)
    with pytest.raises(PermissionDenied):
        door.admit(T, capability)


def test_bytes_that_differ_are_verified(door: Door) -> None:
    """One bit."""
    capability = door.issue()
    door.admit(S, capability)
    with pytest.raises(Unauthenticated):
        door.admit(S, capability[:-1] + bytes([capability[-1] ^ 1]))
    with pytest.raises(Unauthenticated, match="not known"):
        door.admit(S, b"")


def test_a_stream_ends_with_what_it_has_shown(door: Door) -> None:
    """Nothing but capabilities was shown on it: it ends with the newest of them."""
    door.clock.advance(599.0)
    assert not door.guard.has_ended(door.credential)
    door.admit(S, door.issue(ttl_s=900.0))
    door.clock.advance(2.0)
    assert not door.guard.has_ended(door.credential)
    door.clock.advance(900.0)
    assert door.guard.has_ended(door.credential)


def test_it_ends_with_the_token_that_it_was_issued_for(door: Door) -> None:
    """As soon as the manager has said so, remembered or not, until the manager says otherwise."""
    tokens = door.guard.tokens_behind
    alice, again = (replace(ALICE, token_id=one * 8) for one in (b"a", b"b"))
    first, second = door.issue(alice), door.issue(again, T)
    assert tokens.in_use() == [b"a" * 8, b"b" * 8]
    door.admit(S, first)
    tokens.settle(tokens.in_use(), [b"a" * 8])
    assert door.guard.has_ended(door.credential)
    with pytest.raises(Unauthenticated):
        door.admit(S, first)
    with pytest.raises(Unauthenticated):
        door.admit(S, door.issue(alice))  # renewed: for the same token
    door.admit(T, second)  # another token of the same tenant's
    tokens.settle([b"b" * 8], [])  # says nothing of the first one
    with pytest.raises(Unauthenticated):
        door.admit(S, first)
    tokens.settle(tokens.in_use(), [])
    door.admit(S, first)
    door.clock.advance(700.0)
    assert tokens.in_use() == []


def test_tokens_behind_what_others_have_issued_are_asked_about_too(door: Door) -> None:
    """A session has moved here, and its holder comes with what the worker before has issued."""
    before = Guard("v", clock=door.clock, keys=lambda: door.keys)
    moved = replace(ALICE, token_id=b"m" * 8)
    for_here = before.issue(moved, S, 600.0, Rights.WRITE, "w")
    assert door.guard.tokens_behind.in_use() == []
    assert door.admit(S, for_here) == ALICE
    assert door.guard.tokens_behind.in_use() == [b"m" * 8]


def test_a_capability_says_which_token_is_behind_it() -> None:
    """It survives being signed, for a session and for a call that the manager makes."""
    keys = Keyring([b"a" * 32])
    door = Door()
    named = replace(ALICE, token_id=b"12345678")
    assert keys.verify(door.issue(named)).caller.token_id == named.token_id
    assert keys.verify(door.issue(ALICE)).caller.token_id == b""
    assert token_id_of(b"x" * 32, ALICE) != token_id_of(b"x" * 32, BOB)
