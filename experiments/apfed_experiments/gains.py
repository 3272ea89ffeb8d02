"""Where help pays: each method against the best that the active does alone, paired by seed.

`secure-apfed study gains` runs what is missing. A case names method, data, labelled rows
and epsilon. The best solo baseline of a case is chosen by held-out labels of the active, never by
test rows; beside the gain over it stand the gain over the baseline that the test rows would have
chosen, which nobody could know, and that over the same without help: the student taught by its
prior alone, or APFed's own network and training at lambda 0.
"""

import fnmatch
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apfed_experiments.columns import markdown, p_text, write_text
from apfed_experiments.drawing import COLOURS, OTHER, drawing
from apfed_experiments.solo import taught_alone
from apfed_experiments.study import OnDone, Point, Study
from apfed_experiments.summary import Gain, holm
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.files import to_json
from secure_apfed.measures import ACCURACY, MEASURES, Measure
from secure_apfed.runs.outcome import Outcome, Privacy

__all__ = [
    "CASES", "EPSILONS", "HEADER", "QUICK", "QUICK_SEEDS", "READING", "SEEDS", "GainCase",
    "GainRow", "cases_like", "header_of", "run_gains", "stored_of",
]  # fmt: skip

READING = (
    "Gain: accuracy (or another measure, if asked for) minus that of the best solo baseline on the "
    "same seeds, turned so that more is better; mean and 95 % interval over the re-splits of one "
    "table (corrected resampled t; of test rows that a set brings along, Student's). p: adjusted "
    "for the number of cases (Holm). The baseline is chosen by cross-validation over the active's "
    "labelled rows, so test rows only measure. Beside it: the gain over the baseline that the test "
    "rows would have chosen; and over no help, which is the student of votes taught by its prior "
    "alone, or APFed's own network and training at lambda 0, with what that reaches. Epsilon: of "
    "one person's vote at one passive, with the labeller held fixed, at delta 1e-5 (randomised "
    "answers: 0)."
)

SEEDS, QUICK_SEEDS = 10, 3
EPSILONS = (0.25, 1.0, 2.0, 4.0, 8.0)
_ALONE, _NO_HELP, _LAMBDA_0 = "votes", "no-help", "lambda-0"
QUICK = ("votes/digits/n50", "votes-randomised/digits/n50/eps4", "votes/wine/n9")

_DATA: Mapping[str, dict[str, Any]] = {
    "digits": {"dataset": "digits", "views": 4},
    "breast-cancer-errors": {"dataset": "breast_cancer", "active_view": 2},
    "wine": {"dataset": "wine"},
    "handwritten-fou": {"dataset": "handwritten", "active_view": 1},
    "handwritten-kar": {"dataset": "handwritten", "active_view": 3},
    "handwritten-zer": {"dataset": "handwritten", "active_view": 5},
    "handwritten-mor": {"dataset": "handwritten_six", "active_view": 6},
    "mnist-3-1": {"dataset": "mnist", "views": 3, "limit": 3000},
    "fashion-mnist-3-1": {"dataset": "fashion_mnist", "views": 3, "limit": 3000},
}
_STUDENT = {"model": {"network": "random_features"}, "train": {"epochs": 1}}
_NETWORK = {
    "model": {"hidden": [128], "representation": 64, "projection": 64, "dropout": 0.0},
    "train": {
        "epochs": 250,
        "batch_size": 128,
        "learning_rate": 0.02,
        "evaluate_every": 250,
        "spread_labels": True,
    },
    "secure_sum": {"scheme": "plain", "clip": None},
    "passives": {"default": {"weight": 10.0}},
}
_JOINTLY = {"epochs": 60, "batch_size": 128, "learning_rate": 0.1, "evaluate_every": 60}
_METHODS: Mapping[str, dict[str, Any]] = {
    "votes": {"method": "votes", **_STUDENT},
    "votes-randomised": {"method": "votes_randomised", **_STUDENT},
    "votes-moment": {"method": "votes_moment", **_STUDENT},
    "votes-encrypted": {"method": "votes_encrypted", **_STUDENT},
    # Whose votes a person without a label moves in no way but by the own one.
    "votes-moment-logistic": {
        "method": {"name": "votes_moment", "labeller": "logistic"},
        **_STUDENT,
    },
    "votes-randomised-logistic": {
        "method": {"name": "votes_randomised", "labeller": "logistic"},
        **_STUDENT,
    },
    "joint_teacher": {
        "method": {"name": "joint_teacher", "labels": "spreading"},
        **_STUDENT,
        "train": _JOINTLY,
    },
    "apc_vfl": {
        "method": "apc_vfl",
        "model": {"network": "selu", "hidden": [256], "representation": 256},
    },
    "apfed_c": {"method": "apfed_c", **_NETWORK},
    "apfed_r": {"method": "apfed_r", **_NETWORK},
    _NO_HELP: {"method": "votes", **_STUDENT},
    _LAMBDA_0: {"method": "apfed_c", **_NETWORK, "passives": {"default": {"weight": 0.0}}},
}


class _NoHelpPoint(Point):
    """The student of votes, which nobody casts: taught by its prior alone."""

    def played(self, config: Config) -> Outcome:
        began, data = time.monotonic(), self.data(config.seed)
        scored = taught_alone(config, data).scored(data.test_rows)
        return Outcome(
            method=config.method.name,
            accuracy={_NO_HELP: ACCURACY.of(scored)},
            measure=config.measure,
            measures={_NO_HELP: {config.measure: MEASURES[config.measure].of(scored)}},
            wire_bytes=0,
            privacy=Privacy(epsilon_x=0.0, epsilon_y=0.0, epsilon_model=math.inf),
            seconds=time.monotonic() - began,
        )


@dataclass(frozen=True, kw_only=True)
class GainCase:
    """One line of the table.

    Attributes:
        method: a key of the methods here; data: of the data sets.
        labelled: rows with a label; None: all.
        epsilon: of a person's vote at one passive; None: no noise.
    """

    method: str
    data: str
    labelled: int | None
    epsilon: float | None = None

    @property
    def name(self) -> str:
        """Such as "votes-randomised/digits/n50/eps4"."""
        rows = "all" if self.labelled is None else f"n{self.labelled}"
        noise = [] if self.epsilon is None else [f"eps{self.epsilon:g}"]
        return "/".join([self.method, self.data, rows, *noise])

    @property
    def alone(self) -> Config:
        """With what the solo baselines are measured, for all methods on the same rows."""
        return replace(self, method=_ALONE, epsilon=None).config

    @property
    def control(self) -> "GainCase":
        """The same without help, which cases on the same rows share."""
        method = _LAMBDA_0 if self.config.method.sums_gradients else _NO_HELP
        return replace(self, method=method, epsilon=None)

    def point(self, folder: Path, measure: Measure) -> Point:
        """Its runs, judged by this measure."""
        kind = _NoHelpPoint if self.method == _NO_HELP else Point
        return kind(
            config=_judged(self.config, measure), folder=folder, figures_only=True,
            alone=_judged(self.alone, measure),
        )  # fmt: skip

    @property
    def config(self) -> Config:
        """Of its runs."""
        usual: dict[str, Any] = {
            "name": self.name.replace("/", "-"),
            "secure_sum": {"scheme": "plain", "masks": "pairwise"},
            "guard": {"mechanism": "none", "noise": "reproducible_insecure"},
            "transcript": {"keep": "none"},
        }
        settings = {**usual, **_METHODS[self.method]}
        settings["data"] = _DATA[self.data] | {"labelled": self.labelled}
        if self.epsilon is not None:
            said = settings["method"]
            named = {"name": said} if isinstance(said, str) else said
            settings["method"] = {**named, "epsilon": self.epsilon}
        return Config.model_validate(settings)


def _cases() -> dict[str, GainCase]:
    wanted: list[tuple[str, str, int | None, float | None]] = [
        *(("votes", "digits", n, None) for n in (20, 50, 200, None)),
        *(("votes", "handwritten-zer", n, None) for n in (20, 50, 200, None)),
        *(("votes", f"handwritten-{view}", 50, None) for view in ("mor", "fou", "kar")),
        ("votes", "handwritten-mor", None, None),
        ("votes", "mnist-3-1", 50, None),
        ("votes", "fashion-mnist-3-1", 50, None),
        ("votes", "breast-cancer-errors", 20, None),
        ("votes", "wine", 9, None),
        *(
            (method, data, 20, epsilon)
            for method in ("votes-randomised", "votes-moment")
            for data in ("handwritten-zer", "digits")
            for epsilon in EPSILONS
        ),
        ("votes-randomised", "digits", 50, 4.0),
        ("votes-encrypted", "digits", 50, None),
        *(("votes-moment-logistic", "digits", 20, epsilon) for epsilon in (1.0, 4.0)),
        ("votes-randomised-logistic", "digits", 50, 4.0),
        *(
            (method, data, n, None)
            for method in ("joint_teacher", "apc_vfl")
            for data in ("digits", "handwritten-zer")
            for n in (20, 50)
        ),
        *((method, "handwritten-zer", n, None)
          for method in ("apfed_c", "apfed_r") for n in (50, None)),
    ]  # fmt: skip
    cases = [
        GainCase(method=method, data=data, labelled=labelled, epsilon=epsilon)
        for method, data, labelled, epsilon in wanted
    ]
    return {case.name: case for case in cases}


CASES: Mapping[str, GainCase] = _cases()


def cases_like(patterns: Sequence[str]) -> list[GainCase]:
    """The cases whose names match one of these globs.

    Raises:
        ConfigError: one matches none.
    """
    found: dict[str, GainCase] = {}
    for pattern in patterns:
        names = fnmatch.filter(CASES, pattern)
        if not names:
            raise ConfigError(f"no case is like {pattern!r}; there are {', '.join(CASES)}")
        found |= {name: CASES[name] for name in names}
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class GainRow:
    """What a case found.

    Attributes:
        case, seeds: which, over how many.
        gain: see `Gain`; None where the data are not here, which `missing` says.
        epsilon: the largest that a person's vote cost a passive; inf without noise.
        wire_bytes: of one run, mean.
        p_holm: of the gain, adjusted for all cases of the table.
    """

    case: GainCase
    seeds: int
    gain: Gain | None
    epsilon: float = math.inf
    wire_bytes: float = 0.0
    missing: str = ""
    p_holm: float = math.nan

    def as_json(self) -> dict[str, Any]:
        """Plain values; measures and gains in hundredths."""
        told: dict[str, Any] = {"case": self.case.name, "seeds": self.seeds}
        if self.gain is None:
            return {**told, "missing": self.missing}
        gain, chosen, hindsight = self.gain, self.gain.over_chosen, self.gain.over_hindsight
        without = gain.over_control
        assert without is not None
        assert gain.control is not None
        return {
            **told,
            "solo": 100 * gain.solo,
            "measure": gain.measure,
            "accuracy" if gain.measure == ACCURACY.name else "reached": 100 * gain.reached,
            "gain": 100 * chosen.mean,
            "low": 100 * chosen.low,
            "high": 100 * chosen.high,
            "p_holm": self.p_holm,
            "epsilon": self.epsilon,
            "baseline": gain.baseline,
            "hindsight": gain.hindsight,
            "gain_hindsight": 100 * hindsight.mean,
            "low_hindsight": 100 * hindsight.low,
            "high_hindsight": 100 * hindsight.high,
            "control": self.case.control.name,
            "no_help": 100 * gain.control,
            "gain_no_help": 100 * without.mean,
            "low_no_help": 100 * without.low,
            "high_no_help": 100 * without.high,
            "wire_bytes": self.wire_bytes,
        }

    def cells(self) -> tuple[str, ...]:
        """Texts in the order of `HEADER`."""
        if self.gain is None:
            return (self.case.name, *[""] * 6, self.missing)
        gain, without = self.gain, self.gain.over_control
        assert without is not None
        assert gain.control is not None
        return (
            self.case.name,
            f"{100 * gain.solo:.1f} ({gain.baseline})",
            f"{100 * gain.reached:.1f}",
            gain.over_chosen.text(scale=100, form="+.1f"),
            p_text(self.p_holm),
            f"{gain.over_hindsight.text(scale=100, form='+.1f')} ({gain.hindsight})",
            f"{without.text(scale=100, form='+.1f')} ({100 * gain.control:.1f})",
            "∞" if math.isinf(self.epsilon) else f"{self.epsilon:.3g}",
            gain.sentence.partition(":")[0],
        )


HEADER = (
    "case", "best solo %", "accuracy %", "gain, points", "p, Holm",
    "over the best by test rows", "over no help", "epsilon of a vote", "",
)  # fmt: skip


def header_of(measure: Measure) -> tuple[str, ...]:
    """What stands above the columns where runs are judged by this measure."""
    if measure is ACCURACY:
        return HEADER
    case, _, _, _, *others = HEADER
    told = f"{measure.title} x 100"
    return (case, f"best solo, {told}", told, "gain, hundredths", *others)


def run_gains(
    folder: Path, cases: Sequence[GainCase], *, seeds: int, jobs: int,
    on_done: OnDone = lambda done, total: None, measure: Measure = ACCURACY,
    store: Path | None = None,
) -> list[GainRow]:  # fmt: skip
    """Run what is missing; return and write a row for each case.

    Args:
        folder: of the runs; made where missing.
        cases: what to run.
        seeds: runs of each.
        jobs: processes; each uses one thread.
        on_done: called after each run.
        measure: what runs are judged by.
        store: file of what `secure-apfed plan` reads, or None.

    Raises:
        CheckpointError: the folder holds runs that were judged by another measure.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    absent = {case.name: _absent(case) for case in cases}
    points = {
        one.name: one.point(folder, measure)
        for case in cases
        if not absent[case.name]
        for one in (case, case.control)
    }
    results = Study(points=list(points.values()), seeds=range(seeds)).run(
        jobs=jobs, on_done=on_done, solo=True
    )
    rows = []
    for case in cases:
        if absent[case.name]:
            rows.append(GainRow(case=case, seeds=0, gain=None, missing=absent[case.name]))
            continue
        found = results.of(points[case.name])
        rows.append(
            GainRow(
                case=case,
                seeds=seeds,
                gain=Gain.of(found, results.of(points[case.control.name])),
                epsilon=float(found["epsilon_passives"].max()),
                wire_bytes=float(found.drop_duplicates("seed")["wire_bytes"].mean()),
            )
        )
    adjusted = holm([None if row.gain is None else row.gain.over_chosen for row in rows], seeds)
    rows = [replace(row, p_holm=p) for row, p in zip(rows, adjusted, strict=True)]
    write_text(folder / "gains.json", to_json({"rows": [row.as_json() for row in rows]}))
    write_text(folder / "gains.md", markdown(header_of(measure), [row.cells() for row in rows]))
    _draw(folder / "gains.png", rows)
    if store is not None:
        write_text(store, to_json(stored_of(rows), indent=1))
    return rows


def stored_of(rows: Sequence[GainRow]) -> list[dict[str, Any]]:
    """What `secure-apfed plan` reads of these rows: those with the default labeller."""
    stored = []
    for row in rows:
        if row.gain is None or "labeller" in row.case.config.method.model_fields_set:
            continue
        data, over = row.case.config.data, row.gain.over_chosen
        stored.append({
            "method": row.case.config.method.name, "dataset": data.dataset,
            "active_view": data.active_view, "labelled": row.case.labelled,
            "epsilon": row.case.epsilon, "seeds": row.seeds, "baseline": row.gain.baseline,
            "gain": 100 * over.mean, "low": 100 * over.low, "high": 100 * over.high,
            "shared": row.gain.shared,
        })  # fmt: skip
    return stored


def _judged(config: Config, measure: Measure) -> Config:
    return config.model_copy(update={"measure": measure.name})


def _absent(case: GainCase) -> str:
    """Why the data of a case cannot be had here; empty where they can."""
    try:
        load_data(case.config.data, seed=0)
    except DataError as error:
        return str(error)
    return ""


def _draw(path: Path, rows: Sequence[GainRow]) -> None:
    """Gain against epsilon for each method and data set that has several of both."""
    lines: dict[str, list[GainRow]] = {}
    for row in rows:
        if row.gain is not None and row.case.epsilon is not None:
            name = f"{row.case.method}, {row.case.data}, n {row.case.labelled}"
            lines.setdefault(name, []).append(row)
    lines = {name: of_line for name, of_line in lines.items() if len(of_line) > 1}
    if not lines:
        return
    with drawing(path, (7.5, 4.2)) as figure:
        axes = figure.subplots()
        for colour, (name, of_line) in zip(COLOURS, lines.items(), strict=False):
            gains = [row.gain.over_chosen for row in of_line if row.gain]
            arms = [gain.arms(100) for gain in gains]
            axes.errorbar(
                [row.case.epsilon or math.inf for row in of_line],
                [100 * gain.mean for gain in gains],
                yerr=[[arm[0][0] for arm in arms], [arm[1][0] for arm in arms]],
                fmt="o-", color=colour, label=name, capsize=2.5,
            )  # fmt: skip
        axes.axhline(0, color=OTHER, linestyle=":", linewidth=1.2)
        axes.set(
            xscale="log", xlabel="epsilon of one person's vote at one passive, labeller held fixed",
            ylabel="hundredths over the best solo baseline",
        )  # fmt: skip
        axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axes.minorticks_off()
        axes.legend(fontsize=8)
