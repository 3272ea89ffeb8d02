"""Plain integers under recoverable masks: the sum survives passives who fall silent.

Run by: all three roles, in two rounds. Protects from the same as pairwise masks (`masked`), and
has a sum as long as `threshold` (t) of the M passives contribute and answer; a passive that
contributed counts, one that did not is left out of the sum and of the rest of the session. With
fewer than t, contributions or answers, the step has no sum and nothing of any contribution is
revealed. A false share is found out where a secret is put together from it, and the step has no
sum then; one that was not needed goes unnoticed, and changes nothing.

Bounds. c passives that work together with the aggregator learn no single contribution while
2t > M + c, so t must be above M / 2, and floor(2M / 3) + 1 holds against c < M / 3:
nobody answers twice about one step, so the aggregator gets t shares of a passive's seed or
t shares of its key, never both. One that tells passives different sets may get a sum of
fewer than t, never of one; and in the next step nobody answers it, for passives seal what
they were told. Not protected from: an aggregator that calls honest passives silent, so that
they are left out, or that adds a constant to the sum; coalitions beyond that bound; all
other passives of a sum and the active together. Nor, below t = M, from the active over several
steps, whoever combines: it asks, then asks something related and leaves one passive unasked, and
the two sums differ by its contribution. So t is M, and nobody can be left out, unless
`allow_single_reader` says otherwise. Passives refuse the same question in another circle
(`AnsweredCircles`), which stops a literal repeat and no related question.

After Bonawitz et al. 2017, section 4.2 and figure 4, for parties that follow the protocol, with
fresh keys for each step (`step_keys`): each passive adds a mask of its own and one shared with each
other passive, and deals shares of the secrets behind both. They save a round: what is shared for a
step travels with the contribution to the one before (with the setup, for the first). So a passive
whose contribution was never asked about has no keys for another step; its session ends. The
mask shared with the active, as under `masked`, keeps the sum from the aggregator.

1. `contribute`: the masked vector; keys for the next step, announced to all, and sealed shares of
   them, one for each other passive.
2. `ask`: the aggregator adds, and tells each passive who is counted, with the sealed shares.
3. `answer`: one share of each passive of the step: of its own mask's seed where it is counted, of
   its key where it fell silent. Never both, never twice, never for fewer than t.
4. `combine`: rebuilds those secrets and takes off what does not cancel; `decode` the rest.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.randomness import fresh_key
from apfed_protocols.seal import SEAL_OVERHEAD_BYTES, RunKey, SealedLink, fresh_run_key
from apfed_protocols.sums.frames import AgreedFrames, Frame
from apfed_protocols.sums.interface import (
    ALTERED_SUM,
    FloatArray,
    Reading,
    StepBinding,
    SumAgreement,
    SumLeaks,
    format_sum_name,
)
from apfed_protocols.sums.masked import (
    Elements,
    MaskedReceiver,
    MaskedSum,
    PairwiseSeeds,
    add_keystream,
    pair_seed,
)
from apfed_protocols.sums.roles import KeepsSecrets, NoSetup, SumCombiner, SumContributor

_PRIME = 2**128 - 159  # the largest whose numbers fit
SECRET_BYTES = 16
"""Bytes of a secret, and of each share of it."""
_PUBLIC_BYTES = _DIGEST_BYTES = 32
_HELD_BYTES = _PUBLIC_BYTES + 2 * SECRET_BYTES
ANNOUNCEMENT_BYTES = _PUBLIC_BYTES + _DIGEST_BYTES
"""Bytes of what one passive tells all, for one step."""
PARCEL_BYTES = _HELD_BYTES + SEAL_OVERHEAD_BYTES
"""Bytes of what one passive seals for another, for one step."""
_SETUP = b"setup"
_STEP_MASK = b"secure-apfed step mask v1"
_NO_MESSAGE = hashlib.sha256(b"").digest()
_MARK_BYTES = 16
_CIRCLES_TABLE = "CREATE TABLE IF NOT EXISTS circles (mark TEXT PRIMARY KEY, circle TEXT)"


# The secrets of a step, after figure 4, rounds 0 and 1: a mask key pair (X25519) and a self-mask
# seed, each derived from a 16-byte secret that is shared by Shamir 1979 over the integers modulo
# 2^128 - 159, with coefficients of the operating system's generator. The arithmetic is Python's:
# PyCryptodome's, over GF(2^128) bit by bit, took nine tenths of a step of fifty passives. Keys
# serve one step and are forgotten. What is rebuilt from shares is compared with what its owner
# announced. Letters: u deals, v holds.


@dataclass(frozen=True)
class Announcement:
    """The public part of a passive's keys of a step: its mask key, a digest of its seed."""

    public: bytes
    commitment: bytes

    def pack(self) -> bytes:
        return self.public + self.commitment

    @classmethod
    def parse(cls, data: bytes, *, sender: str) -> "Announcement":
        """Read an announcement of `sender`. Raises RemoteProtocolError: it has another size."""
        if len(data) != ANNOUNCEMENT_BYTES:
            raise RemoteProtocolError(
                f"{sender} announced its keys in {len(data)} bytes, expected {ANNOUNCEMENT_BYTES}"
            )
        return cls(data[:_PUBLIC_BYTES], data[_PUBLIC_BYTES:])


@dataclass(frozen=True)
class HolderShares(KeepsSecrets):
    """The part of u's keys of one step that v holds."""

    public: bytes
    key_share: bytes = field(repr=False)
    seed_share: bytes = field(repr=False)

    def pack(self) -> bytes:
        return self.public + self.key_share + self.seed_share

    @classmethod
    def parse(cls, data: bytes, *, sender: str) -> "HolderShares":
        """Read the shares that `sender` dealt. Raises RemoteProtocolError: they have
        another size.
        """
        if len(data) != _HELD_BYTES:
            raise RemoteProtocolError(
                f"{sender} dealt shares in {len(data)} bytes, expected {_HELD_BYTES}"
            )
        middle = _PUBLIC_BYTES + SECRET_BYTES
        return cls(data[:_PUBLIC_BYTES], data[_PUBLIC_BYTES:middle], data[middle:])


class StepKeys(KeepsSecrets):
    """A passive's secrets of one step, and the shares of them for all contributors."""

    def __init__(self, agreement: SumAgreement, threshold: int, owner: str) -> None:
        """Draw the two secrets of one step and split each among all contributors (Bonawitz et al.
        2017, figure 4, rounds 0 and 1).

        `threshold`: how many shares rebuild a secret. `owner`: the contributor whose secrets they
        are.
        """
        key_secret, seed_secret = (_pack_number(_draw_number()) for _ in range(2))
        self.key = _derive_mask_key(key_secret, agreement, owner)
        self.seed = _derive_self_mask_seed(seed_secret, agreement, owner)
        self._agreement = agreement
        holders = len(agreement.contributors)
        self._key_shares = split_secret(key_secret, threshold=threshold, holders=holders)
        self._seed_shares = split_secret(seed_secret, threshold=threshold, holders=holders)

    @property
    def announcement(self) -> Announcement:
        """Return the public part: the mask key and the commitment to the self-mask seed."""
        return Announcement(self.key.public, _commit_seed(self.seed))

    def pick_shares(self, holder: str) -> HolderShares:
        """Return what `holder` gets: the public key, and its share of each of the two secrets."""
        position = self._agreement.find_position(holder)
        return HolderShares(
            self.key.public, self._key_shares[position], self._seed_shares[position]
        )


def _rebuild_key(
    shares: Mapping[int, bytes], announced: Announcement, agreement: SumAgreement, owner: str
) -> RunKey:
    """Rebuild the mask key of a passive that fell silent. Raises RemoteProtocolError: it is not the
    key that its owner announced.

    `shares`: by the position of their holder.
    """
    key = _derive_mask_key(join_shares(shares), agreement, owner)
    if key.public != announced.public:
        raise _make_share_error(owner)
    return key


def rebuilt_seed(
    shares: Mapping[int, bytes], announced: Announcement, agreement: SumAgreement, owner: str
) -> bytes:
    """Rebuild the self-mask seed of a passive that is counted. Raises RemoteProtocolError: it is
    not the seed that its owner committed to.

    `shares`: by the position of their holder.
    """
    seed = _derive_self_mask_seed(join_shares(shares), agreement, owner)
    if _commit_seed(seed) != announced.commitment:
        raise _make_share_error(owner)
    return seed


def split_secret(secret: bytes, *, threshold: int, holders: int) -> Sequence[bytes]:
    """Return the shares of 16 secret bytes, a number below 2^128 - 159, in the holders' order.

    Any `threshold` of them (1 to `holders`) give the secret; fewer say nothing of it.
    """
    number = int.from_bytes(secret, "big")
    if len(secret) != SECRET_BYTES or number >= _PRIME or not 1 <= threshold <= holders:
        raise LocalProtocolError(
            f"a secret of {SECRET_BYTES} bytes, a number below 2^128 - 159, is shared among at "
            "least `threshold` holders, got "
            f"{len(secret)} bytes, threshold {threshold} and {holders} holders"
        )
    polynomial = [_draw_number() for _ in range(threshold - 1)]  # the highest power first

    def evaluate_share(position: int) -> bytes:
        """Return the polynomial's value at `position` (from 1), by Horner's rule."""
        value = 0
        for coefficient in (*polynomial, number):
            value = (value * position + coefficient) % _PRIME
        return _pack_number(value)

    return [evaluate_share(holder + 1) for holder in range(holders)]


def join_shares(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of which these are shares, by the holder's position from 0.

    With fewer than the threshold, or a false one among them, it is some other 16 bytes.
    """
    if not shares or any(len(share) != SECRET_BYTES for share in shares.values()):
        raise LocalProtocolError(f"a secret is joined from shares of {SECRET_BYTES} bytes each")
    weighed = zip(_compute_weights(tuple(shares)), shares.values(), strict=True)
    return _pack_number(
        sum(weight * int.from_bytes(share, "big") for weight, share in weighed) % _PRIME
    )


@lru_cache(maxsize=64)
def _compute_weights(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Return the Lagrange weight of each holder's share in the polynomial's value at 0."""
    places = [holder + 1 for holder in holders]

    def compute_weight(position: int) -> int:
        """Return the product of other / (other - place) over all other places, modulo the prime.

        `position`: that of the share's holder.
        """
        others = [other for other in places if other != position]
        above = below = 1
        for other in others:
            above = above * other % _PRIME
            below = below * (other - position) % _PRIME
        return above * pow(below, -1, _PRIME) % _PRIME

    return tuple(map(compute_weight, places))


def _draw_number() -> int:
    """Draw a number below the prime; so many bits that no remainder is likelier, but by 2^-128."""
    return int.from_bytes(fresh_key(), "big") % _PRIME


def _pack_number(number: int) -> bytes:
    return number.to_bytes(SECRET_BYTES, "big")


def _derive_mask_key(secret: bytes, agreement: SumAgreement, owner: str) -> RunKey:
    """Derive a step's X25519 key from its 16-byte secret."""
    return RunKey.from_secret_bytes(
        _derive_bytes(secret, agreement, b"mask key of " + owner.encode())
    )


def _derive_self_mask_seed(secret: bytes, agreement: SumAgreement, owner: str) -> bytes:
    """Derive a step's self-mask seed from its 16-byte secret."""
    return _derive_bytes(secret, agreement, b"self mask of " + owner.encode())


def _derive_bytes(secret: bytes, agreement: SumAgreement, use: bytes) -> bytes:
    """Derive 32 bytes for one use from a secret (HKDF-SHA256, salted with the agreement)."""
    info = b"secure-apfed step keys v1 " + use
    return HKDF(algorithm=SHA256(), length=32, salt=agreement.digest, info=info).derive(secret)


def _commit_seed(seed: bytes) -> bytes:
    """Return the digest of a self-mask seed that its owner announces."""
    return hashlib.sha256(b"secure-apfed self mask v1" + seed).digest()


def _make_share_error(owner: str) -> RemoteProtocolError:
    """Return the error for shares that do not give what their owner announced."""
    return RemoteProtocolError(
        f"the shares of {owner}'s secret do not give what {owner} announced: {owner} dealt false "
        "shares, or a passive answered with one; this step has no sum"
    )


@dataclass(frozen=True)
class RecoverableSum(MaskedSum):
    """A sum of doubly masked integers modulo 2^ring_bits, of at least `threshold` passives.

    Raises LocalProtocolError: a sum that could leave the ring, or a threshold of at most M / 2.
    """

    masks: ClassVar[str] = "recoverable"
    name: ClassVar[str] = format_sum_name(MaskedSum.scheme, masks)
    rounds: ClassVar[int] = 2
    needs_all: ClassVar[bool] = False
    rests_on: ClassVar[str] = (
        "X25519 and AES-256 being hard to break, and fewer than 2 threshold - M passives who help "
        "the aggregator"
    )
    leaks: ClassVar[SumLeaks] = SumLeaks(
        contribution=Reading(
            reads="One masked vector of each passive and step, as good as random: its size and "
            "time; public keys for the next step, and sealed shares that it passes on.",
            protects="Masks that the passives share in pairs, one of each passive's own, and one "
            "more that each shares with the active. They come off only if all answer the same "
            "message.",
            remains="Who takes part, and when. It can alter the sum without being noticed, and "
            "call a passive silent that is not.",
        ),
        request=Reading(
            reads="Which passives are counted in the step; their public keys for the next one, "
            "and the shares that they sealed for it.",
            protects="A share alone says nothing of the secret.",
            remains="Who fell silent, and when.",
        ),
        answer=Reading(
            reads="Of each counted passive the seed of its own mask, of each silent one the key "
            "of its masks with others; for this step only.",
            protects="No passive answers both about one passive, nor twice about one step, nor "
            "where fewer than the threshold are counted.",
            remains="Together with more than 2 threshold - M - 1 passives it could open single "
            "contributions. Telling passives different sets, it may once get a sum of fewer "
            "passives than the threshold, never of one.",
        ),
        active_and_aggregator="In one step the sum only. With a threshold below M, the active "
        "alone can skip a passive, send the others a related batch, and read that passive from two "
        "sums: exactly if the others' contributions are known multiples, roughly otherwise.",
        altered=ALTERED_SUM,
    )

    def __post_init__(self) -> None:
        """Raise LocalProtocolError unless the threshold is above M / 2."""
        contributors = len(self.agreement.contributors)
        if 2 * self.threshold <= contributors:
            raise LocalProtocolError(
                f"threshold {self.threshold} of {contributors} contributors is not above half of "
                f"them: an aggregator could open single contributions; take "
                f"{contributors // 2 + 1} or more"
            )
        super().__post_init__()

    @cached_property
    def threshold(self) -> int:
        """Return t, the contributions and answers without which a step has no sum."""
        contributors = len(self.agreement.contributors)
        usual = usual_threshold(contributors) if self.allow_single_reader else contributors
        return self.agreement.threshold or usual

    @property
    def least(self) -> int:
        return self.threshold

    def make_receiver(self) -> "RecoverableReceiver":
        return RecoverableReceiver(self)

    def make_contributor(
        self,
        me: str,
        *,
        book: str | PathLike[str] | None = None,
        new_book: bool = False,
        answered: "AnsweredCircles | None" = None,
    ) -> "RecoverableContributor":
        """Return a contributor's role, which remembers answered questions in `answered`, or else in
        a book.

        `new_book`: make the book, for the first session.
        """
        circles = answered or AnsweredCircles(book, new_book=new_book)
        return RecoverableContributor(self, me, circles)

    def make_combiner(self) -> SumCombiner:
        return RecoverableCombiner(self)

    def list_parameters(self) -> Mapping[str, object]:
        return {**super().list_parameters(), "threshold": self.threshold, "shares": "2^128 - 159"}

    def make_frames(self, key: bytes = b"", *, minimum: int | None = None) -> AgreedFrames:
        return super().make_frames(key, minimum=self.threshold if minimum is None else minimum)


@dataclass(frozen=True)
class _Step(KeepsSecrets):
    keys: StepKeys
    shares: dict[str, HolderShares]


def usual_threshold(contributors: int) -> int:
    """Return floor(2M / 3) + 1, at most M: it holds against fewer than M / 3 who collude."""
    return min(contributors, 2 * contributors // 3 + 1)


class AnsweredCircles:
    """A contributor's memory of the questions that it answered, and among whom it was counted.

    Two sums of equal contributions over two circles differ by what those contributed who are in one
    circle alone. So a contributor answers a question again only in the circle in which it answered
    it first. A question is known again by its rows and message, whatever its step and session, or
    by the values that it is answered with, unless they are all zero. An empty message is no
    question: then the values alone count.

    It is no protection from two questions that are related and not equal, as w and 2 w of a linear
    model; see `apfed_protocols.sums.readers`.

    Args:
        book: a file on this party's disk that remembers beyond this process and session;
            None: memory alone.
        new_book: make it, for the first session.

    Raises LocalProtocolError: the book is missing and `new_book` does not say to make it, or the
    other way round.
    """

    def __init__(self, book: str | PathLike[str] | None = None, *, new_book: bool = False) -> None:
        """Open the record of answered questions, or make it with `new_book`; without a file keep
        it in memory.
        """
        self._book = book
        self._circles: dict[str, tuple[str, ...]] = {}
        if book is not None:
            path = Path(book)
            if not new_book and not path.exists():
                raise LocalProtocolError(
                    f"{path}: the book of answered questions is missing, so they would "
                    "be answered again in another circle; put it back from a copy, or say "
                    "new_book=True in the first session"
                )
            if new_book and path.exists():
                raise LocalProtocolError(
                    f"{path}: there is a book already; leave new_book out to go on with it"
                )
            with closing(sqlite3.connect(book)) as opened, opened:
                opened.execute(_CIRCLES_TABLE)

    def _find_circle(self, mark: str) -> tuple[str, ...] | None:
        """Return the circle (contributors of the sum) in which a question with this mark (its
        digest) was answered; None: it never was.
        """
        if self._book is None:
            return self._circles.get(mark)
        with closing(sqlite3.connect(self._book)) as opened:
            row = opened.execute("SELECT circle FROM circles WHERE mark = ?", (mark,)).fetchone()
        return None if row is None else tuple(json.loads(row[0]))

    def require_same_circle(
        self, marks: Iterable[str], circle: Sequence[str], *, me: str, aggregator: str
    ) -> None:
        """Raise RemoteProtocolError if a question with one of these marks was answered in another
        circle.

        A circle is the set of contributors whose values one sum adds; marks are digests by which a
        repeated question or answer is recognised.

        `aggregator`: named in the error.
        """
        for mark in marks:
            earlier = self._find_circle(mark) or tuple(circle)
            differing = sorted(set(earlier) ^ set(circle))
            if differing:
                raise RemoteProtocolError(
                    f"{aggregator} asks {me} again about what it answered among "
                    f"{', '.join(earlier)}, and counts {', '.join(circle)} now: the two sums would "
                    f"differ by what {', '.join(differing)} contributed. {me} does not answer; its "
                    f"session is over. {self.suggest_remedy(earlier, circle)}"
                )

    def suggest_remedy(self, earlier: Sequence[str], circle: Sequence[str]) -> str:
        """Return the advice for a question that was answered in a sum of other contributors
        before.
        """
        del earlier, circle
        return "Ask another question in a new session, or the same circle"

    def make_marks(self, values_BD: FloatArray, binding: StepBinding) -> tuple[str, ...]:
        """Return the marks by which a question, and its answer, are recognised."""
        return mark_question(values_BD, binding)

    def add_marks(self, marks: Iterable[str], circle: Sequence[str]) -> None:
        """Record the marks of a question (its digests) with its circle, the contributors of the
        sum.

        On return they are on the disk, and an answer may leave.
        """
        if self._book is None:
            for mark in marks:
                self._circles.setdefault(mark, tuple(circle))
            return
        rows = [(mark, json.dumps(list(circle))) for mark in marks]
        with closing(sqlite3.connect(self._book)) as opened, opened:
            opened.executemany("INSERT OR IGNORE INTO circles VALUES (?, ?)", rows)


def mark_question(values_BD: FloatArray, binding: StepBinding) -> tuple[str, ...]:
    """Return the marks by which `AnsweredCircles` recognises a question, and its answer."""
    marks = []
    if binding.message != _NO_MESSAGE:
        question = hashlib.blake2b(binding.rows + binding.message, digest_size=_MARK_BYTES)
        marks.append(f"question {question.hexdigest()}")
    if values_BD.any():
        values = hashlib.blake2b(repr(values_BD.shape).encode(), digest_size=_MARK_BYTES)
        values.update(np.ascontiguousarray(values_BD, dtype="<f8").data)
        marks.append(f"values {values.hexdigest()}")
    return tuple(marks)


class RecoverableContributor(SumContributor):
    """A passive's end: two kinds of masks, and shares of the secrets behind both for the others.

    An aggregator that asks for the share of a self-mask and for the share of a key of the same
    passive, or asks twice, or counts fewer than the threshold, or asks again about what was
    answered in another circle, gets no answer, and the session of this passive is over.

    Attributes:
        answered: what it answered, and among whom; `SumSession.make_contributor` can keep a book.
    """

    _sum: RecoverableSum

    def __init__(
        self, secure_sum: RecoverableSum, me: str, answered: AnsweredCircles | None = None
    ) -> None:
        """Make the role of `me`: a mask with the active, a sealed link to each other contributor,
        and keys for the first step.

        `answered`: the questions that it answered before; None: it starts with none.
        """
        agreement = secure_sum.agreement
        frames = secure_sum.make_frames()
        self._active = PairwiseSeeds(me, (agreement.receiver,), frames)
        super().__init__(secure_sum, me, frames, self._active)
        self._others = tuple(name for name in agreement.contributors if name != me)
        self._link_key = fresh_run_key()
        self._links = {
            name: SealedLink(
                me=me, peer=name, run_key=self._link_key, contract_hash=agreement.digest
            )
            for name in self._others
        }
        self._awaited = set(self._others)  # passives whose shares for the first step did not come
        self._ready: _Step | None = _Step(self._make_step_keys(), {})
        self._waiting: tuple[_Step, StepKeys] | None = None
        self.answered = AnsweredCircles() if answered is None else answered
        self._marks: tuple[str, ...] = ()

    def start(self) -> Sequence[Outgoing]:
        """Send the mask key to the active, a link key to each contributor, and the announcement of
        the first step's keys to the aggregator.
        """
        assert self._ready is not None
        link = self._link_key.public
        announced = self._ready.keys.announcement.pack()
        return (
            *self._active.start(),
            *(
                Outgoing(peer, self._frames.pack_setup(link, end.hello))
                for peer, end in self._links.items()
            ),
            Outgoing(self._sum.agreement.combiner, self._frames.pack_setup(announced)),
        )

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take the active's mask key; of each passive its link, then shares for step one.

        `body`: the bytes of the message.
        """
        if sender == self._sum.agreement.receiver:
            return self._active.receive(sender, body)
        step = self._ready
        if sender not in self._awaited or step is None:
            raise RemoteProtocolError(
                f"{sender} sent a setup message to {self.me}, who expects two from each of "
                f"{', '.join(self._others) or 'nobody'}"
            )
        frame = self._frames.open_own_setup(body, sender, self.me)
        link = self._links[sender]
        frame.require_blobs(sender, 1 if link.has_keys else 2)
        if link.has_keys:
            opened = link.open(frame.blobs[0], sequence=0, associated=_SETUP)
            step.shares[sender] = HolderShares.parse(opened, sender=sender)
            self._awaited.remove(sender)
            return ()
        link.agree(*frame.blobs)
        parcel = link.seal(step.keys.pick_shares(sender).pack(), sequence=0, associated=_SETUP)
        return (Outgoing(sender, self._frames.pack_setup(parcel)),)

    @property
    def is_finished(self) -> bool:
        return self._active.is_finished and not self._awaited

    def _require_setup(self) -> None:
        """Raise LocalProtocolError, which names the peers, until all keys and first shares have
        arrived.
        """
        self._active.require_completion()
        if self._awaited:
            raise LocalProtocolError(
                f"{self.me} holds no keys of {', '.join(sorted(self._awaited))}; run the setup "
                "first"
            )

    def _note_question(self, values_BD: FloatArray, binding: StepBinding) -> None:
        self._marks = self.answered.make_marks(values_BD, binding)

    def _protect_numbers(self, numbers_BD: NDArray[Any], binding: StepBinding) -> Sequence[bytes]:
        """Mask them; the keys for the next step travel with them.

        `numbers_BD`: fixed-point numbers to add.
        """
        step = self._ready
        self._ready = None
        if step is None:
            raise LocalProtocolError(
                f"the last contribution of {self.me} was never asked about, so it has no keys for "
                "another step; its session is over, open a new one"
            )
        self._add_masks(numbers_BD, step, binding)
        following = self._make_step_keys()
        bound = self._make_associated_data(step, binding.digest)
        # To the others in the agreement's order, as all parties count them.
        parcels = [
            self._seal_parcel(peer, following, bound)
            for peer in self._others
            if peer in step.shares
        ]
        self._waiting = step, following
        return numbers_BD.tobytes(), following.announcement.pack(), *parcels

    def _add_masks(self, total_BD: Elements, step: _Step, binding: StepBinding) -> None:
        """Add the masks of y_u (Bonawitz et al. 2017, section 4.2) and the mask for the active."""
        agreement = self._sum.agreement
        add_keystream(total_BD, step.keys.seed, binding.digest, sign=1)
        for peer, shares in step.shares.items():
            seed = pair_seed(
                step.keys.key, shares.public, agreement, (self.me, peer), use=_STEP_MASK
            )
            # The earlier of two passives adds what the later one subtracts.
            earlier = self._position < agreement.find_position(peer)
            add_keystream(total_BD, seed, binding.digest, sign=1 if earlier else -1)
        self._active.add_stream(agreement.receiver, binding, total_BD, sign=1)

    def answer(self, request: bytes) -> bytes:
        """Return one share of each passive of this step: of its self-mask seed if it is counted, of
        its mask key if it fell silent. The step is over afterwards, also where this raises.

        `request`: what the aggregator sent.
        """
        waiting = self._waiting
        self._waiting = None
        if waiting is None:
            raise LocalProtocolError(
                f"no contribution of {self.me} waits for a request; each step is answered once"
            )
        step, following = waiting
        frame = self._frames.open_request(request, self.me)
        counted = self._parse_contributors(frame.blobs, step)
        aggregator = self._sum.agreement.combiner
        self.answered.require_same_circle(self._marks, counted, me=self.me, aggregator=aggregator)
        others = [name for name in counted if name != self.me]
        bound = self._make_associated_data(step, frame.binding)
        parcels = zip(others, frame.blobs[1:], strict=True)
        next_shares = {peer: self._open_parcel(peer, parcel, bound) for peer, parcel in parcels}
        shares_by_name = {**step.shares, self.me: step.keys.pick_shares(self.me)}
        shares = [
            shares_by_name[name].seed_share if name in counted else shares_by_name[name].key_share
            for name in self._sum.agreement.contributors
            if name in shares_by_name
        ]
        self.answered.add_marks(self._marks, counted)
        body = self._frames.pack_answer(self.me, shares)
        self._ready = _Step(following, next_shares)
        return body

    def _parse_contributors(self, blobs: Sequence[bytes], step: _Step) -> Sequence[str]:
        """Return who is counted by a request. Raises RemoteProtocolError: strangers, fewer than the
        threshold, not this party, or another number of sealed shares.

        `blobs`: the parts of the frame.
        """
        agreement = self._sum.agreement
        aggregator = agreement.combiner
        if not blobs:
            raise RemoteProtocolError(f"{aggregator} sent a request that counts nobody")
        counted = agreement.parse_names(blobs[0], sender=aggregator)
        strangers = [name for name in counted if name != self.me and name not in step.shares]
        if strangers or self.me not in counted or len(counted) < self._frames.least:
            raise RemoteProtocolError(
                f"{aggregator} counts {', '.join(counted) or 'nobody'} in this step; "
                f"{self.me} answers only where it is counted among {self._frames.least} or more "
                f"of {', '.join(sorted([self.me, *step.shares]))}"
            )
        if len(blobs) != len(counted):
            raise RemoteProtocolError(
                f"{aggregator} sent keys of {len(blobs) - 1} passives, expected {len(counted) - 1}"
            )
        return counted

    def _make_step_keys(self) -> StepKeys:
        return StepKeys(self._sum.agreement, self._frames.least, self.me)

    def _seal_parcel(self, peer: str, keys: StepKeys, bound: bytes) -> bytes:
        """Seal for `peer` its shares of these keys; `bound` ties them to step and senders."""
        link = self._links[peer]
        packed = keys.pick_shares(peer).pack()
        return link.seal(packed, sequence=link.next_sequence, associated=bound)

    def _open_parcel(self, peer: str, parcel: bytes, bound: bytes) -> HolderShares:
        """Open the parcel of keys that a passive sealed for this one.

        Each passive sealed as many parcels for this one as this one for it. Raises
        RemoteProtocolError: the parcel does not authenticate.

        `bound`: bytes that the seal authenticates.
        """
        link = self._links[peer]
        try:
            opened = link.open(parcel, sequence=link.next_sequence - 1, associated=bound)
        except RemoteProtocolError as error:
            agreement = self._sum.agreement
            raise RemoteProtocolError(
                f"the keys of {peer} for {self.me} do not authenticate: they were altered, or "
                f"{agreement.combiner} counted others towards {peer} in the last step, or "
                f"{agreement.receiver} sent {peer} another message; no answer"
            ) from error
        return HolderShares.parse(opened, sender=peer)

    def _make_associated_data(self, step: _Step, binding_digest: bytes) -> bytes:
        """Return the bytes that tie sealed shares to a step's message and to who could
        contribute.
        """
        return binding_digest + self._sum.agreement.pack_names([self.me, *step.shares])


@dataclass(frozen=True)
class _Underway:
    """A step between its contributions and its answers: who could contribute, and who did."""

    roster: Mapping[str, Announcement]
    frames: Sequence[Frame] = field(repr=False)
    counted: Sequence[str]
    total: Elements = field(repr=False)


class RecoverableCombiner(SumCombiner):
    """The aggregator's end: adds, asks, and takes off what is left.

    It holds no key of its own; what it rebuilds from shares opens one step's self-masks and the
    pair masks of those who fell silent, and is forgotten with the step.
    """

    def __init__(self, secure_sum: RecoverableSum) -> None:
        """Make the aggregator's role, which waits for every contributor's announcement."""
        super().__init__(secure_sum.make_frames(), NoSetup())
        self._sum = secure_sum
        self._announcements: dict[str, Announcement] = {}
        self._underway: _Underway | None = None
        self._set_up = False

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take one contributor's announcement of its keys for the first step.

        `body`: the bytes of the message.
        """
        contributors = self._sum.agreement.contributors
        if sender not in contributors or self._set_up or sender in self._announcements:
            raise RemoteProtocolError(
                f"{sender} sent a setup message to the aggregator, who expects one from each of "
                f"{', '.join(contributors)}"
            )
        frame = self._frames.open_own_setup(body, sender, "the aggregator")
        frame.require_blobs(sender, 1)
        self._announcements[sender] = Announcement.parse(frame.blobs[0], sender=sender)
        self._set_up = len(self._announcements) == len(contributors)
        return ()

    @property
    def is_finished(self) -> bool:
        return self._set_up

    def ask(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None = None
    ) -> Mapping[str, bytes]:
        """Add the contributions and return one request for each passive that contributed. Raises
        RemoteProtocolError: a passive contributes that was silent in an earlier step.

        `binding_digest`: what all must answer; None: compared with each other alone.
        """
        if not self._set_up:
            raise LocalProtocolError("the aggregator has no keys announced yet; run the setup")
        agreed = self._sum.agreement.contributors
        roster = {name: self._announcements[name] for name in agreed if name in self._announcements}
        silent = [name for name in agreed if name in contributions and name not in roster]
        if silent:
            raise RemoteProtocolError(
                f"{', '.join(silent)} fell silent in an earlier step, and stays out until a new "
                "session"
            )
        frames = self._frames.open_contributions(contributions, binding_digest)
        counted = [agreed[frame.party] for frame in frames]
        announced = [self._parse_announcement(frame, len(roster)) for frame in frames]
        self._underway = _Underway(roster, frames, counted, self._sum.add_elements(frames))
        self._announcements = dict(zip(counted, announced, strict=True))
        return {name: self._pack_request(name, self._underway) for name in counted}

    def combine(self, bodies: Mapping[str, bytes], binding_digest: bytes | None = None) -> bytes:
        """Rebuild self-mask seeds and silent passives' keys from the answers, subtract the masks
        that do not cancel, and pack the sum with the names of those it counts.

        `bodies`: each sender's message. `binding_digest`: what all must answer; None: compared with
        each other alone.
        """
        underway = self._underway
        agreement = self._sum.agreement
        if underway is None:
            raise LocalProtocolError("nobody was asked yet; ask with the contributions first")
        frames = self._frames.open_answers(bodies, underway.counted, binding_digest)
        self._underway = None
        shares = self._collect_shares(frames, underway)
        binding = underway.frames[0].binding
        total = underway.total
        for name, announced in underway.roster.items():
            if name in underway.counted:
                seed = rebuilt_seed(shares[name], announced, agreement, name)
                add_keystream(total, seed, binding, sign=-1)
            else:
                key = _rebuild_key(shares[name], announced, agreement, name)
                self._subtract_pair_masks(name, key, underway)
        counted = agreement.pack_names(underway.counted)
        return self._frames.sum_of(underway.frames, (total.tobytes(), counted))

    def _parse_announcement(self, frame: Frame, roster: int) -> Announcement:
        """Parse what a contribution announces for the next step; its parcels must be complete."""
        sender = self._sum.agreement.contributors[frame.party]
        frame.require_blobs(sender, 1 + roster)
        if any(len(parcel) != PARCEL_BYTES for parcel in frame.blobs[2:]):
            raise RemoteProtocolError(f"{sender} sent keys of another size for the next step")
        return Announcement.parse(frame.blobs[1], sender=sender)

    def _pack_request(self, to: str, underway: _Underway) -> bytes:
        """Pack for one passive who is counted, and the shares that the others sealed for it."""
        parcels = []
        for name, frame in zip(underway.counted, underway.frames, strict=True):
            if name != to:
                receivers = [other for other in underway.roster if other != name]
                parcels.append(frame.blobs[2 + receivers.index(to)])
        counted = self._sum.agreement.pack_names(underway.counted)
        return self._frames.pack_request(to, (counted, *parcels))

    def _collect_shares(
        self, frames: Sequence[Frame], underway: _Underway
    ) -> Mapping[str, Mapping[int, bytes]]:
        """Return as many shares as the threshold for each passive of the step, by holder.

        `frames`: one answer of each holder.
        """
        agreed = self._sum.agreement.contributors
        for frame in frames:
            frame.require_blobs(agreed[frame.party], len(underway.roster))
            if any(len(share) != SECRET_BYTES for share in frame.blobs):
                raise RemoteProtocolError(f"{agreed[frame.party]} sent a share of another size")
        return {
            name: {frame.party: frame.blobs[place] for frame in frames[: self._frames.least]}
            for place, name in enumerate(underway.roster)
        }

    def _subtract_pair_masks(self, silent: str, key: RunKey, underway: _Underway) -> None:
        """Take off the masks that those counted share with one who fell silent, under its key."""
        agreement = self._sum.agreement
        binding = underway.frames[0].binding
        for name in underway.counted:
            public = underway.roster[name].public
            seed = pair_seed(key, public, agreement, (name, silent), use=_STEP_MASK)
            # The counted one added it where it comes first.
            added = agreement.find_position(name) < agreement.find_position(silent)
            add_keystream(underway.total, seed, binding, sign=-1 if added else 1)


class RecoverableReceiver(MaskedReceiver):
    """A receiver that takes off the masks it shares with `counted`, those in the last sum."""

    def _list_contributors(self, frame: Frame) -> Sequence[str]:
        """Return whose contributions the aggregator counted, and note them as `counted`."""
        agreement = self._sum.agreement
        frame.require_blobs(agreement.combiner, 2)
        counted = agreement.parse_names(frame.blobs[1], sender=agreement.combiner)
        if len(counted) != frame.party:
            raise RemoteProtocolError(
                f"{agreement.combiner} sent a sum of {frame.party} contributions and names "
                f"{len(counted)} contributors"
            )
        self.counted = counted
        return counted
