"""What a step costs where every party runs in a process of its own, by how they reach each other.

Cases `local`, `grpc` and `relay` of `/m3/b256`: APFed-C with three passives and an aggregator on
the shapes of Fashion-MNIST 4-1, 64 numbers a representation, batches of 256, the plain sum, one
thread a process; the peer is the same step with all in one process. Over gRPC with mutual TLS,
proofs of identity and seals end to end.
"""

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from apfed_experiments.bench.images import image_run
from apfed_experiments.bench.local import apart, local_stepper, stepper
from apfed_experiments.bench.rows import (
    Bench,
    Group,
    Row,
    interleave,
    median_ratio,
    single,
)
from secure_apfed.runs.local import WAYS, Way
from secure_apfed.seeds import one_thread

__all__ = ["BENCH"]

_BATCH, _PASSIVES = 256, 3


def _groups(quick: bool) -> Sequence[Group]:
    names = {f"{name}/m{_PASSIVES}/b{_BATCH}": way for name, way in WAYS.items()}
    return [
        single(case, partial(_row, case, way, 7 if quick else 31)) for case, way in names.items()
    ]


BENCH = Bench(groups=_groups, fields=("peer_seconds", "images"))


@one_thread()
def _row(case: str, way: Way, repetitions: int) -> Row:
    """Seconds of a training step, and its ratio to one process (target over gRPC: at most 1.5)."""
    config, data, images = image_run(
        "bench-transport", batch=_BATCH, secure_sum={"scheme": "plain", "clip": None},
        views=_PASSIVES + 1,
    )  # fmt: skip
    with ExitStack() as stack:
        here, learner = stack.enter_context(apart(config, data, over=way))
        steps = {"apart": local_stepper(here, learner), "memory": stepper(config, data)}
        seconds = interleave(steps, repetitions=repetitions, warm_up=2)
    return Row(
        case=case,
        seconds=statistics.median(seconds["apart"]),
        peer="memory",
        ratio=median_ratio(seconds["apart"], seconds["memory"]),
        more={"peer_seconds": statistics.median(seconds["memory"]), "images": images},
    )
