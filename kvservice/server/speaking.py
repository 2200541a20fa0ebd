"""What the manager and workers say of themselves to each other, and on whose behalf they call."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Final

from kvservice.clock import Clock
from kvservice.core.access import Rights
from kvservice.core.caller import Caller
from kvservice.core.capability import Claims, Keyring, Kind, digest_of

AUTHORIZATION: Final = "authorization"
SIGNED: Final = "kvs."
"""What a bearer token begins with that the service's own key has signed."""

SPOKEN_LIFE_S: Final = 60.0
_REMEMBERED: Final = 8192


class Speaker:
    """What the manager or a worker says of itself, and on whose behalf it calls. Thread-safe.

    Args:
        audience: Whom it speaks to: "manager" or "worker".
    """

    def __init__(self, keys: Callable[[], Keyring], audience: str, clock: Clock) -> None:
        self._keys = keys
        self._audience = digest_of(audience)
        self._clock = clock
        self._made: dict[tuple[Caller, bytes], tuple[float, Keyring, str]] = {}

    def metadata(self, caller: Caller) -> tuple[tuple[str, str], ...]:
        """Return what goes along with a call on a caller's behalf."""
        now, keys = self._clock.time(), self._keys()
        made_for = (caller, caller.token_id)
        until, of_keys, value = self._made.get(made_for, (0.0, None, ""))
        if now >= until or of_keys is not keys:
            claims = Claims(
                kind=Kind.CALLER,
                caller=caller,
                session_id="",
                rights=Rights.WRITE,
                audience=self._audience,
                issued_at=now,
                ends_at=now + SPOKEN_LIFE_S,
            )
            signed = base64.urlsafe_b64encode(keys.sign(claims)).decode()
            value = f"Bearer {SIGNED}{signed}"
            if len(self._made) >= _REMEMBERED:
                self._made = {}
            self._made[made_for] = (now + SPOKEN_LIFE_S / 2, keys, value)
        return ((AUTHORIZATION, value),)
