"""A run under several seeds: what `secure-apfed run CONFIG --seeds N` says of all of them.

Each seed draws another split of the data and is a run folder of its own; those that lie there
already are not run again. Initial weights and dropout come from what `party_seeds` says: a secret
seed of each party, so that no run can be repeated exactly, or the run's, so that all can.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from apfed_attacks.headlines import list_directions
from apfed_experiments import words
from apfed_experiments.baselines import RANKING_MEASURES
from apfed_experiments.columns import Column, Table, describe_missing_attack, write_text
from apfed_experiments.finished import FinishedRun
from apfed_experiments.report.page import Part
from apfed_experiments.runner import Study
from apfed_experiments.study import (
    Failure,
    MetricRows,
    OnDone,
    Point,
    Trial,
    iter_metric_rows,
    list_trials,
    run_points,
)
from apfed_experiments.summary import (
    Gain,
    Interval,
    Row,
    Summary,
    clip_difference,
    select_accuracies,
)
from apfed_experiments.verdict import describe_seeds
from secure_apfed.base.files import to_json
from secure_apfed.config import Config
from secure_apfed.measures.table import MEASURES, Measure
from secure_apfed.runs.outcome import RANKED, Ranking
from secure_apfed.settings.promises import spell_epsilon

_NOTE_BY_PARTY_SEEDS = {
    "secret": "each party drew a secret seed of its own for its initial weights and dropout, so "
    "that the same seeds give somewhat other figures next time",
    "shared_for_comparison": "initial weights and dropout came from the run's seed at all parties, "
    "so that the same seeds give the same figures",
}


@dataclass(frozen=True, kw_only=True)
class RankingSummary:
    """A ranking measure (AUC or average precision) of two classes over the seeds.

    Attributes:
        measure: name of the measure.
        reached: mean and interval of the measure of the run's model.
        gain: gain, paired by seed, over the local model that held-out labels choose by the run's
            own measure; None: not measured.
    """

    measure: str
    reached: Interval
    gain: Interval | None


@dataclass(frozen=True, kw_only=True)
class SeveralSeeds:
    """The results of the runs of one configuration under several seeds.

    Attributes:
        config: settings of the runs, except their seeds.
        folder_by_seed: folder of each run, by seed.
        score_by_seed: value of the run's own measure on the test rows, by seed.
        summary: means and intervals over the seeds.
        ranking_by_seed: ranking measures and prevalence on test rows of two classes, by seed.
        ranking_summaries: ranking measures other than the run's own, over the seeds.
        failures: runs that ended with an error.
    """

    config: Config
    folder_by_seed: dict[int, Path]
    score_by_seed: dict[int, float]
    summary: Summary
    ranking_by_seed: Mapping[int, Ranking] = field(default_factory=dict)
    ranking_summaries: tuple[RankingSummary, ...] = ()
    failures: tuple[Failure, ...] = ()

    def list_summary_rows(self) -> list[tuple[str, str]]:
        """Return the results over all seeds as pairs of title and text."""
        measure = MEASURES[self.config.measure]
        summary = self.summary
        rows = [
            (f"{measure.title}, {name}", _format_interval(measure, interval))
            for name, interval in summary.accuracy_by_inference.items()
        ]
        if summary.gain is not None:
            rows.append(("help", summary.gain.sentence))
        rows += [_describe_ranking(ranked) for ranked in self.ranking_summaries]
        if self.ranking_by_seed:
            positive_counts = [ranking.positives for ranking in self.ranking_by_seed.values()]
            seeds_met = sum(ranking.is_met for ranking in self.ranking_by_seed.values())
            rows += [
                ("positives among test rows", f"{min(positive_counts)} to {max(positive_counts)}"),
                ("mean probability is met", f"in {seeds_met} of {len(positive_counts)} seeds"),
            ]
        largest_epsilon = spell_epsilon(summary.find_epsilon(self.config.method) or None)
        rows.append(("largest epsilon", largest_epsilon))
        rows += [
            (kind, f"{leak.clipped_advantage.format_text(number_format='+.3f')} ({leak.name})")
            for kind, leak in summary.leakage_by_direction.items()
        ]
        rows += self.missing_attacks.items()
        return rows

    @property
    def missing_attacks(self) -> dict[str, str]:
        """Return why no attack ran under any seed, by leak direction (who reads whose what)."""
        kinds = [direction.kind for direction in list_directions(self.config)]
        return {
            kind: describe_missing_attack(self.config, kind)
            for kind in kinds
            if kind not in self.summary.leakage_by_direction
        }

    def as_json(self) -> dict[str, Any]:
        """Return the results of all seeds as plain values."""
        summary = self.summary
        return {
            "seeds": list(self.score_by_seed),
            "party_seeds": self.config.party_seeds,
            "measure": self.config.measure,
            "reached": {str(seed): value for seed, value in self.score_by_seed.items()},
            "intervals": {
                name: asdict(interval) for name, interval in summary.accuracy_by_inference.items()
            },
            "gain": None if summary.gain is None else summary.gain.as_json(),
            "ranked": [asdict(ranked) for ranked in self.ranking_summaries],
            "rankings": {
                str(seed): ranking.model_dump(mode="json")
                for seed, ranking in self.ranking_by_seed.items()
            },
            "epsilon": summary.find_epsilon(self.config.method),
            "wire_bytes": summary.wire_bytes,
            "leakage": {
                target: leak.as_json() for target, leak in summary.leakage_by_direction.items()
            },
            "not_attacked": self.missing_attacks,
            "verdict": dict(describe_seeds(self)),
            "folders": {str(seed): str(path) for seed, path in self.folder_by_seed.items()},
        }


def declare_study(
    config: Config, folder: Path, *, seed_count: int, should_measure_baselines: bool = True
) -> Study[SeveralSeeds]:
    """Return the study of one run under several seeds, whose results are stored in `several.json`.

    It has one point (choice of settings), whose runs differ in their seeds. Initial weights follow
    `config.party_seeds`.

    `seed_count`: number of seeds, from `config.seed` on. `should_measure_baselines`: whether local
    models are measured, without which there is no gain.
    """
    point = Point(config=config, folder=folder, party_seeds=config.party_seeds)
    trials = list_trials([point], range(config.seed, config.seed + seed_count))
    return Study(
        title=f"{config.name}: {seed_count} seeds",
        reading_guide=f"Each seed draws its rows anew; {_NOTE_BY_PARTY_SEEDS[config.party_seeds]} "
        "(party_seeds: "
        f"{config.party_seeds}). Intervals: 95 %, over the seeds, corrected for the people that "
        "splits of one table share (Nadeau and Bengio 2003); the gain is paired by seed.",
        folder=folder,
        measure=partial(_run_seeds, trials, should_measure_baselines=should_measure_baselines),
        compare=_make_report_parts,
        unit_name="seeds",
        reported_trials=trials,
    )


def _run_seeds(
    trials: Sequence[Trial], *, should_measure_baselines: bool, jobs: int, on_done: OnDone
) -> SeveralSeeds:
    """Run the trials whose folders are missing, summarise all, and write several.json.

    `trials`: one run for each seed. `should_measure_baselines`: whether local models are measured.
    `jobs`: number of runs at a time. `on_done`: function that is called after each run.
    """
    point = trials[0].point
    config = point.config
    run_by_seed = dict[int, FinishedRun]()  # `run_points` returns their metrics only

    def note_run(run: FinishedRun) -> MetricRows:
        """Keep a finished run by its seed, and return its metrics as rows."""
        run_by_seed[run.config.seed] = run
        return iter_metric_rows(run)

    folder_by_seed = {trial.seed: trial.path for trial in trials}
    table = run_points(
        [point],
        list(folder_by_seed),
        jobs=jobs,
        on_done=on_done,
        should_measure_baselines=should_measure_baselines,
        list_metric_rows=note_run,
    ).table
    score_by_seed = {
        int(str(seed)): float(value) for seed, value in select_accuracies(table).items()
    }
    summary = Summary.from_rows(table)
    # Correlation of two seeds' metrics: 0 for runs whose number of training rows is not known.
    seed_correlation = float(table["shared"].max())
    ranking_by_seed = {seed: run.outcome.ranking for seed, run in run_by_seed.items()}
    ranking_summaries = [
        _summarise_ranking(name, list(run_by_seed.values()), summary.gain, seed_correlation)
        for name in RANKING_MEASURES
        if name != config.measure
    ]
    results = SeveralSeeds(
        config=config,
        folder_by_seed=folder_by_seed,
        score_by_seed=score_by_seed,
        summary=summary,
        ranking_by_seed={
            seed: ranking for seed, ranking in ranking_by_seed.items() if ranking is not None
        },
        ranking_summaries=tuple(ranked for ranked in ranking_summaries if ranked is not None),
    )
    write_text(point.folder / "several.json", to_json(results.as_json(), indent=1))
    return results


def _make_report_parts(results: SeveralSeeds) -> list[Part]:
    """Return the parts of the study's page: the results over all seeds with the verdict (summary in
    plain words), and the results by seed.
    """
    summary_rows = [{"figure": name, "value": value} for name, value in results.list_summary_rows()]
    columns = [Column(name="figure", title=""), Column(name="value", title="")]
    title = f"{results.config.name}: {len(results.score_by_seed)} seeds"
    lines = describe_seeds(results)
    return [
        Part(name="together", table=Table(columns, summary_rows, title), verdict_lines=lines),
        Part(name="seeds", table=_make_seed_table(results)),
    ]


def _make_seed_table(results: SeveralSeeds) -> Table:
    """Return the table by seed: the measure and, for two classes, what `Ranking` holds.

    That is AUC, average precision, prevalence and mean predicted probability on the test rows. The
    cell of the last says "not met" where it does not agree with the prevalence.
    """
    measure = MEASURES[results.config.measure]
    rankings = results.ranking_by_seed
    ranking_names = [name for name in RANKED if rankings and name != measure.name]
    rows: list[Row] = []
    for seed, score in results.score_by_seed.items():
        row: Row = {"seed": f"seed {seed}", measure.name: measure.format_value(score)}
        ranking = rankings.get(seed)
        if ranking is not None:
            row |= {
                name: interval.format_interval(MEASURES[name])
                for name, interval in ranking.intervals.items()
            }
            row |= {
                "positives": f"{ranking.positives} of {ranking.rows}",
                "share": words.format_percent(ranking.rate.value),
                "predicted": words.format_percent(ranking.predicted)
                + ("" if ranking.is_met else ", not met"),
            }
        rows.append(row)
    titles = {"seed": "seed"} | {
        name: MEASURES[name].title for name in (measure.name, *ranking_names)
    }
    if rankings:
        titles |= {"positives": "positives", "share": "their share", "predicted": "predicted"}
    columns = [Column(name=name, title=title) for name, title in titles.items()]
    return Table(columns, rows, "By seed")


def _describe_ranking(ranked: RankingSummary) -> tuple[str, str]:
    """Return a ranking measure's title, and its mean with interval and gain as text."""
    measure = MEASURES[ranked.measure]
    text = _format_interval(measure, ranked.reached)
    if ranked.gain is not None:
        gain = clip_difference(ranked.gain, ranked.measure)
        text += f"; {gain.format_text(number_format='+.3f')} over the same baseline"
    return measure.title, text


def _format_interval(measure: Measure, interval: Interval) -> str:
    """Return a mean and its interval in the measure's unit, clipped to the measure's range."""
    clipped = interval.clip_ends(measure.min_value, measure.max_value)
    if measure.is_share:
        return f"{clipped.format_text(scale=100.0, number_format='.2f')} %"
    return clipped.format_text(number_format=".4f")


def _summarise_ranking(
    name: str, runs: list[FinishedRun], gain: Gain | None, seed_correlation: float
) -> RankingSummary | None:
    """Return a ranking measure over all runs, with its gain if every run's baselines have it.

    Args:
        name: name of the ranking measure.
        runs: one run for each seed.
        gain: gain by the run's own measure, which names the local model to compare with; None: no
            local model was measured.
        seed_correlation: correlation of two seeds' metrics, 0 to 1.

    Returns:
        None: some run does not have two classes, or does not store this measure.
    """
    # Measures of the method's own mode of inference, which comes first.
    headline_measures = [next(iter(run.outcome.measures.values()), {}) for run in runs]
    for run, measures in zip(runs, headline_measures, strict=True):
        if not run.outcome.ranking or name not in measures:
            return None
    model_values = [measures[name] for measures in headline_measures]
    baseline_values = [] if gain is None else _list_baseline_values(name, runs, gain.baseline)
    ranked_gain = None
    # A gain is paired by seed, so every run needs a baseline with this measure.
    if len(baseline_values) == len(model_values):
        differences = [
            model_value - baseline_value
            for model_value, baseline_value in zip(model_values, baseline_values, strict=True)
        ]
        ranked_gain = Interval.from_values(differences, seed_correlation=seed_correlation)
    return RankingSummary(
        measure=name,
        reached=Interval.from_values(model_values, seed_correlation=seed_correlation),
        gain=ranked_gain,
    )


def _list_baseline_values(name: str, runs: Sequence[FinishedRun], baseline: str) -> list[float]:
    """Return a local model's values of the ranking measure `name`, of the runs that have one.

    `baseline`: name of the local model.
    """
    baselines = [
        run.local_models.find_baseline(baseline) for run in runs if run.local_models is not None
    ]
    return [measured.ranked[name] for measured in baselines if name in measured.ranked]
