"""Defences beyond differential privacy: one file, one line in the table and one in the settings.

They make known attacks worse and guarantee nothing; the report says so. Each says where it
acts (`place`), in which methods it does anything (`applies_to`), and what it leaves open.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from secure_apfed.defences.chain import GradientChain, RepresentationChain, TrueLabels
from secure_apfed.defences.clip_and_noise import ClipAndNoise, ClipAndNoiseSettings
from secure_apfed.defences.compression import Compression, CompressionSettings
from secure_apfed.defences.confusional_labels import ConfusionalLabels, ConfusionalLabelsSettings
from secure_apfed.defences.discrete_sgd import DiscreteSgd, DiscreteSgdSettings
from secure_apfed.defences.interface import (
    Defence,
    GradientDefence,
    LabelCode,
    LabelDefence,
    Leaving,
    Place,
    RepresentationDefence,
    Surroundings,
)
from secure_apfed.defences.marvell import Marvell, MarvellSettings
from secure_apfed.defences.max_norm import MaxNorm, MaxNormSettings
from secure_apfed.defences.mid import Mid, MidSettings
from secure_apfed.defences.nopeek import NoPeek, NoPeekSettings
from secure_apfed.privacy.noise import NoiseSource
from secure_apfed.seeds import seeded

__all__ = [
    "DEFENCES",
    "ClipAndNoise",
    "ClipAndNoiseSettings",
    "Compression",
    "CompressionSettings",
    "ConfusionalLabels",
    "ConfusionalLabelsSettings",
    "Defence",
    "DefenceSettings",
    "DiscreteSgd",
    "DiscreteSgdSettings",
    "GradientChain",
    "GradientDefence",
    "LabelCode",
    "LabelDefence",
    "Leaving",
    "Marvell",
    "MarvellSettings",
    "MaxNorm",
    "MaxNormSettings",
    "Mid",
    "MidSettings",
    "NoPeek",
    "NoPeekSettings",
    "NoiseSource",
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

DefenceSettings = Annotated[
    NoPeekSettings
    | MidSettings
    | ConfusionalLabelsSettings
    | CompressionSettings
    | DiscreteSgdSettings
    | ClipAndNoiseSettings
    | MarvellSettings
    | MaxNormSettings,
    Field(discriminator="kind"),
]
"""The settings of any defence, told apart by `kind`."""


def check_defences(choices: Sequence[DefenceSettings], method: str) -> None:
    """Refuse defences that would do nothing under `method`, and one that is given twice.

    Raises:
        ValueError: says which, why, and what does apply.
    """
    kinds = [choice.kind for choice in choices]
    for kind in kinds:
        defence = DEFENCES[kind]
        if method not in defence.applies_to:
            fits = [name for name, other in DEFENCES.items() if method in other.applies_to]
            raise ValueError(
                f"defences: {kind} does not apply to method {method}: {defence.reason}; leave it "
                f"out, or use one of {', '.join(fits) or 'none'}"
            )
        if kinds.count(kind) > 1:
            raise ValueError(f"defences: {kind} is given {kinds.count(kind)} times; keep one")


def who_applies(kind: str, method: str) -> str:
    """Who runs a defence: whoever sends what it protects."""
    place, joint = DEFENCES[kind].place, method == "tvfl"
    if place == "labels" or (place == "gradients") == joint:
        return "the active"
    return "every passive"


def statements(choices: Sequence[DefenceSettings], method: str) -> list[str]:
    """What to say of defences where a run's guarantee is told; nothing without any."""
    told = ", ".join(f"{one.kind} by {who_applies(one.kind, method)}" for one in choices)
    return [f"defences without a guarantee: {told}"] if choices else []


def representation_chain(
    choices: Sequence[DefenceSettings], around: Surroundings
) -> RepresentationChain:
    """What the party that sends representations does before its guard."""
    built = _build(choices, around, "representations")
    return RepresentationChain([one for one in built if isinstance(one, RepresentationDefence)])


def gradient_chain(choices: Sequence[DefenceSettings], around: Surroundings) -> GradientChain:
    """What the party that sends gradients does to them."""
    built = _build(choices, around, "gradients")
    return GradientChain([one for one in built if isinstance(one, GradientDefence)])


def label_code(choices: Sequence[DefenceSettings], around: Surroundings) -> LabelCode:
    """What the active learns instead of its labels; the labels themselves without a defence."""
    built = _build(choices, around, "labels")
    return next((one for one in built if isinstance(one, LabelDefence)), TrueLabels())


def _build(choices: Sequence[DefenceSettings], around: Surroundings, place: Place) -> list[Defence]:
    built: list[Defence] = []
    for choice in choices:
        if DEFENCES[choice.kind].place == place:
            with seeded(around.seed, around.party, "defence", choice.kind):
                built.append(DEFENCES[choice.kind](choice, around))
    return built
