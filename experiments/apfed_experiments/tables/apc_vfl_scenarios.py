"""What APC-VFL's experiments measure of each data set, and which methods they compare.

Source: section 5 and Appendices A and B of the paper. Who holds which columns and people says
`apfed_experiments.presets.preset`; encoders, epochs, patience and Adam are the defaults of
`secure_apfed.learning.autoencoder.DistillationSettings`, which are the paper's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from apfed_experiments.presets import preset
from secure_apfed.config import Config
from secure_apfed.learning.encoder_quality import Score

__all__ = ["HELPED", "SCENARIOS", "USUAL", "Changes", "Part", "Scenario"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """How much of a scenario is measured.

    Attributes:
        features: numbers of the active's columns; aligned: numbers of aligned rows.
        helped: of `HELPED`, the first of which is compared with all others.
    """

    features: tuple[int, ...]
    aligned: tuple[int, ...]
    seeds: int
    helped: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One data set.

    Attributes:
        rows: of the active, all with a label; test_fraction: of all people, which leaves as many.
        batch_size: of every training.
        scores: of a fold, each with what the paper calls it.
        quick, full: the default part, and all.
    """

    dataset: str
    rows: int
    test_fraction: float
    batch_size: int
    scores: Mapping[Score, str]
    quick: Part
    full: Part

    def data(self, features: int, aligned: int | None) -> dict[str, Any]:
        """So many columns at the active; the passive knows so many of its people, or all.

        Every row of the active is cross-validated, so that people beside them test what all parties
        predict, which the paper does not measure here.
        """
        cut = preset(f"apc-vfl/{self.dataset}/{features}/{aligned or self.full.aligned[0]}")
        kept = {"dataset": cut["dataset"], "columns": cut["columns"], "aligned": aligned}
        mine = {"limit": self.rows, "test_fraction": self.test_fraction, "split": "at_random"}
        return kept | mine

    @property
    def width(self) -> int:
        """How many columns all parties have."""
        return sum(map(len, self.data(self.full.features[0], None)["columns"].values()))

    def config(
        self, data: Mapping[str, Any], method: str, changes: Mapping[str, Mapping[str, Any]]
    ) -> Config:
        """A run.

        Args:
            data: of it.
            method: a key of METHODS.
            changes: of sections of the settings below.
        """
        settings: dict[str, Any] = {
            "name": f"apc-vfl-{self.dataset}".replace("_", "-"),
            "party_seeds": "shared_for_comparison",
            "method": {"name": method, "batch_size": self.batch_size},
            "data": data,
            "model": {"network": "selu", "hidden": [256], "representation": 256},
            "guard": {"mechanism": "none"},
            "secure_sum": {"scheme": "plain"},
            "transcript": {"keep": "none"},
            "train": {"device": "cpu"},
        }
        merged = {key: {**settings[key], **changed} for key, changed in changes.items()}
        return Config.model_validate(settings | merged)


Changes: TypeAlias = Callable[[Scenario], Mapping[str, Mapping[str, Any]]]
"""What a method needs of the settings of a scenario, by section."""

USUAL = "APC-VFL"
_VECTORS = "VFedTrans"
# Label -> method, and the settings in which it differs from the scenario's. A method is one line
# here if its encoder turns the active's columns into what a classifier reads.
HELPED: Mapping[str, tuple[str, Changes]] = {
    USUAL: ("apc_vfl", lambda scenario: {}),
    # As many singular vectors as all parties have columns (section 6.1).
    _VECTORS: (
        "vfedtrans",
        lambda scenario: {"model": {"network": "enriched", "representation": scenario.width}},
    ),
    "APC-VFL, lambda 0.1": ("apc_vfl", lambda scenario: {"method": {"weight": 0.1}}),
    "APC-VFL, lambda 10": ("apc_vfl", lambda scenario: {"method": {"weight": 10.0}}),
    "APC-VFL, absolute distance": ("apc_vfl", lambda scenario: {"method": {"loss": "mae"}}),
}
_FEATURES, _SEEDS, _COMPARED = (5, 4, 3, 2), 5, (USUAL, _VECTORS)
_MANY, _FEW = (10_000, 7500, 5000, 2500), (750, 500, 250, 100)
_SMALL = Part(features=(5, 2), aligned=(10_000, 2500), seeds=2, helped=_COMPARED)
_LARGE = Part(features=_FEATURES, aligned=(*_MANY, *_FEW), seeds=_SEEDS, helped=_COMPARED)
_BREAST_CANCER = Part(
    features=_FEATURES, aligned=(250, 200, 150, 100), seeds=_SEEDS, helped=_COMPARED
)

SCENARIOS: Mapping[str, Scenario] = {
    "mimic_iii": Scenario(
        dataset="mimic_iii",
        rows=20_000,
        test_fraction=0.25,
        batch_size=128,
        scores={"accuracy": "micro F1", "f1_macro": "macro F1", "f1_weighted": "weighted F1"},
        quick=_SMALL,
        full=_LARGE,
    ),
    "breast_cancer": Scenario(
        dataset="breast_cancer",
        rows=500,
        test_fraction=69 / 569,
        batch_size=8,
        scores={"accuracy": "accuracy"},
        quick=_BREAST_CANCER,
        full=replace(_BREAST_CANCER, helped=tuple(HELPED)),
    ),
    "credit_card": Scenario(
        dataset="credit_card",
        rows=20_000,
        test_fraction=0.25,
        batch_size=128,
        scores={"f1": "F1"},
        quick=_SMALL,
        full=replace(_LARGE, aligned=(*_MANY, 100)),
    ),
}
