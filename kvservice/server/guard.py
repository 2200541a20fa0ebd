"""Who may call: credentials of a connection or call, and the right to each request.

A call shows a credential (a bearer token, or the connection's client certificate), or a request
carries a capability, or both. A `Guard` turns them into the `Caller` that the service sees, or
into UNAUTHENTICATED and PERMISSION_DENIED. Capabilities are verified once and remembered, so that
a call of the data path costs a look-up.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol

from google.protobuf.descriptor import ServiceDescriptor

from kvservice.clock import Clock
from kvservice.core.access import RULES, Rights, Rule
from kvservice.core.caller import ANONYMOUS, Caller
from kvservice.core.capability import CLOCK_SKEW_S, Claims, Keyring, Kind, digest_of
from kvservice.core.errors import PermissionDenied, StaleWorker, Unauthenticated
from kvservice.core.quota import QuotaOf, unlimited
from kvservice.server.peers import TENANT_KEY, Metadata, caller_of, stated_tenant
from kvservice.server.revoking import TokensBehind
from kvservice.server.rooms import CallCounts
from kvservice.server.speaking import AUTHORIZATION, SIGNED

MIN_LIFE_S: Final = 300.0
"""A session's capability lives as long as its lease, and at least so long."""

_REMEMBERED: Final = 8192


class Context(Protocol):
    """What a call tells of itself: gRPC's context has it."""

    def invocation_metadata(self) -> Metadata: ...

    def auth_context(self) -> Mapping[str, Any]: ...


class Attend(Protocol):
    """What an Attend shows, decoded or not."""

    @property
    def session_id(self) -> str: ...

    @property
    def capability(self) -> bytes: ...


@dataclass(slots=True, eq=False)
class Credential:
    """What somebody has shown so far.

    Fields:
        caller: Whose it is. None: nothing was shown, and capabilities must do.
        ends_at: When it is over, in seconds since the epoch.
        token: The bearer token's text, to look at again; never to be said.
        generation: Of the token file, when it was looked at.
        spoken: The manager speaks for the caller.
        bound_to_capability: `ends_at` is a capability's: a newer one of the same tenant moves it.
        nothing_else: A session's capability is all that was shown: each call needs its session's.
        admitted: What the last Attend has shown beside.
    """

    caller: Caller | None
    ends_at: float = float("inf")
    token: str | None = field(default=None, repr=False)
    generation: int = 0
    spoken: bool = False
    bound_to_capability: bool = False
    nothing_else: bool = False
    admitted: _Admitted | None = field(default=None, repr=False)


class _Admitted(NamedTuple):
    """A capability that has let Attends through, and until when it does."""

    capability: bytes
    session_id: str
    keys: Keyring
    begins_at: float
    ends_at: float
    caller: Caller


class Tokens(Protocol):
    """Where bearer tokens are looked up."""

    @property
    def generation(self) -> int: ...

    def find(self, token: str) -> Caller | None: ...


class Guard:
    """Stands before one server's services. Thread-safe.

    Args:
        name: Whom capabilities must be for: a worker's incarnation, or "manager".
        keys: Returns the keys as they are now. None: no capabilities.
        tokens: None: no bearer tokens but those that the keys have signed.
        name_of: Whom a certificate's name stands for. None: certificates name nobody.
    """

    is_open = False

    def __init__(
        self,
        name: str,
        *,
        clock: Clock,
        keys: Callable[[], Keyring] | None = None,
        tokens: Tokens | None = None,
        name_of: Callable[[str], Caller | None] | None = None,
        quota_of: QuotaOf = unlimited,
    ) -> None:
        self._name = name
        self._audience = digest_of(name)
        self._clock = clock
        self._keys = keys
        self._tokens = tokens
        self._name_of = name_of
        self._remembered: tuple[Keyring | None, dict[bytes, Claims]] = (None, {})
        self.calls = CallCounts(quota_of)
        self.tokens_behind = TokensBehind(clock)

    def rules(self, descriptor: ServiceDescriptor) -> Mapping[str, Rule]:
        """Return the rule of each RPC of a service. One without is a mistake of ours."""
        rules = RULES[descriptor.full_name]
        missing = {method.name for method in descriptor.methods} - set(rules)
        assert not missing, f"no rule says who may call {sorted(missing)}"
        return rules

    # -- who it is

    def identify(self, context: Context) -> Credential:
        """Return what a call shows.

        Raises:
            Unauthenticated: It is nobody's, or there is more than one.
            PermissionDenied: The call states another tenant than its credential.
        """
        metadata = list(context.invocation_metadata())
        shown = [value for key, value in metadata if key == AUTHORIZATION]
        if len(shown) > 1:
            raise Unauthenticated("authorization must be stated once")
        credential = self._of_token(shown[0]) if shown else self._of_certificate(context)
        stated = stated_tenant(metadata)
        if stated is not None and (credential.caller is None or credential.caller.tenant != stated):
            raise PermissionDenied(f"{TENANT_KEY} is not the tenant of the credential")
        return credential

    def _of_token(self, value: str | bytes) -> Credential:
        scheme, _, token = value.partition(" ") if isinstance(value, str) else ("", "", "")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("authorization must be: Bearer TOKEN")
        if token.startswith(SIGNED):
            return self._of_signed(token)
        if self._tokens is not None:
            generation = self._tokens.generation
            caller = self._tokens.find(token)
            if caller is not None:
                return Credential(caller, token=token, generation=generation)
        raise Unauthenticated("the token is not valid")

    def _of_signed(self, token: str) -> Credential:
        """The manager's, on behalf of a caller, or a worker's, for itself."""
        try:
            raw = base64.urlsafe_b64decode(token.removeprefix(SIGNED))
        except (binascii.Error, ValueError):
            raise Unauthenticated("the token is not valid") from None
        claims = self._claims(raw)
        audience = "manager" if self._name == "manager" else "worker"
        if claims.kind is not Kind.CALLER or not claims.is_for(audience):
            raise Unauthenticated("the token is not for this server")
        claims.check_time(self._clock.time())
        return Credential(claims.caller, ends_at=claims.ends_at, spoken=True)

    def _of_certificate(self, context: Context) -> Credential:
        if self._name_of is not None:
            names = context.auth_context().get("x509_subject_alternative_name", ())
            for name in names:
                caller = self._name_of(name.decode(errors="replace"))
                if caller is not None:
                    return Credential(caller)
        return Credential(None)

    # -- what it may

    def admit(self, credential: Credential, rule: Rule, request: Any) -> Caller:
        """Return who makes this request.

        Raises:
            Unauthenticated: Nobody who could, or not any more.
            PermissionDenied: Somebody who may not.
            StaleWorker: The capability is for another incarnation of this worker.
        """
        if rule.capability is not None and self._keys is not None:
            if "capabilities" in request.DESCRIPTOR.fields_by_name:
                if request.capabilities:
                    return self._admit_many(credential, rule.capability, request)
            elif request.capability:
                shown, session_id = request.capability, request.session_id
                if not rule.lasting and rule.capability is Rights.WRITE:
                    return self._admit_attend(credential, shown, session_id)
                caller = self.admit_by(credential, rule.capability, shown, session_id)
                return self._lasting(caller, credential, request) if rule.lasting else caller
        self.check(credential)
        assert credential.caller is not None
        rule.check(credential.caller.role)
        caller = credential.caller
        return replace(caller, credential=credential) if rule.lasting else caller

    def _lasting(self, caller: Caller, shown: Credential, request: Any) -> Caller:
        """Return a caller with all that it has shown: it ends with the first of them."""
        both = replace(shown, caller=shown.caller or caller)
        both.ends_at = min(shown.ends_at, self._claims(request.capability).ends_at)
        both.bound_to_capability = shown.ends_at == float("inf")
        both.nothing_else = shown.caller is None
        return replace(caller, credential=both)

    def check(self, credential: Credential) -> None:
        """Raise Unauthenticated unless a credential names somebody, and still holds."""
        if credential.caller is None:
            raise Unauthenticated(
                "who calls is not known: present a token, or a certificate", cause="missing"
            )
        if self.has_ended(credential):
            raise Unauthenticated("the credential has ended: present a valid one", cause="expired")

    def has_ended(self, credential: Credential) -> bool:
        """Return whether what was shown does not hold any more."""
        if credential.token is not None and self._tokens is not None:
            generation = self._tokens.generation
            if generation != credential.generation:
                found = self._tokens.find(credential.token)
                if found is None or credential.caller is None or found != credential.caller:
                    return True
                credential.generation = generation
        now, last = self._clock.time(), credential.admitted
        if last is not None and (
            self.tokens_behind.have_ended(last.caller.token_id)
            or (credential.caller is None and now >= last.ends_at)
        ):
            return True
        shown = credential.caller
        if shown is not None and self.tokens_behind.have_ended(shown.token_id):
            return True
        return now >= credential.ends_at

    def admit_by(
        self, credential: Credential, rights: Rights, capability: bytes, session_id: str
    ) -> Caller:
        """Return whose capability it is that gives these rights on a session, here and now."""
        return self._admit_by(credential, rights, capability, session_id).caller

    def _admit_by(
        self, credential: Credential, rights: Rights, capability: bytes, session_id: str
    ) -> Claims:
        claims = self._claims(capability)
        if claims.kind is not Kind.SESSION:
            raise Unauthenticated("not the capability of a session")
        if claims.audience != self._audience:
            raise StaleWorker(
                "another incarnation of this worker answers: what the old one held is gone",
                incarnation=self._name,
            )
        claims.check_time(self._clock.time())
        if self.tokens_behind.have_ended(claims.caller.token_id):
            raise Unauthenticated(
                "the token that this capability was issued for holds no more", cause="expired"
            )
        shown = credential.caller
        if shown is not None and shown.tenant != claims.caller.tenant:
            raise Unauthenticated("the capability is another tenant's")
        if claims.session_id != session_id:
            raise PermissionDenied("the capability is another session's")
        if rights is Rights.WRITE and claims.rights is Rights.READ:
            raise PermissionDenied("the capability only allows to read")
        return claims

    def admit_attend(self, credential: Credential, call: Attend) -> Caller:
        """As `admit`, of an Attend on a lane. A newer capability lets the lane live on."""
        capability = call.capability
        if not capability:
            if credential.nothing_else:
                raise Unauthenticated("each call here needs its session's capability")
            self.check(credential)
            assert credential.caller is not None
            return credential.caller
        caller = self._admit_attend(credential, capability, call.session_id)
        last = credential.admitted
        if (
            last is not None
            and credential.bound_to_capability
            and last.ends_at > credential.ends_at
        ):
            credential.ends_at = last.ends_at
        return caller

    def _admit_attend(self, credential: Credential, capability: bytes, session_id: str) -> Caller:
        """Admit what was admitted before, or verify it: a stream shows the same a thousand times.

        A capability whose key is gone, or whose time is over, is not admitted any more. The keys
        are those before it was verified: newer ones have it verified again.
        """
        last = credential.admitted
        if (
            last is not None
            and last.capability == capability
            and last.session_id == session_id
            and self._keys is not None
            and last.keys is self._keys()
            and last.begins_at <= self._clock.time() < last.ends_at
            and not self.tokens_behind.have_ended(last.caller.token_id)
        ):
            return last.caller
        keys = self._keys() if self._keys is not None else None
        claims = self._admit_by(credential, Rights.WRITE, capability, session_id)
        if keys is not None:
            credential.admitted = _Admitted(
                *(capability, session_id, keys),
                *(claims.issued_at - CLOCK_SKEW_S, claims.ends_at, claims.caller),
            )
        return claims.caller

    def admit_streamed(self, credential: Credential, rule: Rule, call: Attend) -> Caller:
        """As `admit`, of an Attend that has not been decoded."""
        capability = call.capability
        if capability and rule.capability is not None and self._keys is not None:
            return self._admit_attend(credential, capability, call.session_id)
        self.check(credential)
        assert credential.caller is not None
        rule.check(credential.caller.role)
        return credential.caller

    def _admit_many(self, credential: Credential, rights: Rights, request: Any) -> Caller:
        by_session = {}
        if len(request.capabilities) > len(request.session_ids):
            raise PermissionDenied("one capability for each session, no more")
        for capability in request.capabilities:
            by_session[self._claims(capability).session_id] = capability
        callers = set()
        for session_id in request.session_ids:
            capability = by_session.get(session_id)
            if capability is None:
                raise PermissionDenied("each session needs its own capability")
            callers.add(self.admit_by(credential, rights, capability, session_id))
        if len(callers) != 1:
            raise PermissionDenied("sessions of one tenant at a time")
        return callers.pop()

    def _claims(self, capability: bytes) -> Claims:
        if self._keys is None:
            raise Unauthenticated("this server takes no capabilities")
        keys = self._keys()
        of, remembered = self._remembered
        # A key may be gone: nothing it has signed holds any more. Both change as one, so that no
        # other thread remembers for the new keys what it has verified by the old ones.
        if keys is not of or len(remembered) >= _REMEMBERED:
            remembered = {}
            self._remembered = (keys, remembered)
        claims = remembered.get(capability)
        if claims is None:
            claims = remembered[capability] = keys.verify(capability)
            if claims.audience == self._audience:  # issued here, or for here by another worker
                self.tokens_behind.issued(claims.caller.token_id, claims.ends_at)
        return claims

    # -- what it gives

    def issue(
        self, caller: Caller, session_id: str, ttl_s: float, rights: Rights, incarnation: str = ""
    ) -> bytes:
        """Return the capability of a session on this server, or on another incarnation that has
        taken it over from here; empty without keys.

        Whoever only looks gets READ. The manager, which looks on behalf of those who open and
        grow, gets what they need.
        """
        if self._keys is None:
            return b""
        credential = caller.credential
        if isinstance(credential, Credential) and credential.spoken:
            rights = Rights.WRITE
        now = self._clock.time()
        ends_at = now + max(MIN_LIFE_S, ttl_s)
        self.tokens_behind.issued(caller.token_id, ends_at)
        return self._keys().sign(
            Claims(
                kind=Kind.SESSION,
                caller=caller,
                session_id=session_id,
                rights=rights,
                audience=digest_of(incarnation) if incarnation else self._audience,
                issued_at=now,
                ends_at=ends_at,
            )
        )


class OpenGuard(Guard):
    """Authentication is off: everybody may be anybody, and do anything."""

    is_open = True

    def __init__(self, clock: Clock, quota_of: QuotaOf = unlimited) -> None:
        super().__init__("", clock=clock, quota_of=quota_of)

    def identify(self, context: Context) -> Credential:
        return Credential(caller_of(context.invocation_metadata()))

    def check(self, credential: Credential) -> None:
        del credential

    def admit_attend(self, credential: Credential, call: Attend) -> Caller:
        del call
        return credential.caller or ANONYMOUS

    def admit_streamed(self, credential: Credential, rule: Rule, call: Attend) -> Caller:
        del rule, call
        return credential.caller or ANONYMOUS

    def admit(self, credential: Credential, rule: Rule, request: Any) -> Caller:
        del request
        caller = credential.caller or ANONYMOUS
        return replace(caller, credential=credential) if rule.lasting else caller

    def has_ended(self, credential: Credential) -> bool:
        del credential
        return False
