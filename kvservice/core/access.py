"""Which RPC asks for what: one rule for each, so that none is served without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvservice.core.caller import Role
from kvservice.core.errors import PermissionDenied


class Rights(Enum):
    """What a capability allows on its session. WRITE includes READ."""

    READ = 1
    WRITE = 2


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may call an RPC.

    Fields:
        roles: Whose credential will do. What they reach by it is their own tenant's.
        capability: The right that a capability must give to do instead of a credential. None: a
            capability does not open this RPC.
        lasting: What it opens outlives the call, so that the caller comes with its credential.
    """

    roles: frozenset[Role]
    capability: Rights | None = None
    lasting: bool = False

    def check(self, role: Role) -> None:
        """Raise PermissionDenied unless the role is one of the rule's."""
        if role not in self.roles:
            wanted = ", ".join(sorted(one.value for one in self.roles))
            raise PermissionDenied(
                f"this call is for the roles {wanted}; the caller's is {role.value}",
                role=role.value,
            )


_USERS: Final = frozenset({Role.TENANT, Role.OPERATOR})
_SESSION: Final = Rule(_USERS)
_READING: Final = Rule(_USERS, Rights.READ)
_WRITING: Final = Rule(_USERS, Rights.WRITE)
_NUMBERS: Final = Rule(frozenset({Role.OPERATOR, Role.METRICS}))
_EVERYBODY: Final = Rule(frozenset({Role.TENANT, Role.OPERATOR, Role.METRICS}))
_OPERATORS: Final = Rule(frozenset({Role.OPERATOR}))
_SERVICE: Final = Rule(frozenset({Role.SERVICE}))

MANAGER_RULES: Final[Mapping[str, Rule]] = {
    "Allocate": _SESSION,
    "Append": _SESSION,
    "Pop": _SESSION,
    "Reset": _SESSION,
    "Select": _SESSION,
    "Fork": _SESSION,
    "Attach": _SESSION,
    "Release": _SESSION,
    "RenewLease": _SESSION,
    "GetSession": _SESSION,
    "ListSessions": _SESSION,
    "PageStats": _NUMBERS,
    "ListWorkers": _EVERYBODY,
    "DrainWorker": _OPERATORS,
    "MoveSession": _OPERATORS,
    "Heartbeat": _SERVICE,
}
"""By the RPC's name in PageManagerService."""

WORKER_RULES: Final[Mapping[str, Rule]] = {
    "Allocate": _SESSION,
    "Append": _WRITING,
    "Pop": _WRITING,
    "Reset": _WRITING,
    "Select": _WRITING,
    "Fork": _WRITING,
    "Attach": _WRITING,
    "Release": _WRITING,
    "RenewLease": _WRITING,
    "GetSession": Rule(_USERS, Rights.READ, lasting=True),
    "ListSessions": _SESSION,
    # With a session's capability: what its holder may know of the worker.
    "PageStats": Rule(_NUMBERS.roles, Rights.READ),
    "Attend": _WRITING,
    "Write": _WRITING,
    "Read": _READING,
    "OpenLane": Rule(_USERS, Rights.WRITE, lasting=True),
    "FollowSession": _WRITING,
    "PullSession": _SERVICE,
    "CopyState": _SERVICE,
    "CopyPages": _SERVICE,
    "HandOver": _SERVICE,
}
"""By the RPC's name in PageWorkerService."""

RULES: Final[Mapping[str, Mapping[str, Rule]]] = {
    "kvservice.v1.PageManagerService": MANAGER_RULES,
    "kvservice.v1.PageWorkerService": WORKER_RULES,
}
