"""The tables of docs/performance.md, made of what `bench all --output` wrote: no figure is typed.

Between `<!-- bench NAME -->` and `<!-- end NAME -->` the page holds what `block` makes of
NAME.json; all else is written by hand and stays. `<!-- bench NAME CASES -->` shows some cases only.
"""

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from apfed_experiments.bench import BENCHES, Measured
from apfed_experiments.study_page import markdown, write_text
from secure_apfed.errors import DataError

__all__ = ["block", "cells", "read_measured", "renewed", "write_performance"]

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
            rows = [row for row in shown["rows"] if fnmatch(row["case"], only)]
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
