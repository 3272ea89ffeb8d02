"""Summaries of seeds for rows of tables: means with the one kind of interval, and worst leaks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from scipy.stats import t

from secure_apfed.data import DATASETS
from secure_apfed.measures.table import ACCURACY, MEASURES
from secure_apfed.settings import MethodSettings
from secure_apfed.settings.data import DataSettings

Row: TypeAlias = dict[str, Any]
"""A row of a table: numbers, texts, intervals or None by column."""

_CONFIDENCE = 0.95


def estimate_seed_correlation(
    data: DataSettings | None, *, train_count: int, test_count: int
) -> float:
    """Return the assumed correlation between the metrics of two seeds' runs, 0 to 1.

    Each seed splits the same people into training and test rows, so metrics of two seeds are not
    independent. Nadeau and Bengio (2003, Inference for the generalization error, section 3) assume
    that they correlate by the share of test rows. A data set with a fixed test set is not split
    again: the correlation is 0, and the interval covers these test rows alone.

    Args:
        data: settings of the data; None: rows were split again for each seed.
        train_count, test_count: number of training rows and of test rows.
    """
    has_fixed_test_set = (
        data is not None and data.dataset in DATASETS and DATASETS[data.dataset].split
    )
    if has_fixed_test_set:
        return 0.0
    return test_count / (test_count + train_count)


def estimate_seed_covariance(influences: "Sequence[pd.Series[float]]") -> float:
    """Return the mean covariance of two seeds' metrics that comes from test people in common.

    Each series holds, by person, the influence of that test row on the metric of one seed
    (`secure_apfed.measures.intervals.compute_influence`). A metric varies as the mean influence of
    its test rows. The covariance of two seeds is therefore the sum, over the people who test both,
    of the products of their two influences, each divided by the number of test rows of its seed.
    The mean is over all pairs of seeds; a negative one counts as 0.
    """
    seed_count = len(influences)
    # (P, J): person, seed; 0 where a person does not test that seed.
    influence_PJ = (
        pd.concat([influence / len(influence) for influence in influences], axis=1)
        .fillna(0.0)
        .to_numpy()
    )
    # The square of a sum is the sum of squares and, twice, of the products of all pairs.
    pair_products = (influence_PJ.sum(axis=1) ** 2).sum() - (influence_PJ**2).sum()
    return max(0.0, float(pair_products) / (seed_count * (seed_count - 1)))


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % interval; one seed has none (NaN)."""

    mean: float
    low: float
    high: float

    @classmethod
    def from_values(
        cls,
        values: Sequence[float],
        *,
        seed_correlation: float = 0.0,
        seed_covariance: float | None = None,
    ) -> "Interval":
        """Return mean and 95 % interval of one value per seed, with Student's t.

        The variance of a mean of J values is their sample variance / J plus their covariance.
        tests/experiments/test_coverage.py counts how often each interval holds the true gain.

        Args:
            values: one metric, or paired difference, for each seed.
            seed_correlation: correlation rho of two seeds' values, used where `seed_covariance` is
                None: the covariance is then variance * rho / (1 - rho), the corrected resampled t
                interval (Nadeau and Bengio 2003). It is wide where few labelled rows cause most
                spread.
            seed_covariance: covariance of two seeds' values (`estimate_seed_covariance`); None: not
                known.
        """
        mean = float(np.mean(values))
        # One seed has no spread; equal values have none either, so their interval is the mean.
        if len(values) < 2:
            return cls(mean, math.nan, math.nan)
        if len(set(values)) == 1:
            return cls(mean, mean, mean)
        variance = float(np.var(values, ddof=1))
        if seed_covariance is None:
            seed_covariance = variance * seed_correlation / (1 - seed_correlation)
        standard_error = math.sqrt(variance / len(values) + seed_covariance)
        half_width = float(t.ppf((1 + _CONFIDENCE) / 2, len(values) - 1)) * standard_error
        return cls(mean, mean - half_width, mean + half_width)

    def compute_p_value(self, seed_count: int) -> float:
        """Return the two-sided p-value for a true mean of 0, by Student's t; NaN for one seed.

        `seed_count`: number of values of the interval, so `seed_count` - 1 degrees of freedom.
        """
        if math.isnan(self.low):
            return math.nan
        # All seeds had the same value: the mean is 0 for certain, or certainly not.
        if self.high <= self.low:
            return float(self.mean == 0)
        degrees_of_freedom = seed_count - 1
        # The half width is the quantile times the standard error, which the statistic divides by.
        half_width = (self.high - self.low) / 2
        statistic = abs(self.mean) / half_width * t.ppf((1 + _CONFIDENCE) / 2, degrees_of_freedom)
        return float(2 * t.sf(statistic, degrees_of_freedom))

    def clip_ends(self, minimum: float, maximum: float) -> "Interval":
        """Return the interval with its ends clipped to the possible values of what it measures."""
        return replace(self, low=max(self.low, minimum), high=min(self.high, maximum))

    def format_text(self, *, scale: float = 1.0, number_format: str = ".1f") -> str:
        """Return a text such as "95.2 [94.8, 95.6]", or the mean alone for one seed.

        `scale`: factor of all numbers. `number_format`: format specification of one number.
        """
        mean, low, high = (
            f"{scale * value:{number_format}}" for value in (self.mean, self.low, self.high)
        )
        return mean if math.isnan(self.low) else f"{mean} [{low}, {high}]"

    def compute_error_bars(
        self, scale: float = 1.0, *, minimum: float = -math.inf, maximum: float = math.inf
    ) -> list[list[float]]:
        """Return the lengths of error bars in the form that matplotlib expects.

        Args:
            scale: factor of the lengths.
            minimum, maximum: least and greatest possible value, before scaling; bars end there.

        Returns:
            Lengths below and above the mean; 0 where there is no interval.
        """
        if math.isnan(self.low):
            return [[0.0], [0.0]]
        clipped = self.clip_ends(minimum, maximum)
        # Ends of equal values may lie on the wrong side of their mean by a rounding.
        below = self.mean - clipped.low
        above = clipped.high - self.mean
        return [[scale * max(0.0, below)], [scale * max(0.0, above)]]


def clip_difference(interval: Interval, metric: str) -> Interval:
    """Return an interval of differences of a metric, clipped to the largest possible difference.

    `metric`: name of a measure of `secure_apfed.measures.table`; others have no bounds here.
    """
    measure = MEASURES.get(metric)
    width = math.inf if measure is None else measure.max_value - measure.min_value
    return interval.clip_ends(-width, width)


@dataclass(frozen=True, kw_only=True)
class Leakage:
    """The best attack by one adversary on one target, averaged over the seeds.

    The attack is chosen by its mean advantage, not per seed: the highest value of each single run
    would be above 0 where nothing leaks. The mean is over the seeds in which the attack ran.

    Attributes:
        target: leak direction (who reads whose what), or what is inferred.
        attack, metric: name of the attack, and of the metric of its score.
        advantage: score minus that of the best baseline with the same knowledge.
        score, baseline: means of the metric itself, of the attack and of its baseline.
        seeds_note: number of seeds in which the attack ran, as "4 of 5 seeds"; empty: all.
    """

    target: str
    attack: str
    metric: str
    advantage: Interval
    score: float
    baseline: float
    seeds_note: str

    @classmethod
    def from_attacks(cls, attack_rows: pd.DataFrame, *, target: str, seed_count: int) -> "Leakage":
        """Return the leakage of the attack whose mean advantage over the seeds is highest.

        `attack_rows`: results of every attack of one adversary on `target`, a row for each attack
        and seed. `seed_count`: number of seeds that were run.
        """
        best_attack = attack_rows.groupby("name", sort=False)["advantage"].mean().idxmax()
        rows = attack_rows[attack_rows["name"] == best_attack]
        return cls(
            target=target,
            attack=str(best_attack),
            metric=str(rows["metric"].iloc[0]),
            advantage=Interval.from_values(
                rows["advantage"].tolist(), seed_correlation=_get_correlation(rows)
            ),
            score=float(rows["score"].mean()),
            baseline=float(rows["baseline"].mean()),
            seeds_note="" if len(rows) == seed_count else f"{len(rows)} of {seed_count} seeds",
        )

    @property
    def clipped_advantage(self) -> Interval:
        """Return the advantage for display, clipped to the metric's largest possible difference."""
        return clip_difference(self.advantage, self.metric)

    @property
    def name(self) -> str:
        """Return the attack, and in how many seeds it ran where some are missing."""
        return f"{self.attack}, {self.seeds_note}" if self.seeds_note else self.attack

    def as_json(self) -> dict[str, Any]:
        """Return the leakage as plain values."""
        return {
            "target": self.target,
            "attack": self.name,
            "metric": self.metric,
            "advantage": asdict(self.advantage),
            "score": self.score,
            "baseline": self.baseline,
        }


# Stored results name these fields of `Gain` otherwise.
_KEY_BY_GAIN_FIELD = {
    "model_score": "reached",
    "gain_over_chosen": "over_chosen",
    "oracle": "hindsight",
    "gain_over_oracle": "over_hindsight",
    "seed_correlation": "shared",
    "ablation_score": "control",
    "gain_over_ablation": "over_control",
    "mean_model_score": "mean",
    "gain_over_mean_model": "over_mean",
    "test_row_range": "rows",
}


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The gain of the passives' help over the best local model, paired by seed.

    Attributes:
        baseline: local model that held-out labels of the active choose, by their mean over seeds.
        measure: measure of the run and of the local models; where lower is better, a gain is the
            decrease.
        local_score, model_score: means over the seeds of the measure, of `baseline` and of the run.
        gain_over_chosen: gain over `baseline`.
        oracle, gain_over_oracle: local model that is best on the test rows (an oracle, not
            available in practice), and the gain over it, whose mean is at most
            `gain_over_chosen`'s.
        seed_correlation: correlation of two seeds' metrics (`estimate_seed_correlation`).
        ablation_score, gain_over_ablation: mean of the ablation, the same run without help, and the
            gain over it; None: not measured.
        mean_model_score, gain_over_mean_model: measure of the local models' averaged predictions,
            and the gain over it; None: not measured.
        test_row_range: the fewest and the most test rows of a seed; None: not known.
    """

    baseline: str
    local_score: float
    model_score: float
    gain_over_chosen: Interval
    oracle: str
    gain_over_oracle: Interval
    seed_correlation: float
    measure: str = ACCURACY.name
    ablation_score: float | None = None
    gain_over_ablation: Interval | None = None
    mean_model_score: float | None = None
    gain_over_mean_model: Interval | None = None
    test_row_range: tuple[int, int] | None = None

    @classmethod
    def from_rows(
        cls, rows: pd.DataFrame, ablation_rows: pd.DataFrame | None = None
    ) -> "Gain | None":
        """Return the gain of a study's point (one choice of settings) over all seeds.

        `test_row_range`: metrics of the point's runs and local models, as `iter_metric_rows` yields
        them. `ablation_rows`: metrics of the point's ablation, the same run without help; None: it
        has none.

        Returns None if no local model was measured.
        """
        local_model_rows = rows[rows["target"] == "solo"]
        if local_model_rows.empty:
            return None
        measure = MEASURES[str(local_model_rows["metric"].iloc[0])]
        sign = 1.0 if measure.higher_is_better else -1.0
        # A group is one local model over the seeds. Its column `baseline` is the measure on
        # held-out labels, which chooses the model to compare with; `score` is that on test rows.
        rows_by_model = local_model_rows.groupby("name", sort=False)
        chosen_model = str((sign * rows_by_model["baseline"].mean()).fillna(-math.inf).idxmax())
        oracle_model = str((sign * rows_by_model["score"].mean()).idxmax())
        headline_rows = _select_headline_rows(rows)  # the run's own model, by seed
        seed_correlation = _get_correlation(rows)
        ablation_headline_rows = (
            None if ablation_rows is None else _select_headline_rows(ablation_rows)
        )

        def compute_gain_over(model_rows: pd.DataFrame) -> Interval:
            """Return the run's gain over one local model, paired by seed."""
            return _compute_difference(
                headline_rows, model_rows.set_index("seed"), sign, seed_correlation
            )

        mean_model_rows = (
            rows_by_model.get_group("mean") if "mean" in rows_by_model.groups else None
        )
        return cls(
            baseline=chosen_model,
            seed_correlation=seed_correlation,
            local_score=float(rows_by_model["score"].mean()[chosen_model]),
            model_score=float(headline_rows["score"].mean()),
            measure=measure.name,
            gain_over_chosen=compute_gain_over(rows_by_model.get_group(chosen_model)),
            oracle=oracle_model,
            gain_over_oracle=compute_gain_over(rows_by_model.get_group(oracle_model)),
            ablation_score=None
            if ablation_headline_rows is None
            else float(ablation_headline_rows["score"].mean()),
            gain_over_ablation=None
            if ablation_headline_rows is None
            else _compute_difference(headline_rows, ablation_headline_rows, sign, seed_correlation),
            mean_model_score=None
            if mean_model_rows is None
            else float(mean_model_rows["score"].mean()),
            gain_over_mean_model=None
            if mean_model_rows is None
            else compute_gain_over(mean_model_rows),
            test_row_range=_count_rows(headline_rows),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the gain as plain values, by the keys that stored results use."""
        return {_KEY_BY_GAIN_FIELD.get(name, name): value for name, value in asdict(self).items()}

    def format_gain(self, gain: Interval) -> str:
        """Return a gain with its unit: percentage points for a share, else the measure's title."""
        measure = MEASURES[self.measure]
        gain = clip_difference(gain, self.measure)
        if measure.is_share:
            return f"{gain.format_text(scale=100, number_format='+.1f')} points"
        return f"{gain.format_text(number_format='+.3f')} {measure.title}"

    @property
    def _rows_note(self) -> str:
        """Return on how many test rows of each seed the gain was measured; empty if unknown."""
        if self.test_row_range is None:
            return ""
        fewest, most = self.test_row_range
        counts = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
        return f", on the same {counts} test rows of each seed"

    @property
    def sentence(self) -> str:
        """Return a sentence on whether help paid, cost or shows nothing, by the 95 % interval of
        the gain.
        """
        gain = self.gain_over_chosen
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
    """A point of a study (one choice of settings), summarised over its seeds.

    Attributes:
        seed_count: number of seeds that were run.
        accuracy_by_inference: measure on the test rows, by mode of inference, the method's own
            first.
        epsilon_x, epsilon_y: privacy of representations and of labels, the largest over the seeds;
            inf: no guarantee.
        epsilon_passives: largest privacy cost that a passive recorded for a person; inf: no noise.
        release_count: T, the most releases of one row.
        wire_bytes: mean number of bytes sent in a run.
        leakage_by_direction: best attack, by leak direction; a direction without an attack is
            absent.
        gain: gain over the best local model; None: no local model was measured.
    """

    seed_count: int
    accuracy_by_inference: Mapping[str, Interval]
    epsilon_x: float
    epsilon_y: float
    release_count: int
    wire_bytes: float
    leakage_by_direction: Mapping[str, Leakage]
    gain: Gain | None = None
    epsilon_passives: float = math.inf

    def find_epsilon(self, method: MethodSettings) -> float:
        """Return the epsilon that bounds what this method reveals.

        For methods that send representations it covers all releases of one row. For others it
        covers what one passive sends about a person: its vote, or its shares of the sums.
        """
        return self.epsilon_x if method.epsilon_name == "epsilon_x" else self.epsilon_passives

    @property
    def accuracy(self) -> Interval:
        """Return the measure of the method's own inference."""
        return next(iter(self.accuracy_by_inference.values()))

    @classmethod
    def from_rows(cls, rows: pd.DataFrame) -> "Summary":
        """Return the summary of one point of a study.

        `rows`: metrics of the point's runs, a row for each seed, target (`task`, `solo` or what an
        attack infers) and name (mode of inference, local model or attack).
        """
        runs = rows.drop_duplicates("seed")
        rows_by_target = {
            str(target): target_rows for target, target_rows in rows.groupby("target", sort=False)
        }
        tasks = rows_by_target.pop("task").groupby("name", sort=False)
        # Without the run's model ("task") and the local models ("solo") attacks remain.
        rows_by_target.pop("solo", None)
        accuracies = {
            str(name): _make_interval(runs["score"], _get_correlation(rows), _list_influences(runs))
            for name, runs in tasks
        }
        leakage = {
            target: Leakage.from_attacks(attacks, target=target, seed_count=len(runs))
            for target, attacks in rows_by_target.items()
        }
        return cls(
            seed_count=len(runs),
            accuracy_by_inference=accuracies,
            leakage_by_direction=leakage,
            gain=Gain.from_rows(rows),
            epsilon_x=float(runs["epsilon_x"].max()),
            epsilon_y=float(runs["epsilon_y"].max()),
            epsilon_passives=float(runs["epsilon_passives"].max()),
            release_count=int(runs["releases"].max()),
            wire_bytes=float(runs["wire_bytes"].mean()),
        )


def measure_difference(rows: pd.DataFrame, other_rows: pd.DataFrame) -> Interval | None:
    """Return how much better the runs of one point are than those of another on the same seeds.

    `rows`, `other_rows`: metrics of the runs of each point. Returns None if the two used different
    numbers of test rows for some seed, so that they cannot be paired.
    """
    headline = _select_headline_rows(rows)
    other_headline = _select_headline_rows(other_rows).loc[headline.index]
    if not headline["rows"].equals(other_headline["rows"]):
        return None
    measure = MEASURES[str(headline["metric"].iloc[0])]
    sign = 1.0 if measure.higher_is_better else -1.0
    return _compute_difference(headline, other_headline, sign, _get_correlation(rows))


def select_accuracies(rows: pd.DataFrame) -> "pd.Series[float]":
    """Return the measure of the method's own inference in each run of a point, by seed."""
    return _select_headline_rows(rows)["score"]


def _select_headline_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the row of the method's own inference, which comes first in each run, by seed."""
    return rows[rows["target"] == "task"].drop_duplicates("seed").set_index("seed")


def _count_rows(rows: pd.DataFrame) -> tuple[int, int] | None:
    """Return the fewest and the most test rows of a seed; None if the number is not known for some
    seed.
    """
    if "rows" not in rows or rows["rows"].isna().any():
        return None
    return int(rows["rows"].min()), int(rows["rows"].max())


def _compute_difference(
    runs: pd.DataFrame, other_runs: pd.DataFrame, sign: float, seed_correlation: float
) -> Interval:
    """Return the mean difference of scores over common seeds, paired by seed, with its interval.

    Args:
        runs, other_runs: rows by seed; `other_runs` has all seeds of `runs`.
        sign: -1 where a lower score is better, else 1.
        seed_correlation: the correlation of two seeds' scores. It is used only if some run did not
            store the influence of each person on its score.
    """
    other_runs = other_runs.loc[runs.index]  # in the order of `runs`, without further seeds
    other_influences = _list_influences(other_runs)
    # The influence of a person on a difference is the difference of its influences. The list is
    # empty if one of the two runs stored none.
    influences = [
        own_influence - other_influence
        for own_influence, other_influence in zip(
            _list_influences(runs), other_influences, strict=False
        )
    ]
    return _make_interval(
        sign * (runs["score"] - other_runs["score"]), seed_correlation, influences
    )


def _list_influences(runs: pd.DataFrame) -> "list[pd.Series[float]]":
    """Return the influence of people on each seed's metric; empty if one seed's run lacks it."""
    influences = list(runs["influence"]) if "influence" in runs else []
    return influences if all(isinstance(influence, pd.Series) for influence in influences) else []


def _make_interval(
    values: "pd.Series[float]", seed_correlation: float, influences: "Sequence[pd.Series[float]]"
) -> Interval:
    """Return mean and interval of one value per seed.

    `influences`: influence of each person on the value of each seed; empty: not known.
    `seed_correlation`: correlation of two seeds' values, used where `influences` is empty.
    """
    seed_covariance = (
        estimate_seed_covariance(influences) if len(values) > 1 and influences else None
    )
    return Interval.from_values(
        values.tolist(), seed_correlation=seed_correlation, seed_covariance=seed_covariance
    )


def _get_correlation(rows: pd.DataFrame) -> float:
    """Return the stored correlation of two seeds' metrics (`estimate_seed_correlation`)."""
    return float(rows["shared"].max())


def adjust_p_values(intervals: Sequence[Interval | None], seed_count: int) -> list[float]:
    """Return the p-values of all comparisons of one table, adjusted for their number (Holm 1979).

    Args:
        intervals: intervals of paired differences; None: no comparison.
        seed_count: number of seeds of each interval.

    Returns:
        One p-value for each interval: at most 1; NaN for None or for one seed.
    """
    p_values = [
        math.nan if interval is None else interval.compute_p_value(seed_count)
        for interval in intervals
    ]
    ascending_positions = sorted(
        (position for position, p in enumerate(p_values) if not math.isnan(p)),
        key=p_values.__getitem__,
    )
    adjusted_p_values = [math.nan] * len(p_values)
    largest_so_far = 0.0  # adjusted p-values may not fall where the p-values rise
    for rank, position in enumerate(ascending_positions):
        remaining_count = len(ascending_positions) - rank
        largest_so_far = max(largest_so_far, min(1.0, remaining_count * p_values[position]))
        adjusted_p_values[position] = largest_so_far
    return adjusted_p_values
