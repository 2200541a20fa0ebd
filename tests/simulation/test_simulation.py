"""A whole service in one thread, by seeds: whatever happens, no wrong token and no leaked page.

A seed that fails is named; `python -m tests.simulation --seed N` replays it, event by event the
same, and prints what happens in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Final

import pytest

from kvservice.core.directory import Directory
from kvservice.manager.lookup import Lookup
from kvservice_client._changes import Changes
from kvservice_client._links import Links
from kvservice_client._mirror import Mirror
from kvservice_client._outcomes import FAILED
from kvservice_client._tokens import TokenAccess as ClientAccess
from kvservice_workers import arrivals, token_access
from kvservice_workers.changes import Changes as WorkerChanges
from kvservice_workers.data_plane.answers import Answers
from kvservice_workers.layer_group import LayerGroup
from kvservice_workers.leases import Leases
from kvservice_workers.page_table import PageTable
from kvservice_workers.session_state import WorkerSession
from kvservice_workers.token_access import TokenAccess as WorkerAccess
from tests.simulation.scenario import run_seed

ROOT: Final = Path(__file__).resolve().parents[2]
CHUNK: Final = 25
NUM_SEEDS: Final = int(os.environ.get("KVSERVICE_SEEDS", "150"))
MUTANT_SEEDS: Final = 300


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, CHUNK))
def test_seeds(first: int) -> None:
    """All that is acknowledged holds, or is said to be lost; at the end nothing is left."""
    for seed in range(first, first + CHUNK):
        run_seed(seed)


@pytest.mark.timeout(300)  # it loads torch once more
def test_a_seed_is_the_same_each_time() -> None:
    """In this process, and in another with other hashes: otherwise a failure could be lost."""
    traces = [run_seed(seed).trace for seed in range(4) for _ in range(2)]
    assert traces[::2] == traces[1::2]
    source = (
        "from tests.simulation.scenario import run_seed\n"
        "print(*(run_seed(seed).trace for seed in range(4)))"
    )
    paths = [str(ROOT / name) for name in ("", "client", "workers")]
    printed = subprocess.run(
        [sys.executable, "-c", source],
        env=os.environ | {"PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert [int(trace) for trace in printed.split()] == traces[::2]


# Bugs, each in one place, that somebody might make.
def no_epoch_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerSession, "check_epoch", lambda self, epoch: None)


def no_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    def need(self: PageTable, indices: Any) -> Any:
        needed = original(self, indices)
        return type(needed)(needed.new, [])

    original = PageTable.need
    patch.setattr(PageTable, "need", need)


def no_repeats(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerChanges, "_is_repeat", lambda self, session, epoch, change: False)


def the_same_id_again(patch: pytest.MonkeyPatch) -> None:
    def open_again(self: Changes) -> None:
        connections, mirror = self._links.connections, self._mirror
        new_id, connections.new_id = connections.new_id, lambda: mirror.id
        try:
            original(self)
        finally:
            connections.new_id = new_id

    original = Changes._open_again
    patch.setattr(Changes, "_open_again", open_again)


def no_incarnation_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Answers, "check_incarnation", lambda self, incarnation: None)


def no_word_of_the_follower(patch: pytest.MonkeyPatch) -> None:
    never = property(lambda self: "", lambda self, value: None)
    patch.setattr(WorkerSession, "followed_by", never, raising=False)


def no_telling_old_parts_from_new(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvservice.manager.lookup.current", list)


def pages_that_stay_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Directory, "left_behind", lambda self, worker_id, now: [])


def nothing_expires(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "expire", lambda self: 0)


def lost_without_a_word(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvservice.manager.lookup.find_loss", lambda infos: None)
    patch.setattr("kvservice.manager.changes.find_loss", lambda infos: None)


def old_parts_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Directory, "latest", lambda self, key, now: None)


def any_release_counts(patch: pytest.MonkeyPatch) -> None:
    def release(
        self: Leases, tenant: str, session_ids: Iterable[str], *which: Collection[str]
    ) -> int:
        return original(self, tenant, list(session_ids))

    original = Leases.release
    patch.setattr(Leases, "release", release)


def what_is_written_meanwhile_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayerGroup, "wrote", lambda self, pages: None)
    patch.setattr(LayerGroup, "wrote_slots", lambda self, pages: None)


def frozen_sessions_change(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerSession, "check_thawed", lambda self, now: None)


# Of two copies of a session.
def acknowledged_by_one_copy(patch: pytest.MonkeyPatch) -> None:
    def attend_all(self: Links, calls: Any) -> Any:
        outcomes = original(self, calls)
        twins = [extent for one in self._mirror.extents for extent in one.copies[1:]]
        for index, (extent, _) in enumerate(calls):
            if extent in twins and isinstance(outcomes[index], FAILED):
                outcomes[index] = outcomes[0]  # it counts as stored
        return outcomes

    original = Links._attend_all
    patch.setattr(Links, "_attend_all", attend_all)


def steps_reach_one_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvservice_client._attend._for_twins", lambda calls: [])


def a_copy_is_promoted_from_an_epoch_before(patch: pytest.MonkeyPatch) -> None:
    def not_left_behind(self: Lookup, key: Any, asked: Any) -> Any:
        return {worker_id: info for worker_id, info in asked.items() if info is not None}

    patch.setattr(Lookup, "_not_left_behind", not_left_behind)


def what_was_given_up_stays_at_the_same_epoch(patch: pytest.MonkeyPatch) -> None:
    def give_up(self: Mirror, extent: Any) -> bool:
        before = self.num_changed
        known = original(self, extent)
        self.num_changed = before
        return known

    original = Mirror.give_up
    patch.setattr(Mirror, "give_up", give_up)


def what_was_given_up_is_told_on(patch: pytest.MonkeyPatch) -> None:
    def give_up(self: Mirror, extent: Any) -> bool:
        twin = self.other_copy(extent)
        known = original(self, extent)
        for one in self.extents:
            if one is twin and not extent.replaced:
                one.twin, extent.lost = extent, False
        return known

    original = Mirror.give_up
    patch.setattr(Mirror, "give_up", give_up)


# Of keys and values that are stored without attention.
def writes_reach_one_copy(patch: pytest.MonkeyPatch) -> None:
    def write_to(self: ClientAccess, extent: Any, call: Any) -> None:
        self._links.write(extent, call)

    patch.setattr(ClientAccess, "_write_to", write_to)


def writes_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvservice_workers.token_access._check_number", lambda session, number: None)


def a_late_write_changes_the_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(token_access, "_is_carried_out", lambda session, number: False)


def what_a_write_changes_meanwhile_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def put(self: WorkerAccess, group: LayerGroup, *tokens: Any) -> None:
        written, group.written = group.written, None
        try:
            original(self, group, *tokens)
        finally:
            group.written = written

    original = WorkerAccess._put
    patch.setattr(WorkerAccess, "_put", put)


def a_moved_session_counts_writes_anew(patch: pytest.MonkeyPatch) -> None:
    def become(session: WorkerSession, state: Any, source: str) -> None:
        original(session, state, source)
        session.last_write = 0

    original = arrivals.become
    patch.setattr(arrivals, "become", become)


def gaps_show_what_was_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerAccess, "_zero_gaps", lambda self, *written: None)


def gaps_are_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvservice_workers.token_access._mark_gaps", lambda *written: None)


def an_extent_begins_behind_a_gap(patch: pytest.MonkeyPatch) -> None:
    def starts(session: WorkerSession, told: Any, rows: Any, positions: Any) -> list[int]:
        return original(session, (), rows, positions)

    original = token_access._write_starts
    patch.setattr(token_access, "_write_starts", starts)


# With a seed that has found it: where to begin, so that little is spent on those that do not.
MUTANTS: Final = {
    what_is_written_meanwhile_is_forgotten: 105,
    frozen_sessions_change: 190,
    no_epoch_check: 0,
    no_copy_on_write: 0,
    no_repeats: 11,
    no_incarnation_check: 0,
    no_word_of_the_follower: 255,
    no_telling_old_parts_from_new: 0,
    pages_that_stay_behind: 0,
    nothing_expires: 0,
    lost_without_a_word: 55,
    the_same_id_again: 0,
    old_parts_count: 0,
    any_release_counts: 15,
    acknowledged_by_one_copy: 0,
    steps_reach_one_copy: 0,
    a_copy_is_promoted_from_an_epoch_before: 0,
    what_was_given_up_is_told_on: 75,
    what_was_given_up_stays_at_the_same_epoch: 155,
    writes_reach_one_copy: 0,
    writes_are_not_counted: 30,
    a_late_write_changes_the_step: 885,
    what_a_write_changes_meanwhile_is_forgotten: 170,
    a_moved_session_counts_writes_anew: 85,
    gaps_show_what_was_there: 0,
    gaps_are_seen: 0,
    an_extent_begins_behind_a_gap: 85,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_bugs_are_found(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of some bugs makes a seed fail, so that those that pass say something."""
    mutant(monkeypatch)
    first = MUTANTS[mutant]
    assert any(fails(seed) for seed in range(first, first + MUTANT_SEEDS))


def fails(seed: int) -> bool:
    try:
        run_seed(seed)
    except Exception:
        return True
    return False
