"""Who can read what: the tables of who_learns.md, and the facts of a run by which their rows hold.

docs/threat-model.md repeats the tables word for word. A rule says what the receiver of one kind
of message reads of it by following the protocol, what protects the sender, and what remains
open; coalitions and limits are of a whole run. The column "when" names facts: `;` is and,
` or ` is or. A method's name is no fact.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources

from apfed_protocols.sums import SECURE_SUMS
from secure_apfed.errors import ApfedError
from secure_apfed.exchange.envelope import Kind
from secure_apfed.settings.method import MethodSettings, VoteOpening

__all__ = [
    "COALITIONS", "FACTS", "LIMITS", "RULES",
    "Coalition", "Limit", "Role", "Rule", "RunFacts", "rule_for",
]  # fmt: skip


class Role(StrEnum):
    """What a party is in a run."""

    ACTIVE = "active"
    PASSIVE = "passive"
    AGGREGATOR = "aggregator"
    DEALER = "dealer"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What of a run decides who can read what.

    Attributes:
        method: what the run's method does; secure_sum: key of `SECURE_SUMS`.
        guarded: whether a guard is set, for whoever sends representations.
        passives: M.
        pairwise: whether each passive helps on its own overlap with the active.
        label_dp: whether training labels went through a mechanism.
        private: whether the active trained by DP-SGD.
        noisy: whether every passive adds noise, under the sum or to its votes.
        inductive: whether a row that has no label moves no vote but its own.
        labelled_passives: whether passives hold labels of the aligned people, too.
        defended: whether defences without a guarantee were on.
        apart: whether each party ran in a process of its own.
        shared_seeds: whether all parties' initial weights follow from the run's seed.
    """

    method: MethodSettings
    secure_sum: str
    passives: int
    guarded: bool = False
    pairwise: bool = False
    label_dp: bool = False
    private: bool = False
    noisy: bool = False
    inductive: bool = False
    labelled_passives: bool = False
    defended: bool = False
    apart: bool = False
    shared_seeds: bool = False


Fact = Callable[[RunFacts], bool]


def _sums_by(name: str) -> Fact:
    return lambda run: run.method.sums and run.secure_sum == name


def _opens(*openings: VoteOpening) -> Fact:
    return lambda run: run.method.opens_votes in openings


def _adds_noise(run: RunFacts) -> bool:
    return run.method.sums_gradients or run.method.sums_representations


def _votes(run: RunFacts) -> bool:
    return run.method.opens_votes is not None


FACTS: Mapping[str, Fact] = {
    "always": lambda run: True,
    "passives take part": lambda run: run.method.has_passives,
    "the active sends representations": lambda run: run.method.representations_from == "active",
    "passives send representations": lambda run: run.method.representations_from == "passives",
    "gradients are summed": lambda run: run.method.sums_gradients,
    "representations are summed": lambda run: run.method.sums_representations,
    "pseudo-labels are averaged": lambda run: run.method.averages == "pseudo-labels",
    "weights are averaged": lambda run: run.method.averages == "weights",
    "passives hold labels": lambda run: run.labelled_passives,
    "contributions are summed": lambda run: run.method.sums,
    "passives vote": _votes,
    "votes are answered singly": _opens("randomised"),
    "the sum of votes is opened": _opens("sum"),
    "labels are shown": lambda run: run.method.sends_labels,
    "noise on votes": lambda run: _votes(run) and run.noisy,
    "no noise on votes": lambda run: _votes(run) and not run.noisy,
    "votes move each other": lambda run: _votes(run) and not run.inductive,
    "votes stand alone": lambda run: _votes(run) and run.inductive,
    "a teacher labels rows": lambda run: bool(run.method.teacher) and not run.method.decomposes,
    "tables are decomposed": lambda run: run.method.decomposes,
    "gradients are returned": lambda run: run.method.returns_gradients,
    **{f"sum {name}": _sums_by(name) for name in SECURE_SUMS},
    "votes are opened as a moment": _opens("moment"),
    "votes of encrypted labels are summed": _opens("encrypted"),
    "noise under the sum": lambda run: _adds_noise(run) and run.noisy,
    "no noise under the sum": lambda run: run.method.sums_gradients and not run.noisy,
    "guard on": lambda run: run.guarded and run.method.representations_from is not None,
    "no guard": lambda run: not run.guarded,
    "label DP": lambda run: run.label_dp,
    "no label DP": lambda run: not run.label_dp,
    "DP-SGD": lambda run: run.private,
    "no DP-SGD": lambda run: not run.private,
    "alignment pairwise": lambda run: run.pairwise,
    "alignment of all": lambda run: run.method.aligns and not run.pairwise,
    "defences on": lambda run: run.method.has_passives and run.defended,
    "in one process": lambda run: run.method.has_passives and not run.apart,
    "in processes": lambda run: run.method.has_passives and run.apart,
    "shared seeds": lambda run: run.method.has_passives and run.shared_seeds,
    "M = 1": lambda run: run.passives == 1,
    "M = 2": lambda run: run.passives == 2,
    "M >= 2": lambda run: run.passives >= 2,
    "M >= 3": lambda run: run.passives >= 3,
}


@dataclass(frozen=True)
class _Row:
    when: str

    def __post_init__(self) -> None:
        named = {word for part in self.when.split("; ") for word in part.split(" or ")}
        if unknown := named - set(FACTS):
            raise ApfedError(
                f"who_learns.md: {', '.join(sorted(unknown))} in {self.when!r} is no fact of a "
                f"run; add it to FACTS, or take one of {', '.join(FACTS)}"
            )

    def holds(self, run: RunFacts) -> bool:
        """Whether the run is one of those that the row speaks of."""
        return all(
            any(FACTS[word](run) for word in part.split(" or ")) for part in self.when.split("; ")
        )


@dataclass(frozen=True)
class Rule(_Row):
    """What one role learns of one kind of message, and what of it is not protected.

    `receiver` is None where every role learns the same.
    """

    kind: Kind
    receiver: Role | None
    reads: str
    protects: str
    remains: str


@dataclass(frozen=True)
class Coalition(_Row):
    """What parties learn if they put together what each of them has."""

    who: str
    learns: str


@dataclass(frozen=True)
class Limit(_Row):
    """Something that a run does not guarantee."""

    sentence: str


def _tables() -> Iterator[list[list[str]]]:
    text = resources.files("apfed_experiments.report").joinpath("who_learns.md").read_text("utf-8")
    for table in text.strip().split("\n\n"):
        _header, _rule, *rows = table.splitlines()
        yield [row.removeprefix("| ").removesuffix(" |").split(" | ") for row in rows]


_ANY = "any party"
_rules, _coalitions, _limits = _tables()
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
        if rule.kind is kind and rule.receiver in (None, receiver) and rule.holds(run):
            return rule
    raise ApfedError(
        f"nothing says what the {receiver} learns of {kind} in {run}; add a rule to who_learns.md"
    )
