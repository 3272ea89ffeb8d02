"""Benchmarks in one form: `python -m experiments bench NAME [--only CASES] [--json] [--quick]`.

A new bench is one file and one line in the table.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from experiments.bench import (
    attacks,
    audit_log,
    exchange,
    footprint,
    joint_prediction,
    local,
    nvflare,
    psi,
    secure_sum,
    training,
    transport,
    votes,
)
from experiments.bench.rows import Row, machine, only, stolen_since, wanted

__all__ = ["BENCHES", "Row", "machine", "run_bench"]

BENCHES: Mapping[str, Callable[[bool], Iterable[Row]]] = {
    "attacks": attacks.bench,
    "audit-log": audit_log.bench,
    "exchange": exchange.bench,
    "footprint": footprint.bench,
    "joint-prediction": joint_prediction.bench,
    "local": local.bench,
    "nvflare": nvflare.bench,
    "psi": psi.bench,
    "secure-sum": secure_sum.bench,
    "training": training.bench,
    "transport": transport.bench,
    "votes": votes.bench,
}


def run_bench(name: str, *, quick: bool = False, cases: str = "*") -> dict[str, Any]:
    """Run one bench.

    Args:
        name: a key of `BENCHES`.
        quick: stay under 30 seconds.
        cases: a glob; other rows are left out, and not measured where the bench can tell before.

    Raises:
        KeyError: no bench has that name.
    """
    before, _ = stolen_since()
    with only(cases):
        rows = [row.as_json() for row in BENCHES[name](quick) if wanted(row.case)]
    _, stolen = stolen_since(before)
    return {"bench": name, "machine": machine() | {"stolen": round(stolen, 4)}, "rows": rows}
