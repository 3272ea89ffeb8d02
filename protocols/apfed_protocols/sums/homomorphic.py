"""The three roles that every sum under homomorphic encryption shares.

Run by: the active (`KeyHolder`: makes the key pair, keeps its secret half, decrypts only
the sum, and none after one that it refused), the passives (`Encrypter`: public key; with pairwise
masks a seed with each other passive, too), the aggregator (`CiphertextAdder`: no key at all, 32
bytes of fingerprint). What is encrypted, and under which scheme, says the `HomomorphicSum` that
makes the roles.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums.agreement import StepBinding
from apfed_protocols.sums.fixed_point import Packing
from apfed_protocols.sums.frames import AgreedFrames, Frame, frame_bytes
from apfed_protocols.sums.interface import FloatArray, Reading, SumLeaks
from apfed_protocols.sums.masks import PairwiseSeeds
from apfed_protocols.sums.roles import (
    DescribedSum,
    KeepsSecrets,
    NoSetup,
    OneRefusalReceiver,
    OneRoundCombiner,
    OneRoundContributor,
)
from apfed_protocols.sums.seal_cipher import SealCipher, SealContext

__all__ = [
    "LEAKS_WITHOUT_MASKS",
    "RESTS_ON_THE_KEY",
    "CiphertextAdder",
    "Encrypter",
    "Headroom",
    "HomomorphicSum",
    "KeyHolder",
    "ZeroPool",
]

RESTS_ON_THE_KEY = (
    "ring learning with errors at 128-bit security, and an active and an aggregator who do not "
    "work together"
)

LEAKS_WITHOUT_MASKS = SumLeaks(
    contribution=Reading(
        reads="One ciphertext of each passive and step: its size and time, and a digest of what "
        "it answers.",
        protects="Encryption, whose only secret key is at the active. Contributions that answer "
        "different messages are not added.",
        remains="Who takes part, and when. It can alter the sum without being noticed, and leave "
        "passives out of it.",
    ),
    active_and_aggregator="Every single passive's contribution: the active's key opens what the "
    "aggregator holds.",
    single="active and aggregator together, who read each contribution",
    altered="Each reaction to an altered sum tells of one contribution, and all of them may be "
    "about one number, since a ciphertext names no step: two or three sessions tell it.",
)
"""What is said of any scheme under the active's one key."""


class Headroom(Protocol):
    """Parameters that fit an agreement."""

    @property
    def poly_degree(self) -> int: ...

    @property
    def primes(self) -> tuple[int, ...]: ...

    @property
    def packing(self) -> Packing: ...


class HomomorphicSum(DescribedSum, ABC):
    """What the roles need to know about a scheme, and the roles themselves."""

    @cached_property
    @abstractmethod
    def headroom(self) -> Headroom:
        """The parameters and the packing that fit the agreement."""

    @cached_property
    @abstractmethod
    def cipher(self) -> SealCipher:
        """The local library under these parameters."""

    @property
    def packing(self) -> Packing:
        """How integers share slots."""
        return self.headroom.packing

    def integers(self, slots: NDArray[Any]) -> NDArray[np.int64]:
        """The integers that decrypted slots stand for.

        Raises:
            RemoteProtocolError: they stand for none.
        """
        return slots.astype(np.int64, copy=False)

    def parameters(self) -> Mapping[str, object]:
        return {
            **super().parameters(),
            "poly_degree": self.headroom.poly_degree,
            "primes": list(self.headroom.primes),
            "fields": self.packing.fields,
            "field_bits": self.packing.field_bits,
        }

    def receiver(self) -> "KeyHolder":
        return KeyHolder(self)

    def contributor(self, me: str) -> "Encrypter":
        return Encrypter(self, me)

    def combiner(self) -> "CiphertextAdder":
        return CiphertextAdder(self)

    def contribution_bytes(self, shape: tuple[int, int]) -> int:
        vectors = self.packing.vectors(shape[0] * shape[1])
        return frame_bytes((self.cipher.residues.size,) * vectors)

    def add(self, frames: Sequence[Frame]) -> Sequence[bytes]:
        """The sums of the ciphertexts of these contributions; needs no key."""
        names = self.agreement.contributors
        vectors = self.packing.vectors(frames[0].rows * frames[0].columns)
        return self.cipher.add({names[frame.party]: frame.blobs for frame in frames}, vectors)


def _key_setup(frames: AgreedFrames, body: bytes, sender: str) -> Frame:
    """Read what the key holder sent; the fingerprint is unchecked.

    Raises:
        RemoteProtocolError: it is malformed or comes from another party.
    """
    holder = frames.agreement.receiver
    if sender != holder:
        raise RemoteProtocolError(f"keys come from {holder}, but {sender} sent a message")
    return frames.open_setup(body, sender)


class KeyHolder(OneRefusalReceiver):
    """The active's end; the secret key is gone once it refused a sum."""

    _sum: HomomorphicSum

    def __init__(self, described: HomomorphicSum) -> None:
        context = described.cipher.key_pair()
        self._context: SealContext | None = context
        self._public_key = described.cipher.public_key(context)
        self._started = False
        super().__init__(described, described.frames(self._public_key), NoSetup())

    def start(self) -> Sequence[Outgoing]:
        """Give every passive the public key, and the aggregator its fingerprint."""
        self._require_no_refusal()
        if self._started:
            raise LocalProtocolError("the key of this sum was sent already; start is called once")
        self._started = True
        agreement = self._sum.agreement
        with_key, without_key = self._frames.setup(self._public_key), self._frames.setup()
        return (
            *(Outgoing(name, with_key) for name in agreement.contributors),
            Outgoing(agreement.combiner, without_key),
        )

    @property
    def finished(self) -> bool:
        return self._started

    def _open(self, frame: Frame, binding: StepBinding) -> FloatArray:
        described, values = self._sum, frame.rows * frame.columns
        assert self._context is not None
        slots = described.cipher.decrypt(
            self._context,
            frame.blobs,
            described.packing.vectors(values),
            sender=described.agreement.combiner,
        )
        fields = described.packing.unpack(described.integers(slots))
        if fields[values:].any():
            raise self._beyond_range(binding)
        return self._dequantised(fields[:values].reshape(frame.shape), binding)

    def _forget(self) -> None:
        self._context = None


class Encrypter(OneRoundContributor):
    """A passive's end: knows the active's public key once the setup came."""

    _sum: HomomorphicSum

    def __init__(self, described: HomomorphicSum, me: str) -> None:
        frames = described.frames()
        others = [name for name in described.agreement.contributors if name != me]
        masked = described.masks == "pairwise"
        self._seeds = PairwiseSeeds(me, others, frames) if masked else None
        self._key: tuple[SealContext, ZeroPool] | None = None
        super().__init__(described, me, frames, self._seeds or NoSetup())

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take the active's public key, or under masks another passive's mask key."""
        if self._seeds is not None and sender != self._sum.agreement.receiver:
            return self._seeds.receive(sender, body)
        if self._key is not None:
            raise RemoteProtocolError(f"{sender} sent a second public key to {self.me}")
        frame = _key_setup(self._frames, body, sender)
        if len(frame.blobs) != 1:
            raise RemoteProtocolError(f"{sender} sent {len(frame.blobs)} public keys, expected one")
        frames = self._sum.frames(frame.blobs[0])
        if frames.fingerprint != frame.fingerprint:
            raise RemoteProtocolError(
                f"the public key from {sender} does not match its fingerprint; the parties hold "
                "different parameters"
            )
        context = self._sum.cipher.public_context(frame.blobs[0], sender=sender)
        self._frames, self._key = frames, (context, ZeroPool(self._sum.cipher, context))
        return ()

    @property
    def finished(self) -> bool:
        return self._key is not None and self._setup.finished

    def prepare(
        self, shape: tuple[int, int], contributions: int = 1, *, worker: Executor | None = None
    ) -> None:
        """Encrypt zeros ahead for contributions of `shape`, while this party waits.

        To encrypt is then to add to a zero. Each zero is used once; where they run out, values
        are encrypted as usual.

        Args:
            shape: (rows, columns) of the contributions to come.
            contributions: for how many zeros are kept; those that are there or on their way count.
            worker: with one (a `ProcessPoolExecutor`), this returns at once, and the zeros
                serve from when they have come.

        Raises:
            LocalProtocolError: the setup is not finished, or the worker died.
        """
        _, zeros = self._ready()
        zeros.top_up(contributions * self._sum.packing.vectors(shape[0] * shape[1]), worker)

    def _require_setup(self) -> None:
        self._ready()
        if self._seeds is not None:
            self._seeds.require_finished()

    def _ready(self) -> tuple[SealContext, "ZeroPool"]:
        if self._key is None:
            raise LocalProtocolError(f"{self.me} has no public key yet; run the setup first")
        return self._key

    def _protect(self, numbers_BD: NDArray[Any], binding: StepBinding) -> Sequence[bytes]:
        context, zeros = self._ready()
        slots_VS = self._sum.packing.pack(numbers_BD)
        if self._seeds is not None:
            # Modulo 2^64; the cipher takes these integers modulo its power of two.
            self._seeds.add_cancelling(binding, slots_VS.view(np.uint64))
        return self._sum.cipher.encrypt(context, slots_VS, zeros.take(len(slots_VS)))


class CiphertextAdder(OneRoundCombiner):
    """The aggregator's end: adds what it cannot read."""

    def __init__(self, described: HomomorphicSum) -> None:
        super().__init__(described.frames(), described.add)
        self._set_up = False

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take the public key's fingerprint."""
        if self._set_up:
            raise RemoteProtocolError(f"{sender} sent a second setup to the aggregator")
        frame = _key_setup(self._frames, body, sender)
        if frame.blobs:
            raise RemoteProtocolError(f"{sender} sent a key to the aggregator, who must hold none")
        self._frames.fingerprint, self._set_up = frame.fingerprint, True
        return ()

    @property
    def finished(self) -> bool:
        return self._set_up

    def combine(self, bodies: Mapping[str, bytes], binding_digest: bytes | None = None) -> bytes:
        if not self._set_up:
            raise LocalProtocolError("the aggregator has no fingerprint yet; run the setup first")
        return super().combine(bodies, binding_digest)


class ZeroPool(KeepsSecrets):
    """Zeros of one party, encrypted ahead: to encrypt is then to add to one, many times faster.

    In this process or in a worker beside it (SEAL holds Python's lock while it encrypts, so a
    thread would stop the training). A zero is a secret of its party until it is used and after:
    whoever knows it reads what was added to it. So each is used once and none leaves the party.

    Args:
        cipher: encrypts and loads.
        context: holds the receiver's public key.
    """

    def __init__(self, cipher: SealCipher, context: SealContext) -> None:
        self._cipher, self._context = cipher, context
        self._ready: list[Any] = []
        self._coming: list[tuple[int, Future[list[bytes]]]] = []

    def __len__(self) -> int:
        self._collect()
        return len(self._ready)

    def top_up(self, level: int, worker: Executor | None) -> None:
        """Encrypt as many as `level` needs beyond those that are there or on their way."""
        missing = level - len(self) - sum(count for count, _ in self._coming)
        if missing <= 0:
            return
        if worker is None:
            self._ready += (self._cipher.zero(self._context) for _ in range(missing))
            return
        cipher, key = self._cipher, self._cipher.public_key(self._context)
        try:
            future = worker.submit(_encrypt_zeros, type(cipher), cipher.recipe, key, missing)
        except RuntimeError as error:  # of a pool that is closed, or broken (a subclass)
            raise _worker_died() from error
        self._coming.append((missing, future))

    def take(self, most: int) -> Sequence[Any]:
        """Remove up to `most` zeros that are there by now."""
        self._collect()
        taken, self._ready = self._ready[:most], self._ready[most:]
        return taken

    def _collect(self) -> None:
        while self._coming and self._coming[0][1].done():
            _, future = self._coming.pop(0)
            if future.cancelled():
                continue
            try:
                blobs = future.result()
            except BrokenExecutor as error:
                raise _worker_died() from error
            self._ready += self._cipher.zeros_in(blobs)


def _worker_died() -> LocalProtocolError:
    return LocalProtocolError(
        "the worker process that encrypts zeros ahead ended on its own (killed, or out of "
        "memory), or was shut down; start again, or encrypt nothing ahead (secure_sum.zero_pool: 0)"
    )


Recipe = tuple[int, tuple[int, ...], int]


@lru_cache(maxsize=8)
def _cipher(kind: type[SealCipher], recipe: Recipe) -> SealCipher:
    return kind(*recipe)


def _encrypt_zeros(kind: type[SealCipher], recipe: Recipe, key: bytes, count: int) -> list[bytes]:
    """In the worker: knows public numbers only."""
    cipher = _cipher(kind, recipe)
    context = cipher.public_context(key, sender="the party")
    return cipher.encrypt(context, np.zeros((count, cipher.slots), dtype=np.int64))
