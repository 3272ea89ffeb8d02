"""What every secure sum costs, against the way that TenSEAL's tutorials show.

A case `NAME/mM` is the whole path of one sum of M contributions of 128 x 256 float32 in one
thread: clip, quantise, encrypt, serialise, check, combine, decode. `ratio` is the tutorial's
time over the case's, each the fastest of several taken in turns (what else a machine does only
adds to short times, and more to some than to others); the tutorial is CKKS with N = 8192, primes
[60, 40, 40, 60] and `tolist()`. `bytes_per_value` is of what one passive sends. With the pool,
zeros were encrypted before the clock starts; with recovery, nobody falls silent. Longer runs
add other M and D. `share/NAME` is what one sum adds to a training step of APFed-C on
Fashion-MNIST in batches of 128, when passives encrypt at the same time: one contribution,
combine and decode over the step; `share` is its `ratio` once more, 0.05 for 5 %.
"""

from collections.abc import Iterator

import numpy as np
import torch

from experiments.bench.optional import why_no_crypten
from experiments.bench.paillier import PackedPaillier, why_not
from experiments.bench.rows import Row, interleave, median_ratio
from experiments.bench.sum_paths import (
    CASES,
    ON_CRYPTEN,
    OurPath,
    Shape,
    SumPath,
    TutorialPath,
    Values,
)
from experiments.bench.training_step import training_step

__all__ = ["bench"]

_SHAPE = (128, 256)
_PASSIVES = 4
_OTHER_PASSIVES = (2, 8, 16, 64)
_OTHER_SHAPES = ((128, 64), (256, 1024), (256, 15_360))
_STEP_SHAPE = (128, 64)
_TURN = 0.01
_TUTORIAL = "tutorial"


def bench(quick: bool) -> Iterator[Row]:
    """Ratios at M = 4, shares of a step; unless `quick`, other M and D, and Paillier."""
    torch.set_num_threads(1)
    yield from _table(_PASSIVES, _SHAPE, repetitions=9 if quick else 31)
    yield _paillier(quick)
    if reason := why_no_crypten():
        yield _absent(f"{ON_CRYPTEN}/m{_PASSIVES}", reason)
    yield from _shares(repetitions=3 if quick else 21)
    if not quick:
        for passives in _OTHER_PASSIVES:
            yield from _table(passives, _SHAPE, repetitions=3)
        for shape in _OTHER_SHAPES:
            yield from _sizes(shape)


def _table(passives: int, shape: Shape, *, repetitions: int) -> Iterator[Row]:
    values = _values(passives, shape)
    paths: dict[str, SumPath] = {name: OurPath(name, values) for name in _ours()}
    paths[_TUTORIAL] = TutorialPath(values)
    seconds: dict[str, list[float]] = {name: [] for name in paths}
    for repetition in range(-1, repetitions):
        for name, path in paths.items():
            spent = _turn(path)
            if repetition >= 0:
                seconds[name].append(spent)
    for name, path in paths.items():
        yield Row(
            case=f"{name}/m{passives}",
            seconds=min(seconds[name]),
            peer=f"{_TUTORIAL}/m{passives}",
            ratio=min(seconds[_TUTORIAL]) / min(seconds[name]),
            bytes=path.contribution_bytes,
            more=_size(path, shape),
        )


def _turn(path: SumPath) -> float:
    """The fastest run of a turn; short paths run several times, so that caches are warm."""
    runs: list[float] = []
    while sum(runs) < _TURN:
        path.prepare()
        runs.append(sum(path.run()))
    return min(runs)


def _sizes(shape: Shape) -> Iterator[Row]:
    """Each sum once at another size of a contribution, without the tutorial."""
    values = _values(_PASSIVES, shape)
    for name in _ours():
        path = OurPath(name, values)
        path.prepare()
        spent = sum(path.run())
        case = f"{name}/m{_PASSIVES}/{shape[0]}x{shape[1]}"
        more = _size(path, shape)
        yield Row(case=case, seconds=spent, bytes=path.contribution_bytes, more=more)


def _shares(*, repetitions: int) -> Iterator[Row]:
    """Share of a training step, in turns with training steps."""
    step, images = training_step()
    paths = {name: OurPath(name, _values(_PASSIVES, _STEP_SHAPE)) for name in _ours()}
    costs: dict[str, list[float]] = {name: [] for name in paths}
    steps = []
    for repetition in range(-1, repetitions):
        steps.append(interleave({"step": step}, repetitions=1, warm_up=0)["step"][0])
        for name, path in paths.items():
            path.prepare()
            contribute, combine, decode = path.run()
            if repetition >= 0:
                costs[name].append(contribute / _PASSIVES + combine + decode)
    for name, spent in costs.items():
        yield Row(
            case=f"share/{name}",
            seconds=min(spent),
            peer="training step",
            ratio=(share := min(spent) / min(steps[1:])),
            more={"share": share, "peer_seconds": min(steps[1:]), "images": images},
        )


def _paillier(quick: bool) -> Row:
    case = "phe-packed/m4"
    reason = "it takes minutes; run without --quick" if quick else why_not()
    if reason is not None:
        return _absent(case, reason)
    peer = PackedPaillier(passives=_PASSIVES)
    values = _values(_PASSIVES, _SHAPE)
    seconds = interleave(
        {_TUTORIAL: TutorialPath(values).run, case: lambda: peer.add(values)},
        repetitions=1,
        warm_up=0,
    )
    count = _SHAPE[0] * _SHAPE[1]
    return Row(
        case=case,
        seconds=seconds[case][0],
        peer=f"{_TUTORIAL}/m{_PASSIVES}",
        ratio=median_ratio(seconds[_TUTORIAL], seconds[case]),
        bytes=peer.contribution_bytes(count),
        more={"bytes_per_value": peer.contribution_bytes(count) / count},
    )


def _ours() -> list[str]:
    """The cases that can be measured here."""
    return [name for name in CASES if name != ON_CRYPTEN or not why_no_crypten()]


def _absent(case: str, reason: str) -> Row:
    return Row(case=case, seconds=None, more={"bytes_per_value": None, "reason": reason})


def _size(path: SumPath, shape: Shape) -> dict[str, float]:
    return {"bytes_per_value": path.contribution_bytes / (shape[0] * shape[1])}


def _values(passives: int, shape: Shape) -> Values:
    """Gradients of about a tenth of the clip bound."""
    rng = np.random.default_rng(0)
    scale = 0.1 / shape[1] ** 0.5
    return [
        rng.normal(scale=scale, size=shape).astype(np.float32, copy=False) for _ in range(passives)
    ]
