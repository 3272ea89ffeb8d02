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
Measured: TypeAlias = dict[str, Any]
"""Rows of a bench and the machine that they were measured on: one JSON object."""
_ChosenGroups: TypeAlias = Sequence[tuple[Group, Sequence[str]]]

_FIELD_TITLES = {"peer_seconds": "the peer's seconds"}
_COARSE_CLOCK_S = 1e-4
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_SIZE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def run_benches(
    names: Sequence[str] = tuple(BENCHES),
    *,
    quick: bool = False,
    cases: str = "*",
    folder: Path | None = None,
) -> Iterator[Measured]:
    """Run benches one after another and yield the results of each when it ends.

    Args:
        names: keys of `BENCHES`.
        quick: whether only small cases are measured.
        cases: glob of the cases that are measured, with those that they are compared with; benches
            without such a case are left out.
        folder: where NAME.json of each bench is stored; None: nothing is stored.

    Raises ConfigError: `cases` matches no case.
    """
    groups_by_bench = {name: _pick_cases(BENCHES[name], quick, cases) for name in names}
    chosen = {name: groups for name, groups in groups_by_bench.items() if groups}
    if not chosen:
        case_names = [
            case for name in names for group in BENCHES[name].groups(quick) for case in group.cases
        ]
        raise ConfigError(
            "\n".join(
                [f"{cases!r} names no case of bench {', '.join(names)}; there are", *case_names]
            )
        )
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for name, groups in chosen.items():
        measured = _measure_bench(name, groups, quick, cases)
        if folder is not None:
            write_text(folder / f"{name}.json", to_json(measured, indent=1) + "\n")
        yield measured


def _pick_cases(bench: Bench, quick: bool, cases: str) -> _ChosenGroups:
    """Return the bench's groups that have cases matching the glob, each with the names of these
    cases.

    `quick`: whether the bench is only its quick version. `cases`: the glob.
    """
    matches = (
        (group, [case for case in group.cases if fnmatchcase(case, cases)])
        for group in bench.groups(quick)
    )
    return [(group, names) for group, names in matches if names]


def _measure_bench(name: str, chosen: _ChosenGroups, quick: bool, cases: str) -> Measured:
    """Return the rows of the chosen cases, and the state of the machine while they were measured.

    `name`: key of `BENCHES`. `quick` and `cases` (a glob) say how the cases were chosen; they are
    stored with the rows.
    """
    date = datetime.now(UTC).date().isoformat()
    steal_before, total_before = _read_steal_time()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    clock_step_before = measure_clock_step()
    rows = [row for group, names in chosen for row in _measure_rows(group, names)]
    steal_after, total_after = _read_steal_time()
    # If no time passed by these counters, the system does not report steal time.
    total = total_after - total_before
    steal_share = (steal_after - steal_before) / total if total else 0.0
    return {
        "bench": name,
        "quick": quick,
        "cases": cases,
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


def _measure_rows(group: Group, names: Sequence[str]) -> list[Row]:
    """Return one row for each of these cases of a group; one that failed has the reason in its row.

    `names`: names of the wanted cases.
    """
    row_by_case: dict[str, Row] = {}
    reason = "its bench made no row of it"
    try:
        for measured in group.measure(names):
            row_by_case[measured["case"]] = measured
    except Exception as error:  # noqa: BLE001 - whatever it is, other cases can be measured
        traceback.print_exc(file=sys.stderr)
        reason = f"it failed: {type(error).__name__}: {str(error).strip()[:500]}"
    return [row_by_case.get(name) or make_row(name, reason=reason, failed=True) for name in names]


def load_measurement(path: Path) -> Measured:
    """Return the results that a bench stored.

    Raises DataError: the file holds something else.
    """
    try:
        measured: Measured = json.loads(path.read_bytes())
        format_bench(measured)  # called for its exception only: it reads all that the file needs
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} is not what a bench wrote ({type(error).__name__}: {error}); remove it "
            f"and measure again: python -m apfed_bench all --output {path.parent}"
        ) from error
    return measured


def format_bench(measured: Measured, only: str = "*") -> str:
    """Return, as Markdown, the measuring machine, the bench's table, and why rows are missing.

    `measured`: results of `run_benches`. `only`: glob of the cases that are shown.
    """
    machine = measured["machine"]
    step = measured["clock_step"]
    rows = [row for row in measured["rows"] if fnmatchcase(row["case"], only)]
    cases = measured["cases"] if only == "*" else only
    cases_by_reason: dict[str, list[str]] = {}
    for row in rows:
        if "reason" in row:
            reason = " ".join(row["reason"].split()).replace("<", "&lt;")
            cases_by_reason.setdefault(reason, []).append(f"`{row['case']}`")
    pattern = "" if cases == "*" else f", cases `{cases}`"
    load = "" if measured["load"] is None else f", load {measured['load']:.1f} when it began"
    clock = ""
    if step > _COARSE_CLOCK_S:
        clock = f" The clock moved by {_format_unit(_TIME_UNITS, step)}."
    heading = (
        f"{measured['date']}{', quick' if measured['quick'] else ''}{pattern}: "
        f"{machine['processor']}, {machine['cores']} cores, {machine['gpu'] or 'no GPU'}{load}, "
        f"{measured['stolen']:.1%} stolen. "
        f"*Ratio*: {BENCHES[measured['bench']].ratio}.{clock}"
    )
    table = make_table({**measured, "rows": rows})
    reasons = [
        f"Not measured: {', '.join(missing_cases)}: {reason}"
        for reason, missing_cases in cases_by_reason.items()
    ]
    tables = [table.format_markdown().rstrip()] if table.rows else []
    return "\n\n".join([heading, *tables, *reasons])


def make_table(measured: Measured) -> Table:
    """Return a bench's table, without rows that were not measured and without empty columns."""
    rows = [row for row in measured["rows"] if "reason" not in row]
    fields = ("case", "seconds", "peer", "ratio", "bytes", *BENCHES[measured["bench"]].fields)
    filled = [name for name in fields if any(row.get(name) is not None for row in rows)]
    return Table([_make_column(name) for name in filled], rows, f"bench {measured['bench']}")


def _make_column(name: str) -> Column:
    """Return the column of a field, in the unit that the end of its name implies."""
    title = _FIELD_TITLES.get(name, name.removesuffix("_seconds").replace("_", " "))
    if name == "case":
        return Column(name=name, title=title, form="`{}`".format)
    if name.endswith("seconds"):
        return Column(name=name, title=title, form=partial(_format_unit, _TIME_UNITS))
    if name.endswith(("bytes", "memory")):
        return Column(name=name, title=title, form=partial(_format_unit, _SIZE_UNITS))
    return Column(name=name, title=title, form=_format_number)


def _format_number(value: object) -> str:
    """Return a value with three significant digits if it is a float."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _format_unit(scales: Sequence[tuple[float, str]], value: float) -> str:
    """Return a value with three digits in the largest unit in which it is at least 1.

    `scales`: size and name of each unit, the largest first.
    """
    factor, name = next((scale for scale in scales if value >= scale[0]), scales[-1])
    whole_digits = len(str(int(value / factor)))
    decimals = 0 if name == "B" else max(0, 3 - whole_digits)
    return f"{value / factor:.{decimals}f} {name}"
