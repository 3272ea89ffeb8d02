"""Whether the active encrypts labels as agreed: of many requests, all but one are opened.

Run by: the active (`Candidates`) and the passives (`PublicCoin`, `open_audited`). Protects from: an
active whose key, errors or labels are not as agreed. It is found out before any passive answers,
but for one time in `candidates` (covert security: Aumann and Lindell 2007); a kept request that is
as it should be holds one-hot labels under a proper key. Not from: an active that takes that chance,
or that falls silent after the coin and tries again: whoever does must count as found out, as each
session is a new chance. Which one-hot labels it asks about is its choice.

1. The active makes `candidates` requests, each from 32 secret bytes, for labels that are uniform
   and have nothing to do with its own, and sends the hash of each (`Candidates.commitment`).
2. The passives toss a coin over their links: each sends a hash of 32 random bytes to each other
   one, then the bytes. While one of them is honest, nobody knows the outcome before step 1 is over.
3. Told the same outcome by all, the active sends the secret bytes of all requests but that one, the
   request that is kept, and for each label how far it is from the true class, modulo K: uniform.
4. The passives make every opened request again and compare hashes. They multiply kept label j by
   X^shift: its class is then k or k + K, and an answer adds the two, unread before.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.products.described import DescribedProducts, open_request, request_frame
from apfed_protocols.products.labels import LabelValues, encrypt_labels, secret_of
from apfed_protocols.randomness import derive_key, fresh_key, keystream
from apfed_protocols.sums.frames import AgreedFrames
from apfed_protocols.sums.interface import IntArray
from apfed_protocols.sums.roles import KeepsSecrets

__all__ = ["Candidates", "PublicCoin", "open_audited"]

_BYTES = 32
_SHIFT = np.dtype(">u2")


class Candidates(KeepsSecrets):
    """The active's requests, of which all but one are opened.

    Args:
        described: what all parties agreed on.
        frames: this role's writer and checker of frames.
        classes_n: the true class of each label.
    """

    def __init__(
        self, described: DescribedProducts, frames: AgreedFrames, classes_n: IntArray
    ) -> None:
        self._described, self._frames, self._classes_n = described, frames, classes_n
        self._opening = threading.Lock()
        self._roots = [fresh_key() for _ in range(described.products.candidates or 0)]
        hashes = [_hash_of(described, frames, root) for root in self._roots]
        self._hashes = b"".join(hashes)
        self.commitment = request_frame(described, frames.fingerprint, (self._hashes,))

    def opened(self, challenges: Mapping[str, bytes]) -> tuple[bytes, IntArray]:
        """The message of step 3 and the secret key of the request that is kept; once.

        Raises:
            LocalProtocolError: it was opened before, as twice would open every request; or this
                is another process.
            RemoteProtocolError: a passive is missing, or they do not name the same request.
        """
        self._frames.require_own_process()  # before the lock, which a fork may have copied shut
        described = self._described
        kept = _agreed_challenge(described, self._frames, challenges, self._hashes)
        with self._opening:
            if not self._roots:
                raise LocalProtocolError("the candidates of this request were opened already")
            roots, self._roots = self._roots, []
        root = roots.pop(kept)
        columns = described.products.columns
        classes_n = _classes_of(described, root)
        shifts_n = ((self._classes_n - classes_n) % columns).astype(_SHIFT)
        blobs = encrypt_labels(described, root, np.eye(columns, dtype=np.int64)[classes_n])
        parts = (b"".join(roots), shifts_n.tobytes(), *blobs)
        message = request_frame(described, self._frames.fingerprint, parts)
        return message, secret_of(described, root)


class PublicCoin(KeepsSecrets):
    """One passive's conversation that draws which request is kept.

    Args:
        me: this party.
        described: what all parties agreed on.
        frames: this role's writer and checker of frames.
        commitment: the active's message of step 1.

    Raises:
        RemoteProtocolError: the commitment is malformed.
    """

    def __init__(
        self, me: str, described: DescribedProducts, frames: AgreedFrames, commitment: bytes
    ) -> None:
        agreed = described.products
        (self.hashes,) = open_request(described, frames.fingerprint, commitment, 1)
        if len(self.hashes) != _BYTES * (agreed.candidates or 0):
            raise RemoteProtocolError(
                f"{agreed.receiver} commits to {len(self.hashes)} bytes of requests, expected "
                f"{_BYTES * (agreed.candidates or 0)}"
            )
        self.me = me
        self._names, self._frames, self._candidates = (
            agreed.contributors, frames, agreed.candidates or 1
        )  # fmt: skip
        self._drawn = {me: fresh_key()}
        self._promised: dict[str, bytes] = {}

    def start(self) -> Sequence[Outgoing]:
        """Send every other passive a hash of this one's bytes."""
        return self._to_all(self._promise(self.me, self._drawn[self.me]))

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take a hash first, then the bytes that it is of."""
        if sender not in self._names or sender == self.me or sender in self._drawn:
            raise RemoteProtocolError(f"{sender} sent {self.me} a message of a coin out of turn")
        frame = self._frames.open_own_setup(body, sender, self.me)
        if len(frame.blobs) != 1 or len(frame.blobs[0]) != _BYTES:
            raise RemoteProtocolError(f"{sender} sent no {_BYTES} bytes of a coin")
        told = frame.blobs[0]
        if sender in self._promised:
            if self._promise(sender, told) != self._promised[sender]:
                raise RemoteProtocolError(
                    f"{sender} sent other bytes for the coin than it promised, or got other hashes "
                    f"of {self._frames.agreement.receiver}"
                )
            self._drawn[sender] = told
            return ()
        self._promised[sender] = told
        # This party's own bytes stay secret until all the others are bound to theirs.
        bound = len(self._promised) == len(self._names) - 1
        return self._to_all(self._drawn[self.me]) if bound else ()

    @property
    def finished(self) -> bool:
        return len(self._drawn) == len(self._names)

    @property
    def kept(self) -> int:
        """Which request is kept.

        Raises:
            LocalProtocolError: the coin is still in the air.
        """
        if not self.finished:
            raise LocalProtocolError(f"{self.me} tosses a coin still; finish that conversation")
        drawn = b"".join(self._drawn[name] for name in self._names)
        number = hashlib.sha256(b"products coin" + self.hashes + drawn).digest()
        return int.from_bytes(number, "big") % self._candidates

    def challenge(self) -> bytes:
        """What the active is told."""
        return self._frames.setup(_challenge(self.kept, self.hashes))

    def _promise(self, name: str, drawn: bytes) -> bytes:
        parts = (b"products promise", name.encode(), self.hashes, drawn)
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hashlib.sha256(framed).digest()

    def _to_all(self, told: bytes) -> Sequence[Outgoing]:
        message = self._frames.setup(told)
        return tuple(Outgoing(name, message) for name in self._names if name != self.me)


def open_audited(
    described: DescribedProducts, frames: AgreedFrames, coin: PublicCoin, request: bytes
) -> LabelValues:
    """Check every opened request, and read the one that is kept.

    Raises:
        LocalProtocolError: the coin is still in the air.
        RemoteProtocolError: the active cheated, or the message is malformed.
    """
    agreed, kept = described.products, coin.kept
    parts = open_request(described, frames.fingerprint, request, 4 + agreed.labelled)
    roots, shifts = parts[0], np.frombuffer(parts[1][: len(parts[1]) & ~1], _SHIFT)
    sizes = len(coin.hashes) - _BYTES, _SHIFT.itemsize * agreed.labelled
    if (len(roots), len(parts[1])) != sizes or shifts.max(initial=0) >= agreed.columns:
        raise RemoteProtocolError(
            f"{agreed.receiver} opened requests in {len(roots)} bytes and shifts labels in "
            f"{len(parts[1])}, expected {sizes[0]} and {sizes[1]}, shifts below {agreed.columns}"
        )
    hashes = [
        _hash_of(described, frames, roots[start : start + _BYTES])
        for start in range(0, len(roots), _BYTES)
    ]
    blobs = parts[2:]
    hashes.insert(kept, _hash(request_frame(described, frames.fingerprint, blobs)))
    if b"".join(hashes) != coin.hashes:
        raise RemoteProtocolError(
            f"{agreed.receiver} cheated: the requests that it opened, or the one that is kept, are "
            "not those that it committed to; nothing is answered"
        )
    return LabelValues.of(described, request, blobs, [int(shift) for shift in shifts])


def _classes_of(described: DescribedProducts, root: bytes) -> IntArray:
    """The labels of the request of these secret bytes: uniform to within 2^-50."""
    agreed = described.products
    key = derive_key(root, b"products classes")
    words = np.frombuffer(keystream(key, length=8 * agreed.labelled), "<u8")
    return (words % np.uint64(agreed.columns)).astype(np.int64)


def _hash_of(described: DescribedProducts, frames: AgreedFrames, root: bytes) -> bytes:
    bits_nK = np.eye(described.products.columns, dtype=np.int64)[_classes_of(described, root)]
    blobs = encrypt_labels(described, root, bits_nK)
    return _hash(request_frame(described, frames.fingerprint, blobs))


def _hash(request: bytes) -> bytes:
    return hashlib.sha256(b"products candidate" + request).digest()


def _challenge(kept: int, hashes: bytes) -> bytes:
    return kept.to_bytes(2, "big") + hashlib.sha256(hashes).digest()


def _agreed_challenge(
    described: DescribedProducts,
    frames: AgreedFrames,
    challenges: Mapping[str, bytes],
    hashes: bytes,
) -> int:
    agreed = described.products
    if set(challenges) != set(agreed.contributors):
        raise RemoteProtocolError(
            f"{agreed.receiver} waits for a challenge of each of {', '.join(agreed.contributors)}, "
            f"got {', '.join(sorted(challenges)) or 'none'}"
        )
    told = {
        b"".join(frames.open_own_setup(body, name, agreed.receiver).blobs)
        for name, body in challenges.items()
    }
    possible = {_challenge(kept, hashes): kept for kept in range(agreed.candidates or 0)}
    if len(told) != 1 or not told <= set(possible):
        raise RemoteProtocolError(
            "the passives do not name one of the requests that were committed to, all the same; "
            "nothing is opened"
        )
    return possible[told.pop()]
