"""Benchmarks in one form: `secure-apfed bench NAME [--only CASES] [--json]
[--quick]`.

A new bench is one file and one line in the table. `bench all --output FOLDER` runs all of them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from apfed_experiments.bench import (
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
from apfed_experiments.bench.rows import Bench, Group, Row
from apfed_experiments.bench.running import Measured, run_all, run_one

__all__ = ["BENCHES", "Bench", "Group", "Measured", "Row", "run_bench", "run_benches"]

BENCHES: Mapping[str, Bench] = {
    "attacks": attacks.BENCH,
    "audit-log": audit_log.BENCH,
    "exchange": exchange.BENCH,
    "footprint": footprint.BENCH,
    "joint-prediction": joint_prediction.BENCH,
    "local": local.BENCH,
    "nvflare": nvflare.BENCH,
    "psi": psi.BENCH,
    "secure-sum": secure_sum.BENCH,
    "training": training.BENCH,
    "transport": transport.BENCH,
    "votes": votes.BENCH,
}


def run_bench(name: str, *, quick: bool = False, cases: str = "*") -> Measured:
    """Run one bench.

    Args:
        name: a key of `BENCHES`.
        quick: stay under 30 seconds.
        cases: a glob; others are not measured, unless a wanted one is compared with them.

    Raises:
        KeyError: no bench has that name.
        ConfigError: `cases` names none of its cases.
    """
    return run_one(name, BENCHES[name], quick=quick, cases=cases)


def run_benches(
    *, quick: bool = False, cases: str = "*", folder: Path | None = None, again: bool = False
) -> Iterator[Measured]:
    """Run all benches; arguments and errors as of `running.run_all`."""
    return run_all(BENCHES, quick=quick, cases=cases, folder=folder, again=again)
