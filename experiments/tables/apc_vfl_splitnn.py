"""APC-VFL's Table 2: what all parties predict together, against SplitNN's rounds and bytes.

All rows are aligned here, and both methods predict with every party: SplitNN trains end to end,
with Adam and early stopping; APC-VFL classifies the joint code (its Figure 4), after one exchange.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from experiments.tables.apc_vfl import SCENARIOS, Scenario
from experiments.tables.table import Figures, FunctionJob, Line, PaperTable, Size, line_of
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.exchange import Kind
from secure_apfed.runs import Progress, run

__all__ = ["TABLES", "exchanged", "size_of"]

_TESTED = {"breast_cancer": 50, "credit_card": 500}
_ROWS = {"breast_cancer": 569, "credit_card": 30_000}
_SEEDS, _FEATURES = 5, 5
# Of the passive's representation, and of the layer that ends in it (Table 3).
_WIDTH, _BEFORE, _BYTES = 256, 128, 4
_METHODS = {"SplitNN": "split_nn", "APC-VFL": "apc_vfl"}
_MEASURES = {
    "accuracy": "accuracy, per cent",
    "rounds": "messages of representations or gradients",
    "megabytes": "MB sent until training ends",
    "counted": "MB as the paper counts them",
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
    tested = _TESTED[scenario.dataset]
    base = scenario.config(_FEATURES, _METHODS["APC-VFL"], {})
    settings = base.model_dump(mode="json", exclude_defaults=True) | {"method": method}
    settings["data"] |= {
        "limit": rows - tested, "test_fraction": tested / _ROWS[scenario.dataset],
    }  # fmt: skip
    if method == _METHODS["APC-VFL"]:
        # One message holds every row.
        settings["train"] |= {"epochs": 1, "batch_size": rows}
        return Config.model_validate(settings)
    own, passive = base.distilled.own, base.distilled.passive
    settings.pop("distilled", None)
    return Config.model_validate({
        **settings,
        "model": {**own.model_dump(exclude_defaults=True), "head": [256, 256]},
        "passives": {"default": {"model": passive.model_dump(exclude_defaults=True)}},
        "train": {
            **settings["train"], "optimizer": "adam", "weight_decay": 0.0, "patience": 10,
            "epochs": base.distilled.epochs, "batch_size": scenario.batch_size,
        },
    })  # fmt: skip


def size_of(names: tuple[str, ...], quick: int, full: bool) -> Size:
    """Lines and jobs; by default those of the first so many data sets."""
    wanted = [SCENARIOS[name] for name in (names if full else names[:quick])]
    lines = [line for scenario in wanted for line in _lines(scenario)]
    jobs = [
        FunctionJob(
            label=f"{scenario.dataset}-{method}-n{rows}",
            seed=seed,
            measure=exchanged,
            settings={
                "config": config.model_dump(mode="json", exclude_defaults=True),
                "way": method if method == _METHODS["SplitNN"] else f"{method}_together",
            },
            lines={
                line_of(scenario.dataset, str(rows), label, told): measure
                for measure, told in _MEASURES.items()
            },
            cost=rows / scenario.batch_size,
        )
        for seed in range(_SEEDS)
        for scenario in wanted
        for rows in scenario.aligned
        for label, method in _METHODS.items()
        for config in (_config(scenario, rows, method),)
    ]
    return Size(lines=lines, jobs=jobs)


def _lines(scenario: Scenario) -> Iterator[Line]:
    title = scenario.dataset
    for measure in _MEASURES.values():
        for rows in scenario.aligned:
            for label in _METHODS:
                yield Line(
                    cells=_cells(title, rows, label, measure), panel=f"{title}: {measure}",
                    series=label, at=float(rows),
                )  # fmt: skip
    for rows in scenario.aligned:
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
        reading="50 of the aligned rows test on breast cancer, 500 on credit cards; five features "
        "at the active. Both are scored by accuracy; the paper takes F1 on credit cards. Its "
        "values are not in the text that we have. SplitNN: Adam, at most 200 epochs, patience 10, "
        "weights of the last epoch. MB: alignment and agreement included; as the paper counts them "
        "(Appendix E): by its formula, for our epochs and steps.",
        leaves_out="credit cards",
        hours=6.0,
        size=partial(size_of, ("breast_cancer", "credit_card"), 1),
        axis="aligned rows",
    ),
)
