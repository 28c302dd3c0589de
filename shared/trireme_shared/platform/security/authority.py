"""A small certificate authority in a folder: `ca.pem` and `ca-key.pem`, and certificates that it has signed.

create_authority(folder) ─► ca.pem, ca-key.pem
issue(folder, "trireme", hosts) ─► trireme.pem, trireme-key.pem
again, hosts_of(trireme.pem) ─► renewed

Keys are P-256 and only their owner can read them. One certificate serves and calls: members of a cluster do
both.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from trireme_shared.platform.runtime import clock
from trireme_shared.platform.security import private_files
from trireme_shared.protocol.errors import Conflict, InvalidArgument

CA, CA_KEY = "ca.pem", "ca-key.pem"
AUTHORITY_DAYS = 3650
LONGEST_DAYS = 825  # what clients still accept of a server
SLACK = timedelta(minutes=5)  # clocks of other hosts may be behind


def create_authority(folder: Path) -> None:
    """A new one. Raises Conflict if the folder has one already, InvalidArgument if it cannot be written."""
    if (folder / CA).exists() or (folder / CA_KEY).exists():
        raise Conflict(
            f"{folder} has a certificate authority already", hint="choose another folder, or remove it"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InvalidArgument(f"{folder} cannot be made: {error.strerror}") from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Trireme cluster authority")])
    begin = _now() - SLACK
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(folder / CA_KEY, _pem(key), 0o600)
    _write(folder / CA, made.public_bytes(serialization.Encoding.PEM), 0o644)


def issue(folder: Path, name: str, hosts: tuple[str, ...], days: int) -> datetime:
    """`<name>.pem` and `<name>-key.pem` for `hosts` (names and addresses), replacing those of before; when it
    ends. Raises InvalidArgument."""
    if not 1 <= days <= LONGEST_DAYS:
        raise InvalidArgument(f"a certificate can be valid for 1 to {LONGEST_DAYS} days, not {days}")
    authority, signer = _authority(folder)
    key, begin = ec.generate_private_key(ec.SECP256R1()), _now() - SLACK
    end = min(begin + timedelta(days=days), authority.not_valid_after_utc)
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(both, critical=False)
        .add_extension(x509.SubjectAlternativeName([_general(host) for host in hosts]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA256())
    )
    _write(folder / f"{name}-key.pem", _pem(key), 0o600)
    _write(folder / f"{name}.pem", made.public_bytes(serialization.Encoding.PEM), 0o644)
    return end


def hosts_of(path: Path) -> tuple[str, ...]:
    """The names and addresses that the certificate `path` is for. Raises InvalidArgument."""
    try:
        made = x509.load_pem_x509_certificate(path.read_bytes())
        named = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise InvalidArgument(f"{path} is no certificate that could be renewed: {error}") from error
    return tuple(str(each.value) for each in named if isinstance(each, x509.DNSName | x509.IPAddress))


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        authority = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidArgument(f"the certificate authority in {folder} cannot be used: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != authority.public_key():
        raise InvalidArgument(f"{folder / CA_KEY} is not the key of {folder / CA}")
    if authority.not_valid_after_utc <= _now():
        ended = authority.not_valid_after_utc.date()
        raise InvalidArgument(
            f"the certificate authority in {folder} has expired on {ended}; make a new one elsewhere"
        )
    return authority, key


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host.strip("[]")))
    except ValueError:
        pass
    if not host.isascii() or any(character in host for character in ":/@ ") or not host.strip("."):
        raise InvalidArgument(f"{host!r} is no host name or address; write it without scheme and port")
    return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, mode: int) -> None:
    try:
        private_files.replace(path, content, mode)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be written: {error.strerror}") from error


def _now() -> datetime:
    return datetime.fromtimestamp(clock.wall_time(), UTC).replace(microsecond=0)
