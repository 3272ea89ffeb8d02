"""Benches are run: one, or all after another into a folder that says what is done.

A case that fails is a row with the reason, as one whose peer is missing, and ends no other.
"""

import functools
import hashlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

from apfed_experiments.bench.machine import clock_step, machine, stolen_since
from apfed_experiments.bench.rows import Bench, Group, Row, absent
from secure_apfed.errors import ConfigError
from secure_apfed.files import to_json, write_atomically

__all__ = ["Measured", "run_all", "run_one"]

Measured = dict[str, Any]
"""Rows of a bench and what they were measured on: one JSON object."""

_PACKAGES = ("apfed_protocols", "secure_apfed", "apfed_attacks", "apfed_experiments")


def run_one(name: str, bench: Bench, *, quick: bool, cases: str) -> Measured:
    """Run one bench; the arguments are those of `run_all`.

    Raises:
        ConfigError: `cases` names none of its cases.
    """
    chosen = _chosen(bench, quick, cases)
    if not chosen:
        there = "\n".join(case for group in bench.groups(quick) for case in group.cases)
        raise ConfigError(f"{cases!r} names no case of bench {name}; there are\n{there}")
    return _measured(name, chosen, quick, cases)


def run_all(
    benches: Mapping[str, Bench], *, quick: bool, cases: str, folder: Path | None, again: bool
) -> Iterator[Measured]:
    """Run benches after one another, those that have wanted cases.

    Args:
        benches: by name.
        quick: stay under 30 seconds in each.
        cases: a glob; others are not measured, nor those of a group `by_name` unless it is a name.
        folder: gets NAME.json of each bench when it ends. One that is there and was measured by
            the same source, on the same machine and as quick, without failures, is taken as it is.
        again: measure also what is there.

    Raises:
        ConfigError: `cases` names no case of any.
        OSError: `folder` cannot be written.
    """
    chosen = {name: _chosen(bench, quick, cases) for name, bench in benches.items()}
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
    """The groups that hold wanted cases, and which these are."""

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
