"""The papers' partitions by name, as fields of `DataSettings`.

Where a paper leaves something open, its preset says what was chosen. Metrics from these names are
of the paper's partition, and of people drawn by the seed, which no paper lists.

Sources: APC-VFL, section 5 and Appendix A; MMVFL, section 6.1 and Table 1.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any

from secure_apfed.data.catalogue import find_dataset
from secure_apfed.errors import ConfigError
from secure_apfed.settings import suggest_name
from secure_apfed.settings.data import BUILT_IN_ACTIVE_NAME


@dataclass(frozen=True)
class Preset:
    """A paper's partition: a description, and those fields of `DataSettings` that it sets."""

    description: str
    settings: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class _ApcVflDataset:
    """A data set of APC-VFL's Appendix A.

    Attributes:
        row_count: number of the active's people.
        columns: the active's five columns; partitions with fewer drop the first ones.
        aligned_counts: numbers of aligned people that the paper tries.
        further_aligned_counts: further numbers of aligned people, which are not tried where all are
            aligned.
        test_row_count: number of test rows where all people are aligned.
    """

    row_count: int
    columns: tuple[str, ...]
    aligned_counts: tuple[int, ...]
    further_aligned_counts: tuple[int, ...] = ()
    test_row_count: int = 500


# Appendix A calls the columns of the credit cards X3, X5, X7, X9 and X11: of all 23, from X1.
_APC_VFL_DATASETS = {
    "breast_cancer": _ApcVflDataset(
        500,
        (
            "worst compactness",
            "concave points error",
            "smoothness error",
            "mean texture",
            "worst fractal dimension",
        ),
        (250, 200, 150, 100),
        test_row_count=50,
    ),
    "credit_card": _ApcVflDataset(
        20_000,
        ("EDUCATION", "AGE", "PAY_2", "PAY_4", "PAY_6"),
        (10_000, 7500, 5000, 2500),
        further_aligned_counts=(100,),
    ),
}


def find_preset(name: str) -> dict[str, Any]:
    """Return the fields of `DataSettings` of the partition with this name.

    Raises ConfigError: no partition has this name; the message names the nearest.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"preset: {name!r} is unknown; {suggest_name(name, PRESETS)} "
            "`secure-apfed data presets` lists all"
        )
    return dict(PRESETS[name].settings)


def _iter_presets() -> Iterator[tuple[str, Preset]]:
    """Yield APC-VFL's partitions by name, in the order of the Appendix.

    The active has five to two columns, the passive all others. (The Appendix's sentence names the
    two parties the other way round.) In the partitions "all-aligned", of the paper's comparison
    with SplitNN, all people are aligned, and 500 (or 50) of them test.

    These deviate from the paper: sex, education and marriage of the credit cards are one-hot
    encoded, as everywhere in this library. A tenth of the rows, drawn by the seed, tests in place
    of ten folds. Passives also hold the test rows, for joint prediction.
    """
    for dataset, paper in _APC_VFL_DATASETS.items():
        all_columns = list(chain(*find_dataset(dataset).natural_views.values()))
        for active_column_count in (5, 4, 3, 2):
            active_columns = paper.columns[5 - active_column_count :]
            passive_columns = tuple(
                column for column in all_columns if column not in active_columns
            )
            columns = {BUILT_IN_ACTIVE_NAME: active_columns, "passive-1": passive_columns}
            for aligned_count in (*paper.aligned_counts, *paper.further_aligned_counts):
                description = (
                    f"{active_column_count} columns at the active, {aligned_count} of "
                    f"{paper.row_count} people aligned"
                )
                settings = {
                    "dataset": dataset,
                    "rows": paper.row_count,
                    "test_fraction": 0.1,
                    "aligned": aligned_count,
                    "columns": columns,
                }
                yield (
                    f"apc-vfl/{dataset}/{active_column_count}/{aligned_count}",
                    Preset(description, settings),
                )
            if (
                active_column_count == 5
            ):  # the paper's comparison with SplitNN uses all five columns
                for row_count in paper.aligned_counts:
                    settings = {
                        "dataset": dataset,
                        "rows": row_count,
                        "test_fraction": paper.test_row_count / row_count,
                        "split": "at_random",
                        "columns": columns,
                    }
                    description = (
                        f"{row_count} people, all aligned, of whom {paper.test_row_count} test"
                    )
                    yield (
                        f"apc-vfl/{dataset}/all-aligned/{row_count}",
                        Preset(description, settings),
                    )


# Views in Table 1's order, whose first party has the labels. The paper speaks of five folds, and
# its Table 1 of 120 and 40 instances a class, which are four.
_MMVFL_VIEWS = {"dataset": "handwritten", "views": ("pix", "fou", "fac", "zer", "kar")}
_MMVFL_PRESET = Preset(
    "160 people a class", {**_MMVFL_VIEWS, "rows_per_class": 160, "test_fraction": 0.25}
)
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {**dict(_iter_presets()), "mmvfl/handwritten": _MMVFL_PRESET}
)
