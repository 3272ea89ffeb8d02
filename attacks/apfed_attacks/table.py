"""All attacks by name. Each is one class and one line below: docs/add-an-attack.md.

`find_attack` finds those of others, too: named as package.module:Name, or by a package that is
installed and declares them under the entry point `secure_apfed.attacks`. A run's folder or a file
that others share names none: `secure_apfed.settings.plugins`.
"""

from typing import Any

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
from secure_apfed.settings.plugins import (
    PluginTable,
    find_code_name,
    require_class,
    require_owner,
)

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
    {entry.name: entry for entry in _ENTRIES}, kind="attacks", prepare=_require_attack
)


def find_attack(name: str) -> type[Attack]:
    """Return the class of the attack with this name.

    The name is that of a built-in attack, of one that an installed package declares, or
    package.module:Name.

    Raises:
        ConfigError: there is none, what the name means is no attack, or no settings of this party
            name that code.
    """
    code = find_code_name(name, "attacks")
    # Code is imported only if this party's own settings named it.
    if name not in ATTACKS and code is not None:
        require_owner(code, key="attacks", noted=True)
    return ATTACKS[ATTACKS.take_name(name, key="attacks")]
