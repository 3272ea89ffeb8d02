"""Attacks: what an adversary can do with what it saw. One file and one line below for each.

`attacks.run.mount` runs the configured ones on a finished run. How to add one:
docs/add-an-attack.md.
"""

from collections.abc import Mapping
from types import MappingProxyType

from attacks.batch_labels import BatchLabels
from attacks.chosen_representations import ChosenRepresentations
from attacks.contrastive_inversion import ContrastiveInversion
from attacks.decoder_extraction import DecoderExtraction
from attacks.gradient_direction import GradientDirection
from attacks.gradient_norm import GradientNorm
from attacks.hijack import FeatureSpaceHijack
from attacks.id_stuffing import IdStuffing
from attacks.interface import Attack
from attacks.inverse_network import InverseNetwork
from attacks.isolation import Isolation
from attacks.label_gradients import LabelGradients
from attacks.membership import Membership
from attacks.model_completion import ModelCompletion
from attacks.representation_network import RepresentationNetwork
from attacks.reversed_hijack import ReversedHijack
from attacks.semi_supervised import SemiSupervised
from attacks.spectral import Spectral
from attacks.temporal import Temporal
from attacks.unpaired_inversion import UnpairedInversion

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
    # Labels, from the passives' own representations in joint training.
    Spectral,
    # Pseudo-labels of MMVFL and FedMV (Z_k by argmax or matching, then a few labels): here, once
    # those methods exist.
    # Features, from the representations that a victim released.
    InverseNetwork,
    UnpairedInversion,
    RepresentationNetwork,
    # Who trained the model, from its answers.
    Membership,
    # The same, by a passive that deviates while all train (attacks.live).
    ReversedHijack,
    # The same, of a passive by the active of joint training that deviates (attacks.live_joint).
    FeatureSpaceHijack,
    # The passives' features, from the sums that the active decoded.
    ContrastiveInversion,
    # The same, by an active that deviates: these are played in live runs (attacks.live).
    ChosenRepresentations,
    DecoderExtraction,
    Isolation,
    # Which IDs a peer has, from the intersection (attacks.stuffing).
    IdStuffing,
)

ATTACKS: Mapping[str, type[Attack]] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
