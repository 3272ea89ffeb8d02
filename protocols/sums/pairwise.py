"""Masks that cancel in the sum: each pair of parties derives the same stream for one step.

Run by: the passives (and the active, where it shares masks with them). Protects from:
everybody outside the pair; a stream is a PRF of (pair seed, session, step, rows, digest of
what the active sent, shape), so that answers to different messages do not cancel and
their sum is uniform noise. Does not give: recovery when a party falls silent; then the
step has no sum.

Pair seed: X25519 (RFC 7748) between keys made for this sum, HKDF-SHA256 (RFC 5869) salted
with the agreement; stream: AES-256-CTR under a BLAKE2b sub-key (`protocols.randomness`).
The keys must arrive over authenticated links (`protocols.seal`).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protocols.conversation import Outgoing
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.randomness import keystream
from protocols.seal import fresh_run_key
from protocols.sums.agreed import AgreedFrames, KeepsSecrets
from protocols.sums.interface import StepBinding

__all__ = ["MASK_MODULUS_BITS", "PairwiseSeeds", "uniform_below"]

MASK_MODULUS_BITS = 42
"""Largest modulus of `uniform_below`, in bits."""

_KEY_BYTES = 32
_PIECE_BITS = 21


class PairwiseSeeds(KeepsSecrets):
    """One party's conversation that agrees one seed with each peer, and the streams of them.

    Args:
        me: this party.
        peers: with whom it shares seeds; each of them lists `me` in turn.
        frames: this role's writer and checker of frames.
    """

    def __init__(self, me: str, peers: Sequence[str], frames: AgreedFrames) -> None:
        self.me = me
        self._peers = tuple(peers)
        self._frames = frames
        self._key = fresh_run_key()
        self._seeds: dict[str, bytes] = {}

    def start(self) -> Sequence[Outgoing]:
        """Send this party's public key to every peer."""
        message = self._frames.setup(self._key.public)
        return tuple(Outgoing(peer, message) for peer in self._peers)

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take the public key of one peer."""
        if sender not in self._peers or sender in self._seeds:
            raise RemoteProtocolError(
                f"{sender} sent a mask key to {self.me}, who expects one from each of "
                f"{', '.join(self._peers)}"
            )
        frame = self._frames.open_setup(body, sender)
        if frame.fingerprint != self._frames.fingerprint:
            raise RemoteProtocolError(
                f"{sender} sets up {frame.backend} with other parameters than {self.me}"
            )
        if len(frame.blobs) != 1 or len(frame.blobs[0]) != _KEY_BYTES:
            raise RemoteProtocolError(f"{sender} sent no mask key of {_KEY_BYTES} bytes")
        first, second = sorted((self.me, sender))
        names = b"".join(len(n.encode()).to_bytes(2, "big") + n.encode() for n in (first, second))
        self._seeds[sender] = self._key.agree(
            frame.blobs[0],
            salt=self._frames.agreement.digest,
            info=b"secure-apfed mask v1" + names,
        )
        return ()

    @property
    def finished(self) -> bool:
        return len(self._seeds) == len(self._peers)

    def require_finished(self) -> None:
        """Raise LocalProtocolError unless every peer's key came."""
        missing = [name for name in self._peers if name not in self._seeds]
        if missing:
            raise LocalProtocolError(
                f"{self.me} has no mask key of {', '.join(missing)} yet; run the setup first"
            )

    def stream(self, peer: str, binding: StepBinding, shape: tuple[int, ...], length: int) -> bytes:
        """The bytes that this party and `peer` share for one step and shape; used once."""
        place = b"".join(size.to_bytes(8, "big") for size in shape)
        return keystream(self._seeds[peer], b"mask", binding.digest, place, length=length)


def uniform_below(modulus: int, stream: bytes) -> NDArray[np.int64]:
    """Numbers in [0, modulus) from a uniform stream, 16 bytes each.

    106 bits are reduced for each number, so its distribution is within 2^-64 of uniform
    for a modulus of at most 42 bits.
    """
    if not 1 <= modulus < 2**MASK_MODULUS_BITS or len(stream) % 16:
        raise LocalProtocolError(
            f"a modulus has at most {MASK_MODULUS_BITS} bits and a stream 16 bytes a number, got "
            f"{modulus.bit_length()} bits and {len(stream)} bytes"
        )
    words = np.frombuffer(stream, dtype="<u8").reshape(-1, 2)
    divisor, piece = np.uint64(modulus), np.uint64(2**_PIECE_BITS - 1)
    shift = np.uint64(_PIECE_BITS)
    numbers = words[:, 0] % divisor
    numbers = ((numbers << shift) | (words[:, 1] & piece)) % divisor
    numbers = ((numbers << shift) | ((words[:, 1] >> shift) & piece)) % divisor
    return numbers.astype(np.int64)
