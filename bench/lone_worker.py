"""A worker in a process of its own, for as long as a measurement lasts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lone_worker() -> Iterator[str]:
    """Yield the address of a worker without Ray and manager."""
    command = [sys.executable, "-m", "kvservice", "worker", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.terminate()
