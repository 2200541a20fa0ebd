"""Managers that die: decoding goes on, the directory is rebuilt, and nothing is lost or leaked.

How long a process takes to start is the machine's business: seconds count from when the new manager
serves. `test_ray.py` has the whole way, from the kill on.
"""

from __future__ import annotations

import pytest

from kvservice.clock import SystemClock
from kvservice.core.errors import KVServiceError
from kvservice_client import Client
from tests.chaos.conftest import Report
from tests.chaos.decoding import Crowd, Decoder, on_worker, under_load, workers_of
from tests.chaos.service import TTL_S, Service
from tests.serving import until

CLOCK = SystemClock()

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


class Storm(Crowd):
    """Opens, forks, pops and releases sessions, in threads, whatever becomes of it."""

    def __init__(self, clients: list[Client]) -> None:
        self.num_opened = self.num_failed = 0
        super().__init__(self._run, enumerate(clients))

    def _run(self, seed: int, client: Client) -> None:
        try:
            while not self._stop.is_set():
                try:
                    decoder = Decoder(client, 1000 + seed, ttl_s=TTL_S)
                    decoder.step(9)
                    child = decoder.session.fork()
                    decoder.session.pop(4)
                    child.release()
                    decoder.session.release()
                    self.num_opened += 1
                except KVServiceError:
                    self.num_failed += 1  # what is left behind goes with its lease
        except BaseException as error:
            self.errors.append(error)


def test_a_killed_manager(service: Service, report: Report) -> None:
    """Whoever decodes sees no error; calls on the manager are answered again within 6 s."""
    storming = [service.connect(timeout_s=10.0) for _ in range(3)]
    with under_load(service, 4) as load:
        load.all_advance()
        with Storm(storming) as storm:
            until(lambda: storm.num_opened >= 10, 30.0)
            load.mark()
            service.manager.kill()
            service.manager.launch()
            load.all_advance(20)
            service.manager.wait()
            serves_at = CLOCK.monotonic()
            with service.connect() as client:
                Decoder(client, 98, ttl_s=TTL_S).step(4)
                back_s = CLOCK.monotonic() - serves_at
                ids = {one.session.id for one in load.decoders.values()}
                until(lambda: ids <= {info.session_id for info in client.list_sessions()})
                known_s = CLOCK.monotonic() - serves_at
            alone_s = max(load.slowest_s.values())
            opened = storm.num_opened
            until(lambda: storm.num_opened >= opened + 10, 30.0)
        load.all_advance()
        assert not load.losses, "nobody has lost anything"
    for decoder in load.decoders.values():
        decoder.check_stored()
    report(
        "P4", "manager SIGKILL in a storm of calls: it opens sessions (from its new start on)",
        recovery_s=back_s, bound_s=4.0, num_checked=load.num_checked,
    )  # fmt: skip
    report(
        "P4", "manager SIGKILL: it knows all sessions (from its new start on)",
        recovery_s=known_s, bound_s=4.0, num_checked=load.num_checked,
    )  # fmt: skip
    report(
        "P4", "manager SIGKILL: the slowest step meanwhile",
        recovery_s=alone_s, bound_s=1.0, num_checked=load.num_checked,
    )  # fmt: skip


def test_a_frozen_manager(service: Service, report: Report) -> None:
    """Decoding goes on; what waits for the manager is answered when it wakes up."""
    with under_load(service, 3) as load:
        load.all_advance()
        load.mark()
        service.manager.freeze()
        load.run_for(lambda: CLOCK.monotonic() - load.marked_at > 5.0)
        slowest_s = max(load.slowest_s.values())
        thawed_at = CLOCK.monotonic()
        service.manager.thaw()
        Decoder(service.connect(), 97, ttl_s=TTL_S).step(4)
        back_s = CLOCK.monotonic() - thawed_at
        load.all_advance()
        assert not load.losses, "nobody has lost anything"
    report(
        "P4", "manager SIGSTOP 5 s: the slowest step meanwhile",
        recovery_s=slowest_s, bound_s=1.0, num_checked=load.num_checked,
    )  # fmt: skip
    report(
        "P4", "manager SIGCONT: it opens sessions again",
        recovery_s=back_s, bound_s=6.0, num_checked=load.num_checked,
    )  # fmt: skip


@pytest.mark.parametrize("restarted", [True, False], ids=["both", "manager"])
def test_manager_and_worker_killed_together(
    service: Service, report: Report, restarted: bool
) -> None:
    """As if one had died after the other, whether or not the worker comes back."""
    with under_load(service, 6) as load:
        load.all_advance()
        victim = workers_of(load.decoders[0])[0]
        hit = on_worker(load, victim)
        load.mark()
        service.worker_named(victim).kill()
        service.manager.kill()
        service.manager.launch()
        if restarted:
            service.worker_named(victim).launch()
            service.worker_named(victim).wait()
        service.manager.wait()
        serves_s = CLOCK.monotonic() - load.marked_at
        load.run_for(lambda: load.resumed.keys() >= hit)
        took = max(0.0, max(load.resumed.values()) - serves_s)
        load.all_advance()
        assert load.losses.keys() == hit, "sessions on the other worker were told of a loss"
    for decoder in load.decoders.values():
        decoder.check_stored()
    tokens = max(count for _, count in load.losses.values())
    who = "both come" if restarted else "the manager comes"
    report(
        "P5", f"manager and worker SIGKILL, {who} back: all is fed again (from then on)",
        lost=f"the worker's pages, up to {tokens} tokens of each session",
        recovery_s=took, bound_s=7.0, num_checked=load.num_checked,
    )  # fmt: skip
