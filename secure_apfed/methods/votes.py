"""Votes: every party labels the active's rows locally; the active learns from all votes. A vote is
one row of class scores, (K,), with L1 norm at most 1; the ballot is the active's request for votes.

One round trip before training. The active sends the rows to label, and the labels that it knows
(`secure_apfed.methods.ballots`, `VotesActive.gather_votes`). A passive labels them from its own
features, once a session, and sends its votes (`answer_message`) in the form that the active may
decode: here through a secure sum (`votes`). Other openings are files of their own:
`votes_randomised`, `votes_encrypted`, `votes_rehearsal`. The active's student then learns alone;
the prior is the active's own prediction without votes (`prior`: by default the local model with
the best held-out score). Help is worth most where few rows have a label and many more are aligned.
For what a vote reveals of a passive's features, and the privacy cost under noise, see
`secure_apfed.labellers.guarantee`.

Letters: N positions of the alignment, U rows to vote on, n of them labelled, B rows at once, M
passives, K classes.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from secure_apfed.contract import Contract, RepresentationBounds
from secure_apfed.exchange import Envelope, Kind, Links
from secure_apfed.labellers import (
    LABELLERS,
    LabellerName,
    VoteMechanism,
    Voter,
    require_weights_epsilon,
)
from secure_apfed.methods.ballots import Ballot, BallotGate
from secure_apfed.methods.method import ActiveRole, HelperRole, Method, SessionTerms, StepCounter
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.session_sum import SessionSum, SumHelper, SumLearner, SumMethod
from secure_apfed.methods.student import PriorName, Student, StudentActive, find_prior
from secure_apfed.settings import THE_ACTIVE, FormSettings, MethodSettings, protects

Floats = NDArray[np.float64]


class VoteSettings(MethodSettings):
    """The settings of votes: how passives vote on labels, and how the active reads the votes.

    Attributes:
        labeller: a key of `LABELLERS`: how every passive predicts labels from its own features.
        prior: the active's own prediction before it reads votes: "best_solo", the baseline with the
            best held-out score; a key of `BASELINES`; or "labeller", its own labeller of the
            passives' kind.
        help: when votes are used: "averaged" always does, "judged" only if labelled rows show that
            they help, "always" without this test. Under "averaged" the student is averaged with the
            best three local models, unless labelled rows show that votes help. Under "judged" the
            best local model is the result otherwise.
        epsilon: the privacy cost of the vote on one person for one passive, labeller held fixed;
            null: votes without noise.
        weights_epsilon: privacy cost for a labelled person of the weights of `private_logistic`, or
            of any other labeller that adds noise to its weights.
    """

    labeller: LabellerName = "spreading"
    prior: PriorName = "best_solo"
    help: Annotated[Literal["averaged", "judged", "always"], THE_ACTIVE, protects("nobody")] = (
        "averaged"
    )
    epsilon: Annotated[float | None, protects("the passives", higher="less noise is in a vote")] = (
        Field(None, gt=0)
    )
    weights_epsilon: Annotated[
        float | None, protects("the active", higher="less noise is in the weights that labels move")
    ] = Field(None, gt=0)

    can_predict_locally = True

    def for_rehearsal(self, steps: int, epochs: int) -> Self:
        """Return the settings for a rehearsal (a short run on random numbers, for planning).

        There no baseline is fitted as prior. `steps`, `epochs`: not used.
        """
        return self.model_copy(update={"prior": "labeller", "help": "judged"})

    @model_validator(mode="after")
    def _check_weights_epsilon(self) -> Self:
        """Refuse `weights_epsilon` without the labeller that uses it, and the reverse."""
        require_weights_epsilon(self.labeller, self.weights_epsilon)
        return self

    @property
    def vote_form(self) -> Literal["soft", "hard"]:
        """The form of a vote: "soft" votes are shares of the classes that add up to 1 at most,
        "hard" votes name one class.
        """
        return "soft"

    @property
    def has_signed_votes(self) -> bool:
        """True if numbers of a vote may be negative."""
        return self.vote_form == "soft" and LABELLERS[self.labeller].signed

    @property
    def has_inductive_votes(self) -> bool:
        """True if the features of a person without a label change no other person's vote."""
        return LABELLERS[self.labeller].inductive

    @property
    def labeller_names(self) -> tuple[str, ...]:
        """The labellers that the method uses, as keys of `LABELLERS`."""
        return (self.labeller,)

    @property
    def vote_epsilon(self) -> float | None:
        """The privacy cost of the vote on one person for one passive; None: no noise."""
        return self.epsilon

    def bound_linear_combinations(self, config: object, classes: int) -> float:
        """Return how many numbers of a vote are linear in the features: all K of the classes, or 0.

        Only a labeller whose vote is the output of a linear model has any. `config`: not used.
        `classes`: K.
        """
        return classes if self.has_signed_votes else 0

    def make_voter(self, party: PartyContext) -> Voter:
        """Return the labeller of this party, with the tests of what an epsilon relies on."""
        return Voter(
            party.make_labeller(self.labeller, self.weights_epsilon),
            owner=party.name,
            is_tested=self.epsilon is not None,
            has_hard_votes=self.vote_form == "hard",
        )


class NoisedVoteSettings(VoteSettings):
    """The settings of votes that each name one class, where noise protects every single vote.

    See `VoteSettings`.
    """

    can_align_pairwise = True

    @model_validator(mode="after")
    def _is_noised(self) -> Self:
        """Refuse settings without an epsilon, since every vote must have noise."""
        if self.epsilon is None:
            raise ValueError(
                f"epsilon: method {self.name} protects each vote by noise; say how much a vote may "
                f"cost, as method: {{name: {self.name}, epsilon: 4}}"
            )
        return self

    @property
    def vote_form(self) -> Literal["soft", "hard"]:
        """The form of a vote: it names one class."""
        return "hard"


class VotesSettings(FormSettings, VoteSettings):
    """The settings of votes of which the active decodes only the secure sum; see `VoteSettings`."""

    name: Literal["votes"]

    title = "votes, summed"
    vote_protocol = "sum"
    can_align_pairwise = True
    tasks = ("classification", "regression")

    @property
    def vote_form(self) -> Literal["soft", "hard"]:
        """The form of a vote, as configured: shares of the classes, or one class."""
        return self.form


class VotesActive(StudentActive):
    """The active of voting methods: it requests votes on rows of its table, and trains its final
    model (the student) on the labels that the votes imply.

    Attributes:
        ballot: the active's request for votes.
        classes: K, the number of classes.
        votes: the estimated sum of the passives' votes: K numbers for each of the U rows; None
            before they are received.
    """

    student: Student

    def __init__(
        self,
        party: PartyContext,
        contract: Contract,
        rows: Tensor,
        vote_mechanism: VoteMechanism | None,
    ) -> None:
        """Build the student and the request for votes; state the guarantee of the votes' noise.

        `rows`: the row of its table at each of the N alignment positions. `vote_mechanism`: the
        privacy mechanism by which votes are revealed to the active; None: they have no noise.
        """
        student = Student(party, rows)
        config = party.config
        votes = VoteSettings.from_run_settings(config)
        guarantee = votes.make_voter(party).describe_guarantee(vote_mechanism, delta=config.delta)
        super().__init__(party, student, headline_variant=config.method.name, guarantee=guarantee)
        self.contract = contract
        self.classes = student.classes
        # With the run's seed the prior's baselines are those that the run fits anyway.
        self._prior = find_prior(votes.prior, votes.labeller)
        self._seed = config.seed
        self._help_setting = votes.help
        self.ballot = Ballot.from_rows(
            student.positions_U,
            torch.from_numpy(student.labelled_n),
            torch.from_numpy(student.labels_n),
            block_rows=contract.batch_size,
            shows_labels=config.method.has_revealed_labels,
        )
        self.votes: Floats | None = None

    @abstractmethod
    async def gather_votes(self, links: Links) -> Floats:
        """Request the votes; return an unbiased estimate of their sum.

        It has K numbers, one a class, for each of the U rows to vote on.
        """

    async def teach_student(self, links: Links, steps: StepCounter) -> None:
        """Gather the votes and train the student on them.

        A student that is fitted in closed form counts as one finished step.
        """
        self.learn_from_votes(await self.gather_votes(links))
        if self.student.has_direct_fit:
            steps.count_step(0.0)

    def learn_from_votes(self, votes_UK: Floats) -> None:
        """Train the student on the sum of votes, if labelled rows show that they help.

        `votes_UK`: K numbers for each of the U rows. See `Student.learn_from_votes`. Warns
        NoHelpWarning: labelled rows do not show it.
        """
        self.votes = votes_UK
        self.help = self.student.learn_from_votes(
            votes_UK, self._prior, seed=self._seed, usage=self._help_setting
        )

    def finish_locally(self) -> None:
        """Average the student with local models, if validation says so.

        Only a student that is trained by gradient descent is averaged here; one that is fitted in
        closed form was averaged when it was fitted.
        """
        is_averaged = self.help is not None and self.help.is_averaged
        if is_averaged and not self.student.has_direct_fit:
            self.student.average_with_local_models()

    @property
    def last_sum(self) -> Tensor | None:
        """The estimated sum of the votes: K numbers for each of U rows; None before."""
        return None if self.votes is None else torch.from_numpy(self.votes)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint, with the sum of the votes as "votes.sum"."""
        tensors = super().tensors()
        if self.votes is not None:
            tensors["votes.sum"] = torch.from_numpy(self.votes)
        return tensors

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        """Restore the state that `tensors` returned.

        `next_step`: the first step after the checkpoint.
        """
        super().load_tensors(tensors, next_step=next_step)
        if "votes.sum" in tensors:
            self.votes = tensors["votes.sum"].numpy()


class VotesPassive(HelperRole):
    """A passive of voting methods: it votes once a session, on the requested rows that it knows.

    Attributes:
        classes: K, the number of classes, as agreed.
        voter: its labeller (the rule by which it votes), with the tests that an epsilon requires.
        is_known_N: whether it knows the person at each of the N alignment positions, bool.
    """

    request_kinds = (Kind.LABELS,)

    def __init__(self, party: PartyContext, contract: Contract, rows: Tensor) -> None:
        """Make the labeller, and put the features in alignment order.

        `rows`: the row of its table at each of the N alignment positions; -1: it does not know the
        person there.
        """
        self.name = party.name
        self.contract = contract
        votes = VoteSettings.from_run_settings(party.config)
        self.voter = votes.make_voter(party)
        (self.classes,) = contract.passives[party.name].representation.shape
        self.is_known_N = rows >= 0
        features_N = party.data.table.features[rows.clamp(min=0)]
        self._features_NF = features_N.flatten(1).double().numpy()
        self._gate = BallotGate(
            party.name,
            contract,
            position_count=len(rows),
            class_count=self.classes,
            shows_labels=votes.has_revealed_labels,
        )

    def admit_ballot(self, message: Envelope) -> Ballot:
        """Parse a request for votes.

        Raises RemoteProtocolError: the request breaks a rule of the contract, or is the second one
        of this session.
        """
        return self._gate.admit_ballot(message)

    def cast_votes(self, ballot: Ballot) -> Floats:
        """Return the votes on the ballot's U rows: K class scores for each.

        A vote is zero for people whom the passive does not know or cannot label. `ballot`: the
        active's request: the rows, and the labels of n of them. Raises PromiseError: the labeller
        lacks a property that its class declares, and an epsilon relies on that property.
        """
        is_known_U = self.is_known_N[ballot.rows].numpy()
        labelled_n = ballot.labelled.numpy()
        is_known_n = is_known_U[labelled_n]
        votes_UK = np.zeros((len(is_known_U), self.classes))
        # Without a labelled person that it knows, it cannot label anybody.
        if is_known_n.any():
            # The labeller sees the known rows only, so the labelled rows get new indices.
            index_among_known_U = np.cumsum(is_known_U) - 1
            votes_UK[is_known_U] = self.voter.cast_votes(
                self.pick_features(ballot)[is_known_U],
                index_among_known_U[labelled_n[is_known_n]],
                ballot.labels.numpy()[is_known_n],
                self.classes,
                request=ballot.payload,
            )
        return votes_UK

    def pick_features(self, ballot: Ballot) -> Floats:
        """Return F features for each of the U requested rows, float64.

        Rows of people whom the passive does not know have arbitrary values.
        """
        features_UF: Floats = self._features_NF[ballot.rows.numpy()]
        return features_UF


class VotesMethod(Method):
    """The common part of all methods in which passives vote; see `Method`."""

    def offer_terms(self, party: PartyContext) -> RepresentationBounds | None:
        """Return the bounds on a row of votes; None at a passive.

        They state the number of classes; where the label is a number, its ranges are the classes.
        """
        if party.name != party.active:
            return None
        party.require_passives()
        return _bound_vote_rows(Student.count_classes(party))

    def derive_terms(
        self, party: PartyContext, proposed_terms: Mapping[str, RepresentationBounds], session: str
    ) -> SessionTerms:
        """Return the terms: the bounds on a row of votes for all passives, and the parameters of
        their sum.

        `proposed_terms`: mapping from party name to the bounds that its `offer_terms` returned;
        only the active offers any. `session`: name of this session, the same at all parties.
        """
        bounds = proposed_terms[party.active]
        party.require_terms(party.active, bounds, _bound_vote_rows(*bounds.shape[:1]))
        return SessionTerms.from_bounds(
            dict.fromkeys(party.passives, bounds),
            secure_sum=self.describe_vote_sum(party, session, *bounds.shape),
        )

    def describe_vote_sum(
        self, party: PartyContext, session: str, classes: int
    ) -> Mapping[str, object]:
        """Return the public parameters of the secure sum of votes; by default there is no sum.

        `session`: name of this session, the same at all parties. `classes`: K.
        """
        return {}


def _bound_vote_rows(classes: int) -> RepresentationBounds:
    """Return the bounds on one row of votes: a score for each class, norm at most 1."""
    return RepresentationBounds(
        shape=(classes,), dtype="float32", minimum_norm=0.0, maximum_norm=1.0
    )


class SummedVotesActive(VotesActive, SumLearner):
    """An active that decodes the secure sum of the votes; see `VotesActive`."""

    def __init__(
        self, party: PartyContext, contract: Contract, rows: Tensor, session_sum: SessionSum
    ) -> None:
        """Make the active's role.

        `rows`: the row of its table at each of the N alignment positions. `session_sum`: the secure
        sum of the votes.
        """
        super().__init__(party, contract, rows, session_sum.release)
        self.use_active_sum(session_sum.make_active_sum())

    async def gather_votes(self, links: Links) -> Floats:
        """Request votes; return their sum, received and decoded block by block.

        It has K numbers, one a class, for each of the ballot's U rows.
        """
        ballot = self.ballot
        self.active_sum.send_request(links, Kind.LABELS, ballot.step, ballot.payload)
        sum_UK = np.zeros((len(ballot.rows), self.classes))
        for step, block in enumerate(ballot.blocks):
            rows_B = ballot.rows[block]
            payload = ballot.payload
            sum_UK[block] = await self.active_sum.receive_sum(
                links, step, rows_B, payload, self.classes
            )
        return sum_UK


class SummedVotesPassive(VotesPassive, SumHelper):
    """A passive that adds its votes to the secure sum; see `VotesPassive`."""

    def __init__(
        self, party: PartyContext, contract: Contract, rows: Tensor, session_sum: SessionSum
    ) -> None:
        """Make the passive's role.

        `rows`: the row of its table at each of the N alignment positions; -1: it does not know the
        person there. `session_sum`: the secure sum of the votes.
        """
        VotesPassive.__init__(self, party, contract, rows)
        passive_sum = session_sum.make_passive_sum(
            person_count=len(rows), is_known_N=self.is_known_N, counts_repeats_once=True
        )
        SumHelper.__init__(self, passive_sum)

    async def answer_message(self, links: Links, message: Envelope) -> None:
        """Vote on the requested rows, and add the votes to the secure sum block by block.

        It stops at a block that others answered in an earlier session without it: the difference of
        the two sums would be its votes. Raises RemoteProtocolError: the request breaks a rule.
        """
        ballot = self.admit_ballot(message)
        votes_UK = self.cast_votes(ballot)
        for step, block in enumerate(ballot.blocks):
            if not self.passive_sum.takes_part(step):
                return
            admitted_request = self.passive_sum.admit_request(
                message, ballot.rows[block], step=step
            )
            await self.passive_sum.send_answer(links, admitted_request, votes_UK[block])

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        """Restore the state; `next_step`, which counts the run's steps, is not used."""
        # Here a step is a block of the session's request, so every session begins at 0.
        super().load_tensors(tensors, next_step=0)


class SummedVotes(SumMethod, VotesMethod):
    """The method of votes of which the active decodes only the secure sum; see `Method`."""

    settings = VotesSettings

    def describe_vote_sum(
        self, party: PartyContext, session: str, classes: int
    ) -> Mapping[str, object]:
        """Return the public parameters of the secure sum of votes.

        `session`: name of this session, the same at all parties. `classes`: K.
        """
        return party.describe_sum(session, (classes,))

    def build_active(self, party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        """Return the active's role, which decodes the secure sum of the votes.

        `rows`: the row of its table at each of the N alignment positions.
        """
        return SummedVotesActive(party, contract, rows, SessionSum.from_contract(party, contract))

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        """Return a passive's role, which adds its votes to the secure sum.

        `rows`: the row of its table at each of the N alignment positions; -1: it does not know the
        person there.
        """
        return SummedVotesPassive(party, contract, rows, SessionSum.from_contract(party, contract))
