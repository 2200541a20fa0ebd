"""Workers that die or freeze: their sessions are told, resume, and others notice nothing."""

from __future__ import annotations

import numpy as np
import pytest

from kvservice.clock import SystemClock
from kvservice.core.errors import PagesLost
from kvservice_client import DType, LayerGeometry
from tests.chaos.conftest import Report
from tests.chaos.decoding import (
    DIM,
    KV_HEADS,
    NUM_LAYERS,
    Decoder,
    Load,
    on_worker,
    under_load,
    workers_of,
)
from tests.chaos.service import TTL_S, Service

CLOCK = SystemClock()
LAYERS = [LayerGeometry(KV_HEADS, DIM, DIM, DType.FLOAT32)] * NUM_LAYERS

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


def test_a_killed_worker(service: Service, report: Report) -> None:
    """Within a second its sessions know what is lost, and all others get no error at all."""
    with under_load(service, 6) as load:
        load.all_advance()
        victim = workers_of(load.decoders[0])[0]
        hit = on_worker(load, victim)
        load.mark()
        service.worker_named(victim).kill()
        opened = Decoder(service.connect(), 99)
        opened.step(8)
        opened_s = CLOCK.monotonic() - load.marked_at
        load.run_for(lambda: load.resumed.keys() >= hit)
        load.all_advance()
        assert load.losses.keys() == hit, "sessions on the other worker were told of a loss"
    told_s = max(seconds for seconds, _ in load.losses.values())
    tokens = max(count for _, count in load.losses.values())
    checked = load.num_checked
    lost = f"its pages, up to {tokens} tokens of each session"
    report(
        "P3", "worker SIGKILL: its sessions are told", lost=lost,
        recovery_s=told_s, bound_s=1.0, num_checked=checked,
    )  # fmt: skip
    report(
        "P3", "worker SIGKILL: all lost tokens are fed again", lost=lost,
        recovery_s=max(load.resumed.values()), bound_s=5.0, num_checked=checked,
    )  # fmt: skip
    report(
        "P3", "worker SIGKILL: a session can be opened", lost=lost,
        recovery_s=opened_s, bound_s=5.0, num_checked=opened.num_checked,
    )  # fmt: skip


def test_a_killed_worker_of_a_striped_session(service: Service, report: Report) -> None:
    """What the other worker holds below stays; what went is fed again, with equal answers."""
    decoder = Decoder(service.connect(), 1, spread=2)
    decoder.step(64)
    for _ in range(5):
        decoder.step()
    first, second = workers_of(decoder)
    border = decoder.session._mirror.extents[1].starts[0]
    began = CLOCK.monotonic()
    service.worker_named(second).kill()
    with pytest.raises(PagesLost) as failure:
        decoder.step()
    assert failure.value.metadata["from_position"] == str(border)
    again = decoder.resume()
    assert decoder.length == border
    decoder.step(again)
    took = CLOCK.monotonic() - began
    for _ in range(5):
        decoder.step()
    decoder.check_stored()
    assert workers_of(decoder) == [first]
    report(
        "P3", "worker SIGKILL, a session on two workers", lost=f"{again} of its tokens",
        recovery_s=took, bound_s=5.0, num_checked=decoder.num_checked,
    )  # fmt: skip


def test_a_frozen_worker(service: Service, report: Report) -> None:
    """Dead within 4 s; what is addressed to it when it wakes up changes nothing anybody reads."""
    with under_load(service, 6) as load:
        load.all_advance()
        victim = workers_of(load.decoders[0])[0]
        hit = on_worker(load, victim)
        load.mark()
        service.worker_named(victim).freeze()
        load.run_for(lambda: load.resumed.keys() >= hit)
        load.run_for(lambda: CLOCK.monotonic() - load.marked_at > 8.0)
        assert load.losses.keys() == hit, "sessions on the other worker were told of a loss"
        thawed_at = CLOCK.monotonic()
        service.worker_named(victim).thaw()
        service.wait_for(2, timeout_s=10.0)
        back_s = CLOCK.monotonic() - thawed_at
        load.all_advance(20)
        assert load.losses.keys() == hit
    told_s = max(seconds for seconds, _ in load.losses.values())
    tokens = max(count for _, count in load.losses.values())
    lost = f"its pages, up to {tokens} tokens of each session"
    for decoder in load.decoders.values():
        decoder.check_stored()
    report(
        "P9", "worker SIGSTOP: its sessions are told", lost=lost,
        recovery_s=told_s, bound_s=4.0, num_checked=load.num_checked,
    )  # fmt: skip
    report(
        "P9", "worker SIGCONT after 8 s: it takes sessions again", lost="nothing more",
        recovery_s=back_s, bound_s=4.0, num_checked=load.num_checked,
    )  # fmt: skip


def test_a_worker_killed_in_the_middle_of_appends(service: Service, report: Report) -> None:
    """Each layer has a step's tokens or has none of them; rolling back makes all layers even."""
    client = service.connect()
    checked = 0
    for round_ in range(3):
        decoder = Decoder(client, round_, spread=2, layers=LAYERS)
        decoder.step(32)
        with Load({0: decoder}, max_tokens=400) as load:
            load.all_advance(3)
            load.mark()
            service.worker_named(workers_of(decoder)[round_ % 2]).kill()
            load.run_for(lambda load=load: bool(load.resumed))
            load.all_advance(3)
        lengths = {decoder.session.lengths(layer) for layer in range(NUM_LAYERS)}
        assert lengths == {(decoder.length,)}
        decoder.check_stored()
        checked += decoder.num_checked
        decoder.session.release()
        service.repair()
    report(
        "P12", "worker SIGKILL amid appends, 3 times", lost="its pages; no half step stayed",
        recovery_s=max(load.resumed.values()), bound_s=5.0, num_checked=checked,
    )  # fmt: skip


def test_pages_of_another_show_nothing(service: Service, report: Report) -> None:
    """Who gets pages that somebody has filled reads refusals and zeros, never the other's."""
    client = service.connect()
    canary = np.full((1, KV_HEADS, 512, DIM), 77.0, np.float32)
    checked = 0
    for _ in range(5):
        before = client.open(num_rows=1, page_size=4, layers=LAYERS)
        for layer in range(NUM_LAYERS):
            before.write(layer, canary, canary)
        before.release()
        after = client.open(num_rows=1, page_size=4, layers=LAYERS)
        one = np.ones((1, KV_HEADS, 1, DIM), np.float32)
        for layer in range(NUM_LAYERS):
            after.write(layer, one, one, positions=[301])
            k, v = after.read(layer, 0, 302)
            for stored in (k, v):
                assert not stored[:, :, :301].any()
                assert (stored[:, :, 301] == 1.0).all()
            with pytest.raises(ValueError, match="302"):
                after.read(layer, 0, 303)
            checked += 3
        after.release()
    report("P22", "pages of a released session go to another", num_checked=checked)


def test_resuming_in_another_process_life(service: Service, report: Report) -> None:
    """A decoder that has crashed is found at its stored length, and older holders are refused."""
    old = Decoder(service.connect(), 5, ttl_s=TTL_S)
    old.step(30)
    began = CLOCK.monotonic()
    new = Decoder(service.connect(), 5, session=service.connect().attach(old.session.id))
    (new.length,) = new.session.lengths(0)
    took = CLOCK.monotonic() - began
    assert new.length == 30
    new.check_stored()
    for _ in range(5):
        new.step()
    report(
        "P1", "decoder restarts and attaches", recovery_s=took, bound_s=2.0,
        num_checked=new.num_checked,
    )  # fmt: skip
