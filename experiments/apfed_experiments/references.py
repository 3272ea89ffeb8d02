"""Attacks beside figures that others published: several seeds of one shipped run, and one table.

`secure-apfed study references` runs what is missing. Data and networks are smaller than in
the papers, or other ones: each entry says which, and the distance is written beside the figures.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from apfed_experiments.columns import Column, Table, within, write_text
from apfed_experiments.finished import FinishedRun
from apfed_experiments.study import Figures, OnDone, Point, Study, base_config, figures_of
from apfed_experiments.summary import Interval, Row, accuracy_of

__all__ = ["REFERENCES", "Reference", "run_reference"]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A published figure, its source, and the run that stands beside it.

    Attributes:
        config: name of a shipped configuration; variant: of an attack in it.
        metrics: keys of the attack's figures; published: those that the source gives.
        setting: how the source's setting differs.
    """

    config: str
    seeds: int
    variant: str
    metrics: tuple[str, ...]
    published: Mapping[str, float]
    source: str
    setting: str


REFERENCES: Mapping[str, Reference] = {
    "membership": Reference(
        config="reference-lira",
        seeds=3,
        variant="likelihood ratio",
        metrics=("auc", "tpr_at_1_percent_fpr", "tpr_at_0.1_percent_fpr"),
        published={"auc": 0.6856, "tpr_at_0.1_percent_fpr": 0.0593},
        source="official code of Carlini et al. (2022), 16 models",
        setting="CIFAR-10, wide residual network",
    ),
    "model_completion": Reference(
        config="reference-pmc",
        seeds=3,
        variant="own network, trained further",
        metrics=("accuracy", "balanced_accuracy"),
        published={"accuracy": 0.8024},
        source="Fu et al. (2022), training rows, as quoted in issue 6 of "
        "FuChong-cyber/label-inference-attacks",
        setting="CIFAR-10, residual networks",
    ),
}


def run_reference(
    reference: Reference, folder: Path, *, jobs: int = 1,
    on_done: OnDone = lambda done, total: None,
) -> tuple[Table, Interval]:  # fmt: skip
    """Run the seeds that are missing below `folder`.

    Returns a row for every variant ("attack: NAME") and baseline, what was published, and the
    distance to it; and the accuracy of the runs themselves, on test rows.
    """
    point = Point(config=base_config(reference.config), folder=folder)
    study = Study(points=[point], seeds=range(reference.seeds))
    rows = study.run(jobs=jobs, figures=_scores_of, on_done=on_done).table
    wanted = rows["target"].isin(("attack", "baseline")) & rows["metric"].isin(reference.metrics)
    shared = float(rows["shared"].max())
    # Attacks first, then baselines.
    found: dict[str, Row] = {}
    known = rows[wanted & rows["score"].notna()]
    for (kind, name), of_name in known.groupby(["target", "name"], sort=False):
        title = f"{kind}: {name}"
        found[title] = {"name": title} | {
            str(metric): Interval.of(of_metric["score"].tolist(), shared=shared)
            for metric, of_metric in of_name.groupby("metric", sort=False)
        }
    ours = found[f"attack: {reference.variant}"]
    distance = {
        metric: f"{ours[metric].mean - figure:+.3f}"
        for metric, figure in reference.published.items()
    }
    columns = [Column(name="name", title="")] + [
        Column(name=metric, title=metric.replace("_", " "), form=within(".3f"), missing="-")
        for metric in reference.metrics
    ]
    table = Table(columns, [
        *found.values(),
        {"name": f"published: {reference.setting}", **reference.published},
        {"name": f"{reference.variant} minus published", **distance},
    ], reference.source)  # fmt: skip
    accuracy = Interval.of(accuracy_of(rows).tolist(), shared=shared)
    told = f"Accuracy of the runs {accuracy.text(scale=100)} %. {reference.source}."
    write_text(folder / f"{reference.config}.md", f"{told}\n\n{table.markdown()}")
    return table, accuracy


def _scores_of(run: FinishedRun) -> Figures:
    """Of every variant and baseline; a name that several attacks have says the same in all.

    A score is None where it was not finite: that seed takes no part in its mean.
    """
    yield from (figure for figure in figures_of(run) if figure["target"] == "task")
    for kind, part in (("attack", "variants"), ("baseline", "baselines")):
        scores = {
            name: by_metric
            for result in run.attacks or ()
            for name, by_metric in getattr(result, part).items()
        }
        for name, by_metric in scores.items():
            for metric, score in by_metric.items():
                yield {"target": kind, "name": name, "metric": metric, "score": score}
