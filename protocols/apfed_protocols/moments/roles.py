"""The noisy moment of a sum of votes: M = s^T (V_1 + ... + V_P) + noise, opened to the active.

Run by: the active (`MomentReceiver`, holds signs s), each passive (`MomentContributor`, holds votes
V_p), the aggregator (`MomentCombiner`) and a dealer without data (`MomentDealer`). Protects: every
vote from the active, which learns M and nothing else, and from all others; the signs from all.
Against a malicious active, too: whatever it sends, what multiplies one person's votes is a vector
of d signs, so the sensitivity to one person (`MomentAgreement.sensitivity`) holds by construction.
Does not protect M from an aggregator, a dealer or a passive that deviates. Links must be sealed
(`apfed_protocols.seal`). Who learns what, alone and together, stands in
`apfed_protocols.moments.leaks`.

Setup: passives agree seeds of masks in pairs and with the active (`apfed_protocols.sums.masks`).
Then, in the ring Z_q, q = 2^32 or 2^64, with the letters of `apfed_protocols.moments.correlation`:

1. dealer -> active: alpha (a seed), and c in blocks; dealer -> aggregator: B and c' (two seeds);
   c_ijk + c'_ijk = alpha_ij B_ik.
2. passive p -> aggregator: V_p and its noise N_p, each under masks that cancel in the sum and one
   more shared with the active; they add up to W = V + R and N + Q, R and Q known to the active.
3. active -> aggregator: the signs e_ij = s_ij alpha_ij, one bit each.
4. aggregator -> active, once, for these e alone:
   F = W - B  and  A_jk = sum_i e_ij c'_ijk + (N + Q)_jk.
5. active: M_jk = A_jk - Q_jk + sum_i e_ij c_ijk + sum_i s_ij (F_ik - R_ik). Correct, since
   sum_i e_ij (c + c')_ijk = sum_i s_ij B_ik, and F - R + B = V.

Why the active learns M only, whatever e it sends. Put sigma_ij = e_ij alpha_ij: signs, fixed by
what it holds and sends. c' and B are uniform and independent of alpha and W, so c = alpha B - c' is
uniform and independent of (alpha, B, W), and then F = W - B is uniform and independent of
(alpha, c, W): together they tell nothing of W. The rest of its view is A. With B = W - F and
W = V + R
   A_jk = sum_i e_ij (alpha_ij B_ik - c_ijk) + (N + Q)_jk
        = [sum_i sigma_ij V_ik + N_jk] + sum_i sigma_ij (R_ik - F_ik) - sum_i e_ij c_ijk + Q_jk.
All but the bracket is in the view already; the bracket is M for the signs sigma. So a simulator
that is given the bracket draws alpha, c and F uniformly and computes A: the same distribution
(where uniform stands for AES-256 in counter mode under keys that the active does not hold). It
holds for any choice of e, also one made after seeing c and F. A second answer for another e would
open a second moment with the same noise: the aggregator answers once.

Why nobody else learns anything: e is a one-time pad of s under alpha, which the aggregator does not
hold; each contribution, and so W and N + Q, is under masks shared with the active; the dealer and
the passives are sent nothing but public keys.

The correlation is that of Beaver (CRYPTO 1991) with signs in place of one factor; masks after
Bonawitz et al. 2017, section 4.1. The combination is ours.
"""

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.conversation import Conversation, Outgoing
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.fork_check import ForkCheck
from apfed_protocols.moments.agreement import MomentAgreement
from apfed_protocols.moments.correlation import (
    PackedSigns,
    added_shares,
    block_signs,
    combiner_shares,
    dealt_shares,
    hiding_bits,
    mask_of_votes,
    packed_signs,
    received_bits,
    received_shares,
    signed_sum,
)
from apfed_protocols.moments.fixed_point import noise_steps, vote_steps
from apfed_protocols.moments.frames import MessageKind, MomentFrames, require_people
from apfed_protocols.randomness import KEY_BYTES, fresh_key
from apfed_protocols.sums.agreement import StepBinding
from apfed_protocols.sums.frames import AgreedFrames, fingerprint
from apfed_protocols.sums.interface import FloatArray, IntArray
from apfed_protocols.sums.masks import Elements, PairwiseSeeds
from apfed_protocols.sums.roles import NoSetup, Role

__all__ = ["MomentCombiner", "MomentContributor", "MomentDealer", "MomentReceiver"]

_USED: set[tuple[bytes, str]] = set()
_USING = threading.Lock()


def _use(agreement: MomentAgreement, me: str) -> None:
    """Mark the agreement as used by this party in this process."""
    with _USING:
        if (agreement.digest, me) in _USED:
            raise LocalProtocolError(
                f"{me} played its part of {agreement.session!r} already; an agreement on a moment "
                "is used once, and a further moment is a further release: agree on a new session"
            )
        _USED.add((agreement.digest, me))


_MASKED = ("sum of votes", "sum of noise")
"""What is masked, in the order of the masks' steps."""


def _binding(agreement: MomentAgreement, people: bytes, what: str) -> StepBinding:
    """What the masks of the votes, or of the noise, are for."""
    step, message = _MASKED.index(what), hashlib.sha256(what.encode()).digest()
    session = agreement.masking.session
    return StepBinding(session=session, step=step, rows=people, message=message)


def _mask_seeds(agreement: MomentAgreement, me: str, peers: Sequence[str]) -> PairwiseSeeds:
    """What `me` and each of these peers share."""
    return PairwiseSeeds(me, peers, _setup_frames(agreement))


def _setup_frames(agreement: MomentAgreement) -> AgreedFrames:
    mark = fingerprint(agreement.masking, {"use": "moment"})
    return AgreedFrames(agreement.masking, "moment", mark)


class _MomentRole(Role):
    """One party's end: its frames, its setup, and the process that it lives in."""

    def __init__(self, agreement: MomentAgreement, me: str, setup: Conversation) -> None:
        self.agreement, self.me = agreement, me
        self._messages = MomentFrames(agreement)
        self._fork_check = ForkCheck(f"{me}: this role of a moment")
        super().__init__(_setup_frames(agreement), setup)

    @property
    def _shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """U x K of votes, d x K of the moment."""
        agreed = self.agreement
        return (agreed.people, agreed.columns), (agreed.features, agreed.columns)

    def _split(self, body: memoryview) -> list[Elements]:
        """The matrices of votes and, where it follows, of the moment in a body."""
        words: Elements = np.frombuffer(body, dtype=self.agreement.word)
        votes, moment = self._shapes
        parts = np.split(words, [self.agreement.people * self.agreement.columns])
        return [
            part.reshape(s) for part, s in zip(parts, (votes, moment), strict=True) if len(part)
        ]


class MomentDealer(_MomentRole):
    """The dealer's end: it draws what hides, sends it, and is sent nothing."""

    def __init__(self, agreement: MomentAgreement) -> None:
        super().__init__(agreement, agreement.dealer, NoSetup())

    def deal(self) -> Iterator[Outgoing]:
        """Return what is to be sent, once: two seeds, and then block after block as they are taken.

        The receiver's messages must reach it in this order.

        Raises:
            LocalProtocolError: it was dealt already, or this is a forked process.
        """
        self._fork_check.require()
        _use(self.agreement, self.me)
        return self._messages_of(*(fresh_key() for _ in range(3)))

    def _messages_of(
        self, sign_seed: bytes, mask_seed: bytes, share_seed: bytes
    ) -> Iterator[Outgoing]:
        agreed, pack = self.agreement, self._messages.pack
        yield Outgoing(agreed.combiner, pack(MessageKind.SHARE_SEEDS, mask_seed + share_seed))
        yield Outgoing(agreed.receiver, pack(MessageKind.SIGN_SEED, sign_seed))
        hiding, B_UK = hiding_bits(agreed, sign_seed), mask_of_votes(agreed, mask_seed)
        for block, c_KNd in enumerate(dealt_shares(agreed, hiding, B_UK, share_seed)):
            body = c_KNd.tobytes()
            yield Outgoing(agreed.receiver, pack(MessageKind.SHARES, body, block=block))


class MomentContributor(_MomentRole):
    """A passive's end; shares a seed with every other passive and with the active."""

    def __init__(self, agreement: MomentAgreement, me: str) -> None:
        self._position = agreement.position(me)
        others = tuple(name for name in agreement.contributors if name != me)
        self._seeds = _mask_seeds(agreement, me, (*others, agreement.receiver))
        super().__init__(agreement, me, self._seeds)

    def contribute(
        self, votes_UK: FloatArray, people: bytes, noise_dK: IntArray | None = None
    ) -> bytes:
        """Round, add noise, mask and frame the votes of this passive; once.

        Args:
            votes_UK: a row for each person in the agreed order, its L1 norm at most 1. No person
                has two rows, or the sensitivity is that of one row no longer.
            people: 32-byte digest of the ordered positions voted on; with another one at any
                passive or at the receiver the sum is noise.
            noise_dK: steps, from `apfed_protocols.noise` under a key of this party;
            given
                exactly where the agreement says noise.

        Raises:
            LocalProtocolError: votes, people or noise that are none; no setup yet; or the agreement
                was used.
        """
        agreed = self.agreement
        parts = [vote_steps(agreed, votes_UK)]
        noise = noise_steps(agreed, noise_dK)
        parts += [noise] if noise is not None else []
        require_people(people)
        self._seeds.require_finished()
        self._fork_check.require()
        _use(agreed, self.me)
        for part, what in zip(parts, _MASKED, strict=False):
            binding = _binding(agreed, people, what)
            self._seeds.add_cancelling(binding, part)
            self._seeds.add_stream(agreed.receiver, binding, part, sign=1)
        body = b"".join(part.tobytes() for part in parts)
        self._seeds.forget()
        return self._messages.pack(MessageKind.VOTES, body, people=people, party=self._position)


class MomentCombiner(_MomentRole):
    """The aggregator's end. Holds no key of its own."""

    def __init__(self, agreement: MomentAgreement) -> None:
        super().__init__(agreement, agreement.combiner, NoSetup())

    def answer(
        self, dealt: bytes, votes: Mapping[str, bytes], signs: bytes, people: bytes
    ) -> bytes:
        """Return F and A of step 4; once, for one set of signs.

        Args:
            dealt: what the dealer sent to this party.
            votes: frames by the authenticated names of their senders.
            signs: what the receiver sent.
            people: 32-byte digest of the ordered positions voted on.

        Raises:
            LocalProtocolError: it answered already, or this is a forked process.
            RemoteProtocolError: a frame is malformed, about other people or from another party; a
                contributor is missing or unknown. No answer was given then.
        """
        self._fork_check.require()
        agreed, read = self.agreement, self._messages.open
        require_people(people)
        seeds = bytes(read(dealt, MessageKind.SHARE_SEEDS, agreed.dealer))
        body = read(signs, MessageKind.SIGNS, agreed.receiver, people=people)
        e_packed = received_bits(agreed, body, agreed.receiver)
        W_UK, A_dK = self._added(votes, people)
        _use(agreed, self.me)
        mask_seed, share_seed = seeds[:KEY_BYTES], seeds[KEY_BYTES:]
        F_UK = W_UK - mask_of_votes(agreed, mask_seed)
        for block, some in enumerate(agreed.each_block()):
            e_Nd = block_signs(agreed, e_packed, some)
            A_dK += added_shares(e_Nd, combiner_shares(agreed, share_seed, block))
        return self._messages.pack(
            MessageKind.ANSWER, F_UK.tobytes() + A_dK.tobytes(), people=people
        )

    def _added(self, votes: Mapping[str, bytes], people: bytes) -> tuple[Elements, Elements]:
        """W, and N + Q or zeros."""
        names = self.agreement.contributors
        if set(votes) != set(names):
            missing, unknown = set(names) - set(votes), set(votes) - set(names)
            raise RemoteProtocolError(
                f"a moment needs the votes of each of {', '.join(names)}; missing: "
                f"{', '.join(sorted(missing)) or 'none'}; unknown: "
                f"{', '.join(sorted(map(str, unknown))) or 'none'}"
            )
        totals: list[Elements] = [np.zeros(s, self.agreement.word) for s in self._shapes]
        for position, name in enumerate(names):
            body = self._messages.open(
                votes[name], MessageKind.VOTES, name, people=people, party=position
            )
            for total, part in zip(totals, self._split(body), strict=False):
                total += part
        return totals[0], totals[1]


class MomentReceiver(_MomentRole):
    """The active's end: `ask`, then `take` for each block of shares, then `open`."""

    def __init__(self, agreement: MomentAgreement) -> None:
        self._seeds = _mask_seeds(agreement, agreement.receiver, agreement.contributors)
        super().__init__(agreement, agreement.receiver, self._seeds)
        self._asked: tuple[PackedSigns, PackedSigns, bytes] | None = None  # s, e, people
        self._taken = 0
        self._added_dK: Elements = np.zeros(self._shapes[1], agreement.word)

    def ask(self, dealt: bytes, signs_Ud: NDArray[np.int8], people: bytes) -> bytes:
        """Return the hidden signs for the combiner; once.

        Args:
            dealt: the first message of the dealer.
            signs_Ud: -1 and +1, int8.
            people: 32-byte digest of the ordered positions whose votes are asked for.

        Raises:
            LocalProtocolError: signs or people that are none, no setup yet, or the agreement was
                used: other signs under the same alpha would show which differ.
            RemoteProtocolError: the dealer sent something else.
        """
        self._fork_check.require()
        agreed = self.agreement
        s_packed = packed_signs(agreed, signs_Ud)
        require_people(people)
        self._seeds.require_finished()
        seed = bytes(self._messages.open(dealt, MessageKind.SIGN_SEED, agreed.dealer))
        _use(agreed, self.me)
        e_packed = s_packed ^ hiding_bits(agreed, seed)
        self._asked = (s_packed, e_packed, people)
        return self._messages.pack(MessageKind.SIGNS, e_packed.tobytes(), people=people)

    def take(self, dealt: bytes) -> None:
        """Add up the next block of shares, of which nothing is kept but the sum.

        Raises:
            LocalProtocolError: nothing was asked yet.
            RemoteProtocolError: not the next block of the dealer, or one after the last.
        """
        agreed, (_, e_packed, _) = self.agreement, self._underway()
        if self.complete:
            raise RemoteProtocolError(f"{agreed.dealer} sent more than {agreed.blocks} block(s)")
        body = self._messages.open(dealt, MessageKind.SHARES, agreed.dealer, block=self._taken)
        e_Nd = block_signs(agreed, e_packed, agreed.block(self._taken))
        self._added_dK += added_shares(e_Nd, received_shares(agreed, body, self._taken))
        self._taken += 1

    @property
    def complete(self) -> bool:
        """Whether all blocks of the dealer are here."""
        return self._taken == self.agreement.blocks

    def open(self, answer: bytes) -> IntArray:
        """Return M in steps, d x K; times `MomentAgreement.scale` it is Phi^T V plus noise.

        Once, whether it is opened or refused: whoever alters answers and sees which are taken
        learns one bit at most.

        Raises:
            LocalProtocolError: nothing was asked, blocks are missing, or it was opened before.
            RemoteProtocolError: no answer to what was asked, or values beyond the range: it was
                altered, or parties dealt, voted or asked about other people than agreed.
        """
        agreed, (s_packed, _, people) = self.agreement, self._underway()
        if not self.complete:
            raise LocalProtocolError(
                f"{self.me} took {self._taken} of {agreed.blocks} block(s) of {agreed.dealer}"
            )
        try:
            body = self._messages.open(answer, MessageKind.ANSWER, agreed.combiner, people=people)
            F_UK, M_dK = (part.copy() for part in self._split(body))
            self._unmask(people, F_UK, M_dK)
            M_dK += self._added_dK
            M_dK += signed_sum(agreed, s_packed, F_UK)
        finally:
            self._forget()
        return self._in_range(M_dK)

    def _unmask(self, people: bytes, F_UK: Elements, M_dK: Elements) -> None:
        """Take R off F, and Q off the moment where there is noise."""
        masked = [(F_UK, _MASKED[0])] + ([(M_dK, _MASKED[1])] if self.agreement.noise else [])
        for total, what in masked:
            binding = _binding(self.agreement, people, what)
            for peer in self.agreement.contributors:
                self._seeds.add_stream(peer, binding, total, sign=-1)

    def _in_range(self, M_dK: Elements) -> IntArray:
        signed: NDArray[Any] = M_dK.view(np.dtype(f"<i{M_dK.itemsize}"))
        opened: IntArray = signed.astype(np.int64)
        limit = self.agreement.limit
        if not -limit <= opened.min() <= opened.max() <= limit:
            raise RemoteProtocolError(
                f"the moment from {self.agreement.combiner} lies beyond the range of its votes and "
                "noise; it was altered, or the parties answered about different people, or what "
                f"{self.agreement.dealer} dealt does not fit; agree on a new session"
            )
        return opened

    def _underway(self) -> tuple[PackedSigns, PackedSigns, bytes]:
        self._fork_check.require()
        if self._asked is None:
            raise LocalProtocolError(
                f"{self.me} asked nothing yet, or its moment was opened or refused; each is once"
            )
        return self._asked

    def _forget(self) -> None:
        self._asked = None
        self._seeds.forget()
        self._added_dK = np.zeros_like(self._added_dK)
