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
from typing import Any, Literal

from cryptography.hazmat.primitives import serialization
from cryptography.x509 import load_pem_x509_certificate, load_pem_x509_certificates

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.base.files import load_bytes, write_atomically
from secure_apfed.base.names import Name
from secure_apfed.errors import ConfigError
from secure_apfed.exchange.certificates import Authority, Credentials, make_request
from secure_apfed.organisations.party import PartyFile
from secure_apfed.organisations.project import (
    AUTHORITY_KEY,
    SEALED,
    Document,
    Hex32,
    Pem,
    SealedProject,
    SignedFile,
)
from secure_apfed.organisations.revocation import RENEWED
from secure_apfed.runs.folder import PartyFolder, require_open_project

__all__ = [
    "REQUESTED",
    "CertificateRequest",
    "RenewedCertificate",
    "accept_certificate",
    "renew_certificate",
    "request_certificate",
]

REQUESTED = "renewal-{}.json"
"""The name of the file that a party sends to the organiser, by the party's name."""
_NEXT_KEY = "next-key.pem"
_NEXT_CERTIFICATE = "next-certificate.pem"
_MAX_KEY = 2**16


class CertificateRequest(Document):
    """A party's request for a new certificate; `project`: digest (hex) of the sealed project."""

    kind: Literal["certificate request"] = "certificate request"
    project: Hex32
    request: Pem


class RenewedCertificate(Document):
    """The organiser's reply: the new certificate of the party `holder`."""

    kind: Literal["renewed certificate"] = "renewed certificate"
    project: Hex32
    holder: Name
    certificate: Pem


def request_certificate(config: Path, *, new_key: bool = False) -> Path:
    """Write a party's request to the organiser; return its path. Run by the party.

    Args:
        config: the party's file.
        new_key: whether the certificate is for another key, since the one in use leaked; the old
            one stays in use until the certificate is accepted. After that the project cannot be
            sealed again from the party's former reply to the proposal.

    Raises ConfigError: the party has no `tls`, or its folder no sealed project.
    """
    file = PartyFile.from_file(config)
    require_open_project(file.folder)
    tls = _require_tls(file, config)
    sealed, _ = _load_project(file.folder)
    in_use = None if new_key else load_bytes(tls.key, maximum=_MAX_KEY)
    request, key = make_request(file.party, in_use)
    if new_key:
        write_atomically(file.folder / _NEXT_KEY, key, private=True)
    identity = PartyFolder(file.folder).load_identity()
    document = CertificateRequest(
        party=file.party,
        identity=identity.public.hex(),
        project=sealed.digest.hex(),
        request=request.decode(),
    )
    path = file.folder / REQUESTED.format(file.party)
    SignedFile.from_document(identity, document).write_file(path)
    return path


def renew_certificate(path: Path, folder: Path, *, days: float = 365) -> Path:
    """Issue a certificate for a request; return the path of the reply. Run by the organiser.

    `path`: path of the request. `folder`: the organiser's folder. `days`: how long the certificate
    is valid.

    Raises:
        ConfigError: this is not the organiser's folder, or has no key of the authority.
        RemoteProtocolError: the request is not signed by the party of the sealed project, or
            belongs to another project.
    """
    require_open_project(folder)
    sealed, source = _load_project(folder)
    identity = PartyFolder(folder).load_identity()
    if sealed.identity != identity.public.hex():
        raise ConfigError(
            f"{folder} is not of {sealed.party}, who sealed {source} and alone renews certificates"
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
    renewed = folder / RENEWED.format(document.party)
    SignedFile.from_document(identity, renewed_certificate).write_file(renewed)
    return renewed


def accept_certificate(path: Path, config: Path) -> RenewedCertificate:
    """Install the new certificate at its party; record it at another party.

    A training continues with the old one until it is started again; a serving party restarts its
    session with the new one. If the process is killed, the same call completes it.

    `path`: path of the organiser's reply. `config`: this party's file.

    Raises:
        RemoteProtocolError: it is not from the organiser, or belongs to another project.
        ConfigError: it fits no key of this party, or its authority is not in `tls.ca`.
    """
    file = PartyFile.from_file(config)
    require_open_project(file.folder)
    tls = _require_tls(file, config)
    sealed, _ = _load_project(file.folder)
    signed = SignedFile.from_file(path)
    renewed = signed.open_document(RenewedCertificate, path)
    _require_signer(renewed, sealed, path, signer=sealed.party)
    if renewed.holder not in sealed.answer_documents:
        raise RemoteProtocolError(f"{path}: {renewed.holder} is no party of this project")
    is_own = renewed.holder == file.party
    if is_own:
        next_certificate = file.folder / _NEXT_CERTIFICATE
        pem = renewed.certificate.encode()
        key = _find_key_file(pem, file.folder / _NEXT_KEY, tls.key)
        write_atomically(next_certificate, pem)
        try:
            # Called for its errors: the new certificate must fit the key before it replaces the old
            # one.
            Credentials.from_files(tls.ca, next_certificate, key, name=file.party)
        finally:
            next_certificate.unlink()
        write_atomically(tls.certificate, pem)
        if key != tls.key:
            key.replace(tls.key)
    stored = file.folder / RENEWED.format(renewed.holder)
    if not (stored.exists() and stored.samefile(path)):
        signed.write_file(stored)
    return renewed


def _find_key_file(certificate: bytes, next_key: Path, in_use: Path) -> Path:
    """Return the file of the key that fits a certificate: the new key, or the one in use."""
    public = load_pem_x509_certificate(certificate).public_key()
    if next_key.exists():
        content = load_bytes(next_key, maximum=_MAX_KEY)
        if serialization.load_pem_private_key(content, password=None).public_key() == public:
            return next_key
    return in_use


def _require_tls(file: PartyFile, config: Path) -> Any:
    """Return the TLS settings of a party's file. Raises ConfigError: none are set."""
    if file.tls is None:
        raise ConfigError(f"{config}: {file.party} has no `tls`, so it shows no certificate")
    return file.tls


def _load_project(folder: Path) -> tuple[SealedProject, Path]:
    """Return the sealed project in a folder, verified, and its path. Raises ConfigError: none."""
    path = folder / SEALED
    if not path.exists():
        raise ConfigError(
            f"{folder} holds no {SEALED}; an authority of your own renews its certificates itself"
        )
    return SignedFile.from_file(path).open_document(SealedProject, path), path


def _require_signer(
    document: CertificateRequest | RenewedCertificate,
    sealed: SealedProject,
    path: Path,
    *,
    signer: str,
) -> None:
    """Raise RemoteProtocolError if a document is of another project, or not signed by the identity
    that the sealed project names for the party `signer`.

    `path`: path of the document, for the error.
    """
    identities: Mapping[str, str] = {
        name: answer.identity for name, answer in sealed.answer_documents.items()
    }
    if document.project != sealed.digest.hex():
        raise RemoteProtocolError(
            f"{path}: it is of another project than {SEALED} here; ask {document.party} which of "
            "the two holds"
        )
    if document.party != signer or identities.get(signer) != document.identity:
        raise RemoteProtocolError(
            f"{path}: it is signed by {document.words!r} as {document.party}, and the sealed "
            f"project knows {signer} by another identity; ask {signer} by telephone who sent it"
        )


def _load_authority(folder: Path, sealed: SealedProject) -> tuple[bytes, bytes]:
    """Return certificate and key of the project's authority, in PEM. Raises ConfigError: the key is
    missing, or another one.
    """
    path = folder / AUTHORITY_KEY
    if not path.exists():
        raise ConfigError(
            f"{path} is missing, which issues certificates of this project: put it back from its "
            "copy; without it, seal the answers again, and all compare the new words"
        )
    key = load_bytes(path, maximum=_MAX_KEY)
    public = serialization.load_pem_private_key(key, password=None).public_key()
    for certificate in load_pem_x509_certificates(sealed.ca.encode()):
        if certificate.public_key() == public:
            return certificate.public_bytes(serialization.Encoding.PEM), key
    raise ConfigError(
        f"{path} is not the key of the authority that sealed this project; put it back"
    )
