"""Whom passives help on: the people that all parties share, or each on its own overlap.

`python -m experiments.overlap [--json] [--seeds N] [--picture FILE.png]`: test accuracy of
APFed-C on digits (three passives) and breast cancer (two) in both modes of `alignment.mode`,
beside the active alone.
Each passive knows a share of the active's training people, drawn for itself: with M
passives all share about overlap^M of them. No noise and a plain sum: neither of them
depends on the mode.
"""

import json
import statistics
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from experiments.overlap_picture import draw_overlaps
from protocols.errors import UnsafeChoiceWarning
from secure_apfed.config import Config
from secure_apfed.data import PartyTable, VerticalData, load_data
from secure_apfed.errors import NoHelpWarning
from secure_apfed.runs import run
from secure_apfed.seeds import derive_seed

__all__ = ["OVERLAPS", "OverlapRow", "compare_overlaps", "config_of", "main", "with_overlap"]

OVERLAPS = (0.05, 0.2, 0.5, 0.8)
_MODES = ("all", "pairwise")
_DATASETS: dict[str, dict[str, Any]] = {
    "digits": {
        "data": {"dataset": "digits", "views": 4, "overlap": 1.0},
        "model": {"hidden": [64], "representation": 32, "projection": 64, "dropout": 0.2},
        "train": {"batch_size": 64, "learning_rate": 0.1},
    },
    "breast_cancer": {
        "data": {"dataset": "breast_cancer", "overlap": 1.0},
        "model": {"hidden": [64], "representation": 16, "projection": 64, "dropout": 0.2},
        "train": {"batch_size": 32, "learning_rate": 0.02},
    },
}


@dataclass(frozen=True)
class OverlapRow:
    """One line of the comparison.

    Attributes:
        overlap: share of the active's training people that each passive knows.
        method: apfed_c in a mode, or the active alone.
        helped: training people on whom at least one passive helps, mean over the seeds.
        accuracy, deviation: on the test rows, mean and standard deviation over the seeds.
    """

    dataset: str
    overlap: float
    method: str
    helped: float
    accuracy: float
    deviation: float


def config_of(dataset: str, *, mode: str | None, seed: int, epochs: int) -> Config:
    """One run; without a mode the active trains alone."""
    settings = _DATASETS[dataset]
    return Config.model_validate(
        {
            "name": f"overlap-{dataset}",
            "seed": seed,
            "method": "apfed_c" if mode else "single_view",
            "data": settings["data"],
            "model": settings["model"],
            "train": settings["train"]
            | {
                "epochs": epochs,
                "evaluate_every": epochs,
                "device": "cpu",
                "max_gradient_norm": 1.0,
            },
            "alignment": {"mode": mode or "all", "protocol": "circuit"},
            "secure_sum": {"scheme": "plain", "allow_single_passive": True},
            "guard": {"mechanism": "none"},
        }
    )


def with_overlap(data: VerticalData, overlap: float, *, seed: int) -> VerticalData:
    """Leave each passive its own share of the active's training people, and all test people."""
    train = [data.active.ids[row] for row in data.train_rows.tolist()]
    passives = []
    for table in data.passives:
        draw = np.random.default_rng(derive_seed(seed, "overlap", table.name))
        dropped = set(draw.permutation(train)[round(overlap * len(train)) :].tolist())
        rows = [row for row, person in enumerate(table.ids) if person not in dropped]
        passives.append(_rows_of(table, rows))
    return VerticalData(data.active, tuple(passives), data.classes, data.train_rows, data.test_rows)


def _rows_of(table: PartyTable, rows: Sequence[int]) -> PartyTable:
    ids = tuple(table.ids[row] for row in rows)
    return PartyTable(table.name, ids, table.features[list(rows)], None, table.encoding)


def compare_overlaps(
    dataset: str, *, overlaps: Sequence[float] = OVERLAPS, seeds: int = 5, epochs: int = 20
) -> Iterator[OverlapRow]:
    """Yield the rows of one data set: the active alone, then both modes at each overlap."""
    yield _row(dataset, 0.0, None, seeds, epochs)
    for overlap in overlaps:
        for mode in _MODES:
            yield _row(dataset, overlap, mode, seeds, epochs)


def _row(dataset: str, overlap: float, mode: str | None, seeds: int, epochs: int) -> OverlapRow:
    accuracies, helped = [], []
    for seed in range(seeds):
        config = config_of(dataset, mode=mode, seed=seed, epochs=epochs)
        data = load_data(config.data, seed=seed)
        result = run(config, None, data=with_overlap(data, overlap, seed=seed) if mode else data)
        accuracies.append(result.accuracy[config.method])
        aligned = result.recording.alignment.get(data.active.name, torch.empty(0))
        helped.append(int(torch.isin(aligned, data.train_rows).sum()))
    return OverlapRow(
        dataset=dataset,
        overlap=overlap,
        method=f"apfed_c, {mode}" if mode else "the active alone",
        helped=statistics.mean(helped),
        accuracy=statistics.mean(accuracies),
        deviation=statistics.stdev(accuracies) if seeds > 1 else 0.0,
    )


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list, nothing else.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each line.")] = 5,
    epochs: Annotated[int, typer.Option(min=1, help="Of each run.")] = 20,
    picture: Annotated[Path | None, typer.Option(help="Also draw it into this PNG file.")] = None,
) -> None:
    """Compare the two overlap modes on digits and breast cancer."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UnsafeChoiceWarning)  # see above: a plain sum on purpose
    warnings.simplefilter("ignore", NoHelpWarning)  # what few common rows come to is the question
    rows = [row for name in _DATASETS for row in compare_overlaps(name, seeds=seeds, epochs=epochs)]
    if picture is not None:
        draw_overlaps(rows, picture)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
        return
    table = Table(*OverlapRow.__dataclass_fields__)
    for row in rows:
        table.add_row(
            row.dataset, f"{row.overlap:.0%}", row.method, f"{row.helped:.0f}",
            f"{row.accuracy:.4f}", f"{row.deviation:.4f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
