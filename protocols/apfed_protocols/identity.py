"""Long-term identities: an Ed25519 key pair (RFC 8032) of each organisation, which signs.

Run by: every party. Others know its public key from outside a session (a letter, a web page, a
directory); what it signs then names who agreed to what. Protects from: whoever else speaks in its
name. Does not give: secrecy, which is the business of `apfed_protocols.seal`.
"""

from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from nacl.bindings import crypto_core_ed25519_is_valid_point
from nacl.exceptions import TypeError as NaClTypeError
from nacl.exceptions import ValueError as NaClValueError

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["SIGNATURE_BYTES", "Identity", "fresh_identity", "verify"]

SIGNATURE_BYTES = 64
_KEY_BYTES = 32


@dataclass(frozen=True)
class Identity:
    """A party's key pair; only `public` may be shown."""

    public: bytes
    _private: Ed25519PrivateKey = field(repr=False, compare=False)

    @classmethod
    def restored(cls, private: bytes) -> "Identity":
        """The key pair of 32 secret bytes.

        Raises:
            LocalProtocolError: another number of bytes.
        """
        if len(private) != _KEY_BYTES:
            raise LocalProtocolError(f"an Ed25519 private key has 32 bytes, got {len(private)}")
        key = Ed25519PrivateKey.from_private_bytes(private)
        return cls(key.public_key().public_bytes_raw(), key)

    def secret_bytes(self) -> bytes:
        """The 32 secret bytes, for the owner's own file."""
        return self._private.private_bytes_raw()

    def sign(self, purpose: bytes, *parts: bytes) -> bytes:
        """Sign these parts for one purpose; no parts of another cut have the same signature."""
        return self._private.sign(_framed(purpose, parts))

    def __reduce__(self) -> str:
        raise LocalProtocolError("an identity is a secret of its party and is never serialised")


def fresh_identity() -> Identity:
    """Make a key pair."""
    key = Ed25519PrivateKey.generate()
    return Identity(key.public_key().public_bytes_raw(), key)


def verify(public: bytes, signature: bytes, purpose: bytes, *parts: bytes, signer: str) -> None:
    """Return where the holder of `public` signed these parts for this purpose.

    Raises:
        RemoteProtocolError: it did not; names the signer.
    """
    try:
        # Under a key of small order one signature fits every message, and binds to none.
        if not crypto_core_ed25519_is_valid_point(public):
            raise ValueError("no point of the group of prime order")
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _framed(purpose, parts))
    except (InvalidSignature, ValueError, NaClTypeError, NaClValueError) as error:
        raise RemoteProtocolError(
            f"what {signer} signed does not fit the key by which it is known: it was altered, or "
            f"somebody else speaks in its name; ask {signer} for its public identity"
        ) from error


def _framed(purpose: bytes, parts: tuple[bytes, ...]) -> bytes:
    return b"".join(
        len(part).to_bytes(8, "big") + part for part in (b"secure-apfed " + purpose, *parts)
    )
