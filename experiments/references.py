"""Attacks beside figures that others published: several seeds of one shipped run, and one table.

`python -m experiments references` runs what is missing. Data and networks are smaller than in the
papers, or other ones: each entry says which, and the distance is written beside the figures.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from joblib import Parallel, delayed

from attacks.interface import AttackResult
from experiments import tables
from experiments.intervals import Interval
from experiments.main_job import base_config
from experiments.report.folder import Outcome
from experiments.trials import finish_trial
from secure_apfed.config import Config
from secure_apfed.folder_files import read_json
from secure_apfed.runs import RunFolder

__all__ = ["REFERENCES", "Reference", "ReferenceTable", "run_reference"]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A published figure and the run that stands beside it.

    Attributes:
        config: name of a shipped configuration; seeds: runs of it.
        variant: of an attack in it, which the figure is compared with.
        metrics: columns, keys of the attack's figures.
        published: those of the columns that the source gives.
        source: where the figure was read; setting: how the source's setting differs.
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


@dataclass(frozen=True, kw_only=True)
class ReferenceTable:
    """What the seeds found.

    Attributes:
        accuracy: of the runs themselves, on test rows.
        figures: by variant or baseline and metric.
    """

    reference: Reference
    accuracy: Interval
    figures: Mapping[tuple[str, str], Mapping[str, Interval]]

    @property
    def header(self) -> tuple[str, ...]:
        """Of `cells`."""
        return ("", *(metric.replace("_", " ") for metric in self.reference.metrics))

    def cells(self) -> list[tuple[str, ...]]:
        """Texts: every variant and baseline, what was published, and the distance to it."""
        wanted = self.reference
        rows = [
            (
                f"{kind}: {name}",
                *(
                    figures[one].text(form=".3f") if one in figures else "-"
                    for one in wanted.metrics
                ),
            )
            for (kind, name), figures in self.figures.items()
        ]
        ours = self.figures["attack", wanted.variant]
        published = [wanted.published.get(metric) for metric in wanted.metrics]
        distances = [
            None if figure is None else ours[metric].mean - figure
            for metric, figure in zip(wanted.metrics, published, strict=True)
        ]
        return [
            *rows,
            (f"published: {wanted.setting}",
             *("-" if one is None else f"{one:.3f}" for one in published)),
            (f"{wanted.variant} minus published",
             *("-" if one is None else f"{one:+.3f}" for one in distances)),
        ]  # fmt: skip

    def as_markdown(self) -> str:
        """The table with what it stands beside."""
        told = f"Accuracy of the runs {self.accuracy.text(scale=100)} %. {self.reference.source}."
        return f"{told}\n\n{tables.markdown(self.header, self.cells())}"


def run_reference(
    reference: Reference, folder: Path, *, jobs: int = 1,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> ReferenceTable:  # fmt: skip
    """Run the seeds that are missing below `folder`; return the table.

    Raises:
        CheckpointError: a folder holds a run with other settings.
        ApfedError: as `secure_apfed.runs.run`.
    """
    base = base_config(reference.config)
    configs = [
        base.model_copy(update={"name": f"{base.name}-seed{seed}", "seed": seed})
        for seed in range(reference.seeds)
    ]
    finished = Parallel(n_jobs=jobs, return_as="generator")(
        delayed(_finished)(config, folder / config.name) for config in configs
    )
    found = []
    for one in finished:
        found.append(one)
        on_done(len(found), len(configs))
    table = ReferenceTable(
        reference=reference,
        accuracy=Interval.of([accuracy for accuracy, _ in found]),
        figures=_figures([results for _, results in found], reference.metrics),
    )
    (folder / f"{reference.config}.md").write_text(table.as_markdown(), encoding="utf-8")
    return table


def _finished(config: Config, path: Path) -> tuple[float, list[AttackResult]]:
    finish_trial(config, path)
    folder = RunFolder(path)
    accuracy = next(iter(read_json(folder.result, Outcome).accuracy.values()))
    return accuracy, list(read_json(path / "attacks.json", tuple[AttackResult, ...]))


def _figures(
    by_seed: Sequence[Sequence[AttackResult]], metrics: Sequence[str]
) -> dict[tuple[str, str], dict[str, Interval]]:
    """Attacks first, then baselines; a name that several attacks have says the same in all.

    A seed without a figure (None: it was not finite) takes no part in its mean.
    """
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    for results in by_seed:
        told = {
            (kind, name): scores
            for kind, part in (("attack", "variants"), ("baseline", "baselines"))
            for result in results
            for name, scores in getattr(result, part).items()
        }
        for key, scores in told.items():
            for metric in metrics:
                if (figure := scores[metric]) is not None:
                    values.setdefault(key, {}).setdefault(metric, []).append(figure)
    return {
        key: {metric: Interval.of(listed) for metric, listed in by_metric.items()}
        for key, by_metric in values.items()
    }
