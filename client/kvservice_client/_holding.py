"""Holding a session: one user at a time, under a lease, until it is released or let go."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kvservice.core.errors import SessionNotFound
from kvservice_client._changes import Changes
from kvservice_client._leases import Lease, Leases
from kvservice_client._mirror import Mirror
from kvservice_client._outcomes import CopiesChanged


class Holding:
    """A session as its holder has it.

    Attributes:
        lock: Reentrant; held during every call on the session.
        lease: Renewed from now on.
    """

    def __init__(
        self, holder: object, mirror: Mirror, changes: Changes, lease: Lease, leases: Leases
    ) -> None:
        """
        Args:
            holder: The session is released when this object goes.
        """
        self.lock = threading.RLock()
        self.lease = lease
        self.mirror = mirror
        self._changes = changes
        self._leases = leases
        leases.add(lease)
        self._finalizer = weakref.finalize(holder, leases.release_soon, lease)
        self._finalizer.atexit = False  # `Leases` sees to the process's end

    def check_open(self) -> None:
        if not self.lease.open:
            raise SessionNotFound("the session was released or detached, or its client closed")

    def ready(self, *, allow_lost: bool = False) -> None:
        """Check that calls can be made, and finish a structural change in progress."""
        self.check_open()
        self._changes.settle()
        if not allow_lost and self.mirror.find_lost() is not None:
            raise self.mirror.pages_lost()

    def end(self) -> bool:
        """Neither renew nor release it any more. Returns False if that was so before."""
        was_open = self.lease.open
        self._finalizer.detach()
        self._leases.forget(self.lease)
        self.mirror.close_streams()
        return was_open


class Holder(Protocol):
    """Who holds a session."""

    @property
    def _holding(self) -> Holding: ...


H = TypeVar("H", bound=Holder)
P = ParamSpec("P")
T = TypeVar("T")


def goes_on(method: Callable[Concatenate[H, P], T]) -> Callable[Concatenate[H, P], T]:
    """Make a method of a holder that has the session for itself, and is carried out again where a
    copy was given up on the way.

    All it asks for may be repeated, and the other copy has all that was acknowledged.
    """

    @wraps(method)
    def carried_out(holder: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
        holding: Holding = holder._holding
        mirror = holding.mirror
        with holding.lock:
            was_uncertain, is_repeated = mirror.uncertain, False
            while True:
                try:
                    result = method(holder, *args, **kwargs)
                except CopiesChanged:
                    is_repeated = True
                else:
                    if is_repeated and not was_uncertain:
                        mirror.uncertain = False  # now it is known what became of it
                    return result

    return carried_out
