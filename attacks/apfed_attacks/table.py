"""All attacks by name. Each is one file and one line below: docs/add-an-attack.md."""

from collections.abc import Mapping
from types import MappingProxyType

from apfed_attacks.features.chosen_representations import ChosenRepresentations
from apfed_attacks.features.contrastive_inversion import ContrastiveInversion
from apfed_attacks.features.decoder_extraction import DecoderExtraction
from apfed_attacks.features.hijack import FeatureSpaceHijack, ReversedHijack
from apfed_attacks.features.inverse_network import InverseNetwork
from apfed_attacks.features.isolation import Isolation
from apfed_attacks.features.representation_network import RepresentationNetwork
from apfed_attacks.features.sum_regression import SumRegression
from apfed_attacks.features.unpaired_inversion import UnpairedInversion
from apfed_attacks.features.vector_regression import VectorRegression
from apfed_attacks.features.vote_regression import VoteRegression
from apfed_attacks.interface import Attack
from apfed_attacks.labels.batch_labels import BatchLabels
from apfed_attacks.labels.gradient_direction import GradientDirection
from apfed_attacks.labels.gradient_norm import GradientNorm
from apfed_attacks.labels.label_gradients import LabelGradients
from apfed_attacks.labels.model_completion import ModelCompletion
from apfed_attacks.labels.pseudo_labels import PseudoLabels
from apfed_attacks.labels.semi_supervised import SemiSupervised
from apfed_attacks.labels.shown_labels import ShownLabels
from apfed_attacks.labels.spectral import Spectral
from apfed_attacks.labels.temporal import Temporal
from apfed_attacks.people.averaged_membership import AveragedMembership
from apfed_attacks.people.id_stuffing import IdStuffing
from apfed_attacks.people.membership import Membership

__all__ = ["ATTACKS"]

_ENTRIES: tuple[type[Attack], ...] = (
    # Labels, from what passives receive.
    ModelCompletion,
    SemiSupervised,
    Temporal,
    # Labels, from the gradients that passives receive in joint training.
    LabelGradients,
    GradientNorm,
    GradientDirection,
    BatchLabels,
    # Labels, from those that come with a request for votes.
    ShownLabels,
    # Labels, from the passives' own representations in joint training.
    Spectral,
    # Labels, from the common pseudo-labels of MMVFL and FedMV.
    PseudoLabels,
    # Features, from the representations that a victim released.
    InverseNetwork,
    UnpairedInversion,
    RepresentationNetwork,
    # The same, by a passive of APFed or the active of joint training that deviates
    # (apfed_attacks.live).
    ReversedHijack,
    FeatureSpaceHijack,
    # The passives' features, from the votes that the active opened.
    VoteRegression,
    # The passives' features, from the singular vectors that the active opened.
    VectorRegression,
    # The passives' features, from the sums that the active decoded.
    ContrastiveInversion,
    SumRegression,
    # The same, by an active that deviates (apfed_attacks.live).
    ChosenRepresentations,
    DecoderExtraction,
    Isolation,
    # Who trained the model, from its answers.
    Membership,
    # Who trained at another party, from the average of all parties' weights.
    AveragedMembership,
    # Which IDs a peer has, from the intersection (apfed_attacks.live.stuffing).
    IdStuffing,
)

ATTACKS: Mapping[str, type[Attack]] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
