"""Sessions that move, and workers that leave, while somebody decodes and somebody dies."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress

import pytest

from kvservice.clock import SystemClock
from kvservice.core.errors import KVServiceError, SessionNotFound
from kvservice_client import Client
from tests.chaos.conftest import Report
from tests.chaos.decoding import Crowd, Decoder, Load, on_worker, under_load, workers_of
from tests.chaos.service import TTL_S, Process, Service, pages
from tests.programs import ROOT
from tests.serving import until

CLOCK = SystemClock()

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


class Mover(Crowd):
    """Moves sessions to and fro, whatever becomes of it."""

    def __init__(self, client: Client, session_ids: Iterable[str]) -> None:
        self.client = client
        self.num_moved = self.num_refused = 0
        super().__init__(self._run, [(0, list(session_ids))])

    def _run(self, seed: int, session_ids: list[str]) -> None:
        del seed
        try:
            while not self._stop.is_set():
                for session_id in session_ids:
                    try:
                        self._move(session_id)
                        self.num_moved += 1
                    except KVServiceError:
                        self.num_refused += 1
                        CLOCK.wait(self._stop, 0.05)
        except BaseException as error:
            self.errors.append(error)

    def _move(self, session_id: str) -> None:
        ids = sorted(worker.worker_id for worker in self.client.list_workers())
        found = [one for one in self.client.list_sessions() if one.session_id == session_id]
        if not found:
            raise SessionNotFound("it has ended")
        here = found[0].extents[0].worker_id
        [there] = [one for one in ids if one != here]
        self.client.move_session(session_id, there, timeout_s=10.0)


def ids_of(load: Load) -> list[str]:
    return [decoder.session.id for decoder in load.decoders.values()]


def test_sessions_move_under_decoders(service: Service, report: Report) -> None:
    """To and fro, all the time: no decoder gets an error, or a wrong answer, or waits for long."""
    with under_load(service, 4) as load:
        load.all_advance()
        load.mark()
        with Mover(service.connect(), ids_of(load)) as mover:
            load.run_for(lambda: mover.num_moved >= 20)
        slowest_s = max(load.slowest_s.values())
        load.all_advance()
        assert not load.losses, "nobody has lost anything"
    for decoder in load.decoders.values():
        decoder.check_stored()
    report(
        "P19", "20 moves of sessions in use: the slowest step meanwhile",
        recovery_s=slowest_s, bound_s=1.0, num_checked=load.num_checked,
    )  # fmt: skip


# Where it dies, who that is, and whether what was on its way is lost with it.
POINTS = {
    "move.complete": ("target", False),
    "move.handed_over": ("source", True),
    "move.arrived": ("target", True),
    "manager.move.begun": ("manager", False),
    "manager.move.done": ("manager", False),
}


@pytest.mark.parametrize("point", POINTS)
def test_somebody_dies_in_the_middle_of_a_move(
    service: Service, report: Report, point: str
) -> None:
    """At every point of it: the session goes on where it was or where it went, or is said to be
    lost with the worker that held it."""
    who, may_be_lost = POINTS[point]
    first, second = service.workers
    source, target = (first, second)
    victim: Process = {"source": first, "target": second, "manager": service.manager}[who]
    victim.begin_again(f"{point}=crash")
    service.wait_for(2)
    with under_load(service, 4) as load:
        load.all_advance()
        hit = on_worker(load, source.worker_id)
        moved = load.decoders[min(hit)]
        load.mark()
        with suppress(KVServiceError):  # it is not known how it has ended, or is
            service.connect(timeout_s=5.0).move_session(moved.session.id, target.worker_id)
        victim.wait_until_ended()
        died_at = CLOCK.monotonic()
        victim.start()
        service.wait_for(2)
        load.all_advance()
        took = CLOCK.monotonic() - died_at
        others = load.decoders.keys() - hit
        gone = {"manager": set(), "source": hit, "target": others}[who]
        allowed = gone | ({min(hit)} if may_be_lost else set())
        assert load.losses.keys() <= allowed, "somebody has lost what was not on the dead worker"
    for decoder in load.decoders.values():
        decoder.check_stored()
    lost = "its pages, as of any dead worker" if who != "manager" else "nothing"
    report(
        "P19", f"{who} SIGKILL at {point} of a move (its new start included)", lost=lost,
        recovery_s=took, bound_s=15.0, num_checked=load.num_checked,
    )  # fmt: skip


def test_a_client_dies_while_its_sessions_move(service: Service, report: Report) -> None:
    """Their pages come back within a lease, from whichever worker they are on."""
    module = "tests.chaos.client_process"
    command = (sys.executable, "-m", module, service.address, "10", str(TTL_S))
    client = service.connect()
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        session_ids = [session.session_id for session in client.list_sessions()]
        with Mover(client, session_ids) as mover:
            until(lambda: mover.num_moved >= 3, 20.0)
            holder.kill()
            killed_at = CLOCK.monotonic()
            until(lambda: not pages(client), 20.0)
            took = CLOCK.monotonic() - killed_at
    report(
        "P2", "client SIGKILL while its 10 sessions move", lost="its sessions",
        recovery_s=took, bound_s=TTL_S + 1.0, num_checked=10,
    )  # fmt: skip


def test_a_worker_is_told_to_end(service: Service, report: Report) -> None:
    """SIGTERM under decoders: its sessions go to the other worker, it ends, and nothing is lost."""
    with under_load(service, 6) as load:
        load.all_advance()
        leaving = service.workers[0]
        hit = on_worker(load, leaving.worker_id)
        load.mark()
        leaving.signal(signal.SIGTERM)
        leaving.wait_until_ended()
        gone_s = CLOCK.monotonic() - load.marked_at
        load.all_advance()
        slowest_s = max(load.slowest_s.values())
        assert not load.losses, "nobody has lost anything"
        stays = service.workers[1].worker_id
        assert {worker for one in load.decoders.values() for worker in workers_of(one)} == {stays}
        leaving.start()
        service.wait_for(2)
    for decoder in load.decoders.values():
        decoder.check_stored()
    report(
        "P19", f"worker SIGTERM under load: its {len(hit)} sessions have moved, and it has ended",
        recovery_s=gone_s, bound_s=10.0, num_checked=load.num_checked,
    )  # fmt: skip
    report(
        "P19", "worker SIGTERM under load: the slowest step meanwhile",
        recovery_s=slowest_s, bound_s=1.0, num_checked=load.num_checked,
    )  # fmt: skip


def test_a_worker_leaves_while_nobody_decodes(service: Service, report: Report) -> None:
    """A decoder that was idle all the time, lease renewals apart, finds its session elsewhere."""
    idle = Decoder(service.connect(), 3, ttl_s=TTL_S)
    idle.step(30)
    [held] = workers_of(idle)
    leaving = service.worker_named(held)
    leaving.signal(signal.SIGTERM)
    leaving.wait_until_ended()
    began = CLOCK.monotonic()
    renewed_for = CLOCK.monotonic() + 2 * TTL_S
    until(lambda: CLOCK.monotonic() >= renewed_for)
    started = CLOCK.monotonic()
    idle.step()
    took = CLOCK.monotonic() - started
    idle.check_stored()
    assert began < started
    assert workers_of(idle) != [held]
    leaving.start()
    report(
        "P19", "worker SIGTERM, its decoder idle for two leases: the next step",
        recovery_s=took, bound_s=2.0, num_checked=idle.num_checked,
    )  # fmt: skip
