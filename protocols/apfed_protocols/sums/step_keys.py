"""The secrets that a passive makes afresh for each step, and how others hold shares of them.

Run by: passives (make, seal, open) and the aggregator (rebuild from shares). Protects from:
fewer than the threshold of passives, whatever they can compute; and from yesterday's shares: keys
serve one step and are forgotten, so what is opened for one step opens no other. Does not give:
protection from a passive that deals false shares, or answers with one; what is rebuilt is compared
with what its owner announced, and a step in which such a share is needed has no sum.

After Bonawitz et al. 2017, figure 4, rounds 0 and 1: a mask key pair (X25519) and a self-mask
seed, each derived from a 16-byte secret that is shared by Shamir 1979 over GF(2^128), through
PyCryptodome, whose coefficients come from the operating system's generator. Letters: u deals, v
holds.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from Crypto.Protocol.SecretSharing import Shamir
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.randomness import fresh_key
from apfed_protocols.seal import SEAL_OVERHEAD_BYTES, RunKey
from apfed_protocols.sums.agreement import SumAgreement
from apfed_protocols.sums.roles import KeepsSecrets

__all__ = [
    "ANNOUNCEMENT_BYTES",
    "PARCEL_BYTES",
    "SECRET_BYTES",
    "Announcement",
    "Held",
    "StepKeys",
    "join",
    "rebuilt_key",
    "rebuilt_seed",
    "split",
]

SECRET_BYTES = 16
"""Bytes of a secret, and of each share of it."""

_PUBLIC_BYTES = _DIGEST_BYTES = 32
_HELD_BYTES = _PUBLIC_BYTES + 2 * SECRET_BYTES

ANNOUNCEMENT_BYTES = _PUBLIC_BYTES + _DIGEST_BYTES
"""Bytes of what one passive tells all, for one step."""

PARCEL_BYTES = _HELD_BYTES + SEAL_OVERHEAD_BYTES
"""Bytes of what one passive seals for another, for one step."""


@dataclass(frozen=True)
class Announcement:
    """What everybody may know of one passive's keys of one step.

    Attributes:
        public: its X25519 mask key.
        commitment: a digest of its self-mask seed.
    """

    public: bytes
    commitment: bytes

    def pack(self) -> bytes:
        return self.public + self.commitment

    @classmethod
    def parse(cls, data: bytes, *, sender: str) -> "Announcement":
        """Raise RemoteProtocolError on anything but the bytes of an announcement."""
        if len(data) != ANNOUNCEMENT_BYTES:
            raise RemoteProtocolError(
                f"{sender} announced its keys in {len(data)} bytes, expected {ANNOUNCEMENT_BYTES}"
            )
        return cls(data[:_PUBLIC_BYTES], data[_PUBLIC_BYTES:])


@dataclass(frozen=True)
class Held(KeepsSecrets):
    """What v holds of u's keys of one step."""

    public: bytes
    key_share: bytes = field(repr=False)
    seed_share: bytes = field(repr=False)

    def pack(self) -> bytes:
        return self.public + self.key_share + self.seed_share

    @classmethod
    def parse(cls, data: bytes, *, sender: str) -> "Held":
        """Raise RemoteProtocolError on anything but the bytes of such a record."""
        if len(data) != _HELD_BYTES:
            raise RemoteProtocolError(
                f"{sender} dealt shares in {len(data)} bytes, expected {_HELD_BYTES}"
            )
        middle = _PUBLIC_BYTES + SECRET_BYTES
        return cls(data[:_PUBLIC_BYTES], data[_PUBLIC_BYTES:middle], data[middle:])


class StepKeys(KeepsSecrets):
    """One passive's secrets of one step, and all shares of them.

    Args:
        agreement: of the sum; every contributor has a share, at its position.
        threshold: shares that give a secret.
        owner: the passive.
    """

    def __init__(self, agreement: SumAgreement, threshold: int, owner: str) -> None:
        key_secret, seed_secret = (fresh_key()[:SECRET_BYTES] for _ in range(2))
        self.key = _mask_key(key_secret, agreement, owner)
        self.seed = _self_mask_seed(seed_secret, agreement, owner)
        self._agreement = agreement
        holders = len(agreement.contributors)
        self._key_shares = split(key_secret, threshold=threshold, holders=holders)
        self._seed_shares = split(seed_secret, threshold=threshold, holders=holders)

    @property
    def announcement(self) -> Announcement:
        """What everybody may know of them."""
        return Announcement(self.key.public, _commitment(self.seed))

    def held_by(self, holder: str) -> Held:
        """What `holder` is to hold of them."""
        position = self._agreement.position(holder)
        return Held(self.key.public, self._key_shares[position], self._seed_shares[position])


def rebuilt_key(
    shares: Mapping[int, bytes], announced: Announcement, agreement: SumAgreement, owner: str
) -> RunKey:
    """The mask key pair that these shares give.

    Raises:
        RemoteProtocolError: they do not give the key that its owner announced.
    """
    key = _mask_key(join(shares), agreement, owner)
    if key.public != announced.public:
        raise _false_shares(owner)
    return key


def rebuilt_seed(
    shares: Mapping[int, bytes], announced: Announcement, agreement: SumAgreement, owner: str
) -> bytes:
    """The self-mask seed that these shares give.

    Raises:
        RemoteProtocolError: they do not give the seed that its owner announced.
    """
    seed = _self_mask_seed(join(shares), agreement, owner)
    if _commitment(seed) != announced.commitment:
        raise _false_shares(owner)
    return seed


def split(secret: bytes, *, threshold: int, holders: int) -> Sequence[bytes]:
    """Return the shares of 16 secret bytes, one for each of `holders`, in their order.

    Any `threshold` of them (1 to `holders`) give the secret.
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= holders:
        raise LocalProtocolError(
            f"a secret of {SECRET_BYTES} bytes is shared among at least `threshold` holders, got "
            f"{len(secret)} bytes, threshold {threshold} and {holders} holders"
        )
    return [share for _, share in Shamir.split(threshold, holders, secret, False)]


def join(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of which these are shares.

    Args:
        shares: exactly as many as the threshold, by the holder's position from 0. With fewer,
            or a false one among them, the result is some other 16 bytes.
    """
    if not shares or any(len(share) != SECRET_BYTES for share in shares.values()):
        raise LocalProtocolError(f"a secret is joined from shares of {SECRET_BYTES} bytes each")
    return Shamir.combine([(holder + 1, share) for holder, share in shares.items()], False)


def _mask_key(secret: bytes, agreement: SumAgreement, owner: str) -> RunKey:
    return RunKey.restored(_derived(secret, agreement, b"mask key of " + owner.encode()))


def _self_mask_seed(secret: bytes, agreement: SumAgreement, owner: str) -> bytes:
    return _derived(secret, agreement, b"self mask of " + owner.encode())


def _derived(secret: bytes, agreement: SumAgreement, use: bytes) -> bytes:
    info = b"secure-apfed step keys v1 " + use
    return HKDF(algorithm=SHA256(), length=32, salt=agreement.digest, info=info).derive(secret)


def _commitment(seed: bytes) -> bytes:
    return hashlib.sha256(b"secure-apfed self mask v1" + seed).digest()


def _false_shares(owner: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"the shares of {owner}'s secret do not give what {owner} announced: {owner} dealt false "
        "shares, or a passive answered with one; this step has no sum"
    )
