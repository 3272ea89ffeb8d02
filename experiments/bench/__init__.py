"""Benchmarks in one form: `python -m experiments bench NAME [--json] [--quick]`.

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
    transport,
    votes,
)
from experiments.bench.rows import Row, machine

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
    "transport": transport.bench,
    "votes": votes.bench,
}


def run_bench(name: str, *, quick: bool = False) -> dict[str, Any]:
    """Run one bench; `quick` stays under 30 seconds.

    Raises:
        KeyError: no bench has that name.
    """
    rows = [row.as_json() for row in BENCHES[name](quick)]
    return {"bench": name, "machine": machine(), "rows": rows}
