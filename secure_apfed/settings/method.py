"""The base of methods' settings, with the facts that every method declares about itself.

A run names one as `method: votes`, or with its settings as `method: {name: votes, epsilon: 8}`; the
resulting object, `config.method`, has the facts of the method. Its class is defined in the file of
the method; code outside of `secure_apfed.methods` does not branch on the name of a method. The
facts are public: every party agrees to them with the contract.
"""

import math
from abc import ABC
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeAlias

from secure_apfed.base.names import ReleaseEpsilonName
from secure_apfed.settings import Settings, protects
from secure_apfed.settings.training import NoiseSettings, ObjectiveSettings

if TYPE_CHECKING:
    from secure_apfed.settings.run import RunSettings

Side: TypeAlias = Literal["active", "passives"]
VoteProtocol: TypeAlias = Literal["sum", "randomised", "encrypted", "count"]
"""Form in which the active reads the passives' votes on rows: their secure sum; each passive's
votes under randomised response; the sum, for labels that no passive sees; or, without the votes,
the number of labelled rows on which each passive is right."""

Teacher: TypeAlias = Literal["joint model", "joint representations", "shared singular vectors"]
"""Targets of the active's student: labels predicted by a model on all parties' representations; a
code of all parties' representations, which its own is to resemble; or the left singular vectors of
all parties' tables, which a server decomposes under masks."""

AveragedQuantity: TypeAlias = Literal["pseudo-labels", "weights"]
"""Quantity that parties average in rounds: the active sends it, every party makes its own from its
data, and the active reads the secure weighted sum of what passives made. Pseudo-labels are of the
aligned rows, weights of a model that all parties have, each trained on people and labels of its
own."""

GradientKind: TypeAlias = Literal["contributions", "returned gradients"]
"""Gradients that training lets out of a party, or what passives sum in their place."""


class MethodSettings(Settings, ABC):
    """The settings of a method, with the facts that describe how it works and what it reveals.

    Attributes:
        name: the method's key in `secure_apfed.methods.METHODS`; a class outside of this package
            leaves it out, and is called as it is named.
        import_path: package.module:Name of a class outside of this package; ours: none.
        title: the method's title for people.
        can_predict_locally: whether the active predicts with no other party present. A method
            without that needs all parties for every row, in training as well.
        has_passives: False where the active trains alone, and nothing is aligned or sent.
        representation_sender: the role that sends representations of its features; None: no party
            does. The active sends the same to every passive.
        has_gradient_sum: passives contribute gradients of objectives of their own to a secure sum,
            which the active reads.
        has_representation_sum: passives contribute their representations to a secure sum, of which
            the active reads the sum alone; `representation_sender` is None then.
        averaged_quantity: the quantity that parties average in rounds; None: there is none.
        has_sequence_views: views are sequences, which GRUs read (`model.network: gru`).
        vote_protocol: how the active reads the passives' votes: labels that every passive assigns
            once to the active's rows from its own features; None: there are no votes.
        teacher: the source of the student's labels, other than votes; None: there is no student,
            and the active learns its own labels only.
        has_returned_gradients: the active returns to each passive the gradient of the task loss on
            what that passive sent.
        can_use_dp_sgd: accepts `dp_sgd`: besides its guarded representations the active sends the
            passives nothing that private updates would not protect.
        can_use_passive_labels: accepts `data.labels_at`: passives may have labels, too.
        can_align_pairwise: accepts `alignment.mode: pairwise`, where passives lack some of the
            active's people.
        can_stop_early: accepts `train.patience`: the active can compute the loss of held-out rows.
        can_use_unaligned_rows: accepts `train.use_unaligned`: the active also learns the labels of
            people whom no passive knows.
        can_weight_classes: accepts `train.class_weights`: the active descends on its own labels.
        tasks: tasks that the active's model may learn, keys of `secure_apfed.measures.tasks.TASKS`.
        fixed_objective: the objective of every contributing passive; None: each names its own.
    """

    name: Annotated[str, protects("nobody")]

    import_path: ClassVar[str] = ""
    title: ClassVar[str]
    can_predict_locally: ClassVar[bool] = False
    has_passives: ClassVar[bool] = True
    representation_sender: ClassVar[Side | None] = None
    has_gradient_sum: ClassVar[bool] = False
    has_representation_sum: ClassVar[bool] = False
    averaged_quantity: ClassVar[AveragedQuantity | None] = None
    has_sequence_views: ClassVar[bool] = False
    vote_protocol: ClassVar[VoteProtocol | None] = None
    teacher: ClassVar[Teacher | None] = None
    has_returned_gradients: ClassVar[bool] = False
    can_use_dp_sgd: ClassVar[bool] = False
    can_use_passive_labels: ClassVar[bool] = False
    can_align_pairwise: ClassVar[bool] = False
    can_stop_early: ClassVar[bool] = False
    can_use_unaligned_rows: ClassVar[bool] = False
    can_weight_classes: ClassVar[bool] = False
    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    fixed_objective: ClassVar[ObjectiveSettings | None] = None

    @classmethod
    def from_run_settings(cls, config: "RunSettings") -> Self:
        """Return this method's settings from those of a run that uses it, for a type checker with
        this class as their type.
        """
        assert isinstance(config.method, cls)
        return config.method

    def check_run(self, config: "RunSettings") -> None:
        """Refuse settings of the run that this method cannot use.

        Raises ValueError: names the key, and what to write instead.
        """

    def count_further_parameters(self, passives: int) -> int:
        """Return a lower bound on the number of parameters of the method's networks that no `model`
        setting describes.

        `passives`: number of passives.
        """
        return 0

    def count_label_bytes(
        self, config: "RunSettings", *, labelled: int, classes: int, passives: int
    ) -> int:
        """Return the bytes of memory that one labelled row needs at all passives together, besides
        its features; 0: no more than a row without a label.

        `labelled`, `classes`, `passives`: numbers of labelled rows, classes and passives.
        """
        del config, labelled, classes, passives  # for methods that override this
        return 0

    @property
    def vote_epsilon(self) -> float | None:
        """The epsilon of the noise on one vote; None: votes have no noise, or there are none."""
        return None

    def find_noise(self, config: "RunSettings") -> NoiseSettings | None:
        """Return the noise that passives add to the votes or contributions that they send; None:
        they add none.
        """
        if self.vote_protocol is None:
            return config.secure_sum.noise
        return None if self.vote_epsilon is None else NoiseSettings(epsilon=self.vote_epsilon)

    def bound_linear_combinations(self, config: "RunSettings", classes: int) -> float:
        """Return an upper bound on how many (nearly) linear combinations of the passives' columns
        the active decrypts of each person, over the whole run.

        If they reach the rank of these columns, anybody who knows a few people can reconstruct
        everybody's columns (`secure_apfed.networks.rank`). 0: none, which
        tests/secure_apfed/test_rank.py measures. Infinite by default: the worst case, for a method
        that does not count them. `classes`: K, the number of classes.
        """
        return math.inf

    def for_rehearsal(self, steps: int, epochs: int) -> Self:
        """Return the settings for a rehearsal (a short run on random data, which forecasts time and
        traffic) with `steps` steps, in place of a run with `epochs` epochs.
        """
        return self

    @property
    def has_inductive_votes(self) -> bool:
        """True if the row of a person without a label changes no other person's vote."""
        return False

    @property
    def has_signed_votes(self) -> bool:
        """True if a class score of a vote may be negative, the default assumption."""
        return True

    @property
    def labeller_names(self) -> tuple[str, ...]:
        """The labellers (rules by which passives vote) of these settings, keys of `LABELLERS`."""
        return ()

    @property
    def needs_sums_after_training(self) -> bool:
        """True if the active reads labelled rows' sums once more, after training."""
        return False

    @property
    def has_secure_sum(self) -> bool:
        """True if passives contribute to a secure sum."""
        is_summed_in_steps = self.has_gradient_sum or self.has_representation_sum
        return (
            is_summed_in_steps or self.averaged_quantity is not None or self.vote_protocol == "sum"
        )

    @property
    def can_continue_without_passive(self) -> bool:
        """Whether a step is possible without some passive that does not reply.

        The active then predicts locally; of pseudo-labels the other passives' average is used, if
        the settings ask for it.
        """
        is_summed = self.has_gradient_sum or self.vote_protocol == "sum"
        return is_summed or self.averaged_quantity == "pseudo-labels"

    @property
    def can_simulate_steps(self) -> bool:
        """True if the active can run any single step without a message."""
        return self.has_gradient_sum

    @property
    def passives_epsilon_name(self) -> ReleaseEpsilonName:
        """The name of the epsilon of noise that passives add to votes or contributions."""
        return "epsilon_v" if self.vote_protocol else "epsilon_c"

    @property
    def epsilon_name(self) -> ReleaseEpsilonName:
        """The name of the epsilon that covers a party's messages, as in `MEANING_BY_EPSILON`."""
        sends_representations = self.representation_sender is not None or not self.has_passives
        return "epsilon_x" if sends_representations else self.passives_epsilon_name

    @property
    def exchange_facts(self) -> frozenset[str]:
        """The facts that hold of what the parties exchange, as sentences; keys of the report's
        tables (`who_learns.md`).
        """
        votes = self.vote_protocol
        averages = self.averaged_quantity
        facts = {
            "passives take part": self.has_passives,
            "people are aligned": self.needs_alignment,
            "the active sends representations": self.representation_sender == "active",
            "passives send representations": self.representation_sender == "passives",
            "representations are sent": self.representation_sender is not None,
            "gradients are summed": self.has_gradient_sum,
            "representations are summed": self.has_representation_sum,
            "pseudo-labels are averaged": averages == "pseudo-labels",
            "weights are averaged": averages == "weights",
            "contributions are summed": self.has_secure_sum,
            "passives vote": votes is not None,
            "votes are answered singly": votes == "randomised",
            "right votes are counted": votes == "count",
            "the sum of votes is revealed": votes == "sum",
            "votes of encrypted labels are summed": votes == "encrypted",
            "labels are shown": self.has_revealed_labels,
            "a teacher labels rows": self.teacher is not None and not self.has_joint_svd,
            "tables are decomposed": self.has_joint_svd,
            "gradients are returned": self.has_returned_gradients,
            "the active predicts alone": self.can_predict_locally,
        }
        return frozenset(fact for fact, holds in facts.items() if holds)

    @property
    def needs_alignment(self) -> bool:
        """True if parties find their common people first; False if each has people of its own."""
        return self.has_passives and self.averaged_quantity != "weights"

    @property
    def proposing_roles(self) -> tuple[Side, ...]:
        """The roles that tell the others, before the contract, the shape and bounds of the messages
        that they will send.
        """
        if self.averaged_quantity == "weights" or self.has_joint_svd:
            return ("active", "passives")
        if self.vote_protocol or self.averaged_quantity:
            return ("active",)
        side = "passives" if self.has_representation_sum else self.representation_sender
        return () if side is None else (side,)

    @property
    def has_joint_svd(self) -> bool:
        """True if the active reads singular vectors of all parties' tables, without noise."""
        return self.teacher == "shared singular vectors"

    @property
    def needs_aggregator(self) -> bool:
        """True if there is an aggregator."""
        return self.has_secure_sum or self.has_joint_svd or self.vote_protocol == "encrypted"

    @property
    def needs_randomness_dealer(self) -> bool:
        """True if a party without data sends the others randomness before the first step."""
        return self.has_joint_svd

    @property
    def has_revealed_labels(self) -> bool:
        """True if passives read the labels that the active trains on."""
        return self.vote_protocol in ("sum", "randomised", "count")

    @property
    def has_single_exchange(self) -> bool:
        """True if passives send their data of each row once, not in every epoch."""
        # Encoders that get no gradients back never change, so that one pass is enough.
        sends_fixed_codes = (
            self.representation_sender == "passives" and not self.has_returned_gradients
        )
        return self.vote_protocol is not None or sends_fixed_codes or self.has_joint_svd

    @property
    def has_local_model_from_start(self) -> bool:
        """True if the model that predicts locally exists from the first epoch on."""
        is_taught = self.vote_protocol is not None or self.teacher is not None
        return self.can_predict_locally and not is_taught and self.averaged_quantity is None

    def find_gradient_sender(self, gradient_kind: GradientKind) -> Side | None:
        """Return which side sends this kind of value in training; None: neither does.

        `gradient_kind`: "contributions" are what passives add to a secure sum.
        """
        if gradient_kind == "contributions":
            return "passives" if self.has_gradient_sum or self.has_representation_sum else None
        return "active" if self.has_returned_gradients else None


class FormSettings(MethodSettings):
    """The settings of a method in which others label rows for the active.

    Attributes:
        form: the form of a vote: "soft" gives each class a share, at most 1 in total; "hard" names
            one class.
    """

    form: Annotated[
        Literal["soft", "hard"],
        protects(
            "the passives", other="a vote reveals a share for every class", order=("hard", "soft")
        ),
    ] = "soft"
