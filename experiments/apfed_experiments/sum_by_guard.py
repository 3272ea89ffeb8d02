"""Sum by guard: what each reader of APFed reads with and without a secure sum and a guard.

A guard clips representations and adds noise to them. Four cells (sum in the clear or masked, guard
off or frozen noise) for APFed-R, APFed-C and a mix of both. The readers are the aggregator, the
active and a passive. Each value is the advantage of the best attack over its best baseline with the
same knowledge, with its interval over the seeds.
Where no attack ran the table says "not attacked". Everything is derived from one run's settings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pandas as pd

from apfed_attacks.headlines import Direction
from apfed_attacks.interface import NOT_ATTACKED
from apfed_experiments.columns import (
    ACCURACY_SHARE,
    EPSILON,
    Column,
    Table,
    describe_missing_attack,
    make_hidden_columns,
    make_visible_column,
)
from apfed_experiments.report.page import Part
from apfed_experiments.runner import Study
from apfed_experiments.study import Point, StudyMetrics, StudyRow, run_points
from apfed_experiments.summary import Row, Summary
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.methods import METHODS

OBJECTIVES_BY_LABEL: Mapping[str, tuple[str, ...]] = {
    "APFed-R": ("reconstruction",),
    "APFed-C": ("contrastive",),
    "mix": ("reconstruction", "contrastive"),
}
"""Objectives that passives take in turn, by label of the table's rows."""
SETTINGS_BY_SUM: Mapping[str, Mapping[str, Any]] = {
    "none": {"scheme": "plain", "masks": "none"},
    "masked": {"scheme": "plain", "masks": "pairwise"},
}
SETTINGS_BY_GUARD: Mapping[str, Mapping[str, Any]] = {
    "none": {"mechanism": "none"},
    "frozen, epsilon 1": {"mechanism": "frozen_gaussian", "epsilon": 1.0},
}
_REGRESSION_OPTIONS = {"shadow_rows": 30, "iterations": 40}
ATTACKS: tuple[Mapping[str, Any], ...] = (
    {"name": "contribution_regression", "options": _REGRESSION_OPTIONS},
    {"name": "gradient_regression", "options": _REGRESSION_OPTIONS},
    {"name": "gradient_projection", "options": _REGRESSION_OPTIONS},
    {"name": "contrastive_inversion", "options": _REGRESSION_OPTIONS},
    {"name": "inverse_network", "options": _REGRESSION_OPTIONS},
    {"name": "model_completion", "options": {"labels_per_class": 4, "iterations": 40}},
)
"""Features are read with 30 people known wholly, labels with four of each class."""
DIRECTION_BY_KEY: Mapping[str, Direction] = {
    "aggregator_features": Direction(reader="aggregator", target="features"),
    "active_features": Direction(reader="active", target="features"),
    "passive_features": Direction(reader="passive", target="features"),
    "passive_labels": Direction(reader="passive", target="labels"),
}
"""Directions of leaks (who reads whose what), by key for programs."""
_TITLE_BY_KEY: Mapping[str, str] = {
    "aggregator_features": "aggregator: features of a passive, R2",
    "active_features": "active: features of a passive, R2",
    "passive_features": "passive: features of the active, R2",
    "passive_labels": "passive: labels, balanced accuracy",
}
_INTERSECTION_KEYS = ("protocol", "dealer", "pairwise_overlaps")
_DEFAULT_WEIGHT = 10.0
_CLIP = 1.0

READING = (
    "Each figure is what the attack that gains most reads, and in brackets by how much that is "
    "above the best baseline that any attack of this reader has with the same knowledge: means, "
    "and the 95 % interval over the seeds. Features: R2 of the worst read passive (or "
    "of the active), by a reader that knows 30 people wholly. Labels: balanced accuracy, four "
    "labels of each class known. The aggregator is told whose row each number is of. An interval "
    "around 0 means that these attacks found nothing, not that there is nothing; the highest of "
    "several means is shown, which is a little optimistic for the attack. "
    f'"{NOT_ATTACKED}": no attack ran. Epsilon: of one row\'s releases of the active, encoder held '
    "fixed, at delta 1e-5; it bounds nothing of what passives contribute."
)


COLUMNS = (
    Column(name="objectives", title="objectives"),
    Column(name="sum", title="secure sum"),
    Column(name="guard", title="guard"),
    ACCURACY_SHARE,
    EPSILON,
    *(make_visible_column(key, title) for key, title in _TITLE_BY_KEY.items()),
    *make_hidden_columns("readings"),
)


def make_study_rows(base: Config) -> list[StudyRow]:
    """Return a row of the table for each choice of objectives, sum and guard, on the data of
    `base`.

    Passives take the objectives in turn, with the lambda (weight of their losses) of `base`.
    """
    weight = base.passives["default"].weight if "default" in base.passives else _DEFAULT_WEIGHT
    passives = [table.name for table in load_data(base.data, seed=0).passives]
    study_rows = []
    for label, sum_name, guard_name in product(
        OBJECTIVES_BY_LABEL, SETTINGS_BY_SUM, SETTINGS_BY_GUARD
    ):
        passive_settings = {
            name: {"objective": {"name": objective}, "weight": weight}
            for name, objective in zip(passives, cycle(OBJECTIVES_BY_LABEL[label]), strict=False)
        }
        guard = SETTINGS_BY_GUARD[guard_name]
        has_guard = guard["mechanism"] != "none"
        settings = {
            "method": "apfed",
            "passives": passive_settings,
            "secure_sum": {**SETTINGS_BY_SUM[sum_name], "clip": _CLIP},
            "guard": {**guard, "clip": _CLIP} if has_guard else guard,
            "transcript": {"keep": "all"},
            "attacks": list(ATTACKS),
        }
        sum_key = "masked" if sum_name == "masked" else "clear"
        guard_key = "guarded" if has_guard else "open"
        study_rows.append(
            StudyRow(
                key=f"{label.lower()}-{sum_key}-{guard_key}",
                label=label,
                settings=settings,
                cells={"objectives": label, "sum": sum_name, "guard": guard_name},
            )
        )
    return study_rows


def make_points(base: Config, folder: Path) -> list[Point]:
    """Return one point (settings that are run for each seed) for each row of the table.

    Runs are stored in a subfolder named after the base.
    """
    settings = base.model_dump(mode="json", exclude_defaults=True)
    # The protocol of the alignment changes nothing that these attacks read: the default is used.
    alignment = settings.pop("alignment", {})
    kept_settings = {key: alignment[key] for key in alignment if key not in _INTERSECTION_KEYS}
    if kept_settings:
        settings["alignment"] = kept_settings
    return [
        Point(
            config=study_row.build_config(settings, name=f"{base.name}-{study_row.key}"),
            folder=folder / base.name,
            study_row=study_row,
        )
        for study_row in make_study_rows(base)
    ]


def compare_points(points: Sequence[Point], results: StudyMetrics, *, seed_count: int) -> Table:
    """Return the table with a row for each point (settings that are run for each seed).

    `seed_count`: number of seeds.
    """
    # Advantages of different attacks are then over the same baseline, so they can be compared.
    results = replace(results, table=unify_baselines(results.table))
    rows: list[Row] = []
    for point in points:
        summary = Summary.from_rows(results.select_rows(point))
        rows.append(
            {
                **point.study_row.cells,
                "accuracy": summary.accuracy,
                "epsilon": summary.find_epsilon(METHODS[point.study_row.method].public_facts),
                **{key: _describe_reading(point.config, summary, key) for key in DIRECTION_BY_KEY},
                "readings": {key: _export_reading(summary, key) for key in DIRECTION_BY_KEY},
            }
        )
    data = points[0].config.data
    title = f"{data.dataset}, {seed_count} seed{'' if seed_count == 1 else 's'}: sum by guard"
    return Table(COLUMNS, rows, title)


def unify_baselines(table: pd.DataFrame) -> pd.DataFrame:
    """Return the metrics with one baseline for all attacks by one reader on one victim: their best.

    An attack chooses its baseline by the rows that it knows. It may choose one that is bad on the
    others, and its advantage would then seem larger than that of an attack that reads as much.

    `table`: metrics of runs (`Results.table`), in which attacks are the rows with an advantage.
    """
    table = table.copy()
    is_attack = table["advantage"].notna()
    # The name of an attack's setting ends with " by READER".
    reader = table["name"].str.partition(" by ")[2]
    group_keys = [table["point"], table["seed"], table["target"], reader]
    best_baseline = table["baseline"].where(is_attack).groupby(group_keys).transform("max")
    table["baseline"] = table["baseline"].where(~is_attack, best_baseline)
    table["advantage"] = table["score"].where(is_attack) - best_baseline
    return table


def _describe_reading(config: Config, summary: Summary, key: str) -> str:
    """Return score and advantage of a reader's best attack as text, or why there is none.

    `key`: key of `DIRECTION_BY_KEY`, which names the leak direction (who reads whose what).
    """
    kind = DIRECTION_BY_KEY[key].kind
    leak = summary.leakage_by_direction.get(kind)
    if leak is None:
        return describe_missing_attack(config, kind)
    return f"{leak.score:.2f} ({leak.clipped_advantage.format_text(number_format='+.2f')})"


def _export_reading(summary: Summary, key: str) -> Any:
    """Return a reader's best attack as plain values: its name, score, baseline and advantage.

    `key`: key of `DIRECTION_BY_KEY`, which names the leak direction (who reads whose what). Returns
    None if no attack ran.
    """
    leak = summary.leakage_by_direction.get(DIRECTION_BY_KEY[key].kind)
    return None if leak is None else leak.as_json()


def declare_study(base: Config, folder: Path, *, seeds: Sequence[int]) -> Study[StudyMetrics]:
    """Return the study of all combinations of objectives, sum and guard.

    Data, network and training are those of `base`; its method, passives, sum, guard and attacks are
    replaced. `base` must have at least two passives, as masks need. `folder`: folder of the study.
    `seeds`: seeds of the runs.
    """
    points = make_points(base, folder)

    def compare(results: StudyMetrics) -> list[Part]:
        """Return the one part of the study's page: the table."""
        table = compare_points(points, results, seed_count=len(seeds))
        return [Part(name=f"{base.name}-sum-by-guard", table=table)]

    return Study(
        title=f"{base.name}: sum by guard",
        reading_guide=READING,
        folder=folder,
        measure=partial(run_points, points, seeds),
        compare=compare,
    )
