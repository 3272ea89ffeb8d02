"""All benches by name: `python -m apfed_bench NAME [--only CASES] [--json] [--quick]`.

A new bench is a `Bench` and one line in the table. One bench is run, or all one after another. A
case that fails, or whose peer is missing, is a row with the reason; other cases are run all the
same. docs/performance.md shows a folder of results: `python docs/site_pages.py` inserts there the
tables that `format_bench` makes of its files.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from apfed_bench import apart, parties, secure_sum, tables, user
from apfed_bench.rows import Bench, Group, Row, make_row, measure_clock_step
from apfed_experiments.columns import Column, Table, write_text
from apfed_experiments.machine import describe_machine
from secure_apfed.base.files import to_json
from secure_apfed.errors import ConfigError, DataError

BENCHES: Mapping[str, Bench] = {
    "exchange": parties.EXCHANGE,
    "ids": user.IDS,
    "protected": parties.PROTECTED,
    "psi": apart.PSI,
    "secure-sum": secure_sum.BENCH,
    "startup": user.STARTUP,
    "tables": tables.TABLES,
    "transport": parties.TRANSPORT,
    "user": user.USER,
}
BenchResults: TypeAlias = dict[str, Any]
"""Rows of a bench and the machine that they were measured on: one JSON object."""
_GroupsWithCases: TypeAlias = Sequence[tuple[Group, Sequence[str]]]

_TITLE_BY_FIELD = {"peer_seconds": "the peer's seconds"}
_COARSE_CLOCK_S = 1e-4
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_SIZE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def run_benches(
    names: Sequence[str] = tuple(BENCHES),
    *,
    quick: bool = False,
    case_glob: str = "*",
    folder: Path | None = None,
) -> Iterator[BenchResults]:
    """Run benches one after another and yield the results of each when it ends.

    Args:
        names: keys of `BENCHES`.
        quick: whether only small cases are measured.
        case_glob: glob of the cases that are measured, with those that they are compared with;
            benches without such a case are left out.
        folder: where NAME.json of each bench is stored; None: nothing is stored.

    Raises ConfigError: `case_glob` matches no case.
    """
    groups_by_bench = {name: _pick_cases(BENCHES[name], quick, case_glob) for name in names}
    chosen_groups_by_bench = {name: groups for name, groups in groups_by_bench.items() if groups}
    if not chosen_groups_by_bench:
        case_names = [
            case
            for name in names
            for group in BENCHES[name].make_groups(quick)
            for case in group.cases
        ]
        raise ConfigError(
            "\n".join(
                [f"{case_glob!r} names no case of bench {', '.join(names)}; there are", *case_names]
            )
        )
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for name, groups in chosen_groups_by_bench.items():
        results = _measure_bench(name, groups, quick, case_glob)
        if folder is not None:
            write_text(folder / f"{name}.json", to_json(results, indent=1) + "\n")
        yield results


def _pick_cases(bench: Bench, quick: bool, case_glob: str) -> _GroupsWithCases:
    """Return the bench's groups that have cases matching the glob, each with the names of these
    cases.

    `quick`: whether the bench is only its quick version. `case_glob`: the glob.
    """
    groups_with_matches = (
        (group, [case for case in group.cases if fnmatchcase(case, case_glob)])
        for group in bench.make_groups(quick)
    )
    return [(group, names) for group, names in groups_with_matches if names]


def _measure_bench(
    name: str, groups_with_cases: _GroupsWithCases, quick: bool, case_glob: str
) -> BenchResults:
    """Return the rows of the chosen cases, and the state of the machine while they were measured.

    `name`: key of `BENCHES`. `quick` and `case_glob` (a glob) say how the cases were chosen; they
    are stored with the rows.
    """
    date = datetime.now(UTC).date().isoformat()
    steal_before, total_before = _read_steal_time()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    clock_step_before = measure_clock_step()
    rows = [row for group, cases in groups_with_cases for row in _measure_rows(group, cases)]
    steal_after, total_after = _read_steal_time()
    # If no time passed by these counters, the system does not report steal time.
    elapsed_ticks = total_after - total_before
    steal_share = (steal_after - steal_before) / elapsed_ticks if elapsed_ticks else 0.0
    return {
        "bench": name,
        "quick": quick,
        "cases": case_glob,
        "machine": describe_machine(),
        "date": date,
        "load": load,
        "stolen": round(steal_share, 4),
        "clock_step": max(clock_step_before, measure_clock_step()),
        "rows": rows,
    }


def _read_steal_time() -> tuple[int, int]:
    """Return the steal time and the total time of all processors since the system started.

    Steal time is what the host of a virtual machine gave to others. Both are in clock ticks, from
    the first line of /proc/stat: "cpu user nice system idle iowait irq softirq steal ...". They are
    0 on systems without it.
    """
    try:
        all_processors = Path("/proc/stat").read_text("ascii").splitlines()[0]
        times = [int(field) for field in all_processors.split()[1:9]]
        return times[-1], sum(times)
    except (OSError, ValueError, IndexError):
        return 0, 0


def _measure_rows(group: Group, cases: Sequence[str]) -> list[Row]:
    """Return one row for each of these cases of a group; one that failed has the reason in its row.

    `cases`: names of the wanted cases.
    """
    row_by_case: dict[str, Row] = {}
    reason = "its bench made no row of it"
    try:
        for row in group.measure(cases):
            row_by_case[row["case"]] = row
    except Exception as error:  # noqa: BLE001 - whatever it is, other cases can be measured
        traceback.print_exc(file=sys.stderr)
        reason = f"it failed: {type(error).__name__}: {str(error).strip()[:500]}"
    return [row_by_case.get(name) or make_row(name, reason=reason, failed=True) for name in cases]


def load_bench_results(path: Path) -> BenchResults:
    """Return the results that a bench stored.

    Raises DataError: the file holds something else.
    """
    try:
        results: BenchResults = json.loads(path.read_bytes())
        format_bench(results)  # called for its exception only: it reads all that the file needs
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} is not what a bench wrote ({type(error).__name__}: {error}); remove it "
            f"and measure again: python -m apfed_bench all --output {path.parent}"
        ) from error
    return results


def format_bench(results: BenchResults, case_glob: str = "*") -> str:
    """Return, as Markdown, the measuring machine, the bench's table, and why rows are missing.

    `results`: results of `run_benches`. `case_glob`: glob of the cases that are shown.
    """
    machine = results["machine"]
    clock_step_s = results["clock_step"]
    rows = [row for row in results["rows"] if fnmatchcase(row["case"], case_glob)]
    cases = results["cases"] if case_glob == "*" else case_glob
    cases_by_reason: dict[str, list[str]] = {}
    for row in rows:
        if "reason" in row:
            reason = " ".join(row["reason"].split()).replace("<", "&lt;")
            cases_by_reason.setdefault(reason, []).append(f"`{row['case']}`")
    cases_note = "" if cases == "*" else f", cases `{cases}`"
    load_note = "" if results["load"] is None else f", load {results['load']:.1f} when it began"
    clock_note = ""
    if clock_step_s > _COARSE_CLOCK_S:
        clock_note = f" The clock moved by {_format_unit(_TIME_UNITS, clock_step_s)}."
    heading = (
        f"{results['date']}{', quick' if results['quick'] else ''}{cases_note}: "
        f"{machine['processor']}, {machine['cores']} cores, {machine['gpu'] or 'no GPU'}"
        f"{load_note}, {results['stolen']:.1%} stolen. "
        f"*Ratio*: {BENCHES[results['bench']].ratio_meaning}.{clock_note}"
    )
    table = make_table({**results, "rows": rows})
    reasons = [
        f"Not measured: {', '.join(missing_cases)}: {reason}"
        for reason, missing_cases in cases_by_reason.items()
    ]
    tables = [table.format_markdown().rstrip()] if table.rows else []
    return "\n\n".join([heading, *tables, *reasons])


def make_table(results: BenchResults) -> Table:
    """Return a bench's table, without rows that were not measured and without empty columns."""
    rows = [row for row in results["rows"] if "reason" not in row]
    fields = (
        "case",
        "seconds",
        "peer",
        "ratio",
        "bytes",
        *BENCHES[results["bench"]].further_fields,
    )
    filled_fields = [name for name in fields if any(row.get(name) is not None for row in rows)]
    return Table([_make_column(name) for name in filled_fields], rows, f"bench {results['bench']}")


def _make_column(name: str) -> Column:
    """Return the column of a field, in the unit that the end of its name implies."""
    title = _TITLE_BY_FIELD.get(name, name.removesuffix("_seconds").replace("_", " "))
    if name == "case":
        return Column(name=name, title=title, format_value="`{}`".format)
    if name.endswith("seconds"):
        return Column(name=name, title=title, format_value=partial(_format_unit, _TIME_UNITS))
    if name.endswith(("bytes", "memory")):
        return Column(name=name, title=title, format_value=partial(_format_unit, _SIZE_UNITS))
    return Column(name=name, title=title, format_value=_format_number)


def _format_number(value: object) -> str:
    """Return a value with three significant digits if it is a float."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _format_unit(units: Sequence[tuple[float, str]], value: float) -> str:
    """Return a value with three digits in the largest unit in which it is at least 1.

    `units`: size and name of each unit, the largest first.
    """
    unit_size, unit = next((candidate for candidate in units if value >= candidate[0]), units[-1])
    whole_digits = len(str(int(value / unit_size)))
    decimals = 0 if unit == "B" else max(0, 3 - whole_digits)
    return f"{value / unit_size:.{decimals}f} {unit}"
