"""The directory: what heartbeats make of it, and what it says when workers go."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvservice.core.directory import Directory, Report, SessionKey
from kvservice.core.errors import StaleWorker, WorkerNotFound
from kvservice.core.liveness import WorkerRecord, WorkerState

A: SessionKey = ("tenant", "a")
B: SessionKey = ("tenant", "b")
TTL_S = 60.0


def record(
    worker_id: str = "w0", incarnation: str = "i0", *, draining: bool = False
) -> WorkerRecord:
    return WorkerRecord(worker_id, incarnation, f"{worker_id}:1", "cpu", 100, 50, draining)


def held(*keys: SessionKey, epoch: int = 1) -> list[Report]:
    return [Report(key, TTL_S, epoch) for key in keys]


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


def test_silence_makes_suspect_then_dead_until_it_ends(directory: Directory) -> None:
    """After two seconds nothing is placed there; who has missed three heartbeats is dead."""
    assert state(directory, "w0", 2.0) is WorkerState.ALIVE
    assert state(directory, "w0", 2.1) is WorkerState.SUSPECT
    assert state(directory, "w0", 3.5) is WorkerState.SUSPECT
    assert state(directory, "w0", 3.6) is WorkerState.DEAD
    assert directory.holders(A) == ["w0", "w1"], "it may come back with what it held"
    directory.heartbeat(record("w0"), [], [], 9.0)
    assert state(directory, "w0", 9.1) is WorkerState.ALIVE


def test_broken_connection_makes_suspect_at_once(directory: Directory) -> None:
    """Until the next word of it; a late word about an earlier life changes nothing."""
    directory.liveness.cut_off("w0", "another")
    assert state(directory, "w0", 0.3) is WorkerState.ALIVE
    directory.liveness.cut_off("w0", "i0")
    assert state(directory, "w0", 0.3) is WorkerState.SUSPECT
    assert [one.worker_id for one in directory.liveness.find_cut_off(0.3)] == ["w0"]
    directory.register(record("w0", draining=True), held(A), 0.4)
    assert state(directory, "w0", 0.5) is WorkerState.DRAINING
    assert not directory.liveness.find_cut_off(0.5)


def test_refused_connections_make_dead_within_a_second(directory: Directory) -> None:
    """Not a single one: a process may be late to accept. An answer in between starts anew."""
    directory.liveness.cut_off("w0", "i0")
    directory.liveness.refused("w0", "i0", 0.1)
    directory.liveness.answered("w0", "i0")
    directory.liveness.refused("w0", "i0", 0.4)
    directory.liveness.refused("w0", "i0", 0.5)
    assert state(directory, "w0", 0.5) is WorkerState.SUSPECT
    directory.liveness.refused("w0", "i0", 0.7)
    assert state(directory, "w0", 0.7) is WorkerState.DEAD
    assert directory.liveness.find_worker("w0") is not None
    directory.register(record("w0"), held(A), 0.8)
    assert state(directory, "w0", 0.8) is WorkerState.ALIVE
    directory.check()


def test_lives_are_known_by_their_incarnation(directory: Directory) -> None:
    """Those that are gone too; of others nothing can be said."""
    assert directory.liveness.state_of_life("i0", 0.0) is WorkerState.ALIVE
    directory.register(record("w0", "i1"), [], 1.0)
    directory.register(record("w1", "i2"), [], 1.0)
    assert directory.liveness.state_of_life("i0", 1.0) is WorkerState.DEAD
    assert directory.liveness.state_of_life("i2", 1.0) is WorkerState.ALIVE
    assert directory.liveness.state_of_life("never heard of", 1.0) is None


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


def test_a_life_that_a_late_message_has_replaced_comes_back() -> None:
    """The message was of a life before, so nothing follows it: the one that goes on asking is the
    later one. What it holds is found again, what the message had listed is lost."""
    late = Directory()  # as of a manager that has started since, and knows of no life before
    late.register(record("w0", "i1"), held(B), 5.0)
    late.register(record("w0", "i0"), held(A), 6.0)
    with pytest.raises(StaleWorker):
        late.register(record("w0", "i1"), held(B), 9.0)
    late.register(record("w0", "i1"), held(B), 10.5)
    late.heartbeat(record("w0", "i1"), [], [], 11.0)
    assert (late.holders(A), late.holders(B)) == ([], ["w0"])
    assert state(late, "w0", 11.0) is WorkerState.ALIVE
    for now in (12.0, 99.0):
        with pytest.raises(StaleWorker):
            late.register(record("w0", "i0"), held(A), now)
    late.check()


def test_a_life_that_was_heard_again_is_the_later_one(directory: Directory) -> None:
    """However long it has been silent since, what it has replaced does not come back."""
    directory.register(record("w0", "i1"), [], 5.0)
    directory.heartbeat(record("w0", "i1"), [], [], 6.0)
    with pytest.raises(StaleWorker):
        directory.register(record("w0", "i0"), held(A), 99.0)


def test_heartbeat_before_registration_is_refused() -> None:
    """After a restart the manager knows nobody, and must be told everything first."""
    with pytest.raises(StaleWorker):
        Directory().heartbeat(record(), [], [], 0.0)


def test_loss_of_all_is_told_for_one_ttl(directory: Directory) -> None:
    """As long as a lease would have lasted; after that the session is simply not there."""
    directory.bury("w0", "i0", 5.0)
    assert not directory.is_lost(A, 5.0), "the other worker can say what it knows"
    directory.bury("w1", "i0", 6.0)
    assert directory.holders(A) == []
    assert directory.is_lost(A, 6.0 + TTL_S - 1)
    assert not directory.is_lost(A, 6.0 + TTL_S)
    directory.check()


def test_loss_ends_where_the_session_is_found_again(directory: Directory) -> None:
    """It was opened anew, or somebody has it after all."""
    directory.bury("w0", "i0", 5.0)
    directory.bury("w1", "i0", 6.0)
    directory.register(record("w1", "i1"), held(A), 7.0)
    assert not directory.is_lost(A, 7.0)
    directory.check()


def test_part_that_ends_is_no_loss(directory: Directory) -> None:
    """Clients give back extents that hold nothing any more; the rest of the session goes on."""
    directory.heartbeat(record("w1"), [], [A], 1.0)
    assert directory.holders(A) == ["w0"]
    directory.heartbeat(record("w0"), [], [A], 1.0)
    assert not directory.is_lost(A, 1.0)
    directory.check()


def test_session_that_ends_and_begins_again_is_held(directory: Directory) -> None:
    """Both in one message: what is held now is what counts."""
    directory.heartbeat(record("w0"), held(A), [A], 1.0)
    assert set(directory.holders(A)) == {"w0", "w1"}


def test_answers_that_a_heartbeat_has_overtaken(directory: Directory) -> None:
    """What was asked before an end was heard, or before a new stream, is of before; for as long as
    an answer may take."""
    directory.heartbeat(record("w0"), [], [A], 2.0)
    assert directory.has_ended_since(A, "w0", 1.5)
    assert not directory.has_ended_since(A, "w0", 2.5)
    assert not directory.has_ended_since(A, "w1", 1.5)
    directory.heartbeat(record("w0"), [], [], 30.0)
    assert not directory.has_ended_since(A, "w0", 1.5)
    directory.register(record("w0"), held(B), 31.0)
    assert directory.has_ended_since(A, "w0", 30.5)
    assert not directory.has_ended_since(B, "w0", 30.5)


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

    @rule(worker_id=WORKERS, opened=st.sets(KEYS), ended=st.sets(KEYS), epoch=st.integers(1, 5))
    def report(
        self, worker_id: str, opened: set[SessionKey], ended: set[SessionKey], epoch: int
    ) -> None:
        if worker_id in self.holds:
            holds = self.holds[worker_id]
            holds -= ended
            holds |= opened
            reports = held(*opened, epoch=epoch)
            self.directory.heartbeat(self.record(worker_id), reports, ended, self.now)

    @rule(key=KEYS)
    def begin_anew(self, key: SessionKey) -> None:
        self.directory.begin(key)

    @rule(key=KEYS)
    def give_up(self, key: SessionKey) -> None:
        self.directory.give_up(key, self.now)

    @rule(worker_id=WORKERS)
    def die(self, worker_id: str) -> None:
        if worker_id in self.holds:
            del self.holds[worker_id]
            self.directory.bury(worker_id, f"i{self.lives[worker_id]}", self.now)

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(worker_id=WORKERS)
    def refuse(self, worker_id: str) -> None:
        if worker_id in self.holds:
            self.directory.liveness.cut_off(worker_id, f"i{self.lives[worker_id]}")
            self.directory.liveness.refused(worker_id, f"i{self.lives[worker_id]}", self.now)

    @invariant()
    def holders_are_right(self) -> None:
        self.directory.check()
        for key in (A, B, ("other", "a")):
            expected = {wid for wid, keys in self.holds.items() if key in keys}
            assert set(self.directory.holders(key)) == expected


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=40, stateful_step_count=30)


def test_restarts_are_counted(directory: Directory) -> None:
    """Another incarnation counts, and the same one that comes back does not."""

    def restarts() -> dict[str, int]:
        return {view.record.worker_id: view.restarts for view in directory.workers(1.0)}

    assert restarts() == {"w0": 0, "w1": 0}
    directory.register(record("w0", "i1"), [], 1.0)
    directory.register(record("w0", "i1"), [], 1.0)
    directory.register(record("w0", "i2"), [], 1.0)
    assert restarts() == {"w0": 2, "w1": 0}


def test_drained_worker_is_listed_until_it_leaves(directory: Directory) -> None:
    """Draining at once, and also after its connection broke; then gone, and with it what it had."""
    assert directory.liveness.leave_by("w0") is None
    directory.liveness.drain("w0", 9.0)
    assert state(directory, "w0", 1.0) is WorkerState.DRAINING
    directory.register(record("w0"), held(A), 1.5)
    assert directory.liveness.leave_by("w0") == 9.0
    assert directory.holders(A) == ["w1", "w0"]
    assert len(directory.liveness.left) == 0
    directory.leave("w0", "another-life", 2.0)
    assert state(directory, "w0", 2.0) is WorkerState.DRAINING
    directory.leave("w0", "i0", 2.0)
    assert [view.record.worker_id for view in directory.workers(2.0)] == ["w1"]
    assert directory.holders(A) == ["w1"]
    assert len(directory.liveness.left) == 1
    directory.check()
    with pytest.raises(StaleWorker):
        directory.register(record("w0"), held(A), 3.0)
    directory.register(record("w0", "i1"), [], 3.0)
    assert len(directory.liveness.left) == 0
    assert directory.liveness.leave_by("w0") is None


def test_drained_worker_is_missed_until_it_is_forgotten(directory: Directory) -> None:
    """By its name, so that somebody may decide whether there should be one less, or another."""
    directory.liveness.drain("w0", 9.0)
    assert directory.liveness.left == frozenset()
    directory.leave("w0", "i0", 2.0)
    assert directory.liveness.left == {"w0"}
    directory.liveness.forget_left("w0")
    directory.liveness.forget_left("w0")
    assert directory.liveness.left == frozenset()
    assert len(directory.liveness.left) == 0
    directory.check()


def test_only_workers_that_are_there_are_drained(directory: Directory) -> None:
    """Neither one that never was, nor one that is known to be gone."""
    directory.bury("w1", "i0", 1.0)
    for worker_id in ("w1", "w9"):
        with pytest.raises(WorkerNotFound):
            directory.liveness.drain(worker_id, 9.0)


def test_latest_epoch_outlives_who_has_said_it(directory: Directory) -> None:
    """As long as anybody holds any of the session, and for one ttl more; then it is forgotten."""
    directory.heartbeat(record("w1"), held(A, epoch=3), [], 1.0)
    directory.bury("w1", "i0", 2.0)
    latest = directory.latest(A, 900.0)
    assert latest is not None
    assert (latest.epoch, latest.incarnation) == (3, "i0")
    directory.heartbeat(record("w0"), [], [A], 1000.0)
    assert directory.latest(A, 1000.0 + TTL_S - 1) is not None
    assert directory.latest(A, 1000.0 + TTL_S) is None
    directory.heartbeat(record("w0"), [], [], 1001.0 + TTL_S)
    directory.check()
    assert not directory._epochs._latest


def test_part_two_epochs_behind_is_to_go(directory: Directory) -> None:
    """After a while, up to what it was when last heard of; one behind may be on its way."""
    directory.heartbeat(record("w1"), held(A, epoch=2), [], 1.0)
    assert directory.left_behind("w0", 9.0) == []
    directory.heartbeat(record("w1"), held(A, epoch=3), [], 2.0)
    assert directory.left_behind("w0", 5.0) == []
    assert directory.left_behind("w0", 5.5) == [(A, 1)]
    assert directory.left_behind("w1", 5.5) == []
    directory.heartbeat(record("w0"), held(A, epoch=3), [], 6.0)
    assert directory.left_behind("w0", 9.0) == []
    directory.check()


def test_part_one_epoch_behind_goes_once_it_is_given_up(directory: Directory) -> None:
    """Not while somebody has the latest epoch, or may come back with it."""
    directory.heartbeat(record("w1"), held(A, epoch=2), [], 1.0)
    directory.give_up(A, 1.0)
    assert directory.left_behind("w0", 9.0) == []
    directory.bury("w1", "i0", 2.0)
    directory.give_up(A, 2.0)
    directory.heartbeat(record("w0"), held(A), [], 3.0)
    assert directory.left_behind("w0", 5.5) == [(A, 1)]
    directory.check()


def test_session_begun_anew_has_no_past(directory: Directory) -> None:
    """Whether it is told so, or hears from who had it that it has ended, and has another now."""
    directory.heartbeat(record("w1"), held(A, epoch=5), [], 1.0)
    directory.heartbeat(record("w1"), held(A), [], 2.0)
    latest = directory.latest(A, 2.0)
    assert latest is not None
    assert latest.epoch == 5, "it may be late"
    directory.heartbeat(record("w1"), held(A), [A], 3.0)
    latest = directory.latest(A, 3.0)
    assert latest is not None
    assert latest.epoch == 1
    assert directory.left_behind("w0", 99.0) == []
    directory.heartbeat(record("w1"), held(A, epoch=5), [], 4.0)
    directory.begin(A)
    directory.heartbeat(record("w0"), [], [A], 5.0)
    directory.heartbeat(record("w1"), [], [A], 5.0)
    directory.begin(A)
    assert directory.latest(A, 5.0) is None
    directory.check()


def test_copies_are_missed() -> None:
    """Those of dead workers, and those that the session has left an epoch behind."""
    directory = Directory()
    for name in "abc":
        directory.register(record(name), [], 0.0)
    key = ("t", "s")

    def hold(name: str, epoch: int, group: int) -> None:
        directory.note(Report(key, TTL_S, epoch, 2, group), name, 0.0)
        directory.check()

    hold("a", 1, 1)
    assert directory.missing_copies(0.0) == {key: 1}
    hold("b", 1, 1)
    assert directory.missing_copies(0.0) == {}
    hold("b", 2, 1)
    assert directory.missing_copies(0.0) == {key: 1}
    hold("c", 2, 1)
    assert directory.missing_copies(0.0) == {}
    directory.bury("b", directory.liveness.find_worker("b").incarnation, 0.0)  # type: ignore[union-attr]
    assert directory.missing_copies(0.0) == {key: 1}
    for name in "ac":
        directory.end(key, name, 0.0)
    directory.check()
    assert directory.missing_copies(0.0) == {}
