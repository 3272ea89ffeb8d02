"""How APC-VFL's experiments cut their data, and which methods they compare.

Source: section 5 and Appendices A and B of the paper. All encoders, epochs, patience and Adam are
the defaults of `secure_apfed.settings.teaching.DistillationSettings`, which are the paper's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from secure_apfed.config import Config
from secure_apfed.data.catalogue import find_dataset
from secure_apfed.learning.encoder_quality import Score

__all__ = ["HELPED", "SCENARIOS", "USUAL", "Changes", "Part", "Scenario"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """How much of a scenario is measured.

    Attributes:
        features: numbers of the active's columns; aligned: numbers of aligned rows.
        helped: of `HELPED`, the first of which is compared with what the active does alone;
            those whose method there is not are left out.
    """

    features: tuple[int, ...]
    aligned: tuple[int, ...]
    seeds: int
    helped: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A data set as section 5 and Appendices A and B of the paper cut it.

    Attributes:
        columns: the active's, in the order in which they move to the passive.
        people: of the data set; rows: of the active, all with a label; test_fraction: of the
            people, which leaves that many for training.
        batch_size: of every training.
        scores: of a fold, each with what the paper calls it.
        tested: aligned rows that test where all parties predict.
        quick, full: the default part, and all.
    """

    dataset: str
    columns: tuple[str, ...]
    people: int
    rows: int
    test_fraction: float
    batch_size: int
    scores: Mapping[Score, str]
    tested: int
    quick: Part
    full: Part

    @property
    def every_column(self) -> list[str]:
        """Of all parties."""
        views = find_dataset(self.dataset).natural_views.values()
        return [column for view in views for column in view]

    @property
    def width(self) -> int:
        """How many columns all parties have."""
        return len(self.every_column)

    def config(
        self, features: int, method: str, changes: Mapping[str, Mapping[str, Any]]
    ) -> Config:
        """A run in which the active has the last so many of its columns.

        Args:
            features: how many.
            method: a key of METHODS.
            changes: of sections of the settings below.
        """
        own = self.columns[len(self.columns) - features :]
        others = [column for column in self.every_column if column not in own]
        settings: dict[str, Any] = {
            "name": f"apc-vfl-{self.dataset}".replace("_", "-"),
            "party_seeds": "shared_for_comparison",
            "method": method,
            "data": {
                "dataset": self.dataset, "columns": {"active": own, "passive-1": others},
                "limit": self.rows, "test_fraction": self.test_fraction, "split": "at_random",
            },
            "model": {"network": "selu", "hidden": [256], "representation": 256},
            "distilled": {"batch_size": self.batch_size},
            "guard": {"mechanism": "none"},
            "secure_sum": {"scheme": "plain"},
            "transcript": {"keep": "none"},
            "train": {"device": "cpu"},
        }  # fmt: skip
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
    "APC-VFL, lambda 0.1": ("apc_vfl", lambda scenario: {"distilled": {"weight": 0.1}}),
    "APC-VFL, lambda 10": ("apc_vfl", lambda scenario: {"distilled": {"weight": 10.0}}),
    "APC-VFL, absolute distance": ("apc_vfl", lambda scenario: {"distilled": {"loss": "mae"}}),
}
_FEATURES, _SEEDS = (5, 4, 3, 2), 5
_MANY = (10_000, 7_500, 5_000, 2_500, 750, 500, 250, 100)
_COMPARED = (USUAL, _VECTORS)
_SMALL = Part(features=(5, 2), aligned=(10_000, 2_500), seeds=2, helped=_COMPARED)
_LARGE = Part(features=_FEATURES, aligned=_MANY, seeds=_SEEDS, helped=_COMPARED)
_BREAST_CANCER = Part(
    features=_FEATURES, aligned=(250, 200, 150, 100), seeds=_SEEDS, helped=_COMPARED
)

SCENARIOS: Mapping[str, Scenario] = {
    "mimic_iii": Scenario(
        dataset="mimic_iii",
        columns=("NumCPTevents", "NumProcs", "Age", "NumCallouts", "NumDiagnosis"),
        people=58_976,
        rows=20_000,
        test_fraction=0.25,
        batch_size=128,
        scores={"accuracy": "micro F1", "f1_macro": "macro F1", "f1_weighted": "weighted F1"},
        tested=500,
        quick=_SMALL,
        full=_LARGE,
    ),
    "breast_cancer": Scenario(
        dataset="breast_cancer",
        columns=(
            "worst compactness", "concave points error", "smoothness error", "mean texture",
            "worst fractal dimension",
        ),
        people=569,
        rows=500,
        test_fraction=69 / 569,
        batch_size=8,
        scores={"accuracy": "accuracy"},
        tested=50,
        quick=_BREAST_CANCER,
        full=replace(_BREAST_CANCER, helped=tuple(HELPED)),
    ),
    "credit_card": Scenario(
        dataset="credit_card",
        # X3, X5, X7, X9 and X11 of UCI's description.
        columns=("EDUCATION", "AGE", "PAY_2", "PAY_4", "PAY_6"),
        people=30_000,
        rows=20_000,
        test_fraction=0.25,
        batch_size=128,
        scores={"f1": "F1"},
        tested=500,
        quick=_SMALL,
        full=_LARGE,
    ),
}  # fmt: skip
