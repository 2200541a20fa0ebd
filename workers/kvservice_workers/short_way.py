"""The short way through Attend, for the layers of a step that come after a group's first."""

from __future__ import annotations

import threading

from kvservice.clock import Clock
from kvservice.core.geometry import HostTensor
from kvservice.core.said import Said
from kvservice_workers.arena import Arena
from kvservice_workers.counters import Counters
from kvservice_workers.host_tensors import as_numpy
from kvservice_workers.layer_group import LayerGroup
from kvservice_workers.session_state import WorkerSession
from kvservice_workers.session_table import SessionTable
from kvservice_workers.steady import SteadyStep


class ShortWay:
    """Attend: one native call a layer, by what the long way has left behind (`SteadyStep`).

    Thread-safe. The worker's lock is not held during attention.
    """

    def __init__(
        self,
        lock: threading.RLock,
        sessions: SessionTable,
        counters: Counters,
        clock: Clock,
    ) -> None:
        self._lock = lock  # the worker's
        self._sessions = sessions
        self._counters, self._timings = counters, counters.timings
        self._clock = clock

    def attend(self, tenant: str, said: Said) -> bytes | None:
        """Serve a layer, if it asks what the first layer of its step has asked, and renew the
        session's lease.

        Returns:
            The serialized `AttendResponse`. None: it must go the long way, and nothing has changed.

        Raises:
            InvalidRequest: No such layer.
        """
        session = self._sessions.peek(tenant, said.session_id)
        if session is None:
            return None
        with session.lock:
            return self._attend(session, said)

    def _attend(self, session: WorkerSession, said: Said) -> bytes | None:
        """As `attend`. The session may have been closed, or its lease may be over."""
        started = self._clock.monotonic()
        step = session.step
        if step is None or session.closed or not self._sessions.holds(session, started):
            return None
        if session.frozen is not None:
            return None
        layer, stores, lengths = said.layer, said.stores, session.lengths
        window, index = session.place_of(layer)
        steady = step.steady.get((window, stores))
        group, geometry = session.groups[window], session.geometries.get(layer)
        if (
            steady is None
            or group.version != steady.version
            or lengths.get(layer) != steady.positions
            or (geometry is not steady.geometry and geometry != steady.geometry)
            or (stores and layer in step.appended)
        ):
            return None
        arena = group.pool.arenas.get(index)
        if arena is None:
            return None
        if group.written is not None and steady.slots is not None:
            group.wrote_slots(steady.slots[0])
        place = arena.place  # which keeps the tensors, should the arena move meanwhile
        answer = steady.call.answer(said, place.k_address, place.v_address, place.room)
        if answer is None:
            return None
        ended = self._clock.monotonic()
        with self._lock:
            if stores:
                if arena.place is not place:
                    self._store_again(group, arena, steady, said)
                lengths[layer] = steady.lengths
                step.appended[layer] = steady.positions
                self._counters.appended_bytes += steady.num_bytes
            self._timings.attention(ended - started, steady.num_rows)
            self._sessions.renew(session, ended)
        return answer

    def _store_again(self, group: LayerGroup, arena: Arena, steady: SteadyStep, said: Said) -> None:
        """Store tokens in an arena that moved while they were stored where it was."""
        assert steady.slots is not None, "nothing was stored"
        pages, offsets, kept = steady.slots
        dtype = steady.geometry.dtype
        k, v = (
            as_numpy(HostTensor(dtype, shape, data))
            for shape, data in zip(steady.shapes, said.tensors()[1:], strict=True)
        )
        if kept is not None:
            k, v = k[kept], v[kept]
        with group.pool.lock:
            arena.store(pages, offsets, k, v)
