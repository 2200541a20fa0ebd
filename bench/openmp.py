"""What the decoder's OpenMP threads cost, by how they wait and how many they are.

Decoders in processes of their own, each with other settings, take steps in turn against the same
two workers, and with a local cache. torch computes with OpenMP: between two parallel regions its
threads spin for some time before they sleep, on cores that workers of the same machine may want.
`OMP_WAIT_POLICY=active` is left out: its threads would spin while the others are measured.

service_NAME    a step through the service, by the same decoder's with a local cache
NAME_vs_plain   a step through the service, by that of the decoder without settings
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from bench.processes import two_workers
from bench.report import Report, median

CONTEXT: Final = 128
ROUNDS: Final = 24
WARM: Final = 2

SETTINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "plain": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one_thread": {"OMP_NUM_THREADS": "1"},
}


class DecoderProcess:
    """A decoder that takes a step when it is told to."""

    def __init__(self, address: str, settings: Mapping[str, str]) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.openmp", address],
            env=kept | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._read()

    def step(self, which: str) -> float:
        """Return the seconds that a step takes with a cache: `service` or `local`."""
        assert self._process.stdin is not None
        print(which, file=self._process.stdin)
        return self._read()

    def end(self) -> None:
        self._process.communicate()

    def _read(self) -> float:
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())


def decode(address: str) -> None:
    """Take a step for each line that comes, and print how many seconds it took."""
    from bench.models import Decoder, prompt, smollm2
    from kvservice_client import connect

    model = smollm2()
    with connect(address) as client:
        decoders = {"service": Decoder(model, client), "local": Decoder(model, None)}
        for decoder in decoders.values():
            decoder.prefill(prompt(model, CONTEXT))
        print(0.0, flush=True)
        for line in sys.stdin:
            print(decoders[line.strip()].step(), flush=True)
        for decoder in decoders.values():
            decoder.end()


def main() -> None:
    report = Report("openmp")
    times: dict[tuple[str, str], list[float]] = {}
    with two_workers() as address:
        decoders = {name: DecoderProcess(address, env) for name, env in SETTINGS.items()}
        names = list(decoders)
        for i in range(ROUNDS + WARM):
            for which in ("service", "local"):
                for name in names[i % len(names) :] + names[: i % len(names)]:
                    seconds = decoders[name].step(which)
                    if i >= WARM:
                        times.setdefault((name, which), []).append(seconds)
        for decoder in decoders.values():
            decoder.end()
    for name, settings in SETTINGS.items():
        said = " ".join(f"{key}={value}" for key, value in settings.items()) or "no settings"
        ours, local = times[name, "service"], times[name, "local"]
        report.ratio(f"service_{name}", ours, local, f"service / DynamicCache + sdpa, {said}")
        if settings:
            plain = times["plain", "service"], times["plain", "local"]
            report.ratio(f"{name}_vs_plain", ours, plain[0], f"service, {said} / no settings")
            report.ratio(f"local_{name}_vs_plain", local, plain[1], f"local, {said} / no settings")
        report.figure(f"step_ms_{name}", 1e3 * median(ours), f"through the service, {said}")
    report.print()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        decode(sys.argv[1])
    else:
        main()
