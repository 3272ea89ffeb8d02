"""Votes under randomised response: the active reads each passive's randomised votes.

A passive sends one class for each of its votes: the voted one with a known probability, otherwise a
random other one, drawn by its own key (`RandomisedVotesPassive`). The active estimates the sum of
the votes without bias (`RandomisedVotesActive`), and how far each passive's votes agree with
others' (`estimate_agreement`). The rest is `secure_apfed.methods.votes`.

Letters: U rows to vote on, n of them labelled, B rows at once, M passives, K classes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.contract import Contract
from secure_apfed.exchange import Envelope, Kind, Links, TensorSpec, pack_tensors, unpack_tensors
from secure_apfed.learning.votes import Floats, Integers
from secure_apfed.methods.method import FOR_AN_ANSWER, ActiveRole, HelperRole, VoteAgreement
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.votes import NoisedVoteSettings, VotesActive, VotesMethod
from secure_apfed.methods.votes_counted import CountingPassive, open_vote_ledger
from secure_apfed.privacy.randomised_response import VoteResponse

_SAME_FOR_ALL_BALLOTS = bytes(8)
"""Replaces the ballot as input of the seeded randomness, so that experiments repeat with the seed.
"""


class RandomisedVotesSettings(NoisedVoteSettings):
    """The settings of votes under randomised response; see `VoteSettings`.

    Every passive randomises its own votes; a vote names one class.
    """

    name: Literal["votes_randomised"]

    title = "votes, randomised"
    vote_protocol = "randomised"
    tasks = ("classification", "regression")


class RandomisedVotesActive(VotesActive):
    """An active that reads every passive's randomised votes; see `VotesActive`.

    From them it estimates the sum of the true votes.
    """

    def __init__(self, party: PartyContext, contract: Contract, rows: Tensor) -> None:
        """Make the active's role, with the randomised response that all passives apply.

        `rows`: the row of its table at each of the N alignment positions.
        """
        self._response = _make_response(party, contract)
        super().__init__(party, contract, rows, self._response)
        self._answers_MU: Integers | None = None

    async def gather_votes(self, links: Links) -> Floats:
        """Request every passive's randomised votes, and estimate the sum of the true votes.

        The estimate is unbiased: K classes for each of U rows, (U, K).
        """
        passives = tuple(self.contract.passives)
        response = self._response
        for name in passives:
            links.send(name, Kind.LABELS, self.ballot.step, self.ballot.payload)
        answers_MU = np.stack([await self._receive_answers(links, name) for name in passives])
        self._record_answers(answers_MU)
        return response.estimate_sum(answers_MU)

    async def _receive_answers(self, links: Links, name: str) -> Integers:
        """Return one passive's randomised votes, class indices (U,).

        Raises RemoteProtocolError: a vote is outside the classes.
        """
        expected = {"votes": TensorSpec(torch.int16, (len(self.ballot.rows),))}
        message = await links.receive(
            name, Kind.VOTES, step=self.ballot.step, patience=FOR_AN_ANSWER
        )
        tensors, _ = unpack_tensors(message.payload, expected, sender=name)
        answers_U: Integers = tensors["votes"].long().numpy()
        if not ((answers_U >= 0) & (answers_U < self.classes)).all():
            raise RemoteProtocolError(f"{name} voted for a class outside 0..{self.classes - 1}")
        return answers_U

    def _record_answers(self, answers_MU: Integers) -> None:
        """Store the randomised votes, and set `agreement`.

        It says how far each passive's votes agree with the others' and with the labels.
        `answers_MU`: class indices, by M passives on U rows.
        """
        self._answers_MU = answers_MU
        self.agreement_by_party = estimate_agreement(
            self._response,
            answers_MU,
            names=tuple(self.contract.passives),
            labelled_n=self.ballot.labelled.numpy(),
            labels_n=self.ballot.labels.numpy(),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the state with the passives' answers."""
        tensors = super().tensors()
        if self._answers_MU is not None:
            tensors["answers"] = torch.from_numpy(self._answers_MU)
        return tensors

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        """Restore the state, and compute the agreement of the answers again."""
        super().load_tensors(tensors, next_step=next_step)
        if "answers" in tensors:
            self._record_answers(tensors["answers"].numpy())


class RandomisedVotesPassive(CountingPassive):
    """A passive that sends its votes under randomised response; see `VotesPassive`."""

    def __init__(self, party: PartyContext, contract: Contract, rows: Tensor) -> None:
        """Make the passive's role with its privacy ledger and the key of its randomness.

        `rows`: the row of its table at each of the N alignment positions, -1 for a person that it
        does not know.
        """
        super().__init__(party, contract, rows)
        self._response = _make_response(party, contract)
        self._ledger = open_vote_ledger(party, self._response, len(rows))
        self._set_ledger(self._ledger)
        self._key = party.derive_key(b"secure-apfed votes v1")
        # False in experiments, whose randomness follows from a public seed.
        self._has_secret_noise = party.has_secret_noise

    async def answer_message(self, links: Links, message: Envelope) -> None:
        """Vote on the rows of the active's request, and send the votes under randomised response.

        Before they leave, the answers are counted and their privacy cost is recorded. The
        randomness is a function of the party's key, the votes and the ballot.
        """
        ballot = self.admit_ballot(message)
        # With a secret key, another ballot gets other randomness, however similar it is.
        request = ballot.payload if self._has_secret_noise else _SAME_FOR_ALL_BALLOTS
        votes_UK = self.cast_votes(ballot)
        answers_U = self._response.randomise_votes(votes_UK, key=self._key, about=request)
        # The same ballot gets the same answers from the same key, in any session.
        digests = self.count_answers(ballot, answers_U, counts_repeats_once=True)
        for step, (block, digest) in enumerate(zip(ballot.blocks, digests, strict=True)):
            rows_B = ballot.rows[block]
            self._ledger.charge(step=step, rows=rows_B[self.is_known_N[rows_B]], digest=digest)
        self._ledger.sync()
        payload = pack_tensors({"votes": torch.from_numpy(answers_U).short()})
        links.send(self.contract.active, Kind.VOTES, message.step, payload)


class RandomisedVotes(VotesMethod):
    """The method of votes under randomised response; see `Method`."""

    settings = RandomisedVotesSettings

    def build_active(self, party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        """Return the active's role; `rows`: the row of its table at each alignment position."""
        return RandomisedVotesActive(party, contract, rows)

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        """Return a passive's role; `rows`: the row of its table at each alignment position."""
        return RandomisedVotesPassive(party, contract, rows)


def _make_response(party: PartyContext, contract: Contract) -> VoteResponse:
    """Return the randomised response over the contract's classes, with the configured epsilon."""
    (classes,) = contract.passives[party.passives[0]].representation.shape
    epsilon = RandomisedVotesSettings.from_run_settings(party.config).epsilon
    assert epsilon is not None
    return VoteResponse(epsilon=epsilon, classes=classes)


def estimate_agreement(
    response: VoteResponse,
    answers_MU: Integers,
    *,
    names: Sequence[str],
    labelled_n: Integers,
    labels_n: Integers,
) -> Mapping[str, VoteAgreement]:
    """Estimate for each passive how often its votes agree with other passives' votes and labels.

    A low share points at a dishonest passive, or at features that say little. The estimate costs no
    privacy, since the active already has the answers. Summed votes allow no such estimate: the
    total with and without one passive would reveal its votes.

    p is the probability that an answer is the vote, q that it is one certain other class, K the
    number of classes. Two answers are equal with probability s = p^2 + (K - 1) q^2 if the votes are
    equal, and with d = 2 p q + (K - 2) q^2 if they differ. So (share - d) / (s - d), where share is
    the share of equal answers, estimates the share of equal votes without bias; s - d = (p - q)^2.
    Against a label the estimate is (share - q) / (p - q). A person without a vote counts as a
    uniformly random vote.

    Args:
        response: the randomised response, with its probabilities p and q.
        answers_MU: the randomised votes of M passives on U rows, class indices.
        names: names of the passives, in the order of `answers_MU`.
        labelled_n: indices of labelled rows among the U.
        labels_n: the labels of those rows, in 0..K-1.

    Returns a mapping from passive name to the estimates and their standard deviations.
    """
    p = response.keep_probability
    q = response.other_probability
    classes = response.classes
    equal_by_chance = 2 * p * q + (classes - 2) * q**2  # d
    gain_if_equal_votes = (p - q) ** 2  # s - d
    gain_if_right_vote = p - q
    passive_count, row_count = answers_MU.shape
    agreement_by_passive = {}
    for index, name in enumerate(names):
        equal_shares = [
            float((answers_MU[index] == answers_MU[other_index]).mean())
            for other_index in range(passive_count)
            if other_index != index
        ]
        right_share = float((answers_MU[index][labelled_n] == labels_n).mean())
        agreement_with_others = None  # a single passive has none to agree with
        if equal_shares:
            mean_equal_share = float(np.mean(equal_shares))
            agreement_with_others = (mean_equal_share - equal_by_chance) / gain_if_equal_votes
        agreement_by_passive[name] = VoteAgreement(
            others=agreement_with_others,
            labels=(right_share - q) / gain_if_right_vote,
            # A share of independent rows has a standard deviation of at most 1 / (2 sqrt rows).
            others_noise=0.5 / math.sqrt(row_count) / gain_if_equal_votes,
            labels_noise=0.5 / math.sqrt(len(labelled_n)) / gain_if_right_vote,
        )
    return agreement_by_passive
