"""Defences beyond differential privacy: a class, one line in the table, and its settings in
`secure_apfed.settings.privacy`.

They make known attacks worse and guarantee nothing; the report says so. Each says what it changes
on its way out (`protects`) and what that gives. Who runs it, and whether it does anything, follows
from what the method says of itself.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from secure_apfed.defences.gradients import ClipAndNoise, Compression, DiscreteSgd, Marvell, MaxNorm
from secure_apfed.defences.interface import (
    Defence,
    GradientChain,
    GradientDefence,
    LabelCode,
    LabelDefence,
    Leaving,
    RepresentationChain,
    RepresentationDefence,
    Surroundings,
    TrueLabels,
)
from secure_apfed.defences.trained import ConfusionalLabels, Mid, NoPeek
from secure_apfed.seeds import seeded
from secure_apfed.settings.method import MethodSettings, Released, Side
from secure_apfed.settings.privacy import DefenceSettings

__all__ = [
    "DEFENCES",
    "Defence",
    "GradientChain",
    "GradientDefence",
    "LabelCode",
    "LabelDefence",
    "Leaving",
    "RepresentationChain",
    "RepresentationDefence",
    "Surroundings",
    "TrueLabels",
    "check_defences",
    "gradient_chain",
    "label_code",
    "representation_chain",
    "statements",
    "who_applies",
]

DEFENCES: Mapping[str, type[Defence]] = {
    defence.name: defence
    for defence in (
        NoPeek,
        Mid,
        ConfusionalLabels,
        Compression,
        DiscreteSgd,
        ClipAndNoise,
        Marvell,
        MaxNorm,
    )
}

_RUN_BY: Mapping[Side, str] = {"active": "the active", "passives": "every passive"}
_NOT_SENT: Mapping[Released, str] = {
    "representations": "no representation is sent",
    "contributions": "no passive sends a gradient",
    "returned gradients": "no passive receives a gradient of the task loss",
    "labels": "no passive receives a gradient of the task loss",
}


def check_defences(choices: Sequence[DefenceSettings], method: MethodSettings) -> None:
    """Refuse defences that would do nothing under a method, and one that is given twice.

    Raises:
        ValueError: says which, why, and what does apply.
    """
    kinds = [choice.kind for choice in choices]
    for kind in kinds:
        if not who_applies(kind, method):
            fits = [name for name in DEFENCES if who_applies(name, method)]
            reason = " and ".join(_NOT_SENT[released] for released in DEFENCES[kind].protects)
            raise ValueError(
                f"defences: {kind} does not apply to method {method.name}: {reason}; leave it "
                f"out, or use one of {', '.join(fits) or 'none'}"
            )
        if kinds.count(kind) > 1:
            raise ValueError(f"defences: {kind} is given {kinds.count(kind)} times; keep one")


def who_applies(kind: str, method: MethodSettings) -> str:
    """Who runs a defence, in words: whoever lets out what it protects; empty if nobody does."""
    senders = map(method.sender_of, DEFENCES[kind].protects)
    return " and ".join(dict.fromkeys(_RUN_BY[sender] for sender in senders if sender))


def statements(choices: Sequence[DefenceSettings], method: MethodSettings) -> list[str]:
    """What to say of defences where a run's guarantee is told; nothing without any."""
    run_by = ", ".join(f"{choice.kind} by {who_applies(choice.kind, method)}" for choice in choices)
    return [f"defences without a guarantee: {run_by}"] if choices else []


def representation_chain(
    choices: Sequence[DefenceSettings], around: Surroundings
) -> RepresentationChain:
    """What the party that sends representations does before its guard."""
    built = _build(choices, around, "representations")
    return RepresentationChain([each for each in built if isinstance(each, RepresentationDefence)])


def gradient_chain(
    choices: Sequence[DefenceSettings],
    around: Surroundings,
    released: Literal["contributions", "returned gradients"],
) -> GradientChain:
    """What the party that sends such gradients does to them."""
    built = _build(choices, around, released)
    return GradientChain([each for each in built if isinstance(each, GradientDefence)])


def label_code(choices: Sequence[DefenceSettings], around: Surroundings) -> LabelCode:
    """What the active learns instead of its labels; the labels themselves without a defence."""
    built = _build(choices, around, "labels")
    return next((each for each in built if isinstance(each, LabelDefence)), TrueLabels())


def _build(
    choices: Sequence[DefenceSettings], around: Surroundings, released: Released
) -> list[Defence]:
    built: list[Defence] = []
    for choice in choices:
        if released in DEFENCES[choice.kind].protects:
            with seeded(around.seed, around.party, "defence", choice.kind):
                built.append(DEFENCES[choice.kind](choice, around))
    return built
