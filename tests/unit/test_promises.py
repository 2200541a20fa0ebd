"""What a session's promise of room is worth while it evicts."""

from __future__ import annotations

import uuid

import numpy as np

from kvservice.clock import ManualClock
from kvservice.core.geometry import DType, HostTensor, LayerGeometry, LayerSpec
from kvservice.core.session import (
    AttendCall,
    EvictBefore,
    Mask,
    MaskKind,
    SessionSpec,
    StepHeader,
)
from kvservice_workers.worker import PageWorker, WorkerConfig

WINDOW = 2


def zeros(num_tokens: int) -> HostTensor:
    return HostTensor(DType.FLOAT32, (num_tokens, 1, 1), np.zeros(num_tokens, np.float32).tobytes())


def test_a_row_that_is_evicted_empty_gets_no_new_promise() -> None:
    """Its table has no entries then, but the positions below are not to be stored again.

    So it stands on a worker whose tail has moved on to another one.
    """
    config = WorkerConfig(worker_id="w", incarnation="1", budget_bytes=1 << 20)
    worker = PageWorker(config, clock=ManualClock())
    session_id = str(uuid.uuid4())
    layer = LayerSpec(WINDOW, LayerGeometry(1, 1, 1, DType.FLOAT32))
    worker.opening.allocate("t", session_id, SessionSpec(2, layers=(layer,), page_size=1))
    worker.changes.append("t", session_id, 1, 5, [0, 0])
    headers = [
        StepHeader((4, 4)),
        StepHeader((0, 1), evict_before=(EvictBefore(WINDOW, (4, 3)),)),
    ]
    for step, (header, position) in enumerate(zip(headers, (0, 4), strict=True), 1):
        tokens = zeros(sum(header.counts))
        call = AttendCall(
            session_id, 1, step, 0, q=tokens, scale=1.0, mask=Mask(MaskKind.CAUSAL, window=WINDOW),
            k=tokens, v=tokens, header=header, positions=(position, position),
        )  # fmt: skip
        worker.long_way.attend("t", call)
        worker.check()
    (pool,) = worker.stats().pools
    # Row 1 holds its newest token and the one before; row 0 may still get its fifth.
    assert (pool.used_pages, pool.reserved_pages) == (2, 1)
