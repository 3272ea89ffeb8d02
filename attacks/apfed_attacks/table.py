"""All attacks by name. Each is one class and one line below: docs/add-an-attack.md.

`find_attack` finds those of others, too: named as package.module:Name, or by a package that is
installed and declares them under the entry point `secure_apfed.attacks`.
"""

from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType

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
from secure_apfed.errors import ConfigError
from secure_apfed.learning.own_code import import_code
from secure_apfed.settings import unknown_name
from secure_apfed.settings.training import CODE_NAME

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

ATTACKS: Mapping[str, type[Attack]] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
_GROUP = "secure_apfed.attacks"
"""The entry point under which an installed package declares attacks, by name."""


def list_attacks() -> tuple[str, ...]:
    """Return the names of all attacks that can be mounted here: ours, then those of packages."""
    others = sorted({entry.name for entry in entry_points(group=_GROUP)} - set(ATTACKS))
    return (*ATTACKS, *others)


def find_attack(name: str) -> type[Attack]:
    """Return the attack of this name: ours, an installed package's, or package.module:Name.

    Raises:
        ConfigError: there is none, or what the name means is no attack.
    """
    if name in ATTACKS:
        return ATTACKS[name]
    if CODE_NAME.fullmatch(name):
        found = import_code(name, key="attacks")
    else:
        entries = {entry.name: entry for entry in entry_points(group=_GROUP)}
        if name not in entries:
            raise ConfigError(f"attacks: {unknown_name(name, list_attacks())}")
        found = entries[name].load()
    if not (isinstance(found, type) and issubclass(found, Attack)):
        raise ConfigError(
            f"attacks: {name} is no attack; expected a subclass of apfed_attacks.interface.Attack "
            "(docs/add-an-attack.md)"
        )
    return found
