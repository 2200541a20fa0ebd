"""A command's side of the conversation with the process that talks to Ray (see `driver`)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvservice.clock import Clock
from kvservice.core.errors import KVServiceError, Unavailable, error_class

_BETWEEN_CHECKS_S: Final = 0.1
_CHUNK_BYTES: Final = 65536


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
            for line in lines.wait(_BETWEEN_CHECKS_S):
                event = json.loads(line)
                if "error" in event:
                    raise _error(event["error"])
                if "connected" in event:
                    deadline += margin_s
                if "result" in event:
                    result: dict[str, Any] = event["result"]
                    return result
                heard(event)
            if lines.ended:
                raise Unavailable(
                    f"the process that talks to Ray has ended without an answer: see {log_path}"
                )


class _Lines:
    """What a process prints, as far as it has come.

    There is no thread that waits for it, as a signal may end the conversation between any two
    instructions, and nothing may then be left that still reads.
    """

    def __init__(self, source: int) -> None:
        self._source = source
        self._poll = select.poll()
        self._poll.register(source, select.POLLIN)
        self._rest = b""
        self.ended = False

    def wait(self, timeout_s: float) -> list[bytes]:
        """Return the lines that are whole now; none after a while without any."""
        if not self._poll.poll(timeout_s * 1e3):
            return []
        chunk = os.read(self._source, _CHUNK_BYTES)
        self.ended = not chunk
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return lines


@contextlib.contextmanager
def _driver(
    request: Mapping[str, Any], environment: Mapping[str, str], log_path: Path
) -> Iterator[_Lines]:
    """Run the driver on one request; yield what it answers."""
    with (
        log_path.open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "kvservice.cluster.driver"],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the command to act upon
        ) as process,
    ):
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request).encode())
                process.stdin.close()
            yield _Lines(process.stdout.fileno())
        finally:
            # After the answer there's only Ray's own farewell to wait for, and nobody needs it.
            process.kill()


def _error(event: Mapping[str, str]) -> KVServiceError:
    return error_class(event["reason"])(event["message"])
