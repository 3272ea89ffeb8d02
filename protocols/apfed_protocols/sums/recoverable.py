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
`allow_single_reader` says otherwise. Passives refuse the same request for a sum of other
contributors (`ContributorLog`), which stops a literal repeat and no related request.

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
    MaskedReceiver,
    MaskedSum,
    PairwiseSeeds,
    RingElements,
    add_keystream,
    derive_pair_seed,
)
from apfed_protocols.sums.roles import KeepsSecrets, NoSetup, SumAggregator, SumContributor

_PRIME = 2**128 - 159  # the largest whose numbers fit
SECRET_BYTES = 16
"""Bytes of a secret, and of each share of it."""
_PUBLIC_BYTES = _DIGEST_BYTES = 32
_HOLDER_SHARES_BYTES = _PUBLIC_BYTES + 2 * SECRET_BYTES
ANNOUNCEMENT_BYTES = _PUBLIC_BYTES + _DIGEST_BYTES
"""Bytes of what one passive tells all, for one step."""
PARCEL_BYTES = _HOLDER_SHARES_BYTES + SEAL_OVERHEAD_BYTES
"""Bytes of what one passive seals for another, for one step."""
_SETUP_ASSOCIATED_DATA = b"setup"
_STEP_MASK_PURPOSE = b"secure-apfed step mask v1"
_DIGEST_OF_NO_MESSAGE = hashlib.sha256(b"").digest()
_REQUEST_DIGEST_BYTES = 16
_CREATE_TABLE = "CREATE TABLE IF NOT EXISTS circles (mark TEXT PRIMARY KEY, circle TEXT)"


# The secrets of a step, after figure 4, rounds 0 and 1: a mask key pair (X25519) and a self-mask
# seed, each derived from a 16-byte secret that is shared by Shamir 1979 over the integers modulo
# 2^128 - 159, with coefficients of the operating system's generator. The arithmetic is Python's:
# PyCryptodome's, over GF(2^128) bit by bit, took nine tenths of a step of fifty passives. Keys
# serve one step and are forgotten. What is rebuilt from shares is compared with what its owner
# announced. A dealer splits its secrets; a holder gets one share of each. A parcel is the shares of
# one dealer for one holder, encrypted, which the aggregator forwards.


@dataclass(frozen=True)
class Announcement:
    """The public part of a passive's secrets of one step.

    Attributes:
        public_key: the passive's X25519 public key for pairwise masks, 32 bytes.
        seed_commitment: SHA-256 of its self-mask seed.
    """

    public_key: bytes
    seed_commitment: bytes

    def pack(self) -> bytes:
        """Encode the announcement in `ANNOUNCEMENT_BYTES`."""
        return self.public_key + self.seed_commitment

    @classmethod
    def parse(cls, data: bytes, *, sender: str) -> "Announcement":
        """Decode an announcement. Raises RemoteProtocolError, which names `sender`: it has another
        size.
        """
        if len(data) != ANNOUNCEMENT_BYTES:
            raise RemoteProtocolError(
                f"{sender} announced its keys in {len(data)} bytes, expected {ANNOUNCEMENT_BYTES}"
            )
        return cls(data[:_PUBLIC_BYTES], data[_PUBLIC_BYTES:])


@dataclass(frozen=True)
class HolderShares(KeepsSecrets):
    """The shares of one passive's secrets of one step that another passive, their holder, gets.

    Attributes:
        dealer_public_key: the dealer's X25519 public key for pairwise masks, 32 bytes.
        key_share: Shamir share of the secret behind that key, 16 bytes.
        seed_share: Shamir share of the secret behind the self-mask seed, 16 bytes.
    """

    dealer_public_key: bytes
    key_share: bytes = field(repr=False)
    seed_share: bytes = field(repr=False)

    def pack(self) -> bytes:
        """Encode the shares, to be encrypted for their holder."""
        return self.dealer_public_key + self.key_share + self.seed_share

    @classmethod
    def parse(cls, data: bytes, *, sender: str) -> "HolderShares":
        """Decode the decrypted message with which the passive `sender` gives this one shares of its
        secrets. Raises RemoteProtocolError: the bytes have another size.
        """
        if len(data) != _HOLDER_SHARES_BYTES:
            raise RemoteProtocolError(
                f"{sender} dealt shares in {len(data)} bytes, expected {_HOLDER_SHARES_BYTES}"
            )
        key_share_end = _PUBLIC_BYTES + SECRET_BYTES
        return cls(
            dealer_public_key=data[:_PUBLIC_BYTES],
            key_share=data[_PUBLIC_BYTES:key_share_end],
            seed_share=data[key_share_end:],
        )


class StepKeys(KeepsSecrets):
    """A passive's two secrets of one step, the key for pairwise masks and the seed of its
    self-mask, and their shares for all contributors.
    """

    def __init__(self, agreement: SumAgreement, threshold: int, owner: str) -> None:
        """Draw the two secrets of one step and split each among all contributors (Bonawitz et al.
        2017, figure 4, rounds 0 and 1).

        Args:
            agreement: names the contributors.
            threshold: how many shares rebuild a secret.
            owner: the contributor whose secrets they are.
        """
        key_secret = _pack_number(_draw_number())
        seed_secret = _pack_number(_draw_number())
        self.mask_key = _derive_mask_key(key_secret, agreement, owner)
        self.self_mask_seed = _derive_self_mask_seed(seed_secret, agreement, owner)
        self._agreement = agreement
        holder_count = len(agreement.contributors)
        self._key_shares = split_secret(key_secret, threshold=threshold, holder_count=holder_count)
        self._seed_shares = split_secret(
            seed_secret, threshold=threshold, holder_count=holder_count
        )

    @property
    def announcement(self) -> Announcement:
        """Return the public part: the public mask key and the commitment to the self-mask seed."""
        return Announcement(self.mask_key.public, _commit_seed(self.self_mask_seed))

    def pick_shares(self, holder: str) -> HolderShares:
        """Return the public key and the shares of the two secrets for the contributor `holder`."""
        position = self._agreement.find_position(holder)
        return HolderShares(
            self.mask_key.public, self._key_shares[position], self._seed_shares[position]
        )


def _rebuild_key(
    share_by_position: Mapping[int, bytes],
    announcement: Announcement,
    agreement: SumAgreement,
    owner: str,
) -> RunKey:
    """Rebuild the key pair for pairwise masks of a passive that dropped out from shares of the
    secret behind it, so that these masks can be subtracted from the sum.

    Args:
        share_by_position: Shamir shares of the secret, as many as the threshold, by the position of
            their holder.
        announcement: what the owner announced for this step, with its public key.
        agreement: salts the derivation of the key.
        owner: the passive whose key it is.

    Raises RemoteProtocolError: the result is not the key that its owner announced.
    """
    key = _derive_mask_key(join_shares(share_by_position), agreement, owner)
    if key.public != announcement.public_key:
        raise _make_share_error(owner)
    return key


def rebuild_seed(
    share_by_position: Mapping[int, bytes],
    announcement: Announcement,
    agreement: SumAgreement,
    owner: str,
) -> bytes:
    """Rebuild the self-mask seed of a passive whose contribution is in the sum, from shares of the
    secret behind it, so that the self-mask can be subtracted from the sum.

    Args:
        share_by_position: Shamir shares of the secret, as many as the threshold, by the position of
            their holder.
        announcement: what the owner announced for this step, with a commitment to the seed.
        agreement: salts the derivation of the seed.
        owner: the passive whose seed it is.

    Raises RemoteProtocolError: the result is not the seed that its owner committed to.
    """
    seed = _derive_self_mask_seed(join_shares(share_by_position), agreement, owner)
    if _commit_seed(seed) != announcement.seed_commitment:
        raise _make_share_error(owner)
    return seed


def split_secret(secret: bytes, *, threshold: int, holder_count: int) -> Sequence[bytes]:
    """Split a secret into one share for each of `holder_count` holders (Shamir 1979); return the
    shares in the holders' order, 16 bytes each.

    Any `threshold` shares (1 to `holder_count`) determine the secret; fewer reveal nothing about
    it.

    `secret`: 16 bytes, a number below the prime 2^128 - 159, in big-endian order.

    Raises LocalProtocolError: the secret or the threshold is out of range.
    """
    number = int.from_bytes(secret, "big")
    if len(secret) != SECRET_BYTES or number >= _PRIME or not 1 <= threshold <= holder_count:
        raise LocalProtocolError(
            f"a secret of {SECRET_BYTES} bytes, a number below 2^128 - 159, is shared among at "
            "least `threshold` holders, got "
            f"{len(secret)} bytes, threshold {threshold} and {holder_count} holders"
        )
    # A random polynomial of degree threshold - 1, the coefficient of the highest power first; its
    # value at 0 is the secret.
    coefficients = [_draw_number() for _ in range(threshold - 1)]
    coefficients.append(number)
    # The holders' positions are from 1, since the value at 0 is the secret.
    return [
        _pack_number(_evaluate_polynomial(coefficients, position))
        for position in range(1, holder_count + 1)
    ]


def _evaluate_polynomial(coefficients: Sequence[int], x: int) -> int:
    """Return the value of a polynomial at x modulo the prime, by Horner's rule.

    `coefficients`: that of the highest power first.
    """
    value = 0
    for coefficient in coefficients:
        value = (value * x + coefficient) % _PRIME
    return value


def join_shares(share_by_position: Mapping[int, bytes]) -> bytes:
    """Return the secret, 16 bytes, from Shamir shares: the value at 0 of the polynomial through
    them, modulo the prime.

    If there are fewer shares than the threshold, or one is false, other bytes are returned and no
    error is raised.

    `share_by_position`: shares of 16 bytes by the position of their holder, from 0.

    Raises LocalProtocolError: there are no shares, or one has another size.
    """
    if not share_by_position or any(
        len(share) != SECRET_BYTES for share in share_by_position.values()
    ):
        raise LocalProtocolError(f"a secret is joined from shares of {SECRET_BYTES} bytes each")
    weights = _compute_lagrange_weights(tuple(share_by_position))
    share_numbers = [int.from_bytes(share, "big") for share in share_by_position.values()]
    secret = sum(weight * number for weight, number in zip(weights, share_numbers, strict=True))
    return _pack_number(secret % _PRIME)


@lru_cache(maxsize=64)
def _compute_lagrange_weights(holder_positions: tuple[int, ...]) -> tuple[int, ...]:
    """Return the Lagrange weight of each holder's Shamir share: the secret, which is the
    polynomial's value at 0, is the weighted sum of the shares, modulo the prime.

    `holder_positions`: from 0; a share is the polynomial's value at its holder's position + 1.
    """
    points = [holder + 1 for holder in holder_positions]

    def compute_weight(point: int) -> int:
        """Return the product of other / (other - point) over all other points, modulo the prime."""
        numerator = denominator = 1
        for other in points:
            if other != point:
                numerator = numerator * other % _PRIME
                denominator = denominator * (other - point) % _PRIME
        return numerator * pow(denominator, -1, _PRIME) % _PRIME

    return tuple(map(compute_weight, points))


def _draw_number() -> int:
    """Return a random number below the prime: 256 random bits modulo the prime, so that it is
    uniform up to a bias of 2^-128.
    """
    return int.from_bytes(fresh_key(), "big") % _PRIME


def _pack_number(number: int) -> bytes:
    """Encode a number below the prime in 16 bytes."""
    return number.to_bytes(SECRET_BYTES, "big")


def _derive_mask_key(secret: bytes, agreement: SumAgreement, owner: str) -> RunKey:
    """Return the X25519 key pair for one step's pairwise masks of `owner`, derived from its 16-byte
    secret.
    """
    return RunKey.from_secret_bytes(
        _derive_bytes(secret, agreement, b"mask key of " + owner.encode())
    )


def _derive_self_mask_seed(secret: bytes, agreement: SumAgreement, owner: str) -> bytes:
    """Return the seed of one step's self-mask of `owner`, derived from its 16-byte secret."""
    return _derive_bytes(secret, agreement, b"self mask of " + owner.encode())


def _derive_bytes(secret: bytes, agreement: SumAgreement, use: bytes) -> bytes:
    """Return 32 bytes derived from a secret for one use, a label (HKDF-SHA256, salted with the
    agreement).
    """
    info = b"secure-apfed step keys v1 " + use
    return HKDF(algorithm=SHA256(), length=32, salt=agreement.digest, info=info).derive(secret)


def _commit_seed(seed: bytes) -> bytes:
    """Return the commitment to a self-mask seed that its owner announces: its SHA-256 digest."""
    return hashlib.sha256(b"secure-apfed self mask v1" + seed).digest()


def _make_share_error(owner: str) -> RemoteProtocolError:
    """Return the error for shares that do not rebuild the secret that `owner` announced."""
    return RemoteProtocolError(
        f"the shares of {owner}'s secret do not give what {owner} announced: {owner} dealt false "
        "shares, or a passive answered with one; this step has no sum"
    )


@dataclass(frozen=True)
class RecoverableSum(MaskedSum):
    """A sum of integers under recoverable (double) masks, modulo 2^ring_bits, of `threshold` or
    more passives.

    Raises LocalProtocolError: a sum of all contributions could exceed the ring, or the threshold
    is at most M / 2.
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
        contributor_count = len(self.agreement.contributors)
        if 2 * self.threshold <= contributor_count:
            raise LocalProtocolError(
                f"threshold {self.threshold} of {contributor_count} contributors is not above "
                f"half of them: an aggregator could open single contributions; take "
                f"{contributor_count // 2 + 1} or more"
            )
        super().__post_init__()

    @cached_property
    def threshold(self) -> int:
        """Return t, the least number of contributions, and of answers, with which a step has a sum.

        Without an agreed threshold it is M, the number of all contributors; with
        `allow_single_reader` it is then floor(2M / 3) + 1 (`usual_threshold`).
        """
        contributor_count = len(self.agreement.contributors)
        default = (
            usual_threshold(contributor_count) if self.allow_single_reader else contributor_count
        )
        return self.agreement.threshold or default

    @property
    def min_contributors(self) -> int:
        return self.threshold

    def make_receiver(self) -> "RecoverableReceiver":
        return RecoverableReceiver(self)

    def make_contributor(
        self,
        me: str,
        *,
        log_file: str | PathLike[str] | None = None,
        is_new_log: bool = False,
        contributor_log: "ContributorLog | None" = None,
    ) -> "RecoverableContributor":
        """Return the role of the contributor `me`.

        Args:
            me: the contributor's name in the agreement.
            log_file: path of a file that records which requests (rows and messages of the active)
                this contributor answered, and which contributors the sum added (`ContributorLog`);
                None: the log is kept in memory.
            is_new_log: create that file, for the first session.
            contributor_log: the log itself, in place of `log_file`.
        """
        log = contributor_log or ContributorLog(log_file, is_new=is_new_log)
        return RecoverableContributor(self, me, log)

    def make_aggregator(self) -> SumAggregator:
        return RecoverableAggregator(self)

    def list_parameters(self) -> Mapping[str, object]:
        return {**super().list_parameters(), "threshold": self.threshold, "shares": "2^128 - 159"}

    def make_frames(self, key: bytes = b"", *, minimum: int | None = None) -> AgreedFrames:
        return super().make_frames(key, minimum=self.threshold if minimum is None else minimum)


@dataclass(frozen=True)
class _StepSecrets(KeepsSecrets):
    """A contributor's secrets for one step.

    Attributes:
        own_keys: the contributor's own two secrets and their shares for the others.
        shares_by_dealer: shares of the other contributors' secrets that this one holds, by the
            contributor whose secrets they are.
    """

    own_keys: StepKeys
    shares_by_dealer: dict[str, HolderShares]


def usual_threshold(contributor_count: int) -> int:
    """Return floor(2M / 3) + 1, at most M, the threshold for M = `contributor_count` that protects
    from fewer than M / 3 colluding passives.
    """
    return min(contributor_count, 2 * contributor_count // 3 + 1)


class ContributorLog:
    """A contributor's record of the requests that it answered, each with the contributors whose
    values the sum added.

    Two sums of equal contributions over two sets of contributors differ by the contributions of
    those who are in one set only. So a contributor answers a request again only for a sum of the
    same contributors as the first time. A request is recognised by digests: of its rows and
    message, whatever its step and session, and of the values that answer it, unless they are all
    zero. An empty message is no request: then the values alone count.

    It does not protect from two requests that are related but not equal, as w and 2 w of a linear
    model; see `apfed_protocols.sums.readers`.
    """

    def __init__(self, file: str | PathLike[str] | None = None, *, is_new: bool = False) -> None:
        """Open the log in a file, or create the file.

        Args:
            file: on this party's disk, keeps the log beyond this process and session; None: the log
                is kept in memory.
            is_new: create the file, for the first session.

        Raises LocalProtocolError: the file is missing without `is_new`, or exists with it.
        """
        self._file = file
        # The log in memory: the contributors in the sum by the digest of the request.
        self._contributors_by_digest: dict[str, tuple[str, ...]] = {}
        if file is not None:
            path = Path(file)
            if not is_new and not path.exists():
                raise LocalProtocolError(
                    f"{path}: the log of answered requests is missing, so they would "
                    "be answered again among other contributors; put it back from a copy, or say "
                    "is_new_log=True in the first session"
                )
            if is_new and path.exists():
                raise LocalProtocolError(
                    f"{path}: there is a log already; leave is_new_log out to go on with it"
                )
            with closing(sqlite3.connect(file)) as database, database:
                database.execute(_CREATE_TABLE)

    def _find_contributors(self, request_digest: str) -> tuple[str, ...] | None:
        """Return the contributors in the sum for which the request with this digest was answered
        first; None if it was never answered.
        """
        if self._file is None:
            return self._contributors_by_digest.get(request_digest)
        with closing(sqlite3.connect(self._file)) as database:
            row = database.execute(
                "SELECT circle FROM circles WHERE mark = ?", (request_digest,)
            ).fetchone()
        return None if row is None else tuple(json.loads(row[0]))

    def require_same_contributors(
        self,
        request_digests: Iterable[str],
        contributors: Sequence[str],
        *,
        me: str,
        aggregator: str,
    ) -> None:
        """Raise RemoteProtocolError if a request with one of these digests was answered before, for
        a sum of other contributors. The two sums would differ by the contributions of the parties
        that are in one of them only.

        Args:
            request_digests: digests by which a repeated request or answer is recognised
                (`compute_digests`).
            contributors: the parties whose values the sum is to add now.
            me, aggregator: names of this contributor and of the aggregator, for the error.
        """
        for request_digest in request_digests:
            earlier_contributors = self._find_contributors(request_digest)
            if earlier_contributors is None:
                continue
            in_one_sum_only = sorted(set(earlier_contributors) ^ set(contributors))
            if in_one_sum_only:
                raise RemoteProtocolError(
                    f"{aggregator} asks {me} again about what it answered among "
                    f"{', '.join(earlier_contributors)}, and counts {', '.join(contributors)} now: "
                    f"the two sums would differ by what {', '.join(in_one_sum_only)} contributed. "
                    f"{me} does not answer; its session is over. "
                    f"{self.suggest_remedy(earlier_contributors, contributors)}"
                )

    def suggest_remedy(
        self, earlier_contributors: Sequence[str], contributors: Sequence[str]
    ) -> str:
        """Return the advice in the error about a request (rows and message of the active) that is
        repeated for a sum of other contributors.

        `earlier_contributors`: the parties in the first sum. `contributors`: the parties in the sum
        that is asked for now. Subclasses may use both.
        """
        del earlier_contributors, contributors
        return "Ask another question in a new session, or among the same contributors"

    def compute_digests(self, values_BD: FloatArray, binding: StepBinding) -> tuple[str, ...]:
        """Return the digests by which a repeated request (rows and message of the active) or
        repeated values are recognised (`digest_request`).
        """
        return digest_request(values_BD, binding)

    def record_answer(self, request_digests: Iterable[str], contributors: Sequence[str]) -> None:
        """Record that a request was answered for a sum of these contributors. If there is a file,
        the record is on the disk on return; only then this contributor's shares may be sent.

        `request_digests`: what `compute_digests` returned for the request.
        """
        if self._file is None:
            for request_digest in request_digests:
                self._contributors_by_digest.setdefault(request_digest, tuple(contributors))
            return
        names = json.dumps(list(contributors))
        rows = [(request_digest, names) for request_digest in request_digests]
        with closing(sqlite3.connect(self._file)) as database, database:
            database.executemany("INSERT OR IGNORE INTO circles VALUES (?, ?)", rows)


def digest_request(values_BD: FloatArray, binding: StepBinding) -> tuple[str, ...]:
    """Return the digests by which a repeated request is recognised: one of the active's rows and
    message, unless the message is empty; and one of the values that answer it, unless all values
    are zero, which reveal nothing.

    `values_BD`: the values contributed, B rows of D numbers. `binding`: the request that they
    answer.
    """
    digests = []
    if binding.message != _DIGEST_OF_NO_MESSAGE:
        request = hashlib.blake2b(binding.rows + binding.message, digest_size=_REQUEST_DIGEST_BYTES)
        digests.append(f"question {request.hexdigest()}")
    if values_BD.any():
        values = hashlib.blake2b(repr(values_BD.shape).encode(), digest_size=_REQUEST_DIGEST_BYTES)
        values.update(np.ascontiguousarray(values_BD, dtype="<f8").data)
        digests.append(f"values {values.hexdigest()}")
    return tuple(digests)


class RecoverableContributor(SumContributor):
    """A passive's role: it adds pairwise masks and a self-mask, and deals shares of the secrets
    behind both to the other passives.

    An aggregator that asks for both shares of one passive (of its self-mask seed and of its key),
    or asks twice, or counts fewer contributors than the threshold, or repeats an answered request
    for a sum of other contributors, gets no answer, and the session of this passive is over.

    Attributes:
        contributor_log: the record of the requests that it answered, and for a sum of which
            contributors.
    """

    _sum: RecoverableSum

    def __init__(
        self, secure_sum: RecoverableSum, me: str, contributor_log: ContributorLog | None = None
    ) -> None:
        """Make the role of `me`: a seed agreement with the active, an encrypted link to each other
        contributor, and secrets for the first step.

        `contributor_log`: the record of the requests (rows and messages of the active) that this
        contributor answered before; None: an empty one in memory.
        """
        agreement = secure_sum.agreement
        frames = secure_sum.make_frames()
        self._mask_agreement_with_active = PairwiseSeeds(me, (agreement.receiver,), frames)
        super().__init__(secure_sum, me, frames, self._mask_agreement_with_active)
        self._other_contributors = tuple(name for name in agreement.contributors if name != me)
        self._own_link_key = fresh_run_key()
        self._link_by_peer = {
            name: SealedLink(
                me=me, peer=name, run_key=self._own_link_key, contract_hash=agreement.digest
            )
            for name in self._other_contributors
        }
        # The passives whose shares for the first step have not arrived.
        self._peers_without_shares = set(self._other_contributors)
        # The secrets for the next contribution; None while a contribution waits for its request.
        self._next_secrets: _StepSecrets | None = _StepSecrets(self._make_step_keys(), {})
        # The step that waits for its request, and this passive's secrets for the step after it.
        self._unanswered_step: tuple[_StepSecrets, StepKeys] | None = None
        self.contributor_log = ContributorLog() if contributor_log is None else contributor_log
        # The digests by which the log recognises the active's request that was answered last.
        self._request_digests: tuple[str, ...] = ()

    def start(self) -> Sequence[Outgoing]:
        """Return the first set-up messages: a mask key for the active, a link key for each other
        contributor, and the announcement of the first step's keys for the aggregator.
        """
        assert self._next_secrets is not None
        announcement = self._next_secrets.own_keys.announcement.pack()
        to_contributors = [
            Outgoing(peer, self._frames.pack_setup(self._own_link_key.public, link.hello))
            for peer, link in self._link_by_peer.items()
        ]
        to_aggregator = Outgoing(
            self._sum.agreement.aggregator, self._frames.pack_setup(announcement)
        )
        return (*self._mask_agreement_with_active.start(), *to_contributors, to_aggregator)

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take a set-up message, and return the messages to send.

        The active sends its mask key. Each other passive first sends its link key, which is
        answered with encrypted shares of this passive's secrets for the first step; then it sends
        such shares itself.

        Raises RemoteProtocolError: the message is malformed or unexpected.
        """
        if sender == self._sum.agreement.receiver:
            return self._mask_agreement_with_active.receive(sender, body)
        step_secrets = self._next_secrets
        if sender not in self._peers_without_shares or step_secrets is None:
            raise RemoteProtocolError(
                f"{sender} sent a setup message to {self.me}, who expects two from each of "
                f"{', '.join(self._other_contributors) or 'nobody'}"
            )
        frame = self._frames.parse_own_setup(body, sender, self.me)
        link = self._link_by_peer[sender]
        if link.has_keys:  # from the first message of this peer, so this is its second
            frame.require_blobs(sender, 1)
            (parcel,) = frame.blobs
            packed_shares = link.open(parcel, sequence=0, associated=_SETUP_ASSOCIATED_DATA)
            shares = HolderShares.parse(packed_shares, sender=sender)
            step_secrets.shares_by_dealer[sender] = shares
            self._peers_without_shares.remove(sender)
            return ()
        frame.require_blobs(sender, 2)
        peer_public_key, peer_hello = frame.blobs
        link.agree(peer_public_key, peer_hello)
        shares_for_sender = step_secrets.own_keys.pick_shares(sender).pack()
        parcel = link.seal(shares_for_sender, sequence=0, associated=_SETUP_ASSOCIATED_DATA)
        return (Outgoing(sender, self._frames.pack_setup(parcel)),)

    @property
    def is_finished(self) -> bool:
        return self._mask_agreement_with_active.is_finished and not self._peers_without_shares

    def _require_setup(self) -> None:
        """Raise LocalProtocolError, which names the missing peers, unless all keys, and the shares
        for the first step, have arrived.
        """
        self._mask_agreement_with_active.require_completion()
        if self._peers_without_shares:
            raise LocalProtocolError(
                f"{self.me} holds no keys of {', '.join(sorted(self._peers_without_shares))}; run "
                "the setup first"
            )

    def _remember_request(self, values_BD: FloatArray, binding: StepBinding) -> None:
        """Store the digests of the active's request (rows and message) that this contribution
        answers, until the aggregator asks for shares in the second round.
        """
        self._request_digests = self.contributor_log.compute_digests(values_BD, binding)

    def _protect_numbers(self, numbers_BD: NDArray[Any], binding: StepBinding) -> Sequence[bytes]:
        """Mask a contribution, and draw the secrets for the next step, whose shares travel with it.

        Return the blobs of the message: the masked numbers, the announcement of this passive's keys
        for the next step, and one parcel (encrypted shares of these keys) for each other passive of
        this step.

        `numbers_BD`: B rows of D fixed-point integers modulo 2^32 or 2^64, masked in place.
        `binding`: the step and the active's message, from which the masks are derived.

        Raises LocalProtocolError: the aggregator never asked about the last contribution.
        """
        step_secrets = self._next_secrets
        self._next_secrets = None  # a step's secrets are used once
        if step_secrets is None:
            raise LocalProtocolError(
                f"the last contribution of {self.me} was never asked about, so it has no keys for "
                "another step; its session is over, open a new one"
            )
        self._add_masks(numbers_BD, step_secrets, binding)
        next_keys = self._make_step_keys()
        associated_data = self._make_associated_data(step_secrets, binding.digest)
        # In the agreement's order, by which the aggregator finds each receiver's parcel.
        parcels = [
            self._seal_parcel(peer, next_keys, associated_data)
            for peer in self._other_contributors
            if peer in step_secrets.shares_by_dealer
        ]
        self._unanswered_step = step_secrets, next_keys
        return numbers_BD.tobytes(), next_keys.announcement.pack(), *parcels

    def _add_masks(
        self, total_BD: RingElements, step_secrets: _StepSecrets, binding: StepBinding
    ) -> None:
        """Add the self-mask, the masks shared with the other passives (Bonawitz et al. 2017,
        section 4.2) and the mask shared with the active, in place.

        Args:
            total_BD: B rows of D fixed-point integers modulo 2^32 or 2^64.
            step_secrets: this passive's secrets of the step.
            binding: the step and the active's message, from which the masks are derived.
        """
        agreement = self._sum.agreement
        add_keystream(total_BD, step_secrets.own_keys.self_mask_seed, binding.digest, sign=1)
        for peer, shares in step_secrets.shares_by_dealer.items():
            seed = derive_pair_seed(
                step_secrets.own_keys.mask_key,
                shares.dealer_public_key,
                agreement,
                (self.me, peer),
                purpose=_STEP_MASK_PURPOSE,
            )
            # The earlier of two passives adds what the later one subtracts.
            is_earlier = self._position < agreement.find_position(peer)
            add_keystream(total_BD, seed, binding.digest, sign=1 if is_earlier else -1)
        self._mask_agreement_with_active.add_shared_mask(
            agreement.receiver, binding, total_BD, sign=1
        )

    def answer(self, request: bytes) -> bytes:
        """Return the answer to the aggregator's request: one share for each passive of this step,
        of its self-mask seed if its contribution is counted in the sum, of its mask key if it
        dropped out. The step is over afterwards, also if this raises.

        Raises:
            LocalProtocolError: no contribution waits for a request.
            RemoteProtocolError: the request is malformed, or its answer would help to reveal a
                contribution: too few passives are counted, or the same request of the active was
                answered for a sum of other passives.
        """
        unanswered_step = self._unanswered_step
        self._unanswered_step = None
        if unanswered_step is None:
            raise LocalProtocolError(
                f"no contribution of {self.me} waits for a request; each step is answered once"
            )
        step_secrets, next_keys = unanswered_step
        frame = self._frames.parse_request(request, self.me)
        counted = self._parse_contributors(frame.blobs, step_secrets)
        aggregator = self._sum.agreement.aggregator
        self.contributor_log.require_same_contributors(
            self._request_digests, counted, me=self.me, aggregator=aggregator
        )
        other_counted = [name for name in counted if name != self.me]
        associated_data = self._make_associated_data(step_secrets, frame.binding)
        next_shares = {
            peer: self._decrypt_parcel(peer, parcel, associated_data)
            for peer, parcel in zip(other_counted, frame.blobs[1:], strict=True)
        }
        shares = self._select_shares(step_secrets, counted)
        # Recorded before the answer exists, so that an interruption cannot lose the record.
        self.contributor_log.record_answer(self._request_digests, counted)
        body = self._frames.pack_answer(self.me, shares)
        self._next_secrets = _StepSecrets(next_keys, next_shares)
        return body

    def _select_shares(self, step_secrets: _StepSecrets, counted: Sequence[str]) -> Sequence[bytes]:
        """Return one share for each passive of the step, in the agreement's order: a share of its
        self-mask seed if it is counted in the sum, a share of its mask key if it dropped out. Both
        shares of one passive would reveal its contribution.

        `step_secrets`: this passive's secrets of the step. `counted`: the passives in the sum.
        """
        shares_by_dealer = {
            **step_secrets.shares_by_dealer,
            self.me: step_secrets.own_keys.pick_shares(self.me),
        }
        shares = []
        for name in self._sum.agreement.contributors:
            if name in shares_by_dealer:
                held_shares = shares_by_dealer[name]
                is_counted = name in counted
                shares.append(held_shares.seed_share if is_counted else held_shares.key_share)
        return shares

    def _parse_contributors(
        self, blobs: Sequence[bytes], step_secrets: _StepSecrets
    ) -> Sequence[str]:
        """Return the contributors that the aggregator's second-round request counts in the sum.

        Args:
            blobs: content of the request: the encoded names, and one parcel (encrypted shares for
                the next step) from each other counted contributor.
            step_secrets: this passive's secrets of the step, with shares from all passives that
                could contribute to it.

        Raises RemoteProtocolError: the request counts an unknown passive, fewer passives than the
        threshold, or not this passive; or it has another number of parcels.
        """
        agreement = self._sum.agreement
        aggregator = agreement.aggregator
        if not blobs:
            raise RemoteProtocolError(f"{aggregator} sent a request that counts nobody")
        counted = agreement.parse_names(blobs[0], sender=aggregator)
        strangers = [
            name
            for name in counted
            if name != self.me and name not in step_secrets.shares_by_dealer
        ]
        if strangers or self.me not in counted or len(counted) < self._frames.min_contributors:
            raise RemoteProtocolError(
                f"{aggregator} counts {', '.join(counted) or 'nobody'} in this step; "
                f"{self.me} answers only where it is counted among "
                f"{self._frames.min_contributors} or more "
                f"of {', '.join(sorted([self.me, *step_secrets.shares_by_dealer]))}"
            )
        if len(blobs) != len(counted):
            raise RemoteProtocolError(
                f"{aggregator} sent keys of {len(blobs) - 1} passives, expected {len(counted) - 1}"
            )
        return counted

    def _make_step_keys(self) -> StepKeys:
        """Draw this passive's secrets for one step."""
        return StepKeys(self._sum.agreement, self._frames.min_contributors, self.me)

    def _seal_parcel(self, peer: str, keys: StepKeys, associated_data: bytes) -> bytes:
        """Return a parcel: the shares of these keys (secrets of one step) for `peer`, encrypted for
        it. `associated_data` is the associated data of the encryption (`_make_associated_data`).
        """
        link = self._link_by_peer[peer]
        packed_shares = keys.pick_shares(peer).pack()
        return link.seal(packed_shares, sequence=link.next_sequence, associated=associated_data)

    def _decrypt_parcel(self, peer: str, parcel: bytes, associated_data: bytes) -> HolderShares:
        """Decrypt the shares that `peer` encrypted for this passive by `_seal_parcel`.

        `associated_data`: that of the encryption (`_make_associated_data`).

        Raises RemoteProtocolError: the parcel does not authenticate with `associated_data`.
        """
        link = self._link_by_peer[peer]
        # Both ends encrypt one parcel a step, so the peer's has the number of this party's last.
        sequence = link.next_sequence - 1
        try:
            packed_shares = link.open(parcel, sequence=sequence, associated=associated_data)
        except RemoteProtocolError as error:
            agreement = self._sum.agreement
            raise RemoteProtocolError(
                f"the keys of {peer} for {self.me} do not authenticate: they were altered, or "
                f"{agreement.aggregator} counted others towards {peer} in the last step, or "
                f"{agreement.receiver} sent {peer} another message; no answer"
            ) from error
        return HolderShares.parse(packed_shares, sender=peer)

    def _make_associated_data(self, step_secrets: _StepSecrets, binding_digest: bytes) -> bytes:
        """Return the associated data with which parcels (encrypted shares) are authenticated: the
        digest of the step and the active's message, and the contributors of the step. So a parcel
        does not decrypt if the sender was told others.
        """
        return binding_digest + self._sum.agreement.pack_names(
            [self.me, *step_secrets.shares_by_dealer]
        )


@dataclass(frozen=True)
class _StepInProgress:
    """A step of the aggregator between its contributions and its answers.

    Attributes:
        announcement_by_contributor: the passives that could contribute, with their announced keys
            for this step.
        frames: the contributions.
        counted: the passives that sent them, in the same order.
        masked_total: sum of the contributions, still masked, (rows, columns).
    """

    announcement_by_contributor: Mapping[str, Announcement]
    frames: Sequence[Frame] = field(repr=False)
    counted: Sequence[str]
    masked_total: RingElements = field(repr=False)


class RecoverableAggregator(SumAggregator):
    """The aggregator's role: it adds the contributions, asks for shares, and subtracts the masks
    that do not cancel.

    It holds no key of its own. The secrets that it rebuilds from shares give one step's self-masks
    and the pairwise masks of passives that dropped out, and are forgotten with the step.
    """

    def __init__(self, secure_sum: RecoverableSum) -> None:
        """Make the aggregator's role, which waits for every contributor's announcement."""
        super().__init__(secure_sum.make_frames(), NoSetup())
        self._sum = secure_sum
        self._announcement_by_contributor: dict[str, Announcement] = {}
        self._step_in_progress: _StepInProgress | None = None
        self._is_set_up = False

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take one contributor's set-up message, which announces its keys for the first step;
        return no messages.

        Raises RemoteProtocolError: the message is malformed or unexpected.
        """
        contributors = self._sum.agreement.contributors
        if (
            sender not in contributors
            or self._is_set_up
            or sender in self._announcement_by_contributor
        ):
            raise RemoteProtocolError(
                f"{sender} sent a setup message to the aggregator, who expects one from each of "
                f"{', '.join(contributors)}"
            )
        frame = self._frames.parse_own_setup(body, sender, "the aggregator")
        frame.require_blobs(sender, 1)
        self._announcement_by_contributor[sender] = Announcement.parse(
            frame.blobs[0], sender=sender
        )
        self._is_set_up = len(self._announcement_by_contributor) == len(contributors)
        return ()

    @property
    def is_finished(self) -> bool:
        return self._is_set_up

    def ask(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None = None
    ) -> Mapping[str, bytes]:
        """Add the contributions, by sender; return a second-round request for each passive that
        contributed, which says who is counted in the sum.

        `binding_digest`: SHA-256 digest (`StepBinding.digest`) of the step and of the active's
        message that all contributions must answer; None: the contributions are only compared with
        each other.

        Raises:
            LocalProtocolError: the set-up is not finished.
            RemoteProtocolError: there are too few contributions, one is malformed or comes from a
                passive that dropped out in an earlier step, or they answer different messages.
        """
        if not self._is_set_up:
            raise LocalProtocolError("the aggregator has no keys announced yet; run the setup")
        names = self._sum.agreement.contributors
        announcement_by_contributor = {
            name: self._announcement_by_contributor[name]
            for name in names
            if name in self._announcement_by_contributor
        }
        dropped_out = [
            name
            for name in names
            if name in contributions and name not in announcement_by_contributor
        ]
        if dropped_out:
            raise RemoteProtocolError(
                f"{', '.join(dropped_out)} fell silent in an earlier step, and stays out until a "
                "new session"
            )
        frames = self._frames.parse_contributions(contributions, binding_digest)
        counted = [names[frame.contributor_position] for frame in frames]
        next_announcements = [
            self._parse_announcement(frame, len(announcement_by_contributor)) for frame in frames
        ]
        total = self._sum.add_elements(frames)
        step = _StepInProgress(announcement_by_contributor, frames, counted, total)
        self._step_in_progress = step
        # The passives that can contribute to the next step, with their keys for it.
        self._announcement_by_contributor = dict(zip(counted, next_announcements, strict=True))
        return {name: self._pack_request(name, step) for name in counted}

    def combine(self, bodies: Mapping[str, bytes], binding_digest: bytes | None = None) -> bytes:
        """Return the message to the receiver: the sum, and the names of the contributors in it.

        From the shares in the answers, rebuild the self-mask seed of each contributor in the sum,
        and the key of each passive that dropped out; by these, subtract the masks that do not
        cancel. The masks shared with the receiver remain.

        Args:
            bodies: second-round answers by sender.
            binding_digest: digest of the step and of the active's message that all must answer;
                None: not compared.

        Raises:
            LocalProtocolError: `ask` was not called for this step.
            RemoteProtocolError: there are too few answers, or one is malformed or has a false
                share.
        """
        step = self._step_in_progress
        agreement = self._sum.agreement
        if step is None:
            raise LocalProtocolError("nobody was asked yet; ask with the contributions first")
        frames = self._frames.parse_answers(bodies, step.counted, binding_digest)
        self._step_in_progress = None
        shares_by_owner = self._collect_shares(frames, step)
        common_digest = step.frames[0].binding
        total = step.masked_total
        for name, announcement in step.announcement_by_contributor.items():
            if name in step.counted:
                seed = rebuild_seed(shares_by_owner[name], announcement, agreement, name)
                add_keystream(total, seed, common_digest, sign=-1)
            else:
                key = _rebuild_key(shares_by_owner[name], announcement, agreement, name)
                self._subtract_pair_masks(name, key, step)
        counted = agreement.pack_names(step.counted)
        return self._frames.pack_sum(step.frames, (total.tobytes(), counted))

    def _parse_announcement(self, frame: Frame, possible_contributors: int) -> Announcement:
        """Return the keys for the next step that a contribution announces.

        The blobs of a contribution are the masked numbers, the announcement, and a parcel
        (encrypted shares) for each other passive that could contribute to this step.

        `possible_contributors`: the number of passives that could contribute to this step.

        Raises RemoteProtocolError: the contribution has other blobs.
        """
        sender = self._sum.agreement.contributors[frame.contributor_position]
        parcel_count = possible_contributors - 1
        frame.require_blobs(sender, 2 + parcel_count)
        if any(len(parcel) != PARCEL_BYTES for parcel in frame.blobs[2:]):
            raise RemoteProtocolError(f"{sender} sent keys of another size for the next step")
        return Announcement.parse(frame.blobs[1], sender=sender)

    def _pack_request(self, receiver: str, step: _StepInProgress) -> bytes:
        """Return the second-round request to the passive `receiver`: who is counted in the sum, and
        the parcels (encrypted shares for the next step) that the other counted passives sent for
        it.
        """
        parcels = []
        for name, frame in zip(step.counted, step.frames, strict=True):
            if name != receiver:
                # A contribution has two blobs, numbers and announcement, then a parcel for each
                # other passive, in this order.
                receivers = [other for other in step.announcement_by_contributor if other != name]
                parcels.append(frame.blobs[2 + receivers.index(receiver)])
        counted = self._sum.agreement.pack_names(step.counted)
        return self._frames.pack_request(receiver, (counted, *parcels))

    def _collect_shares(
        self, frames: Sequence[Frame], step: _StepInProgress
    ) -> Mapping[str, Mapping[int, bytes]]:
        """Return the shares of each passive's secret from the answers: by passive, as many shares
        as the threshold, by the position of their holder.

        Args:
            frames: the contributors' second-round answers. Each has one share for each passive that
                could contribute to the step, in the roster's order.
            step: the step between contributions and answers.

        Raises RemoteProtocolError: an answer has other blobs.
        """
        names = self._sum.agreement.contributors
        for frame in frames:
            frame.require_blobs(
                names[frame.contributor_position], len(step.announcement_by_contributor)
            )
            if any(len(share) != SECRET_BYTES for share in frame.blobs):
                raise RemoteProtocolError(
                    f"{names[frame.contributor_position]} sent a share of another size"
                )
        needed_frames = frames[: self._frames.min_contributors]
        return {
            name: {frame.contributor_position: frame.blobs[index] for frame in needed_frames}
            for index, name in enumerate(step.announcement_by_contributor)
        }

    def _subtract_pair_masks(
        self, dropped_out: str, dropped_out_key: RunKey, step: _StepInProgress
    ) -> None:
        """Remove from the sum the pairwise masks that the counted passives share with one that
        dropped out, and that nobody cancels.

        Args:
            dropped_out: the passive that dropped out.
            dropped_out_key: the X25519 key of that passive, rebuilt from shares.
            step: the step; its `masked_total` is changed in place.
        """
        agreement = self._sum.agreement
        binding_digest = step.frames[0].binding
        for name in step.counted:
            public = step.announcement_by_contributor[name].public_key
            seed = derive_pair_seed(
                dropped_out_key, public, agreement, (name, dropped_out), purpose=_STEP_MASK_PURPOSE
            )
            # The earlier of two passives added the mask, the later one subtracted it.
            was_added = agreement.find_position(name) < agreement.find_position(dropped_out)
            add_keystream(step.masked_total, seed, binding_digest, sign=-1 if was_added else 1)


class RecoverableReceiver(MaskedReceiver):
    """The active's role: it subtracts the masks that it shares with the passives in the sum, whom
    `counted` names.
    """

    def _list_contributors(self, frame: Frame) -> Sequence[str]:
        """Return the contributors whose values are in the sum in a frame (message), as the
        aggregator names them, and store them as `counted`.

        Raises RemoteProtocolError: the frame names nobody, or not as many contributors as it says.
        """
        agreement = self._sum.agreement
        frame.require_blobs(agreement.aggregator, 2)
        counted = agreement.parse_names(frame.blobs[1], sender=agreement.aggregator)
        if len(counted) != frame.contribution_count:
            raise RemoteProtocolError(
                f"{agreement.aggregator} sent a sum of {frame.contribution_count} contributions "
                f"and names {len(counted)} contributors"
            )
        self.counted = counted
        return counted
