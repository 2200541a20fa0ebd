"""Manager, workers and clients as they are, on a simulated network and clock."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Final

from google.protobuf.message import Message

from kvservice.core.caller import ANONYMOUS, Caller
from kvservice.core.errors import KVServiceError
from kvservice.core.failpoints import Failpoints
from kvservice.manager import PageManager
from kvservice.runtime.worker import Drain
from kvservice.server.heartbeat import HeartbeatSource
from kvservice.v1 import manager_pb2
from kvservice.wire.convert import seconds_from_pb
from kvservice.wire.names import snake_case
from kvservice_client import Client, ClientConfig
from kvservice_client._connections import Connections
from kvservice_workers.arrival import Arrival
from kvservice_workers.data_plane.puller import Puller
from kvservice_workers.data_plane.service import WorkerService
from kvservice_workers.data_plane.takeover import Pace
from kvservice_workers.session_state import WorkerSession
from kvservice_workers.worker import PageWorker, WorkerConfig
from tests.simulation.loop import Loop, Process, SimClock
from tests.simulation.network import REGISTER, REPORT, Network, Server, SimTransport

MANAGER: Final = "manager"
TTL_S: Final = 8.0
EXPIRY_S: Final = 0.5
HEARTBEAT_S: Final = 1.0
HEARTBEAT_TIMEOUT_S: Final = 5.0
LOOK_S: Final = 0.1
FEW_BYTES: Final = 64  # of pages, when sessions are moved: that is one or two
CONFIG: Final = ClientConfig(timeout_s=6.0, detection_s=4.0, silence_s=3.0)
# What changes one session, and its pages: that is checked at once, the whole soon.
ON_ONE_SESSION: Final = {"Attend", "Write"}
# What changes neither pages nor sessions, or begins a task that does.
READ_ONLY: Final = {
    *("GetSession", "Read", "PageStats", "ListSessions", "RenewLease", "FollowSession"),
    *("CopyState", "CopyPages", "PullSession"),
}


class Inline(Executor):
    """Calls one after the other, in the task that asks."""

    def map(self, fn: Any, *iterables: Any, **options: Any) -> Any:  # type: ignore[override]
        return [fn(*arguments) for arguments in zip(*iterables, strict=True)]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass


class World:
    """All processes of a simulation. Workers are numbered, and live one life after the other."""

    def __init__(self, loop: Loop, *, num_workers: int, memory_bytes: int) -> None:
        self.loop = loop
        self.network = Network(loop)
        self.memory_bytes = memory_bytes
        self.num_lives = 0
        self.workers: dict[str, SimWorker] = {}
        self.clients: list[SimClient] = []
        self.ended: set[str] = set()  # sessions of which a worker has ended something
        self.expired: set[str] = set()  # because a lease was over
        # Sessions whose holder was told that they are open, by the manager's life that has told it;
        # and those that a late copy of the request may have opened again, in another life.
        self.opened: dict[str, SimManager] = {}
        self.reopened: set[str] = set()
        self.taken: Counter[str] = Counter()  # how often somebody has attached to a session
        self.expected = num_workers
        self.at_point: Callable[[Process, str], None] = lambda process, name: None
        self.manager = SimManager(self)
        for index in range(num_workers):
            self.start_worker(f"w{index}")

    def start_worker(self, name: str) -> SimWorker:
        worker = self.workers[name] = SimWorker(self, name)
        return worker

    def replace(self, left: SimWorker) -> None:
        """Start another worker in the place of one that has left."""
        if self.workers[left.name] is left:
            self.start_worker(left.name)

    def start_manager(self) -> None:
        self.manager = SimManager(self)

    def start_client(self) -> SimClient:
        client = SimClient(self, f"c{len(self.clients)}")
        self.clients.append(client)
        return client

    def next_life(self, name: str) -> str:
        self.num_lives += 1
        return f"{name}#{self.num_lives}"

    def new_id(self) -> str:
        return str(uuid.UUID(int=self.loop.rng.getrandbits(128), version=4))

    def has_ended(self, session_id: str) -> bool:
        """Whether a worker has ended (a part of) a session, or its lease there is over: who asks
        from then on is told that it is not found, and the worker frees it when it looks next. So
        it is where the session has moved from, and its lease was not renewed since."""
        tables = [one.worker._sessions for one in self.workers.values() if one.alive]
        return (
            session_id in self.ended
            or any(
                session.key[1] == session_id and not table.holds(session, self.loop.now)
                for table in tables
                for session in table.all()
            )
            or any(
                key[1] == session_id and self.loop.now >= moved.known_until
                for table in tables
                for key, moved in table._moved.items()
            )
        )

    def holds_at(self, session_id: str, epoch: int) -> bool:
        """Whether a worker that lives holds (a part of) a session at an epoch, or a later one."""
        return any(
            session.key[1] == session_id and session.epoch >= epoch
            for worker in self.workers.values()
            if worker.alive
            for session in worker.worker._sessions.all()
        )

    def used_pages(self) -> int:
        return sum(
            pool.used_pages + pool.reserved_pages
            for worker in self.workers.values()
            for pool in worker.worker.stats().pools
        )

    def check(self) -> None:
        """Assert what must be so at any time, of all that live."""
        for worker in self.workers.values():
            if worker.alive:
                worker.worker.check()
        self.manager.check()


class Points(Failpoints):
    """The points that a process passes, of which a scenario makes what it likes."""

    def __init__(self, world: World, process: Process) -> None:
        super().__init__(crash=lambda: None, wait=lambda seconds: None)
        self._world = world
        self._process = process

    def passed(self, name: str) -> None:
        self._world.at_point(self._process, name)


class SimManager(Process):
    """One life of the manager."""

    def __init__(self, world: World) -> None:
        super().__init__(world.loop, MANAGER)
        self._world = world
        self._network = world.network
        clock = SimClock(world.loop, self)
        self.manager = PageManager(
            lambda address: Handle(world.network, self, address),
            clock=clock,
            incarnation=world.next_life(MANAGER),
            workers_expected=world.expected,
            executor=Inline(),
            failpoints=Points(world, self),
        )
        world.network.servers[MANAGER] = Server(self, self._handle, waits=True)
        self.directory = self.manager._directory._directory
        self._moves = self.manager._moves
        self._looks = self._looks_after_moves = False
        self._tick()

    def check(self) -> None:
        self.directory.check()

    def crash(self) -> None:
        self._network.reset(self)
        super().crash()

    def _handle(self, method: str, request: Any, caller: Caller) -> Message:
        if method in (REGISTER, REPORT):
            answer: Message = self.manager.heartbeat(request, caller, first=method == REGISTER)
            self.directory.check()
            return answer
        answered: Message = getattr(self.manager, snake_case(method))(request, caller)
        if method == "Allocate" and self._world.opened.get(request.session_id, self) is not self:
            self._world.reopened.add(request.session_id)
        return answered

    def _tick(self) -> None:
        now = self.loop.now
        if not self._looks and self.directory.liveness.find_cut_off(now):
            self._looks = True
            self.loop.spawn(self, self._look)
        if not self._looks_after_moves and (
            self._moves._looked_after
            or self.directory.leaving(now)
            or self.directory.missing_copies(now)
        ):
            self._looks_after_moves = True
            self.loop.spawn(self, self._look_after_moves)
        self.loop.later(LOOK_S, self._tick, self)

    def _look(self) -> None:
        self.manager.look_after_workers()
        self._looks = False

    def _look_after_moves(self) -> None:
        self.manager.look_after_moves()
        self._looks_after_moves = False


class Handle:
    """The way of the manager, or of another worker, to a worker."""

    def __init__(self, network: Network, source: Process, address: str) -> None:
        self._network = network
        self._source = source
        self._address = address

    def call(self, method: str, request: Any, timeout_s: float, caller: Caller) -> Any:
        return self._network.call(self._source, self._address, method, request, timeout_s, caller)

    def close(self) -> None:
        pass


class SimWorker(Process):
    """One life of a worker: its service, its leases, its heartbeats."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.loop, name)
        self._world = world
        clock = SimClock(world.loop, self)
        points = Points(world, self)
        self.worker = PageWorker(
            WorkerConfig(name, world.next_life(name), world.memory_bytes, address=name),
            clock=clock,
            failpoints=points,
        )
        self._watch_ends()
        puller = Puller(
            self.worker,
            lambda address: Handle(world.network, self, address),
            clock=clock,
            spawn=lambda run: world.loop.spawn(self, run),
            pace=Pace(batch_bytes=FEW_BYTES, few_bytes=FEW_BYTES, soon_s=0.0),
            failpoints=points,
        )
        self._service = WorkerService(self.worker, puller=puller)
        self._drain = Drain(self.worker, clock)
        self._drain.leaving = self._say_farewell
        self._leaves = False
        self._source = HeartbeatSource(self.worker)
        self._last: manager_pb2.HeartbeatRequest | None = None
        self._epochs: dict[WorkerSession, int] = {}
        self._has_worked = False  # since all was checked
        world.network.servers[name] = Server(self, self._handle, waits=False)
        self.loop.later(EXPIRY_S, self._expire, self)
        self.loop.spawn(self, self._report)

    def _watch_ends(self) -> None:
        remove = self.worker.leases._remove

        def note_and_remove(session: WorkerSession, reason: str) -> None:
            if reason != "move":
                self._world.ended.add(session.key[1])
            if reason == "lease_expired":
                self._world.expired.add(session.key[1])
            remove(session, reason)

        self.worker.leases._remove = note_and_remove  # type: ignore[method-assign]
        drop = self.worker.arrivals.drop

        def note_and_drop(arrival: Arrival) -> None:
            # It may have been handed over, by an answer that has not come.
            if arrival.complete and not (arrival.keeps or arrival.gone or arrival.here):
                self._world.ended.add(arrival.key[1])
            drop(arrival)

        self.worker.arrivals.drop = note_and_drop  # type: ignore[method-assign]

    def crash(self) -> None:
        self._world.network.reset(self)
        self._end_stream(0.001)
        super().crash()

    def _handle(self, method: str, request: Any, caller: Caller) -> Message:
        answer: Message
        try:
            answer = getattr(self._service, snake_case(method))(request, caller)
            if method == "Attach" and not request.keep_step:
                self._world.taken[request.session_id] += 1
        finally:
            self._has_worked = True
            if method in ON_ONE_SESSION:
                self._check_session(request.session_id, caller)
            elif method not in READ_ONLY and self.alive:
                self._check()
        return answer

    def _check_session(self, session_id: str, caller: Caller) -> None:
        session = self.worker._sessions.peek(caller.tenant, session_id)
        if session is not None and self.alive:
            session.check()
            for group in session.groups.values():
                group.pool.check()

    def _check(self) -> None:
        """Assert that all is accounted for, and that no epoch has gone back."""
        self._has_worked = False
        self.worker.check()
        for session in self.worker._sessions.all():
            assert session.epoch >= self._epochs.get(session, 0), "an epoch has gone back"
            self._epochs[session] = session.epoch

    def _expire(self) -> None:
        if self.worker.leases.expire() or self._has_worked:
            self._check()
        deadline = self.worker.leases.next_deadline()
        assert deadline is None or deadline > self.loop.now - 1.0, "a lease is over, and goes on"
        self._epochs = {one: epoch for one, epoch in self._epochs.items() if not one.closed}
        self._drain.look()
        if not self._drain.done.is_set():
            self.loop.later(EXPIRY_S, self._expire, self)

    def _say_farewell(self) -> None:
        """Leave, as a worker does that was drained; another takes its place."""
        self._leaves = True

    def _leave(self) -> None:
        farewell = self._source.farewell()
        try:
            self._world.network.call(
                self, MANAGER, REPORT, farewell, HEARTBEAT_TIMEOUT_S, ANONYMOUS
            )
        except KVServiceError as error:
            self.loop.note(self.name, "leaves without a word:", error.reason)
        self._last = None
        self.loop.note(self.name, "leaves")
        self.loop.later(0.5, lambda: self._world.replace(self))
        self.loop.later(0.0, self.crash)
        self.loop.sleep(self, 1.0)

    # -- heartbeats

    def _report(self) -> None:
        backoff_s = 0.1
        while True:
            self._source.begin()
            try:
                method = REGISTER
                while True:
                    for message in self._source.messages():
                        self._last = message
                        answer = self._world.network.call(
                            self, MANAGER, method, message, HEARTBEAT_TIMEOUT_S, ANONYMOUS
                        )
                        self._source.answered(answer)
                        if answer.HasField("drain"):
                            self._drain.within(seconds_from_pb(answer.drain, "drain"))
                        method, backoff_s = REPORT, 0.1
                    self.loop.sleep(self, HEARTBEAT_S)
                    if self._leaves:
                        self._leave()
            except KVServiceError as error:
                self.loop.note(self.name, "reports in vain:", error.reason)
                self._end_stream(0.01)
            self.loop.sleep(self, backoff_s)
            backoff_s = min(2 * backoff_s, 2.0)

    def _end_stream(self, delay_s: float) -> None:
        """Let the manager notice that the stream has ended, if anything gets through to it."""
        last, manager = self._last, self._world.manager
        self._last = None
        if last is not None and not self._world.network.is_cut(self.name, MANAGER):
            self.loop.later(delay_s, lambda: manager.manager.heartbeat_ended(last), manager)


class SimClient(Process):
    """A process with a client; decoders run as its tasks."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.loop, name)
        self.world = world
        self._network = world.network
        connections = Connections(
            MANAGER,
            lambda address: SimTransport(world.network, self, address, ANONYMOUS),
            config=CONFIG,
            clock=SimClock(world.loop, self),
            rng=world.loop.rng,
            background=False,
            new_id=world.new_id,
        )
        self.client = Client(connections)
        self._leases = self.client._leases
        self.decoders: list[Any] = []
        self.num_workers = world.expected
        self.loop.spawn(self, self._look_after_leases)

    def run(self, decode: Callable[[], None]) -> None:
        """Begin a decoder."""
        self.loop.spawn(self, decode)

    def crash(self) -> None:
        self.client._finalizer.detach()  # its interpreter is gone, and all that would run at exit
        super().crash()

    def _look_after_leases(self) -> None:
        while True:
            left_s = self._leases.look()
            self.loop.sleep(self, 0.5 if left_s is None else max(0.01, min(left_s, 0.5)))
