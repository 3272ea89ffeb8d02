"""Votes opened as a noisy moment: of no row does the active read what was voted.

The active holds d signs of every row, Phi, of random hyperplanes in its features; a dealer, the
aggregator and the passives let it read Phi^T V, the sum over rows of signs times votes, under noise
of the passives, and nothing else. Whatever signs it sends, one person moves that no further than
agreed (`apfed_protocols.moments`). Passives see the labels, as in `votes`.

The active then estimates votes as functions of its own features, S = Phi (Phi^T Phi + lambda I)^-1
M, from the moment M = Phi^T V + noise of known variance in each number: what votes say beyond these
features stays unread.

Letters: U rows, d signs of a row (Phi has them over sqrt(d)), F features of the active, K classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.moments import (
    MomentAgreement,
    MomentCombiner,
    MomentContributor,
    MomentDealer,
    MomentReceiver,
)
from secure_apfed.contract import AGGREGATOR, Contract
from secure_apfed.exchange import BEFORE_TRAINING, Envelope, Kind, Links
from secure_apfed.labellers.guarantee import summed_moment
from secure_apfed.learning.votes import Floats, Votes
from secure_apfed.methods.alignment import DEALER, next_dealt
from secure_apfed.methods.method import FOR_AN_ANSWER, FOR_THE_ACTIVE, Helper, Learner, Own
from secure_apfed.methods.sum_end import RefusedSums, unless_unasked
from secure_apfed.methods.votes import (
    ASK,
    BallotAggregator,
    BallotSize,
    CountingPassive,
    VotesActive,
    VoteSettings,
    VotesMethod,
    VoteTerms,
    passive_labeller,
)
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.seeds import derive_seed
from secure_apfed.settings.method import FormSettings

_BITS = 12
_UNASKED = 8  # blocks of 4 MiB
_STRENGTHS = np.geomspace(1e-3, 1e4, 141)


class MomentVotesSettings(FormSettings, VoteSettings):
    """Votes that are opened as a noisy moment; see `VoteSettings`.

    Attributes:
        moment_features: d, signs of random hyperplanes under which the moment is taken.
    """

    name: Literal["votes_moment"]
    moment_features: int = Field(256, ge=8, le=4096)

    title = "votes, as a moment"
    opens_votes = "moment"

    @model_validator(mode="after")
    def _is_noised(self) -> Self:
        self._needs_epsilon()
        return self

    @property
    def answers(self) -> Literal["soft", "hard"]:
        return self.form


class MomentVotesActive(VotesActive):
    """Opens the moment of the votes, and estimates votes from it; see `VotesActive`.

    Attributes:
        agreed: what the parties compute.
        moment: Phi^T V with noise, once it is opened.
    """

    moment: Floats | None = None

    def __init__(self, own: Own, contract: Contract, rows: Tensor) -> None:
        terms = _Terms.of(own, contract)
        super().__init__(own, contract, rows, terms.release)
        self._size = BallotSize.of(self.ballot)
        self.agreed = terms.agreement(contract, self._size)
        self.rounding = self.agreed.rounding()
        self._signs_Ud = hyperplane_signs(
            self.student.features_UF, self.agreed.features, seed=own.secrets.seed
        )
        self._refused, self._receiver = RefusedSums(own), MomentReceiver(self.agreed)

    async def set_up(self, links: Links) -> None:
        """Tell the size; masks with the passives, what the dealer deals, and hidden signs."""
        contract, receiver = self.contract, self._receiver
        if not contract.at_start:
            return
        self._size.tell(links, (*contract.passives, AGGREGATOR, DEALER))
        await links.converse(Kind.SUM_SETUP, receiver, tuple(contract.passives))
        dealt = await self._dealt(links, BEFORE_TRAINING)
        asked = receiver.ask(dealt, self._signs_Ud, self._size.bind(contract))
        links.send(AGGREGATOR, Kind.SIGNS, BEFORE_TRAINING, asked)
        for block in range(self.agreed.blocks):
            if _is_asked_for(block):
                links.send(DEALER, Kind.REQUEST, block)
            receiver.take(await self._dealt(links, block))

    async def _dealt(self, links: Links, step: int) -> bytes:
        message = await next_dealt(links)
        if message.step != step:
            raise RemoteProtocolError(f"{DEALER} dealt block {message.step}, expected {step}")
        return message.payload

    async def gather(self, links: Links) -> Votes:
        contract, agreed = self.contract, self.agreed
        for name in contract.passives:
            links.send(name, Kind.LABELS, ASK, self.ballot.payload)
        message = await links.receive(AGGREGATOR, Kind.SUM, step=ASK, patience=FOR_AN_ANSWER)
        with self._refused.noting(step=ASK, contract=contract.digest.hex()):
            moment_dK = self._receiver.open(message.payload) * agreed.scale
        self.moment = np.asarray(moment_dK, dtype=np.float64)
        assert agreed.noise is not None
        voters = len(agreed.contributors)
        variance = voters * (agreed.noise * agreed.scale) ** 2
        return smoothed_votes(self._signs_Ud, self.moment, variance=variance, voters=voters)


class MomentVotesPassive(CountingPassive):
    """Votes on labels that it sees, under masks and noise; see `VotesPassive`."""

    def __init__(self, own: Own, contract: Contract, rows: Tensor) -> None:
        self._terms = _Terms.of(own, contract)
        super().__init__(own, contract, rows, self._terms.noise(len(rows)))
        self._size: BallotSize | None = None
        self._contributor: MomentContributor | None = None

    async def set_up(self, links: Links) -> None:
        """Keys of masks with the other passives and the active."""
        contract = self.contract
        if not contract.at_start:
            return
        self._size = await BallotSize.heard(links, contract, most=len(self.held_N))
        agreed = self._terms.agreement(contract, self._size)
        self._contributor = MomentContributor(agreed, self.name)
        peers = [contract.active, *contract.passives]
        peers.remove(self.name)
        with unless_unasked(contract.active):
            await links.converse(Kind.SUM_SETUP, self._contributor, peers)

    async def answer(self, links: Links, message: Envelope) -> None:
        """Vote, and contribute to the moment of the ballot that was told."""
        ballot, contributor = self.read(message), self._contributor
        if self._size is None or contributor is None:
            raise RemoteProtocolError(f"{message.sender} asks for votes that are opened already")
        self._size.require(ballot, sender=message.sender)
        votes_UK, agreed = self.vote(ballot), contributor.agreement
        noise_dK = self.draw(ballot, votes_UK, (agreed.features, agreed.columns))
        assert noise_dK is not None
        people = self._size.bind(self.contract)
        payload = contributor.contribute(votes_UK, people, noise_dK)
        links.send(AGGREGATOR, Kind.CONTRIBUTION, ASK, payload)


class MomentVotesAggregator(BallotAggregator):
    """Adds what is masked, and answers hidden signs once; see `BallotAggregator`."""

    blocks = 1

    def __init__(self, own: Own, contract: Contract) -> None:
        super().__init__(contract)
        self._terms, self._most = _Terms.of(own, contract), own.config.alignment.maximum_ids
        self._combiner: MomentCombiner | None = None
        self._dealt = self._signs = self._people = b""

    async def set_up(self, links: Links) -> None:
        contract = self.contract
        if not contract.at_start:
            return
        size = await BallotSize.heard(links, contract, most=self._most)
        self._people = size.bind(contract)
        self._combiner = MomentCombiner(self._terms.agreement(contract, size))
        dealt = await links.receive(DEALER, Kind.DEALT, step=BEFORE_TRAINING)
        signs = await links.receive(
            contract.active, Kind.SIGNS, step=BEFORE_TRAINING, patience=FOR_THE_ACTIVE
        )
        self._dealt, self._signs = dealt.payload, signs.payload

    async def combine(self, links: Links, first: Envelope, bodies: Mapping[str, bytes]) -> bytes:
        if self._combiner is None:
            raise RemoteProtocolError("votes came in a session that opens none")
        return self._combiner.answer(self._dealt, bodies, self._signs, self._people)


def hyperplane_signs(features_UF: Floats, features: int, *, seed: int) -> NDArray[np.int8]:
    """On which side of each of `features` random hyperplanes a standardised row lies, (U, d)."""
    size_F = features_UF.std(axis=0)
    x_UF = (features_UF - features_UF.mean(axis=0)) / np.where(size_F > 0, size_F, 1.0)
    generator = np.random.default_rng(derive_seed(seed, "hyperplanes of the moment"))
    normal_Fd = generator.standard_normal((x_UF.shape[1], features))
    return np.where(x_UF @ normal_Fd >= 0, 1, -1).astype(np.int8)


@dataclass(frozen=True)
class _Spectrum:
    """Phi^T Phi by eigenvalues g and eigenvectors, and the moment in their basis."""

    g_d: Floats
    basis_dd: Floats
    moment: Floats

    @classmethod
    def of(cls, phi_Ud: Floats, moment_dK: Floats) -> "_Spectrum":
        g_d, basis_dd = np.linalg.eigh(phi_Ud.T @ phi_Ud)
        return cls(g_d.clip(min=0.0), basis_dd, basis_dd.T @ moment_dK)

    def error(self, strength: float, variance: float) -> float:
        """Expected squared error of the estimate, less a constant, without bias.

        With u = V in the basis of Phi's left vectors, the moment is sqrt(g) u + noise and the
        estimate g / (g + lambda) u + sqrt(g) / (g + lambda) noise. Its error is
        (lambda / (g + lambda))^2 u^2 + g variance / (g + lambda)^2, and u^2 is on average
        (moment^2 - variance) / g (Mallows 1973, unbiased risk with known variance).
        """
        held = self.g_d > 1e-9 * self.g_d.max()
        g_d, classes = self.g_d[held], self.moment.shape[1]
        power_d = ((self.moment[held] ** 2).sum(axis=1) - classes * variance) / g_d
        bias_d = ((strength / (g_d + strength)) ** 2 - 1) * power_d
        return float((bias_d + classes * variance * g_d / (g_d + strength) ** 2).sum())


def smoothed_votes(
    signs_Ud: NDArray[np.int8], moment_dK: Floats, *, variance: float, voters: int
) -> Votes:
    """Estimate every row's sum of votes from Phi^T V with noise of this variance in each number.

    lambda is the one with the least unbiased estimate of the squared error over all rows; it reads
    no labels.
    """
    rows, features = signs_Ud.shape
    classes = moment_dK.shape[1]
    phi_Ud = signs_Ud / np.sqrt(features)
    # Votes of a row add up to about one a voter: the mean vote is known before the moment.
    mean = voters / classes
    found = _Spectrum.of(phi_Ud, moment_dK - mean * phi_Ud.sum(axis=0)[:, None])
    errors = [found.error(strength, variance) for strength in _STRENGTHS]
    strength = _STRENGTHS[int(np.argmin(errors))]
    turned_Ud = (phi_Ud @ found.basis_dd) / (found.g_d + strength)
    return Votes(
        totals=mean + turned_Ud @ found.moment,
        variance=variance * (turned_Ud**2).sum(axis=1) + np.zeros(rows),
        voters=voters,
    )


class MomentVotes(VotesMethod):
    """Votes that are opened as a noisy moment; see `Method`."""

    settings = MomentVotesSettings

    def sum_terms(self, own: Own, session: str, classes: int) -> Mapping[str, object]:
        terms = _Terms(own, own.passives, classes)
        return {
            "scheme": "moment",
            "masks": "pairwise",
            "bits": _BITS,
            "features": terms.settings.moment_features,
            "allow_single_passive": own.config.secure_sum.allow_single_passive,
            **terms.noise_terms(),
        }

    def learner(self, own: Own, contract: Contract, rows: Tensor) -> Learner:
        return MomentVotesActive(own, contract, rows)

    def passive(self, own: Own, contract: Contract, rows: Tensor) -> Helper:
        return MomentVotesPassive(own, contract, rows)

    def aggregator(self, own: Own, contract: Contract) -> Helper:
        return MomentVotesAggregator(own, contract)

    async def deal(self, own: Own, links: Links, contract: Contract) -> None:
        """What hides signs and votes from each other: two seeds, and shares block after block."""
        if not contract.at_start:
            return
        most = own.config.alignment.maximum_ids
        size = await BallotSize.heard(links, contract, most=most)
        dealer = MomentDealer(_Terms.of(own, contract).agreement(contract, size))
        step = dict.fromkeys((AGGREGATOR, contract.active), BEFORE_TRAINING)
        for message in dealer.deal():
            at = step[message.receiver]
            if _is_asked_for(at):
                await links.receive(contract.active, Kind.REQUEST, step=at, patience=FOR_THE_ACTIVE)
            links.send(message.receiver, Kind.DEALT, at, message.body)
            step[message.receiver] += 1  # a seed first, then blocks from 0


def _is_asked_for(block: int) -> bool:
    """Whether the dealer waits to be asked for this block, so that few are on their way at once."""
    return block > 0 and block % _UNASKED == 0


class _Terms(VoteTerms):
    """What the settings say of the moment; see `VoteTerms`."""

    @property
    def settings(self) -> MomentVotesSettings:
        return MomentVotesSettings.of(self.own.config)

    @cached_property
    def release(self) -> SummedRelease:
        """What the noise of all passives gives.

        One person moves the moment by a vector of d signs times votes that are rounded towards
        zero, in integers: `MomentAgreement.sensitivity`.
        """
        votes, honest, labeller = self.settings, self.honest, passive_labeller(self.own)

        def release(deviation: int) -> SummedRelease:
            return summed_moment(
                labeller, hard=votes.form == "hard", deviation=deviation, honest=honest,
                steps=2**_BITS * votes.moment_features**0.5,
                numbers=votes.moment_features * self.classes, integers=True,
            )  # fmt: skip

        return self.calibrated(labeller, release)

    def agreement(self, contract: Contract, size: BallotSize) -> MomentAgreement:
        return MomentAgreement(
            session=size.bind(contract).hex(),
            receiver=contract.active,
            combiner=AGGREGATOR,
            dealer=DEALER,
            contributors=self.contributors,
            people=size.people,
            features=self.settings.moment_features,
            columns=self.classes,
            noise=self.release.deviation,
            bits=_BITS,
            signed=self.settings.signs_votes,
            allow_single=self.own.config.secure_sum.allow_single_passive,
        )
