"""Benchmarks in one form: `secure-apfed bench NAME [--only CASES] [--json] [--quick]`.

A new bench is a `Bench` and one line in the table. One is run, or all after another into a folder
that says what is done (`bench all --output FOLDER`): a case that fails is a row with the reason, as
one whose peer is missing, and ends no other. The tables of docs/performance.md are made of that
folder: between `<!-- bench NAME -->` and `<!-- end NAME -->` the page holds what `block` makes of
NAME.json, with `<!-- bench NAME CASES -->` of some cases only; all else is written by hand and
stays, and no figure is typed.
"""

import functools
import hashlib
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

from apfed_experiments.bench import footprint, parties, psi, secure_sum, training, votes
from apfed_experiments.bench.rows import (
    Bench,
    Group,
    Row,
    absent,
    clock_step,
    machine,
    stolen_since,
)
from apfed_experiments.columns import markdown, write_text
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.files import to_json, write_atomically

__all__ = [
    "BENCHES", "Measured", "block", "cells", "read_measured", "renewed", "run_bench",
    "run_benches", "write_performance",
]  # fmt: skip

BENCHES: Mapping[str, Bench] = {
    "attacks": training.ATTACKS,
    "audit-log": parties.LOG,
    "exchange": parties.EXCHANGE,
    "footprint": footprint.BENCH,
    "joint-prediction": parties.JOINT,
    "local": parties.LOCAL,
    "nvflare": parties.NVFLARE,
    "psi": psi.BENCH,
    "secure-sum": secure_sum.BENCH,
    "training": training.TRAINING,
    "transport": parties.TRANSPORT,
    "votes": votes.BENCH,
}
Measured = dict[str, Any]
"""Rows of a bench and what they were measured on: one JSON object."""

_PACKAGES = ("apfed_protocols", "secure_apfed", "apfed_attacks", "apfed_experiments")
_HEADS = {"peer_seconds": "the peer's seconds"}
_MANY = 1_000_000
_COARSE_S = 1e-4
_BLOCK = re.compile(
    r"<!-- bench (?P<name>\S+)(?: (?P<only>\S+))? -->\n.*?<!-- end (?P=name) -->", re.DOTALL
)
_SCALES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
    "B": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
}


def run_bench(name: str, *, quick: bool = False, cases: str = "*") -> Measured:
    """Run one bench; the arguments are those of `run_benches`.

    Raises:
        KeyError: no bench has that name.
        ConfigError: `cases` names none of its cases.
    """
    chosen = _chosen(BENCHES[name], quick, cases)
    if not chosen:
        there = "\n".join(case for group in BENCHES[name].groups(quick) for case in group.cases)
        raise ConfigError(f"{cases!r} names no case of bench {name}; there are\n{there}")
    return _measured(name, chosen, quick, cases)


def run_benches(
    *, quick: bool = False, cases: str = "*", folder: Path | None = None, again: bool = False,
    benches: Mapping[str, Bench] | None = None,
) -> Iterator[Measured]:  # fmt: skip
    """Run benches after one another, those that have wanted cases.

    Args:
        quick: stay under 30 seconds in each.
        cases: a glob; others are not measured, unless a wanted one is compared with them, nor those
            of a group `by_name` unless it is a name.
        folder: gets NAME.json of each bench when it ends. One that is there and was measured by
            the same source, on the same machine and as quick, without failures, is taken as it is.
        again: measure also what is there.
        benches: by name; all of the table unless given.

    Raises:
        ConfigError: `cases` names no case of any.
        OSError: `folder` cannot be written.
    """
    every = BENCHES if benches is None else benches
    chosen = {name: _chosen(bench, quick, cases) for name, bench in every.items()}
    if not any(chosen.values()):
        raise ConfigError(
            f"{cases!r} names no case of any bench; ask one by its name for its cases"
        )
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for name, groups in chosen.items():
        if not groups:
            continue
        path = folder / f"{name}.json" if folder is not None else None
        measured = None if again or path is None else _kept(path, _head(name, quick, cases))
        if measured is None:
            measured = _measured(name, groups, quick, cases)
            if path is not None:
                write_atomically(path, (to_json(measured, indent=1) + "\n").encode())
        yield measured


def _chosen(bench: Bench, quick: bool, cases: str) -> list[tuple[Group, Sequence[str]]]:

    def asked(group: Group, case: str) -> bool:
        return case == cases if group.by_name else fnmatchcase(case, cases)

    wanted = (
        (group, [case for case in group.cases if asked(group, case)])
        for group in bench.groups(quick)
    )
    return [(group, names) for group, names in wanted if names]


def _head(name: str, quick: bool, cases: str) -> Measured:
    """What two measurements share where one can stand for the other."""
    return {
        "bench": name, "source": _source(), "quick": quick, "cases": cases, "machine": machine(),
    }  # fmt: skip


def _measured(
    name: str, chosen: Sequence[tuple[Group, Sequence[str]]], quick: bool, cases: str
) -> Measured:
    head, (before, _) = _head(name, quick, cases), stolen_since()
    began = datetime.now(UTC).date().isoformat()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    steps = [clock_step()]
    rows = [row.as_json() for group, names in chosen for row in _rows(group, names)]
    steps.append(clock_step())
    _, stolen = stolen_since(before)
    told = {"date": began, "load": load, "stolen": round(stolen, 4), "clock_step": max(steps)}
    return {**head, **told, "rows": rows}


def _rows(group: Group, names: Sequence[str]) -> list[Row]:
    """One row for each of these cases; the reason in its place where measuring failed."""
    found: dict[str, Row] = {}
    reason = "its bench made no row of it"
    try:
        for row in group.measure(names):
            found[row.case] = row
    except Exception as error:  # noqa: BLE001 - whatever it is, other cases can be measured
        traceback.print_exc(file=sys.stderr)
        reason = f"it failed: {type(error).__name__}: {str(error).strip()[:500]}"
    return [found.get(name) or absent(name, reason, failed=True) for name in names]


def _kept(path: Path, head: Measured) -> Measured | None:
    """What an earlier run left there, if it stands for what would be measured now."""
    try:
        kept: Measured = json.loads(path.read_bytes())
        same = all(kept[key] == value for key, value in head.items())
        return kept if same and not any(row.get("failed") for row in kept["rows"]) else None
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None


@functools.cache
def _source() -> str:
    """Which code this is: a digest of the source of all packages."""
    digest = hashlib.sha256()
    for name in _PACKAGES:
        (root,) = import_module(name).__path__
        for path in sorted(Path(root).rglob("*.py")):
            digest.update(f"{name}/{path.relative_to(root).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def write_performance(page: Path, folder: Path) -> None:
    """Renew the tables of `page` from the JSON files in `folder`.

    Raises:
        DataError: no such files, one of another form, or one that the page has no place for.
        OSError: the page cannot be read or written.
    """
    write_text(page, renewed(page.read_text("utf-8"), read_measured(folder)))


def read_measured(folder: Path) -> dict[str, Measured]:
    """What each bench measured, by its name.

    Raises:
        DataError: no such files, or one of another form.
    """
    found: dict[str, Measured] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            measured = json.loads(path.read_bytes())
            found[measured["bench"]] = measured
            block(measured)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"{path} is not what a bench wrote ({type(error).__name__}: {error}); remove it "
                f"and measure again: secure-apfed bench all --output {folder}"
            ) from error
    if not found:
        raise DataError(
            f"{folder} holds no figures; first secure-apfed bench all --output {folder}"
        )
    return found


def renewed(text: str, measured: Mapping[str, Measured]) -> str:
    """The text of a page with the tables of these benches in their places.

    Raises:
        DataError: a bench has no place there, or a place no bench.
    """
    places = [match["name"] for match in _BLOCK.finditer(text)]
    if wrong := set(places) ^ set(measured):
        name = min(wrong)
        raise DataError(
            f"the page has a place for bench {name}, which was not measured; measure it"
            if name in places
            else f"the page has no place for bench {name}; write <!-- bench {name} --> and "
            f"<!-- end {name} --> on lines of their own where its table belongs"
        )

    machines: list[Any] = [None]

    def fill(match: re.Match[str]) -> str:
        name, only = match["name"], match["only"]
        shown = measured[name]
        machines.append(shown["machine"])
        if only:
            rows = [row for row in shown["rows"] if fnmatchcase(row["case"], only)]
            shown = {**shown, "rows": rows, "cases": only}
        head = match[0].partition("\n")[0]
        return f"{head}\n{block(shown, above=machines[-2])}<!-- end {name} -->"

    return _BLOCK.sub(fill, text)


def block(measured: Measured, *, above: Any = None) -> str:
    """A bench's table, what it was measured on, and why what is missing is missing.

    Args:
        measured: what it measured.
        above: the machine of the table before it.
    """
    bench, machine = BENCHES[measured["bench"]], measured["machine"]
    header, rows = cells(measured)
    reasons: dict[str, list[str]] = {}
    for row in measured["rows"]:
        if "reason" in row:
            reasons.setdefault(row["reason"], []).append(f"`{row['case']}`")
    only = "" if measured["cases"] == "*" else f", cases `{measured['cases']}`"
    load = "" if measured["load"] is None else f", load {measured['load']:.1f} when it began"
    step = measured["clock_step"]
    clock = f" The clock moved by {_scaled(step, 's')}." if step > _COARSE_S else ""
    where = (
        f"{machine['processor']}, {machine['cores']} cores, {machine['gpu'] or 'no GPU'}, Python "
        f"{machine['python']}, torch {machine['torch']}"
    )
    told = (
        f"{measured['date']}{', quick' if measured['quick'] else ''}{only}: "
        f"{'there' if machine == above else where}{load}, {measured['stolen']:.1%} stolen. "
        f"*Ratio*: {bench.ratio}.{clock}"
    )
    table = markdown(header, rows) if rows else ""
    missing = "".join(
        f"\nNot measured: {', '.join(cases)}: {_line(reason)}\n"
        for reason, cases in reasons.items()
    )
    return f"{told}\n\n{table}{missing}"


def cells(measured: Measured) -> tuple[list[str], list[list[str]]]:
    """Header and texts of a bench's table, without what was not measured and empty columns."""
    rows: Sequence[Mapping[str, Any]] = [row for row in measured["rows"] if "reason" not in row]
    fields = ["case", "seconds", "peer", "ratio", "bytes", *BENCHES[measured["bench"]].fields]
    shown = [field for field in fields if any(row.get(field) is not None for row in rows)]
    header = [
        _HEADS.get(field, field.removesuffix("_seconds").replace("_", " ")) for field in shown
    ]
    return header, [[_text(field, row.get(field)) for field in shown] for row in rows]


def _text(field: str, value: object) -> str:
    """A number with its unit, which the field's name tells."""
    if value is None:
        return ""
    if not isinstance(value, int | float):
        return f"`{value}`" if field == "case" else _line(str(value))
    if field.endswith("seconds"):
        return _scaled(value, "s")
    if field.endswith(("bytes", "memory", "payload", "formula")):
        return _scaled(value, "B")
    return f"{value:.3g}" if isinstance(value, float) or value >= _MANY else str(value)


def _scaled(value: float, unit: str) -> str:
    scales = _SCALES[unit]
    factor, name = next((each for each in scales if value >= each[0]), scales[-1])
    digits = max(0, 2 - len(str(int(value / factor))) + 1) if unit == "s" or factor > 1 else 0
    return f"{value / factor:.{digits}f} {name}"


def _line(text: str) -> str:
    """On one line, and without what would end a cell or begin a tag."""
    return " ".join(text.split()).replace("|", "/").replace("<", "&lt;")
