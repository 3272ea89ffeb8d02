"""What vectorised shadow models save: the same models at once and one after another.

Cases `lira/16` and `lira/64`: shadow models of the membership attack on digits (its top half,
a perceptron of 64 and 32 units, batches of 32), on the run's device, with all its threads.
`ratio` is sequential over vectorised time; both train from the same weights on the same
batches, and the row says how far their scores differ.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn

from apfed_attacks.people.membership import Shadows, halves
from apfed_attacks.recorded import reveal_candidates
from apfed_attacks.view import Candidates
from apfed_experiments.bench.rows import Bench, Group, Row, interleave, median_ratio, single
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.exchange import Transcript
from secure_apfed.learning.compute import find_device
from secure_apfed.models import encoder_and_head
from secure_apfed.runs.recording import Recording

__all__ = ["BENCH"]

_EPOCHS = 2


def _groups(quick: bool) -> Sequence[Group]:
    """Seconds of training and scoring all shadow models (target of lira/64: 8 times faster)."""
    prepared = cache(_prepared)
    return [
        single(f"lira/{models}", partial(_row, models, prepared))
        for models in ((16,) if quick else (16, 64))
    ]


BENCH = Bench(
    groups=_groups,
    ratio="times faster than the peer",
    fields=("peer_seconds", "largest_difference", "device"),
)


def _prepared() -> tuple[Shadows, Candidates]:
    config = Config.model_validate({
        "name": "bench-attacks", "method": "single_view",
        "data": {"dataset": "digits", "views": 2, "test_fraction": 0.5},
        "model": {"hidden": [64], "representation": 32, "dropout": 0.0},
        "train": {"epochs": _EPOCHS, "batch_size": 32, "learning_rate": 0.1},
        "guard": {"mechanism": "none"},
    })  # fmt: skip
    recording = Recording(
        config=config, data=load_data(config.data, seed=0), alignment={},
        transcript=Transcript(config.transcript),
    )  # fmt: skip
    candidates, _ = reveal_candidates(recording, 4_000, 0)
    shape = tuple(candidates.features.shape[1:])

    def make() -> nn.Module:
        return nn.Sequential(*encoder_and_head(config.model, shape, len(recording.data.classes)))

    return Shadows(make, config.train, 0, find_device("auto")), candidates


def _row(models: int, prepared: Callable[[], tuple[Shadows, Candidates]]) -> Row:
    shadows, candidates = prepared()
    rows_SH = halves(models, len(candidates), 0)
    scores: dict[str, Tensor] = {}

    def timed(name: str, train: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def call() -> None:
            scores[name] = train(candidates.features, candidates.labels, rows_SH)

        return call

    seconds = interleave(
        {
            "vectorised": timed("vectorised", shadows.scores),
            "sequential": timed("sequential", shadows.one_by_one),
        },
        repetitions=3,
        warm_up=0,
    )
    return Row(
        case=f"lira/{models}",
        seconds=sorted(seconds["vectorised"])[1],
        peer="the same models one after another",
        ratio=median_ratio(seconds["sequential"], seconds["vectorised"]),
        more={
            "peer_seconds": sorted(seconds["sequential"])[1],
            "largest_difference": float((scores["vectorised"] - scores["sequential"]).abs().max()),
            "device": str(shadows.device),
            "rows": len(candidates),
            "epochs": _EPOCHS,
            "threads": torch.get_num_threads(),
        },
    )
