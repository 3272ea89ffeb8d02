"""A rehearsal of votes: how often each passive's votes would be right, before any vote is sent.

The active sends the rows to label and the labels that it knows, as for votes. A passive votes by
itself, on each labelled row without its own label (`Labeller.label_without_own`), and sends one
number: on how many of these it is right, with discrete Gaussian noise. No party learns a vote; the
number is self-reported, not verified. The active's model is its best local model. A person decides
by the numbers, beside the share of rows on which that model is right, in the report or by
`secure-apfed plan RUN.yaml --with-peers 1`.

Letters: U rows to vote on, n of them labelled, K classes.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from secure_apfed.baselines.interface import cache_fits
from secure_apfed.contract import Contract
from secure_apfed.exchange import Envelope, Kind, Links, TensorSpec, pack_tensors, unpack_tensors
from secure_apfed.learning.release import ContributionNoise
from secure_apfed.learning.votes import Floats
from secure_apfed.methods.method import (
    FOR_AN_ANSWER,
    ActiveRole,
    HelperRole,
    StepCounter,
    VoteAgreement,
)
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.votes import NoisedVoteSettings, VotesActive, VotesMethod
from secure_apfed.methods.votes_counted import CountingPassive, VoteTerms
from secure_apfed.privacy.contributions import SummedRelease

_STEPS = 1024
"""Number of fixed-point steps per row in the reported number of right votes."""


class RehearsalSettings(NoisedVoteSettings):
    """The settings of a rehearsal of votes; see `VoteSettings`.

    A rehearsal shows on labelled rows how often votes would be right, before any vote is sent. Its
    `epsilon` is the privacy cost of the number that a passive reports, for one person, with the
    labeller held fixed.
    """

    name: Literal["votes_rehearsal"]

    title = "rehearsal of votes"
    vote_protocol = "count"


class _Terms(VoteTerms):
    """The noise on the number of right votes that a passive reports; see `VoteTerms`."""

    @property
    def honest_count(self) -> int:
        """The number of passives whose noise counts: 1, since every number has its own noise."""
        return 1

    @cached_property
    def release(self) -> SummedRelease:
        """The privacy mechanism of a noisy number of right votes.

        One person's row moves the number by 1 at most, which is `_STEPS` fixed-point steps.
        """

        def make_release(deviation: int) -> SummedRelease:
            """Return the release whose noise has this deviation in fixed-point steps."""
            return SummedRelease(deviation=deviation, honest=1, sensitivity=_STEPS, numbers=1)

        votes = RehearsalSettings.from_run_settings(self.party.config)
        labeller = self.party.make_labeller(votes.labeller, votes.weights_epsilon)
        return self.calibrate_release(labeller, make_release)


class RehearsalActive(VotesActive):
    """An active that asks each passive on how many labelled rows its votes are right.

    No vote is sent. See `VotesActive`.
    """

    def __init__(self, party: PartyContext, contract: Contract, rows: Tensor) -> None:
        """Make the active's role, which knows how noisy every passive's number is.

        `rows`: the row of its table at each of the N alignment positions.
        """
        release = _Terms.from_contract(party, contract).release
        super().__init__(party, contract, rows, release)
        self._deviation = release.deviation / _STEPS
        self._shares = torch.zeros(0)

    async def gather_votes(self, links: Links) -> Floats:
        """Raise AssertionError: a rehearsal reveals no votes."""
        raise AssertionError(f"{self.name}: a rehearsal opens no votes")

    async def teach_student(self, links: Links, steps: StepCounter) -> None:
        """Request each passive's share of right votes; train the student without votes.

        The student learns the active's own predictions. If these come from a local baseline, the
        baseline's model becomes the student. A student that is fitted in closed form counts as one
        step in `steps`.
        """
        for name in self.contract.passives:
            links.send(name, Kind.LABELS, self.ballot.step, self.ballot.payload)
        shares = [await self._receive_share(links, name) for name in self.contract.passives]
        student = self.student
        # With zeros as votes, `weigh_votes` returns the active's own predictions, and measures on
        # which share of labelled rows they are right (`MeasuredHelp.local_accuracy`).
        no_votes_UK = np.zeros((len(self.ballot.rows), self.classes))
        with cache_fits():
            weighed = student.weigh_votes(no_votes_UK, self._prior, seed=self._seed)
            if weighed.prior_rule.baseline is None:
                student.fit_to_labels(weighed.likely_UK)
            else:
                student.use_baseline(weighed.prior_rule.baseline)
        assert weighed.help is not None
        own_share = torch.tensor(weighed.help.local_accuracy).double()
        self._record_shares(torch.stack([*shares, own_share]))
        if student.has_direct_fit:
            steps.count_step(0.0)

    async def _receive_share(self, links: Links, name: str) -> Tensor:
        """Receive the share of labelled rows on which a passive says that its votes are right.

        The share is a float64 scalar; its noise may push it below 0 or above 1.
        """
        message = await links.receive(
            name, Kind.RIGHT_VOTES, step=self.ballot.step, patience=FOR_AN_ANSWER
        )
        expected = {"right": TensorSpec(torch.int64, ())}
        tensors, _ = unpack_tensors(message.payload, expected, sender=name)
        right_votes = tensors["right"].double() / _STEPS  # a number of votes, from fixed point
        return right_votes / len(self.ballot.labelled)

    def _record_shares(self, shares: Tensor) -> None:
        """Store the shares of right votes, and set `agreement` from them.

        `shares`: the share of each of M passives, and then the share of rows on which the active's
        own model is right, (M + 1,).
        """
        self._shares = shares
        passive_noise = self._deviation / len(self.ballot.labelled)
        noises = {**dict.fromkeys(self.contract.passives, passive_noise), self.name: 0.0}
        self.agreement_by_party = {
            name: VoteAgreement(
                others=None, labels=share, others_noise=0.0, labels_noise=noises[name]
            )
            for name, share in zip(noises, shares.tolist(), strict=True)
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint; "told" has the shares, empty before they arrive."""
        return {"told": self._shares, **super().tensors()}

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        """Restore the state and the recorded shares."""
        super().load_tensors(tensors, next_step=next_step)
        if len(tensors["told"]):
            self._record_shares(tensors["told"])


class RehearsalPassive(CountingPassive):
    """A passive that reports the number of labelled rows on which its votes are right.

    See `VotesPassive`.
    """

    async def answer_message(self, links: Links, message: Envelope) -> None:
        """Vote on labelled rows without their own label, and send how many votes are right.

        The number has noise, and is sent in fixed-point steps.
        """
        ballot = self.admit_ballot(message)
        votes_UK = self.cast_votes(ballot)
        right_votes = votes_UK[ballot.labelled.numpy(), ballot.labels.numpy()].sum()
        noise = self.draw_noise(ballot, votes_UK, (1, 1), counts_repeats_once=True)
        assert noise is not None
        noisy_count = torch.tensor(round(right_votes) * _STEPS + int(noise[0, 0]))
        links.send(
            self.contract.active,
            Kind.RIGHT_VOTES,
            message.step,
            pack_tensors({"right": noisy_count}),
        )


class Rehearsal(VotesMethod):
    """A rehearsal of votes; see `Method`."""

    settings = RehearsalSettings

    def build_active(self, party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        """Return the active's role; `rows`: the row of its table at each alignment position."""
        return RehearsalActive(party, contract, rows)

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        """Return a passive's role.

        `rows`: the row of its table at each of the N alignment positions.
        """
        terms = _Terms.from_contract(party, contract)
        noise: ContributionNoise | None = terms.make_noise(len(rows))
        return RehearsalPassive(party, contract, rows, noise)
