"""One page of many runs, to filter, sort and compare: style, script and figures inside of it.

Read by: whoever opens the page, which fetches nothing. Without scripts it is a table.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from apfed_experiments import words
from apfed_experiments.report.page import fill
from apfed_experiments.run_list import TARGETS, ListedRun, State, settings_in
from secure_apfed.files import write_atomically

__all__ = ["write_runs_page"]


def write_runs_page(runs: Sequence[ListedRun], path: Path, *, title: str) -> Path:
    """Write the page; its links to reports hold while it and the folders stay where they are.

    Raises:
        OSError: it cannot be written.
    """
    leaked = [target for target in TARGETS if any(target in run.leaks for run in runs)]
    page = fill(
        "runs.html.jinja",
        title=title,
        states=[(str(state), sum(run.state is state for run in runs)) for state in State],
        targets=leaked,
        rows=[_row(run, leaked, path.parent) for run in runs],
        choices={
            "method": sorted({run.config.method.name for run in runs if run.config}),
            "data": sorted({run.config.data.dataset for run in runs if run.config}),
            "state": sorted({str(run.state) for run in runs}),
        },
        settings=[{} if run.config is None else settings_in(run.config) for run in runs],
    )
    write_atomically(path, page.encode(), private=True)
    return path


def _row(run: ListedRun, targets: Sequence[str], start: Path) -> dict[str, Any]:
    """What the template shows of a run; each figure is (text, note, number to sort by)."""
    config, gain, alone = run.config, run.gain, run.alone
    figures: dict[str, tuple[str, str, float | None]] = {
        "reached": _figure(run.value, lambda _: run.reached),
        "gain": _figure(
            gain,
            lambda _: run.gained.replace("-", "\u2212"),
            run.gained if alone is None or gain is None else alone.best.title,
        ),
        "epsilon": _figure(run.epsilon, words.epsilon),
    }
    for target in targets:
        leak = run.leaks.get(target)
        note = "" if leak is None else f"{words.plain(leak.metric)}, {words.plain(leak.attack)}"
        figures[f"attack on {target}"] = _figure(
            None if leak is None else leak.advantage, words.signed, note
        )
    figures["sent"] = _figure(run.wire_bytes, words.size)
    return {
        "name": run.name,
        "report": _address(run, start) if run.report else None,
        "method": "" if config is None else config.method.name,
        "title": "" if config is None else config.method.title,
        "dataset": "" if config is None else config.data.dataset,
        "data": run.data,
        "figures": figures,
        "date": run.date.strftime("%Y-%m-%d %H:%M"),
        "state": str(run.state),
        "reason": run.reason,
    }


def _figure(value: Any, form: Any, note: str = "") -> tuple[str, str, float | None]:
    return ("", note, None) if value is None else (form(value), note, float(value))


def _address(run: ListedRun, start: Path) -> str:
    """Of the report, from where the page lies; names are quoted, so that they name no other."""
    return quote(os.fsencode(Path(os.path.relpath(run.path / "report.html", start)).as_posix()))
