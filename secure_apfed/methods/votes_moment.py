"""Votes opened as a noisy moment: of no row does the active read what was voted.

The active holds d signs of every row; a dealer, the aggregator and the passives let it read the
sum over rows of signs times votes, under noise of the passives, and nothing else. Whatever signs it
sends, one person moves that no further than agreed (`apfed_protocols.moments`). Passives see the
labels, as in `votes`. The active then estimates votes as functions of its own features.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Literal, Self

import numpy as np
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
from secure_apfed.labellers import LABELLERS
from secure_apfed.labellers.guarantee import summed_moment
from secure_apfed.learning.moment import hyperplane_signs, smoothed_votes
from secure_apfed.learning.release import ContributionNoise
from secure_apfed.learning.votes import Floats, Votes
from secure_apfed.methods.accounts import refused_sums
from secure_apfed.methods.alignment import DEALER, next_dealt
from secure_apfed.methods.method import Helper, Learner, Own
from secure_apfed.methods.vote_protocol import (
    BallotSize,
    VotesAggregator,
    VoteSettings,
    VoteTerms,
    calibrated,
    counted,
    honest_passives,
    noise_terms,
    unless_untold,
    vote_noise,
)
from secure_apfed.methods.votes import (
    VotesHelper,
    VotesLearner,
    VotesMethod,
    passive_labeller,
)
from secure_apfed.parties import VotesActive, VotingParty
from secure_apfed.parties.rules import RefusedSums
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.settings.method import FormSettings

__all__ = [
    "MomentVotes",
    "MomentVotesAggregator",
    "MomentVotesHelper",
    "MomentVotesLearner",
    "MomentVotesSettings",
]

_ASK = 0
_BITS = 12
_UNASKED = 8  # blocks of 4 MiB


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


class _Terms(VoteTerms):
    """What the settings say of the moment; see `VoteTerms`."""

    @property
    def settings(self) -> MomentVotesSettings:
        """Of the method."""
        return MomentVotesSettings.of(self.config)

    @cached_property
    def release(self) -> SummedRelease:
        """What the noise of all passives gives.

        One person moves the moment by a vector of d signs times votes that are rounded towards
        zero, in integers: `MomentAgreement.sensitivity`.
        """
        votes, honest = self.settings, honest_passives(self.config, len(self.contributors))
        labeller = passive_labeller(self.own)

        def release(deviation: int) -> SummedRelease:
            return summed_moment(
                labeller, hard=votes.form == "hard", deviation=deviation, honest=honest,
                steps=2**_BITS * votes.moment_features**0.5,
                numbers=votes.moment_features * self.classes, integers=True,
            )  # fmt: skip

        return calibrated(self.config, labeller, release)

    def agreement(self, contract: Contract, size: BallotSize) -> MomentAgreement:
        """The moment of one ballot."""
        votes = self.settings
        return MomentAgreement(
            session=size.bind(contract).hex(),
            receiver=contract.active,
            combiner=AGGREGATOR,
            dealer=DEALER,
            contributors=self.contributors,
            people=size.people,
            features=votes.moment_features,
            columns=self.classes,
            noise=self.release.deviation,
            bits=_BITS,
            signed=votes.form == "soft" and LABELLERS[votes.labeller].signed,
            allow_single=self.config.secure_sum.allow_single_passive,
        )


def _is_asked_for(block: int) -> bool:
    """Whether the dealer waits to be asked for this block, so that few are on their way at once."""
    return block > 0 and block % _UNASKED == 0


class MomentVotesLearner(VotesLearner):
    """Opens the moment of the votes, and estimates votes from it; see `VotesLearner`.

    Attributes:
        moment: Phi^T V with noise, once it is opened.
    """

    moment: Floats | None = None

    def __init__(
        self, party: VotesActive, own: Own, *, headline: str, guarantee: str,
        terms: _Terms, refused: RefusedSums,
    ) -> None:  # fmt: skip
        super().__init__(party, own, headline=headline, guarantee=guarantee)
        self._size = BallotSize.of(party.ballot)
        self._people = self._size.bind(party.contract)
        self._agreed = terms.agreement(party.contract, self._size)
        self.rounding = self._agreed.rounding()
        self._signs_Ud = hyperplane_signs(
            party.student.features_UF, self._agreed.features, seed=own.secrets.seed
        )
        self._refused = refused
        self._receiver = MomentReceiver(self._agreed)

    async def set_up(self, links: Links) -> None:
        """Tell the size; masks with the passives, what the dealer deals, and hidden signs."""
        contract, receiver = self.party.contract, self._receiver
        if not contract.at_start:
            return
        self._size.tell(links, (*contract.passives, AGGREGATOR, DEALER))
        await links.converse(Kind.SUM_SETUP, receiver, tuple(contract.passives))
        asked = receiver.ask(
            await self._dealt(links, BEFORE_TRAINING), self._signs_Ud, self._people
        )
        links.send(AGGREGATOR, Kind.SIGNS, BEFORE_TRAINING, asked)
        for block in range(self._agreed.blocks):
            if _is_asked_for(block):
                links.send(DEALER, Kind.REQUEST, block)
            receiver.take(await self._dealt(links, block))

    async def _dealt(self, links: Links, step: int) -> bytes:
        message = await next_dealt(links)
        if message.step != step:
            raise RemoteProtocolError(f"{DEALER} dealt block {message.step}, expected {step}")
        return message.payload

    async def gather(self, links: Links) -> Votes:
        """Send the labels, and open the moment of the votes."""
        contract, ballot, agreed = self.party.contract, self.party.ballot, self._agreed
        for name in contract.passives:
            links.send(name, Kind.LABELS, _ASK, ballot.payload)
        message = await links.receive(AGGREGATOR, Kind.SUM, step=_ASK, patience=4)
        with self._refused.noting(step=_ASK, contract=contract.digest.hex()):
            moment_dK = self._receiver.open(message.payload) * agreed.scale
        self.moment = np.asarray(moment_dK, dtype=np.float64)
        assert agreed.noise is not None
        voters = len(agreed.contributors)
        variance = voters * (agreed.noise * agreed.scale) ** 2
        return smoothed_votes(self._signs_Ud, self.moment, variance=variance, voters=voters)


class MomentVotesHelper(VotesHelper):
    """Votes on labels that it sees, under masks and noise; see `VotesHelper`."""

    def __init__(self, party: VotingParty, terms: _Terms, noise: ContributionNoise) -> None:
        super().__init__(party)
        self._terms, self._noise = terms, noise
        self._size: BallotSize | None = None
        self._contributor: MomentContributor | None = None
        self.contributions = noise.ledger
        self.ledgers = {party.name: noise.ledger}

    async def set_up(self, links: Links) -> None:
        """Keys of masks with the other passives and the active."""
        contract = self.party.contract
        if not contract.at_start:
            return
        size = await BallotSize.heard(links, contract, most=len(self.party.held_N))
        self._size = size
        self._contributor = MomentContributor(self._terms.agreement(contract, size), self.name)
        peers = [contract.active, *contract.passives]
        peers.remove(self.name)
        with unless_untold(contract.active):
            await links.converse(Kind.SUM_SETUP, self._contributor, peers)

    async def answer(self, links: Links, message: Envelope) -> None:
        party, contributor = self.party, self._contributor
        ballot = party.read(message)
        if self._size is None or contributor is None:
            raise RemoteProtocolError(f"{message.sender} asks for votes that are opened already")
        self._size.require(ballot, sender=message.sender)
        votes_UK, agreed = party.vote(ballot), contributor.agreement
        digest = counted(party, ballot, votes_UK)
        noise_dK = self._noise.draw(
            (agreed.features, agreed.columns), step=_ASK, known_B=ballot.rows, digest=digest
        )
        people = self._size.bind(party.contract)
        payload = contributor.contribute(votes_UK, people, noise_dK)
        links.send(AGGREGATOR, Kind.CONTRIBUTION, _ASK, payload)


class MomentVotesAggregator(VotesAggregator):
    """Adds what is masked, and answers hidden signs once; see `VotesAggregator`."""

    blocks = 1

    def __init__(self, own: Own, contract: Contract) -> None:
        super().__init__(contract)
        self._terms, self._most = _Terms.of(own, contract), own.config.alignment.maximum_ids
        self._combiner: MomentCombiner | None = None
        self._dealt = self._signs = self._people = b""

    async def set_up(self, links: Links) -> None:
        """Hear of the size, what is dealt, and the signs."""
        contract = self.contract
        if not contract.at_start:
            return
        size = await BallotSize.heard(links, contract, most=self._most)
        self._people = size.bind(contract)
        self._combiner = MomentCombiner(self._terms.agreement(contract, size))
        dealt = await links.receive(DEALER, Kind.DEALT, step=BEFORE_TRAINING)
        signs = await links.receive(contract.active, Kind.SIGNS, step=BEFORE_TRAINING, patience=8)
        self._dealt, self._signs = dealt.payload, signs.payload

    def combine(self, step: int, bodies: Mapping[str, bytes]) -> bytes:
        if self._combiner is None:
            raise RemoteProtocolError("votes came in a session that opens none")
        return self._combiner.answer(self._dealt, bodies, self._signs, self._people)


class MomentVotes(VotesMethod):
    """Votes that are opened as a noisy moment; see `Method`."""

    settings = MomentVotesSettings

    def sum_terms(self, own: Own, session: str, shape: tuple[int, ...]) -> Mapping[str, object]:
        terms = _Terms(own, own.passives, *shape)
        return {
            "scheme": "moment",
            "masks": "pairwise",
            "bits": _BITS,
            "features": terms.settings.moment_features,
            "allow_single_passive": own.config.secure_sum.allow_single_passive,
            **noise_terms(own.config, terms.release),
        }

    def learner(self, own: Own, contract: Contract, rows: Tensor) -> Learner:
        terms = _Terms.of(own, contract)
        return MomentVotesLearner(
            self.active_party(own, contract, rows),
            own,
            headline=self.headline,
            guarantee=self.guarantee(own, terms.release),
            terms=terms,
            refused=refused_sums(own),
        )

    def passive(self, own: Own, contract: Contract, rows: Tensor) -> Helper:
        terms = _Terms.of(own, contract)
        noise = vote_noise(own, terms.release, rows=len(rows))
        assert noise is not None
        return MomentVotesHelper(self.voting_party(own, contract, rows), terms, noise)

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
                await links.receive(contract.active, Kind.REQUEST, step=at, patience=8)
            links.send(message.receiver, Kind.DEALT, at, message.body)
            step[message.receiver] += 1  # a seed first, then blocks from 0
