"""Runs many seeds on all cores, or one of them with its log: see `--help`."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor

from kvservice.clock import SystemClock
from tests.simulation.scenario import run_seed

CHUNK = 5


def run_chunk(seeds: range) -> tuple[int, list[tuple[int, str]]]:
    """Return the number of events, and the seeds that failed with what went wrong."""
    events = 0
    failed = []
    for seed in seeds:
        try:
            events += run_seed(seed).num_events
        except Exception as error:
            failed.append((seed, "".join(traceback.format_exception_only(error))))
    return events, failed


def main() -> int:
    """Return the exit code: 0 if all seeds hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many (default: 2000)")
    parser.add_argument("--first", type=int, default=0, help="from which on (default: 0)")
    parser.add_argument("--seed", type=int, help="only this one, with all that happens in it")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # of all that goes wrong in here, as it is meant to
    if arguments.seed is not None:
        report = run_seed(arguments.seed, keep_log=True)
        print(*report.log, sep="\n")
        print(f"seed {report.seed} holds, trace {report.trace:08x}")
        return 0
    clock = SystemClock()
    began = clock.monotonic()
    last = arguments.first + arguments.seeds
    chunks = [range(a, min(a + CHUNK, last)) for a in range(arguments.first, last, CHUNK)]
    events, failed = 0, []
    gc.freeze()  # what was imported stays: nobody need look through it after each seed
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for some_events, some_failed in pool.map(run_chunk, chunks):
            events += some_events
            failed += some_failed
    for seed, text in failed:
        print(f"seed {seed} fails: {text}")
    seconds = clock.monotonic() - began
    print(
        f"{arguments.seeds} seeds from {arguments.first} on, {events} events, "
        f"{len(failed)} failed, {seconds:.1f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
