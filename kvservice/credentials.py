"""Secrets and limits that come from files: read, checked, and read again when they change.

A file that is wrong at the start stops it. One that becomes wrong later is complained about once,
and what was read before goes on to hold: nobody is locked out by a half-written file.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
import threading
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final, Generic, TypeVar

from kvservice.clock import Clock
from kvservice.config import ConfigError
from kvservice.core.caller import Caller, Role, check_tenant
from kvservice.core.capability import MIN_KEY_BYTES, Keyring, token_id_of
from kvservice.core.errors import InvalidRequest
from kvservice.core.quota import UNLIMITED, Quota

LOG = logging.getLogger(__name__)

LOOK_AGAIN_S: Final = 1.0
"""How long a change of a file may go unnoticed."""

MIN_TOKEN_LENGTH: Final = 16
_MAX_FILE_BYTES: Final = 1 << 20
_HASHED: Final = "sha256:"
_TOKEN_ROLES: Final = {role.value: role for role in Role if role is not Role.SERVICE}

T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """What some files hold together, as of a second ago. Thread-safe.

    Args:
        paths: Read in this order.
        read: Makes the value of their bytes; raises ConfigError.
        secret: Whether others than owner and group may not be able to read them.
    """

    def __init__(
        self,
        paths: tuple[Path, ...],
        read: Callable[..., T],
        *,
        clock: Clock,
        secret: tuple[bool, ...],
    ) -> None:
        self._paths = paths
        self._read = read
        self._secret = secret
        self._clock = clock
        self._lock = threading.Lock()
        self._marks = self._look()
        self._value = self._load()
        self._look_at = clock.monotonic() + LOOK_AGAIN_S
        self.generation = 0

    def get(self) -> T:
        """Return the value; `generation` has risen if it is another one."""
        if self._clock.monotonic() >= self._look_at and self._lock.acquire(blocking=False):
            try:
                self._refresh()
            finally:
                self._lock.release()
        return self._value

    def up_to_date(self) -> bool:
        """Whether the value is what the files hold now: False while they cannot be read."""
        self.get()
        return self._marks is not None

    def _refresh(self) -> None:
        self._look_at = self._clock.monotonic() + LOOK_AGAIN_S
        names = ", ".join(map(str, self._paths))
        try:
            marks = self._look()
            if marks == self._marks:
                return
            value = self._load()
        except ConfigError as error:
            if self._marks is not None:
                LOG.warning("what was read before goes on to hold: %s", error)
            self._marks = None
            return
        self._marks, self._value = marks, value
        self.generation += 1
        LOG.info("read again, as it has changed: %s", names)

    def _look(self) -> tuple[tuple[int, ...], ...] | None:
        return tuple(
            _mark(path, secret=secret)
            for path, secret in zip(self._paths, self._secret, strict=True)
        )

    def _load(self) -> T:
        return self._read(*(_bytes_of(path) for path in self._paths))


def _mark(path: Path, *, secret: bool) -> tuple[int, ...]:
    """Return what changes when a file does; follows links, as mounted secrets are."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check the path") from error
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path} is not a file; name the file itself")
    if found.st_size > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} has {found.st_size} bytes, at most {_MAX_FILE_BYTES} may be")
    if secret and found.st_mode & 0o007:
        raise ConfigError(
            f"{path} holds secrets and everybody may use it (mode {found.st_mode & 0o777:04o}): "
            f"chmod 600 {path}"
        )
    return found.st_mtime_ns, found.st_ino, found.st_size


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; let this user ({os.geteuid()}) read it"
        ) from error


# -- bearer tokens


class TokenFile:
    """Bearer tokens: a line for each, `TOKEN TENANT ROLE`, the token itself or `sha256:` of it.

    Neither tokens nor lines are ever part of a message.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        def read(raw: bytes) -> dict[bytes, Caller]:
            return _read_tokens(path, raw)

        self._file = WatchedFiles((path,), read, clock=clock, secret=(True,))
        self.up_to_date = self._file.up_to_date

    def find(self, token: str) -> Caller | None:
        """Return whose token it is; None if nobody's, any more."""
        # Looked up by its hash: what a guess has in common with a token shows in no duration.
        digest = hashlib.sha256(token.encode()).digest()
        return self._file.get().get(digest)

    def ended(self, token_ids: Iterable[bytes]) -> list[bytes]:
        """Return those of these tokens that are not here any more, or another caller's now."""
        held = {caller.token_id for caller in self._file.get().values()}
        return [token_id for token_id in token_ids if token_id not in held]

    @property
    def generation(self) -> int:
        """Rises when tokens have changed."""
        self._file.get()
        return self._file.generation


class MetricsTokenFile:
    """One bearer token, in plain, for reading numbers over HTTP: what Prometheus is given too."""

    def __init__(self, path: Path, clock: Clock) -> None:
        def read(raw: bytes) -> bytes:
            words = _text(path, raw).split()
            if len(words) != 1 or words[0].startswith(_HASHED):
                raise ConfigError(f"{path} must hold one token; make one by: openssl rand -hex 32")
            return _digest_in_line(words[0], str(path))

        self._file = WatchedFiles((path,), read, clock=clock, secret=(True,))
        self.up_to_date = self._file.up_to_date

    def find(self, token: str) -> Caller | None:
        """Return who may read numbers; None if it is another token."""
        digest = hashlib.sha256(token.encode()).digest()
        return READER if hmac.compare_digest(digest, self._file.get()) else None


READER: Final = Caller("metrics", Role.METRICS)
"""Whoever has the token of a `MetricsTokenFile`."""


def hashed(token: str) -> str:
    """Return what stands for a token in a token file."""
    return _HASHED + hashlib.sha256(token.encode()).hexdigest()


def _read_tokens(path: Path, raw: bytes) -> dict[bytes, Caller]:
    found: dict[bytes, Caller] = {}
    for number, line in _lines(path, raw):
        words = line.split()
        where = f"{path}, line {number}"
        if len(words) != 3 or words[2] not in _TOKEN_ROLES:
            raise ConfigError(
                f"{where}: expected TOKEN TENANT ROLE, where ROLE is one of "
                f"{', '.join(_TOKEN_ROLES)}"
            )
        token, tenant, role = words
        try:
            caller = Caller(check_tenant(tenant), _TOKEN_ROLES[role])
        except InvalidRequest as error:
            raise ConfigError(f"{where}: {error}") from None
        digest = _digest_in_line(token, where)
        if any(hmac.compare_digest(digest, other) for other in found):
            raise ConfigError(f"{where}: the same token again; give each caller its own")
        found[digest] = replace(caller, token_id=token_id_of(digest, caller))
    if not found:
        raise ConfigError(f"{path} holds no token; make one by: kvservice token")
    return found


def _digest_in_line(token: str, where: str) -> bytes:
    if not token.startswith(_HASHED):
        if len(token) < MIN_TOKEN_LENGTH:
            raise ConfigError(
                f"{where}: a token must have at least {MIN_TOKEN_LENGTH} characters; "
                "make one by: kvservice token"
            )
        return hashlib.sha256(token.encode()).digest()
    try:
        digest = bytes.fromhex(token.removeprefix(_HASHED))
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise ConfigError(f"{where}: sha256: must be followed by 64 hexadecimal digits")
    return digest


# -- keys


class KeyFile:
    """The keys that manager and workers share: a line of hexadecimal digits for each.

    The first one signs. A new key is added as the second line everywhere, then made the first
    everywhere, and then the old one is removed.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        def read(raw: bytes) -> Keyring:
            return Keyring(_read_keys(path, raw))

        self._file = WatchedFiles((path,), read, clock=clock, secret=(True,))
        self.up_to_date = self._file.up_to_date

    def get(self) -> Keyring:
        """Return the keys as they are now."""
        return self._file.get()


def _read_keys(path: Path, raw: bytes) -> list[bytes]:
    keys = []
    for number, line in _lines(path, raw):
        try:
            key = bytes.fromhex(line)
        except ValueError:
            key = b""
        if len(key) < MIN_KEY_BYTES:
            raise ConfigError(
                f"{path}, line {number}: a key must be at least {2 * MIN_KEY_BYTES} hexadecimal "
                "digits; make one by: openssl rand -hex 32"
            )
        keys.append(key)
    if not keys:
        raise ConfigError(f"{path} holds no key; make one by: openssl rand -hex 32")
    return keys


# -- certificates


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM texts. `ca` is empty where nobody else's certificate is to be trusted."""

    certificate: bytes
    private_key: bytes
    ca: bytes


class CertificateFiles:
    """A server's certificate and key, and whom it trusts."""

    def __init__(
        self,
        certificate: Path,
        private_key: Path,
        ca: Path | None,
        *,
        check: Callable[[str, Certificates], None],
        clock: Clock,
    ) -> None:
        """
        Args:
            check: Raises ConfigError unless certificate and key belong together and may be used.
        """
        paths = (certificate, private_key) if ca is None else (certificate, private_key, ca)

        def read(first: bytes, second: bytes, third: bytes = b"") -> Certificates:
            found = Certificates(first, second, third)
            check(str(certificate), found)
            return found

        secret = (False, True, False)[: len(paths)]
        self._files = WatchedFiles(paths, read, clock=clock, secret=secret)
        self.up_to_date = self._files.up_to_date

    def get(self) -> Certificates:
        return self._files.get()

    @property
    def generation(self) -> int:
        """Rises when they have changed."""
        self._files.get()
        return self._files.generation


# -- quotas


class QuotaFile:
    """What tenants may take: TOML, a table `default` and one `tenants.NAME` for each exception.

    The fields are those of `Quota`; what an exception leaves out is as in `default`.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        def read(raw: bytes) -> tuple[Quota, dict[str, Quota]]:
            return _read_quotas(path, raw)

        self._file = WatchedFiles((path,), read, clock=clock, secret=(False,))
        self.up_to_date = self._file.up_to_date

    def tenants(self) -> tuple[str, ...]:
        """Return the tenants that have a table of their own."""
        return tuple(self._file.get()[1])

    def of(self, tenant: str) -> Quota:
        """Return the quota of a tenant, as it is now."""
        default, exceptions = self._file.get()
        return exceptions.get(tenant, default)


def _read_quotas(path: Path, raw: bytes) -> tuple[Quota, dict[str, Quota]]:
    try:
        document = tomllib.loads(_text(path, raw))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    if unknown := set(document) - {"default", "tenants"}:
        raise ConfigError(f"{path}: {sorted(unknown)[0]!r}: expected [default] or [tenants.NAME]")
    default = _quota(path, "default", document.get("default", {}), UNLIMITED)
    tenants = document.get("tenants", {})
    if not isinstance(tenants, dict):
        raise ConfigError(f"{path}: tenants must be tables, [tenants.NAME]")
    exceptions = {}
    for tenant, table in tenants.items():
        try:
            check_tenant(tenant)
        except InvalidRequest as error:
            raise ConfigError(f"{path}: tenants.{tenant!r}: {error}") from None
        exceptions[tenant] = _quota(path, f"tenants.{tenant}", table, default)
    return default, exceptions


def _quota(path: Path, name: str, table: object, base: Quota) -> Quota:
    names = [field.name for field in fields(Quota)]
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: {name} must be a table")
    for key in table:
        if key not in names:
            raise ConfigError(f"{path}: {name}.{key}: expected one of {', '.join(names)}")
    try:
        return Quota(**{one: table.get(one, getattr(base, one)) for one in names})
    except InvalidRequest as error:
        raise ConfigError(f"{path}: {name}: {error}") from None


def _lines(path: Path, raw: bytes) -> list[tuple[int, str]]:
    """Return the lines that say something, with their numbers."""
    lines = enumerate(_text(path, raw).splitlines(), 1)
    kept = ((number, line.partition("#")[0].strip()) for number, line in lines)
    return [(number, line) for number, line in kept if line]


def _text(path: Path, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8") from None


def replace_file(path: Path, data: bytes, mode: int) -> None:
    """Write a file so that whoever reads it sees the old or the new one, whole."""
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(data)
    temporary.replace(path)
