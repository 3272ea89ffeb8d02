"""Tables of who_learns.md on who can read what, and the facts of a run by which their rows hold.

docs/threat-model.md repeats the last two word for word, and the site shows all. A rule says what
the receiver of one kind of message reads of it by following the protocol, what protects the
sender, and what remains open; coalitions and limits are of a whole run. The column "when" names
facts: `;` is and, ` or ` is or. A method's name is no fact.
"""

from dataclasses import dataclass
from enum import StrEnum
from importlib import resources

from apfed_protocols.sums import SECURE_SUMS
from secure_apfed.errors import ApfedError
from secure_apfed.exchange.envelope import Kind
from secure_apfed.exchange.secure_sums import find_sum_class
from secure_apfed.methods import METHODS
from secure_apfed.settings.run import RunSettings
from secure_apfed.settings.training import BlackBoxSettings


class Role(StrEnum):
    ACTIVE = "active"
    PASSIVE = "passive"
    AGGREGATOR = "aggregator"
    DEALER = "dealer"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts of a run that decide who can read what.

    method_facts: what its method does, in words; secure_sum: key of `SECURE_SUMS`; passives: M;
    guarded: for whoever sends representations; pairwise: each passive helps on its own overlap with
    the active; labels_after: no label touches the exchange; noisy: every passive adds noise, under
    the sum or to its votes; inductive: a row that has no label moves no vote but its own; apart:
    each party ran in a process of its own; black_boxes: some passive is code that nobody else sees.
    """

    method_facts: frozenset[str]
    secure_sum: str
    passives: int
    guarded: bool = False
    pairwise: bool = False
    label_dp: bool = False
    labels_after: bool = False
    private: bool = False
    noisy: bool = False
    inductive: bool = False
    labelled_passives: bool = False
    defended: bool = False
    apart: bool = False
    shared_seeds: bool = False
    black_boxes: bool = False

    @classmethod
    def from_settings(cls, config: RunSettings, *, passives: int, apart: bool) -> "RunFacts":
        """Return the facts of a run with these settings, whether it is over or was not begun.

        `apart`: whether each party runs its own process.
        """
        return cls(
            method_facts=config.method.facts,
            secure_sum=find_sum_class(config.secure_sum).name,
            passives=passives,
            guarded=config.guard.mechanism != "none",
            pairwise=config.alignment.mode == "pairwise",
            label_dp=config.labels.mechanism != "none",
            labels_after=config.train.meets_labels_after,
            private=config.dp_sgd is not None,
            noisy=config.method.find_noise(config) is not None,
            inductive=config.method.inductive,
            labelled_passives=bool(config.data.labels_at),
            defended=bool(config.defences),
            apart=apart,
            shared_seeds=config.party_seeds == "shared_for_comparison",
            black_boxes=any(
                isinstance(passive.objective, BlackBoxSettings)
                for passive in config.passives.values()
            ),
        )

    @property
    def words(self) -> frozenset[str]:
        """The words that hold, of those that the column "when" may have."""
        return self.method_facts | {word for word, holds in _evaluate_words(self).items() if holds}


_OF_METHODS = frozenset[str]().union(*(method.public_facts.facts for method in METHODS.values()))


def _evaluate_words(run: RunFacts) -> dict[str, bool]:
    """Return all words of the column "when", beside those of methods, and which of them hold."""
    passives = "passives take part" in run.method_facts
    votes = "passives vote" in run.method_facts
    summed = "contributions are summed" in run.method_facts
    gradients = "gradients are summed" in run.method_facts
    return {
        "always": True,
        "passives hold labels": run.labelled_passives,
        "noise on votes": votes and run.noisy,
        "no noise on votes": votes and not run.noisy,
        "votes move each other": votes and not run.inductive,
        "votes stand alone": votes and run.inductive,
        **{f"sum {name}": summed and run.secure_sum == name for name in SECURE_SUMS},
        "a passive is a black box": gradients and run.black_boxes,
        "noise under the sum": run.noisy
        and not run.method_facts.isdisjoint(
            {
                "gradients are summed",
                "representations are summed",
                "projections are summed",
            }
        ),
        "no noise under the sum": gradients and not run.noisy,
        "guard on": run.guarded and "representations are sent" in run.method_facts,
        "no guard": not run.guarded,
        "label DP": run.label_dp,
        "no label DP": not run.label_dp,
        "labels come after": run.labels_after,
        "DP-SGD": run.private,
        "no DP-SGD": not run.private,
        "alignment pairwise": run.pairwise,
        "alignment of all": "people are aligned" in run.method_facts and not run.pairwise,
        "defences on": passives and run.defended,
        "in one process": passives and not run.apart,
        "in processes": passives and run.apart,
        "shared seeds": passives and run.shared_seeds,
        "M = 1": run.passives == 1,
        "M = 2": run.passives == 2,
        "M >= 2": run.passives >= 2,
        "M >= 3": run.passives >= 3,
    }


FACTS = _OF_METHODS.union(
    _evaluate_words(RunFacts(method_facts=_OF_METHODS, secure_sum="", passives=0))
)


@dataclass(frozen=True)
class _Row:
    when: str

    def __post_init__(self) -> None:
        """Raise ApfedError if the column "when" has a word that is no fact of a run."""
        words_used = {word for part in self.when.split("; ") for word in part.split(" or ")}
        if unknown := words_used - FACTS:
            raise ApfedError(
                f"who_learns.md: {', '.join(sorted(unknown))} in {self.when!r} is no fact of a "
                f"run; say it of runs or methods, or take one of {', '.join(sorted(FACTS))}"
            )

    def holds_for(self, run: RunFacts) -> bool:
        """Return whether the run is one of those that the row speaks of."""
        words = run.words
        return all(words & set(part.split(" or ")) for part in self.when.split("; "))


@dataclass(frozen=True)
class Rule(_Row):
    """A rule: what one role learns of one kind of message, and what of it is not protected.

    `receiver` is None where every role learns the same.
    """

    kind: Kind
    receiver: Role | None
    reads: str
    protects: str
    remains: str


@dataclass(frozen=True)
class Coalition(_Row):
    """A coalition, and what its parties learn if they put together what each of them has."""

    who: str
    learns: str


@dataclass(frozen=True)
class Limit(_Row):
    sentence: str


_ANY = "any party"
_TEXT = resources.files("apfed_experiments.report").joinpath("who_learns.md").read_text("utf-8")
_rules, _coalitions, _limits = (
    [row.removeprefix("| ").removesuffix(" |").split(" | ") for row in table.splitlines()[2:]]
    for table in _TEXT.strip().split("\n\n")
)
RULES = tuple(
    Rule(when, Kind(kind), None if receiver == _ANY else Role(receiver), reads, protects, remains)
    for kind, receiver, when, reads, protects, remains in _rules
)
COALITIONS = tuple(Coalition(when, who, learns) for who, when, learns in _coalitions)
LIMITS = tuple(Limit(when, sentence) for when, sentence in _limits)


def rule_for(kind: Kind, receiver: Role, run: RunFacts) -> Rule:
    """Return what `receiver` learns of messages of this kind.

    Raises:
        ApfedError: the table does not say; a report without it would hide something.
    """
    for rule in RULES:
        if rule.kind is kind and rule.receiver in (None, receiver) and rule.holds_for(run):
            return rule
    raise ApfedError(
        f"nothing says what the {receiver} learns of {kind} in {run}; add a rule to who_learns.md"
    )
