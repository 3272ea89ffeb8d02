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

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from protocols.conversation import Outgoing
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.fork_check import ForkCheck
from protocols.randomness import keystream_chunks
from protocols.seal import RunKey, fresh_run_key
from protocols.sums.agreed_frames import AgreedFrames
from protocols.sums.agreement import StepBinding
from protocols.sums.roles import KeepsSecrets

__all__ = ["PairwiseSeeds", "add_keystream"]

Elements = NDArray[np.unsignedinteger[Any]]
_KEY_BYTES = 32


class PairwiseSeeds(KeepsSecrets):
    """One party's conversation that agrees one seed with each peer, and the streams of them.

    It does all of it in the process that made it: a forked copy holds the same key, so that it
    would agree the same seeds, even where set-up comes after the fork.

    Args:
        me: this party.
        peers: with whom it shares seeds; each of them lists `me` in turn.
        frames: this role's writer and checker of frames.
    """

    def __init__(self, me: str, peers: Sequence[str], frames: AgreedFrames) -> None:
        self.me = me
        self._peers = tuple(peers)
        self._frames = frames
        self._key: RunKey | None = fresh_run_key()
        self._fork_check = ForkCheck(f"{me}: this role of {frames.backend}")
        self._seeds: dict[str, bytes] = {}

    def start(self) -> Sequence[Outgoing]:
        """Send this party's public key to every peer."""
        message = self._frames.setup(self._own_key().public)
        return tuple(Outgoing(peer, message) for peer in self._peers)

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take the public key of one peer."""
        self._fork_check.require()
        if sender not in self._peers or sender in self._seeds:
            raise RemoteProtocolError(
                f"{sender} sent a mask key to {self.me}, who expects one from each of "
                f"{', '.join(self._peers) or 'nobody'}"
            )
        frame = self._frames.open_own_setup(body, sender, self.me)
        if len(frame.blobs) != 1 or len(frame.blobs[0]) != _KEY_BYTES:
            raise RemoteProtocolError(f"{sender} sent no mask key of {_KEY_BYTES} bytes")
        first, second = sorted((self.me, sender))
        names = b"".join(len(n.encode()).to_bytes(2, "big") + n.encode() for n in (first, second))
        self._seeds[sender] = self._own_key().agree(
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

    def _forget(self) -> None:
        """Throw away the seeds, and the key that would agree them once more."""
        self._peers, self._seeds, self._key = (), {}, None

    def _own_key(self) -> RunKey:
        """This party's key pair, in the process that made it."""
        self._fork_check.require()
        if self._key is None:
            raise LocalProtocolError(f"{self.me} threw its mask key away; set up a new session")
        return self._key

    def _seed(self, peer: str) -> bytes:
        """The secret shared with `peer`, in the process that agreed it."""
        self._fork_check.require()
        return self._seeds[peer]

    def add_stream(
        self, peer: str, binding: StepBinding, total: Elements, *, sign: Literal[1, -1]
    ) -> None:
        """Add the bytes that this party and `peer` share for one step and shape, as words of
        `total`'s type, to it in place; or subtract them.
        """
        add_keystream(total, self._seed(peer), binding.digest, sign=sign)


def add_keystream(
    total: Elements, seed: bytes, binding_digest: bytes, *, sign: Literal[1, -1]
) -> None:
    """Add the stream of one seed and step, as words of `total`'s type, to it in place.

    Args:
        total: row after row in memory; its shape is part of what the stream is made of.
        seed: 32 bytes, a secret of those who may know the stream.
        binding_digest: of the step.
        sign: -1 subtracts.

    Raises:
        LocalProtocolError: `total` lies otherwise, so that a mask would fall on a copy of it.
    """
    if not total.flags.c_contiguous:
        raise LocalProtocolError(
            f"a mask is added in place to rows that follow each other in memory; got shape "
            f"{total.shape} with strides {total.strides}"
        )
    step, flat, start = np.add if sign > 0 else np.subtract, total.reshape(-1), 0
    chunks = keystream_chunks(seed, *_context(binding_digest, total.shape), length=total.nbytes)
    for chunk in chunks:
        words = np.frombuffer(chunk, dtype=total.dtype)
        part = flat[start : start + len(words)]
        step(part, words, out=part)
        start += len(words)


def _context(binding_digest: bytes, shape: tuple[int, ...]) -> tuple[bytes, ...]:
    return b"mask", binding_digest, b"".join(size.to_bytes(8, "big") for size in shape)
