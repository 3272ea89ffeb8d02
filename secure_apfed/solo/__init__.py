"""What the active can do alone with few labels. A new baseline is one class and one line here.

Passives' help is measured against the best of these, not against the run's own network only: with
few labels and many unlabelled rows the best baseline is often one that uses the unlabelled rows.
"""

from collections.abc import Mapping
from types import MappingProxyType

from secure_apfed.solo.classical import (
    GradientBoosting,
    Logistic,
    Ridge,
    SelfTraining,
    Spreading,
    SpreadingStudent,
)
from secure_apfed.solo.interface import Baseline, Predictor, SoloTask
from secure_apfed.solo.networks import Autoencoder, MixMatch, Network

__all__ = ["BASELINES", "Baseline", "Predictor", "SoloTask"]

_ALL: tuple[Baseline, ...] = (
    MixMatch(),
    SpreadingStudent(),
    Spreading(),
    Ridge(),
    Logistic(),
    SelfTraining(),
    Autoencoder(),
    GradientBoosting(),
    Network(),
)

BASELINES: Mapping[str, Baseline] = MappingProxyType({baseline.name: baseline for baseline in _ALL})
"""In the order in which equals are preferred."""
