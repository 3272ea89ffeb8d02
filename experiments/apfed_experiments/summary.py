"""Summaries of seeds for lines of tables: means with the one kind of interval, and worst leaks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from scipy.stats import t

from secure_apfed.data import DATASETS
from secure_apfed.measures.table import ACCURACY, MEASURES
from secure_apfed.settings.data import DataSettings
from secure_apfed.settings.method import MethodSettings

Row: TypeAlias = dict[str, Any]
"""A line of a table: numbers, texts, intervals or None by column."""

_CONFIDENCE = 0.95


def estimate_seed_correlation(data: DataSettings | None, *, train: int, test: int) -> float:
    """Return the correlation that two seeds' figures are taken to have, 0 to 1.

    Seeds split one table of people again. Nadeau and Bengio (2003, Inference for the generalization
    error, section 3) give such re-splits the share of test rows. Where a set has its own test rows,
    seeds draw no others, and the interval speaks of these rows alone: 0; without `data` test rows
    were drawn again.

    `train`: number of training rows.
    """
    if data and data.dataset in DATASETS and DATASETS[data.dataset].split:
        return 0.0
    return test / (test + train)


def estimate_covariance(influences: "Sequence[pd.Series[float]]") -> float:
    """Return how far two seeds' figures vary together by the people who test both of them.

    Each series gives by person how much that test row moves the figure of one seed
    (`secure_apfed.measures.intervals.compute_influence`). A figure varies by their mean; so two
    covary by the products of whom they share, summed, over both numbers of rows. The result is the
    mean over all pairs of seeds, not below 0.
    """
    seeds = len(influences)
    influence_PJ = (
        pd.concat([influence / len(influence) for influence in influences], axis=1)
        .fillna(0.0)
        .to_numpy()
    )
    pair_products = (influence_PJ.sum(axis=1) ** 2).sum() - (influence_PJ**2).sum()
    return max(0.0, float(pair_products) / (seeds * (seeds - 1)))


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % interval; one seed has none (NaN)."""

    mean: float
    low: float
    high: float

    @classmethod
    def from_values(
        cls, values: Sequence[float], *, shared: float = 0.0, common: float | None = None
    ) -> "Interval":
        """Return the interval of seeds' figures that covary by `common`, or correlate by `shared`.

        The variance of a mean of J figures is 1 / J of their sample variance, plus their covariance
        (`estimate_covariance`). Where no influences are given it is 1 / J + rho / (1 - rho) of the
        sample variance: the corrected resampled t interval (Nadeau and Bengio 2003), which is wide
        where most of the spread comes from few labelled rows; Student's at 0. Values are paired
        differences where runs are compared. tests/experiments/test_coverage.py counts how often
        each interval holds the true gain.
        """
        mean = float(np.mean(values))
        if len(values) < 2:
            return cls(mean, math.nan, math.nan)
        if len(set(values)) == 1:
            return cls(mean, mean, mean)
        variance = float(np.var(values, ddof=1))
        if common is None:
            common = variance * shared / (1 - shared)
        spread = math.sqrt(variance / len(values) + common)
        arm = float(t.ppf((1 + _CONFIDENCE) / 2, len(values) - 1)) * spread
        return cls(mean, mean - arm, mean + arm)

    def p_value(self, seeds: int) -> float:
        """Return the two-sided p-value of the mean over this number of seeds being 0; NaN of one
        seed.
        """
        if math.isnan(self.low):
            return math.nan
        if self.high <= self.low:
            return float(self.mean == 0)
        arms = 2 * abs(self.mean) / (self.high - self.low)
        return float(2 * t.sf(arms * t.ppf((1 + _CONFIDENCE) / 2, seeds - 1), seeds - 1))

    def clip_ends(self, minimum: float, maximum: float) -> "Interval":
        """Return the interval without what the value cannot be, below `minimum` or above
        `maximum`.
        """
        return replace(self, low=max(self.low, minimum), high=min(self.high, maximum))

    def format_text(self, *, scale: float = 1.0, form: str = ".1f") -> str:
        """Return a text such as "95.2 [94.8, 95.6]"; `form` is that of one number."""
        mean, low, high = (f"{scale * value:{form}}" for value in (self.mean, self.low, self.high))
        return mean if math.isnan(self.low) else f"{mean} [{low}, {high}]"

    def compute_error_bars(
        self, scale: float = 1.0, *, minimum: float = -math.inf, maximum: float = math.inf
    ) -> list[list[float]]:
        """Return how far the ends lie from the mean, as matplotlib's error bars take them.

        Args:
            scale: of both, in units of the interval.
            minimum, maximum: that the value can be, in units of the interval; bars end there.

        Returns:
            Lengths below and above the mean; 0 where there is no interval.
        """
        if math.isnan(self.low):
            return [[0.0], [0.0]]
        ends = self.clip_ends(minimum, maximum)
        # Ends of equal values may lie on the wrong side of their mean by a rounding.
        below = self.mean - ends.low
        above = ends.high - self.mean
        return [[scale * max(0.0, below)], [scale * max(0.0, above)]]


def cut_difference(interval: Interval, metric: str) -> Interval:
    """Return an interval of differences of a metric, cut at the most that two values differ by.

    A metric that is no measure of `secure_apfed.measures.table` has no bounds here.
    """
    measure = MEASURES.get(metric)
    width = math.inf if measure is None else measure.most - measure.least
    return interval.clip_ends(-width, width)


@dataclass(frozen=True, kw_only=True)
class Leakage:
    """The attack by one adversary that gained most on one target, averaged over the seeds.

    Chosen by means, not per seed: the highest figure of each single run would be above 0 where
    there is nothing. Over the seeds to which it applies: one run without it must not hide it;
    `missing` says so, as "4 of 5 seeds". `advantage` is over the best baseline with the same
    knowledge, `score` and `baseline` are means of the metric itself.
    """

    target: str
    attack: str
    metric: str
    advantage: Interval
    score: float
    baseline: float
    missing: str

    @classmethod
    def from_attacks(cls, attacks: pd.DataFrame, *, target: str, seeds: int) -> "Leakage":
        """Return the leakage from all attacks' figures on one target: of the attack whose mean
        advantage over the seeds is highest.
        """
        worst = attacks.groupby("name", sort=False)["advantage"].mean().idxmax()
        rows = attacks[attacks["name"] == worst]
        return cls(
            target=target,
            attack=str(worst),
            metric=str(rows["metric"].iloc[0]),
            advantage=Interval.from_values(
                rows["advantage"].tolist(), shared=_get_correlation(rows)
            ),
            score=float(rows["score"].mean()),
            baseline=float(rows["baseline"].mean()),
            missing="" if len(rows) == seeds else f"{len(rows)} of {seeds} seeds",
        )

    @property
    def cut_advantage(self) -> Interval:
        """Return the advantage for display, cut at the most that two values of the metric differ
        by.
        """
        return cut_difference(self.advantage, self.metric)

    @property
    def name(self) -> str:
        """Return the attack, and in how many seeds it ran where some are missing."""
        return f"{self.attack}, {self.missing}" if self.missing else self.attack

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            "target": self.target,
            "attack": self.name,
            "metric": self.metric,
            "advantage": asdict(self.advantage),
            "score": self.score,
            "baseline": self.baseline,
        }


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The gain of help over the best solo baseline, paired by seed.

    Attributes:
        baseline: the one that held-out labels of the active choose, by their mean over the seeds.
        measure: that both are judged by; where lower is better, a gain is what it fell by.
        solo, reached: means, of it and of the run; over_chosen: the gain over it.
        hindsight: the baseline with the best mean on the test rows, which nobody could choose;
            over_hindsight: the gain over that one, never above the other by its mean.
        shared: of the intervals; see `estimate_seed_correlation`.
        control: mean of the same run without help, where one was made; over_control: the gain over
            it, which is what others' messages were worth.
        mean: what the mean of the local models reaches, where it was measured; over_mean: the gain
            over it.
        rows: the fewest and the most test rows of a seed, on which both were measured; None: not
            known.
    """

    baseline: str
    solo: float
    reached: float
    over_chosen: Interval
    hindsight: str
    over_hindsight: Interval
    shared: float
    measure: str = ACCURACY.name
    control: float | None = None
    over_control: Interval | None = None
    mean: float | None = None
    over_mean: Interval | None = None
    rows: tuple[int, int] | None = None

    @classmethod
    def from_rows(cls, rows: pd.DataFrame, control: pd.DataFrame | None = None) -> "Gain | None":
        """Return the gain from a point's rows and its control's; None: no baseline was measured."""
        local_models = rows[rows["target"] == "solo"]
        if local_models.empty:
            return None
        measure = MEASURES[str(local_models["metric"].iloc[0])]
        sign = 1.0 if measure.higher_is_better else -1.0
        runs_by_name = local_models.groupby("name", sort=False)
        chosen = str((sign * runs_by_name["baseline"].mean()).fillna(-math.inf).idxmax())
        best = str((sign * runs_by_name["score"].mean()).idxmax())
        headline = _select_headline(rows)
        shared = _get_correlation(rows)
        control_headline = None if control is None else _select_headline(control)

        def compute_gain_over(other: pd.DataFrame) -> Interval:
            return _compute_difference(headline, other.set_index("seed"), sign, shared)

        averaged = runs_by_name.get_group("mean") if "mean" in runs_by_name.groups else None
        return cls(
            baseline=chosen,
            shared=shared,
            solo=float(runs_by_name["score"].mean()[chosen]),
            reached=float(headline["score"].mean()),
            measure=measure.name,
            over_chosen=compute_gain_over(runs_by_name.get_group(chosen)),
            hindsight=best,
            over_hindsight=compute_gain_over(runs_by_name.get_group(best)),
            control=None if control_headline is None else float(control_headline["score"].mean()),
            over_control=None
            if control_headline is None
            else _compute_difference(headline, control_headline, sign, shared),
            mean=None if averaged is None else float(averaged["score"].mean()),
            over_mean=None if averaged is None else compute_gain_over(averaged),
            rows=_count_rows(headline),
        )

    def format_gain(self, gain: Interval) -> str:
        """Return a gain with its unit: points of a share, otherwise the measure's own."""
        measure = MEASURES[self.measure]
        gain = cut_difference(gain, self.measure)
        if measure.share:
            return f"{gain.format_text(scale=100, form='+.1f')} points"
        return f"{gain.format_text(form='+.3f')} {measure.title}"

    @property
    def _rows_note(self) -> str:
        """Return on how many test rows of each seed the gain was measured; empty if unknown."""
        if self.rows is None:
            return ""
        fewest, most = self.rows
        counts = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
        return f", on the same {counts} test rows of each seed"

    @property
    def sentence(self) -> str:
        """Return whether help paid, cost or shows nothing, by the 95 % interval."""
        gain = self.over_chosen
        gain_text = (
            f"{self.format_gain(gain)} over {self.baseline}, the best local model{self._rows_note}"
        )
        if math.isnan(gain.low):
            return f"One seed: {gain_text}, which shows nothing yet."
        if gain.low > 0:
            return f"Help paid: {gain_text}."
        if gain.high < 0:
            return f"Help cost: {gain_text}."
        return f"No help shown: {gain_text}."


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A point of a study, summarised over its seeds.

    Attributes:
        accuracies: on the test rows, by way of inference, the method's own first.
        epsilon_x, epsilon_y: the largest over the seeds; inf: nothing is promised.
        epsilon_passives: what a person costs the passive that spent most; inf without noise there.
        releases: T, the most releases of one row; wire_bytes: mean.
        leakage: by target; a target that no attack applied to is absent.
        gain: over the best solo baseline; None where none was measured.
    """

    seeds: int
    accuracies: Mapping[str, Interval]
    epsilon_x: float
    epsilon_y: float
    releases: int
    wire_bytes: float
    leakage: Mapping[str, Leakage]
    gain: Gain | None = None
    epsilon_passives: float = math.inf

    def epsilon_of(self, method: MethodSettings) -> float:
        """Return the epsilon of a row's releases, or of a person's contributions at one passive.

        The former holds where representations are sent. A person's contributions are its vote, or
        its parts of the sums.
        """
        return self.epsilon_x if method.figure == "epsilon_x" else self.epsilon_passives

    @property
    def accuracy(self) -> Interval:
        """Return the measure of the method's own inference."""
        return next(iter(self.accuracies.values()))

    @classmethod
    def from_rows(cls, rows: pd.DataFrame) -> "Summary":
        """Return one point's summary from the figures of its runs."""
        runs = rows.drop_duplicates("seed")
        rows_by_target = {
            str(target): target_rows for target, target_rows in rows.groupby("target", sort=False)
        }
        tasks = rows_by_target.pop("task").groupby("name", sort=False)
        rows_by_target.pop("solo", None)
        accuracies = {
            str(name): _make_interval(runs["score"], _get_correlation(rows), _list_influences(runs))
            for name, runs in tasks
        }
        leakage = {
            target: Leakage.from_attacks(attacks, target=target, seeds=len(runs))
            for target, attacks in rows_by_target.items()
        }
        return cls(
            seeds=len(runs),
            accuracies=accuracies,
            leakage=leakage,
            gain=Gain.from_rows(rows),
            epsilon_x=float(runs["epsilon_x"].max()),
            epsilon_y=float(runs["epsilon_y"].max()),
            epsilon_passives=float(runs["epsilon_passives"].max()),
            releases=int(runs["releases"].max()),
            wire_bytes=float(runs["wire_bytes"].mean()),
        )


def measure_difference(rows: pd.DataFrame, other: pd.DataFrame) -> Interval | None:
    """Return how much better the runs of one point are than those of another on the same seeds.

    Returns:
        None: some seed was measured on other numbers of test rows by the two.
    """
    headline = _select_headline(rows)
    other_headline = _select_headline(other).loc[headline.index]
    if not headline["rows"].equals(other_headline["rows"]):
        return None
    measure = MEASURES[str(headline["metric"].iloc[0])]
    return _compute_difference(
        headline, other_headline, 1.0 if measure.higher_is_better else -1.0, _get_correlation(rows)
    )


def accuracy_of(rows: pd.DataFrame) -> "pd.Series[float]":
    """Return the measure of the method's own inference in each run of a point, by seed."""
    return _select_headline(rows)["score"]


def _select_headline(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the figures of the method's own inference in each run, by seed."""
    return rows[rows["target"] == "task"].drop_duplicates("seed").set_index("seed")


def _count_rows(rows: pd.DataFrame) -> tuple[int, int] | None:
    """Return the fewest and the most test rows of a seed; None where one does not say."""
    if "rows" not in rows or rows["rows"].isna().any():
        return None
    return int(rows["rows"].min()), int(rows["rows"].max())


def _compute_difference(
    runs: pd.DataFrame, other: pd.DataFrame, sign: float, shared: float
) -> Interval:
    """Return the mean difference of scores over common seeds, paired by seed, with its interval.

    Args:
        runs, other: a row for each seed; those of `other` hold the seeds of `runs`.
        sign: -1 where a lower score is better, else 1.
        shared: the correlation of two seeds' scores that test rows in common make.

    Where every run stored the influence of each person, their covariance takes the place of
    `shared`.
    """
    other = other.loc[runs.index]
    other_influences = _list_influences(other)
    influences = [
        own_influence - other_influence
        for own_influence, other_influence in zip(
            _list_influences(runs), other_influences, strict=False
        )
    ]
    return _make_interval(sign * (runs["score"] - other["score"]), shared, influences)


def _list_influences(runs: pd.DataFrame) -> "list[pd.Series[float]]":
    """Return the influence of people on each seed's figure; empty if one seed's run lacks it."""
    influences = list(runs["influence"]) if "influence" in runs else []
    return influences if all(isinstance(influence, pd.Series) for influence in influences) else []


def _make_interval(
    values: "pd.Series[float]", shared: float, influences: "Sequence[pd.Series[float]]"
) -> Interval:
    """Return mean and interval of figures over the seeds; `influences`: of each person on each
    figure.

    `shared`: correlation of two seeds' figures.
    """
    common = estimate_covariance(influences) if len(values) > 1 and influences else None
    return Interval.from_values(values.tolist(), shared=shared, common=common)


def _get_correlation(rows: pd.DataFrame) -> float:
    """Return the correlation of two seeds' figures."""
    return float(rows["shared"].max())


def adjust_p_values(intervals: Sequence[Interval | None], seeds: int) -> list[float]:
    """Return the p-values of all that one table compares, adjusted for their number (Holm 1979).

    There is one for each interval of differences over this number of seeds; NaN where nothing was
    compared (None), or one seed was run.
    """
    p_values = [math.nan if interval is None else interval.p_value(seeds) for interval in intervals]
    order = sorted(
        (position for position, p in enumerate(p_values) if not math.isnan(p)),
        key=p_values.__getitem__,
    )
    adjusted = [math.nan] * len(p_values)
    worst = 0.0
    for smaller, position in enumerate(order):
        worst = max(worst, min(1.0, (len(order) - smaller) * p_values[position]))
        adjusted[position] = worst
    return adjusted
