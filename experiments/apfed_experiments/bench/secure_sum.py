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

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from apfed_experiments.bench.machine import clock_step
from apfed_experiments.bench.optional import why_no_crypten
from apfed_experiments.bench.paillier import PackedPaillier, why_not
from apfed_experiments.bench.rows import (
    Bench,
    Group,
    Row,
    absent,
    interleave,
    median_ratio,
    quotient,
    single,
)
from apfed_experiments.bench.sum_paths import (
    CASES,
    ON_CRYPTEN,
    OurPath,
    Shape,
    SumPath,
    TutorialPath,
    Values,
)
from apfed_experiments.bench.training_step import training_step
from secure_apfed.seeds import one_thread

__all__ = ["BENCH"]

_SHAPE = (128, 256)
_PASSIVES = 4
_OTHER_PASSIVES = (2, 8, 16, 64)
_OTHER_SHAPES = ((128, 64), (256, 1024), (256, 15_360))
_STEP_SHAPE = (128, 64)
_TURN = 0.01
_FINE, _STEPS = 1e-4, 50
_TUTORIAL = "tutorial"
_PAILLIER = "phe-packed/m4"


def _groups(quick: bool) -> Sequence[Group]:
    """Ratios at M = 4, shares of a step; unless `quick`, other M and D, and Paillier."""
    brief = [
        _table(_PASSIVES, 9 if quick else 31),
        single(_PAILLIER, partial(_paillier, quick)),
        _of_each_sum("share/{}", partial(_shares, 3 if quick else 21)),
    ]
    if quick:
        return brief
    others = [_table(passives, 3) for passives in _OTHER_PASSIVES]
    return (
        brief
        + others
        + [_of_each_sum(_sized(shape), partial(_sizes, shape)) for shape in _OTHER_SHAPES]
    )


BENCH = Bench(
    groups=_groups,
    ratio="times faster than the peer; of `share/...`, the part of a step",
    fields=("bytes_per_value",),
)


def _of_each_sum(
    form: str, measure: Callable[[Mapping[str, str]], Iterator[Row]], *more: str
) -> Group:
    """The group of a case for each sum, and some more; `measure` gets case by name of a sum.

    Without CrypTen the sum that needs it is a row with the reason.
    """
    case_of = {name: form.format(name) for name in (*CASES, *more)}

    def measured(wanted: Collection[str]) -> Iterator[Row]:
        named = {name: case for name, case in case_of.items() if case in wanted}
        if ON_CRYPTEN in named and (reason := why_no_crypten()):
            yield absent(named.pop(ON_CRYPTEN), reason)
        if named:
            with one_thread():
                yield from measure(named)

    return Group(tuple(case_of.values()), measured)


def _table(passives: int, repetitions: int) -> Group:
    form = f"{{}}/m{passives}"
    return _of_each_sum(form, partial(_against_tutorial, passives, repetitions), _TUTORIAL)


def _against_tutorial(passives: int, repetitions: int, case_of: Mapping[str, str]) -> Iterator[Row]:
    values = _values(passives, _SHAPE)
    paths: dict[str, SumPath] = {
        name: OurPath(name, values) for name in case_of if name != _TUTORIAL
    }
    paths[_TUTORIAL] = TutorialPath(values)
    seconds: dict[str, list[float]] = {name: [] for name in paths}
    for repetition in range(-1, repetitions):
        for name, path in paths.items():
            spent = sum(_turn(path))
            if repetition >= 0:
                seconds[name].append(spent)
    for name, case in case_of.items():
        yield Row(
            case=case,
            seconds=min(seconds[name]),
            peer=f"{_TUTORIAL}/m{passives}",
            ratio=quotient(min(seconds[_TUTORIAL]), min(seconds[name])),
            bytes=paths[name].contribution_bytes,
            more=_size(paths[name], _SHAPE),
        )


def _turn(path: SumPath) -> tuple[float, float, float]:
    """Seconds to contribute, combine and decode: those of the fastest run of a turn.

    Short paths run several times, so that caches are warm. Where the clock moves too coarsely to
    tell one run, they run longer, and the mean stands for all.
    """
    enough = _TURN if (coarse := clock_step()) < _FINE else _STEPS * coarse
    runs: list[tuple[float, float, float]] = []
    began = time.perf_counter()
    while not runs or time.perf_counter() - began < enough:
        path.prepare()
        runs.append(path.run())
    if enough == _TURN:
        return min(runs, key=sum)
    contribute, combine, decode = (sum(part) / len(runs) for part in zip(*runs, strict=True))
    return contribute, combine, decode


def _sized(shape: Shape) -> str:
    return f"{{}}/m{_PASSIVES}/{shape[0]}x{shape[1]}"


def _sizes(shape: Shape, case_of: Mapping[str, str]) -> Iterator[Row]:
    """Each sum once at another size of a contribution, without the tutorial."""
    values = _values(_PASSIVES, shape)
    for name, case in case_of.items():
        path = OurPath(name, values)
        spent = sum(_turn(path))
        more = _size(path, shape)
        yield Row(case=case, seconds=spent, bytes=path.contribution_bytes, more=more)


def _shares(repetitions: int, case_of: Mapping[str, str]) -> Iterator[Row]:
    """Share of a training step, in turns with training steps."""
    step, images = training_step()
    paths = {name: OurPath(name, _values(_PASSIVES, _STEP_SHAPE)) for name in case_of}
    costs: dict[str, list[float]] = {name: [] for name in paths}
    steps = []
    for repetition in range(-1, repetitions):
        steps.append(interleave({"step": step}, repetitions=1, warm_up=0)["step"][0])
        for name, path in paths.items():
            contribute, combine, decode = _turn(path)
            if repetition >= 0:
                costs[name].append(contribute / _PASSIVES + combine + decode)
    for name, spent in costs.items():
        yield Row(
            case=case_of[name],
            seconds=min(spent),
            peer="training step",
            ratio=(share := quotient(min(spent), min(steps[1:]))),
            more={"share": share, "peer_seconds": min(steps[1:]), "images": images},
        )


@one_thread()
def _paillier(quick: bool) -> Row:
    reason = "it takes minutes; run without --quick" if quick else why_not()
    if reason is not None:
        return absent(_PAILLIER, reason)
    peer = PackedPaillier(passives=_PASSIVES)
    values = _values(_PASSIVES, _SHAPE)
    seconds = interleave(
        {_TUTORIAL: TutorialPath(values).run, _PAILLIER: lambda: peer.add(values)},
        repetitions=1,
        warm_up=0,
    )
    count = _SHAPE[0] * _SHAPE[1]
    return Row(
        case=_PAILLIER,
        seconds=seconds[_PAILLIER][0],
        peer=f"{_TUTORIAL}/m{_PASSIVES}",
        ratio=median_ratio(seconds[_TUTORIAL], seconds[_PAILLIER]),
        bytes=peer.contribution_bytes(count),
        more={"bytes_per_value": peer.contribution_bytes(count) / count},
    )


def _size(path: SumPath, shape: Shape) -> dict[str, float]:
    return {"bytes_per_value": path.contribution_bytes / (shape[0] * shape[1])}


def _values(passives: int, shape: Shape) -> Values:
    """Gradients of about a tenth of the clip bound."""
    rng = np.random.default_rng(0)
    scale = 0.1 / shape[1] ** 0.5
    return [
        rng.normal(scale=scale, size=shape).astype(np.float32, copy=False) for _ in range(passives)
    ]
