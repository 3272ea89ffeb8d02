"""All attacks by name. Each is one class and one line below: docs/add-an-attack.md."""

from collections.abc import Mapping
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
