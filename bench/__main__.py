"""`python -m bench`: every measurement, or those that are named."""

from __future__ import annotations

import argparse

from bench import decode

MEASUREMENTS = {"decode": decode.main}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *MEASUREMENTS], help="default: all")
    parser.add_argument("--steps", type=int, default=50, help="pairs in each measurement")
    arguments = parser.parse_args()
    for name in arguments.names or MEASUREMENTS:
        MEASUREMENTS[name](arguments.steps)
