"""Long-term identities of parties, and sealed links between two parties for one session.

An identity is an Ed25519 key pair (RFC 8032) of an organisation, which signs. Others know its
public key from outside a session (a letter, a web page, a directory); what it signs then names who
agreed to what. A sealed link is end-to-end authenticated encryption.

Run by: every party, once for each peer. Protects from: everybody on the way, a relay
included (it learns sizes and timing). Does not give: forward secrecy against the later
theft of a run key, unless the run keys are fresh for each session, as `fresh_run_key`
makes them.

Key agreement is static X25519 (RFC 7748) between the run keys that the session's
contract names; the link key is HKDF-SHA256 (RFC 5869) of the shared secret, salted
with the hash of the contract, over the names and a hello of either end: 32 random bytes that it
draws for this link and sends in the clear. So no two links have the same key, whatever the other
end does, and a replayed session opens nowhere. A party that holds another contract, or heard
another hello, derives other keys, so its messages fail to authenticate. Messages are AES-256-GCM
with the message's sequence number as the nonce, one key for each direction.
"""

from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from nacl.bindings import crypto_core_ed25519_is_valid_point
from nacl.exceptions import TypeError as NaClTypeError
from nacl.exceptions import ValueError as NaClValueError

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.randomness import ForkCheck, fresh_key

__all__ = [
    "Identity",
    "RunKey",
    "SealedLink",
    "fresh_identity",
    "fresh_run_key",
    "verify_signature",
]

SIGNATURE_BYTES = 64
SEAL_OVERHEAD_BYTES = 16
HELLO_BYTES = 32
_KEY_BYTES = 32
_NONCE_BYTES = 12
_HASH_BYTES = 32


@dataclass(frozen=True)
class Identity:
    """A party's key pair; only `public` may be shown."""

    public: bytes
    _private: Ed25519PrivateKey = field(repr=False, compare=False)

    @classmethod
    def from_secret_bytes(cls, private: bytes) -> "Identity":
        """Restore the Ed25519 key pair from the 32 bytes of its private key. Raises
        LocalProtocolError: `private` has another number of bytes.
        """
        if len(private) != _KEY_BYTES:
            raise LocalProtocolError(f"an Ed25519 private key has 32 bytes, got {len(private)}")
        key = Ed25519PrivateKey.from_private_bytes(private)
        return cls(key.public_key().public_bytes_raw(), key)

    def secret_bytes(self) -> bytes:
        """Return the 32 bytes of the private key, for the owner's own file."""
        return self._private.private_bytes_raw()

    def sign(self, purpose: bytes, *parts: bytes) -> bytes:
        """Return the Ed25519 signature, 64 bytes, over a purpose and parts of a message. Each part
        is signed with its length, so that the same bytes divided in another way need another
        signature.

        `purpose`: a label that separates signatures for different uses.
        """
        return self._private.sign(_frame_parts(purpose, parts))

    def __reduce__(self) -> str:
        raise LocalProtocolError("an identity is a secret of its party and is never serialised")


def fresh_identity() -> Identity:
    """Generate a party's long-term key pair."""
    key = Ed25519PrivateKey.generate()
    return Identity(key.public_key().public_bytes_raw(), key)


def verify_signature(
    public: bytes, signature: bytes, purpose: bytes, *parts: bytes, signer: str
) -> None:
    """Raise RemoteProtocolError unless `signature` was made by `Identity.sign`, over this purpose
    and these parts of a message, by the holder of the private key that belongs to `public`.

    `public`: the signer's Ed25519 public key. `signer`: name of the party, for the error.
    """
    try:
        # Under a key of small order one signature is valid for every message.
        if not crypto_core_ed25519_is_valid_point(public):
            raise ValueError("no point of the group of prime order")
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _frame_parts(purpose, parts))
    except (InvalidSignature, ValueError, NaClTypeError, NaClValueError) as error:
        raise RemoteProtocolError(
            f"what {signer} signed does not fit the key by which it is known: it was altered, or "
            f"somebody else speaks in its name; ask {signer} for its public identity"
        ) from error


def _frame_parts(purpose: bytes, parts: tuple[bytes, ...]) -> bytes:
    """Return the bytes that are signed: purpose and parts, each preceded by its length."""
    all_parts = (b"secure-apfed " + purpose, *parts)
    return b"".join(len(part).to_bytes(8, "big") + part for part in all_parts)


@dataclass(frozen=True)
class RunKey:
    """A party's X25519 key pair for one session; only `public` may be shown."""

    public: bytes
    _private: X25519PrivateKey = field(repr=False, compare=False)

    @classmethod
    def from_secret_bytes(cls, private: bytes) -> "RunKey":
        """Restore the X25519 key pair from the 32 bytes of its private key. Raises
        LocalProtocolError: `private` has another number of bytes.
        """
        if len(private) != _KEY_BYTES:
            raise LocalProtocolError(
                f"an X25519 private key has {_KEY_BYTES} bytes, got {len(private)}"
            )
        key = X25519PrivateKey.from_private_bytes(private)
        return cls(key.public_key().public_bytes_raw(), key)

    def secret_bytes(self) -> bytes:
        """Return the 32 bytes of the private key, for a state that the owner encrypts
        for itself.
        """
        return self._private.private_bytes_raw()

    def derive_shared_key(self, peer_public: bytes, *, salt: bytes, info: bytes) -> bytes:
        """Return 32 key bytes that only this party and the holder of the private key that belongs
        to `peer_public` can derive: HKDF-SHA256 of the X25519 shared secret.

        `salt`, `info`: salt and context label of HKDF-SHA256.

        Raises RemoteProtocolError: the peer's key is malformed or of low order.
        """
        if len(peer_public) != _KEY_BYTES:
            raise RemoteProtocolError(
                f"an X25519 public key has {_KEY_BYTES} bytes, the peer's has {len(peer_public)}"
            )
        try:
            shared_secret = self._private.exchange(X25519PublicKey.from_public_bytes(peer_public))
        except ValueError as error:
            raise RemoteProtocolError("the peer's X25519 public key is of low order") from error
        return HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(shared_secret)

    def __reduce__(self) -> str:
        raise LocalProtocolError("a run key is a secret of its party and is never serialised")


def fresh_run_key() -> RunKey:
    """Generate a party's key pair for one session."""
    private = X25519PrivateKey.generate()
    return RunKey(private.public_key().public_bytes_raw(), private)


class SealedLink:
    """A party's end of an authenticated and encrypted link to one peer.

    Both ends send each other their `hello`, then call `agree`. Sequence numbers count from 0 in
    each direction and are the nonces: a repeated, missing or reordered message is refused, and so
    is any use in a forked process, which would use a nonce a second time.

    Args:
        me, peer: the two parties' names.
        run_key: this party's key pair.
        contract_hash: 32 bytes; both ends must hold the same contract.

    Attributes:
        hello: 32 random bytes of this end, public; the peer needs them.

    Raises:
        LocalProtocolError: `me` and `peer` are the same, or `contract_hash` has not 32 bytes.
    """

    def __init__(self, *, me: str, peer: str, run_key: RunKey, contract_hash: bytes) -> None:
        """Make the end of the party `me` of a link to `peer`; it has no keys before `agree`.

        `run_key`: this party's key pair for the session. `contract_hash`: SHA-256 of the contract,
        32 bytes, equal at both ends.

        Raises LocalProtocolError: `me` and `peer` are the same, or the hash has another size.
        """
        if me == peer:
            raise LocalProtocolError(f"{me!r} has no link to itself")
        if type(contract_hash) is not bytes or len(contract_hash) != _HASH_BYTES:
            # HKDF pads a shorter salt with zeros, so that two contracts could give the same keys.
            raise LocalProtocolError(
                f"{me}: the hash of a contract has {_HASH_BYTES} bytes; give its SHA-256"
            )
        self.me = me
        self.peer = peer
        self.hello = fresh_key()
        self._run_key = run_key
        self._contract_hash = contract_hash
        # For sending and for receiving; None before the keys are agreed.
        self._ciphers: tuple[AESGCM, AESGCM] | None = None
        # How many messages were encrypted and decrypted, which are the next sequence numbers.
        self._sent_count = 0
        self._received_count = 0
        self._fork_check = ForkCheck(f"the link of {me} to {peer}")

    def agree(self, peer_public: bytes, peer_hello: bytes) -> None:
        """Derive the keys of both directions from the peer's public key and the random bytes
        (hello) of both ends; called once.

        Args:
            peer_public: the peer's public key, as the contract names it.
            peer_hello: the `hello` of the peer's end, as it arrived; it needs no protection.

        Raises:
            LocalProtocolError: the keys are agreed already.
            RemoteProtocolError: the peer's public key or hello is malformed, or the hello is this
                end's own.
        """
        self._fork_check.require_own_process()
        if self._ciphers is not None:
            raise LocalProtocolError(
                f"the link of {self.me} to {self.peer} agreed its keys already; make another link"
            )
        is_other_bytes = type(peer_hello) is bytes and peer_hello != self.hello
        if not is_other_bytes or len(peer_hello) != HELLO_BYTES:
            raise RemoteProtocolError(
                f"{self.me} expects of {self.peer} a hello of {HELLO_BYTES} bytes other than its "
                "own, and got something else"
            )
        own_end = (self.me, self.hello)
        peer_end = (self.peer, peer_hello)
        self._ciphers = (
            self._make_cipher(peer_public, own_end, peer_end),
            self._make_cipher(peer_public, peer_end, own_end),
        )

    def _make_cipher(
        self, peer_public: bytes, sender: tuple[str, bytes], receiver: tuple[str, bytes]
    ) -> AESGCM:
        """Return AES-256-GCM for one direction. Its key depends on the names and the random bytes
        (hello) of both ends, so that no two links or directions have the same key.

        Args:
            peer_public: the peer's X25519 public key.
            sender, receiver: name and hello of the end that encrypts, and of the end that decrypts.
        """
        ends = b"".join(
            len(name.encode()).to_bytes(2, "big") + name.encode() + hello
            for name, hello in (sender, receiver)
        )
        info = b"secure-apfed link v2" + ends
        key = self._run_key.derive_shared_key(peer_public, salt=self._contract_hash, info=info)
        return AESGCM(key)

    @property
    def has_keys(self) -> bool:
        return self._ciphers is not None

    def _require_keys(self) -> tuple[AESGCM, AESGCM]:
        """Return the ciphers for sending and for receiving. Raises LocalProtocolError: no keys are
        agreed, or this is a forked process.
        """
        self._fork_check.require_own_process()
        if self._ciphers is None:
            raise LocalProtocolError(
                f"the link of {self.me} to {self.peer} has no keys yet; send its hello there, and "
                "call agree with the hello of the other end"
            )
        return self._ciphers

    def __reduce__(self) -> str:
        raise LocalProtocolError("a link holds keys and counts its nonces; it is never copied")

    @property
    def next_sequence(self) -> int:
        """Return the sequence number, from 0, of the next message that this end encrypts."""
        return self._sent_count

    def seal(self, plaintext: bytes, *, sequence: int, associated: bytes) -> bytes:
        """Encrypt `plaintext` for the peer, and authenticate it together with `associated`, which
        is not sent; return the ciphertext.

        `sequence`: the number of the message, from 0, which serves as the nonce.

        Raises LocalProtocolError: the number is not the next number, no keys are agreed, or this is
        a forked process.
        """
        cipher, _ = self._require_keys()
        if sequence != self._sent_count:
            raise LocalProtocolError(
                f"{self.me} to {self.peer}: the next message is number {self._sent_count}, got "
                f"{sequence}"
            )
        self._sent_count += 1
        return cipher.encrypt(sequence.to_bytes(_NONCE_BYTES, "big"), plaintext, associated)

    def open(self, sealed: bytes, *, sequence: int, associated: bytes) -> bytes:
        """Decrypt a message that the peer encrypted by `seal`.

        Args:
            sealed: the bytes of the message.
            sequence: number of the message, from 0.
            associated: the bytes that the peer authenticated with it.

        Raises RemoteProtocolError: the message was replayed, lost, reordered or altered, or
        encrypted under another contract or by another party; the link's state does not change then.
        """
        _, cipher = self._require_keys()
        if sequence != self._received_count:
            raise RemoteProtocolError(
                f"{self.me}: expected message {self._received_count} of {self.peer}, got "
                f"{sequence}; a message was replayed, lost or reordered"
            )
        try:
            plaintext = cipher.decrypt(sequence.to_bytes(_NONCE_BYTES, "big"), sealed, associated)
        except InvalidTag as error:
            raise RemoteProtocolError(
                f"{self.me}: message {sequence} of {self.peer} does not authenticate; "
                "it was altered, or the two parties do not hold the same contract"
            ) from error
        self._received_count += 1
        return plaintext
