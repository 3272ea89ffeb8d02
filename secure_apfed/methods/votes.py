"""Votes: every party labels the active's rows locally; the active learns from all votes.

One round trip before training. The active says which rows to label, and which of them have which
label (`VotesActive.gather_votes`). A passive labels them from its own features, once a session, and
emits its votes (`answer_message`) as the active may open them: into a secure sum (`votes`), or each
answer under randomised response (`votes_randomised`); two more openings are files of their own, and
what these two share stands last here. The active's student then learns alone; the prior is what the
active believes without votes (`prior`: by default the solo baseline that its held-out labels
choose). Help is worth most where few rows have a label and many more are aligned. What a vote
reveals of a passive's features, and what noise on it costs, says
`secure_apfed.labellers.guarantee`.

Letters: N positions of the alignment, U rows to vote on, n of them labelled, B rows at once, M
passives, K classes.
"""

import hashlib
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Annotated, Literal, Self

import msgpack
import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.randomness import derive_key
from secure_apfed.contract import Contract, PassiveTerms, RepresentationTerms
from secure_apfed.errors import ConfigError, NoHelpWarning
from secure_apfed.exchange import (
    BEFORE_TRAINING,
    Envelope,
    Kind,
    Links,
    TensorSpec,
    pack_tensors,
    unpack_tensors,
)
from secure_apfed.labellers import (
    LABELLERS,
    Labeller,
    Logistic,
    PrivateLogistic,
    harden_votes,
    make_labeller,
)
from secure_apfed.labellers.guarantee import Opening, calibrate_votes, table_guarantee
from secure_apfed.labellers.measured import check_votes, require_short
from secure_apfed.learning.descent import ActiveNetworks
from secure_apfed.learning.release import ContributionNoise, check_rows
from secure_apfed.learning.votes import Floats, Help, Integers
from secure_apfed.methods.accounts import describe_sum, make_sum_release, open_ledger
from secure_apfed.methods.alignment import positions_in
from secure_apfed.methods.method import (
    FOR_AN_ANSWER,
    FOR_THE_ACTIVE,
    ActiveRole,
    HelperRole,
    Method,
    PartyContext,
    SessionTerms,
    StepCounter,
    VoteAgreement,
)
from secure_apfed.methods.student import (
    Prior,
    Student,
    StudentActive,
    believe_best_baseline,
    count_classes,
    learnt_of,
    make_baseline_prior,
    make_labeller_prior,
    weigh_votes,
)
from secure_apfed.methods.sum_end import (
    Aggregator,
    Allowance,
    SessionSum,
    SumHelper,
    SumMethod,
    answer_digest,
)
from secure_apfed.methods.terms import check_passives, require_own_terms
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.privacy.ledger import PrivacyLedger
from secure_apfed.privacy.randomised_response import VoteResponse
from secure_apfed.settings import THE_ACTIVE, unknown_name
from secure_apfed.settings.method import FormSettings, MethodSettings
from secure_apfed.settings.protection import ACTIVE, NOBODY, PASSIVES, higher_is_less
from secure_apfed.settings.run import RunSettings
from secure_apfed.settings.training import NoiseSettings
from secure_apfed.solo import BASELINES
from secure_apfed.solo.interface import cache_fits

ASK = 0
"""The step in which the active asks."""

_SEEDED = bytes(8)  # for every ballot alike, so that experiments repeat with the seed
_BEST_SOLO = "best_solo"
_DIGEST_BYTES = 32
_FIGURES = 5
"""Numbers of `Help` that are neither a count nor a choice."""


class VoteSettings(MethodSettings):
    """The settings of votes: how parties vote on the labels of the active's rows, and how the
    active reads the votes.

    Attributes:
        labeller: a key of `LABELLERS`: how every party labels rows from its own features.
        prior: what the active believes before it reads votes: "best_solo", by the baseline that its
            held-out labels choose; a key of `BASELINES`; or "labeller", its own of the passives'
            kind.
        help: "averaged": used; where labelled rows do not say that it is one, what is learnt with
            it is averaged with the best three local models; "judged": used where labelled rows say
            that it is one, and else the best local model stays; "always": used whatever they say.
        epsilon: what the vote on one person may cost one passive, the labeller held fixed; null:
            votes are opened without noise.
        weights_epsilon: what the weights of `private_logistic`, which needs it, may cost a labelled
            person. So of any labeller that noises its weights.
    """

    labeller: Annotated[str, NOBODY] = "spreading"
    prior: Annotated[str, THE_ACTIVE, NOBODY] = _BEST_SOLO
    help: Annotated[Literal["averaged", "judged", "always"], THE_ACTIVE, NOBODY] = "averaged"
    epsilon: Annotated[float | None, higher_is_less(PASSIVES, "less noise is in a vote")] = Field(
        None, gt=0
    )
    weights_epsilon: Annotated[
        float | None, higher_is_less(ACTIVE, "less noise is in the weights that labels move")
    ] = Field(None, gt=0)

    predicts_alone = True

    def for_rehearsal(self, steps: int, epochs: int) -> Self:
        """See `MethodSettings`: of random numbers no baseline is the best, and none is fitted."""
        return self.model_copy(update={"prior": "labeller", "help": "judged"})

    @field_validator("prior")
    @classmethod
    def _is_a_prior(cls, name: str) -> str:
        priors = (_BEST_SOLO, "labeller", *BASELINES)
        if name not in priors:
            raise ValueError(unknown_name(name, priors))
        return name

    @field_validator("labeller")
    @classmethod
    def _is_a_labeller(cls, name: str) -> str:
        if name not in LABELLERS:
            raise ValueError(unknown_name(name, LABELLERS))
        return name

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if (self.weights_epsilon is None) is (self.labeller == PrivateLogistic.name):
            raise ValueError(
                f"weights_epsilon: it is for {PrivateLogistic.name}, which needs it; got "
                f"{self.weights_epsilon} for {self.labeller}"
            )
        return self

    @property
    def answers(self) -> Literal["soft", "hard"]:
        """The form of a vote: "soft" votes are shares of the classes that add up to 1 at most,
        "hard" votes name one class.
        """
        return "soft"

    @property
    def signs_votes(self) -> bool:
        return self.answers == "soft" and LABELLERS[self.labeller].signed

    @property
    def inductive(self) -> bool:
        return LABELLERS[self.labeller].inductive

    def linear_numbers(self, config: RunSettings, classes: int) -> float:
        """Return how many numbers of a vote are linear in the features.

        Labellers bend what they read, except those whose votes are a linear fit's own numbers.
        """
        return classes if self.signs_votes else 0

    def find_noise(self, config: RunSettings) -> NoiseSettings | None:
        return None if self.epsilon is None else NoiseSettings(epsilon=self.epsilon)

    def _needs_epsilon(self) -> None:
        if self.epsilon is None:
            raise ValueError(
                f"epsilon: method {self.name} protects each vote by noise; say how much a vote may "
                f"cost, as method: {{name: {self.name}, epsilon: 4}}"
            )


class VotesSettings(FormSettings, VoteSettings):
    """The settings of votes that are opened as their secure sum; see `VoteSettings`."""

    name: Literal["votes"]

    title = "votes, summed"
    opens_votes = "sum"
    takes_pairwise = True
    tasks = ("classification", "regression")

    @property
    def answers(self) -> Literal["soft", "hard"]:
        return self.form


class RandomisedVotesSettings(VoteSettings):
    """The settings of votes that every passive answers for itself, always hard; see
    `VoteSettings`.
    """

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


@dataclass(frozen=True, eq=False, kw_only=True)
class Ballot:
    """The rows that the active asks votes for.

    Attributes:
        rows: (U,), alignment positions, each once.
        labelled: (n,), places of labelled rows among them.
        labels: (n,), of those, in 0..K-1; zeros where passives see none.
        payload: the message that says so.
        size: B at most.
    """

    rows: Tensor
    labelled: Tensor
    labels: Tensor
    payload: bytes = field(repr=False)
    size: int

    @classmethod
    def from_rows(
        cls,
        rows_U: Tensor,
        labelled_n: Tensor,
        labels_n: Tensor,
        *,
        size: int,
        shows_labels: bool = True,
    ) -> "Ballot":
        """Write the message; without `shows_labels` it names the labelled rows and not their
        labels.
        """
        tensors = {"rows": rows_U, "labelled": labelled_n}
        if shows_labels:
            tensors["labels"] = labels_n
        return cls(
            rows=rows_U,
            labelled=labelled_n,
            labels=labels_n,
            payload=pack_tensors(tensors),
            size=size,
        )

    @classmethod
    def from_message(
        cls,
        envelope: Envelope,
        contract: Contract,
        *,
        aligned: int,
        classes: int,
        shows_labels: bool = True,
    ) -> "Ballot":
        """Parse a request for votes. Raises RemoteProtocolError: rows, places or labels that are
        none, repeated or out of range.
        """
        sender = envelope.sender
        vector = TensorSpec(torch.int64, (None,))
        expected = {"rows": vector, "labelled": vector} | (
            {"labels": vector} if shows_labels else {}
        )
        tensors, _ = unpack_tensors(envelope.payload, expected, sender=sender)
        rows_U = tensors["rows"]
        labelled_n = tensors["labelled"]
        check_rows(rows_U, aligned=aligned, minimum=contract.minimum_batch, sender=sender)
        if len(labelled_n):
            check_rows(labelled_n, aligned=len(rows_U), minimum=1, sender=sender)
        labels_n = tensors.get("labels", labelled_n.new_zeros(len(labelled_n)))
        inside = ((labels_n >= 0) & (labels_n < classes)).all()
        if len(labels_n) != len(labelled_n) or not len(labels_n) or not bool(inside):
            raise RemoteProtocolError(
                f"{sender} asks for votes with {len(labels_n)} labels of {len(labelled_n)} rows; "
                f"expected one of each, at least one, in 0..{classes - 1}"
            )
        return cls(
            rows=rows_U,
            labelled=labelled_n,
            labels=labels_n,
            payload=envelope.payload,
            size=contract.batch_size,
        )

    @property
    def blocks(self) -> list[slice]:
        rows = len(self.rows)
        size = self.size
        return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class VotesActive(StudentActive):
    """The active: asks for votes on the rows of its student, and teaches it what they say.
    `opening`: of the votes, and what noise on them gives; None: there is none.

    Attributes:
        ballot: what it asks; classes: K; votes: what was opened, None before.
    """

    student: Student

    def __init__(
        self, own: PartyContext, contract: Contract, rows: Tensor, opening: Opening | None
    ) -> None:
        student = Student(own, rows)
        config = own.config
        guarantee = "no guarantee: votes are opened without noise (epsilon is infinite)"
        if opening is not None:
            labeller = passive_labeller(own)
            guarantee = table_guarantee(labeller, opening, delta=config.delta).describe_guarantee()
        super().__init__(own, student, headline=config.method.name, guarantee=guarantee)
        self.contract = contract
        self.classes = student.classes
        # As the solo baselines beside the run, which are the same fits: none of them is sent.
        self._prior = prior_of(config)
        self._seed = config.seed
        self._help = VoteSettings.from_run_settings(config).help
        self.ballot = Ballot.from_rows(
            positions_in(rows, student.rows_U),
            torch.from_numpy(student.labelled),
            torch.from_numpy(student.labels),
            size=contract.batch_size,
            shows_labels=config.method.sends_labels,
        )
        self.votes: Floats | None = None

    @abstractmethod
    async def gather_votes(self, links: Links) -> Floats:
        """Ask for the votes, and open them: an estimate_UK of their sum, without bias."""

    async def teach_student(self, links: Links, steps: StepCounter) -> None:
        self.learn_from_votes(await self.gather_votes(links))
        if self.student.has_direct_fit:
            steps.count_step(0.0)

    def refit_excluding(self, rows: Tensor) -> ActiveNetworks | None:
        return self.student.refit_excluding(rows)

    def learn_from_votes(self, votes_UK: Floats) -> None:
        """Turn what was opened into labels to learn; fit a student that has a best fit.

        Where labelled rows say that votes are no help, the active's own best model stays, unless
        help is used whatever they say, or averaged.
        """
        self.votes = votes_UK
        student = self.student
        averages = self._help == "averaged" and student.can_be_averaged
        always = averages or self._help == "always"
        with cache_fits():
            weighed = weigh_votes(votes_UK, student, self._prior, seed=self._seed, always=always)
            own_baseline = weighed.belief.baseline
            judged = weighed.help
            assert judged is not None
            keeps = own_baseline is not None and student.has_classes
            if judged.is_in_use or not keeps:
                predicted_UK = student.fit_to_labels(weighed.likely)
                gain = learnt_of(predicted_UK, weighed, student.labelled) if keeps else 0.0
                judged = replace(judged, learnt=gain)
            if averages:
                judged = replace(judged, always=False, averaged=not judged.is_sure)
            self.help = judged
            if own_baseline is not None and keeps and not judged.is_in_use:
                student.use_baseline(own_baseline)
            if student.has_direct_fit:
                self._average_student()
        if not judged.is_in_use:
            warnings.warn(f"{self.name}: {judged}", NoHelpWarning, stacklevel=2)

    def finish_locally(self) -> None:
        """Average what a student that descends has learnt; any other was averaged at once."""
        if not self.student.has_direct_fit:
            self._average_student()

    def _average_student(self) -> None:
        if self.help is not None and self.help.averaged:
            self.student.average_with_local_models()

    @property
    def last_sum(self) -> Tensor | None:
        return None if self.votes is None else torch.from_numpy(self.votes)

    def tensors(self) -> dict[str, Tensor]:
        tensors = super().tensors()
        if self.votes is not None:
            tensors["votes.sum"] = torch.from_numpy(self.votes)
        if self.help is not None:
            tensors["help"] = torch.tensor(astuple(self.help), dtype=torch.float64)
        return tensors

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        super().load_tensors(tensors, next_step=next_step)
        if "help" in tensors:
            rows, *measured = tensors["help"].tolist()
            figures = measured[:_FIGURES]
            choices = map(bool, measured[_FIGURES:])
            self.help = Help(int(rows), *figures, *choices)
        if "votes.sum" in tensors:
            self.votes = tensors["votes.sum"].numpy()


class VotesPassive(HelperRole):
    """A passive: votes once a session on the rows of its own people that it is asked about.

    Attributes:
        classes: K, as agreed; labeller: with which it votes.
        held_N: which positions are of people that it knows, (N,), bool.
    """

    asks = (Kind.LABELS,)

    def __init__(self, own: PartyContext, contract: Contract, rows: Tensor) -> None:
        self.name = own.name
        self.contract = contract
        self.labeller = passive_labeller(own)
        (self.classes,) = contract.passives[own.name].representation.shape
        self.held_N = rows >= 0
        features_N = own.data.table.features[rows.clamp(min=0)]
        self._features_NF = features_N.flatten(1).double().numpy()
        self._method = VoteSettings.from_run_settings(own.config)
        self._asked = False

    def admit_ballot(self, message: Envelope) -> Ballot:
        """Parse a request for votes, once a session. Raises RemoteProtocolError: it breaks a rule
        of the contract.
        """
        ballot = Ballot.from_message(
            message,
            self.contract,
            aligned=len(self.held_N),
            classes=self.classes,
            shows_labels=self._method.sends_labels,
        )
        if self._asked:
            raise RemoteProtocolError(
                f"{message.sender} asks {self.name} for votes once more in one session; the "
                "answer to a second question could be taken apart by the first"
            )
        self._asked = True
        return ballot

    def cast_votes(self, ballot: Ballot) -> Floats:
        """Return its votes_UK; zeros for people that it does not know or cannot label. Raises
        PromiseError: the labeller breaks its word where an epsilon rests on it.
        """
        known_U = self.held_N[ballot.rows].numpy()
        known_n = known_U[ballot.labelled.numpy()]
        votes_UK = np.zeros((len(known_U), self.classes))
        if known_n.any():
            place_U = np.cumsum(known_U) - 1
            asked = (
                self.pick_features(ballot)[known_U],
                place_U[ballot.labelled.numpy()[known_n]],
                ballot.labels.numpy()[known_n],
                self.classes,
            )
            if self._method.epsilon is not None:
                check_votes(self.labeller, *asked, owner=self.name)
            votes_UK[known_U] = self.labeller.for_question(ballot.payload).label_without_own(*asked)
            if self._method.epsilon is not None:
                require_short(self.labeller, votes_UK, owner=self.name)
        return votes_UK if self._method.answers == "soft" else harden_votes(votes_UK)

    def pick_features(self, ballot: Ballot) -> Floats:
        """Return its features of the requested rows, (U, F); arbitrary ones for people it does not
        know.
        """
        features_UF: Floats = self._features_NF[ballot.rows.numpy()]
        return features_UF


class VotesMethod(Method):
    """The common part of all methods that open votes; see `Method`."""

    def offer_terms(self, own: PartyContext) -> RepresentationTerms | None:
        """Return, at the active, how many classes, or ranges of numbers, a row of votes has."""
        if own.name != own.active:
            return None
        check_passives(own.config, own.passives)
        return _row_of_votes(count_classes(own))

    def derive_terms(
        self, own: PartyContext, offers: Mapping[str, RepresentationTerms], session: str
    ) -> SessionTerms:
        offered = offers[own.active]
        require_own_terms(own.name, own.active, offered, _row_of_votes(*offered.shape[:1]))
        terms = PassiveTerms(objective=None, weight=1.0, representation=offered)
        return SessionTerms(
            passives=dict.fromkeys(own.passives, terms),
            secure_sum=self.sum_terms(own, session, *offered.shape),
        )

    def sum_terms(self, own: PartyContext, session: str, classes: int) -> Mapping[str, object]:
        """Return the public parameters of the sum of votes; empty if there is none."""
        return {}


def passive_labeller(own: PartyContext) -> Labeller:
    """Return the labeller that all passives agreed on, with this party's own key."""
    votes = VoteSettings.from_run_settings(own.config)
    noised = votes.weights_epsilon is not None
    return make_labeller(
        votes.labeller,
        epsilon=votes.weights_epsilon,
        delta=own.config.delta,
        key=derive_key(own.secrets.noise_key, b"secure-apfed labeller v1") if noised else None,
        seeded=noised and own.config.guard.noise != "secret",
    )


def prior_of(config: RunSettings) -> Prior:
    """Return the active's prior before it reads votes; it needs no noise against itself."""
    votes = VoteSettings.from_run_settings(config)
    if votes.prior == _BEST_SOLO:
        return believe_best_baseline
    if votes.prior in BASELINES:
        return make_baseline_prior(BASELINES[votes.prior])
    noised = votes.labeller == PrivateLogistic.name
    return make_labeller_prior(Logistic() if noised else make_labeller(votes.labeller))


def _row_of_votes(classes: int) -> RepresentationTerms:
    return RepresentationTerms(
        shape=(classes,), dtype="float32", minimum_norm=0.0, maximum_norm=1.0
    )


class SummedVotesActive(VotesActive):
    """An active that opens the secure sum of the votes; see `VotesActive`."""

    def __init__(
        self, own: PartyContext, contract: Contract, rows: Tensor, summed: SessionSum
    ) -> None:
        noise = summed.noise
        parts = own.config, own.passives[0], summed.shape
        super().__init__(own, contract, rows, make_sum_release(*parts, noise) if noise else None)
        self.sum = summed.make_active_end()
        self.left = self.sum.left
        self.rounding = self.sum.rounding

    @property
    def steps_without_all(self) -> int:
        return self.sum.steps_without_all

    async def set_up(self, links: Links) -> None:
        await self.sum.set_up(links)

    async def gather_votes(self, links: Links) -> Floats:
        ballot = self.ballot
        self.sum.send_request(links, Kind.LABELS, ASK, ballot.payload)
        sum_UK = np.zeros((len(ballot.rows), self.classes))
        for step, block in enumerate(ballot.blocks):
            rows_B = ballot.rows[block]
            payload = ballot.payload
            sum_UK[block] = await self.sum.receive_sum(links, step, rows_B, payload, self.classes)
        return sum_UK


class SummedVotesPassive(VotesPassive, SumHelper):
    """A passive that adds its votes to the secure sum; see `VotesPassive`."""

    def __init__(
        self, own: PartyContext, contract: Contract, rows: Tensor, summed: SessionSum
    ) -> None:
        VotesPassive.__init__(self, own, contract, rows)
        sum_end = summed.make_passive_end(people=len(rows), held_N=self.held_N, repeatable=True)
        SumHelper.__init__(self, sum_end)

    async def answer_message(self, links: Links, message: Envelope) -> None:
        ballot = self.admit_ballot(message)
        votes_UK = self.cast_votes(ballot)
        for step, block in enumerate(ballot.blocks):
            if not self.sum.takes_part(step):
                return
            admitted = self.sum.admit_request(message, ballot.rows[block], step=step)
            await self.sum.send_answer(links, admitted, votes_UK[block])

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        super().load_tensors(tensors, next_step=0)  # its steps are the blocks of a session's ballot


class SummedVotes(SumMethod, VotesMethod):
    """The method of votes that are opened as their secure sum; see `Method`."""

    settings = VotesSettings

    def sum_terms(self, own: PartyContext, session: str, classes: int) -> Mapping[str, object]:
        return describe_sum(own, session, (classes,))

    def build_active(self, own: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        return SummedVotesActive(own, contract, rows, SessionSum.from_contract(own, contract))

    def build_passive(self, own: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        return SummedVotesPassive(own, contract, rows, SessionSum.from_contract(own, contract))


class CountingPassive(VotesPassive):
    """A passive that votes into no secure sum, and so counts and charges its own answers; see
    `VotesPassive`.

    `noise`: what it adds, with its account; None: nothing.
    """

    def __init__(
        self,
        own: PartyContext,
        contract: Contract,
        rows: Tensor,
        noise: ContributionNoise | None = None,
    ) -> None:
        super().__init__(own, contract, rows)
        self._allowance = Allowance.from_contract(own, contract, aligned=len(rows))
        self.kept = {"allowance": self._allowance}
        self._noise = noise
        if noise is not None:
            self._set_ledger(noise.ledger)

    def _set_ledger(self, ledger: PrivacyLedger) -> None:
        self.contributions = ledger
        self.ledgers = {self.name: ledger}

    def count_answers(
        self, ballot: Ballot, values_U: NDArray[np.generic], *, repeatable: bool = False
    ) -> list[bytes]:
        """Count an answer for every row, in the log, before it is charged or leaves; return the
        digest of each block. `values_U`: what answers are made of, by row. `repeatable`: the same
        answer in another session counts as the same. Raises RemoteProtocolError: a row was answered
        as often as agreed.
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
        """Count the answer to a whole ballot, charge it, return its noise; None: none is agreed.

        Each session counts anew, since its request, or its noise, is another one, unless what is
        answered is `repeatable`. Raises
        RemoteProtocolError: see `count_answers`; BudgetExhaustedError: answering would exceed its
        budget; nothing may be sent.
        """
        digests = self.count_answers(ballot, values_U, repeatable=repeatable)
        digest = hashlib.sha256(b"".join(digests)).digest()
        if self._noise is None:
            return None
        known_B = ballot.rows[self.held_N[ballot.rows]]
        return self._noise.draw(shape, step=ASK, known_B=known_B, digest=digest)


class RandomisedVotesActive(VotesActive):
    """An active that reads every passive's answers, and estimates the sum of the votes; see
    `VotesActive`.
    """

    def __init__(self, own: PartyContext, contract: Contract, rows: Tensor) -> None:
        self._response = _make_response(own, contract)
        super().__init__(own, contract, rows, self._response)
        self._answers_MU: Integers | None = None

    async def gather_votes(self, links: Links) -> Floats:
        passives = tuple(self.contract.passives)
        response = self._response
        for name in passives:
            links.send(name, Kind.LABELS, ASK, self.ballot.payload)
        answers_MU = np.stack([await self._receive_answers(links, name) for name in passives])
        self._record_answers(answers_MU)
        return response.estimate_sum(answers_MU)

    async def _receive_answers(self, links: Links, name: str) -> Integers:
        expected = {"votes": TensorSpec(torch.int16, (len(self.ballot.rows),))}
        message = await links.receive(name, Kind.VOTES, step=ASK, patience=FOR_AN_ANSWER)
        tensors, _ = unpack_tensors(message.payload, expected, sender=name)
        answers_U: Integers = tensors["votes"].long().numpy()
        if not ((answers_U >= 0) & (answers_U < self.classes)).all():
            raise RemoteProtocolError(f"{name} voted for a class outside 0..{self.classes - 1}")
        return answers_U

    def _record_answers(self, answers_MU: Integers) -> None:
        """Note how far they agree, also after a resumption."""
        self._answers_MU = answers_MU
        self.agreement = estimate_agreement(
            self._response,
            answers_MU,
            names=tuple(self.contract.passives),
            labelled_n=self.ballot.labelled.numpy(),
            labels_n=self.ballot.labels.numpy(),
        )

    def tensors(self) -> dict[str, Tensor]:
        tensors = super().tensors()
        if self._answers_MU is not None:
            tensors["answers"] = torch.from_numpy(self._answers_MU)
        return tensors

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        super().load_tensors(tensors, next_step=next_step)
        if "answers" in tensors:
            self._record_answers(tensors["answers"].numpy())


class RandomisedVotesPassive(CountingPassive):
    """A passive that answers its votes by chance, for itself; see `VotesPassive`."""

    def __init__(self, own: PartyContext, contract: Contract, rows: Tensor) -> None:
        super().__init__(own, contract, rows)
        self._response = _make_response(own, contract)
        self._ledger = _vote_ledger(own, self._response, len(rows))
        self._set_ledger(self._ledger)
        self._key = derive_key(own.secrets.noise_key, b"secure-apfed votes v1")
        self._secret = own.config.guard.noise == "secret"

    async def answer_message(self, links: Links, message: Envelope) -> None:
        """Vote, and answer by chance what its key, the votes and the ballot say."""
        ballot = self.admit_ballot(message)
        # Chance is of this ballot: on others' votes, however alike, it is another one.
        asked = ballot.payload if self._secret else _SEEDED
        answers_U = self._response.randomise_votes(
            self.cast_votes(ballot), key=self._key, about=asked
        )
        # The same ballot gets the same answers from the same key, in any session.
        digests = self.count_answers(ballot, answers_U, repeatable=True)
        for step, (block, digest) in enumerate(zip(ballot.blocks, digests, strict=True)):
            rows_B = ballot.rows[block]
            self._ledger.charge(step=step, rows=rows_B[self.held_N[rows_B]], digest=digest)
        self._ledger.sync()
        payload = pack_tensors({"votes": torch.from_numpy(answers_U).short()})
        links.send(self.contract.active, Kind.VOTES, message.step, payload)


class RandomisedVotes(VotesMethod):
    """The method of votes that every passive answers for itself, under randomised response; see
    `Method`.
    """

    settings = RandomisedVotesSettings

    def build_active(self, own: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        return RandomisedVotesActive(own, contract, rows)

    def build_passive(self, own: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        return RandomisedVotesPassive(own, contract, rows)


def _make_response(own: PartyContext, contract: Contract) -> VoteResponse:
    (classes,) = contract.passives[own.passives[0]].representation.shape
    epsilon = VoteSettings.from_run_settings(own.config).epsilon
    assert epsilon is not None
    return VoteResponse(epsilon=epsilon, classes=classes)


def _vote_ledger(
    own: PartyContext, release: VoteResponse | SummedRelease, people: int
) -> PrivacyLedger:
    config = own.config
    return open_ledger(
        own,
        own.name,
        release,
        delta=config.delta,
        budget=VoteSettings.from_run_settings(config).epsilon,
        rows=people,
        figure=config.method.passives_figure,
    )


def estimate_agreement(
    response: VoteResponse,
    answers_MU: Integers,
    *,
    names: Sequence[str],
    labelled_n: Integers,
    labels_n: Integers,
) -> Mapping[str, VoteAgreement]:
    """Return by passive how far its votes agree with others' and with labels, by its answers.

    The active computes with what it has been given, so that nothing more is opened and no epsilon
    is spent. A passive that votes against what its features say agrees less than it should. So does
    one whose features say little: the figure finds votes that do not fit, and proves no ill will.
    Where votes are summed there is no such figure: an active that has the total, and the total
    without one passive, has that passive's votes; and a count that a passive reports of itself
    is not verified.

    Two answers are the same with probability s = p^2 + (K - 1) q^2 where the votes are, and with
    d = 2 p q + (K - 2) q^2 where they are not, so (share - d) / (s - d) is the share of equal votes
    without bias; s - d = (p - q)^2. With a label it is (share - q) / (p - q). Who has no vote
    counts as one that votes any class.
    """
    p = response.keep_probability
    q = response.other_probability
    classes = response.classes
    different = 2 * p * q + (classes - 2) * q**2
    passives, rows = answers_MU.shape
    agreements = {}
    for index, name in enumerate(names):
        same_shares = [
            float((answers_MU[index] == answers_MU[other]).mean())
            for other in range(passives)
            if other != index
        ]
        right = float((answers_MU[index][labelled_n] == labels_n).mean())
        agreements[name] = VoteAgreement(
            others=(float(np.mean(same_shares)) - different) / (p - q) ** 2
            if same_shares
            else None,
            labels=(right - q) / (p - q),
            # A share of rows that are answered independently has at most 1 / (2 sqrt rows).
            others_noise=0.5 / math.sqrt(rows) / (p - q) ** 2,
            labels_noise=0.5 / math.sqrt(len(labelled_n)) / (p - q),
        )
    return agreements


# Openings whose protocol is made for one ballot: it knows before it is set up how many people are
# voted on. So the active announces it to all; the announcement names the ballot by its digest,
# and with it the protocol's agreement, so that votes on other people or other labels never add up.
# All passives must vote.


@dataclass(frozen=True, kw_only=True)
class BallotSize:
    """The public size of a ballot, known to all parties before votes are cast.

    Attributes:
        people, labelled: U and n.
        ballot: SHA-256 of the message to passives, which says rows and labels.
    """

    people: int
    labelled: int
    ballot: bytes

    @classmethod
    def from_ballot(cls, ballot: Ballot) -> "BallotSize":
        digest = hashlib.sha256(ballot.payload).digest()
        return cls(people=len(ballot.rows), labelled=len(ballot.labelled), ballot=digest)

    def announce_size(self, links: Links, names: Iterable[str]) -> None:
        """Tell these parties; run by the active."""
        for name in names:
            links.send(name, Kind.BALLOT_SIZE, BEFORE_TRAINING, msgpack.packb(asdict(self)))

    @classmethod
    async def receive_size(cls, links: Links, contract: Contract, *, most: int) -> "BallotSize":
        """Receive the ballot's size from the active; run by all others.

        `most`: people whom this party knows of, or whom the settings allow. Raises
        RemoteProtocolError: no size, or one beyond what may be asked.
        """
        active = contract.active
        message = await links.receive(
            active, Kind.BALLOT_SIZE, step=BEFORE_TRAINING, patience=FOR_THE_ACTIVE
        )
        try:
            size = cls(**msgpack.unpackb(message.payload))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RemoteProtocolError(
                f"{active} sent something else than a ballot's size"
            ) from error
        if [type(value) for value in asdict(size).values()] != [int, int, bytes] or not (
            contract.minimum_batch <= size.people <= most
            and 1 <= size.labelled <= size.people
            and len(size.ballot) == _DIGEST_BYTES
        ):
            raise RemoteProtocolError(
                f"{active} asks about {size.people!r:.20} people, {size.labelled!r:.20} of them "
                f"labelled; expected {contract.minimum_batch} to {most}, and at least one label"
            )
        return size

    def require_same_ballot(self, ballot: Ballot, *, sender: str) -> None:
        """Raise RemoteProtocolError on another ballot than was announced."""
        if BallotSize.from_ballot(ballot) != self:
            raise RemoteProtocolError(
                f"{sender} asks for votes on another ballot than it told all parties of"
            )

    def hash_ballot(self, contract: Contract) -> bytes:
        """Return 32 bytes that stand for this ballot in this session, the same at all parties."""
        return hashlib.sha256(contract.digest + self.ballot).digest()


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
    def from_contract(cls, own: PartyContext, contract: Contract) -> Self:
        (classes,) = contract.passives[own.passives[0]].representation.shape
        return cls(own, tuple(contract.passives), classes)

    @property
    @abstractmethod
    def release(self) -> SummedRelease | None:
        """The guarantee of the noise of all passives; None: there is none."""

    @property
    def honest(self) -> int:
        """Passives whose noise is counted. Raises ConfigError: there is none, or a single passive's
        votes would be revealed.
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
                "secure_sum.allow_single_passive: a sum of one passive's votes hides nothing; take "
                "more passives, or say true and accept that"
            )
        return honest

    def calibrate_release(
        self, labeller: Labeller, release: Callable[[int], SummedRelease]
    ) -> SummedRelease:
        """Return the release with the least noise that keeps the settings' epsilon, for one
        vote.
        """
        config = self.own.config
        epsilon = VoteSettings.from_run_settings(config).epsilon
        assert epsilon is not None
        deviation = calibrate_votes(labeller, release, epsilon=epsilon, delta=config.delta)
        return release(deviation)

    def noise_terms(self) -> dict[str, object]:
        if self.release is None:
            return {}
        epsilon = VoteSettings.from_run_settings(self.own.config).epsilon
        release = self.release
        noise = {"epsilon": epsilon, "steps": release.deviation, "honest": release.honest}
        return {"noise": noise}

    def make_noise(self, people: int) -> ContributionNoise | None:
        """Return a passive's noise and its account; None if there is none."""
        own = self.own
        release = self.release
        if release is None:
            return None
        return ContributionNoise(
            deviation=release.deviation,
            key=derive_key(own.secrets.noise_key, b"secure-apfed vote noise v1"),
            ledger=_vote_ledger(own, release, people),
            secret=own.config.guard.noise == "secret",
        )


class BallotAggregator(Aggregator):
    """An aggregator that combines all passives' messages, block by block, and can read none; see
    `Aggregator`.

    Attributes:
        blocks: contributions that each passive sends; they are numbered from 0.
    """

    blocks: int

    def admit_step(self, message: Envelope) -> None:
        super().admit_step(message)
        if message.step >= self.blocks:
            raise RemoteProtocolError(
                f"{message.sender} sent block {message.step} of votes; this session takes "
                f"{self.blocks}"
            )
