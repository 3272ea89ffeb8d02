"""Renewing the certificate of one party of a sealed project, without a new comparison of
fingerprints.

Run by: the party, which requests and installs the certificate; the organiser, who issues it under
the authority that the project was sealed with; and others, who may note the renewal. A request is
signed by the party's identity in the sealed project, the answer by the organiser's, so both are as
certain as the words that were compared then. Protects from: requests and certificates of anybody
else. The sealed project, its words and all identities stay as they are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from cryptography.hazmat.primitives import serialization
from cryptography.x509 import load_pem_x509_certificate, load_pem_x509_certificates

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.base.files import load_bytes, write_atomically
from secure_apfed.base.names import Name
from secure_apfed.errors import ConfigError
from secure_apfed.exchange.certificates import Authority, Credentials, make_request
from secure_apfed.organisations.party import PartyFile, Tls
from secure_apfed.organisations.project import (
    AUTHORITY_KEY_FILE,
    Document,
    Hex32,
    Pem,
    SealedProject,
    SignedFile,
)
from secure_apfed.organisations.revocation import RENEWED_CERTIFICATE_FILE
from secure_apfed.runs.folder import SEALED_PROJECT, PartyFolder, require_open_project

__all__ = [
    "REQUEST_FILE",
    "CertificateRequest",
    "RenewedCertificate",
    "accept_certificate",
    "renew_certificate",
    "request_certificate",
]

REQUEST_FILE = "renewal-{}.json"
"""The name of the file that a party sends to the organiser, by the party's name."""
_NEXT_KEY_FILE = "next-key.pem"
_NEXT_CERTIFICATE_FILE = "next-certificate.pem"
_MAX_KEY_BYTES = 2**16


class CertificateRequest(Document):
    """A party's request to the organiser for a new TLS certificate.

    Attributes:
        project: digest (hex) of the project that all parties signed.
        request: the certificate signing request, in PEM.
    """

    kind: Literal["certificate request"] = "certificate request"
    project: Hex32
    request: Pem


class RenewedCertificate(Document):
    """The organiser's reply to a request: a party's new TLS certificate.

    Attributes:
        project: digest (hex) of the project that all parties signed.
        holder: the party whose certificate it is.
        certificate: the certificate, in PEM.
    """

    kind: Literal["renewed certificate"] = "renewed certificate"
    project: Hex32
    holder: Name
    certificate: Pem


def request_certificate(config: Path, *, new_key: bool = False) -> Path:
    """Write a party's signed request for a new TLS certificate; return its path. Run by the party.

    Args:
        config: the party's settings file.
        new_key: whether the certificate is for a new key, such as after the present one leaked. The
            present key stays in use until the certificate is accepted. After that the organiser
            cannot seal the project again from the party's former answer, which has the old key.

    Raises ConfigError: the party uses no TLS, or its folder has no sealed project.
    """
    settings_file = PartyFile.from_file(config)
    require_open_project(settings_file.folder)
    tls = _require_tls(settings_file, config)
    sealed, _ = _load_project(settings_file.folder)
    present_key = None if new_key else load_bytes(tls.key, max_bytes=_MAX_KEY_BYTES)
    request, key = make_request(settings_file.party, present_key)
    if new_key:
        write_atomically(settings_file.folder / _NEXT_KEY_FILE, key, private=True)
    identity = PartyFolder(settings_file.folder).load_identity()
    document = CertificateRequest(
        party=settings_file.party,
        identity=identity.public.hex(),
        project=sealed.digest.hex(),
        request=request.decode(),
    )
    path = settings_file.folder / REQUEST_FILE.format(settings_file.party)
    SignedFile.from_document(identity, document).write_file(path)
    return path


def renew_certificate(path: Path, folder: Path, *, days: float = 365) -> Path:
    """Issue a TLS certificate for a party's request; write the signed reply, and return its path.

    Run by the organiser. `path`: path of the request. `folder`: the organiser's folder. `days`: how
    long the certificate is valid.

    Raises:
        ConfigError: this is not the organiser's folder, it has no key of the certificate authority,
            or the party has an authority of its own.
        RemoteProtocolError: the request is not signed by a party of the sealed project, or belongs
            to another project.
    """
    require_open_project(folder)
    sealed, sealed_path = _load_project(folder)
    identity = PartyFolder(folder).load_identity()
    if sealed.identity != identity.public.hex():
        raise ConfigError(
            f"{folder} is not of {sealed.party}, who sealed {sealed_path} and alone renews "
            "certificates"
        )
    document = SignedFile.from_file(path).open_document(CertificateRequest, path)
    _require_signer(document, sealed, path, signer=document.party)
    if sealed.answer_documents[document.party].request is None:
        raise ConfigError(
            f"{path}: {document.party} has an authority of its own, which makes its certificates"
        )
    authority = Authority(*_load_authority(folder, sealed))
    renewed_certificate = RenewedCertificate(
        party=sealed.party,
        identity=sealed.identity,
        project=document.project,
        holder=document.party,
        certificate=authority.sign_request(
            document.request.encode(), document.party, days=days
        ).decode(),
    )
    renewed_path = folder / RENEWED_CERTIFICATE_FILE.format(document.party)
    SignedFile.from_document(identity, renewed_certificate).write_file(renewed_path)
    return renewed_path


def accept_certificate(path: Path, config: Path) -> RenewedCertificate:
    """Install a new TLS certificate if it is this party's own; else only store it.

    A running training continues with the old certificate until it is started again. A party that
    serves predictions restarts its session with the new one. If the process is killed, the same
    call completes the installation.

    `path`: path of the organiser's reply. `config`: this party's settings file.

    Raises:
        RemoteProtocolError: the reply is not from the organiser, or belongs to another project.
        ConfigError: the certificate fits no key of this party, or its authority is not in `tls.ca`.
    """
    settings_file = PartyFile.from_file(config)
    require_open_project(settings_file.folder)
    tls = _require_tls(settings_file, config)
    sealed, _ = _load_project(settings_file.folder)
    signed_file = SignedFile.from_file(path)
    renewed = signed_file.open_document(RenewedCertificate, path)
    _require_signer(renewed, sealed, path, signer=sealed.party)
    if renewed.holder not in sealed.answer_documents:
        raise RemoteProtocolError(f"{path}: {renewed.holder} is no party of this project")
    if renewed.holder == settings_file.party:
        _install_certificate(renewed.certificate.encode(), settings_file, tls)
    stored_path = settings_file.folder / RENEWED_CERTIFICATE_FILE.format(renewed.holder)
    if not (stored_path.exists() and stored_path.samefile(path)):
        signed_file.write_file(stored_path)
    return renewed


def _install_certificate(pem: bytes, settings_file: PartyFile, tls: Tls) -> None:
    """Replace a party's TLS certificate, and its private key if the new one is for a new key.

    `pem`: the new certificate. `tls`: paths of the party's certificate, key and authority.

    Raises ConfigError: the certificate fits no key of this party, or its authority is not in
        `tls.ca`.
    """
    next_certificate = settings_file.folder / _NEXT_CERTIFICATE_FILE
    key_path = _find_key_file(pem, settings_file.folder / _NEXT_KEY_FILE, tls.key)
    write_atomically(next_certificate, pem)
    try:
        # Called for its errors: the new certificate must fit the key before it replaces the old
        # one.
        Credentials.from_files(tls.ca, next_certificate, key_path, name=settings_file.party)
    finally:
        next_certificate.unlink()
    write_atomically(tls.certificate, pem)
    if key_path != tls.key:
        key_path.replace(tls.key)


def _find_key_file(certificate: bytes, next_key: Path, present_key: Path) -> Path:
    """Return the file of the private key that fits a certificate: the new key, or the one in use.

    `certificate`: in PEM. `next_key`: file of a key that was made for a request; it may not exist.
    `present_key`: file of the present key.
    """
    public_key = load_pem_x509_certificate(certificate).public_key()
    if next_key.exists():
        content = load_bytes(next_key, max_bytes=_MAX_KEY_BYTES)
        if serialization.load_pem_private_key(content, password=None).public_key() == public_key:
            return next_key
    return present_key


def _require_tls(file: PartyFile, config: Path) -> Tls:
    """Return the TLS settings of a party's file. Raises ConfigError: the party uses no TLS."""
    if file.tls is None:
        raise ConfigError(f"{config}: {file.party} has no `tls`, so it shows no certificate")
    return file.tls


def _load_project(folder: Path) -> tuple[SealedProject, Path]:
    """Return the project in a folder that all parties signed, verified, and its path.

    Raises ConfigError: the folder has none.
    """
    path = folder / SEALED_PROJECT
    if not path.exists():
        raise ConfigError(
            f"{folder} holds no {SEALED_PROJECT}; an authority of your own renews its certificates "
            "itself"
        )
    return SignedFile.from_file(path).open_document(SealedProject, path), path


def _require_signer(
    document: CertificateRequest | RenewedCertificate,
    sealed: SealedProject,
    path: Path,
    *,
    signer: str,
) -> None:
    """Check that a document belongs to the project and is signed by a party of it.

    The signature itself was verified before, against the identity in the document.

    Args:
        document: the document, with the identity that signed it.
        sealed: the project, which has the identity of each party.
        path: path of the document, for the error.
        signer: the party that must have signed.

    Raises RemoteProtocolError: another project, or another identity than the party's.
    """
    identity_by_party: Mapping[str, str] = {
        name: answer.identity for name, answer in sealed.answer_documents.items()
    }
    if document.project != sealed.digest.hex():
        raise RemoteProtocolError(
            f"{path}: it is of another project than {SEALED_PROJECT} here; ask {document.party} "
            "which of the two holds"
        )
    if document.party != signer or identity_by_party.get(signer) != document.identity:
        raise RemoteProtocolError(
            f"{path}: it is signed by {document.words!r} as {document.party}, and the sealed "
            f"project knows {signer} by another identity; ask {signer} by telephone who sent it"
        )


def _load_authority(folder: Path, sealed: SealedProject) -> tuple[bytes, bytes]:
    """Return certificate and private key of the project's certificate authority, in PEM.

    `folder`: the organiser's folder, which has the key. `sealed`: the project, which has the
    certificate.

    Raises ConfigError: the key is missing, or is not the key of the certificate.
    """
    path = folder / AUTHORITY_KEY_FILE
    if not path.exists():
        raise ConfigError(
            f"{path} is missing, which issues certificates of this project: put it back from its "
            "copy; without it, seal the answers again, and all compare the new words"
        )
    key = load_bytes(path, max_bytes=_MAX_KEY_BYTES)
    public = serialization.load_pem_private_key(key, password=None).public_key()
    for certificate in load_pem_x509_certificates(sealed.ca.encode()):
        if certificate.public_key() == public:
            return certificate.public_bytes(serialization.Encoding.PEM), key
    raise ConfigError(
        f"{path} is not the key of the authority that sealed this project; put it back"
    )
