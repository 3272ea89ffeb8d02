"""One run, described completely: one YAML file, one frozen object whose settings fit together.

The settings are declared in `secure_apfed.settings.run`. Here they meet the facts of the method
that is to train (`secure_apfed.methods.METHODS`): what it does not take is refused, with what
does. Reading YAML, with errors that name the line, is `secure_apfed.config.file`.
"""

from collections.abc import Callable

from pydantic import field_validator, model_validator

from secure_apfed.config.tasks import check_task
from secure_apfed.data.catalogue import TABLES
from secure_apfed.defences import DEFENCES, check_defences
from secure_apfed.facts import MethodFacts, Teacher
from secure_apfed.labellers import LABELLERS
from secure_apfed.measures import THRESHOLDS, find_measure
from secure_apfed.methods import METHODS
from secure_apfed.names import check_parties
from secure_apfed.privacy import MultiStageResponse
from secure_apfed.settings import unknown_name
from secure_apfed.settings.alignment import AlignmentSettings
from secure_apfed.settings.multiview import MultiviewSettings
from secure_apfed.settings.run import AttackChoice, RunSettings
from secure_apfed.settings.teaching import (
    DecompositionSettings,
    DistillationSettings,
    ImputationSettings,
    TeacherSettings,
)
from secure_apfed.settings.training import PassiveSettings
from secure_apfed.settings.votes import VotesSettings
from secure_apfed.tasks import TASKS

__all__ = ["AttackChoice", "Config"]


class Config(RunSettings):
    """The settings of a run, which fit its method and each other."""

    @property
    def facts(self) -> MethodFacts:
        """What the method is; ask for these, never for its name."""
        return METHODS[self.method].facts

    @field_validator("method")
    @classmethod
    def _is_a_method(cls, method: str) -> str:
        if method not in METHODS:
            raise ValueError(unknown_name(method, METHODS))
        return method

    @field_validator("passives")
    @classmethod
    def _are_names(cls, passives: dict[str, PassiveSettings]) -> dict[str, PassiveSettings]:
        check_parties(name for name in passives if name != "default")
        return passives

    @model_validator(mode="after")
    def _task_fits(self) -> "Config":
        if "measure" not in self.model_fields_set:
            # Nothing else sets a field of frozen settings: a default that depends on another.
            object.__setattr__(self, "measure", TASKS[self.task].headline)
        check_task(self)
        return self

    @model_validator(mode="after")
    def _defences_apply(self) -> "Config":
        check_defences(self.defences, self.method, self.facts)
        if self.secure_sum.noise is not None and self.facts.sender_of("contributions") is None:
            votes = "; noise on votes is votes.epsilon" if self.facts.opens_votes else ""
            adding = _methods(lambda facts: facts.sender_of("contributions") is not None)
            raise ValueError(
                f"secure_sum.noise: method {self.method} adds no gradients or representations of "
                f"passives; leave it out, or use {adding}{votes}"
            )
        if self.facts.sums_representations and self.guard.mechanism != "none":
            raise ValueError(
                f"guard.mechanism: in method {self.method} nobody reads a representation; say none "
                "and add noise under their sum, as secure_sum: {noise: {epsilon: 8}}"
            )
        if self.facts.averages and self.guard.mechanism != "none":
            raise ValueError(
                f"guard.mechanism: method {self.method} sends no representation, and one person "
                f"moves all {self.facts.averages} of a party, so that no noise of a guard covers "
                "it; say none"
            )
        if self.facts.decomposes and self.guard.mechanism != "none":
            guarded = _methods(
                lambda facts: facts.predicts_alone and facts.representations_from is not None
            )
            raise ValueError(
                f"guard.mechanism: method {self.method} adds no noise to what it decomposes; say "
                f"none and accept that, or use {guarded}"
            )
        return self

    @model_validator(mode="after")
    def _votes_fit(self) -> "Config":
        opening, votes = self.facts.opens_votes, self.votes
        if opening is None:
            if votes != VotesSettings():
                raise ValueError(
                    f"votes: in method {self.method} nobody votes; leave it out, or use "
                    f"{_methods(lambda facts: facts.opens_votes is not None)}"
                )
            return self
        if opening in ("randomised", "moment") and votes.epsilon is None:
            raise ValueError(
                f"votes.epsilon: method {self.method} protects each vote by noise; say how much a "
                "vote may cost, as votes: {epsilon: 4}"
            )
        if opening != "encrypted" and votes.candidates is not None:
            raise ValueError(
                f"votes.candidates: in method {self.method} no labels are encrypted; leave it out"
            )
        if opening == "encrypted" and votes.epsilon is not None and votes.candidates is None:
            raise ValueError(
                f"votes.candidates: method {self.method} counts an epsilon for labels of one class "
                "each, and an active that encrypts others reads below the noise; let the passives "
                "look, as votes: {candidates: 20}"
            )
        linear = LABELLERS[votes.labeller].linear
        if opening == "encrypted" and not (linear and votes.form == "soft"):
            raise ValueError(
                f"votes.labeller: {votes.labeller} ({votes.form}) is not linear in the labels, and "
                "encrypted labels are only ever multiplied and added; use soft votes of "
                f"{', '.join(name for name, one in LABELLERS.items() if one.linear)}"
            )
        return self

    @model_validator(mode="after")
    def _teaching_fits(self) -> "Config":
        vectors: Teacher = "shared singular vectors"
        said: dict[str, tuple[tuple[Teacher, ...], bool]] = {
            "teacher": (("joint model",), self.teacher != TeacherSettings()),
            "imputed": (("imputed representations",), self.imputed != ImputationSettings()),
            "distilled": (
                ("joint representations", vectors), self.distilled != DistillationSettings(),
            ),
            "decomposed": ((vectors,), self.decomposed != DecompositionSettings()),
        }  # fmt: skip
        for key, (teachers, given) in said.items():
            if given and self.facts.teacher not in teachers:
                having = [name for name, one in METHODS.items() if one.facts.teacher in teachers]
                raise ValueError(
                    f"{key}: method {self.method} takes no {' or '.join(teachers)}; leave it out, "
                    f"or use {' or '.join(having)}"
                )
        return self

    @model_validator(mode="after")
    def _distillation_fits(self) -> "Config":
        linear = ("selu", "linear")
        if self.facts.teacher == "joint representations" and self.model.network not in linear:
            raise ValueError(
                f"model.network: method {self.method} classifies the student's code by logistic "
                f"regression, and {self.model.network} has another head; use {' or '.join(linear)}"
            )
        return self

    @model_validator(mode="after")
    def _head_fits(self) -> "Config":
        if self.model.head and self.facts.teacher == "joint representations":
            raise ValueError(
                f"model.head: method {self.method} fits one linear layer on the student's code; "
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _patience_fits(self) -> "Config":
        if self.train.patience is None:
            return self
        if not self.facts.stops_early:
            raise ValueError(
                f"train.patience: method {self.method} learns no labels by steps, and has no loss "
                "on rows that were held out; leave it out, or use "
                f"{_methods(lambda facts: facts.stops_early)}"
            )
        if self.train.keep_best and not self.facts.predicts_alone:
            raise ValueError(
                f"train.keep_best: the active goes back to the networks of an earlier epoch; in "
                f"method {self.method} it needs the other parties' of the same; leave it out"
            )
        if self.dp_sgd is not None:
            raise ValueError(
                "train.patience: when training ends would tell of the held-out rows without the "
                "noise of dp_sgd; leave one of the two out"
            )
        if self.labels.mechanism == MultiStageResponse.name:
            raise ValueError(
                f"train.patience: {self.labels.mechanism} answers labels as the epochs go on, and "
                "losses before and after do not compare; use randomised_response"
            )
        return self

    @field_validator("alignment")
    @classmethod
    def _can_align(cls, alignment: AlignmentSettings) -> AlignmentSettings:
        from secure_apfed.alignment.intersection import check_alignment

        check_alignment(alignment)
        return alignment

    @field_validator("task")
    @classmethod
    def _is_a_task(cls, name: str) -> str:
        if name not in TASKS:
            raise ValueError(unknown_name(name, TASKS))
        return name

    @field_validator("measure")
    @classmethod
    def _is_a_measure(cls, name: str) -> str:
        return find_measure(name).name

    @model_validator(mode="after")
    def _imbalance_fits(self) -> "Config":
        weighed = self.train.class_weights != "none"
        if weighed and not self.facts.weighs_classes:
            raise ValueError(
                f"train.class_weights: method {self.method} learns by no steps on the active's own "
                "labels; leave it out, or use "
                f"{_methods(lambda facts: facts.weighs_classes)}"
            )
        if self.threshold is not None and not self.facts.predicts_alone:
            raise ValueError(
                f"threshold: in method {self.method} the active does not predict alone, and has no "
                f"model to decide by; use {_methods(lambda facts: facts.predicts_alone)}"
            )
        chosen = isinstance(self.threshold, str)
        if isinstance(self.threshold, str) and self.threshold not in THRESHOLDS:
            raise ValueError(f"threshold: {unknown_name(self.threshold, THRESHOLDS)}")
        if self.dp_sgd is not None and (weighed or chosen):
            raise ValueError(
                f"{'train.class_weights' if weighed else 'threshold'}: it would tell how many "
                "labels there are of each class without the noise of dp_sgd; leave one of the two "
                "out" + ("" if weighed else ", or give the threshold as a number")
            )
        return self

    @model_validator(mode="after")
    def _decomposition_fits(self) -> "Config":
        if not self.facts.decomposes:
            return self
        if self.model.network != "enriched" or self.model.head:
            raise ValueError(
                f"model.network: method {self.method} classifies the active's own features beside "
                f"the student's code by logistic regression, and {self.model.network} has another "
                "head; use enriched, without model.head"
            )
        unused, usual = self.distilled, DistillationSettings()
        for key in ("own", "passive", "joint"):
            if getattr(unused, key) != getattr(usual, key):
                raise ValueError(
                    f"distilled.{key}: in method {self.method} the student alone is an "
                    "autoencoder; leave it out"
                )
        return self

    @model_validator(mode="after")
    def _views_fit(self) -> "Config":
        if self.facts.averages is None and self.multiview != MultiviewSettings():
            raise ValueError(
                f"multiview: in method {self.method} parties agree on no pseudo-labels; leave it "
                f"out, or use {_methods(lambda facts: facts.averages is not None)}"
            )
        network = "gru" if self.facts.reads_sequences else "identity"
        if self.facts.averages and self.model.network != network:
            raise ValueError(
                f"model.network: method {self.method} takes {network}, got {self.model.network}"
            )
        weighted = [name for name, one in self.passives.items() if one.weight != 1.0]
        if self.facts.averages == "weights" and weighted:
            raise ValueError(
                f"passives.{weighted[0]}.weight: in method {self.method} a party counts by the "
                "rows that it trains on; leave weight out"
            )
        return self

    @model_validator(mode="after")
    def _partition_fits(self) -> "Config":
        facts, data = self.facts, self.data
        if not facts.has_passives:
            return self
        if data.horizontal and facts.aligns:
            raise ValueError(
                f"data.partition: method {self.method} aligns tables of the same people, and under "
                "horizontal each party has people of its own; take vertical, or use "
                f"{_methods(lambda facts: not facts.aligns)}"
            )
        if not data.horizontal and not facts.aligns:
            raise ValueError(
                f"data.partition: in method {self.method} all parties have the same features of "
                f"other people; say horizontal, or use {_methods(lambda facts: facts.aligns)}"
            )
        if data.labels_at and not facts.takes_labels_of_passives:
            raise ValueError(
                f"data.labels_at: in method {self.method} the active alone holds labels; leave it "
                f"out, or use {_methods(lambda facts: facts.takes_labels_of_passives)}"
            )
        if (data.horizontal or data.labels_at) and self.labels.mechanism != "none":
            raise ValueError(
                f"labels.mechanism: {self.labels.mechanism} answers the active's labels alone, and "
                "passives hold labels, too; say none"
            )
        return self

    @model_validator(mode="after")
    def _spreading_fits(self) -> "Config":
        if not self.train.spread_labels:
            return self
        if not self.facts.predicts_throughout:
            taking = _methods(lambda facts: facts.predicts_throughout)
            raise ValueError(
                f"train.spread_labels: method {self.method} trains no model of the active's alone, "
                f"or labels its rows already; use {taking}"
            )
        if self.dp_sgd is not None:
            raise ValueError(
                "train.spread_labels: the last layer would be fitted to the rows without the noise "
                "of dp_sgd; leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _pairwise_fits(self) -> "Config":
        if self.alignment.mode == "all" or not self.facts.has_passives:
            return self
        if not self.facts.takes_pairwise:
            raise ValueError(
                f"alignment.mode: pairwise leaves rows that some passives do not know, and "
                f"{self.method} needs all passives for every row; use all, or "
                f"{_methods(lambda facts: facts.takes_pairwise)}"
            )
        if not self.secure_sum.allow_single_passive:
            raise ValueError(
                "alignment.mode: pairwise opens to the active the gradient of every row that one "
                "passive alone knows; say secure_sum.allow_single_passive: true if that is "
                "acceptable, or use all"
            )
        return self

    @model_validator(mode="after")
    def _labels_fit(self) -> "Config":
        if self.labels.mechanism != MultiStageResponse.name:
            return self
        if self.facts.sends_labels:
            raise ValueError(
                f"labels.mechanism: {self.labels.mechanism} answers labels in stages, and method "
                f"{self.method} sends all of them once; use randomised_response"
            )
        if not self.facts.predicts_throughout:
            raise ValueError(
                f"labels.mechanism: {self.labels.mechanism} asks the active's model what it "
                f"expects, and method {self.method} has none that predicts alone all along; use "
                "randomised_response"
            )
        return self

    @model_validator(mode="after")
    def _split_reads_no_label(self) -> "Config":
        """Where training labels are private, they do not decide who tests: of own tables."""
        if not self.labels_are_private or self.data.dataset != TABLES:
            return self
        for key in ("split", "labelled_choice"):
            if key in self.data.model_fields_set and getattr(self.data, key) == "by_class":
                raise ValueError(
                    f"data.{key}: by_class draws rows by their labels, so that a label would move "
                    f"every figure, and {'labels' if self.dp_sgd is None else 'dp_sgd'} would not "
                    "cover that; say at_random, or leave it out"
                )
        drawn = {"split": "at_random", "labelled_choice": "at_random"}
        object.__setattr__(self, "data", self.data.model_copy(update=drawn))
        return self

    @model_validator(mode="after")
    def _private_training_fits(self) -> "Config":
        if self.dp_sgd is None:
            return self
        if not self.facts.trains_privately:
            returned = " (the gradient of every row's loss)"
            raise ValueError(
                f"dp_sgd: method {self.method} gives the passives more than DP-SGD makes private"
                f"{returned if self.facts.returns_gradients else ''}; use "
                f"{_methods(lambda facts: facts.trains_privately)}, or leave dp_sgd out"
            )
        if self.train.precision == "bfloat16":
            raise ValueError(
                "dp_sgd: gradients of single examples in bfloat16 are too coarse to be clipped; "
                "use train.precision float32 or float64"
            )
        whole_batch = [
            choice.kind
            for choice in self.defences
            if "representations" in DEFENCES[choice.kind].protects
        ]
        if whole_batch:
            raise ValueError(
                f"dp_sgd: defence {whole_batch[0]} adds a loss of the whole batch, which cannot be "
                "clipped by example; leave one of the two out"
            )
        sent = self.facts.representations_from == "active"
        if sent and self.guard.mechanism == "none" and self.dp_sgd.epsilon is not None:
            raise ValueError(
                "dp_sgd.epsilon cannot be kept where representations are sent without noise; "
                "choose guard.mechanism gaussian or frozen_gaussian, or give noise_multiplier "
                "(then labels alone are protected)"
            )
        return self


def _methods(fit: Callable[[MethodFacts], bool]) -> str:
    """The methods of which this holds, in words."""
    *others, last = (name for name, method in METHODS.items() if fit(method.facts))
    return f"{', '.join(others)} or {last}" if others else last
