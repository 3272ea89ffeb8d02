"""Common parts of methods whose votes are revealed by another protocol than the secure sum. A vote
is one row of class scores, (K,); the ballot is the active's request for votes.

Run by: a passive, which counts its own answers and records their privacy cost in its ledger
(`CountingPassive`), all parties, which derive the same noise from the settings (`VoteTerms`), and
the aggregator (`BallotAggregator`).

Letters: N alignment positions, U rows to vote on, B rows at once, K classes.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.contract import Contract
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Envelope
from secure_apfed.labellers import Labeller
from secure_apfed.labellers.guarantee import calibrate_votes
from secure_apfed.learning.release import ContributionNoise
from secure_apfed.learning.votes import Floats
from secure_apfed.methods.ballots import Ballot
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.session_sum import Aggregator, AnswerLimits, compute_answer_digest
from secure_apfed.methods.votes import VoteSettings, VotesPassive
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.privacy.ledger import PrivacyLedger
from secure_apfed.privacy.randomised_response import VoteResponse


class CountingPassive(VotesPassive):
    """A passive whose votes enter no secure sum; see `VotesPassive`.

    A secure sum would count its answers and their privacy cost, so here the passive does.
    """

    def __init__(
        self,
        party: PartyContext,
        contract: Contract,
        rows: Tensor,
        noise: ContributionNoise | None = None,
    ) -> None:
        """Make the passive's role, with a counter of answers for every alignment position.

        `rows`: the row of its table at each of the N positions, -1 for a person that it does not
        know. `noise`: the noise that it adds to its votes, with the privacy ledger; None: it adds
        none.
        """
        super().__init__(party, contract, rows)
        self._answer_limits = AnswerLimits.from_contract(party, contract, position_count=len(rows))
        self.checkpoint_parts = {"allowance": self._answer_limits}
        self._noise = noise
        if noise is not None:
            self._set_ledger(noise.ledger)

    def _set_ledger(self, ledger: PrivacyLedger) -> None:
        """Record the privacy cost of votes in this ledger, and report its totals to the active."""
        self.contribution_ledger = ledger
        self.ledgers = {self.name: ledger}

    def count_answers(
        self, ballot: Ballot, values_U: NDArray[np.generic], *, counts_repeats_once: bool = False
    ) -> list[bytes]:
        """Count one answer for every row of the ballot in the log, before the answer leaves.

        `ballot`: the active's request for votes. `values_U`: the values from which each of the U
        rows' answers is computed. `counts_repeats_once`: whether an equal answer in another session
        is not counted again.

        Returns the digest of each block's answer. Raises RemoteProtocolError: a row was already
        answered as often as agreed.
        """
        # A digest without the session is the same in all sessions, which is how repeats are found.
        session = b"" if counts_repeats_once else self.contract.digest
        sender = self.contract.active
        digests = []
        for step, block in enumerate(ballot.blocks):
            rows_B = ballot.rows[block]
            digest = compute_answer_digest(session, ballot.payload, values_U[block])
            self._answer_limits.check_batch(step, rows_B, sender=sender)
            self._answer_limits.count_answers(step, rows_B, digest, sender=sender)
            digests.append(digest)
        return digests

    def draw_noise(
        self,
        ballot: Ballot,
        values_U: Floats,
        shape: tuple[int, int],
        *,
        counts_repeats_once: bool = False,
    ) -> NDArray[np.int64] | None:
        """Count the answer to a whole ballot, record its privacy cost, and return its noise.

        Without agreed noise, None is returned, and there is no privacy cost.

        Args:
            ballot: the active's request for votes.
            values_U: the values from which each of the U rows' answers is computed.
            shape: shape of the noise to draw, integers in fixed-point steps.
            counts_repeats_once: whether an equal answer in another session costs nothing more. It
                costs more where the request or other passives' noise may differ.

        Raises RemoteProtocolError: a row was already answered as often as agreed;
        BudgetExhaustedError: the answer would exceed the privacy budget. Nothing may be sent then.
        """
        digests = self.count_answers(ballot, values_U, counts_repeats_once=counts_repeats_once)
        digest = hashlib.sha256(b"".join(digests)).digest()
        if self._noise is None:
            return None
        known_B = ballot.rows[self.is_known_N[ballot.rows]]
        return self._noise.charge_and_draw(
            shape, step=ballot.step, charged_rows_B=known_B, digest=digest
        )


def open_vote_ledger(
    party: PartyContext, release: VoteResponse | SummedRelease, person_count: int
) -> PrivacyLedger:
    """Open a passive's privacy ledger for its votes.

    `release`: the privacy mechanism of one vote. `person_count`: number of alignment positions.
    """
    votes = VoteSettings.from_run_settings(party.config)
    epsilon_name = votes.passives_epsilon_name
    return party.open_ledger(
        release, budget=votes.epsilon, position_count=person_count, epsilon_name=epsilon_name
    )


@dataclass(frozen=True)
class VoteTerms(ABC):
    """The parameters of a voting protocol that follow from the settings alone.

    All parties derive the same ones, before there is a ballot (request for votes).

    Attributes:
        party: the party that derives these parameters, with its settings.
        contributors: the names of the passives.
        classes: number of classes.
    """

    party: PartyContext
    contributors: tuple[str, ...]
    classes: int

    @classmethod
    def from_contract(cls, party: PartyContext, contract: Contract) -> Self:
        """Return the parameters for the contract's passives and number of classes."""
        # A vote is one score for each class.
        (classes,) = contract.passives[party.passives[0]].representation.shape
        return cls(party, tuple(contract.passives), classes)

    @property
    @abstractmethod
    def release(self) -> SummedRelease | None:
        """The privacy mechanism of one vote under the honest passives' noise; None: no noise."""

    @property
    def honest_count(self) -> int:
        """The number of passives whose noise counts: all except the assumed colluders.

        Raises ConfigError: noise is configured, and no passive remains; or a single passive's votes
        would be revealed.
        """
        config = self.party.config
        passive_count = len(self.contributors)
        honest_count = passive_count - config.colluders
        if VoteSettings.from_run_settings(config).epsilon is not None and honest_count < 1:
            raise ConfigError(
                f"colluders: {config.colluders} of {passive_count} passives leave no honest one "
                "whose noise would count"
            )
        if passive_count == 1 and not config.secure_sum.allow_single_passive:
            raise ConfigError(
                "secure_sum.allow_single_passive: a sum of one passive's votes hides nothing. Add "
                "passives, or accept this by secure_sum: {allow_single_passive: true}"
            )
        return honest_count

    def calibrate_release(
        self, labeller: Labeller, make_release: Callable[[int], SummedRelease]
    ) -> SummedRelease:
        """Return the privacy mechanism with the least noise that keeps the epsilon for one vote.

        The settings give the epsilon. `labeller`: the rule by which passives vote. `make_release`:
        function from a standard deviation in fixed-point steps to the mechanism with that noise.
        """
        config = self.party.config
        epsilon = VoteSettings.from_run_settings(config).epsilon
        assert epsilon is not None
        deviation = calibrate_votes(labeller, make_release, epsilon=epsilon, delta=config.delta)
        return make_release(deviation)

    def describe_noise(self) -> dict[str, object]:
        """Return the noise's public parameters for the contract; empty without noise."""
        if self.release is None:
            return {}
        epsilon = VoteSettings.from_run_settings(self.party.config).epsilon
        release = self.release
        noise = {"epsilon": epsilon, "steps": release.deviation, "honest": release.honest}
        return {"noise": noise}

    def make_noise(self, person_count: int) -> ContributionNoise | None:
        """Return a passive's noise with its privacy ledger; None if no noise is agreed.

        `person_count`: number of alignment positions.
        """
        party = self.party
        release = self.release
        if release is None:
            return None
        return ContributionNoise(
            deviation=release.deviation,
            key=party.derive_key(b"secure-apfed vote noise v1"),
            ledger=open_vote_ledger(party, release, person_count),
            is_secret=party.has_secret_noise,
        )


class BallotAggregator(Aggregator):
    """An aggregator that combines all passives' votes block by block; see `Aggregator`.

    It can read none of the messages.

    Attributes:
        blocks: number of contributions that each passive sends, one for each block of votes; they
            are numbered from 0.
    """

    blocks: int

    def admit_step(self, message: Envelope) -> None:
        """Let the first contribution to a block of votes start the block.

        Raises RemoteProtocolError: the block is over, or the ballot (the request for votes) has
        fewer blocks.
        """
        super().admit_step(message)
        if message.step >= self.blocks:
            raise RemoteProtocolError(
                f"{message.sender} sent block {message.step} of votes; this session takes "
                f"{self.blocks}"
            )
