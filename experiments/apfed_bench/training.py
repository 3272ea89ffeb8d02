"""Simulated training beside a straightforward script, and several seeds beside one after another.

Peers: of one run, a script as a tutorial has it (DataLoader, one model, float32, the same networks
and optimiser), of which a step of APFed-C has two models; of several seeds, the same runs one after
the other with all cores each. `ratio` is the peer's seconds over ours.

Cases `step/...` are counted, not timed: operations by torch's counter of matrix products and
convolutions, bytes as the inputs and outputs of every kernel, as if none stayed in a cache. With
what a GPU can do of both, that is the least time of a step there, and how many runs must train
together to fill it.

`ATTACKS`, cases `lira/16` and `lira/64`: shadow models of the membership attack on digits (its top
half, a perceptron of 64 and 32 units, batches of 32), on the run's device, with all its threads,
all at once; the peer is one after another. Both train from the same weights on the same batches,
and the row says how far their scores differ.
"""

import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from joblib import Parallel, delayed
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from apfed_attacks.people.membership import Shadows, halves
from apfed_attacks.recorded import reveal_candidates
from apfed_attacks.view import Candidates
from apfed_bench.rows import (
    Bench,
    Group,
    Row,
    compared,
    interleave,
    median_ratio,
    on_images,
    row,
    single,
)
from apfed_experiments.tables.apfed import PROXY, run_of
from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import DataError
from secure_apfed.exchange import Transcript
from secure_apfed.learning.descent import find_device
from secure_apfed.methods import METHODS, Simulation, Start
from secure_apfed.methods.method import batches_of
from secure_apfed.models import encoder_and_head
from secure_apfed.objectives import contrastive_loss
from secure_apfed.runs.outcome import Recording
from secure_apfed.simulation import begin, simulate, train
from secure_apfed.workers import usable_cores

__all__ = ["ATTACKS", "TRAINING"]

_BATCH = 256
_SCRIPT, _ONE_BY_ONE, _MESSAGES = "a plain script", "one after another", "parties with messages"
# NVIDIA's data sheet of the H200 (SXM): bfloat16 without sparsity, and memory.
_H200_OPERATIONS, _H200_BYTES = 989e12, 4.8e12
_EPOCHS = 2


def _groups(quick: bool) -> Sequence[Group]:
    steps, repetitions = (2, 2) if quick else (8, 7)
    of_images = f"fmnist/2-1/b{_BATCH}"
    return [
        *(single(f"{method}/{of_images}", _one_run, method, steps, repetitions)
          for method in ("single_view", "apfed_c")),
        *(single(f"step/{method}/{of_images}", _operations, method)
          for method in ("single_view", "apfed_c", "apfed_r", "tvfl")),
        single("five-seeds/digits", _seeds, *((10, 1) if quick else (100, 5))),
    ]  # fmt: skip


TRAINING = Bench(
    groups=_groups,
    ratio="the peer's seconds over ours",
    fields=(
        "precision", "bfloat16_units", "over_messages", "processes",
        "operations", "kernels", "h200_floor_us", "bound_by",
    ),
)  # fmt: skip


def _one_run(case: str, method: str, steps: int, repetitions: int) -> Row:
    try:
        config, data, images = _images(method, steps)
    except DataError as error:
        return row(case, reason=str(error))
    with _threads(usable_cores()):
        seconds = interleave(
            {
                case: lambda: train(begin(config, data), config),
                _SCRIPT: lambda: _script(config, data),
                _MESSAGES: lambda: _by_messages(config, data),
            },
            repetitions=repetitions,
        )
    return row(
        case, statistics.median(seconds[case]) / steps, peer=_SCRIPT,
        ratio=median_ratio(seconds[_SCRIPT], seconds[case]), images=images,
        precision=config.train.precision, bfloat16_units=_has_bfloat16(),
        over_messages=median_ratio(seconds[_MESSAGES], seconds[case]),
    )  # fmt: skip


def _operations(case: str, method: str) -> Row:
    """The count of one epoch of this run, which is one step."""
    try:
        config, data, _ = _images(method, 1)
    except DataError as error:
        return row(case, reason=str(error))
    session = begin(config, data)
    operations, touched = FlopCounterMode(display=False), _Touched()
    with operations, touched:
        steps = train(session, config)
    flops, moved = operations.get_total_flops() / steps, touched.bytes / steps
    floor = max(flops / _H200_OPERATIONS, moved / _H200_BYTES)
    return row(
        case, sent=round(moved), operations=round(flops), kernels=round(touched.kernels / steps),
        operations_a_byte=flops / moved, h200_floor_us=1e6 * floor,
        bound_by="memory" if moved / _H200_BYTES == floor else "arithmetic",
    )  # fmt: skip


def _images(method: str, steps: int) -> tuple[Config, VerticalData, str]:
    """A run of Table 2's first cell for so many steps; see `on_images`."""

    def config(dataset: str) -> Config:
        of_table = run_of(dataset, "2-1", method, 10.0, PROXY)
        settings = of_table.model_dump(mode="json", exclude_defaults=True)
        settings["data"]["limit"] = steps * _BATCH
        precision = "bfloat16" if _has_bfloat16() else "float32"
        settings["train"] |= {"epochs": 1, "batch_size": _BATCH, "precision": precision}
        return Config.model_validate(settings)

    return on_images(config)


def _has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 in units of its own."""
    try:
        flags = Path("/proc/cpuinfo").read_text("ascii", errors="ignore").split()
    except OSError:
        return False
    return bool({"avx512_bf16", "amx_bf16"}.intersection(flags))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _by_messages(config: Config, data: VerticalData) -> None:
    prepared = begin(config, data)  # for the alignment, which is not what is measured
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        start = Start(config=config, data=data, alignment=prepared.alignment or None)
        session, step = Simulation(METHODS[config.method.name], start), 0
    session.transcript.begin_epoch(0)
    for rows_B in batches_of(session.learner, config, 0):
        session.step(step, rows_B)
        step += 1


def _encoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 5, padding=1), nn.ReLU(),
        nn.Flatten(),
    )  # fmt: skip


def _script(config: Config, data: VerticalData) -> None:
    """One epoch as a tutorial would write it, for the active alone or with one passive."""
    rows = data.train_rows
    views = [data.active.features[rows]]
    if "passives take part" in config.method.happens:
        views.append(data.passives[0].features[rows])
    labels = data.active.labels
    assert labels is not None
    encoders = [_encoder() for _ in views]
    size = encoders[0](views[0][:1]).shape[1]
    head = nn.Sequential(
        nn.Linear(size, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, len(data.classes))
    )
    projections = [nn.Linear(size, 64) for _ in views] if len(views) > 1 else []
    every = nn.ModuleList([*encoders, head, *projections])
    optimizer = torch.optim.SGD(
        every.parameters(), lr=config.train.learning_rate, momentum=config.train.momentum,
        weight_decay=config.train.weight_decay,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(*views, labels[rows]), batch_size=_BATCH, shuffle=True)
    for *features, labels_B in loader:
        optimizer.zero_grad()
        encoded = [encode(view) for encode, view in zip(encoders, features, strict=True)]
        loss = F.cross_entropy(head(encoded[0]), labels_B)
        if projections:
            pair = [project(h) for project, h in zip(projections, encoded, strict=True)]
            loss = loss + contrastive_loss(pair[0], pair[1])
        loss.backward()
        optimizer.step()


def _seeds(case: str, epochs: int, repetitions: int) -> Row:
    """Five small runs at once, in as many processes as there are cores, which stay open."""
    configs = [_digits(seed, epochs) for seed in range(5)]
    cores = usable_cores()
    with Parallel(n_jobs=cores) as pool, _threads(cores):
        return compared(
            case, lambda: pool(delayed(_alone)(config) for config in configs),
            lambda: [simulate(config) for config in configs], peer=_ONE_BY_ONE,
            repetitions=repetitions, faster=True, peer_seconds=False, processes=cores,
        )  # fmt: skip


def _alone(config: Config) -> None:
    torch.set_num_threads(1)
    simulate(config)


def _digits(seed: int, epochs: int) -> Config:
    return Config.model_validate({
        "name": f"five-seeds-{seed}", "method": "apfed_c", "seed": seed,
        "data": {"dataset": "digits", "views": 2},
        "model": {"hidden": [64], "representation": 32, "projection": 32},
        "train": {"epochs": epochs, "batch_size": 64, "learning_rate": 0.05, "device": "cpu"},
        "rules": {"minimum_spread": 0},
        "guard": {"mechanism": "none"},
        "secure_sum": {"scheme": "plain", "clip": None, "allow_single_passive": True},
        "transcript": {"keep": "none"},
    })  # fmt: skip


class _Touched(TorchDispatchMode):
    """Adds up the bytes of the inputs and outputs of kernels; views touch nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.kernels = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            leaves = tree_leaves((args, kwargs, result))
            self.bytes += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
            self.kernels += 1
        return result


def _attacks_groups(quick: bool) -> Sequence[Group]:
    """Seconds of training and scoring all shadow models (target of lira/64: 8 times faster)."""
    prepared = cache(_prepared)
    return [
        single(f"lira/{models}", _attacks_row, models, prepared)
        for models in ((16,) if quick else (16, 64))
    ]


ATTACKS = Bench(
    groups=_attacks_groups, ratio="times faster than the peer",
    fields=("peer_seconds", "largest_difference", "device"),
)  # fmt: skip


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


def _attacks_row(case: str, models: int, prepared: Callable[[], tuple[Shadows, Candidates]]) -> Row:
    shadows, candidates = prepared()
    rows_SH = halves(models, len(candidates), 0)
    scores: dict[str, Tensor] = {}

    def timed(name: str, train: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def call() -> None:
            scores[name] = train(candidates.features, candidates.labels, rows_SH)

        return call

    found = compared(
        case, timed("vectorised", shadows.scores),
        timed("sequential", shadows.one_by_one), peer="the same models one after another",
        repetitions=3, warm_up=0, faster=True, device=str(shadows.device), rows=len(candidates),
        epochs=_EPOCHS, threads=torch.get_num_threads(),
    )  # fmt: skip
    difference = float((scores["vectorised"] - scores["sequential"]).abs().max())
    return {**found, "largest_difference": difference}
