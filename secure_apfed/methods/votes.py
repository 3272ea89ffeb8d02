"""Votes: every party labels the active's rows alone; the active learns from what all say together.

One round trip before training: the active names rows and the labels that it has, every passive
labels the rows from its own features, and the active opens the votes: as a secure sum (`votes`), or
each passive's under randomised response (`votes_randomised`). Its student then learns alone; the
prior is what the active believes without votes (`prior`: by default the solo baseline that
its held-out labels choose). Help is worth most where few rows have a label and many more are
aligned. Two more openings are files of their own.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import model_validator
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.randomness import derive_key
from apfed_protocols.sums import SecureSum, SumContributor, SumReceiver
from secure_apfed.contract import AGGREGATOR, Contract, PassiveTerms, RepresentationTerms
from secure_apfed.exchange import Envelope, Kind, Links, TensorSpec, pack, unpack
from secure_apfed.labellers import Labeller, Logistic, PrivateLogistic, make_labeller
from secure_apfed.labellers.guarantee import Opening, table_guarantee
from secure_apfed.learning.agreement import agreements
from secure_apfed.learning.release import ContributionNoise
from secure_apfed.learning.student import Prior, by_baseline, by_best_baseline, by_labeller
from secure_apfed.learning.votes import Votes
from secure_apfed.measures import ACCURACY, MEASURES
from secure_apfed.methods.accounts import answers_log, open_ledger, refused_sums
from secure_apfed.methods.alignment import positions_in
from secure_apfed.methods.method import (
    Agreed,
    Helper,
    Learner,
    Method,
    Own,
    Steps,
)
from secure_apfed.methods.students import StudentLearner, classes_voted, student_of
from secure_apfed.methods.sum_end import SumAggregator
from secure_apfed.methods.sum_noise import (
    NoisePlan,
    contribution_noise,
    parameters_of,
    sum_and_noise,
    summed_release,
)
from secure_apfed.methods.terms import check_passives, require_own_terms
from secure_apfed.methods.vote_protocol import BEST_SOLO, VoteSettings
from secure_apfed.parties import Ballot, VotesActive, VotingParty
from secure_apfed.parties.rules import RefusedSums, bind_step, read_sum
from secure_apfed.privacy import PrivacyLedger
from secure_apfed.privacy.randomised_response import VoteResponse
from secure_apfed.settings.method import FormSettings
from secure_apfed.settings.run import RunSettings
from secure_apfed.solo import BASELINES

__all__ = [
    "RandomisedVotes",
    "RandomisedVotesHelper",
    "RandomisedVotesLearner",
    "RandomisedVotesSettings",
    "SummedVotes",
    "SummedVotesHelper",
    "SummedVotesLearner",
    "VotesHelper",
    "VotesLearner",
    "VotesMethod",
    "VotesSettings",
    "passive_labeller",
    "prior_of",
]

_ASK = 0
_SEEDED = bytes(8)  # for every ballot alike, so that experiments repeat with the seed


class VotesSettings(FormSettings, VoteSettings):
    """Votes that are opened as their secure sum; see `VoteSettings`."""

    name: Literal["votes"]

    title = "votes, summed"
    opens_votes = "sum"
    takes_pairwise = True
    tasks = ("classification", "regression")

    @property
    def answers(self) -> Literal["soft", "hard"]:
        return self.form


class RandomisedVotesSettings(VoteSettings):
    """Votes that every passive answers for itself, always hard; see `VoteSettings`."""

    name: Literal["votes_randomised"]

    title = "votes, randomised"
    opens_votes = "randomised"
    takes_pairwise = True
    tasks = ("classification", "regression")

    @model_validator(mode="after")
    def _is_noised(self) -> Self:
        self._needs_epsilon()
        return self

    @property
    def answers(self) -> Literal["soft", "hard"]:
        return "hard"


class VotesLearner(StudentLearner):
    """The active's role; see `StudentLearner`. `party` is the active, set up."""

    def __init__(self, party: VotesActive, own: Own, *, headline: str, guarantee: str) -> None:
        super().__init__(own, party.student, headline=headline, guarantee=guarantee)
        self.party = party

    @abstractmethod
    async def gather(self, links: Links) -> Votes:
        """Ask for the votes, and open them."""

    @property
    def opened(self) -> Tensor | None:
        """The votes, (U, K)."""
        votes = self.party.votes
        return None if votes is None else torch.from_numpy(votes.totals)

    async def teach(self, links: Links, steps: Steps) -> None:
        self.party.take(await self.gather(links))
        if self.student.in_one_go:
            steps.stepped(0.0)

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | self.party.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        super().load_tensors(tensors, next_step=next_step)
        self.party.load_tensors(tensors)


class VotesHelper(Helper):
    """A passive's role: it votes once a session; see `Helper`."""

    asks = (Kind.LABELS,)

    def __init__(self, party: VotingParty) -> None:
        self.name, self.party, self.contract = party.name, party, party.contract

    def tensors(self) -> dict[str, Tensor]:
        return self.party.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        self.party.load_tensors(tensors)


class VotesMethod(Method):
    """What all openings of votes share; see `Method`."""

    def offer(self, own: Own) -> RepresentationTerms | None:
        """The active says how many classes a row of votes has, or ranges of numbers."""
        if own.name != own.active:
            return None
        check_passives(own.config, own.passives)
        return _row_of_votes(classes_voted(own))

    def agree(self, own: Own, offers: Mapping[str, RepresentationTerms], session: str) -> Agreed:
        offered = offers[own.active]
        require_own_terms(own.name, own.active, offered, _row_of_votes(*offered.shape[:1]))
        terms = PassiveTerms(objective=None, weight=1.0, representation=offered)
        return Agreed(
            passives=dict.fromkeys(own.passives, terms),
            secure_sum=self.sum_terms(own, session, offered.shape),
        )

    def sum_terms(self, own: Own, session: str, shape: tuple[int, ...]) -> Mapping[str, object]:
        """Public parameters of what adds the votes; empty where nothing does."""
        return {}

    def active_party(self, own: Own, contract: Contract, rows: Tensor) -> VotesActive:
        """The active, with its student at its reproducible start."""
        student = student_of(own, rows)
        return VotesActive(
            own.name,
            contract,
            student=student,
            positions_U=positions_in(rows, student.rows_U),
            prior=prior_of(own.config),
            # As the solo baselines beside the run, which are the same fits: none of them is sent.
            seed=own.config.seed,
            shown=own.config.method.sends_labels,
        )

    def voting_party(self, own: Own, contract: Contract, rows: Tensor) -> VotingParty:
        """A passive with its labeller."""
        return VotingParty(
            own.name,
            contract,
            features_N=own.data.table.features[rows.clamp(min=0)],
            held_N=rows >= 0,
            labeller=passive_labeller(own),
            form=VoteSettings.of(own.config).answers,
            answers=answers_log(own),
        )

    def guarantee(self, own: Own, opening: Opening | None) -> str:
        """What noise on the votes gives, in words."""
        if opening is None:
            return "no guarantee: votes are opened without noise (epsilon is infinite)"
        labeller = passive_labeller(own)
        return table_guarantee(labeller, opening, delta=own.config.delta).statement()


def passive_labeller(own: Own) -> Labeller:
    """The labeller that all passives agreed on, with this party's own key."""
    votes = VoteSettings.of(own.config)
    noised = votes.weights_epsilon is not None
    return make_labeller(
        votes.labeller,
        epsilon=votes.weights_epsilon,
        delta=own.config.delta,
        key=derive_key(own.secrets.noise_key, b"secure-apfed labeller v1") if noised else None,
        seeded=noised and own.config.guard.noise != "secret",
    )


def prior_of(config: RunSettings) -> Prior:
    """What the active believes before it reads votes; it needs no noise against itself."""
    votes = VoteSettings.of(config)
    if votes.prior == BEST_SOLO:
        measure = MEASURES[config.measure]
        return by_best_baseline(measure if "classification" in measure.tasks else ACCURACY)
    if votes.prior in BASELINES:
        return by_baseline(BASELINES[votes.prior])
    noised = votes.labeller == PrivateLogistic.name
    return by_labeller(Logistic() if noised else make_labeller(votes.labeller))


def _row_of_votes(classes: int) -> RepresentationTerms:
    return RepresentationTerms(
        shape=(classes,), dtype="float32", minimum_norm=0.0, maximum_norm=1.0
    )


class SummedVotesLearner(VotesLearner):
    """Opens the secure sum of the votes; see `VotesLearner`."""

    def __init__(
        self, party: VotesActive, own: Own, *, headline: str, guarantee: str,
        receiver: SumReceiver, refused: RefusedSums, rounding: float, variance: float,
    ) -> None:  # fmt: skip
        super().__init__(party, own, headline=headline, guarantee=guarantee)
        self.rounding, self._without_all = rounding, 0
        self._receiver, self._refused, self._variance = receiver, refused, variance

    @property
    def steps_without_all(self) -> int:
        return self._without_all

    async def set_up(self, links: Links) -> None:
        """Its end of the sum."""
        peers = (*self.party.contract.passives, AGGREGATOR)
        await links.converse(Kind.SUM_SETUP, self._receiver, peers)

    async def gather(self, links: Links) -> Votes:
        """Ask all passives, and open one block of rows after the other."""
        party, ballot, contract = self.party, self.party.ballot, self.party.contract
        asked = list(contract.passives)
        for name in asked:
            links.send(name, Kind.LABELS, _ASK, ballot.payload)
        sum_UK = np.zeros((len(ballot.rows), party.classes))
        variance_U = np.zeros(len(ballot.rows))
        for step, block in enumerate(ballot.blocks):
            message = await links.receive(AGGREGATOR, Kind.SUM, step=step, patience=4)
            present, combined = read_sum(message, asked, contract)
            rows_B = ballot.rows[block]
            binding = bind_step(contract.session, step, rows_B, ballot.payload)
            with self._refused.noting(step=step, contract=contract.digest.hex()):
                shape = (len(rows_B), party.classes)
                sum_UK[block] = self._receiver.decode(combined, shape, binding)
            variance_U[block] = self._variance * len(present)
            self.left |= {name: step for name in asked if name not in present}
            self._without_all += bool(self.left)
            asked = list(present)
        return Votes(totals=sum_UK, variance=variance_U, voters=len(contract.passives))


class SummedVotesHelper(VotesHelper):
    """Adds its votes to the secure sum; see `VotesHelper`."""

    def __init__(
        self, party: VotingParty, contributor: SumContributor, *, rounds: int,
        noise: ContributionNoise | None,
    ) -> None:  # fmt: skip
        super().__init__(party)
        self._contributor, self._rounds, self._noise = contributor, rounds, noise
        self.contributions = noise.ledger if noise else None
        if noise:
            self.ledgers = {party.name: noise.ledger}

    async def set_up(self, links: Links) -> None:
        """Its end of the sum."""
        contract = self.party.contract
        peers = [contract.active, AGGREGATOR, *contract.passives]
        peers.remove(self.name)
        await links.converse(Kind.SUM_SETUP, self._contributor, peers)

    async def answer(self, links: Links, message: Envelope) -> None:
        ballot = self.party.read(message)
        votes_UK = self.party.vote(ballot)
        for step in range(len(ballot.blocks)):
            links.send(AGGREGATOR, Kind.CONTRIBUTION, step, self._part(ballot, votes_UK, step))
            if self._rounds == 2:
                request = await links.receive(AGGREGATOR, Kind.SUM_REQUEST, step=step, patience=2)
                answer = self._contributor.answer(request.payload)
                links.send(AGGREGATOR, Kind.SUM_ANSWER, step, answer)

    def _part(self, ballot: Ballot, votes_UK: NDArray[np.float64], step: int) -> bytes:
        """One block's contribution: counted, then charged, then protected."""
        party, contract = self.party, self.party.contract
        block = ballot.blocks[step]
        rows_B, votes_BK = ballot.rows[block], np.ascontiguousarray(votes_UK[block])
        held_B = party.held_N[rows_B]
        # As gradients: the same sum again tells nothing new only where all repeat theirs.
        may_lack = contract.silent_passive == "recover"
        new = self._noise is not None or may_lack or not bool(party.held_N.all())
        digest = party.count(ballot, block, step, new=new, values=votes_BK.tobytes())
        noise_BK = None
        if self._noise is not None:
            noise_BK = self._noise.draw(
                votes_BK.shape, step=step, known_B=rows_B[held_B], digest=digest
            )
        binding = bind_step(contract.session, step, rows_B, ballot.payload)
        return self._contributor.contribute(votes_BK, binding, noise_BK)


class SummedVotes(VotesMethod):
    """Votes that are opened as their secure sum; see `Method`."""

    settings = VotesSettings

    def sum_terms(self, own: Own, session: str, shape: tuple[int, ...]) -> Mapping[str, object]:
        secure_sum, noise = sum_and_noise(own.config, session, own.active, own.passives, shape)
        return parameters_of(own.config, secure_sum, noise)

    def learner(self, own: Own, contract: Contract, rows: Tensor) -> Learner:
        secure_sum, noise = self._sum(own, contract)
        shape = contract.passives[own.passives[0]].representation.shape
        step = secure_sum.agreement.clip_norm / (2 ** (secure_sum.agreement.bits - 1) - 1)
        return SummedVotesLearner(
            self.active_party(own, contract, rows),
            own,
            headline=self.headline,
            guarantee=self.guarantee(
                own, summed_release(own.config, own.passives[0], shape, noise) if noise else None
            ),
            receiver=secure_sum.receiver(),
            refused=refused_sums(own),
            rounding=secure_sum.rounding(),
            variance=(noise.steps * step) ** 2 if noise else 0.0,
        )

    def passive(self, own: Own, contract: Contract, rows: Tensor) -> Helper:
        secure_sum, plan = self._sum(own, contract)
        shape = contract.passives[own.name].representation.shape
        return SummedVotesHelper(
            self.voting_party(own, contract, rows),
            secure_sum.contributor(own.name),
            rounds=secure_sum.rounds,
            noise=contribution_noise(own, shape, plan=plan, aligned=len(rows)),
        )

    def aggregator(self, own: Own, contract: Contract) -> Helper:
        secure_sum, _ = self._sum(own, contract)
        return SumAggregator(contract, secure_sum.combiner(), rounds=secure_sum.rounds)

    def _sum(self, own: Own, contract: Contract) -> tuple[SecureSum, NoisePlan | None]:
        names = tuple(contract.passives)
        shape = contract.passives[names[0]].representation.shape
        return sum_and_noise(own.config, contract.session, contract.active, names, shape)


class RandomisedVotesLearner(VotesLearner):
    """Reads every passive's answers, and estimates the sum of the votes; see `VotesLearner`."""

    def __init__(
        self, party: VotesActive, own: Own, *, headline: str, guarantee: str,
        response: VoteResponse,
    ) -> None:  # fmt: skip
        super().__init__(party, own, headline=headline, guarantee=guarantee)
        self._response = response
        self._answers_MU: NDArray[np.int64] | None = None

    async def gather(self, links: Links) -> Votes:
        """Ask all passives, and read each one's answers."""
        party, ballot = self.party, self.party.ballot
        passives = tuple(party.contract.passives)
        for name in passives:
            links.send(name, Kind.LABELS, _ASK, ballot.payload)
        answers_MU = np.stack([await self._answers(links, name) for name in passives])
        self._keep(answers_MU)
        sum_UK = self._response.estimate(answers_MU)
        variance_UK = self._response.variance(sum_UK, parties=len(passives))
        variance_U = variance_UK.mean(axis=1).clip(min=0.0)
        return Votes(totals=sum_UK, variance=variance_U, voters=len(passives))

    def _keep(self, answers_MU: NDArray[np.int64]) -> None:
        """Tell how far they agree, also after a resumption."""
        ballot = self.party.ballot
        self._answers_MU = answers_MU
        self.agreement = agreements(
            self._response, answers_MU, names=tuple(self.party.contract.passives),
            labelled_n=ballot.labelled.numpy(), labels_n=ballot.labels.numpy(),
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        kept = super().tensors()
        if self._answers_MU is not None:
            kept["answers"] = torch.from_numpy(self._answers_MU)
        return kept

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        super().load_tensors(tensors, next_step=next_step)
        if "answers" in tensors:
            self._keep(tensors["answers"].numpy())

    async def _answers(self, links: Links, name: str) -> NDArray[np.int64]:
        ballot, classes = self.party.ballot, self.party.classes
        expected = {"votes": TensorSpec(torch.int16, (len(ballot.rows),))}
        message = await links.receive(name, Kind.VOTES, step=_ASK, patience=4)
        tensors, _ = unpack(message.payload, expected, sender=name)
        answers_U = tensors["votes"].long().numpy()
        if not ((answers_U >= 0) & (answers_U < classes)).all():
            raise RemoteProtocolError(f"{name} voted for a class outside 0..{classes - 1}")
        return answers_U


class RandomisedVotesHelper(VotesHelper):
    """Answers its votes by chance, for itself; see `VotesHelper`."""

    def __init__(
        self, party: VotingParty, response: VoteResponse, ledger: PrivacyLedger, *, key: bytes,
        secret: bool,
    ) -> None:  # fmt: skip
        super().__init__(party)
        self.ledgers, self.contributions = {party.name: ledger}, ledger
        self._response, self._key, self._secret = response, key, secret

    async def answer(self, links: Links, message: Envelope) -> None:
        party, ledger = self.party, self.contributions
        ballot = party.read(message)
        # Chance is of this ballot: on others' votes, however alike, it is another one.
        about = ballot.payload if self._secret else _SEEDED
        answers_U = self._response.answer(party.vote(ballot), key=self._key, about=about)
        assert ledger is not None
        for step, block in enumerate(ballot.blocks):
            # The same ballot gets the same answers from the same key, in any session.
            values = answers_U[block].tobytes()
            digest = party.count(ballot, block, step, new=False, values=values)
            rows_B = ballot.rows[block]
            ledger.charge(step=step, rows=rows_B[party.held_N[rows_B]], digest=digest)
        ledger.sync()
        payload = pack({"votes": torch.from_numpy(answers_U).short()})
        links.send(party.contract.active, Kind.VOTES, message.step, payload)


class RandomisedVotes(VotesMethod):
    """Votes that every passive answers for itself, under randomised response; see `Method`."""

    settings = RandomisedVotesSettings

    def learner(self, own: Own, contract: Contract, rows: Tensor) -> Learner:
        response = _response(own, contract)
        return RandomisedVotesLearner(
            self.active_party(own, contract, rows),
            own,
            headline=self.headline,
            guarantee=self.guarantee(own, response),
            response=response,
        )

    def passive(self, own: Own, contract: Contract, rows: Tensor) -> Helper:
        votes, response = VoteSettings.of(own.config), _response(own, contract)
        ledger = open_ledger(
            own, own.name, response, delta=own.config.delta, budget=votes.epsilon, rows=len(rows),
            figure=own.config.method.passives_figure,
        )  # fmt: skip
        key = derive_key(own.secrets.noise_key, b"secure-apfed votes v1")
        return RandomisedVotesHelper(
            self.voting_party(own, contract, rows), response, ledger, key=key,
            secret=own.config.guard.noise == "secret",
        )  # fmt: skip


def _response(own: Own, contract: Contract) -> VoteResponse:
    """The agreed randomised response."""
    (classes,) = contract.passives[own.passives[0]].representation.shape
    epsilon = VoteSettings.of(own.config).epsilon
    assert epsilon is not None
    return VoteResponse(epsilon=epsilon, classes=classes)
