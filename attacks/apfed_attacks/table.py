"""All attacks by name. Each is one class and one line below: docs/add-an-attack.md.

`find_attack` finds those of others, too: named as package.module:Name, or by a package that is
installed and declares them under the entry point `secure_apfed.attacks`. A run's folder or a file
that others share names none: `secure_apfed.settings.plugins`. A choice names an attack with options
(`prepare_attack`) or stands for all of them (`expand_choices`).
"""

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from apfed_attacks.features.chosen_representations import ChosenRepresentations
from apfed_attacks.features.contrastive_inversion import ContrastiveInversion
from apfed_attacks.features.contribution_regression import ContributionRegression
from apfed_attacks.features.decoder_extraction import DecoderExtraction
from apfed_attacks.features.gradient_projection import GradientProjection
from apfed_attacks.features.gradient_regression import GradientRegression
from apfed_attacks.features.hijack import FeatureSpaceHijack, ReversedHijack
from apfed_attacks.features.inverse_network import InverseNetwork
from apfed_attacks.features.isolation import Isolation
from apfed_attacks.features.opened_regression import SumRegression, VectorRegression, VoteRegression
from apfed_attacks.features.representation_network import RepresentationNetwork
from apfed_attacks.features.unpaired_inversion import UnpairedInversion
from apfed_attacks.interface import Attack
from apfed_attacks.labels.label_gradients import GradientDirection, LabelGradients
from apfed_attacks.labels.representations import ModelCompletion, Temporal
from apfed_attacks.labels.semi_supervised import SemiSupervised
from apfed_attacks.labels.sent import PseudoLabels, ShownLabels
from apfed_attacks.people.id_stuffing import IdStuffing
from apfed_attacks.people.membership import AveragedMembership, Membership
from secure_apfed.config import AttackChoice
from secure_apfed.config.file import describe_errors
from secure_apfed.errors import ConfigError
from secure_apfed.settings.plugins import (
    PluginTable,
    find_import_path,
    require_class,
    require_trusted_code,
)

__all__ = ["ALL", "ATTACKS", "expand_choices", "find_attack", "full_suite", "prepare_attack"]

ALL = "all"
"""The name that stands for every attack, as in `attacks: all`."""

_ENTRIES: tuple[type[Attack], ...] = (
    # Labels: from releases, gradients, requests for votes, own representations, pseudo-labels.
    ModelCompletion,
    SemiSupervised,
    Temporal,
    LabelGradients,
    GradientDirection,
    ShownLabels,
    PseudoLabels,
    # Features: from what a victim released, that an active opened, or that an aggregator added.
    InverseNetwork,
    UnpairedInversion,
    RepresentationNetwork,
    ReversedHijack,
    FeatureSpaceHijack,
    VoteRegression,
    VectorRegression,
    ContrastiveInversion,
    GradientRegression,
    GradientProjection,
    ContributionRegression,
    SumRegression,
    ChosenRepresentations,
    DecoderExtraction,
    Isolation,
    # People: who trained the model, or at another party; which IDs a peer has.
    Membership,
    AveragedMembership,
    IdStuffing,
)


def _require_attack(candidate: Any, code: str) -> type[Attack]:
    """Return a class named as `package.module:Name`, after registering it under the name in the
    class.

    Raises TypeError: it is no Attack, or another attack has the name.
    """
    del code  # results carry the name in the class
    kind: type[Attack] = require_class(candidate, Attack)
    if ATTACKS.setdefault(kind.name, kind) is not kind:
        raise TypeError(f"there is another attack {kind.name}; give {kind.__name__} another name")
    return kind


ATTACKS: PluginTable[type[Attack]] = PluginTable(
    {entry.name: entry for entry in _ENTRIES}, plugin_kind="attacks", make_entry=_require_attack
)


def find_attack(name: str) -> type[Attack]:
    """Return the class of the attack with this name.

    The name is that of a built-in attack, of one that an installed package declares, or
    package.module:Name.

    Raises:
        ConfigError: there is none, what the name means is no attack, or no settings of this party
            name that code.
    """
    code = find_import_path(name, "attacks")
    # Code is imported only if this party's own settings named it.
    if name not in ATTACKS and code is not None:
        require_trusted_code(code, setting="attacks", only_earlier_settings=True)
    return ATTACKS[ATTACKS.import_entry(name, setting="attacks")]


def full_suite(names: Iterable[str] = ATTACKS.built_in_names) -> tuple[AttackChoice, ...]:
    """Return the named attacks, each with every set of options that its class proposes."""
    return tuple(
        AttackChoice(name=name, options=dict(options))
        for name in names
        for options in type(prepare_attack(AttackChoice(name=name))).suite
    )


def expand_choices(choices: Iterable[AttackChoice]) -> tuple[AttackChoice, ...]:
    """Return the choices with the full suite in place of "all", after checking their options.

    Raises ConfigError: an option is unknown or out of range, or "all" has options.
    """
    expanded: list[AttackChoice] = []
    for choice in choices:
        if choice.name == ALL and choice.options:
            raise ConfigError(
                f"attacks: {ALL} mounts each attack with its usual options and takes none, got "
                f"{', '.join(choice.options)}; name the attack that they are of beside it"
            )
        expanded += full_suite() if choice.name == ALL else [choice]
    for choice in expanded:
        prepare_attack(choice)
    return tuple(expanded)


def prepare_attack(choice: AttackChoice) -> Attack:
    """Return the attack of an entry in the settings: an object with its options.

    Raises ConfigError: an option is unknown or out of range.
    """
    kind = find_attack(choice.name)
    try:
        return kind.model_validate(choice.options)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, path))} {problem}"
            for path, problem in describe_errors(kind, error, choice.options)
        )
        raise ConfigError(f"attacks: {choice.name}: options: {problems}") from error
