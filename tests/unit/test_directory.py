"""The directory: what heartbeats make of it, and what it says when workers go."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvservice.core.directory import Directory, SessionKey, WorkerRecord, WorkerState
from kvservice.core.errors import StaleWorker

A: SessionKey = ("tenant", "a")
B: SessionKey = ("tenant", "b")
TTL_S = 60.0


def record(
    worker_id: str = "w0", incarnation: str = "i0", *, draining: bool = False
) -> WorkerRecord:
    return WorkerRecord(worker_id, incarnation, f"{worker_id}:1", "cpu", 100, 50, draining)


def held(*keys: SessionKey) -> list[tuple[SessionKey, float]]:
    return [(key, TTL_S) for key in keys]


@pytest.fixture
def directory() -> Directory:
    """Return one with two workers that both hold session A, heard at 0 s."""
    directory = Directory()
    directory.register(record("w0"), held(A), 0.0)
    directory.register(record("w1"), held(A), 0.0)
    return directory


def state(directory: Directory, worker_id: str, now: float) -> WorkerState:
    return {v.record.worker_id: v.state for v in directory.workers(now)}[worker_id]


def test_registration_lists_what_is_held(directory: Directory) -> None:
    """The first message is the whole truth about a worker: what it leaves out is gone."""
    assert directory.holders(A) == ["w0", "w1"]
    directory.register(record("w0"), held(B), 1.0)
    assert directory.holders(A) == ["w1"]
    assert directory.holders(B) == ["w0"]
    directory.check()


def test_later_messages_carry_changes(directory: Directory) -> None:
    """A heartbeat adds what is new, drops what has ended, and leaves the rest."""
    directory.heartbeat(record("w0"), held(B), [], 1.0)
    assert directory.holders(A) == ["w0", "w1"]
    directory.heartbeat(record("w0"), [], [B], 2.0)
    assert directory.holders(B) == []
    directory.check()


def test_silent_worker_is_suspect_until_it_is_heard(directory: Directory) -> None:
    """Three seconds of silence, or a broken stream, and nothing is placed there."""
    assert state(directory, "w0", 3.0) is WorkerState.ALIVE
    assert state(directory, "w0", 3.1) is WorkerState.SUSPECT
    directory.heartbeat(record("w0"), [], [], 3.2)
    assert state(directory, "w0", 3.3) is WorkerState.ALIVE
    directory.cut_off("w0", "another")
    assert state(directory, "w0", 3.3) is WorkerState.ALIVE
    directory.cut_off("w0", "i0")
    assert state(directory, "w0", 3.3) is WorkerState.SUSPECT
    directory.register(record("w0", draining=True), held(A), 3.4)
    assert state(directory, "w0", 3.5) is WorkerState.DRAINING


def test_new_incarnation_replaces_the_old_for_good(directory: Directory) -> None:
    """What the old life held is lost, and a late word of it changes nothing."""
    directory.register(record("w0", "i1"), [], 5.0)
    assert directory.holders(A) == ["w1"]
    for speak in (
        lambda: directory.heartbeat(record("w0", "i0"), held(A), [], 6.0),
        lambda: directory.register(record("w0", "i0"), held(A), 6.0),
    ):
        with pytest.raises(StaleWorker):
            speak()
    assert directory.holders(A) == ["w1"]
    directory.check()


def test_heartbeat_before_registration_is_refused() -> None:
    """After a restart the manager knows nobody, and must be told everything first."""
    with pytest.raises(StaleWorker):
        Directory().heartbeat(record(), [], [], 0.0)


def test_loss_is_told_until_the_client_has_dealt_with_it(directory: Directory) -> None:
    """A session without one of its workers is incomplete, until a later epoch of the rest."""
    directory.bury("w1", "i0", 5.0)
    assert state(directory, "w1", 5.0) is WorkerState.DEAD
    assert directory.find_worker("w1") is None
    assert directory.is_incomplete(A, 4, 6.0)
    assert directory.is_incomplete(A, 4, 7.0)
    assert not directory.is_incomplete(A, 5, 8.0)
    assert not directory.is_incomplete(A, 5, 9.0)
    directory.check()


def test_loss_of_all_is_told_for_one_ttl(directory: Directory) -> None:
    """As long as a lease would have lasted; after that the session is simply not there."""
    directory.bury("w0", "i0", 5.0)
    directory.bury("w1", "i0", 6.0)
    assert directory.holders(A) == []
    assert directory.is_incomplete(A, None, 6.0 + TTL_S - 1)
    assert not directory.is_incomplete(A, None, 6.0 + TTL_S)
    directory.check()


def test_part_that_ends_is_no_loss(directory: Directory) -> None:
    """Clients give back extents that hold nothing any more; the rest of the session goes on."""
    directory.heartbeat(record("w1"), [], [A], 1.0)
    assert directory.holders(A) == ["w0"]
    assert not directory.is_incomplete(A, 1, 1.0)
    directory.check()


def test_loss_ends_with_the_session(directory: Directory) -> None:
    """Released at the workers that are left, a session is gone, not lost."""
    directory.bury("w1", "i0", 1.0)
    directory.heartbeat(record("w0"), [], [A], 2.0)
    assert not directory.is_incomplete(A, None, 2.0)
    directory.check()


def test_session_that_ends_and_begins_again_is_held(directory: Directory) -> None:
    """Both in one message: what is held now is what counts."""
    directory.heartbeat(record("w0"), held(A), [A], 1.0)
    assert set(directory.holders(A)) == {"w0", "w1"}
    assert not directory.is_incomplete(A, 1, 1.0)


def test_tenants_do_not_share_ids(directory: Directory) -> None:
    """The same id of another tenant is another session."""
    assert directory.holders(("other", "a")) == []
    directory.heartbeat(record("w0"), held(("other", "a")), [], 1.0)
    assert directory.holders(("other", "a")) == ["w0"]
    assert directory.holders(A) == ["w0", "w1"]


WORKERS = st.sampled_from(["w0", "w1", "w2"])
KEYS = st.sampled_from([A, B, ("other", "a")])


class DirectoryMachine(RuleBasedStateMachine):
    """Against plain sets: after everything is reported, the directory says what workers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory()
        self.now = 0.0
        self.lives: dict[str, int] = {}
        self.holds: dict[str, set[SessionKey]] = {}

    def record(self, worker_id: str) -> WorkerRecord:
        return record(worker_id, f"i{self.lives[worker_id]}")

    @rule(worker_id=WORKERS)
    def begin_a_life(self, worker_id: str) -> None:
        self.lives[worker_id] = self.lives.get(worker_id, 0) + 1
        self.holds[worker_id] = set()
        self.directory.register(self.record(worker_id), [], self.now)

    @rule(worker_id=WORKERS, keys=st.sets(KEYS))
    def connect_again(self, worker_id: str, keys: set[SessionKey]) -> None:
        if worker_id in self.holds:
            self.holds[worker_id] = keys
            self.directory.register(self.record(worker_id), held(*keys), self.now)

    @rule(worker_id=WORKERS, opened=st.sets(KEYS), ended=st.sets(KEYS))
    def report(self, worker_id: str, opened: set[SessionKey], ended: set[SessionKey]) -> None:
        if worker_id in self.holds:
            holds = self.holds[worker_id]
            holds -= ended
            holds |= opened
            self.directory.heartbeat(self.record(worker_id), held(*opened), ended, self.now)

    @rule(worker_id=WORKERS)
    def die(self, worker_id: str) -> None:
        if worker_id in self.holds:
            del self.holds[worker_id]
            self.directory.bury(worker_id, f"i{self.lives[worker_id]}", self.now)

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=KEYS, epoch=st.none() | st.integers(1, 3))
    def look(self, key: SessionKey, epoch: int | None) -> None:
        self.directory.is_incomplete(key, epoch, self.now)

    @invariant()
    def holders_are_right(self) -> None:
        self.directory.check()
        for key in (A, B, ("other", "a")):
            expected = {wid for wid, keys in self.holds.items() if key in keys}
            assert set(self.directory.holders(key)) == expected


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=40, stateful_step_count=30)


def test_a_part_that_has_expired_makes_the_rest_incomplete(directory: Directory) -> None:
    """What is left is no whole session, until its client has cut it to that, or all has ended."""
    directory.heartbeat(record("w1"), [], [], 1.0, expired=[A])
    assert directory.holders(A) == ["w0"]
    assert directory.is_incomplete(A, 3, 1.5)
    directory.check()
    assert not directory.is_incomplete(A, 4, 1.6), "the client has dealt with it"
    directory.note(A, "w1", TTL_S)
    directory.heartbeat(record("w1"), [], [], 2.0, expired=[A, B])
    directory.heartbeat(record("w0"), [], [], 2.1, expired=[A])
    assert not directory.is_incomplete(A, None, 2.2), "nothing is left to resume"
    directory.check()


def test_a_part_that_was_released_leaves_a_whole_session(directory: Directory) -> None:
    """The tail has gone back: its worker gives up what it held."""
    directory.heartbeat(record("w1"), [], [A], 1.0)
    assert directory.holders(A) == ["w0"]
    assert not directory.is_incomplete(A, 3, 1.5)
