"""Certificates: checking those that a server is given, and making some for development."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvservice.config import ConfigError
from kvservice.core.caller import Caller, Role, check_tenant
from kvservice.core.errors import InvalidRequest
from kvservice.credentials import Certificates, replace_file

TRUST_DOMAIN: Final = "kvservice"
_PUBLIC: Final = 0o644
_PRIVATE: Final = 0o600


def check_certificates(name: str, found: Certificates, now: float) -> None:
    """Check a server's certificate before it is shown to anybody.

    Args:
        name: Of the certificate's file, for messages.
        now: Seconds since the epoch.

    Raises:
        ConfigError: It or its key is not PEM, they do not belong together, or it is not valid now.
    """
    try:
        chain = x509.load_pem_x509_certificates(found.certificate)
    except ValueError:
        raise ConfigError(f"{name} is not a certificate in PEM; give the certificate") from None
    try:
        key = serialization.load_pem_private_key(found.private_key, None)
    except (ValueError, TypeError):
        raise ConfigError(
            f"the key of {name} is not a private key in PEM without a passphrase; give that"
        ) from None
    first, when = chain[0], datetime.fromtimestamp(now, UTC)
    if _public_bytes(first.public_key()) != _public_bytes(key.public_key()):
        raise ConfigError(
            f"{name} does not belong to the key: give the pair that was made together"
        )
    if when > first.not_valid_after_utc:
        raise ConfigError(f"{name} has expired at {first.not_valid_after_utc:%F %T} UTC: renew it")
    if when < first.not_valid_before_utc:
        raise ConfigError(
            f"{name} is not valid before {first.not_valid_before_utc:%F %T} UTC: look at the clock"
        )
    if found.ca:
        try:
            x509.load_pem_x509_certificates(found.ca)
        except ValueError:
            raise ConfigError(
                f"the CA file that goes with {name} holds no certificate in PEM"
            ) from None


def end_of(pem: bytes) -> float:
    """Return when the first certificate of a PEM text expires, in seconds since the epoch."""
    return x509.load_pem_x509_certificates(pem)[0].not_valid_after_utc.timestamp()


def caller_of_name(name: str) -> Caller | None:
    """Return whom a certificate's URI names: `spiffe://DOMAIN/ROLE/TENANT`; None: nobody of ours.

    The role is tenant, operator or metrics. Whose certificates count is the CA's business.
    """
    parts = name.split("/")
    if len(parts) != 5 or parts[:2] != ["spiffe:", ""] or parts[3] == Role.SERVICE.value:
        return None
    try:
        return Caller(check_tenant(parts[4]), Role(parts[3]))
    except (InvalidRequest, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority: its certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_development_certificates(
    folder: Path, *, hosts: Sequence[str], callers: Sequence[Caller], days: float, now: float
) -> list[Path]:
    """Write a CA, a certificate for servers, and one for each caller; not for production.

    A CA that is in the folder already issues the others anew, under the same names, so that
    servers which watch them take the new ones.

    Args:
        hosts: Names and addresses under which servers are reached, beside this machine's own.
        days: How long they are valid.
        now: Seconds since the epoch.

    Returns:
        The files written: `ca.pem`, `ca.key`, `server.pem`, `server.key`, `ROLE-TENANT.pem` and
        `.key`. Keys can be read by their owner alone.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    start = datetime.fromtimestamp(now, UTC)
    life = (start - timedelta(minutes=5), start + timedelta(days=days))
    written: list[Path] = []
    authority = _find_authority(folder)
    if authority is None:
        authority = _make_authority(life)
        written += _write(folder, "ca", authority.certificate, authority.key)
    everywhere = ("localhost", "127.0.0.1", "127.0.0.2", "::1", *hosts)
    names = [_host_name(host) for host in dict.fromkeys(everywhere)]
    written += _issue(folder, "server", names, authority, life)
    for caller in callers:
        uri = f"spiffe://{TRUST_DOMAIN}/{caller.role.value}/{caller.tenant}"
        name = f"{caller.role.value}-{caller.tenant}"
        written += _issue(folder, name, [x509.UniformResourceIdentifier(uri)], authority, life)
    return written


def _find_authority(folder: Path) -> Authority | None:
    certificate, key = folder / "ca.pem", folder / "ca.key"
    if not certificate.exists() and not key.exists():
        return None
    try:
        loaded = serialization.load_pem_private_key(key.read_bytes(), None)
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{certificate} and {key} are not a CA to go on with; remove both, or name another "
            "folder"
        ) from error
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{key} was not made by this command; name another folder")
    return Authority(found, loaded)


def _make_authority(life: tuple[datetime, datetime]) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvservice development CA")])
    certificate = (
        _builder(name, key, life)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def _issue(
    folder: Path,
    name: str,
    names: Sequence[x509.GeneralName],
    authority: Authority,
    life: tuple[datetime, datetime],
) -> list[Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"kvservice {name}"[:64])])
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if name == "server":  # servers call each other too
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    certificate = (
        _builder(subject, key, life)
        .issuer_name(authority.certificate.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(signer, critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return _write(folder, name, certificate, key)


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, life: tuple[datetime, datetime]
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(life[0])
        .not_valid_after(life[1])
    )


def _usage(**uses: bool) -> x509.KeyUsage:
    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{name: uses.get(name, False) for name in names})


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(
    folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> list[Path]:
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    paths = [folder / f"{name}.key", folder / f"{name}.pem"]
    for path, data, mode in zip(paths, (private, public), (_PRIVATE, _PUBLIC), strict=True):
        replace_file(path, data, mode)
    return paths


def _public_bytes(key: object) -> bytes:
    assert hasattr(key, "public_bytes"), "every public key has them"
    encoded: bytes = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return encoded
