"""Workers that die or freeze under sessions with two copies: no decoder is told anything."""

from __future__ import annotations

from typing import Any

import pytest

from kvservice.clock import SystemClock
from tests.chaos.conftest import Report
from tests.chaos.decoding import NUM_LAYERS, Decoder, Load
from tests.chaos.service import TTL_S, Service

CLOCK = SystemClock()

WHICH = pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


def copies_of(decoder: Decoder) -> list[str]:
    """Return the workers that hold a decoder's session, the one that is asked first."""
    (extent,) = decoder.session._mirror.extents
    return [copy.worker_id for copy in extent.copies]


def replicated(service: Service, seed: int, **options: Any) -> Decoder:
    decoder = Decoder(service.connect(), seed, replicas=2, ttl_s=TTL_S, **options)
    decoder.step(24)
    decoder.step()
    return decoder


@WHICH
def test_a_killed_copy_at_every_point_of_a_step(
    service: Service, report: Report, which: int
) -> None:
    """Before a layer, or after the last one: the step is finished on the other copy."""
    slowest, checked = 0.0, 0
    for point in range(NUM_LAYERS + 1):
        decoder = replicated(service, 10 * which + point)
        victim = copies_of(decoder)[which]
        for layer in range(NUM_LAYERS + 1):
            if layer == point:
                began = CLOCK.monotonic()
                service.worker_named(victim).kill()
            if layer < NUM_LAYERS:
                decoder.attend(layer, decoder.length, decoder.length + 1)
        decoder.length += 1
        decoder.step()
        slowest = max(slowest, CLOCK.monotonic() - began)
        assert victim not in copies_of(decoder)
        for _ in range(5):
            decoder.step()
        decoder.check_stored()
        checked += decoder.num_checked
        decoder.session.release()
        service.repair()
    copy = ("that is asked", "that only stores")[which]
    report(
        "P3", f"worker SIGKILL at each point of a step, of two copies the one {copy}",
        recovery_s=slowest, bound_s=1.0, num_checked=checked,
    )  # fmt: skip


@WHICH
def test_a_killed_copy_under_load(service: Service, report: Report, which: int) -> None:
    """Of many sessions at whatever they are doing, none is told of a loss."""
    decoders = {seed: replicated(service, seed) for seed in range(4)}
    with Load(decoders) as load:
        load.all_advance()
        victim = copies_of(decoders[0])[which]
        load.mark()
        service.worker_named(victim).kill()
        load.all_advance(20)
        slowest = max(load.slowest_s.values())
        assert not load.losses, "a session with two copies was told of a loss"
    for decoder in decoders.values():
        decoder.check_stored()
    report(
        "P3", f"worker SIGKILL under load, sessions with two copies ({which + 1} of 2)",
        recovery_s=slowest, bound_s=2.0, num_checked=load.num_checked,
    )  # fmt: skip


@WHICH
def test_a_frozen_copy(service: Service, report: Report, which: int) -> None:
    """It is given up within 4 s; what it does when it wakes up changes nothing anybody reads."""
    decoders = {seed: replicated(service, seed) for seed in range(4)}
    with Load(decoders) as load:
        load.all_advance()
        victim = copies_of(decoders[0])[which]
        load.mark()
        service.worker_named(victim).freeze()
        load.all_advance(20)
        slowest = max(load.slowest_s.values())
        service.worker_named(victim).thaw()
        load.all_advance(20)
        assert not load.losses, "a session with two copies was told of a loss"
    for decoder in decoders.values():
        decoder.check_stored()
    heir = decoders[0].taken_over(service.connect(), 0)
    copy = ("that is asked", "that only stores")[which]
    report(
        "P9", f"worker SIGSTOP and SIGCONT, of two copies the one {copy}",
        recovery_s=slowest, bound_s=4.0, num_checked=load.num_checked + heir.num_checked,
    )  # fmt: skip


def test_a_killed_copy_and_the_manager(service: Service, report: Report) -> None:
    """Decoding asks neither; a new manager finds the copy that went on."""
    decoder = replicated(service, 7)
    victim = copies_of(decoder)[0]
    began = CLOCK.monotonic()
    service.manager.kill()
    service.worker_named(victim).kill()
    decoder.step()
    took = CLOCK.monotonic() - began
    for _ in range(5):
        decoder.step()
    service.repair()
    heir = decoder.taken_over(service.connect(), 7)
    report(
        "P4", "manager and one of two copies SIGKILL: decoding goes on",
        recovery_s=took, bound_s=2.0, num_checked=decoder.num_checked + heir.num_checked,
    )  # fmt: skip


def test_copies_killed_one_after_the_other(service: Service, report: Report) -> None:
    """With time to copy between: every worker has been killed in the end, and nobody was told."""
    decoders = {seed: replicated(service, seed) for seed in range(3)}
    slowest = restored_s = 0.0
    with Load(decoders) as load:
        for round_ in range(4):
            load.all_advance()
            victim = copies_of(decoders[0])[round_ % 2]
            load.mark()
            service.worker_named(victim).kill()
            load.all_advance(10)
            slowest = max(slowest, *load.slowest_s.values())
            service.worker_named(victim).start()
            began = CLOCK.monotonic()
            load.run_for(
                lambda: not any(one.session._mirror.misses_copies for one in decoders.values())
            )
            restored_s = max(restored_s, CLOCK.monotonic() - began)
            load.all_advance(10)
            assert not load.losses, "a session with two copies was told of a loss"
    for decoder in decoders.values():
        decoder.check_stored()
    report(
        "P3", "worker SIGKILL, 4 times, each copy in turn: steps go on",
        recovery_s=slowest, bound_s=2.0, num_checked=load.num_checked,
    )  # fmt: skip
    report(
        "P3", "worker SIGKILL, 4 times, each copy in turn: copied again (from its new start on)",
        recovery_s=restored_s, bound_s=10.0, num_checked=load.num_checked,
    )  # fmt: skip
