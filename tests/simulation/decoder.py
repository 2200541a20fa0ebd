"""A decoder, and what it must get: every answer is compared with plain arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from kvservice.core.caller import ANONYMOUS
from kvservice.core.errors import (
    CapacityError,
    Conflict,
    DeadlineExceeded,
    Draining,
    InternalError,
    KVServiceError,
    PagesLost,
    SessionNotFound,
    StaleEpoch,
    Unavailable,
)
from kvservice.core.geometry import DType, LayerGeometry
from kvservice_client import Session
from kvservice_client._extents import Extent
from kvservice_workers.session_state import WorkerSession
from kvservice_workers.worker import PageWorker
from tests.simulation.states import (
    DIM,
    MAX_LENGTH,
    Array,
    Places,
    State,
    Story,
    empty,
    same,
    same_tokens,
    some_places,
)
from tests.simulation.world import SimClient

UNKNOWN = (Unavailable, DeadlineExceeded, InternalError)

T = TypeVar("T")


class Replaced(Exception):
    """Somebody else has the session: this decoder is of no more use."""


class Ended(Exception):
    """The process ends, as one does that knows of nothing: its sessions are given back."""


class WrongTokens(AssertionError):
    """What was read or attended to is not what was stored."""


class Decoder:
    """Makes `num_ops` random operations on one session, and deals with every error."""

    def __init__(
        self,
        process: SimClient,
        *,
        num_layers: int,
        num_ops: int,
        ttl_s: float,
        story: Story | None = None,
        spreads: Sequence[int] = (1,),
        replicas: Sequence[int] = (1,),
        rests: Sequence[float] = (0.5,),
        thinks: Sequence[float] = (0.3,),
        on_done: Callable[[], None],
        may_fail: Callable[[KVServiceError], bool],
    ) -> None:
        self.process = process
        self.loop = process.loop
        self.rng = process.loop.rng
        self.num_layers = num_layers
        self.num_ops = num_ops
        self.ttl_s = ttl_s
        self.spreads, self.replicas = spreads, replicas
        self.rests, self.thinks = rests, thinks
        self.story = story or Story("", [], num_layers)
        self.is_ending = False
        self.session: Session | None = None
        self.state = empty(num_layers, 1)
        self.kept: list[Session] = []  # so that no finalizer runs at a time of its own
        self.replaced = False  # by another decoder, which goes on with the session
        self.ends_unaware = False  # of that, where it has not been told yet
        self.num_taken: dict[str, int] = {}  # how often each session, when this one had it
        self._on_done = on_done
        self._may_fail = may_fail

    @property
    def holds_session(self) -> bool:
        return self.session is not None

    @property
    def goes_on(self) -> bool:
        """Whether it holds a session, and is not giving it back."""
        return self.holds_session and not self.is_ending

    def run(self) -> None:
        try:
            self._run()
        except Replaced:
            self._leave()
        except Ended:
            self._end()
        else:
            if not self.replaced:  # while it was giving its sessions back
                self._on_done()

    def _run(self) -> None:
        if self.story.session_id:
            self._take_over()
        else:
            self._open(self.rng.randint(1, 2))
        while self.num_ops > 0:
            self.num_ops -= 1
            operation = self.rng.choices(
                [
                    *(self.step, self.write, self.pop, self.select, self.fork),
                    *(self.branch, self.read, self.reset, self.idle),
                ],
                [8, 2.5, 2, 2, 1, 0.5, 2, 0.5, 1],
            )[0]
            self.loop.note(self.process.name, operation.__name__)
            operation()
            self._note_epoch()
            self._think()
        self.read()
        if self.replaced:
            raise Replaced
        self._end()

    # -- operations

    def step(self) -> None:
        """One forward pass over all layers; at a failure it is repeated or rolled back."""
        lengths = self.state.lengths()
        count = self.rng.choice([1, 1, 1, 2, 3, 7])
        if max(lengths) + count > MAX_LENGTH:
            return self.pop()
        before = self.state
        for layer in range(self.num_layers):
            tokens = self._fresh(count)
            after = self.state.appended(layer, tokens)
            self.story.holds(before, self.state, after)
            if not self._attend(layer, tokens, after):
                return None
            self.state = after
            self.story.holds(before, after)
            if self.rng.random() < 0.2:
                self._think()
        self.story.holds(self.state)
        if self.rng.random() < 0.2:
            self._query()
        return None

    def _attend(self, layer: int, tokens: Array, after: State) -> bool:
        """Append to one layer; return False if the step was given up."""
        session = self._session()
        before = session.lengths(layer)
        k, v = tokens[:, None, :, :DIM], tokens[:, None, :, DIM:]
        q = np.zeros_like(k)
        for _ in range(50):
            try:
                out = session.attend(layer, q, k, v, pos=before)
            except CapacityError:
                self._resolve()
                self._make_room()
                return False
            except UNKNOWN as error:
                self._note(error)
                self.loop.sleep(self.process, self.rng.uniform(0.0, 0.5))
                if self.rng.random() < 0.3:
                    self._resolve()
                    return False
            except (PagesLost, StaleEpoch, SessionNotFound) as error:
                self._note(error, session)
                self._resolve()
                return False
            else:
                self._compare(out, after, layer, tokens.shape[1])
                self._check_copies()
                return True
        raise AssertionError("a call fails for ever")

    def write(self) -> None:
        """Store tokens without attention: a first prompt, one behind a past, or at any positions.

        One layer after the other; at a failure it is repeated or rolled back.
        """
        places = some_places(self.rng, self.state)
        if places is None:
            return self.pop()
        times = self.rng.choice([1, 1, 2]) if places.positions else 1
        for layer in range(self.num_layers):
            for _ in range(times):
                tokens = self._fresh(places.count, len(places.rows))
                after = self.state.written(layer, places, tokens)
                if not self._write(layer, places, tokens, after):
                    return None
                self.state = after
                self.story.holds(after)
            if self.rng.random() < 0.2:
                self._think()
        if self.rng.random() < 0.4:
            self._query()
        return None

    def _write(self, layer: int, places: Places, tokens: Array, after: State) -> bool:
        """Write to one layer; return False if that was given up."""
        session = self._session()
        k, v = tokens[:, None, :, :DIM], tokens[:, None, :, DIM:]
        for _ in range(50):
            is_spread = len(session._mirror.extents) > 1
            self.story.holds(self.state, after, mixed=self.story.mixed or is_spread)
            try:
                session.write(
                    layer,
                    k,
                    v,
                    positions=places.positions,
                    rows=places.rows,
                    padding=places.padding,
                )
            except CapacityError:
                # The tail may have had room, on a worker that was found for it, and others not.
                self.story.mixed |= len(session._mirror.extents) > 1
                self._resolve()
                self._make_room()
                return False
            except UNKNOWN as error:
                self._note(error)
                self.story.mixed |= len(session._mirror.extents) > 1
                self.loop.sleep(self.process, self.rng.uniform(0.0, 0.5))
                if self.rng.random() < 0.3:
                    self._resolve()
                    return False
            except (PagesLost, StaleEpoch, SessionNotFound) as error:
                self._note(error, session)
                self.story.mixed |= len(session._mirror.extents) > 1
                self._resolve()
                return False
            else:
                self._check_copies(layer)
                return True
        raise AssertionError("a write fails for ever")

    def _check_copies(self, layer: int | None = None) -> None:
        """What was acknowledged is on both copies, or the session knows that there is one.

        Args:
            layer: Of which the contents are compared too.
        """
        session = self._session()
        self._note_epoch()
        for extent in session._mirror.extents:
            if extent.group and not self.replaced:
                self._check_no_other_copy(extent)
            held: list[tuple[int, int, int, dict[int, tuple[int, ...]]]] = []
            contents: list[Array] = []
            for copy in extent.copies:
                worker = self.process.world.workers[copy.worker_id].worker
                here = worker._sessions.peek(ANONYMOUS.tenant, session.id)
                if worker.config.incarnation == copy.incarnation and here is not None:
                    step = 0 if here.step is None else here.step.number
                    epoch = here.epoch - self._num_copied_anew(worker, here.epoch)
                    held.append((epoch, step, here.last_write, here.lengths))
                    has_twin = extent.twin is not None
                    if layer is not None and has_twin and any(here.lengths.get(layer, ())):
                        contents.append(_contents(worker, here, layer))
            if self.replaced or self._is_taken():
                # The successor takes along the copy alone that had more when it looked, and what
                # was on its way to the other still arrives there: both have answered at this epoch.
                held = [one for one in held if one[0] <= session._mirror.epoch]
            if held.count(held[0] if held else None) < len(held):
                raise WrongTokens(f"copies differ: {held}")
            if not self.replaced and any(
                not np.array_equal(contents[0], other) for other in contents[1:]
            ):
                raise WrongTokens("copies have the same lengths, and not the same tokens")

    def _is_taken(self) -> bool:
        """Whether somebody has attached since, be it by a late copy of the call that we made."""
        session_id = self._session().id
        return self.process.world.taken[session_id] > self.num_taken.get(session_id, 0)

    def _check_no_other_copy(self, extent: Extent) -> None:
        """No worker holds tokens as a copy at the session's epoch that the session does not feed:
        if all that it feeds should die, that one would be taken for it. One that holds none may be:
        an Allocate without an answer; whoever finds it is told that nothing is left."""
        session = self._session()
        known = {copy.incarnation for copy in extent.copies}
        for worker in self.process.world.workers.values():
            here = worker.worker._sessions.peek(ANONYMOUS.tenant, session.id)
            if (
                worker.alive
                and here is not None
                and here.group == extent.group
                and here.epoch == session.epoch
                and any(map(any, here.lengths.values()))
                and known.isdisjoint((worker.worker.config.incarnation, *here.replaces))
            ):
                raise WrongTokens(f"{worker.name} has a copy that is not fed any more")

    def _num_copied_anew(self, worker: PageWorker, epoch: int) -> int:
        """By how many epochs a worker is further because copies of what it holds have been made
        since it has answered: we hear of that with the next call alone."""
        session = self._session()
        copied = worker.departures.find_successor(ANONYMOUS.tenant, session.id)
        if copied is None or copied.copied_from_epoch > session.epoch:
            return 0
        return max(0, epoch - session.epoch)

    def _query(self) -> None:
        """Attend without new tokens."""
        session = self._session()
        rows = self.state.num_rows
        q = np.zeros((rows, 1, 1, DIM), np.float32)
        layer = self.rng.randrange(self.num_layers)
        if not min(self.state.lengths()):
            return
        out = self._try(lambda: session.attend(layer, q), session)
        if out is not None:
            self._compare(out, self.state, layer, 1)

    def pop(self) -> None:
        keep = tuple(self.rng.randint(0, length) for length in self.state.lengths())
        if self.rng.random() < 0.5:
            keep = tuple(max(0, length - 2) for length in self.state.lengths())
        self._change(lambda session: session.pop(keep=keep), self.state.cut(keep))

    def select(self) -> None:
        rows = [self.rng.randrange(self.state.num_rows) for _ in range(self.rng.randint(1, 3))]
        self._change(lambda session: session.select(rows), self.state.select(rows))

    def reset(self) -> None:
        nothing = empty(self.num_layers, self.state.num_rows)
        self._change(lambda session: session.reset(), nothing)

    def fork(self) -> None:
        """Go on with a child, or look at it and give it up."""
        session = self._session()
        shortest = min(self.state.lengths())
        count = self.rng.randint(1, shortest) if shortest and self.rng.random() < 0.5 else None
        child = self._try(lambda: session.fork(count), session)
        if child is None:
            return
        keep = self.state.lengths() if count is None else (count,) * self.state.num_rows
        self.kept.append(child)
        forked = self.state.cut(keep)
        if self.rng.random() < 0.5:
            self.session, self.state = child, forked
            self.story.session_id = child.id
            self.story.holds(forked)
            self._try(session.release, session)
        else:
            stored = self._try(lambda: self._stored(child), child)
            if stored is not None and not same(stored, forked):
                raise WrongTokens("a fork is not its parent")
            self._try(child.release, child)

    def branch(self) -> None:
        """Fork by id, as those do who do not hold the session, and look at what that gives."""
        session_id = self._session().id
        if not any(self.state.lengths()):
            return
        try:
            child = self._try(lambda: self.process.client.fork(session_id))
        except Conflict:
            if self.replaced:  # by somebody who is amid a change
                raise Replaced from None
            raise
        if child is None:
            return
        self.kept.append(child)
        stored = self._try(lambda: self._stored(child), child)
        is_known = self._is_known_as_it_is() or not self._session()._mirror.haunted
        if stored is not None and not self.replaced and is_known and not same(stored, self.state):
            raise WrongTokens("a branch is not what it was forked from")
        self._try(child.release, child)

    def _is_known_as_it_is(self) -> bool:
        """Whether the manager has heard of the session's epoch. Where it went on without a copy, it
        may not have been told: if it reaches neither the holder nor the other one, that copy is the
        session to it."""
        key = (ANONYMOUS.tenant, self.story.session_id)
        manager = self.process.world.manager
        latest = manager.directory.latest(key, self.loop.now) if manager.alive else None
        return latest is not None and latest.epoch >= self.story.epoch

    def _note_epoch(self) -> None:
        """Note where the session is, for those who look at it through the manager."""
        if self.session is not None and not self.replaced:
            self.story.epoch = self.session.epoch

    def read(self) -> None:
        session = self._session()
        stored = self._try(lambda: self._stored(session), session)
        if stored is not None and not same(stored, self.state):
            raise WrongTokens("what is read is not what was stored")

    def idle(self) -> None:
        self.loop.sleep(self.process, self.rng.choice(self.rests))

    def _think(self) -> None:
        """Take time, so that what happens to others happens meanwhile."""
        self.loop.sleep(self.process, self.rng.choice(self.thinks))
        if self.ends_unaware:
            raise Ended

    # -- after errors

    def _change(self, change: Callable[[Session], None], after: State) -> None:
        self.story.holds(self.state, after)
        session = self._session()
        try:
            change(session)
        except (CapacityError, *UNKNOWN, PagesLost, StaleEpoch, SessionNotFound) as error:
            self._note(error, session)
            self._resolve()
        else:
            self.state = after
            self.story.holds(after)

    def _try(self, call: Callable[[], T], held: Session | None = None) -> T | None:
        """Make a call that changes nothing here; after an error find out where things stand.

        Args:
            held: The session that is called, if by its holder.
        """
        try:
            return call()
        except (CapacityError, Draining):  # a worker that leaves forks nothing
            return None
        except (*UNKNOWN, PagesLost, StaleEpoch, SessionNotFound) as error:
            self._note(error, held)
            self._resolve()
            return None

    def _resolve(self) -> None:
        """Find out which of the candidates the session holds, or how much of one is left."""
        lost = False
        extents: list[Extent] = []
        for _ in range(100):
            session = self._session()
            extents += [*session._mirror.extents, *session._mirror.spares]
            try:
                lengths = self._rolled_back(session)
                stored = self._stored(session)
            except UNKNOWN as error:
                self._note(error)
                self.loop.sleep(self.process, self.rng.uniform(0.1, 1.0))
            except PagesLost as error:
                self._note(error)
                lost = True
            except (StaleEpoch, SessionNotFound) as error:
                self._note(error, session)
                self._replace()
                return
            except CapacityError:
                self.loop.sleep(self.process, 0.5)
            else:
                lost = lost or PagesLost.reason in self.story.errors
                # What is found to be lost while it is rolled back is no error any more.
                lost = lost or any(extent.lost for extent in extents)
                self._settle_on(lengths, stored, lost=lost)
                return
        raise AssertionError("a session does not settle")

    def _rolled_back(self, session: Session) -> tuple[int, ...]:
        """Cut to what all layers hold: who has attached knows which layers there are."""
        lengths = session.roll_back()
        held = tuple(
            min(column)
            for column in zip(*(session.lengths(n) for n in range(self.num_layers)), strict=True)
        )
        if held != lengths:
            session.pop(keep=held)
        return held

    def _settle_on(self, lengths: tuple[int, ...], stored: State, *, lost: bool) -> None:
        candidates = list(self.story.candidates)
        if lost and not any(lengths):
            # Of rows it can only be told how many there were where somebody still lives.
            candidates.append(empty(self.num_layers, len(lengths)))
        # Of the first step of a session that is spread, some workers may have got their share.
        may_be_part = lost or (self._is_spread() and not any(self.story.candidates[0].lengths()))
        for candidate in reversed(candidates):
            if candidate.num_rows != len(lengths):
                continue
            whole = candidate.shortest()
            fits = all(map(int.__le__, lengths, whole)) if may_be_part else lengths == whole
            if fits and self._is_one_of(stored, candidate.cut(lengths), candidates):
                self.state = stored
                self.story.holds(stored)
                self.story.errors.clear()
                self.story.session_id = self._session().id
                return
        known = [candidate.lengths() for candidate in self.story.candidates]
        raise WrongTokens(f"the session holds {lengths}, it may hold {known}, {lost=}")

    def _is_one_of(self, stored: State, candidate: State, candidates: Sequence[State]) -> bool:
        """Whether what is stored is a candidate, or what a write has made of it in part."""
        if not self.story.mixed:
            return same(stored, candidate)
        if not same_tokens(stored, candidates):
            return False
        return all(
            not (
                stored.padding[row]
                & ~np.logical_or.reduce([one.padding[row][:n] for one in longer])
            ).any()
            for row, n in enumerate(map(len, stored.padding))
            if (longer := [one for one in candidates if len(one.padding[row]) >= n])
        )

    def _is_spread(self) -> bool:
        return self._session()._mirror.spec.spread > 1

    def _make_room(self) -> None:
        keep = tuple(length // 2 for length in self.state.lengths())
        self._change(lambda session: session.pop(keep=keep), self.state.cut(keep))

    # -- sessions

    def _session(self) -> Session:
        assert self.session is not None
        return self.session

    def _open(self, num_rows: int) -> None:
        """Open a session, as soon as somebody has room."""
        spread = min(self.rng.choice(self.spreads), self.process.num_workers)
        replicas = min(self.rng.choice(self.replicas), self.process.num_workers // spread)
        layers = [LayerGeometry(1, DIM, DIM, DType.FLOAT32)] * self.num_layers
        for _ in range(100):
            try:
                self.session = self.process.client.open(
                    num_rows=num_rows,
                    layers=layers,
                    page_size=2,
                    ttl_s=self.ttl_s,
                    spread=spread,
                    replicas=replicas,
                    reserve_tokens=self.rng.choice([None, None, 4]),
                )
            except (CapacityError, *UNKNOWN) as error:
                self._note(error)
                self.loop.sleep(self.process, self.rng.uniform(0.2, 1.0))
                spread = replicas = 1
            else:
                self.kept.append(self.session)
                self.state = empty(self.num_layers, num_rows)
                self.story.session_id = self.session.id
                self.process.world.opened[self.session.id] = self.process.world.manager
                self.story.holds(self.state)
                self.story.errors.clear()
                return
        raise AssertionError("no session can be opened")

    def _take_over(self) -> None:
        """Go on with a session whose decoder has crashed."""
        is_known = self._is_known_as_it_is() or self.process.world.holds_at(
            self.story.session_id, self.story.epoch
        )
        for _ in range(100):
            num_taken = self.process.world.taken[self.story.session_id]
            try:
                self.session = self.process.client.attach(self.story.session_id)
            except SessionNotFound as error:
                self._note(error)
                self._replace()
                return
            except (*UNKNOWN, PagesLost, StaleEpoch) as error:
                self._note(error)
                self.loop.sleep(self.process, self.rng.uniform(0.1, 1.0))
            else:
                self.kept.append(self.session)
                # By us: a late copy of our call takes the session over from us, as anybody's would.
                self.num_taken[self.session.id] = num_taken + 1
                world, is_lost = self.process.world, self.session._mirror.find_lost() is not None
                # Nobody can tell, if the manager and all that knew the session have died before, or
                # its lease was over, but where an Allocate without an answer had opened it too; nor
                # if they all have gone but for a copy that was given up.
                is_lost = is_lost or self.session.id in world.reopened | world.expired
                is_lost |= not is_known and self.session.epoch <= self.story.epoch
                if is_lost:  # its next call would say so
                    self.story.errors.append(PagesLost.reason)
                self._resolve()
                return
        raise AssertionError("a session cannot be taken over")

    def _replace(self) -> None:
        """The session has ended: begin another, and feed it what the old one held at most."""
        if self.session is not None:
            self.kept.append(self.session)
            self.session.release() if self.session.closed else self._let_go(self.session)
        self._open(self.story.candidates[0].num_rows if self.story.candidates else 1)

    def _let_go(self, session: Session) -> None:
        try:
            session.release()
        except KVServiceError as error:
            self.loop.note(self.process.name, "cannot release:", error.reason)

    def _leave(self) -> None:
        """Leave the session to whoever has it now, and give back the others."""
        for session in self.kept:
            if session.id == self.story.session_id:
                self.process.client._leases.forget(session._holding.lease)
            else:
                self._let_go(session)

    def _end(self) -> None:
        self.is_ending = True
        for session in self.kept:
            self._let_go(session)

    # -- answers

    def _fresh(self, count: int, num_rows: int | None = None) -> Array:
        """Return tokens [rows, count, 2 * DIM] that no other has been like."""
        num_rows = self.state.num_rows if num_rows is None else num_rows
        size = num_rows * count * 2 * DIM
        values = np.array([self.rng.randrange(1, 1 << 20) for _ in range(size)], np.float32)
        return values.reshape(num_rows, count, 2 * DIM)

    def _compare(self, out: Any, state: State, layer: int, count: int) -> None:
        """With q = 0 every visible key weighs the same: the output is the mean of their values.

        Padding is not seen, and sees nothing.
        """
        for row, stored in enumerate(state.layers[layer]):
            first = len(stored) - count
            visible = ~state.padding[row][: len(stored)]
            values = stored[:, DIM:].astype(np.float64) * visible[:, None]
            seen = np.maximum(1, visible.cumsum()[first:])[:, None]
            expected = values.cumsum(0)[first:] / seen * visible[first:, None]
            got = out[row, 0]
            if not (np.abs(got - expected) <= 1e-5 * expected).all():  # nor is NaN close
                raise WrongTokens(
                    f"layer {layer}, row {row}, from position {first} on: {got}, not {expected}"
                )

    def _stored(self, session: Session) -> State:
        layers = []
        for layer in range(self.num_layers):
            lengths = session.lengths(layer)
            if not any(lengths):
                layers.append(empty(1, len(lengths)).layers[0])
                continue
            k, v = session.read(layer)
            both = np.concatenate([k[:, 0], v[:, 0]], axis=2)
            layers.append([both[row, :length] for row, length in enumerate(lengths)])
        bits = session.padding()
        longest = [max(map(len, column)) for column in zip(*layers, strict=True)]
        return State(layers, [bits[row, :length] for row, length in enumerate(longest)])

    def _note(self, error: KVServiceError, held: Session | None = None) -> None:
        """Note an error; `held`: of a call on a session that its holder has made."""
        self.loop.note(self.process.name, "gets", error.reason, error.message)
        if self.replaced and isinstance(error, (StaleEpoch, SessionNotFound, PagesLost)):
            raise Replaced
        self.story.errors.append(error.reason)
        if isinstance(error, CapacityError):
            return  # small workers are full now and then
        assert self._may_fail(error), f"an error without a cause: {error.reason}: {error}"
        if isinstance(error, StaleEpoch) and held is not None:
            taken = self.process.world.taken[held.id]
            assert taken > self.num_taken.get(held.id, 0), "taken over, and nobody has attached"
        if isinstance(error, SessionNotFound) and held is not None:
            # What has gone with a worker is lost, and said to be: that is another error.
            assert self.process.world.has_ended(held.id), "not found, and nobody has ended it"


def _contents(worker: PageWorker, session: WorkerSession, layer: int) -> Array:
    """Return a layer's keys of all positions, as a worker has them."""
    stop = max(session.lengths[layer])
    k = worker.tokens._read(session, layer, 0, stop).k
    return np.frombuffer(k.data, np.float32).reshape(k.shape)
