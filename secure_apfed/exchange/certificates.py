"""Certificates for TLS between parties: checked at both ends, and made for a project or a trial.

Run by: every party, on its own files and on a caller's certificate; and by whoever makes them. An
organisation may use its own authority: a party's certificate has the party's name as a DNS name
among its subject alternative names, for clients and servers. Protects from: strangers, and lost
keys that are listed as revoked. A party is authenticated by its identity, not by these.
"""

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.base.peer_text import quote_text
from secure_apfed.errors import ConfigError

RENEWAL = (
    "have another one made: in a project the party runs `secure-apfed certs request`, the "
    "organiser `certs renew`, and the party `certs accept`; no words are compared again"
)
_MAX_BYTES = 2**20
_MAX_NAMES = 8  # of a peer's certificate that an error quotes
_CLOCKS_APART = dt.timedelta(minutes=5)  # that a certificate is valid before it was made
_HEX = frozenset("0123456789abcdef")
_OTHER_USES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "encipher_only",
    "decipher_only",
)


def hash_certificate(certificate: x509.Certificate) -> str:
    """Return the SHA-256 of a certificate, hex."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def list_dns_names(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return a certificate's DNS names, one of which is the party's name; () if it has none."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, ValueError):
        return ()
    return tuple(names.value.get_values_for_type(x509.DNSName))


def _quote_names(names: Sequence[str]) -> str:
    """Return the names in a peer's certificate for an error text, quoted as untrusted text."""
    return ", ".join(map(quote_text, names[:_MAX_NAMES])) or "nobody"


def _make_revocation_entries(certificate: x509.Certificate) -> set[str]:
    """Return the two entries of a revocation list that would revoke this certificate.

    They are its SHA-256 and its serial number, in hex.
    """
    return {hash_certificate(certificate), f"{certificate.serial_number:x}"}


def make_revocation_entries(pem: bytes) -> set[str]:
    """Return the entries of a revocation list that would revoke a certificate in PEM.

    They are its SHA-256 and its serial number, in hex; none if `pem` is not a certificate.
    """
    try:
        return _make_revocation_entries(x509.load_pem_x509_certificate(pem))
    except ValueError:
        return set()


def load_revocations(path: Path | None) -> frozenset[str]:
    """Return the revoked certificates and identities in a file; empty if `path` is None.

    Each line has, in hex, a certificate's SHA-256 or serial number, or an identity (a public key).
    Text after a `#` is a comment. Colons are ignored; leading zeros too, in serial numbers, since
    `make_revocation_entries` writes none.

    Raises ConfigError: the file cannot be read, or a line has something else.
    """
    if path is None:
        return frozenset()
    entries = set()
    lines = _load_file(path, "revoked").decode("utf-8", "replace").splitlines()
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].strip().lower().replace(":", "")
        if entry and not set(entry) <= _HEX:
            raise ConfigError(
                f"{path}, line {number}: expected a certificate's SHA-256 or serial number, or "
                f"an identity, in hex, got {entry[:80]!r}"
            )
        is_serial_number = len(entry) < 64  # a digest or a public key has 64 digits
        entries.add(entry.lstrip("0") if is_serial_number else entry)
    return frozenset(entries - {""})


class RevokedList:
    """A list of revoked certificates and identities; it is read again whenever its file changes.

    Args:
        path: path of the list; None: nothing is revoked.
    """

    def __init__(self, path: Path | None) -> None:
        """Remember the file; it is read at the first use and again whenever it changes."""
        self._path = path
        # Time of change, size and inode of the file as it was read last.
        self._file_version: tuple[int, int, int] | None = None
        self._revoked: frozenset[str] = frozenset()

    def load_entries(self) -> frozenset[str]:
        """Return the current entries; read the file again if it has changed.

        Raises ConfigError: the file is missing or unreadable.
        """
        if self._path is None:
            return self._revoked
        try:
            status = self._path.stat()
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read ({error.strerror})") from error
        file_version = (status.st_mtime_ns, status.st_size, status.st_ino)
        if file_version != self._file_version:
            self._revoked = load_revocations(self._path)
            self._file_version = file_version
        return self._revoked


@dataclass(frozen=True)
class Credentials:
    """The certificates and the key that a party uses in TLS, in PEM; the key is never printed.

    Attributes:
        ca: the certificates of the authorities that the party trusts.
        certificate: the party's own, then those that signed it, if any.
        key: the private key of its own certificate, without a password.
    """

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    @classmethod
    def from_files(
        cls,
        ca: Path,
        certificate: Path,
        key: Path,
        *,
        name: str | None,
        revoked: frozenset[str] = frozenset(),
    ) -> "Credentials":
        """Load certificates and key, and check them as the peers will check them in TLS.

        Args:
            ca: PEM file with the certificates of the authorities that the party trusts.
            certificate: PEM file with the party's certificate, then those that signed it, if any.
            key: PEM file with the private key of the party's certificate, without a password.
            name: the party's name, which the certificate must have; None: any.
            revoked: entries of a revocation list, see `load_revocations`.

        Raises ConfigError: a file cannot be read, or the peers would refuse the certificate; names
            the file and the fault.
        """
        loaded = cls(
            _load_file(ca, "ca"), _load_file(certificate, "certificate"), _load_file(key, "key")
        )
        try:
            own_certificate, *chain = x509.load_pem_x509_certificates(loaded.certificate)
            private_key = serialization.load_pem_private_key(loaded.key, password=None)
            authorities = x509.load_pem_x509_certificates(loaded.ca)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(
                f"tls: {ca}, {certificate} or {key} is not what it should be in PEM ({error}); a "
                "key has no password, and a certificate comes before those that signed it"
            ) from error
        names = list_dns_names(own_certificate)
        now = dt.datetime.now(dt.UTC)
        # TLS itself checks each certificate of a chain between this one and its authority.
        is_trusted = bool(chain) or any(
            _has_issuer(own_certificate, authority) for authority in authorities
        )
        fault = ""
        if private_key.public_key() != own_certificate.public_key():
            raise ConfigError(f"tls.key: {key} is not the key of {certificate}; name its own")
        if now > own_certificate.not_valid_after_utc:
            fault = f"has expired at {own_certificate.not_valid_after_utc:%Y-%m-%d}; {RENEWAL}"
        elif now < own_certificate.not_valid_before_utc:
            start = own_certificate.not_valid_before_utc
            fault = f"is valid from {start} on; set the clock, or wait"
        elif not is_trusted:
            fault = (
                f"is of another authority than those in {ca}; have one made by the authority that "
                "all parties believe"
            )
        elif name is not None and name not in names:
            fault = (
                f"is for {_quote_names(names)}, not for {name}; a party's certificate has "
                "the party's name as a DNS name"
            )
        elif _make_revocation_entries(own_certificate) & revoked:
            fault = "is revoked; have another one made"
        if fault:
            raise ConfigError(f"tls.certificate: {certificate} {fault}")
        return loaded

    @property
    def digest(self) -> str:
        """The SHA-256 of the party's own certificate, hex."""
        return hash_certificate(x509.load_pem_x509_certificate(self.certificate))


def _has_issuer(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Return whether this authority issued and signed the certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def require_caller(name: str, pem: bytes, revoked: frozenset[str]) -> None:
    """Check the TLS certificate of a caller that claims to be the party `name`.

    `pem`: the certificate in PEM, whose signature TLS has verified. `revoked`: entries of a
    revocation list, see `load_revocations`.

    Raises RemoteProtocolError: the certificate has another name, is revoked, or is not readable.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise RemoteProtocolError(f"{name} came without a certificate that can be read") from error
    names = list_dns_names(certificate)
    if name not in names:
        raise RemoteProtocolError(
            f"{name} came with a certificate for {_quote_names(names)}; where a proxy "
            f"calls for {name}, say behind_proxy: true of {name} in the party's file"
        )
    if _make_revocation_entries(certificate) & revoked:
        raise RemoteProtocolError(
            f"the certificate of {name} is revoked; {name} has another one made (secure-apfed "
            "certs request)"
        )


@dataclass(frozen=True)
class Authority:
    """A certificate authority, which issues the parties' certificates.

    Attributes:
        certificate: the authority's self-signed certificate, in PEM.
        key: the authority's private key, in PEM.
    """

    certificate: bytes
    key: bytes = field(repr=False)

    def issue_certificate(self, name: str, *, days: float = 365) -> Credentials:
        """Create a key and a certificate for this party, valid as a server and as a client.

        `name`: the party's name. `days`: how long the certificate is valid.
        """
        request, key = make_request(name)
        certificate = self.sign_request(request, name, days=days)
        return Credentials(self.certificate, certificate, key)

    def sign_request(self, request: bytes, name: str, *, days: float = 365) -> bytes:
        """Return a certificate, in PEM, for the key in a certificate signing request.

        Everything else in the request is ignored, so that a party cannot choose another name.

        Args:
            request: the signing request in PEM, untrusted.
            name: the party's name, which the certificate gets.
            days: how long the certificate is valid.

        Raises:
            RemoteProtocolError: not a request, or not signed by its own key.
            ConfigError: the authority's own key is not of elliptic curves.
        """
        public_key = _load_requested_key(request, name)
        authority = x509.load_pem_x509_certificate(self.certificate)
        authority_key = serialization.load_pem_private_key(self.key, password=None)
        if not isinstance(authority_key, ec.EllipticCurvePrivateKey):
            raise ConfigError("the authority's key is of another kind than is made here")
        basic_constraints = x509.BasicConstraints(ca=False, path_length=None)
        allowed_names = x509.SubjectAlternativeName([x509.DNSName(name)])
        # A party may dial others, and be dialled by them.
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
        builder = (
            _make_builder(name, public_key, days)
            .issuer_name(authority.subject)
            .add_extension(basic_constraints, critical=True)
            .add_extension(allowed_names, critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(signed_by, critical=False)
        )
        return _encode_pem(builder.sign(authority_key, hashes.SHA256()))


def _load_requested_key(request: bytes, name: str) -> ec.EllipticCurvePublicKey:
    """Return the public key in a certificate signing request, which must be signed by that key.

    `request`: in PEM, untrusted. `name`: the party that sent it, for the error.

    Raises RemoteProtocolError: not a request, or not signed by its own key.
    """
    try:
        parsed_request = x509.load_pem_x509_csr(request)
        public_key = parsed_request.public_key()
        if not parsed_request.is_signature_valid or not isinstance(
            public_key, ec.EllipticCurvePublicKey
        ):
            raise ValueError("its key is of another kind, or did not sign it")
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise RemoteProtocolError(
            f"{name} sent no certificate request in PEM ({error}); it has to answer anew"
        ) from error
    return public_key


def make_request(name: str, key: bytes | None = None) -> tuple[bytes, bytes]:
    """Return a certificate signing request for this party's name, and its private key, in PEM.

    `key`: a private key that an earlier call returned, in PEM; None: create one.

    Raises ConfigError: `key` is not of elliptic curves.
    """
    private_key = ec.generate_private_key(ec.SECP256R1())
    if key is not None:
        loaded_key = serialization.load_pem_private_key(key, password=None)
        if not isinstance(loaded_key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"the key of {name} is of another kind than is made here")
        private_key = loaded_key
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    request = builder.sign(private_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    return request, _encode_private_key(private_key)


def make_authority(name: str = "secure-apfed authority", *, days: float = 3650) -> Authority:
    """Create a self-signed authority, which can issue certificates to parties only.

    `name`: the authority's name. `days`: how long its certificate is valid.
    """
    private_key = ec.generate_private_key(ec.SECP256R1())
    public_key = private_key.public_key()
    own_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    # A path length of 0: what it signs cannot be an authority itself.
    basic_constraints = x509.BasicConstraints(ca=True, path_length=0)
    other_uses = dict.fromkeys(_OTHER_USES, False)
    key_usage = x509.KeyUsage(key_cert_sign=True, crl_sign=True, **other_uses)
    key_digest = x509.SubjectKeyIdentifier.from_public_key(public_key)
    builder = (
        _make_builder(name, public_key, days)
        .issuer_name(own_name)
        .add_extension(basic_constraints, critical=True)
        .add_extension(key_usage, critical=True)
        .add_extension(key_digest, critical=False)
    )
    certificate = builder.sign(private_key, hashes.SHA256())
    return Authority(_encode_pem(certificate), _encode_private_key(private_key))


def _make_builder(
    name: str, public: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    """Return an unsigned certificate with subject, key, serial number and period of validity.

    It is valid from a few minutes ago, since the parties' clocks may differ.

    `name`: name of the subject. `public`: the subject's public key. `days`: how long it is valid;
    negative for a certificate that has expired already.
    """
    now = dt.datetime.now(dt.UTC)
    end = now + dt.timedelta(days=days)
    # An expired certificate starts before its end, too.
    start = min(now, end) - _CLOCKS_APART
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
    )


def _encode_pem(certificate: x509.Certificate) -> bytes:
    """Encode a certificate in PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def _encode_private_key(private_key: ec.EllipticCurvePrivateKey) -> bytes:
    """Encode a private key in PEM, without a password."""
    return private_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _load_file(path: Path, setting: str) -> bytes:
    """Return the content of a file that a setting below `tls` names.

    `setting`: the setting, such as "ca", for the error.

    Raises ConfigError: the file is unreadable or too large.
    """
    try:
        with path.open("rb") as file:
            # One byte more than allowed, so that a file that is too large shows.
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"tls.{setting}: {path} cannot be read ({error.strerror}); name the file, or have "
            "secure-apfed project make it"
        ) from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"tls.{setting}: {path} has more than {_MAX_BYTES} bytes")
    return content
