"""A run under several seeds: what `secure-apfed run CONFIG --seeds N` says of all of them.

Each seed draws another split of the data and is a run folder of its own; those that lie there
already are not run again. Initial weights and dropout come from what `party_seeds` says: a secret
seed of each party, so that no run repeats figure for figure, or the run's, so that all do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from apfed_attacks.headlines import list_directions
from apfed_experiments import words
from apfed_experiments.columns import Column, Table, missing_leak, write_text
from apfed_experiments.finished import FinishedRun
from apfed_experiments.report.page import Part
from apfed_experiments.runner import Study
from apfed_experiments.solo import RANKINGS
from apfed_experiments.study import (
    Failure,
    Figures,
    OnDone,
    Point,
    Trial,
    figures_of,
    list_trials,
    run_points,
)
from apfed_experiments.summary import Gain, Interval, Row, Summary, accuracy_of, clip_difference
from apfed_experiments.verdict import describe_seeds
from secure_apfed.base.files import to_json
from secure_apfed.config import Config
from secure_apfed.measures.table import MEASURES, Measure
from secure_apfed.runs.outcome import RANKED, Ranking
from secure_apfed.settings.promises import epsilon_words

_KINDS = {
    "secret": "each party drew a secret seed of its own for its initial weights and dropout, so "
    "that the same seeds give somewhat other figures next time",
    "shared_for_comparison": "initial weights and dropout came from the run's seed at all parties, "
    "so that the same seeds give the same figures",
}


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A ranking measure (AUC or average precision) of two classes over the seeds, and its gain.

    The gain is paired by seed, over the baseline that held-out labels choose by the run's own
    measure; None: not measured.
    """

    measure: str
    reached: Interval
    gain: Interval | None


@dataclass(frozen=True, kw_only=True)
class SeveralSeeds:
    """The results of the runs of one configuration.

    Attributes:
        reached: the run's own measure, by seed.
        rankings: what test rows of two classes say, by seed; ranked: of measures that the run is
            not judged by.
    """

    config: Config
    folders: dict[int, Path]
    reached: dict[int, float]
    summary: Summary
    rankings: Mapping[int, Ranking] = field(default_factory=dict)
    ranked: tuple[Ranked, ...] = ()
    failures: tuple[Failure, ...] = ()

    def list_common_rows(self) -> list[tuple[str, str]]:
        """Return the rows of all seeds together, without single seeds."""
        measure = MEASURES[self.config.measure]
        summary = self.summary
        rows = [
            (f"{measure.title}, {name}", _format_interval(measure, interval))
            for name, interval in summary.accuracies.items()
        ]
        if summary.gain is not None:
            rows.append(("help", summary.gain.sentence))
        for ranked in self.ranked:
            title = MEASURES[ranked.measure].title
            gained = ""
            if ranked.gain is not None:
                gain = clip_difference(ranked.gain, ranked.measure)
                gained = f"; {gain.format_text(form='+.3f')} over the same baseline"
            rows.append(
                (title, _format_interval(MEASURES[ranked.measure], ranked.reached) + gained)
            )
        if self.rankings:
            counts = [ranking.positives for ranking in self.rankings.values()]
            seeds_met = sum(ranking.is_met for ranking in self.rankings.values())
            rows += [
                ("positives among test rows", f"{min(counts)} to {max(counts)}"),
                ("mean probability is met", f"in {seeds_met} of {len(counts)} seeds"),
            ]
        largest = epsilon_words(summary.epsilon_of(self.config.method) or None)
        rows.append(("largest epsilon", largest))
        rows += [
            (kind, f"{leak.clipped_advantage.format_text(form='+.3f')} ({leak.name})")
            for kind, leak in summary.leakage.items()
        ]
        rows += self.missing_attacks.items()
        return rows

    @property
    def missing_attacks(self) -> dict[str, str]:
        """Return the directions of this run of which no attack ran under any seed, each with the
        reason.
        """
        kinds = [direction.kind for direction in list_directions(self.config)]
        return {
            kind: missing_leak(self.config, kind)
            for kind in kinds
            if kind not in self.summary.leakage
        }

    def as_json(self) -> dict[str, Any]:
        """Return the results of all seeds as plain values."""
        summary = self.summary
        return {
            "seeds": list(self.reached),
            "party_seeds": self.config.party_seeds,
            "measure": self.config.measure,
            "reached": {str(seed): value for seed, value in self.reached.items()},
            "intervals": {name: asdict(interval) for name, interval in summary.accuracies.items()},
            "gain": None if summary.gain is None else asdict(summary.gain),
            "ranked": [asdict(ranked) for ranked in self.ranked],
            "rankings": {
                str(seed): ranking.model_dump(mode="json")
                for seed, ranking in self.rankings.items()
            },
            "epsilon": summary.epsilon_of(self.config.method),
            "wire_bytes": summary.wire_bytes,
            "leakage": {target: leak.as_json() for target, leak in summary.leakage.items()},
            "not_attacked": self.missing_attacks,
            "verdict": dict(describe_seeds(self)),
            "folders": {str(seed): str(path) for seed, path in self.folders.items()},
        }


def declare_study(
    config: Config, folder: Path, *, seeds: int, baselines: bool = True
) -> Study[SeveralSeeds]:
    """Return the study of a run under `config.seed` and the seeds after it; `several.json` has all.

    `config.party_seeds` holds; without `baselines` of what the active does alone there is no gain.
    """
    point = Point(config=config, folder=folder, party_seeds=config.party_seeds)
    trials = list_trials([point], range(config.seed, config.seed + seeds))
    return Study(
        title=f"{config.name}: {seeds} seeds",
        reading=f"Each seed draws its rows anew; {_KINDS[config.party_seeds]} (party_seeds: "
        f"{config.party_seeds}). Intervals: 95 %, over the seeds, corrected for the people that "
        "splits of one table share (Nadeau and Bengio 2003); the gain is paired by seed.",
        folder=folder,
        measure=partial(_run_seeds, trials, baselines=baselines),
        compare=_make_parts,
        unit="seeds",
        reported=trials,
    )


def _run_seeds(
    trials: Sequence[Trial], *, baselines: bool, jobs: int, on_done: OnDone
) -> SeveralSeeds:
    """Run what is missing of all seeds, summarise them, and write several.json.

    `trials`: runs of all seeds. `baselines`: whether local models are measured. `jobs`: how many
    runs at a time.
    """
    point = trials[0].point
    config = point.config
    runs = dict[int, FinishedRun]()

    def note_figures(run: FinishedRun) -> Figures:
        """Note a finished run by its seed, and yield its figures."""
        runs[run.config.seed] = run
        return figures_of(run)

    folders = {trial.seed: trial.path for trial in trials}
    table = run_points(
        [point], list(folders), jobs=jobs, on_done=on_done, solo=baselines, figures=note_figures
    ).table
    reached = {int(str(seed)): float(value) for seed, value in accuracy_of(table).items()}
    summary = Summary.from_rows(table)
    shared = float(table["shared"].max())
    ranking_by_seed = {seed: run.outcome.ranking for seed, run in runs.items()}
    several = SeveralSeeds(
        config=config,
        folders=folders,
        reached=reached,
        summary=summary,
        rankings={
            seed: ranking for seed, ranking in ranking_by_seed.items() if ranking is not None
        },
        ranked=tuple(
            ranked
            for name in RANKINGS
            if name != config.measure
            and (ranked := _summarise_ranking(name, list(runs.values()), summary.gain, shared))
            is not None
        ),
    )
    write_text(point.folder / "several.json", to_json(several.as_json(), indent=1))
    return several


def _make_parts(several: SeveralSeeds) -> list[Part]:
    """Return what all seeds say together, then a row for each seed."""
    together = [{"figure": name, "value": value} for name, value in several.list_common_rows()]
    columns = [Column(name="figure", title=""), Column(name="value", title="")]
    title = f"{several.config.name}: {len(several.reached)} seeds"
    lines = describe_seeds(several)
    return [
        Part(name="together", table=Table(columns, together, title), lines=lines),
        Part(name="seeds", table=_make_seed_table(several)),
    ]


def _make_seed_table(several: SeveralSeeds) -> Table:
    """Return a row for each seed: its measure and, of two classes, what the test rows say."""
    measure = MEASURES[several.config.measure]
    rankings = several.rankings
    names = [name for name in RANKED if rankings and name != measure.name]
    rows: list[Row] = []
    for seed, reached in several.reached.items():
        row: Row = {"seed": f"seed {seed}", measure.name: measure.format_value(reached)}
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
    titles = {"seed": "seed"} | {name: MEASURES[name].title for name in (measure.name, *names)}
    if rankings:
        titles |= {"positives": "positives", "share": "their share", "predicted": "predicted"}
    columns = [Column(name=name, title=title) for name, title in titles.items()]
    return Table(columns, rows, "By seed")


def _format_interval(measure: Measure, interval: Interval) -> str:
    """Return a mean and its interval in the measure's unit, cut at the measure's range."""
    form = {"scale": 100.0, "form": ".2f"} if measure.share else {"form": ".4f"}
    return interval.clip_ends(measure.least, measure.most).format_text(**form) + (
        " %" if measure.share else ""
    )


def _summarise_ranking(
    name: str, runs: list[FinishedRun], gain: Gain | None, shared: float
) -> Ranked | None:
    """Return a ranking measure over all runs, with its gain where baselines have it, too.

    None: a run did not tell two classes apart, or was not measured by it.

    `shared`: correlation of two seeds' figures.
    """
    first = [next(iter(run.outcome.measures.values()), {}) for run in runs]
    if not all(
        run.outcome.ranking and name in measures for run, measures in zip(runs, first, strict=True)
    ):
        return None
    reached = [measures[name] for measures in first]
    local_values = (
        []
        if gain is None
        else [
            run.solo.find_baseline(gain.baseline).ranked[name]
            for run in runs
            if run.solo is not None and name in run.solo.find_baseline(gain.baseline).ranked
        ]
    )
    paired = None
    if len(local_values) == len(reached):
        differences = [value - other for value, other in zip(reached, local_values, strict=True)]
        paired = Interval.from_values(differences, shared=shared)
    return Ranked(measure=name, reached=Interval.from_values(reached, shared=shared), gain=paired)
