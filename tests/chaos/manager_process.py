"""A manager as a process: says where it serves, and does so until its stdin ends.

    python -m tests.chaos.manager_process SETTINGS

SETTINGS is a JSON object of fields of `ManagerSettings`. Loads no torch, as a manager should not.
"""

from __future__ import annotations

import json
import sys

from kvservice.config import ManagerSettings
from kvservice.runtime.manager import ManagerServer

if __name__ == "__main__":
    with ManagerServer(ManagerSettings(**json.loads(sys.argv[1]))) as manager:
        print(json.dumps({"address": manager.address}), flush=True)
        sys.stdin.read()
