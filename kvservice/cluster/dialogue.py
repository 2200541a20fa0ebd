"""A command's side of the conversation with the process that talks to Ray (see `driver`)."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from kvservice.clock import Clock
from kvservice.core.errors import KVServiceError, Unavailable, error_class


def converse(
    request: Mapping[str, Any],
    *,
    environment: Mapping[str, str],
    log_path: Path,
    clock: Clock,
    timeout_s: float,
    margin_s: float,
    heard: Callable[[dict[str, Any]], None],
    check: Callable[[], None],
) -> dict[str, Any]:
    """Run the driver on one request and return its result.

    Args:
        request: What `driver` reads.
        environment: Of the driver.
        log_path: What Ray prints goes there.
        clock: What tells the time.
        timeout_s: Until the driver must have reached Ray. Ray itself may wait for ever.
        margin_s: What it gets beyond, once it has: to end what it has started. Then it is ended.
        heard: Is given each event before the result.
        check: Is called every now and then, to raise if waiting has become pointless.

    Raises:
        KVServiceError: What the driver answers.
        Unavailable: It has not answered in time, or has ended without an answer.
    """
    deadline = clock.monotonic() + timeout_s
    with _driver(request, environment, log_path) as lines:
        while True:
            check()
            if clock.monotonic() >= deadline:
                raise Unavailable(
                    f"Ray at {request['ray_address']} has not answered within {timeout_s:g} s"
                )
            try:
                line = lines.get(timeout=0.1)
            except queue.Empty:
                continue
            if not line:
                raise Unavailable(
                    f"the process that talks to Ray has ended without an answer: see {log_path}"
                )
            event = json.loads(line)
            if "error" in event:
                raise _error(event["error"])
            if "connected" in event:
                deadline += margin_s
            if "result" in event:
                result: dict[str, Any] = event["result"]
                return result
            heard(event)


@contextlib.contextmanager
def _driver(
    request: Mapping[str, Any], environment: Mapping[str, str], log_path: Path
) -> Iterator[queue.Queue[str]]:
    """Run the driver; yield its lines as they come, and an empty one at the end."""
    with (
        log_path.open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "kvservice.cluster.driver"],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C is for the command to act upon
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request))
                process.stdin.close()
            yield lines
        finally:
            # After the answer there's only Ray's own farewell to wait for, and nobody needs it.
            process.kill()
            reader.join()


def _read(source: IO[str], lines: queue.Queue[str]) -> None:
    for line in source:
        lines.put(line)
    lines.put("")


def _error(event: Mapping[str, str]) -> KVServiceError:
    return error_class(event["reason"])(event["message"])
