"""Capabilities: short-lived rights that a worker checks by itself, with a key.

A worker issues one with every session that it answers, for that session and its own incarnation.
The manager and workers that speak for a caller, or for themselves, show one of the other kind.
Both are a few fields and their HMAC-SHA256; only who has the key can make them.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvservice.core.access import Rights
from kvservice.core.caller import Caller, Role
from kvservice.core.errors import Unauthenticated

MIN_KEY_BYTES: Final = 32
CLOCK_SKEW_S: Final = 5.0
"""How far the clocks of manager and workers may be apart."""

TOKEN_ID_BYTES: Final = 8

_VERSION: Final = 2
# version, kind, role or rights, reserved, key id, issued, ends [ms], session, audience, token
_HEAD: Final = struct.Struct(f"<BBBx4sQQ16s16s{TOKEN_ID_BYTES}s")
_NO_TOKEN: Final = bytes(TOKEN_ID_BYTES)
_MAC_BYTES: Final = 32
_ROLES: Final = (Role.TENANT, Role.OPERATOR, Role.METRICS, Role.SERVICE)
_NO_SESSION: Final = bytes(16)


class Kind(Enum):
    """What a capability is for. SESSION: one session on one worker. CALLER: to speak for one."""

    SESSION = 1
    CALLER = 2


@dataclass(frozen=True, slots=True)
class Claims:
    """What a capability says, once its HMAC has been verified. Times in seconds since the epoch.

    Fields:
        caller: Whose it is, and by which token. Of a SESSION: the tenant, in the role of one.
        session_id: Of a SESSION; else empty.
        rights: Of a SESSION; else WRITE.
        audience: Digest of whom it is for: a worker's incarnation, "manager" or "worker".
    """

    kind: Kind
    caller: Caller
    session_id: str
    rights: Rights
    audience: bytes
    issued_at: float
    ends_at: float

    def is_for(self, audience: str) -> bool:
        return self.audience == digest_of(audience)

    def check_time(self, now: float) -> None:
        """Raise Unauthenticated unless now is within the capability's life."""
        if now >= self.ends_at:
            raise Unauthenticated(
                "the capability has expired: renew the lease, or attach again", cause="expired"
            )
        if now < self.issued_at - CLOCK_SKEW_S:
            raise Unauthenticated("the capability is not valid yet: look at the clocks")


class Keyring:
    """Signs with the first key, and accepts what any of them has signed. Immutable."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """
        Args:
            keys: At least one, each of at least 32 bytes. While keys are rotated there are two.
        """
        assert keys, "at least one key"
        assert all(len(key) >= MIN_KEY_BYTES for key in keys), "keys of at least 32 bytes"
        self._keys = {hashlib.sha256(b"id" + key).digest()[:4]: key for key in keys}
        self._first = hashlib.sha256(b"id" + keys[0]).digest()[:4]

    def sign(self, claims: Claims) -> bytes:
        """Return the capability that says so."""
        is_session = claims.kind is Kind.SESSION
        detail = claims.rights.value if is_session else _ROLES.index(claims.caller.role)
        head = _HEAD.pack(
            _VERSION,
            claims.kind.value,
            detail,
            self._first,
            round(claims.issued_at * 1000),
            round(claims.ends_at * 1000),
            uuid.UUID(claims.session_id).bytes if is_session else _NO_SESSION,
            claims.audience,
            claims.caller.token_id or _NO_TOKEN,
        )
        body = head + claims.caller.tenant.encode()
        return body + self._mac(self._first, body)

    def verify(self, capability: bytes) -> Claims:
        """Return what a capability says. Neither its time nor its audience is looked at.

        Raises:
            Unauthenticated: It is none, or none of the keys has signed it.
        """
        if not _HEAD.size + _MAC_BYTES < len(capability) <= _HEAD.size + _MAC_BYTES + 512:
            raise _forged()
        body, mac = capability[:-_MAC_BYTES], capability[-_MAC_BYTES:]
        version, kind, detail, key_id, issued, ends, session, audience, token_id = (
            _HEAD.unpack_from(body)
        )
        if key_id not in self._keys or not hmac.compare_digest(self._mac(key_id, body), mac):
            raise _forged()
        if version != _VERSION:
            raise Unauthenticated(f"a capability of version {version}, expected {_VERSION}")
        tenant = body[_HEAD.size :].decode()
        is_session = Kind(kind) is Kind.SESSION
        return Claims(
            kind=Kind(kind),
            caller=Caller(
                tenant,
                Role.TENANT if is_session else _ROLES[detail],
                token_id=b"" if token_id == _NO_TOKEN else token_id,
            ),
            session_id=str(uuid.UUID(bytes=session)) if is_session else "",
            rights=Rights(detail) if is_session else Rights.WRITE,
            audience=audience,
            issued_at=issued / 1000,
            ends_at=ends / 1000,
        )

    def _mac(self, key_id: bytes, body: bytes) -> bytes:
        return hmac.digest(self._keys[key_id], b"kvservice capability" + body, "sha256")


def digest_of(audience: str) -> bytes:
    """Return how a capability names whom it is for: 16 bytes."""
    return hashlib.sha256(audience.encode()).digest()[:16]


def _forged() -> Unauthenticated:
    # The same words for all of it: nobody learns how near a guess was.
    return Unauthenticated("the capability was not issued by this service")


def token_id_of(digest: bytes, caller: Caller) -> bytes:
    """Return how a capability names the token behind it: 8 bytes, of its hash and whose it is."""
    named = f"kvservice token {caller.tenant} {caller.role.value} ".encode()
    return hashlib.sha256(named + digest).digest()[:TOKEN_ID_BYTES]
