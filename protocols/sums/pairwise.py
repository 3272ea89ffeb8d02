"""Masks that cancel in the sum: each pair of parties derives the same stream for one step.

Run by: the passives (and the active, where it shares masks with them). Protects from:
everybody outside the pair; a stream is a PRF of (pair seed, session, step, rows, digest of
what the active sent, shape), so that answers to different messages do not cancel and
their sum is uniform noise. Does not give: recovery when a party falls silent; then the
step has no sum (`masked_recovery` makes other seeds for every step, and has one).

Pair seed: X25519 (RFC 7748) between keys made for this sum, HKDF-SHA256 (RFC 5869) salted
with the agreement; stream: AES-256-CTR under a BLAKE2b sub-key (`protocols.randomness`).
The keys must arrive over authenticated links (`protocols.seal`).
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from protocols.conversation import Outgoing
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.randomness import keystream, keystream_chunks
from protocols.seal import fresh_run_key
from protocols.sums.agreed import AgreedFrames, KeepsSecrets
from protocols.sums.interface import StepBinding

__all__ = ["MASK_MODULUS_BITS", "MASK_STREAM_BYTES", "PairwiseSeeds", "add_keystream", "add_masks"]

MASK_MODULUS_BITS = 42
"""Largest modulus of `add_masks`, in bits."""

MASK_STREAM_BYTES = 16
"""Bytes of stream that `add_masks` takes for one value."""

IntArray = NDArray[np.int64]
Elements = NDArray[np.unsignedinteger[Any]]
_KEY_BYTES = 32
_LOW_BITS = 40
_LOW_MASK = np.uint64(2**_LOW_BITS - 1)


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
        frame = self._frames.open_own_setup(body, sender, self.me)
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
        return keystream(self._seeds[peer], *_context(binding.digest, shape), length=length)

    def add_stream(
        self, peer: str, binding: StepBinding, total: Elements, *, sign: Literal[1, -1]
    ) -> None:
        """Add the same bytes, as words of `total`'s type, to it in place; or subtract them."""
        add_keystream(total, self._seeds[peer], binding.digest, sign=sign)


def add_keystream(
    total: Elements, seed: bytes, binding_digest: bytes, *, sign: Literal[1, -1]
) -> None:
    """Add the stream of one seed and step, as words of `total`'s type, to it in place.

    Args:
        total: contiguous; its shape is part of what the stream is made of.
        seed: 32 bytes, a secret of those who may know the stream.
        binding_digest: of the step.
        sign: -1 subtracts.
    """
    step, flat, start = np.add if sign > 0 else np.subtract, total.reshape(-1), 0
    chunks = keystream_chunks(seed, *_context(binding_digest, total.shape), length=total.nbytes)
    for chunk in chunks:
        words = np.frombuffer(chunk, dtype=total.dtype)
        part = flat[start : start + len(words)]
        step(part, words, out=part)
        start += len(words)


def _context(binding_digest: bytes, shape: tuple[int, ...]) -> tuple[bytes, ...]:
    return b"mask", binding_digest, b"".join(size.to_bytes(8, "big") for size in shape)


def add_masks(values: IntArray, modulus: int, streams: Iterable[tuple[int, bytes]]) -> IntArray:
    """Add signed masks to integers modulo `modulus`; the result lies in [-modulus/2, modulus/2).

    Each stream has 16 bytes a value, of which 104 bits are reduced, so its residues are
    within 2^-62 of uniform.

    Args:
        values: magnitudes below 2^59.
        modulus: at most 42 bits.
        streams: (1 or -1, uniform bytes), at most 1024 of them.

    Raises:
        LocalProtocolError: a larger modulus, or a stream of another length.
    """
    if not 1 <= modulus < 2**MASK_MODULUS_BITS:
        raise LocalProtocolError(
            f"masks fit a modulus of at most {MASK_MODULUS_BITS} bits, got {modulus.bit_length()}"
        )
    high = np.zeros(values.size, dtype=np.int64)
    low = np.zeros(values.size, dtype=np.int64)
    for sign, stream in streams:
        if len(stream) != MASK_STREAM_BYTES * values.size:
            raise LocalProtocolError(
                f"{values.size} masks take {MASK_STREAM_BYTES * values.size} bytes, "
                f"got {len(stream)}"
            )
        words = np.frombuffer(stream, dtype="<u8").reshape(2, -1)
        step = np.add if sign > 0 else np.subtract
        step(high, (words[0] % np.uint64(modulus)).view(np.int64), out=high)
        step(low, (words[1] & _LOW_MASK).view(np.int64), out=low)
    # high * 2^40 + low + values, in two steps so that no number exceeds 63 bits.
    for _ in range(2):
        high %= modulus
        high <<= _LOW_BITS // 2
    half = modulus // 2
    total = (high + low + values.reshape(-1) + half) % modulus - half
    return total.reshape(values.shape)
