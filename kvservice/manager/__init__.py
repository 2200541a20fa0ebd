"""The manager, without network and Ray.

Verbs on a session go to every worker that holds a part of it. The manager keeps nothing that it
could not ask back: after a restart, heartbeats fill the directory again.

`service` has a method for each RPC. What takes more than passing it on is in `growth` (opening, and
room for more), `forks`, `changes` (of structure), `leases` and `moves`. They find the parts of a
session by `lookup`, go to workers by `calls`, and both keep the `directory`.
"""

from kvservice.manager.calls import WorkerHandle
from kvservice.manager.moves import POLL_S
from kvservice.manager.service import LOOK_S, PageManager

__all__ = ["LOOK_S", "POLL_S", "PageManager", "WorkerHandle"]
