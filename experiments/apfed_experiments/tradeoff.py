"""Trade-off studies: accuracy against leakage over defences and their strengths.

One YAML file describes a study, whose results are a leaderboard and a picture for each leak
direction (who reads whose what).
"""

import json
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from adjustText import adjust_text
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from pydantic import Field, field_validator, model_validator

from apfed_attacks.interface import NOT_ATTACKED
from apfed_attacks.table import expand_choices
from apfed_experiments.columns import (
    P_HOLM,
    Column,
    Table,
    add_gain_p_values,
    describe_missing_attack,
    format_epsilon,
    make_formatter,
    make_hidden_columns,
    make_percent_formatter,
    make_points_formatter,
    make_visible_column,
    write_text,
)
from apfed_experiments.drawing import (
    ATTACK_COLOUR,
    COLOURS,
    OTHER_COLOUR,
    Picture,
    estimate_text_inches,
    open_figure,
)
from apfed_experiments.front import find_front
from apfed_experiments.report.page import Part
from apfed_experiments.runner import Study
from apfed_experiments.shown import JOINT_TRAINING
from apfed_experiments.study import OnDone, Point, StudyMetrics, Trial, list_trials, run_points
from apfed_experiments.summary import Interval, Leakage, Row, Summary
from apfed_experiments.verdict import ComparedRow, describe_comparison
from secure_apfed.base.files import make_private
from secure_apfed.base.names import RunName
from secure_apfed.baselines import find_baseline
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings, load_config_text, load_settings_text
from secure_apfed.config.plain_yaml import load_text, parse_yaml_value
from secure_apfed.errors import ApfedError, CheckpointError, ConfigError
from secure_apfed.measures.table import ACCURACY
from secure_apfed.settings import Settings
from secure_apfed.settings.promises import describe_epsilon, spell_epsilon

Reference: TypeAlias = Literal["single_view", "centralised", "tvfl"]
DCS_ACCURACY_WEIGHT = 0.5
"""Weight of accuracy against leakage in DCS."""
_REFERENCE_DASHES = ((0, (1, 2)), (0, (6, 2)), (0, (6, 2, 1, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_WIDTH_INCHES = 8.0
_PLOT_INCHES = 4.6
_LINE_INCHES = 0.2
_MARKER_INCHES = 0.6
_LEGEND_LINE_LENGTH = 90
"""Largest number of characters in a line of a legend's text: so many fit beside its marker."""
READING = (
    "Each point is one defence at one strength: mean and 95 % interval over the seeds (corrected "
    "resampled t). Up is accurate, left is private. Advantage: an attack by one adversary minus "
    "its best baseline with the same knowledge, those that gain most by their mean over the seeds, "
    "which is a little optimistic for the attack. One whose interval holds 0 means that these "
    "attacks found nothing, not that there is nothing; where nothing leaks it is as often below 0 "
    "as above. The legend names the epsilon of what leaves a party, with the releases of a row, "
    "and that of labels. In the table ε_x is of one row's T releases with the encoder held fixed; "
    "where nobody sends representations, of all that a person adds to votes or sums of one "
    "passive. Lines: the active alone is the floor; one table of all features, "
    "which nobody holds, is what the same network reaches with them; TVFL needs all parties to "
    "predict. DCS is defined in docs/studies.md."
)
_REFERENCE_SETTINGS: Mapping[Reference, tuple[str, Mapping[str, Any], bool]] = {
    # Label; what changes in the undefended run; whether one table has all features.
    "single_view": ("SingleVL (the active alone)", {"method": "single_view"}, False),
    "centralised": (
        "centralised (one table of all features)",
        # It has everybody's features of all the active's people.
        {"method": "single_view", "data.overlap": 1.0},
        True,
    ),
    "tvfl": ("TVFL (all parties predict)", {"method": "tvfl"}, False),
}


class Defence(Settings):
    """A defence, at one or several strengths.

    Attributes:
        name: title for people; unique in the study.
        set: settings of the run by dotted path, as in {guard: {mechanism: none}}.
        knob: dotted path of the setting that varies the strength; null: there is one strength.
        values: values of the knob, in the order of the curve.
        undefended: whether the others are compared with this one; true for exactly one.
    """

    name: str = Field(min_length=1, max_length=40)
    set: dict[str, Any] = {}
    knob: str | None = None
    values: tuple[Any, ...] = ()
    undefended: bool = False

    @model_validator(mode="after")
    def _check_knob(self) -> Self:
        """Check that a knob and its values come together."""
        if (self.knob is None) != (not self.values):
            raise ValueError(
                f"defence {self.name!r}: knob and values go together; give both, or neither for a "
                "defence of one strength"
            )
        return self


class TradeOff(Settings):
    """A trade-off study.

    Attributes:
        name: name of the study, and of its folder.
        base: the run that defences change: a file beside the study's, or the name of one that
            ships with `experiments`.
        set: settings that every run of the study changes in the base, by dotted path.
        seeds: runs of each point, with seeds 0, 1, ...
        references: what bounds the comparison, drawn as lines: the active alone, one table of
            all features (both trained as SingleVL), TVFL with all parties predicting.
        defences: what is compared.
    """

    name: RunName = Field(max_length=64)
    base: str
    set: dict[str, Any] = {}
    seeds: int = Field(5, ge=1)
    references: tuple[Reference, ...] = tuple(_REFERENCE_SETTINGS)
    defences: tuple[Defence, ...] = Field(min_length=1)

    @field_validator("defences")
    @classmethod
    def _check_defences(cls, defences: tuple[Defence, ...]) -> tuple[Defence, ...]:
        """Check that defences have different names and that one is the undefended run."""
        names = [defence.name for defence in defences]
        if len(set(names)) != len(names):
            raise ValueError(f"defences are all different, got {', '.join(names)}")
        undefended = [defence.name for defence in defences if defence.undefended]
        if len(undefended) != 1:
            raise ValueError(
                f"exactly one defence says undefended: true, got {', '.join(undefended) or 'none'}"
            )
        return defences


@dataclass(frozen=True, kw_only=True)
class DefencePoint(Point):
    """A defence at one strength.

    Attributes:
        defence: name of the defence.
        strength: name and value of the setting that varies the strength, such as "epsilon 1.0";
            empty: the defence has one strength.
        is_undefended: whether the other points are compared with this one.
        is_reference: whether the point is no defence but a reference, drawn as a line.
    """

    defence: str
    strength: str = ""
    is_undefended: bool = False
    is_reference: bool = False

    @property
    def label(self) -> str:
        """Return the defence with its strength."""
        return f"{self.defence}, {self.strength}" if self.strength else self.defence


def load_tradeoff(path: Path) -> TradeOff:
    """Return the study in a YAML file, with the text of its base run in place of its name.

    Raises ConfigError: a file cannot be read, or a setting is wrong.
    """
    tradeoff = load_settings_text(TradeOff, load_text(path), source=str(path))
    base_path = path.parent / tradeoff.base
    shipped_path = files("apfed_experiments") / "configs" / tradeoff.base
    if not base_path.is_file() and not shipped_path.is_file():
        raise ConfigError(
            f"{path}: base: there is no {tradeoff.base!r} beside the study or among the configs "
            "that "
            "ship with this package"
        )
    base_text = (
        load_text(base_path) if base_path.is_file() else shipped_path.read_text(encoding="utf-8")
    )
    return tradeoff.model_copy(update={"base": base_text})


def make_tradeoff(config: Config) -> TradeOff:
    """Return the study that a run's section `tradeoff` describes, with that run as its base.

    Raises ConfigError: a setting is wrong, or sets a name or a base, which are the run's own.
    """
    if misplaced_keys := {"name", "base"} & set(config.tradeoff):
        raise ConfigError(
            f"tradeoff.{min(misplaced_keys)}: the study of a run has the run's; leave it out"
        )
    base = dump_settings(config.model_copy(update={"tradeoff": {}}))
    settings = {"name": f"{config.name}-tradeoff"[:64], "base": "", **config.tradeoff}
    tradeoff = load_settings_text(TradeOff, json.dumps(settings), source="tradeoff")
    return tradeoff.model_copy(update={"base": base})


def make_points(tradeoff: TradeOff, folder: Path) -> list[DefencePoint]:
    """Return all points of a study, references first, after checking their settings and attacks.

    A point is a defence at one strength, or a reference.

    `folder`: folder of the study, below which each run has its own.

    Raises ConfigError: a change that no run accepts, an unknown attack, or two points whose names
    give one folder.
    """
    points = list(_iter_points(tradeoff, folder))
    label_by_name: dict[str, str] = {}
    for point in points:
        if point.name in label_by_name:
            raise ConfigError(
                f"study {tradeoff.name}: {label_by_name[point.name]!r} and {point.label!r} would "
                "share "
                f"the folder {point.make_trial(0).name}; give each strength once, and defences "
                "names that differ in their letters"
            )
        label_by_name[point.name] = point.label
        try:  # called for its exception: unknown attacks are refused before anything runs
            expand_choices(point.config.attacks)
        except ConfigError as error:
            raise ConfigError(f"study {tradeoff.name}, {point.label}: {error}") from None
    return points


def _iter_points(tradeoff: TradeOff, folder: Path) -> Iterator[DefencePoint]:
    """Yield the points of references, then those of defences at each strength.

    References are what defences are compared with, such as the active alone.
    """
    undefended_defence = next(defence for defence in tradeoff.defences if defence.undefended)
    reference_training = _find_reference_training(tradeoff)
    for key in dict.fromkeys(tradeoff.references):
        label, changes, is_centralised = _REFERENCE_SETTINGS[key]
        config = _make_config(
            tradeoff,
            label,
            {**undefended_defence.set, **reference_training, **changes, "attacks": []},
        )
        yield DefencePoint(
            config=config,
            folder=folder,
            is_centralised=is_centralised,
            defence=label,
            is_reference=True,
        )
    for defence in tradeoff.defences:
        for value in defence.values or (None,):  # without a knob there is one point
            changes = dict(defence.set)
            strength = ""
            if defence.knob is not None:
                changes[defence.knob] = value
            if defence.knob is not None and value is not None:
                strength = f"{defence.knob.rpartition('.')[2]} {value}"
            config = _make_config(tradeoff, f"{defence.name} {strength}".strip(), changes)
            yield DefencePoint(
                config=config,
                folder=folder,
                defence=defence.name,
                strength=strength,
                is_undefended=defence.undefended,
            )


def _find_reference_training(tradeoff: TradeOff) -> dict[str, Any]:
    """Return the settings by which references are trained, by dotted path; empty: the base's own.

    Where the base's networks train without labels (`train.labels: after`), those of references are
    trained by labels, since references have no exchange.
    """
    base = load_config_text(tradeoff.base, source="base", own=True)
    if not base.train.is_exchange_label_free:
        return {}
    training = {"labels": "joint", **JOINT_TRAINING}
    return {f"train.{name}": value for name, value in training.items()}


def _make_config(tradeoff: TradeOff, label: str, changes: Mapping[str, Any]) -> Config:
    """Return the configuration of one point: the base with the study's and this point's changes.

    `label`: name of the point. `changes`: settings by dotted path.

    Raises ConfigError, which names the point: a setting is wrong.
    """
    file_name = "".join(
        letter if letter.isascii() and letter.isalnum() else "-" for letter in label.lower()
    )
    name = f"{tradeoff.name}-{file_name}"
    # The length of names is limited, so the name is checked with the longest suffix that a run of
    # this point gets.
    settings = {**tradeoff.set, **changes, "name": f"{name}-seed{tradeoff.seeds - 1}"}
    overrides = [f"{path}={json.dumps(value)}" for path, value in settings.items()]
    try:
        config = load_config_text(tradeoff.base, source="base", overrides=overrides, own=True)
    except ConfigError as error:
        # The settings are of the study, not of a command line.
        message = str(error).replace("--set: ", "")
        raise ConfigError(f"study {tradeoff.name}, {label}: {message}") from None
    if config.measure != ACCURACY.name:
        raise ConfigError(
            f"study {tradeoff.name}, {label}: measure: a trade-off is of accuracy, got "
            f"{config.measure}; leave it out"
        )
    return config.model_copy(update={"name": name})


def compute_dcs(
    *, attack_score: float, ideal_score: float, accuracy: float, undefended_accuracy: float
) -> float:
    """Return the defence capability score, 1 / (1 + sqrt((1 - b) dAP^2 + b dMP^2)), b = BETA.

    dAP = AP - AP* and dMP = MP* - MP; negative differences count as 0 (Zou et al., 2023, VFLAIR).

    Args:
        attack_score: AP, the attack's score under this defence; a negative R^2 counts as 0.
        ideal_score: AP*, the score that a perfect defence would leave: 0 in VFLAIR's code
            (`dcs_vflair`), the best baseline with the same knowledge in ours (`dcs_baseline`).
        accuracy: MP, the model's accuracy under this defence, 0 to 1.
        undefended_accuracy: MP*, its accuracy without a defence, 0 to 1.
    """
    leak = max(0.0, max(attack_score, 0.0) - max(ideal_score, 0.0))
    loss = max(0.0, undefended_accuracy - accuracy)
    return 1 / (1 + math.sqrt((1 - DCS_ACCURACY_WEIGHT) * leak**2 + DCS_ACCURACY_WEIGHT * loss**2))


def make_row(point: DefencePoint, summary: Summary, undefended_accuracy: Interval) -> Row:
    """Return the row of a point: a defence at one strength, or a reference.

    `undefended_accuracy`: accuracy of the undefended point. The defence capability score
    (`compute_dcs`) is the lowest over the leak directions; None for references, and where no attack
    applies.
    """
    dcs_by_name: dict[str, float | None] = {"dcs_vflair": None, "dcs_baseline": None}
    if summary.leakage_by_direction and not point.is_reference:
        for name in dcs_by_name:
            dcs_by_name[name] = min(  # the direction in which most is read decides
                compute_dcs(
                    attack_score=leak.score,
                    ideal_score=leak.baseline if name == "dcs_baseline" else 0.0,
                    accuracy=summary.accuracy.mean,
                    undefended_accuracy=undefended_accuracy.mean,
                )
                for leak in summary.leakage_by_direction.values()
            )
    return {
        "defence": point.defence,
        "strength": point.strength,
        "undefended": point.is_undefended,
        "reference": point.is_reference,
        "seeds": summary.seed_count,
        "accuracy": summary.accuracy,
        "gain": summary.gain,
        "p_holm": math.nan,
        "epsilon_x": summary.epsilon_x,
        "epsilon_y": summary.epsilon_y,
        "epsilon_passives": summary.epsilon_passives,
        "releases": summary.release_count,
        "leakage": dict(summary.leakage_by_direction),
        **dcs_by_name,
        "wire_bytes": summary.wire_bytes,
        "label": point.label,
        "point": point,
        "epsilon": summary.find_epsilon(point.config.method),
    }


def select_front(rows: Iterable[Row], direction: str) -> list[Row]:
    """Return the rows of the Pareto front of accuracy and advantage of attacks, the least leaking
    first.

    `direction`: leak direction (who reads whose what), a key of a row's `leakage`.
    """
    candidates = [row for row in rows if direction in row["leakage"] and not row["reference"]]
    return find_front(
        candidates,
        get_leakage=lambda row: row["leakage"][direction].advantage.mean,
        get_gain=lambda row: row["accuracy"].mean,
    )


_HIDDEN_COLUMNS = make_hidden_columns(
    "defence",
    "strength",
    "undefended",
    "reference",
    "seeds",
    "accuracy",
    "gain",
    "p_holm",
    "epsilon_x",
    "epsilon_y",
    "epsilon_passives",
    "releases",
    "leakage",
    "dcs_vflair",
    "dcs_baseline",
)


def _make_leak_column(
    direction: str, title: str, format_leakage: Callable[[Leakage], str], missing_text: str
) -> Column:
    """Return the column of the best attack in one leak direction (who reads whose what).

    `direction`: the direction. `format_leakage`: function that returns the text of a leakage.
    `missing_text`: text of a cell where no attack ran in this direction; references have "-".
    """
    return make_visible_column(
        "leakage",
        title,
        lambda leaks: format_leakage(leaks[direction]) if direction in leaks else missing_text,
        missing_text="-",
    )


_DEFENCE_COLUMN = make_visible_column("label", "defence")
_EPSILON_X_COLUMN = make_visible_column("epsilon", "ε_x", format_epsilon)
_RELEASES_COLUMN = make_visible_column("releases", "T")
_DCS_COLUMN = make_visible_column(
    "dcs_baseline", "dcs_baseline", make_formatter(".3f"), missing_text="-"
)


@dataclass(frozen=True)
class Leaderboard:
    """The leaderboard of a finished study: references, then defences, the highest DCS first.

    DCS is the defence capability score `dcs_baseline` (`compute_dcs`). Points with a failed trial
    are left out.
    """

    rows: Sequence[Row]

    @classmethod
    def from_results(cls, points: Sequence[DefencePoint], results: StudyMetrics) -> "Leaderboard":
        """Return the leaderboard of all points (defences at one strength, and references).

        Points with a failed trial are left out. `results`: metrics of the points' runs.
        """
        failed_points = {failure.point for failure in results.failures}
        points_with_summaries = [
            (point, Summary.from_rows(results.select_rows(point)))
            for point in points
            if point.name not in failed_points
        ]
        undefended_accuracy = next(
            summary.accuracy for point, summary in points_with_summaries if point.is_undefended
        )
        rows = [
            make_row(point, summary, undefended_accuracy)
            for point, summary in points_with_summaries
        ]
        add_gain_p_values(rows, points_with_summaries[0][1].seed_count)
        rows.sort(key=lambda row: (not row["reference"], -(row["dcs_baseline"] or 0.0)))
        return cls(rows)

    @property
    def directions(self) -> tuple[str, ...]:
        """Return the leak directions (who reads whose what) in which some attack ran, each once."""
        all_targets = (target for row in self.rows for target in sorted(row["leakage"]))
        return tuple(dict.fromkeys(all_targets))

    @property
    def table(self) -> Table:
        """Return the leaderboard with all columns."""
        leaks = [
            _make_leak_column(
                target,
                f"advantage, {target}",
                lambda leak: (
                    f"{leak.clipped_advantage.format_text(number_format='.3f')} {leak.name}"
                ),
                NOT_ATTACKED,
            )
            for target in self.directions
        ]
        format_points = make_points_formatter()
        columns = (
            _DEFENCE_COLUMN,
            make_visible_column("accuracy", "accuracy %", make_percent_formatter()),
            make_visible_column(
                "gain",
                "gain, points",
                lambda row_gain: format_points(row_gain.gain_over_chosen),
                missing_text="-",
            ),
            replace(P_HOLM, export_keys=()),
            *leaks,
            _EPSILON_X_COLUMN,
            make_visible_column("epsilon_y", "ε_y", spell_epsilon),
            _RELEASES_COLUMN,
            _DCS_COLUMN,
            make_visible_column(
                "dcs_vflair", "dcs_vflair", make_formatter(".3f"), missing_text="-"
            ),
        )
        return Table((*_HIDDEN_COLUMNS, *columns), self.rows, "Leaderboard")

    @property
    def narrow_table(self) -> Table:
        """Return a table of means, narrow enough for a terminal."""
        leaks = (
            _make_leak_column(
                target, target, lambda leak: f"{leak.advantage.mean:+.3f}", NOT_ATTACKED
            )
            for target in self.directions
        )
        accuracy = make_visible_column(
            "accuracy", "accuracy %", lambda interval: f"{100 * interval.mean:.1f}"
        )
        return Table(
            (_DEFENCE_COLUMN, accuracy, *leaks, _EPSILON_X_COLUMN, _RELEASES_COLUMN, _DCS_COLUMN),
            self.rows,
            "Accuracy, and the worst attack's advantage",
        )


def _write_picture(board: Leaderboard, direction: str, folder: Path) -> Picture:
    """Draw accuracy against leakage in one direction, write the picture into the folder and return
    it.

    `direction`: leak direction (who reads whose what).
    """
    path = folder / f"pareto-{direction.replace(' ', '-')}.png"
    with open_figure(path, (_WIDTH_INCHES, _PLOT_INCHES)) as figure:
        draw_board(figure, board, direction)
    return Picture(
        path=path,
        title=f"Accuracy against leakage: {direction}",
        caption=f"Leakage where {direction}: means with 95 % intervals. The thin line joins "
        "the points that no other beats in both. Grey lines: accuracy of the active alone, of one "
        "table of all features, and of TVFL. Dotted: the best local model, below which nothing "
        "helped.",
    )


def describe_protection(row: Row) -> str:
    """Return the epsilons of a point (a defence at one strength) in words, for a legend.

    They bound what is sent of rows, with the number of releases of a row, and what is sent of
    labels.
    """
    epsilon_name = row["point"].config.method.epsilon_name
    rows_text = describe_epsilon(epsilon_name, row["epsilon"] or None)  # 0: nothing is sent
    labels_text = describe_epsilon("epsilon_y", row["epsilon_y"])
    releases_text = ""
    if row["releases"]:
        releases_noun = "release" if row["releases"] == 1 else "releases"
        releases_text = f", {row['releases']:,} {releases_noun} of a row"
    return f"{rows_text}{releases_text}; {labels_text}"


def draw_board(
    figure: Figure,
    board: Leaderboard,
    direction: str,
    *,
    describe_guarantee: Callable[[Row], str] = describe_protection,
) -> list[Text]:
    """Draw the leaderboard: accuracy against leakage in one direction, references as lines, a
    legend.

    `direction`: leak direction (who reads whose what). `describe_guarantee`: function that returns
    the text of a row's guarantee for the legend. Returns the numbers beside the marks, as
    matplotlib's texts.
    """
    reference_rows = [row for row in board.rows if row["reference"]]
    rows = [row for row in board.rows if direction in row["leakage"] and not row["reference"]]
    axes = figure.subplots()
    number_texts = _draw_points(axes, rows, direction, describe_guarantee)
    front = select_front(rows, direction)
    if len(front) > 1:
        axes.plot(
            [row["leakage"][direction].advantage.mean for row in front],
            [100 * row["accuracy"].mean for row in front],
            color=ATTACK_COLOUR,
            linewidth=1,
            alpha=0.6,
            zorder=1,
            label="Pareto front",
        )
    axes.margins(0.14)
    _draw_references(axes, reference_rows)
    # All points have the same local models. Points below the best of them gain nothing by help.
    if rows and (gain := rows[0]["gain"]):
        label = f"best local model ({find_baseline(gain.baseline).title})"
        axes.axhline(
            100 * gain.local_score, color=COLOURS[0], linewidth=1.3, linestyle=":", label=label
        )
    metric = rows[0]["leakage"][direction].metric.replace("_", " ")  # all rows have the same
    axes.axvline(0, color=OTHER_COLOUR, linewidth=1)
    axes.set(
        title=f"Accuracy against leakage: {direction}",
        xlabel=f"worst attack's advantage, {metric} over its baseline",
        ylabel="test accuracy, per cent",
    )
    _add_legend(figure, axes)
    # Move the numbers off the marks; positions of texts are known only after a layout.
    figure.draw_without_rendering()
    adjust_text(
        number_texts,
        ax=axes,
        expand=(2.4, 1.9),
        iter_lim=500,
        arrowprops={"arrowstyle": "-", "color": OTHER_COLOUR, "lw": 0.6},
    )
    return number_texts


def _draw_references(axes: Axes, reference_rows: Sequence[Row]) -> None:
    """Draw each reference as a horizontal line at its accuracy.

    A line far above or below the points would flatten the picture; the legend names it instead.
    """
    low, high = axes.get_ylim()
    allowed_distance = (high - low) / 2
    for row, dashes in zip(reference_rows, _REFERENCE_DASHES, strict=False):
        percent = 100 * row["accuracy"].mean
        name = row["defence"]
        if low - allowed_distance <= percent <= high + allowed_distance:
            axes.axhline(percent, color=OTHER_COLOUR, linewidth=1.3, linestyle=dashes, label=name)
        else:
            side = "above" if percent > high else "below"
            axes.plot([], [], " ", label=f"{side}: {name}, {percent:.1f} %")


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Put the legend below the plot, in as many columns as fit, and make room for it."""
    handles, labels = axes.get_legend_handles_labels()
    labels = [textwrap.fill(label, _LEGEND_LINE_LENGTH) for label in labels]
    column_count = 2 if 2 * (_MARKER_INCHES + estimate_text_inches(labels)) < _WIDTH_INCHES else 1
    line_count = sum(label.count("\n") + 1 for label in labels)
    legend_height = _LINE_INCHES * (math.ceil(line_count / column_count) + 1)
    figure.set_size_inches(_WIDTH_INCHES, _PLOT_INCHES + legend_height)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=column_count,
        frameon=False,
        fontsize=8.5,
        labelspacing=0.7,
    )


def _draw_points(
    axes: Axes, rows: Sequence[Row], direction: str, describe_guarantee: Callable[[Row], str]
) -> list[Text]:
    """Draw each row as a mark with its intervals, and return the numbers beside the marks.

    The legend repeats the numbers with the rows' labels.

    `direction`: leak direction (who reads whose what). `describe_guarantee`: function that returns
    the text of a row's guarantee for the legend.
    """
    defences = dict.fromkeys(row["defence"] for row in rows)
    # The strengths of one defence share colour and marker.
    style_by_defence = dict(zip(defences, cycle(zip(COLOURS, _MARKERS, strict=True)), strict=False))
    number_texts: list[Text] = []
    for number, row in enumerate(rows, start=1):
        colour, marker = style_by_defence[row["defence"]]
        advantage = row["leakage"][direction].advantage
        accuracy = row["accuracy"]
        axes.errorbar(
            advantage.mean,
            100 * accuracy.mean,
            xerr=advantage.compute_error_bars(),
            yerr=accuracy.compute_error_bars(100, minimum=0.0, maximum=1.0),
            fmt=marker,
            color=colour,
            markersize=7,
            elinewidth=1,
            capsize=2,
            label=f"{number}  {row['label']} ({describe_guarantee(row)})",
        )
        number_texts.append(
            axes.text(
                advantage.mean,
                100 * accuracy.mean,
                str(number),
                fontsize=9,
                weight="bold",
                color=colour,
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
            )
        )
    return number_texts


class TradeOffError(ApfedError):
    """A study without a result: the undefended point, which others are compared with, failed.

    Finished trials are kept.
    """


def declare_study(tradeoff: TradeOff, folder: Path) -> Study[StudyMetrics]:
    """Return the study of a trade-off, which compares defences at several strengths.

    A defence at one strength is left out if one of its runs fails.

    Raises ConfigError: no run accepts a defence. The study's `measure` raises CheckpointError,
    before it runs anything, if the folder holds something else, and TradeOffError if the undefended
    point failed.
    """
    points = make_points(tradeoff, folder)
    deltas = sorted({point.config.delta for point in points})

    def compare(results: StudyMetrics) -> list[Part]:
        """Return the leaderboard, with a picture for each leak direction, and the verdict."""
        board = Leaderboard.from_results(points, results)
        return [
            Part(
                name="leaderboard",
                table=board.table,
                narrow_table=board.narrow_table,
                pictures=[_write_picture(board, target, folder) for target in board.directions],
                verdict_lines=list(describe_comparison(_list_compared_rows(board))),
            )
        ]

    return Study(
        title=f"Trade-off {tradeoff.name}",
        reading_guide=f"{READING} ε_x holds at delta "
        f"{', '.join(f'{delta:g}' for delta in deltas)}.",
        folder=folder,
        measure=partial(_measure_points, tradeoff, folder, points),
        compare=compare,
        unit_name="trials",
        reported_trials=[point.make_trial(0) for point in points if not point.is_centralised],
    )


def _measure_points(
    tradeoff: TradeOff,
    folder: Path,
    points: Sequence[DefencePoint],
    *,
    jobs: int,
    on_done: OnDone,
) -> StudyMetrics:
    """Run the trials that the folder lacks, and return the metrics of all.

    `jobs`: number of runs at a time. `on_done`: function that is called after each run.

    Raises CheckpointError: the folder holds something else. Raises TradeOffError: the undefended
    point failed.
    """
    seeds = range(tradeoff.seeds)
    _prepare_folder(folder, tradeoff, list_trials(points, seeds))
    results = run_points(
        points,
        seeds,
        jobs=jobs,
        on_done=on_done,
        should_keep_going=True,
        should_measure_baselines=True,
    )
    _require_undefended(tradeoff, points, results)
    return results


def _require_undefended(
    tradeoff: TradeOff, points: Sequence[DefencePoint], results: StudyMetrics
) -> None:
    """Raise TradeOffError if a trial of the undefended point failed."""
    undefended_point = next(point for point in points if point.is_undefended)
    failures = [failure for failure in results.failures if failure.point == undefended_point.name]
    if failures:
        raise TradeOffError(
            f"study {tradeoff.name}: {undefended_point.label!r}, which the others are compared "
            "with, "
            f"failed in {len(failures)} of {tradeoff.seeds} seeds. {failures[0].trial}: "
            f"{failures[0].message}"
        )


def _list_compared_rows(board: Leaderboard) -> list[ComparedRow]:
    """Return the defences of the leaderboard in the form that the verdict (a summary) reads."""
    return [
        ComparedRow(
            name=row["label"],
            epsilon=row["epsilon"],
            wire_bytes=row["wire_bytes"],
            gain=None if row["gain"] is None else row["gain"].gain_over_chosen,
            p_holm=row.get("p_holm", math.nan),
            leak_by_direction={
                kind: leak.clipped_advantage for kind, leak in row["leakage"].items()
            },
            reason_by_direction={
                kind: describe_missing_attack(row["point"].config, kind)
                for kind in board.directions
                if kind not in row["leakage"]
            },
        )
        for row in board.rows
        if not row["reference"]
    ]


def _prepare_folder(folder: Path, tradeoff: TradeOff, trials: Sequence[Trial]) -> None:
    """Create the study's folder, which only its owner may enter, and store the study's settings
    there.

    `trials`: all trials of the study.

    Raises CheckpointError: the folder holds another study, a run, or a trial with other settings.
    """
    settings_path = folder / "study.yaml"
    if settings_path.is_file():
        try:  # only the name is read, since the rest may be of an earlier version
            stored_name = str(
                parse_yaml_value(load_text(settings_path), source=str(settings_path))["name"]
            )
        except (ConfigError, TypeError, KeyError):
            raise CheckpointError(
                f"{settings_path} names no study; remove it, and the study goes on"
            ) from None
        if stored_name != tradeoff.name:
            raise CheckpointError(
                f"{folder} holds the study {stored_name!r}, this one is {tradeoff.name!r}; choose "
                "another --output"
            )
    elif (folder / "config.yaml").exists():
        raise CheckpointError(f"{folder} holds a run, not a study; choose another --output")
    for trial in trials:  # called for the exception only
        trial.refuse_other_settings()
    make_private(folder)
    write_text(settings_path, dump_settings(tradeoff))
