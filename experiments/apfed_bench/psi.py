"""Private set intersection beside the libraries that people use, at 50 % overlap.

Cases `circuit/N`, `circuit-crypten/N` (its gates on CrypTen), `ecdh/N`, `ecdh-buckets/N` (as in a
session, over sealed links), `openmined/N`, `spu-rr22/N`, `spu-kkrt/N` and `spu-ecdh/N` for N IDs on
each of two sides; each run is an interpreter of its own, the cases of a size in turns. Of ten
million there is `vole/10000000`, which is run only by its name, and compared with nothing.

Peers may live in environments of their own, which these variables name by their interpreter:
SECURE_APFED_OPENMINED_PYTHON (openmined-psi 2.0.6, also in the extra `bench`, which replaces
protobuf by an older one) and SECURE_APFED_SPU_PYTHON (spu 0.9.5, which needs numpy 1 and
jax up to 0.4.34). A peer that cannot be imported is a row without seconds.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from apfed_bench import psi_case
from apfed_bench.rows import Bench, Group, Row, played, row, why_no_crypten

__all__ = ["BENCH", "measure"]

_REPETITIONS = {1_000: 5, 10_000: 3, 100_000: 3, 1_000_000: 1}
_LARGEST = 10_000_000
_QUICK = {1_000: 1, 10_000: 1}
_PATIENCE_S = 1800
_FIELDS = (
    "seconds", "cpu_seconds", "bytes", "rounds", "peak_memory", "peak_party", "floor_seconds",
    "dealt_seconds", "dealt_bytes",
)  # fmt: skip
_ON_CRYPTEN = "circuit-crypten"
_RIVAL = {
    **dict.fromkeys(("circuit", "opprf", "vole"), "spu-rr22"), _ON_CRYPTEN: "circuit",
    "ecdh": "openmined", "ecdh-buckets": "ecdh",
}  # fmt: skip
_SPU = ("spu", "SECURE_APFED_SPU_PYTHON")
_PEERS: Mapping[str, tuple[str, str]] = {
    "openmined": ("private_set_intersection", "SECURE_APFED_OPENMINED_PYTHON"),
    **dict.fromkeys(("spu-rr22", "spu-kkrt", "spu-ecdh"), _SPU),
}


def _groups(quick: bool) -> Sequence[Group]:
    groups = [
        Group([f"{case}/{size}" for case in psi_case.CASES], partial(measure, size, repetitions))
        for size, repetitions in (_QUICK if quick else _REPETITIONS).items()
    ]
    if not quick:
        largest = partial(measure, _LARGEST, 1, alone=True)
        groups.append(Group([f"vole/{_LARGEST}"], largest, by_name=True))
    return groups


BENCH = Bench(
    groups=_groups,
    fields=(
        "rounds", "peak_memory", "speedup_vs_openmined", "speedup_vs_rr22", "floor_seconds",
        "dealt_bytes",
    ),
)  # fmt: skip


def measure(
    size: int, repetitions: int, wanted: Collection[str] | None = None, *, alone: bool = False
) -> Iterator[Row]:
    """Yield the rows of one size, of all cases unless `wanted` names some.

    They are compared with their rivals unless they are measured `alone`.

    Medians over the repetitions of seconds, processor seconds of the busier party, bytes, rounds,
    peak memory in bytes, and how many times faster than openmined-psi. `ratio` is seconds by those
    of `peer`. `floor_seconds`, of `ecdh` only, is what the multiplications alone take: the same
    library on the same processors, and nothing else.
    """
    shown = [case for case in psi_case.CASES if wanted is None or f"{case}/{size}" in wanted]
    cases = shown if alone else _with_rivals(shown)
    missing = {case: _why_missing(case) for case in cases}
    runs: dict[str, list[Mapping[str, Any]]] = {case: [] for case in cases}
    for _ in range(repetitions):
        for case in cases:
            if missing[case]:
                continue
            try:
                runs[case].append(_run(case, size))
            except RuntimeError as error:
                if case not in _PEERS:
                    raise
                missing[case], runs[case] = str(error).splitlines()[-1], []  # others can be had
    medians = {case: _medians(runs.get(case, [])) for case in psi_case.CASES}
    for case in shown:
        found, rival = medians[case], None if alone else _RIVAL.get(case)
        faster = {
            f"speedup_vs_{name}": _quotient(medians[other], found)
            for name, other in (("openmined", "openmined"), ("rr22", "spu-rr22"))
        }
        beside = {} if rival is None else {
            "peer": f"{rival}/{size}", "ratio": _quotient(found, medians[rival]),
        }  # fmt: skip
        reason = {"reason": missing[case]} if missing[case] else {}
        yield {**row(f"{case}/{size}"), **beside, **found, **faster, **reason}


def _with_rivals(wanted: Collection[str]) -> list[str]:
    named = set(wanted)
    while more := {_RIVAL[case] for case in named if case in _RIVAL} - named:
        named |= more
    return [case for case in psi_case.CASES if case in named]


def _quotient(one: Mapping[str, Any], other: Mapping[str, Any]) -> float | None:
    """Seconds of one by seconds of the other."""
    both = one["seconds"], other["seconds"]
    return None if None in both else float(both[0] / both[1])


def _medians(runs: list[Mapping[str, Any]]) -> dict[str, Any]:
    values: dict[str, list[Any]] = {field: [run.get(field) for run in runs] for field in _FIELDS}
    return {
        # the lower of two middle ones: bytes and rounds stay whole numbers
        field: statistics.median_low(each) if each and None not in each else None
        for field, each in values.items()
    }


def _interpreter(case: str) -> str:
    return os.environ.get(_PEERS[case][1], sys.executable) if case in _PEERS else sys.executable


def _why_missing(case: str) -> str:
    """Return why a case cannot be measured; nothing where it can."""
    if case == _ON_CRYPTEN:
        return why_no_crypten()
    if case not in _PEERS:
        return ""
    module, variable = _PEERS[case]
    complaint = _import_error(_interpreter(case), module)
    if complaint is None:
        return ""
    why = f"{module} cannot be imported here; install it, or name an interpreter in {variable}"
    return f"{why} ({complaint})" if complaint else why


@cache
def _import_error(interpreter: str, module: str) -> str | None:
    """Return None where the module is there, else what is known about why not."""
    try:
        # the interpreter is the user's own choice, the rest is a constant
        tried = subprocess.run(  # noqa: S603
            [interpreter, "-c", f"import {module}"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return str(error)
    lines = tried.stderr.strip().splitlines()
    return (lines[-1] if lines else "") if tried.returncode else None


def _run(case: str, size: int) -> Mapping[str, Any]:
    """Run one case in an interpreter of its own.

    Raises:
        RuntimeError: it failed, or found another number of common IDs.
    """
    found = played(
        psi_case.__file__, case, size, python=_interpreter(case), ours=case not in _PEERS,
        patience_s=_PATIENCE_S,
    )  # fmt: skip
    if found["common"] != size - size // 2:
        raise RuntimeError(f"{case}/{size} found {found['common']} IDs, not {size - size // 2}")
    return found
