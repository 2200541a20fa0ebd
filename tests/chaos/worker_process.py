"""A worker as a process: says where it serves, then does what its stdin says.

    python -m tests.chaos.worker_process SETTINGS

SETTINGS is a JSON object of fields of `WorkerSettings`. With `tcp_lane` it offers its lane over TCP
alone, so that a proxy can stand in its way. `check` on stdin is answered by `ok`, or by the
invariant that does not hold; the end of stdin ends the process.
"""

from __future__ import annotations

import json
import signal
import sys
from types import FrameType
from typing import Any

from kvservice.config import WorkerSettings
from kvservice.runtime.worker import WorkerServer


class Leave(BaseException):
    """SIGTERM, which lets it give its sessions away first."""


def leave(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise Leave


def main(settings: dict[str, Any]) -> None:
    tcp_lane = settings.pop("tcp_lane", False)
    with WorkerServer(WorkerSettings(**settings)) as worker:
        if tcp_lane:
            lane = worker._lane
            assert lane is not None
            lane.addresses = worker.lane_addresses = lane.addresses[1:]
        said = {"address": worker.address, "lanes": worker.lane_addresses}
        print(json.dumps(said), flush=True)
        signal.signal(signal.SIGTERM, leave)
        try:
            for line in sys.stdin:
                assert line == "check\n", line
                print(_check(worker), flush=True)
        except Leave:
            worker.leave()
            worker.wait()


def _check(worker: WorkerServer) -> str:
    try:
        worker.worker.check()
        worker.worker.audit()
        found = {kind: n for kind, n in worker.worker.stats().page_discrepancies.items() if n}
        assert not found, found
    except AssertionError as error:
        return f"broken: {str(error) or 'an invariant'}".replace("\n", " ")
    return "ok"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
