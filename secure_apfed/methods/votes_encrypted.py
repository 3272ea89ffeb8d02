"""Votes on encrypted labels: no passive sees a label, and the active opens the sum of votes alone.

The active sends its labels under its own key, each passive multiplies them with the matrix of a
labeller that is linear in the labels, the aggregator adds, the active decrypts. What each of them
learns stands in `apfed_protocols.products.roles`, and what an active that breaks the protocol reads
in `SumOfProducts.malicious`. With `candidates` the passives find most such actives out.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Literal, Self

import msgpack
import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.products import (
    ProductAgreement,
    ProductCombiner,
    ProductContributor,
    ProductReceiver,
    SumOfProducts,
)
from secure_apfed.contract import AGGREGATOR, Contract
from secure_apfed.exchange import BEFORE_TRAINING, Envelope, Kind, Links
from secure_apfed.labellers import LABELLERS, LinearLabeller, make_labeller
from secure_apfed.labellers.guarantee import summed_votes
from secure_apfed.learning.release import ContributionNoise
from secure_apfed.learning.votes import Votes
from secure_apfed.methods.accounts import open_audits, refused_sums
from secure_apfed.methods.method import Helper, Learner, Own, meet, meet_all
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
from secure_apfed.parties import Ballot, VotesActive, VotingParty
from secure_apfed.parties.rules import OPEN_AUDITS, OpenAudits, RefusedSums
from secure_apfed.privacy.contributions import SummedRelease

__all__ = [
    "EncryptedVotes",
    "EncryptedVotesAggregator",
    "EncryptedVotesHelper",
    "EncryptedVotesLearner",
    "EncryptedVotesSettings",
]

_ASK = 0
_MOST_LABELLED = 4096


class EncryptedVotesSettings(VoteSettings):
    """Votes on labels that no passive sees, always soft; see `VoteSettings`.

    Attributes:
        candidates: requests with encrypted labels that the active makes, of which the passives see
            through all but one: an active that cheats is found out but for one time in so many;
            null: it is trusted. Needed beside an epsilon.
    """

    name: Literal["votes_encrypted"]
    candidates: int | None = Field(None, ge=2, le=1024)

    title = "votes on encrypted labels"
    opens_votes = "encrypted"

    @model_validator(mode="after")
    def _cheats_are_found(self) -> Self:
        if self.epsilon is not None and self.candidates is None:
            raise ValueError(
                f"candidates: method {self.name} counts an epsilon for labels of one class each, "
                "and an active that encrypts others reads below the noise; let the passives look, "
                f"as method: {{name: {self.name}, candidates: 20}}"
            )
        return self

    @model_validator(mode="after")
    def _labeller_is_linear(self) -> Self:
        if not LABELLERS[self.labeller].linear:
            raise ValueError(
                f"labeller: {self.labeller} is not linear in the labels, and encrypted labels are "
                "only ever multiplied and added; use "
                f"{', '.join(name for name, one in LABELLERS.items() if one.linear)}"
            )
        return self


class _Terms(VoteTerms):
    """What the settings say of the sums; see `VoteTerms`."""

    @property
    def settings(self) -> EncryptedVotesSettings:
        """Of the method."""
        return EncryptedVotesSettings.of(self.config)

    @property
    def levels(self) -> int:
        """L, steps of fixed point for a vote of 1."""
        return int(2 ** (self.config.secure_sum.bits - 1) - 1)

    @cached_property
    def release(self) -> SummedRelease | None:
        """What the noise of all passives gives; None: there is none.

        Matrices are rounded towards zero, row by row: a row of integers has magnitudes that add up
        to L at most, and as each label is of one class, so has the row of votes, in integers. So
        `integers` holds, and nothing is added for rounding.
        """
        votes, honest = self.settings, honest_passives(self.config, len(self.contributors))
        if votes.epsilon is None:
            return None
        labeller = make_labeller(votes.labeller)

        def release(deviation: int) -> SummedRelease:
            return summed_votes(
                labeller, hard=False, deviation=deviation, honest=honest, steps=self.levels,
                classes=self.classes, integers=True,
            )  # fmt: skip

        return calibrated(self.config, labeller, release)

    def sums(self, contract: Contract, size: BallotSize) -> SumOfProducts:
        """The sum of products for one ballot."""
        settings, release = self.config.secure_sum, self.release
        return SumOfProducts(
            ProductAgreement(
                session=size.bind(contract).hex(),
                receiver=contract.active,
                combiner=AGGREGATOR,
                contributors=self.contributors,
                people=size.people,
                columns=self.classes,
                labelled=size.labelled,
                bits=settings.bits,
                noise=release.deviation if release else None,
                candidates=self.settings.candidates,
                allow_single=settings.allow_single_passive,
            )
        )

    @staticmethod
    async def heard(links: Links, contract: Contract, *, most: int) -> BallotSize:
        """See `BallotSize.heard`; of no more labels than a sum of products takes."""
        size = await BallotSize.heard(links, contract, most=most)
        if size.labelled > _MOST_LABELLED:
            raise RemoteProtocolError(
                f"{contract.active} asks about {size.labelled} labels; a sum of products takes "
                f"{_MOST_LABELLED} at most"
            )
        return size


class EncryptedVotesLearner(VotesLearner):
    """Encrypts its labels and opens the sum of the votes; see `VotesLearner`."""

    def __init__(
        self, party: VotesActive, own: Own, *, headline: str, guarantee: str,
        terms: _Terms, refused: RefusedSums,
    ) -> None:  # fmt: skip
        super().__init__(party, own, headline=headline, guarantee=guarantee)
        self._size = BallotSize.of(party.ballot)
        self._sums = terms.sums(party.contract, self._size)
        noised = "; that is so for labels of one class each" if self._sums.products.noise else ""
        audited = self._sums.products.candidates is not None
        counted = f" After {OPEN_AUDITS + 1} that were broken off there, a passive begins no other."
        self.guarantee = f"{guarantee}{noised}. {self._sums.malicious}{counted if audited else ''}"
        # Towards zero a number moves by a step at most, to the nearest by half of one.
        self.rounding = 2 * self._sums.rounding()
        self._refused = refused
        deviation = self._sums.products.noise or 0
        self._variance = len(terms.contributors) * (deviation / terms.levels) ** 2
        self._receiver: ProductReceiver | None = None
        self._challenges: dict[str, bytes] | None = None

    async def set_up(self, links: Links) -> None:
        """Tell the size; with candidates commit to them, and hear which is kept."""
        contract, ballot = self.party.contract, self.party.ballot
        if not contract.at_start:
            return
        passives = list(contract.passives)
        self._size.tell(links, (*passives, AGGREGATOR))
        self._receiver = self._sums.receiver(np.eye(self.party.classes)[ballot.labels.numpy()])
        if self._sums.products.candidates is None:
            return
        await meet_all(links, passives)  # a coin must not overtake the masks' keys
        for name in passives:
            links.send(name, Kind.COMMITMENT, BEFORE_TRAINING, self._receiver.commitment())
        self._challenges = {}
        while waiting := [name for name in passives if name not in self._challenges]:
            message = await links.receive(
                waiting, Kind.CHALLENGE, step=BEFORE_TRAINING, least=len(waiting), patience=4
            )
            self._challenges[message.sender] = message.payload

    async def gather(self, links: Links) -> Votes:
        """Send the encrypted labels, and open one block of people after the other."""
        party, contract, receiver = self.party, self.party.contract, self._receiver
        assert receiver is not None
        payload = msgpack.packb([party.ballot.payload, receiver.request(self._challenges)])
        for name in contract.passives:
            links.send(name, Kind.ENCRYPTED_LABELS, _ASK, payload)
        sum_UK = np.zeros((len(party.ballot.rows), party.classes))
        for block in range(self._sums.blocks):
            message = await links.receive(AGGREGATOR, Kind.SUM, step=block, patience=4)
            people = self._sums.people_of(block)
            with self._refused.noting(step=block, contract=contract.digest.hex()):
                sum_UK[people.start : people.stop] = receiver.open(block, message.payload)
        variance_U = np.full(len(sum_UK), self._variance)
        return Votes(totals=sum_UK, variance=variance_U, voters=len(contract.passives))


class EncryptedVotesHelper(VotesHelper):
    """Multiplies encrypted labels with its own matrix; see `VotesHelper`."""

    asks = (Kind.ENCRYPTED_LABELS,)

    def __init__(
        self, party: VotingParty, labeller: LinearLabeller, terms: _Terms,
        noise: ContributionNoise | None, audits: OpenAudits,
    ) -> None:  # fmt: skip
        super().__init__(party)
        self._audits = audits
        self._labeller, self._terms, self._noise = labeller, terms, noise
        self._contributor: ProductContributor | None = None
        self._size: BallotSize | None = None
        self.contributions = noise.ledger if noise else None
        if noise:
            self.ledgers = {party.name: noise.ledger}

    async def set_up(self, links: Links) -> None:
        """Keys of masks with the other passives, and with candidates a coin."""
        contract = self.party.contract
        if not contract.at_start:
            return
        others = [name for name in contract.passives if name != self.name]
        self._size = await self._terms.heard(links, contract, most=len(self.party.held_N))
        sums = self._terms.sums(contract, self._size)
        self._contributor = sums.contributor(self.name)
        with unless_untold(contract.active):
            await links.converse(Kind.SUM_SETUP, self._contributor, others)
        if sums.products.candidates is None:
            return
        await meet(links, contract.active)
        message = await links.receive(contract.active, Kind.COMMITMENT, step=BEFORE_TRAINING)
        with unless_untold(contract.active):
            await links.converse(Kind.COIN, self._contributor.toss(message.payload), others)
        self._audits.begin(contract=contract.digest.hex())
        links.send(contract.active, Kind.CHALLENGE, BEFORE_TRAINING, self._contributor.challenge())

    async def answer(self, links: Links, message: Envelope) -> None:
        party, contributor = self.party, self._contributor
        asked, request = _opened(message)
        ballot = party.read(replace(message, payload=asked), shown=False)
        if self._size is None or contributor is None:
            raise RemoteProtocolError(f"{message.sender} asks for votes that are opened already")
        self._size.require(ballot, sender=message.sender)
        contributor.accept(request)
        if self._terms.settings.candidates is not None:
            self._audits.end(contract=party.contract.digest.hex())
        matrix_Un = self._matrix(ballot)
        digest = counted(party, ballot, matrix_Un)
        noise_UK = None
        if self._noise is not None:
            shape = len(ballot.rows), party.classes
            noise_UK = self._noise.draw(shape, step=_ASK, known_B=ballot.rows, digest=digest)
        for block, answer in enumerate(contributor.answers(matrix_Un, noise_UK)):
            links.send(AGGREGATOR, Kind.CONTRIBUTION, block, answer)

    def _matrix(self, ballot: Ballot) -> NDArray[np.float64]:
        """Its labeller's matrix in whole steps, rounded towards zero."""
        features_UF, _ = self.party.features(ballot)
        matrix_Un = self._labeller.matrix(features_UF, ballot.labelled.numpy())
        levels = self._terms.levels
        return np.trunc(matrix_Un * levels) / levels


def _opened(message: Envelope) -> tuple[bytes, bytes]:
    """The ballot and the encrypted labels in a message."""
    try:
        asked, request = msgpack.unpackb(message.payload, max_bin_len=len(message.payload))
    except (ValueError, TypeError, msgpack.UnpackException):
        asked, request = None, None
    if type(asked) is not bytes or type(request) is not bytes:
        raise RemoteProtocolError(f"{message.sender} sent no ballot with encrypted labels")
    return asked, request


class EncryptedVotesAggregator(VotesAggregator):
    """Adds words that are uniform to it; see `VotesAggregator`."""

    def __init__(self, own: Own, contract: Contract) -> None:
        super().__init__(contract)
        self._terms, self._most = _Terms.of(own, contract), own.config.alignment.maximum_ids
        self._combiner: ProductCombiner | None = None
        self._blocks = 0

    async def set_up(self, links: Links) -> None:
        """Hear of the size."""
        if self.contract.at_start:
            size = await self._terms.heard(links, self.contract, most=self._most)
            sums = self._terms.sums(self.contract, size)
            self._combiner, self._blocks = sums.combiner(), sums.blocks

    @property
    def blocks(self) -> int:
        return self._blocks

    def combine(self, step: int, bodies: Mapping[str, bytes]) -> bytes:
        assert self._combiner is not None  # there are no blocks else
        return self._combiner.combine(step, bodies)


class EncryptedVotes(VotesMethod):
    """Votes on labels that no passive sees, opened as their sum; see `Method`."""

    settings = EncryptedVotesSettings

    def sum_terms(self, own: Own, session: str, shape: tuple[int, ...]) -> Mapping[str, object]:
        terms = _Terms(own, own.passives, *shape)
        settings, votes = own.config.secure_sum, terms.settings
        return {
            "scheme": SumOfProducts.scheme,
            "masks": SumOfProducts.masks,
            "bits": settings.bits,
            "candidates": votes.candidates,
            "allow_single_passive": settings.allow_single_passive,
            **noise_terms(own.config, terms.release),
        }

    def learner(self, own: Own, contract: Contract, rows: Tensor) -> Learner:
        terms = _Terms.of(own, contract)
        return EncryptedVotesLearner(
            self.active_party(own, contract, rows),
            own,
            headline=self.headline,
            guarantee=self.guarantee(own, terms.release),
            terms=terms,
            refused=refused_sums(own),
        )

    def passive(self, own: Own, contract: Contract, rows: Tensor) -> Helper:
        terms, labeller = _Terms.of(own, contract), passive_labeller(own)
        assert isinstance(labeller, LinearLabeller)
        return EncryptedVotesHelper(
            self.voting_party(own, contract, rows),
            labeller,
            terms,
            vote_noise(own, terms.release, rows=len(rows)),
            open_audits(own),
        )

    def aggregator(self, own: Own, contract: Contract) -> Helper:
        return EncryptedVotesAggregator(own, contract)
