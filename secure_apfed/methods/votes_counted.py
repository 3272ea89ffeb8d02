"""Votes outside of the session's sum: what the protocols of other openings have in common.

Run by: a passive, which counts and charges its own answers (`CountingPassive`), all parties, which
find the same noise in the settings (`VoteTerms`), and the aggregator (`BallotAggregator`).

Letters: U rows to vote on, B rows at once, K classes.
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
from secure_apfed.methods.ballots import ASK, Ballot
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.sum_end import Aggregator, Allowance, answer_digest
from secure_apfed.methods.votes import VoteSettings, VotesPassive
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.privacy.ledger import PrivacyLedger
from secure_apfed.privacy.randomised_response import VoteResponse


class CountingPassive(VotesPassive):
    """A passive that votes into no secure sum, and so counts and charges its own answers; see
    `VotesPassive`.

    `noise`: the noise that it adds, with its privacy account; None: none.
    """

    def __init__(
        self,
        party: PartyContext,
        contract: Contract,
        rows: Tensor,
        noise: ContributionNoise | None = None,
    ) -> None:
        """Make a passive's role that counts answers for every row, and charges its noise."""
        super().__init__(party, contract, rows)
        self._allowance = Allowance.from_contract(party, contract, aligned=len(rows))
        self.checkpoint_parts = {"allowance": self._allowance}
        self._noise = noise
        if noise is not None:
            self._set_ledger(noise.ledger)

    def _set_ledger(self, ledger: PrivacyLedger) -> None:
        """Use this ledger for the votes, and report it to the active."""
        self.contributions = ledger
        self.ledgers = {self.name: ledger}

    def count_answers(
        self, ballot: Ballot, values_U: NDArray[np.generic], *, repeatable: bool = False
    ) -> list[bytes]:
        """Count an answer for every row in the log, before it is charged or leaves.

        Returns the digest of each block. `values_U`: by row, what the answers are computed from.
        `repeatable`: an equal answer in another session counts once. Raises RemoteProtocolError: a
        row was answered as often as agreed.
        """
        session = b"" if repeatable else self.contract.digest
        sender = self.contract.active
        digests = []
        for step, block in enumerate(ballot.blocks):
            rows_B = ballot.rows[block]
            digest = answer_digest(session, ballot.payload, values_U[block])
            self._allowance.check_batch(step, rows_B, sender=sender)
            self._allowance.count_answers(step, rows_B, digest, sender=sender)
            digests.append(digest)
        return digests

    def draw_noise(
        self, ballot: Ballot, values_U: Floats, shape: tuple[int, int], *, repeatable: bool = False
    ) -> NDArray[np.int64] | None:
        """Count and charge the answer to a whole ballot; return its noise, or None if none is
        agreed.

        An answer is charged again in each session, since request or noise differ, unless it is
        `repeatable`. Raises RemoteProtocolError: see `count_answers`; BudgetExhaustedError:
        answering would exceed the privacy budget; nothing may be sent.

        `values_U`: by row, what the answers are computed from.
        """
        digests = self.count_answers(ballot, values_U, repeatable=repeatable)
        digest = hashlib.sha256(b"".join(digests)).digest()
        if self._noise is None:
            return None
        known_B = ballot.rows[self.is_known_N[ballot.rows]]
        return self._noise.draw(shape, step=ASK, known_B=known_B, digest=digest)


def open_vote_ledger(
    party: PartyContext, release: VoteResponse | SummedRelease, people: int
) -> PrivacyLedger:
    """Open a passive's privacy ledger for its votes on this number of people."""
    votes = VoteSettings.from_run_settings(party.config)
    figure = votes.passives_figure
    return party.open_ledger(release, budget=votes.epsilon, rows=people, figure=figure)


@dataclass(frozen=True)
class VoteTerms(ABC):
    """The terms of a protocol in the settings, before there is a ballot.

    Attributes:
        own: of any party; contributors: the passives; classes: K.
    """

    own: PartyContext
    contributors: tuple[str, ...]
    classes: int

    @classmethod
    def from_contract(cls, party: PartyContext, contract: Contract) -> Self:
        (classes,) = contract.passives[party.passives[0]].representation.shape
        return cls(party, tuple(contract.passives), classes)

    @property
    @abstractmethod
    def release(self) -> SummedRelease | None:
        """The privacy cost of one vote under the noise of all passives; None: there is no noise."""

    @property
    def honest(self) -> int:
        """The number of passives whose noise is counted.

        Raises ConfigError: there is none, or a single passive's votes would be revealed.
        """
        config = self.own.config
        passives = len(self.contributors)
        honest = passives - config.colluders
        if VoteSettings.from_run_settings(config).epsilon is not None and honest < 1:
            raise ConfigError(
                f"colluders: {config.colluders} of {passives} passives leave no honest one whose "
                "noise would count"
            )
        if passives == 1 and not config.secure_sum.allow_single_passive:
            raise ConfigError(
                "secure_sum.allow_single_passive: a sum of one passive's votes hides nothing. Add "
                "passives, or accept this by secure_sum: {allow_single_passive: true}"
            )
        return honest

    def calibrate_release(
        self, labeller: Labeller, release: Callable[[int], SummedRelease]
    ) -> SummedRelease:
        """Return the release with the least noise that keeps the configured epsilon for one vote.

        `release`: makes a release from a deviation.
        """
        config = self.own.config
        epsilon = VoteSettings.from_run_settings(config).epsilon
        assert epsilon is not None
        deviation = calibrate_votes(labeller, release, epsilon=epsilon, delta=config.delta)
        return release(deviation)

    def noise_terms(self) -> dict[str, object]:
        """Return the noise's public parameters for the contract; empty without noise."""
        if self.release is None:
            return {}
        epsilon = VoteSettings.from_run_settings(self.own.config).epsilon
        release = self.release
        noise = {"epsilon": epsilon, "steps": release.deviation, "honest": release.honest}
        return {"noise": noise}

    def make_noise(self, people: int) -> ContributionNoise | None:
        """Return a passive's noise with its ledger, for this number of people; None if no noise is
        agreed.
        """
        own = self.own
        release = self.release
        if release is None:
            return None
        return ContributionNoise(
            deviation=release.deviation,
            key=own.derive_key(b"secure-apfed vote noise v1"),
            ledger=open_vote_ledger(own, release, people),
            secret=own.noise_is_secret,
        )


class BallotAggregator(Aggregator):
    """An aggregator that combines all passives' messages, block by block, and can read none; see
    `Aggregator`.

    Attributes:
        blocks: contributions that each passive sends; they are numbered from 0.
    """

    blocks: int

    def admit_step(self, message: Envelope) -> None:
        """Admit a new block, unless the ballot has fewer. Raises RemoteProtocolError."""
        super().admit_step(message)
        if message.step >= self.blocks:
            raise RemoteProtocolError(
                f"{message.sender} sent block {message.step} of votes; this session takes "
                f"{self.blocks}"
            )
