"""APC-VFL's Table 2: what all parties predict together, against SplitNN's rounds and bytes.

All rows are aligned here, and both methods predict with every party: SplitNN trains end to end,
with Adam and early stopping; APC-VFL classifies the joint code (its Figure 4), after one exchange.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from apfed_experiments.presets import preset
from apfed_experiments.tables.apc_vfl_scenarios import SCENARIOS, Scenario
from apfed_experiments.tables.table import (
    Figures,
    FunctionJob,
    Line,
    PaperTable,
    Printed,
    Size,
    line_of,
)  # fmt: skip
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.exchange import Kind
from secure_apfed.methods.distilled import ApcVflSettings
from secure_apfed.runs.outcome import Progress
from secure_apfed.runs.run import run

__all__ = ["TABLES", "exchanged", "size_of"]

_SEEDS, _QUICK = 5, "breast_cancer"
# Of the passive's representation, and of the layer that ends in it (Table 3).
_WIDTH, _BEFORE, _BYTES = 256, 128, 4
_METHODS = {"SplitNN": "split_nn", "APC-VFL": "apc_vfl"}
_MEASURES = {
    "accuracy": "accuracy, per cent",
    "rounds": "rounds",
    "megabytes": "MB sent until training ends",
    "counted": "MB as the paper counts them",
}
# What the text of Table 2 still holds, by data set, aligned rows, method and measure.
_PRINTED = {
    ("mimic iii", rows, "APC-VFL", "counted"): megabytes
    for rows, megabytes in ((10_000, 9.73), (7_500, 7.17), (5_000, 4.61), (2_500, 2.05))
}


def exchanged(*, seed: int, config: Mapping[str, Any], way: str) -> Figures:
    """What one run reached, and what it sent until its last step; inference is left out."""
    of_run = Config.model_validate({**config, "seed": seed})
    data, last = load_data(of_run.data, seed=seed), list[Progress]()

    def note(progress: Progress) -> None:
        if progress.accuracy is None:
            last[:] = [progress]

    result = run(of_run, None, data=data, on_progress=note)
    sent = dict.fromkeys((Kind.REPRESENTATIONS, Kind.GRADIENTS), 0)
    for flow in result.recording.transcript.flows:
        if flow.kind in sent:
            sent[flow.kind] += flow.messages
    steps, rows = sent[Kind.GRADIENTS], len(data.train_rows)
    # Eqs. (6) to (9): every epoch sends all rows, every step the gradient of the last layer.
    exchanges = last[0].epoch if steps else 1
    layer = _BEFORE * _WIDTH + _WIDTH
    return {
        "accuracy": 100 * result.accuracy[way],
        "rounds": float(sum(sent.values()) - _parts(len(data.test_rows), of_run.train.batch_size)),
        "megabytes": last[0].wire_bytes / 1e6,
        "counted": _BYTES * (exchanges * rows * _WIDTH + steps * layer) / 1e6,
    }


def _parts(rows: int, batch_size: int) -> int:
    """In how many messages passives answer for rows that are predicted."""
    return math.ceil(rows / batch_size)


def _config(scenario: Scenario, rows: int, method: str) -> Config:
    """So many aligned rows, some of which test; networks and batches are the same for both."""
    data = preset(f"apc-vfl/{scenario.dataset}/all-aligned/{rows}")
    base = scenario.config(data, _METHODS["APC-VFL"], {})
    settings = base.model_dump(mode="json", exclude_defaults=True)
    if method == _METHODS["APC-VFL"]:
        # One message holds every row.
        settings["train"] |= {"epochs": 1, "batch_size": rows}
        return Config.model_validate(settings)
    codes = ApcVflSettings.of(base)
    return Config.model_validate({
        **settings,
        "method": method,
        "model": {**codes.own.model_dump(exclude_defaults=True), "head": [256, 256]},
        "passives": {"default": {"model": codes.passive.model_dump(exclude_defaults=True)}},
        "train": {
            **settings["train"], "optimizer": "adam", "weight_decay": 0.0, "patience": 10,
            "epochs": codes.epochs, "batch_size": scenario.batch_size,
        },
    })  # fmt: skip


def size_of(full: bool) -> Size:
    """Lines and jobs; those of breast cancer by default."""
    names = [name for name in SCENARIOS if full or name == _QUICK]
    wanted = [SCENARIOS[name] for name in names]
    jobs = [
        job
        for seed in range(_SEEDS)
        for scenario in wanted
        for rows in _aligned(scenario)
        for job in _jobs(scenario, rows, seed)
    ]
    return Size(lines=[line for scenario in wanted for line in _lines(scenario)], jobs=jobs)


def _aligned(scenario: Scenario) -> tuple[int, ...]:
    """The four numbers of the paper's Table 2."""
    return scenario.full.aligned[:4]


def _jobs(scenario: Scenario, rows: int, seed: int) -> Iterator[FunctionJob]:
    for label, method in _METHODS.items():
        config = _config(scenario, rows, method)
        yield FunctionJob(
            label=f"{scenario.dataset}-{method}-n{rows}",
            seed=seed,
            measure=exchanged,
            settings={
                "config": config.model_dump(mode="json", exclude_defaults=True),
                "way": method if method == _METHODS["SplitNN"] else f"{method}_together",
            },
            lines={
                line_of(_title(scenario), str(rows), label, told): measure
                for measure, told in _MEASURES.items()
            },
            cost=rows / scenario.batch_size,
        )


def _title(scenario: Scenario) -> str:
    return scenario.dataset.replace("_", " ")


def _lines(scenario: Scenario) -> Iterator[Line]:
    title = _title(scenario)
    for (measure, told), rows, label in product(_MEASURES.items(), _aligned(scenario), _METHODS):
        printed = _PRINTED.get((title, rows, label, measure))
        yield Line(
            cells=_cells(title, rows, label, told),
            paper=None if printed is None else Printed(mean=printed),
            panels=(f"{title}: {told}",),
            series=label,
            at=float(rows),
        )
    for rows in _aligned(scenario):
        told = _MEASURES["accuracy"]
        one, other = (line_of(title, str(rows), label, told) for label in ("APC-VFL", "SplitNN"))
        yield Line(
            cells=_cells(title, rows, "APC-VFL minus SplitNN", told),
            combines={one: 1.0, other: -1.0},
        )


def _cells(title: str, rows: int, label: str, measure: str) -> Mapping[str, str]:
    return {"data": title, "aligned rows": str(rows), "method": label, "measure": measure}


TABLES: tuple[PaperTable, ...] = (
    PaperTable(
        name="apc-vfl-splitnn",
        source="APC-VFL, Table 2",
        title="APC-VFL and SplitNN where all rows are aligned",
        unit="",
        reading="50 of the aligned rows test on breast cancer, 500 elsewhere; five features at the "
        "active. A round is a message of representations or gradients. All are scored by accuracy; "
        "the paper takes F1 on credit cards. Of its values the text that we have holds only some "
        "megabytes. SplitNN: Adam, at most 200 epochs, patience 10, weights of the last epoch. MB "
        "sent: alignment and agreement included; as the paper counts them: by Appendix E, for our "
        "epochs and steps.",
        leaves_out="credit cards, and MIMIC-III where its files are",
        hours=6.0,
        size=size_of,
        axis="aligned rows",
        shared=50 / 569,  # at most: of 569 people 50 test
    ),
)
