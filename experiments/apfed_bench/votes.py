"""What votes with encrypted labels cost: sums of products, against labels that passives see.

A case `encrypted/PEOPLExLABELS` is one session of three passives with ten classes, in one thread:
`seconds` of the active, one passive and the aggregator together, and of each apart; `bytes` is what
one passive gets (`bytes_up`, the encrypted labels) and sends (`bytes_down`). `ratio` is these
seconds over those of the same matrix product in the clear and the masked sum of the products, with
labels that every passive sees; `ratio_to_product` is the passive's part over the product alone.
`audited/...` is the same with 20 candidates, of which each passive sees through 19.
Every sum is checked against the product of integers. Each case runs in an interpreter of its own,
whose peak memory holds all parties.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from apfed_bench import votes_case
from apfed_bench.rows import Bench, Group, Row, played, quotient, row, single

__all__ = ["BENCH", "measure"]

_COLUMNS, _PASSIVES, _CANDIDATES = 10, 3, 20
_QUICK = ((10_000, 50, 0),)
_SIZES = (*_QUICK, (100_000, 50, 0), (100_000, 50, _CANDIDATES), (1_000_000, 200, 0))
_REPETITIONS, _PATIENCE_S = 3, 900
_PARTS = ("passive_seconds", "active_seconds", "aggregator_seconds")


def _groups(quick: bool) -> Sequence[Group]:
    """10,000 people and 50 labels; unless `quick`, up to a million people and 200 labels."""
    groups = []
    for people, labelled, candidates in _QUICK if quick else _SIZES:
        case = f"{'audited' if candidates else 'encrypted'}/{people}x{labelled}"
        repetitions = 1 if quick or people > 10**5 else _REPETITIONS
        groups.append(single(case, measure, people, labelled, repetitions, candidates))
    return groups


BENCH = Bench(groups=_groups, fields=(*_PARTS, "peak_memory", "ratio_to_product"))


def measure(case: str, people: int, labelled: int, repetitions: int, candidates: int = 0) -> Row:
    """The fastest of some runs of one size; what else a machine does only adds.

    Raises:
        RuntimeError: one failed, or opened another sum.
    """
    runs = [
        played(
            votes_case.__file__, people, labelled, _COLUMNS, _PASSIVES, candidates,
            patience_s=_PATIENCE_S, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1",
        )
        for _ in range(repetitions)
    ]  # fmt: skip
    found = min(runs, key=_seconds)
    clear = min(run["clear_seconds"] for run in runs)
    product = min(run["clear_product_seconds"] for run in runs)
    return row(
        case, _seconds(found), peer="clear product, masked sum",
        ratio=quotient(_seconds(found), clear), sent=found["bytes_up"] + found["bytes_down"],
        **found, ratio_to_product=quotient(found["passive_seconds"], product),
    )  # fmt: skip


def _seconds(found: Mapping[str, Any]) -> float:
    return float(sum(found[part] for part in _PARTS))
