"""`python -m bench`: every measurement, or those that are named."""

from __future__ import annotations

import argparse
import subprocess
import sys

NAMES = ("kernel", "hop", "step", "rows", "load", "openmp", "overload")
BY_NAME_ONLY = ("gpu",)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES + BY_NAME_ONLY)}"
    )
    names = parser.parse_args().names or NAMES
    if unknown := set(names) - {*NAMES, *BY_NAME_ONLY}:
        parser.error(f"no such measurement: {', '.join(sorted(unknown))}")
    # Each in a process of its own: none finds the threads and the memory of another.
    sys.exit(max(subprocess.call([sys.executable, "-m", f"bench.{name}"]) for name in names))
