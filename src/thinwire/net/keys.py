"""Keys and certificates: the hub's authority, and the certificates that it signs for members.

All keys are P-256: gRPC's TLS does not take Ed25519. A private key is made where it is used and never leaves that
machine. The subject of a certificate is a member's name, or `hub`. The DNS name in it, `NAME.member.thinwire` or
`hub.thinwire`, distinguishes the two, so a member cannot act as the hub.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from thinwire.comm.private_files import read_private
from thinwire.errors import ConfigurationError, LinkError

HUB = "hub.thinwire"
AUTHORITY_DAYS = 3650
IN_FORCE, NEXT = "authority", "authority-next"  # files in the hub's folder, without .key and .pem
SKEW = timedelta(minutes=5)  # the largest difference between the clocks of two machines
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)


def check_name(name: str) -> str:
    """Return `name` if it is valid for a member. Raises `ConfigurationError`."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"name {ascii(name)[:80]}: 1 to 63 small letters, digits and hyphens are needed, such as oslo-2."
        )
    return name


@dataclass(frozen=True)
class Credentials:
    """A private key with its certificate, and the authorities that it trusts; all as PEM."""

    key: bytes
    certificate: bytes
    authorities: bytes


def new_key() -> bytes:
    """A fresh private key, as PEM."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def private(key: bytes, file: object = "a file") -> ec.EllipticCurvePrivateKey:
    """The private key in a PEM, the content of `file`. Raises `ConfigurationError`."""
    try:
        found = serialization.load_pem_private_key(key, None)
    except (ValueError, TypeError):
        raise ConfigurationError(f"{file} is empty or damaged: it holds no private key; restore it.") from None
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(f"{file} holds a private key of another kind than P-256; restore the original file.")
    return found


def fingerprint(certificate: x509.Certificate) -> bytes:
    """SHA-256 of the whole certificate."""
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()


def key_digest(holder: x509.Certificate | x509.CertificateSigningRequest) -> bytes:
    """SHA-256 of the public key of `holder`; the hub binds a name to it."""
    public = holder.public_key()
    return hashlib.sha256(
        public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    ).digest()


def member_name(certificate: x509.Certificate) -> str:
    """The name of the member for which the authority signed `certificate`. Raises `LinkError` for any other certificate."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (dns,) = names.get_values_for_type(x509.DNSName)
    except (x509.ExtensionNotFound, ValueError):
        raise LinkError("the certificate that was presented has no name of a member") from None
    name, _, rest = dns.partition(".")
    if rest != "member.thinwire" or not _NAME.fullmatch(name):
        raise LinkError("the certificate that was presented is not a member's")
    return name


def member_dns(name: str) -> str:
    """The DNS name in the certificate of the member `name`."""
    return f"{name}.member.thinwire"


def request(key: bytes, name: str) -> bytes:
    """A request for a certificate, signed with `key`, as DER."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, check_name(name))])
    built = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(private(key), hashes.SHA256())
    return built.public_bytes(serialization.Encoding.DER)


def opened_request(der: bytes) -> x509.CertificateSigningRequest:
    """Parse a request, and check that its sender holds the key. Raises `LinkError`."""
    try:
        found = x509.load_der_x509_csr(der)
        key = found.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise LinkError("the request for a certificate has a key of another kind; a P-256 key is needed")
        if not found.is_signature_valid:
            raise LinkError("the request for a certificate is not signed by its own key")
    except (ValueError, InvalidSignature, TypeError):
        raise LinkError("the request for a certificate cannot be read") from None
    return found


class Authority:
    """An authority of the hub: its key and its own certificate, in `folder`, made when they are missing."""

    def __init__(self, folder: Path, name: str = IN_FORCE) -> None:
        key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
        if not certificate.exists():  # it is written last, so if it exists the pair is complete
            made = new_key()
            write_private(key, made)
            write_private(certificate, _authority_certificate(private(made)))
        self._key = private(read_private(key, "the key of the hub's authority"), key)
        self.pem = certificate.read_bytes()
        try:
            self.certificate = x509.load_pem_x509_certificate(self.pem)
        except ValueError:
            raise ConfigurationError(
                f"{certificate} is empty or damaged: the certificate of the hub's authority is needed, by which members know the hub. Restore "
                "it from a copy, or begin a new hub in another --out, for which all members need new tokens."
            ) from None
        self.fingerprint = fingerprint(self.certificate)

    def issue(
        self, holder: x509.CertificateSigningRequest, dns: str, lifetime: timedelta, since: datetime | None = None
    ) -> bytes:
        """Sign a certificate for the key of `holder` under the DNS name `dns`: of a server for the hub, of a client for members. Valid from
        `since` on if that is long ago; as PEM.
        """
        now = datetime.now(UTC)
        common = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, dns)])
        built = (
            x509.CertificateBuilder()
            .subject_name(common)
            .issuer_name(self.certificate.subject)
            .public_key(holder.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(since or now, now - SKEW))
            .not_valid_after(now + lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(dns)]), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH if dns == HUB else ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
        )
        return built.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def hub_credentials(self, lifetime: timedelta, trusted: bytes) -> Credentials:
        """A fresh key and certificate for the hub as a server, which trusts the authorities `trusted`."""
        # A member whose clock is behind takes a renewed one, too.
        key, since = new_key(), self.certificate.not_valid_before_utc
        certificate = self.issue(opened_request(request(key, "hub")), HUB, lifetime, since)
        return Credentials(key, certificate, trusted)

    def present_in(self, context: ssl.SSLContext) -> None:
        """Have a server present the authority's own certificate, so that a machine that knows its fingerprint can check the server."""
        key = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        with tempfile.NamedTemporaryFile(
            prefix="thinwire-"
        ) as file:  # only its owner can read it; `ssl` reads files alone
            file.write(key + self.pem)
            file.flush()
            context.load_cert_chain(file.name)


class Authorities:
    """The authorities of a hub: the one in force, and during a replacement the next one, which already signs for members.

    Members get both. The hub presents the one in force, which absent members know; `replaced` ends it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with _locked(folder):
            if (folder / f"{NEXT}.pem").exists() and not (folder / f"{NEXT}.key").exists():
                (folder / f"{NEXT}.pem").replace(folder / f"{IN_FORCE}.pem")  # killed in the middle of `replaced`
            self.own = Authority(folder)
            self.next = Authority(folder, NEXT) if (folder / f"{NEXT}.pem").exists() else None

    @property
    def issuer(self) -> Authority:
        """The authority that signs for members."""
        return self.next or self.own

    @property
    def trusted(self) -> bytes:
        """All authorities, as PEM."""
        return self.own.pem + (self.next.pem if self.next else b"")

    def begun(self) -> Authorities:
        """The authorities with a new next one."""
        with _locked(self._folder):
            Authority(self._folder, NEXT)
        return Authorities(self._folder)

    def replaced(self) -> Authorities:
        """The authorities with the next one in force, and without the previous one."""
        with _locked(self._folder):
            for kind in ("key", "pem"):
                (self._folder / f"{NEXT}.{kind}").replace(self._folder / f"{IN_FORCE}.{kind}")
        return Authorities(self._folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A context in which no other thread or process reads or changes the authorities of `folder`: a hub runs while its owner rotates them."""
    file = os.open(folder / "authority.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # a file system without locks; waiting for one that is taken is no error
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _authority_certificate(key: ec.EllipticCurvePrivateKey) -> bytes:
    now = datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "thinwire authority " + os.urandom(4).hex())])
    usage = x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # a new hub admits a member whose clock is behind
        .not_valid_after(now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HUB)]), critical=False)
    )
    return built.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def private_folder(folder: Path) -> Path:
    """Make `folder`, which only its owner can read, if it is missing; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # owned by another user, or a file system without modes; the files in it are private
        folder.chmod(0o700)
    return folder


def write_private(path: Path, data: bytes) -> None:
    """Write `path` whole or not at all, readable by its owner alone; the data are on the disk on return."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(file, "wb") as stream:
            if os.geteuid() == 0:  # root rotates the authority of a hub that another user runs
                owner = path.parent.stat()
                os.fchown(file, owner.st_uid, owner.st_gid)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system that does not flush folders
            os.fsync(folder)
    finally:
        os.close(folder)
