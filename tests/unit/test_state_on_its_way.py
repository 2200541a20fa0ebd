"""What a worker tells another one of a session that is to move there arrives as it was."""

from __future__ import annotations

import uuid

import numpy as np

from kvservice.clock import ManualClock
from kvservice.core.geometry import DType, HostTensor
from kvservice.core.moving import MovedTo, SessionState
from kvservice.core.session import SessionSpec, WriteCall
from kvservice.wire.copies import state_from_pb, state_to_pb
from kvservice_workers.worker import PageWorker, WorkerConfig

ID = str(uuid.UUID(int=7, version=4))


def sent(worker: PageWorker) -> SessionState:
    """Return a session's state, having seen that the wire does nothing to it."""
    _, _, state = worker.departures.state("t", ID, "copier", 0, freeze=False)
    assert state_from_pb(state_to_pb(state)) == state
    return state


def test_changes_that_may_be_repeated() -> None:
    """Also where a holder has only gone on, or got a copy, and may still repeat what was before."""
    worker = PageWorker(WorkerConfig("w", "life", 1 << 20), clock=ManualClock())
    worker.opening.allocate("t", ID, SessionSpec(1, page_size=2))
    array = np.ones((3, 1, 2), np.float32)
    tokens = HostTensor(DType.FLOAT32, array.shape, array.tobytes())
    worker.tokens.write("t", WriteCall(ID, 1, 0, tokens, tokens, (0,) * 3, (0, 1, 2), number=1))
    worker.changes.pop("t", ID, 1, [2], [3])
    assert sent(worker).last_change == ("pop", (2,))
    worker.changes.go_on("t", ID, 2)
    state = sent(worker)
    assert (state.last_change, state.change_before) == (("attach", (1,)), ("pop", (2,)))
    worker.changes.attach("t", ID, 3)
    assert (sent(worker).last_change, sent(worker).change_before) == ("attach", None)
    _, ticket, _ = worker.departures.state("t", ID, "copier", 0, freeze=True)
    to = MovedTo("w2", "there", "life 2", ticket, "a stay")
    worker.departures.share("t", ID, to)
    assert sent(worker).copied == (to, 5)
