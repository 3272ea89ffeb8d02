"""The papers' partitions by name, as fields of `DataSettings`.

Where a paper leaves something open, its preset says what was chosen. Figures from these names are
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
from secure_apfed.settings import did_you_mean
from secure_apfed.settings.data import BUILT_IN_ACTIVE


@dataclass(frozen=True)
class Preset:
    """A partition of a paper: its description, and fields of `DataSettings`; others are open."""

    about: str
    settings: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class _ApcVfl:
    """A data set of APC-VFL's Appendix A.

    `rows`: people of the active; `columns`: its five columns, those that it gives away first in
    front; `aligned`, `fewer`: numbers of aligned people that were tried, those of `fewer` only
    where not all are aligned; `tested`: number of test rows where all are.
    """

    rows: int
    columns: tuple[str, ...]
    aligned: tuple[int, ...]
    fewer: tuple[int, ...] = ()
    tested: int = 500


# Appendix A calls the columns of the credit cards X3, X5, X7, X9 and X11: of all 23, from X1.
_APC_VFL = {
    "breast_cancer": _ApcVfl(
        500,
        (
            "worst compactness",
            "concave points error",
            "smoothness error",
            "mean texture",
            "worst fractal dimension",
        ),
        (250, 200, 150, 100),
        tested=50,
    ),
    "credit_card": _ApcVfl(
        20_000,
        ("EDUCATION", "AGE", "PAY_2", "PAY_4", "PAY_6"),
        (10_000, 7500, 5000, 2500),
        fewer=(100,),
    ),
}


def find_preset(name: str) -> dict[str, Any]:
    """Return the fields of `DataSettings` that make up a paper's partition.

    Raises:
        ConfigError: there is no such partition; names the nearest.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"preset: {name!r} is unknown; {did_you_mean(name, PRESETS)} "
            "`secure-apfed data presets` lists all"
        )
    return dict(PRESETS[name].settings)


def _iter_presets() -> Iterator[tuple[str, Preset]]:
    """Yield presets with fewer columns at the active, in the order of the Appendix.

    The others were moved to the passive. (The Appendix's sentence names the two parties the other
    way round.) Sex, education and marriage of the credit cards are one-hot encoded here, as
    everywhere in this library. The paper tests by ten folds of the active's rows; here a tenth
    tests, and seeds draw others. Test rows are the active's own and unaligned there; here passives
    hold them, too, for what all parties predict together. Where all rows are aligned, the paper's
    comparison with SplitNN, so many people are all that there are, and 500 (or 50) of them test.
    """
    for dataset, printed in _APC_VFL.items():
        all_columns = list(chain(*find_dataset(dataset).natural_views.values()))
        for size in (5, 4, 3, 2):
            active = printed.columns[5 - size :]
            others = tuple(column for column in all_columns if column not in active)
            columns = {BUILT_IN_ACTIVE: active, "passive-1": others}
            for aligned in (*printed.aligned, *printed.fewer):
                about = f"{size} columns at the active, {aligned} of {printed.rows} people aligned"
                settings = {
                    "dataset": dataset,
                    "rows": printed.rows,
                    "test_fraction": 0.1,
                    "aligned": aligned,
                    "columns": columns,
                }
                yield f"apc-vfl/{dataset}/{size}/{aligned}", Preset(about, settings)
            if size == 5:
                for rows in printed.aligned:
                    settings = {
                        "dataset": dataset,
                        "rows": rows,
                        "test_fraction": printed.tested / rows,
                        "split": "at_random",
                        "columns": columns,
                    }
                    about = f"{rows} people, all aligned, of whom {printed.tested} test"
                    yield f"apc-vfl/{dataset}/all-aligned/{rows}", Preset(about, settings)


# Views in Table 1's order, whose first party has the labels. The paper speaks of five folds, and
# its Table 1 of 120 and 40 instances a class, which are four.
_VIEWS = {"dataset": "handwritten", "views": ("pix", "fou", "fac", "zer", "kar")}
_MMVFL = Preset("160 people a class", {**_VIEWS, "rows_per_class": 160, "test_fraction": 0.25})
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {**dict(_iter_presets()), "mmvfl/handwritten": _MMVFL}
)
