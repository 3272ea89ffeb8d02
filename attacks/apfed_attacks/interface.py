"""Interface of attacks: their settings, their guesses and their results.

An attack is one file with one class and one line in `apfed_attacks.ATTACKS`. The object itself is
frozen settings: its fields are the options of a config file. It reads an `AdversaryView` and
returns a `Guess`; it never sees the truth, so it can neither score itself nor choose by it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from apfed_attacks.view import AdversaryView, AttackError, Behaviour, Role
from secure_apfed.settings import Settings

__all__ = [
    "NOT_ATTACKED",
    "Attack",
    "AttackResult",
    "FloatArray",
    "Guess",
    "Prediction",
    "Target",
    "select_headlines",
]

Target: TypeAlias = Literal["labels", "features", "membership"]
FloatArray: TypeAlias = NDArray[np.float64]

NOT_ATTACKED: Literal["not attacked"] = "not attacked"
"""The state of a direction in which no attack ran: nothing is known of a leak."""

# Options whose effect a result's `knowledge` states.
_COUNTED = ("labels_per_class", "shadow_rows")


@dataclass(frozen=True, eq=False)
class Prediction:
    """A guess for N rows.

    Attributes:
        values: (N, K) class scores of any scale, of which the highest is the guess; (N, F)
            features; or (N, 1) scores of membership.
        clusters: whether the K columns are clusters, which the scorer assigns to classes by the
            truth.
        held_out: R^2 of the same fit on known rows that it was not fitted to, by which the
            adversary chooses among variants; None: not computed.
    """

    values: FloatArray
    clusters: bool = False
    held_out: float | None = None

    def select_rows(self, rows: NDArray[Any]) -> "Prediction":
        """Return the guesses for these rows (indices or a mask) alone."""
        return replace(self, values=self.values[rows])


@dataclass(frozen=True, eq=False, kw_only=True)
class Guess:
    """A guess: all that an attack says about the rows at `positions`.

    Attributes:
        positions: (N,) alignment positions, none of which the adversary knew; for membership
            the indices of the candidates.
        attacks: name of a variant -> its guesses; every variant uses what was released.
        baselines: guesses of an adversary that knows and computes the same but saw no release.
        references: metrics to compare with; they use what was released and take no part in the
            advantage.
        decoys: name of a variant -> its guesses where each row's release is another row's; they
            are added by whoever runs the attack, if it is `is_exchangeable`.
    """

    positions: Tensor
    attacks: Mapping[str, Prediction]
    baselines: Mapping[str, Prediction]
    references: Mapping[str, Prediction] = field(default_factory=dict)
    decoys: Mapping[str, Prediction] = field(default_factory=dict)


class Attack(Settings, ABC):
    """Base of every attack; the fields below are options that all attacks share.

    Class attributes:
        name: the attack's key in the table of attacks and in configs.
        target: what it guesses, which decides how it is scored.
        roles: roles of the parties that can mount it: active, passive, aggregator or outsider.
        behaviour: whether that party must have deviated from the protocol.
        white_box: whether the adversary knows the victim's network.
        told_order: whether the adversary knows of which rows each contribution to a sum is.
        suite: sets of options with which it is mounted where the user names none.
        keeps: names of what a malicious adversary notes during a live run, for the attack to read
            afterwards.
        needs: arguments of `apfed_attacks.evaluate` that it reads beside h.

    Attributes:
        coalition: "single" mounts it once for each party of the role, "all" once for all of
            them together.
        labels_per_class: labels of training rows that the adversary knows.
        priors: whether it knows the share of each class.
        shadow_rows: training rows whose victim features it knows.
        candidates: rows of which it asks whether they trained the model, half of which did.
        iterations: maximum number of iterations of any optimiser that it runs.
    """

    name: ClassVar[str]
    target: ClassVar[Target]
    roles: ClassVar[tuple[Role, ...]]
    behaviour: ClassVar[Behaviour] = "curious"
    white_box: ClassVar[bool] = False
    told_order: ClassVar[bool] = False
    suite: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    keeps: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()

    coalition: Literal["single", "all"] = "single"
    labels_per_class: int = Field(0, ge=0)
    priors: bool = True
    shadow_rows: int = Field(0, ge=0)
    candidates: int = Field(0, ge=0)
    iterations: int = Field(300, ge=1)

    @property
    def is_exchangeable(self) -> bool:
        """Whether the attack reads releases of rows, so that exchanging these between rows makes a
        decoy.

        A decoy is a baseline: the same attack, on releases that say nothing of the row. An attack
        on membership reads no releases: it makes its own decoys, or says why it needs none.
        """
        return self.target != "membership"

    def explain_inapplicability(self, view: AdversaryView) -> str | None:
        """Return why this party has nothing to guess here, or nothing to guess it from; None: it
        has.
        """
        if self.target != "membership" and not view.description.aligned:
            return (
                f"{view.description}: nobody is aligned, so no position is the same person's at "
                "two parties, and there is no row to guess"
            )
        if view.role not in self.roles:
            roles = " or ".join(self.roles)
            return f"{self.name} is mounted by the {roles} party, not by the {view.role}"
        return self.explain_missing_input(view)

    @abstractmethod
    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why this attack finds nothing to read in the view of a party of its roles; None:
        it does.
        """

    @abstractmethod
    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Attack a view; the result is a function of the view and the seed.

        Raises:
            AttackError: `explain_inapplicability` gives a reason; every subclass's `run` checks it.
        """

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap a subclass's `run`, so that it raises AttackError where the attack does not apply.

        No author of an attack can then forget the check.
        """
        super().__init_subclass__(**options)
        if (run := vars(cls).get("run")) is None:
            return

        @wraps(run)
        def run_if_applicable(self: Attack, view: AdversaryView, seed: int) -> Guess:
            """Check that the attack applies, then run it."""
            # A decoy (releases exchanged between rows) was checked before its releases were.
            reason = None if view.is_decoy else self.explain_inapplicability(view)
            if reason is not None:
                raise AttackError(f"{self.name} does not apply: {reason}")
            guess: Guess = run(self, view, seed)
            return guess

        setattr(cls, "run", run_if_applicable)  # noqa: B010  # mypy refuses the assignment


@dataclass(frozen=True, kw_only=True)
class AttackResult:
    """The result of one attack by one adversary on one run; plain values only.

    A failed attack proves no privacy. A regression's `variant` is the one that predicts known rows
    best that it was not fitted to (`Prediction.held_out`), and so is its `baseline`: the rows that
    are scored choose nothing. Other attacks have no such rows: their two are the best by `metric`
    on the scored rows, so both maxima are optimistic by selection, and alike. Either way the
    adversary chooses among its variants and the baselines proper, which it may fall back on, and
    the baseline among the latter and the decoys, which are variants of the same attack. An
    advantage below 0 therefore means no more than one as far above 0: the decoys had more luck.
    A regression by a network is a variant only where it could be chosen.

    Attributes:
        options: those of the attack that are not its defaults.
        method: how the run trained.
        applicable: False: nothing was computed, for this `reason`.
        variant, score: the best variant and its metrics; a baseline where ignoring what was
            released is best.
        variants, baselines, references: name -> metric -> value; decoys are baselines.
        advantage: `metric` of the best variant minus that of the best baseline.
        counts: "known" and "scored" rows.
        risk: how unevenly the best variant hurts, by class, and for the tenth of the people that it
            hurts most.
        roc: for membership, the (false, true positive rates) of the best variant.
        seed: seed of the attack and of the choice of known rows.
    """

    attack: str
    target: Target
    victim: str | None
    adversary: str
    role: Role
    behaviour: Behaviour
    method: str
    applicable: bool
    reason: str | None = None
    metric: str | None = None
    variant: str | None = None
    score: Mapping[str, float | None] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    baseline: str | None = None
    baselines: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    references: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    advantage: float | None = None
    knowledge: Mapping[str, int | bool] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    risk: Mapping[str, float] = field(default_factory=dict)
    roc: Sequence[Sequence[float]] = ()
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def setting(self) -> str:
        """Return the attack, its options, and who mounts it on whom.

        Results of one setting are averaged over seeds.
        """
        labels = self.knowledge.get("labels", 0)
        shadow = self.knowledge.get("shadow_rows", 0)
        counted = ((labels, "labels"), (shadow, "pairs"))
        known = [f"{count} {noun}" for count, noun in counted if count] or ["no labels"]
        known += [f"{name} {value}" for name, value in self.options.items() if name not in _COUNTED]
        victim_note = f" on {self.victim}" if self.target == "features" else ""
        return f"{self.attack} ({', '.join(known)}) by {self.adversary}{victim_note}"

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain values, from which `AttackResult(**values)` restores it."""
        return asdict(self)


def select_headlines(results: Sequence[AttackResult]) -> tuple[AttackResult, ...]:
    """Return the result with the highest advantage of each attack, over all adversaries and
    options.

    Advantages of different attacks compare only where their `metric` is the same. If an attack
    applied to nobody, its first result stands for it.
    """
    best_by_attack: dict[str, AttackResult] = {}
    for result in results:
        highest = best_by_attack.setdefault(result.attack, result).advantage
        if result.advantage is not None and (highest is None or result.advantage > highest):
            best_by_attack[result.attack] = result
    return tuple(best_by_attack.values())
