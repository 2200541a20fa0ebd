"""The manager, without network and Ray.

Verbs on a session go to every worker that holds a part of it. The manager keeps nothing that it
could not ask back: after a restart, heartbeats fill the directory again.
"""

from kvservice.manager.moves import POLL_S
from kvservice.manager.routes import WorkerHandle
from kvservice.manager.service import LOOK_S, PageManager

__all__ = ["LOOK_S", "POLL_S", "PageManager", "WorkerHandle"]
