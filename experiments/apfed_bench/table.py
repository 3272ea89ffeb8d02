"""All benches in one form: `python -m apfed_bench NAME [--only CASES] [--json] [--quick]`.

A new bench is a `Bench` and one line in the table. One is run, or all after another into a folder:
a case that fails is a row with the reason, as one whose peer is missing, and ends no other.
docs/performance.md shows what such a folder holds: `python docs/site_pages.py` puts there what
`format_bench` makes of each file.
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
from apfed_bench.rows import Bench, Group, Row, clock_step, make_row
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
"""Rows of a bench and what they were measured on: one JSON object."""
_Chosen: TypeAlias = Sequence[tuple[Group, Sequence[str]]]

_HEADS = {"peer_seconds": "the peer's seconds"}
_COARSE_S = 1e-4
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def run_benches(
    names: Sequence[str] = tuple(BENCHES),
    *,
    quick: bool = False,
    cases: str = "*",
    folder: Path | None = None,
) -> Iterator[Measured]:
    """Run the benches of these names after one another, those that have cases like the glob.

    Others are not measured, unless a wanted one is compared with them; `folder` gets NAME.json of
    each bench when it ends. ConfigError: `cases` names no case of any.

    `quick`: measure small cases alone.
    """
    chosen = {
        name: picked for name in names if (picked := _pick_cases(BENCHES[name], quick, cases))
    }
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


def _pick_cases(bench: Bench, quick: bool, cases: str) -> _Chosen:
    """Return the groups that have cases like the glob, with these cases."""
    matches = (
        (group, [case for case in group.cases if fnmatchcase(case, cases)])
        for group in bench.groups(quick)
    )
    return [(group, names) for group, names in matches if names]


def _measure_bench(name: str, chosen: _Chosen, quick: bool, cases: str) -> Measured:
    """Return the rows of the chosen cases, and the state of the machine while they were
    measured.

    `quick`: measure small cases alone.
    """
    head = {"bench": name, "quick": quick, "cases": cases, "machine": describe_machine()}
    began = datetime.now(UTC).date().isoformat()
    before = _count_ticks()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    first = clock_step()
    rows = [row for group, names in chosen for row in _measure_rows(group, names)]
    step = max(first, clock_step())
    stolen, passed = (current - past for current, past in zip(_count_ticks(), before, strict=True))
    share = round(stolen / passed if passed else 0.0, 4)
    return {**head, "date": began, "load": load, "stolen": share, "clock_step": step, "rows": rows}


def _count_ticks() -> tuple[int, int]:
    """Read the processor time that the host gave to others, and all.

    Both are 0 where the system does not tell.
    """
    try:
        line = Path("/proc/stat").read_text("ascii").splitlines()[0]
        ticks = [int(part) for part in line.split()[1:9]]
        return ticks[-1], sum(ticks)
    except (OSError, ValueError, IndexError):
        return 0, 0


def _measure_rows(group: Group, names: Sequence[str]) -> list[Row]:
    """Return one row for each of these cases; the reason in its place where measuring failed.

    `names`: of the cases.
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
    """Read what a bench measured. Raises DataError: the file is not what a bench wrote."""
    try:
        measured: Measured = json.loads(path.read_bytes())
        format_bench(measured)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} is not what a bench wrote ({type(error).__name__}: {error}); remove it "
            f"and measure again: python -m apfed_bench all --output {path.parent}"
        ) from error
    return measured


def format_bench(measured: Measured, only: str = "*") -> str:
    """Return a bench's table, the machine it was measured on, and why rows are missing.

    `only`: glob of cases.
    """
    machine = measured["machine"]
    step = measured["clock_step"]
    rows = [line for line in measured["rows"] if fnmatchcase(line["case"], only)]
    cases = measured["cases"] if only == "*" else only
    missing: dict[str, list[str]] = {}
    for line in rows:
        if "reason" in line:
            reason = " ".join(line["reason"].split()).replace("<", "&lt;")
            missing.setdefault(reason, []).append(f"`{line['case']}`")
    pattern = "" if cases == "*" else f", cases `{cases}`"
    load = "" if measured["load"] is None else f", load {measured['load']:.1f} when it began"
    clock = f" The clock moved by {_format_unit(_SECONDS, step)}." if step > _COARSE_S else ""
    heading = (
        f"{measured['date']}{', quick' if measured['quick'] else ''}{pattern}: "
        f"{machine['processor']}, {machine['cores']} cores, {machine['gpu'] or 'no GPU'}{load}, "
        f"{measured['stolen']:.1%} stolen. "
        f"*Ratio*: {BENCHES[measured['bench']].ratio}.{clock}"
    )
    table = table_of({**measured, "rows": rows})
    reasons = [
        f"Not measured: {', '.join(skipped)}: {reason}" for reason, skipped in missing.items()
    ]
    tables = [table.format_markdown().rstrip()] if table.rows else []
    return "\n\n".join([heading, *tables, *reasons])


def table_of(measured: Measured) -> Table:
    """Return a bench's table, without what was not measured and empty columns."""
    rows = [line for line in measured["rows"] if "reason" not in line]
    fields = ("case", "seconds", "peer", "ratio", "bytes", *BENCHES[measured["bench"]].fields)
    filled = [name for name in fields if any(line.get(name) is not None for line in rows)]
    return Table([_make_column(name) for name in filled], rows, f"bench {measured['bench']}")


def _make_column(name: str) -> Column:
    """Return a field's column, with the unit that the field's name implies."""
    title = _HEADS.get(name, name.removesuffix("_seconds").replace("_", " "))
    if name == "case":
        return Column(name=name, title=title, form="`{}`".format)
    if name.endswith("seconds"):
        return Column(name=name, title=title, form=partial(_format_unit, _SECONDS))
    if name.endswith(("bytes", "memory")):
        return Column(name=name, title=title, form=partial(_format_unit, _BYTES))
    return Column(name=name, title=title, form=_format_number)


def _format_number(value: object) -> str:
    """Return a value with three significant digits if it is a float."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _format_unit(scales: Sequence[tuple[float, str]], value: float) -> str:
    """Return a value in the unit in which it is 1 or more, with three digits."""
    factor, name = next((scale for scale in scales if value >= scale[0]), scales[-1])
    digits = 0 if name == "B" else max(0, 3 - len(str(int(value / factor))))
    return f"{value / factor:.{digits}f} {name}"
