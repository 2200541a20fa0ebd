"""One seed: a small service, a few decoders, and what happens to them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations

import torch

from kvservice.core.caller import ANONYMOUS
from kvservice.core.errors import KVServiceError, SessionNotFound
from kvservice.core.liveness import DEAD_AFTER_S
from kvservice.v1 import manager_pb2
from kvservice_workers.session_state import WorkerSession
from tests.simulation.decoder import Decoder
from tests.simulation.loop import Crashed, Loop, Process
from tests.simulation.network import Weather
from tests.simulation.states import Story
from tests.simulation.world import HEARTBEAT_S, MANAGER, TTL_S, SimClient, SimWorker, World

PAGE_BYTES = 2 * 2 * 2 * 4  # 2 tokens of K and V, 2 float32 each, in one layer
CALM = Weather()
LATEST_S = 9.0  # from client to manager, and from there to a worker
GIVING_BACK_S = 0.5  # so long faults may still meet what the last decoder gives back
# Until a worker is back, and has been told what it is to free: when that was noticed, and a while
# after, by the next heartbeat.
FREED_WITHIN_S = 2.5 + DEAD_AFTER_S + 2 * HEARTBEAT_S + 0.5


@dataclass
class Report:
    """What a run of a seed was."""

    seed: int
    trace: int
    num_events: int
    faults: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)


class Scenario:
    """Runs a seed: faults come while decoders work, then all heals, and nothing may be left."""

    def __init__(self, seed: int, *, keep_log: bool = False) -> None:
        self.loop = Loop(seed, keep_log=keep_log)
        rng = self.rng = self.loop.rng
        self.seed = seed
        self.calm = rng.random() < 0.1
        # Nothing but decoders is at fault, or a worker comes back to where it is no more needed.
        # The latter alone: nobody can tell if the manager and all that know better go as well.
        kind = rng.random()
        self.peaceful = not self.calm and kind < 0.1
        self.haunted = not self.calm and 0.1 <= kind < 0.25
        # Sessions are moved all the time, and things go wrong just then.
        self.moving = not self.calm and 0.25 <= kind < 0.5
        # What is left behind is to be told, not to expire before.
        self.ttl_s = 2 * TTL_S if self.haunted else TTL_S
        self.left_behind: dict[tuple[str, WorkerSession], float] = {}  # since when
        self.faults: list[str] = []
        self.num_layers = rng.choice([1, 1, 2])
        pages = rng.choice([6, 10, 16, 100]) * self.num_layers
        self.world = World(
            self.loop,
            num_workers=rng.choice([2, 3] if self.haunted or self.moving else [1, 2, 2, 3]),
            memory_bytes=pages * PAGE_BYTES * 2,
        )
        self.open_decoders = 0
        self.healing = False
        self.hanging: list[SimClient] = []
        self.clean = False
        # How likely something happens just when a session is between two workers.
        self.hazard = rng.choice([0.05, 0.2, 0.5]) if self.moving else 0.0
        self.world.at_point = self._at_point

    def run(self) -> Report:
        rng, loop = self.rng, self.loop
        loop.run(lambda: len(self.world.manager.manager.workers()) == self.world.expected, 5.0)
        for _ in range(1 if self.haunted else rng.choice([1, 1, 2])):
            client = self.world.start_client()
            for _ in range(rng.choice([1, 1, 2])):
                long = self.haunted or self.moving  # as long as workers are away, or sessions move
                num_ops = rng.randint(10, 18) if long else rng.randint(5, 12)
                self._begin(client, num_ops=num_ops, story=None)
        if not self.calm:
            if rng.random() < 0.3 and not self.peaceful and not self.haunted:
                self._storm()
            for _ in range(0 if self.moving else rng.randint(1, 4)):
                fault = self._fault
                if self.peaceful or self.haunted:
                    fault = self._replace_client if self.peaceful else self._outlive
                loop.later(rng.uniform(0.0, 5.0), fault)
            if self.haunted:
                self._watch_left_behind()
        if not self.haunted and self.world.expected > 1:
            for _ in range(rng.choice([8, 16] if self.moving else [0, 1, 2, 4, 8])):
                loop.later(rng.uniform(0.1, 6.0), self._move)
            if rng.random() < 0.25:
                loop.later(rng.uniform(0.5, 4.0), self._drain)
        heal_in_s = rng.uniform(12.0, 16.0) if self.haunted else rng.uniform(5.0, 12.0)
        loop.later(heal_in_s, lambda: None if self.healing else self._heal())
        loop.run(self._is_done, 400.0)
        self._finish()
        return Report(self.seed, loop.trace, loop.num_events, self.faults, loop.log)

    def _is_done(self) -> bool:
        return self.healing and not self.open_decoders and not self.hanging

    def _begin(self, client: SimClient, *, num_ops: int, story: Story | None) -> None:
        def done() -> None:
            self.open_decoders -= 1
            decoders.remove(decoder)
            if not self.haunted:  # where what is left behind is to be freed without decoders
                self.loop.later(GIVING_BACK_S, self._heal_unless_used)

        decoder = Decoder(
            client,
            num_layers=self.num_layers,
            num_ops=num_ops,
            ttl_s=self.ttl_s,
            story=story,
            spreads=[2] if self.haunted else [1, 1, 2],
            replicas=[1, 2],
            rests=[0.5] if self.haunted else [0.5, 2.0, TTL_S + 2.0],
            thinks=[0.0, 0.3, 0.8, 1.6] if self.haunted else [0.0, 0.05, 0.3, 0.8],
            on_done=done,
            may_fail=self._may_fail,
        )
        decoders = client.decoders
        decoders.append(decoder)
        self.open_decoders += 1
        client.run(decoder.run)

    def _may_fail(self, error: KVServiceError) -> bool:
        """Whether there is a cause: a decoder that is replaced ends nobody's session."""
        return not (self.calm or (self.peaceful and isinstance(error, SessionNotFound)))

    # -- faults

    def _fault(self) -> None:
        if self.healing:
            return
        faults = [
            self._crash_worker,
            self._crash_worker,
            self._crash_manager,
            self._crash_both,
            self._crash_all,
            self._crash_tail,
            self._crash_client,
            self._replace_client,
            self._freeze,
            self._partition,
            self._swizzle,
            self._storm,
        ]
        self.rng.choice(faults)()

    def _note(self, fault: str) -> None:
        self.loop.note("fault:", fault)
        self.faults.append(fault)

    def _move(self) -> None:
        """Move some session from where it is to another worker. Nobody is to notice."""
        if self.healing or not self.world.manager.alive:
            return
        held = [
            (session.key[1], name)
            for name, worker in self.world.workers.items()
            for session in worker.worker._sessions.all()
        ]
        if held:
            session_id, source = self.rng.choice(held)
            target = self.rng.choice([one for one in self.world.workers if one != source])
            manager = self.world.manager
            self.loop.spawn(manager, lambda: self._ask_to_move(session_id, source, target))

    def _ask_to_move(self, session_id: str, source: str, target: str) -> None:
        self.loop.note("move", source, target)
        request = manager_pb2.MoveSessionRequest(
            session_id=session_id, worker_id=target, from_worker_id=source
        )
        try:
            self.world.manager.manager.move_session(request, ANONYMOUS)
        except KVServiceError as error:
            self.loop.note("no move:", error.reason, error.message)

    def _drain(self) -> None:
        """Drain a worker, while another one is there. It leaves, and another takes its place."""
        others = [one for one in self.world.workers.values() if one.alive]
        if self.healing or not self.world.manager.alive or len(others) < 2:
            return
        name = self.rng.choice([one.name for one in others])
        timeout_s = 300 if self.calm or self.peaceful else self.rng.choice([2, 300])
        request = manager_pb2.DrainWorkerRequest(worker_id=name)
        request.timeout.seconds = timeout_s
        try:
            self.world.manager.manager.drain_worker(request, ANONYMOUS)
        except KVServiceError as error:
            self.loop.note("no drain:", error.reason)
        else:
            self._note(f"drain {name} within {timeout_s} s")

    def _at_point(self, process: Process, name: str) -> None:
        """Let something happen just when a session is on its way."""
        # Others meet a frozen session, or write what has been copied.
        longest_s = {"move.complete": 0.6, "move.copied": 2.0}.get(name, 0.0)
        if longest_s and self.moving and self.rng.random() < 0.5:
            self.loop.sleep(process, self.rng.uniform(0.05, longest_s))
        if "move" not in name or self.healing or self.rng.random() >= self.hazard:
            return
        self._note(f"at {name} of {process.name}")
        kind = self.rng.random()
        if kind < 0.4:
            name = process.name
            if process is self.world.manager:
                self.loop.later(2.0, self._restart_manager)
            else:
                self.loop.later(2.0, lambda: self._restart(name))
            process.crash()
            raise Crashed  # nor does the call go on that has come here, if it is no task
        if kind < 0.7:
            one, other = self.rng.choice(self._links(workers=True))
            self._cut(one, other, self.rng.choice([0.5, 3.0, 6.0, TTL_S + 4]))
        else:
            self.loop.later(0.0, self._freeze if kind < 0.85 else self._fault)

    def _crash_worker(self, name: str = "") -> None:
        name = name or self.rng.choice(list(self.world.workers))
        worker = self.world.workers[name]
        if worker.alive:
            self._note(f"crash {name}")
            worker.crash()
            self.loop.later(self.rng.choice([0.2, 2.0, 5.0]), lambda: self._restart(name))

    def _restart(self, name: str) -> None:
        if not self.world.workers[name].alive:
            self.world.start_worker(name)

    def _crash_manager(self) -> None:
        if self.world.manager.alive:
            self._note("crash manager")
            self.world.manager.crash()
            self.loop.later(self.rng.choice([0.2, 2.0, 5.0]), self._restart_manager)

    def _restart_manager(self) -> None:
        if not self.world.manager.alive:
            self.world.start_manager()

    def _crash_both(self) -> None:
        self._crash_manager()
        self._crash_worker()

    def _crash_all(self) -> None:
        self._crash_client()
        self._crash_both()

    def _crash_tail(self) -> None:
        """A worker dies with tokens that follow those of another one, and a decoder's process,
        which alone had seen them. The manager may go as well."""
        tails = [
            name
            for name, worker in self.world.workers.items()
            for session in worker.worker._sessions.all()
            if worker.alive and any(session.starts or ()) and session.num_pages
        ]
        if tails:
            self._crash_client()
            self._crash_worker(self.rng.choice(tails))
            if self.rng.random() < 0.5:
                self._crash_manager()

    def _crash_client(self) -> None:
        """A decoder's process dies; another takes its sessions over."""
        client = self.rng.choice(self.world.clients)
        if client.alive and not self.hanging:
            self._note(f"crash {client.name}")
            left, client.decoders = client.decoders, []
            client.crash()
            self.loop.later(self.rng.choice([0.1, 1.0, TTL_S + 2]), lambda: self._go_on(left))

    def _go_on(self, left: list[Decoder]) -> None:
        client = self.world.start_client()
        for decoder in left:
            self.open_decoders -= 1
            self._begin(client, num_ops=decoder.num_ops, story=decoder.story)

    def _replace_client(self) -> None:
        """A decoder's process hangs, another takes its sessions over, and then it comes back."""
        client = self.rng.choice(self.world.clients)
        if self.hanging or not client.alive or client.frozen:
            return
        if not all(decoder.goes_on for decoder in client.decoders):
            return
        self._note(f"replace {client.name}")
        client.freeze(1e6)
        self.hanging.append(client)
        left, client.decoders = client.decoders, []
        other = self.world.start_client()
        for decoder in left:
            decoder.replaced = True
            self.open_decoders -= 1
            story = decoder.story
            copied = replace(story, candidates=list(story.candidates), errors=[])
            self._begin(other, num_ops=decoder.num_ops + 2, story=copied)
        self.loop.later(0.2, lambda: self._bring_back(client, left, list(other.decoders)))

    def _bring_back(
        self, client: SimClient, replaced: list[Decoder], successors: list[Decoder]
    ) -> None:
        if all(decoder.holds_session for decoder in successors):
            self.hanging.remove(client)
            for decoder in replaced:
                decoder.ends_unaware = self.rng.random() < 0.5
            client.thaw()
        else:
            self.loop.later(0.2, lambda: self._bring_back(client, replaced, successors))

    def _freeze(self) -> None:
        someone = self.rng.choice(
            [*self.world.workers.values(), self.world.manager, *self.world.clients]
        )
        if someone.alive:
            self._note(f"freeze {someone.name}")
            someone.freeze(self.rng.choice([0.5, 3.0, 6.0, TTL_S + 4]))

    def _outlive(self) -> None:
        """Nobody reaches a worker, until a session has gone on without it. Then mostly all others
        die, and a decoder's process."""
        network = self.world.network
        for name, worker in self.world.workers.items():
            held = {session.key for session in worker.worker._sessions.all()}
            others = {
                session.key
                for other, one in self.world.workers.items()
                for session in one.worker._sessions.all()
                if other != name and one.alive
            }
            if held & others and not network.refusing:
                self._note(f"isolate {name} until it is left behind")
                network.refusing.add(name)
                network.cuts.add(frozenset((name, MANAGER)))
                self._look_behind(worker, self.loop.now + TTL_S)
                return

    def _look_behind(self, worker: SimWorker, until: float) -> None:
        """Wait for a session to store tokens elsewhere that this worker knows nothing of."""
        epochs = {session.key: session.epoch for session in worker.worker._sessions.all()}
        gone_on = [
            session
            for one in self.world.workers.values()
            for session in one.worker._sessions.all()
            if one.alive and session.epoch > epochs.get(session.key, session.epoch)
            if any(session.longest_of_all())
        ]
        if not gone_on and not self.healing and self.loop.now < until:
            self.loop.later(0.1, lambda: self._look_behind(worker, until))
            return
        self.world.network.refusing.discard(worker.name)
        self.world.network.cuts.discard(frozenset((worker.name, MANAGER)))
        if gone_on and self.rng.random() < 0.7:
            self.loop.later(self.rng.uniform(0.0, 1.5), lambda: self._bereave(worker.name))

    def _watch_left_behind(self) -> None:
        """Assert that no worker keeps for long what a session has left behind."""
        latest: dict[object, int] = {}
        living = [one for one in self.world.workers.values() if one.alive]
        for worker in living:
            for session in worker.worker._sessions.all():
                latest[session.key] = max(session.epoch, latest.get(session.key, 0))
        self.left_behind = {
            (one.name, session): self.left_behind.get((one.name, session), self.loop.now)
            for one in living
            for session in one.worker._sessions.all()
            if session.epoch <= latest[session.key] - 2
            if one.name not in self.world.network.refusing
        }
        for (name, _), since in self.left_behind.items():
            waited_s = self.loop.now - since
            assert waited_s < FREED_WITHIN_S, f"{name} keeps what was left behind: {waited_s:g} s"
        self.loop.later(0.5, self._watch_left_behind)

    def _bereave(self, survivor: str) -> None:
        for name, worker in self.world.workers.items():
            if worker.alive and name != survivor and not self.healing:
                self._note(f"crash {name}")
                worker.crash()
                self.loop.later(0.2, lambda name=name: self._restart(name))  # type: ignore[misc]
        if not self.healing:
            self._crash_client()

    def _partition(self) -> None:
        one, other = self.rng.choice(self._links())
        self._note(f"cut {one} {other}")
        self._cut(one, other, self.rng.choice([0.5, 3.0, 6.0, TTL_S + 4]))

    def _swizzle(self) -> None:
        """Cut one link after the other, and mend them in another order."""
        for one, other in self.rng.sample(self._links(), min(3, len(self._links()))):
            self._note(f"cut {one} {other}")
            begin, seconds = self.rng.uniform(0.0, 2.0), self.rng.uniform(0.5, 6.0)
            self.loop.later(begin, lambda a=one, b=other, s=seconds: self._cut(a, b, s))  # type: ignore[misc]

    def _cut(self, one: str, other: str, seconds: float) -> None:
        if self.healing:
            return
        link = frozenset((one, other))
        self.world.network.cuts.add(link)
        self.loop.later(seconds, lambda: self.world.network.cuts.discard(link))

    def _links(self, *, workers: bool = False) -> list[tuple[str, str]]:
        """Return who can be cut off from whom; `workers`: from each other too."""
        names = [MANAGER, *self.world.workers, *(one.name for one in self.world.clients)]
        clients = {one.name for one in self.world.clients}
        return [
            (one, other)
            for one, other in combinations(names, 2)
            if not {one, other} <= clients
            and (workers or not {one, other} <= set(self.world.workers))
        ]

    def _storm(self) -> None:
        rng = self.rng
        self._note("storm")
        self.world.network.weather = Weather(
            lost=rng.choice([0.0, 0.05, 0.2]),
            doubled=rng.choice([0.0, 0.1, 0.5]),
            slow=rng.choice([0.0, 0.1, 0.5]),
            slow_s=rng.choice([0.05, 0.5, 2.0]),
        )
        self.loop.later(rng.uniform(2.0, 8.0), self._clear_up)

    def _clear_up(self) -> None:
        self.world.network.weather = CALM

    # -- the end

    def _heal_unless_used(self) -> None:
        """Wait no longer for faults that nobody would notice."""
        if not (self.healing or self.open_decoders or self.hanging):
            self._heal()

    def _heal(self) -> None:
        self.loop.note("all heals")
        self.healing = True
        self._clear_up()
        self.world.network.cuts.clear()
        self.world.network.refusing.clear()
        for process in (*self.world.workers.values(), self.world.manager, *self.world.clients):
            if process not in self.hanging:
                process.thaw()
        for name in self.world.workers:
            self._restart(name)
        self._restart_manager()

    def _finish(self) -> None:
        """All decoders are done: within a ttl every page is free, and all know the same."""
        self.clean = False
        self._look()
        # A copy of an Allocate that is handled late opens a session that nobody has any more.
        end = self.loop.now + LATEST_S + self.ttl_s + 2.0
        self.loop.run(lambda: self.clean or self.loop.now >= end, LATEST_S + self.ttl_s + 5.0)
        self.world.check()
        assert self.world.used_pages() == 0, f"{self.world.used_pages()} pages are still in use"
        assert not self._held(), f"sessions are still open: {self._held()}"
        assert not self.world.manager.directory._holders, "the directory lists what has ended"

    def _look(self) -> None:
        """See from time to time whether nothing is left."""
        listed = self.world.manager.directory._holders
        self.clean = not listed and not self._held() and not self.world.used_pages()
        self.loop.later(0.5, self._look)

    def _held(self) -> list[object]:
        workers = self.world.workers.values()
        return [session.key for one in workers for session in one.worker._sessions.all()]


@contextmanager
def quiet() -> Iterator[None]:
    """Tiny tensors need no threads, and a collection would run finalizers at any time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.set_num_threads(threads)


def run_seed(seed: int, *, keep_log: bool = False) -> Report:
    """Run one seed. Raises AssertionError, or whatever went wrong, with the seed in a note."""
    with quiet():
        scenario = Scenario(seed, keep_log=keep_log)
        try:
            return scenario.run()
        except BaseException as error:
            error.add_note(
                f"seed {seed} ({', '.join(scenario.faults) or 'no faults'}): "
                f"python -m tests.simulation --seed {seed}"
            )
            if keep_log:
                error.add_note("\n".join(scenario.loop.log[-400:]))
            raise
        finally:
            for process in (
                *scenario.world.workers.values(),
                scenario.world.manager,
                *scenario.world.clients,
            ):
                if process.alive:
                    process.end()
