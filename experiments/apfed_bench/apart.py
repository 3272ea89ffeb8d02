"""Set intersections at 50 % overlap, beside the fastest library.

Cases `circuit/N`, `circuit-crypten/N` (its gates on CrypTen), `ecdh/N`, `ot/N`, both also with
`-buckets` (as in a session, over sealed links), `vole/N`, `opprf/N` and `spu-rr22/N` for N IDs on
each of two sides, and without a dealer `opprf-ot/N` and, up to 10,000, `circuit-ot/N`. Each runs in
interpreters of its own, and those of a size take turns. Medians over the repetitions: seconds from
a CSV file of IDs to the common rows, processor seconds of the busiest party, bytes and peak memory
in bytes; `ratio` is seconds by those of `peer`.
`floor_seconds`, of `ecdh`, is what the multiplications alone take: the same library on the same
processors, and nothing else. The peer, spu 0.9.5, needs numpy 1 and jax up to 0.4.34:
SECURE_APFED_SPU_PYTHON names the interpreter of an environment of its own, which also has
openmined-psi 2.0.6 (`openmined/N`, from IDs in memory; both sides take turns in one process).
"""

import os
import statistics
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from apfed_bench import psi_case
from apfed_bench.rows import Bench, Group, Row, find_crypten_error, make_row, run_script

_REPETITIONS_BY_SIZE = {1_000: 5, 10_000: 3, 100_000: 3, 1_000_000: 1}
_QUICK_REPETITIONS_BY_SIZE = {1_000: 1, 10_000: 1}
_TIMEOUT_S = 1800
_CRYPTEN_CASE = "circuit-crypten"
_FASTEST_PEER = "spu-rr22"
_PEER_PYTHON_VARIABLE = "SECURE_APFED_SPU_PYTHON"
_FOREIGN_CASES = (_FASTEST_PEER, "openmined")
_MAX_SIZES = {"openmined": 100_000, "circuit-ot": 10_000}
"""Largest number of IDs of cases that take long: `circuit-ot` sends 64 KB for each ID."""
_MAX_QUICK_SIZES = _MAX_SIZES | {"circuit-ot": 1_000}

_PEER_BY_CASE = {
    **dict.fromkeys(("circuit", "opprf", "vole", "ecdh", "ot"), _FASTEST_PEER),
    _CRYPTEN_CASE: "circuit",
    "circuit-ot": "circuit",
    "opprf-ot": "opprf",
    "ecdh-buckets": "ecdh",
    "ot-buckets": "ot",
}

PSI = Bench(
    make_groups=lambda quick: [
        Group(
            [f"{case}/{size}" for case in _list_cases(size, quick=quick)],
            partial(compare_intersections, size, repetitions),
        )
        for size, repetitions in (
            _QUICK_REPETITIONS_BY_SIZE if quick else _REPETITIONS_BY_SIZE
        ).items()
    ],
    further_fields=("processor_seconds", "peak_memory", "floor_seconds", "dealt_bytes"),
)


def _list_cases(size: int, *, quick: bool) -> list[str]:
    """Return the cases (protocols) that are run with `size` IDs on each side.

    Slow cases are left out where `size` is large.
    """
    max_sizes = _MAX_QUICK_SIZES if quick else _MAX_SIZES
    return [case for case in psi_case.CASES if size <= max_sizes.get(case, size)]


def compare_intersections(
    size: int, repetitions: int, wanted_cases: Collection[str]
) -> Iterator[Row]:
    """Yield the rows of the wanted cases with `size` IDs on each side.

    The cases that they are compared with are run, too. `repetitions`: how often each case is run.
    """
    requested_protocols = [case for case in psi_case.CASES if f"{case}/{size}" in wanted_cases]
    needed_protocols = {
        *requested_protocols,
        *(_PEER_BY_CASE[case] for case in requested_protocols if case in _PEER_BY_CASE),
    }
    runs_by_case: dict[str, list[Mapping[str, Any]]] = {
        case: [] for case in psi_case.CASES if case in needed_protocols
    }
    reason_by_case = _repeat_cases(runs_by_case, size, repetitions)
    medians_by_case = {
        case: _compute_medians(case_runs)
        for case, case_runs in runs_by_case.items()
        if case not in reason_by_case
    }
    for case in requested_protocols:
        if case in reason_by_case:
            yield make_row(f"{case}/{size}", reason=reason_by_case[case])
            continue
        medians = medians_by_case[case]
        peer_case = _PEER_BY_CASE.get(case)
        ratio = (
            medians["seconds"] / medians_by_case[peer_case]["seconds"]
            if peer_case in medians_by_case
            else None
        )
        peer = None if peer_case is None else f"{peer_case}/{size}"
        yield {**make_row(f"{case}/{size}", peer=peer, ratio=ratio), **medians}


def _repeat_cases(
    runs_by_case: Mapping[str, list[Mapping[str, Any]]], size: int, repetitions: int
) -> dict[str, str]:
    """Run all cases in turns, several times, and append their measurements to `runs_by_case`, by
    case.

    `size`: number of IDs on each side. Returns why another library's cases are missing, by case.
    """
    reason_by_case: dict[str, str] = {}
    if _CRYPTEN_CASE in runs_by_case and (reason := find_crypten_error()):
        reason_by_case[_CRYPTEN_CASE] = reason
    for _ in range(repetitions):
        # A peer that failed once is missing, and is not tried again.
        for case in [case for case in runs_by_case if case not in reason_by_case]:
            try:
                runs_by_case[case].append(_run_case(case, size))
            except (RuntimeError, OSError) as error:
                if case not in _FOREIGN_CASES:
                    raise
                last_line = str(error).splitlines()[-1]
                reason_by_case[case] = (
                    f"{last_line}; {_PEER_PYTHON_VARIABLE} names an interpreter that has it"
                )
    return reason_by_case


def _compute_medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median over the runs of each measurement except the number of common IDs."""
    # median_low, the lower of two middle values, keeps bytes whole numbers.
    return {
        field: statistics.median_low([run[field] for run in runs])
        for field in runs[0]
        if field != "common"
    }


def _run_case(case: str, size: int) -> Mapping[str, Any]:
    """Run one case in an interpreter of its own and return its measurements.

    `size`: number of IDs on each side, of which half are common.

    Raises RuntimeError: the case failed, or found a wrong number of common IDs.
    """
    is_ours = case not in _FOREIGN_CASES
    interpreter = (
        sys.executable if is_ours else os.environ.get(_PEER_PYTHON_VARIABLE, sys.executable)
    )
    result = run_script(
        psi_case.__file__,
        case,
        size,
        interpreter=interpreter,
        needs_project=is_ours,
        timeout_s=_TIMEOUT_S,
    )
    expected_count = size - size // 2  # half of the IDs, rounded up
    if result["common"] != expected_count:
        raise RuntimeError(f"{case}/{size} found {result['common']} IDs, not {expected_count}")
    return result
