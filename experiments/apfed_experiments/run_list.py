"""Runs at a glance: each run folder below a folder as one row, in whatever state it is.

Read by: `secure-apfed runs`. Folders may have been sent by somebody else: they are read as
`apfed_experiments.finished` reads them, links are not followed, and what cannot be read is a
row that says why.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from apfed_attacks.headlines import NOT_ATTACKED, Headline, worst_by_kind
from apfed_experiments.finished import FinishedRun, load_finished_run
from apfed_experiments.solo import (
    OTHER_ROWS,
    RunGain,
    SoloRecord,
    load_solo,
    measure_gain,
    solo_file,
)
from apfed_experiments.verdict import VerdictLine, describe_run
from secure_apfed.base.files import count_lines
from secure_apfed.config import Config
from secure_apfed.data.catalogue import view_count
from secure_apfed.errors import ApfedError, DataError
from secure_apfed.measures.table import ACCURACY, Measure
from secure_apfed.runs.folder import RunFolder
from secure_apfed.settings.promises import Promise, epsilon_words

HEADER = (
    "run",
    "method",
    "data",
    "reached",
    "gain",
    "epsilon",
    "worst attacks",
    "date, UTC",
    "state",
)


class State(StrEnum):
    FINISHED = "finished"
    UNFINISHED = "unfinished"
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run folder in a list of runs.

    Attributes:
        name: the folder's, below the one that was listed.
        state, reason: how far the run came, and why it is broken or how much of it is done.
        date: of the last change of the file that records its progress.
        accuracy: of the method's own inference; None also where the task is no classification.
        value: of the measure that the run is judged by.
        alone: the local models; None: not measured.
        run_gain: over the best local model, on the same rows.
        promise: the weakest of its promises on what leaves a party.
        leaks: by kind of direction, the highest advantage (among many, one is above 0 by chance).
        attacked: whether any attack was mounted.
    """

    path: Path
    name: str
    state: State
    reason: str = ""
    date: datetime
    config: Config | None = None
    accuracy: float | None = None
    measure: Measure = ACCURACY
    value: float | None = None
    alone: SoloRecord | None = None
    run_gain: RunGain | None = None
    promise: Promise | None = None
    wire_bytes: int | None = None
    leaks: Mapping[str, Headline]
    attacked: bool = False
    report: bool = False
    verdict: tuple[VerdictLine, ...] = ()

    @property
    def gain(self) -> float | None:
        """Return the gain over the best local model on the same rows; one run shows no help."""
        return None if self.run_gain is None else self.run_gain.value

    @property
    def score_text(self) -> str:
        """Return the measure reached, as "95.2 %" or "AUC 0.952" if it is no accuracy;
        empty: none.
        """
        if self.value is None:
            return ""
        text = self.measure.format_value(self.value)
        return text if self.measure is ACCURACY else f"{self.measure.title} {text}"

    @property
    def gain_text(self) -> str:
        """Return the gain with its unit, or why there is none; empty for an unfinished run."""
        if self.value is None:
            return ""
        if self.alone is None:
            return "alone not measured"
        if self.alone.headline_measure != self.measure:
            return f"alone measured by {self.alone.headline_measure.title}"
        return OTHER_ROWS if self.run_gain is None else self.run_gain.points

    @property
    def data(self) -> str:
        """Return the data set, its parties and labelled rows in words."""
        if self.config is None:
            return ""
        data = self.config.data
        parted = "parties with people of their own" if data.horizontal else "parties"
        parts = [data.dataset, f"{view_count(data)} {parted}"]
        if isinstance(data.labelled, int):
            parts.append(f"{data.labelled} labelled")
        elif data.labelled is not None:
            parts.append(f"{100 * data.labelled:g} % labelled")
        return ", ".join(parts)

    def list_cells(self) -> tuple[str, ...]:
        """Return the texts of this run under `HEADER`."""
        method = "" if self.config is None else self.config.method.name
        epsilon = "" if self.promise is None else epsilon_words(self.promise.epsilon)
        leaks = ", ".join(
            f"{kind} {headline.advantage:+.2f}"
            for kind, headline in self.leaks.items()
            if headline.worst is not None
        )
        if not leaks and self.state is State.FINISHED:
            leaks = NOT_ATTACKED
        state = f"{self.state}: {self.reason}" if self.reason else str(self.state)
        date = self.date.strftime("%Y-%m-%d %H:%M")
        return (
            self.name,
            method,
            self.data,
            self.score_text,
            self.gain_text,
            epsilon,
            leaks,
            date,
            state,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the run as plain values: shares lie in 0 to 1, and null means unknown."""
        config = self.config
        local_models = self.alone
        return {
            "folder": _decode_name(str(self.path)),
            "name": self.name,
            "state": self.state,
            "reason": self.reason,
            "date": self.date.isoformat(timespec="seconds"),
            "method": None if config is None else config.method.name,
            "dataset": None if config is None else config.data.dataset,
            "seed": None if config is None else config.seed,
            "accuracy": self.accuracy,
            "measure": self.measure.name,
            "value": self.value,
            "best_alone": None
            if local_models is None
            else {
                "name": local_models.best.name,
                "measure": local_models.measure,
                "value": local_models.best.test,
            },
            "gain": self.gain,
            "epsilon": None if self.promise is None else self.promise.epsilon,
            "promise": None if self.promise is None else self.promise.as_json(),
            "wire_bytes": self.wire_bytes,
            "attacked": self.attacked,
            "verdict": dict(self.verdict),
            "worst_attacks": {kind: leak.as_json() for kind, leak in self.leaks.items()},
        }


def list_runs(top: Path) -> list[ListedRun]:
    """Read every run folder below `top`, `top` itself too; the newest comes first.

    Figures that a study keeps without run folders are not among them; DataError: no such folder.
    """
    if not top.is_dir():
        raise DataError(f"{top}: there is no such folder; give the one that run folders lie below")
    runs = [_load_row(path, top) for path in _run_folders(top)]
    return sorted(runs, key=lambda run: run.date, reverse=True)


def settings_in(config: Config) -> dict[str, str]:
    """Return the settings that differ from the defaults, by dotted path."""
    settings = config.model_dump(mode="json", exclude_defaults=True)
    return dict(_flatten_value(settings, ""))


def _run_folders(top: Path) -> Iterator[Path]:
    """Yield run folders and folders that cannot be entered; nothing inside of a run folder."""
    closed: list[Path] = []
    for place, below, files in os.walk(top, onerror=lambda e: closed.append(Path(e.filename))):
        begun = "config.yaml" in files and ("contract.json" in files or "parties" in below)
        if begun or "result.json" in files:
            below.clear()
            yield Path(place)
    yield from closed


def _load_row(path: Path, top: Path) -> ListedRun:
    """Read one run folder; what cannot be read becomes a broken row with the reason."""
    folder = RunFolder(path)
    name = path.relative_to(top).as_posix() if path != top else path.resolve().name
    row = ListedRun(
        path=path, name=_decode_name(name), state=State.BROKEN, date=_find_date(folder), leaks={}
    )
    try:
        if not os.access(path, os.R_OK | os.X_OK):
            return replace(row, reason="the folder may not be entered; ask its owner")
        if folder.result.is_file():
            return _complete_row(row, load_finished_run(path))
        config = folder.load_config()
        epochs_done = count_lines(folder.metrics) if folder.metrics.is_file() else 0
        reason = f"{epochs_done} of {config.train.epochs} epochs; continue it with --resume"
        return replace(row, state=State.UNFINISHED, reason=reason, config=config)
    except (ApfedError, OSError) as error:
        return replace(row, reason=_decode_name(str(error).replace(f"{path}{os.sep}", "")))


def _decode_name(name: str) -> str:
    """Replace the bytes of a name that are no UTF-8 by marks."""
    return os.fsencode(name).decode("utf-8", "replace")


def _complete_row(row: ListedRun, run: FinishedRun) -> ListedRun:
    """Return the row of a finished run, with the local models that its study measured."""
    share = next(iter(run.outcome.accuracy.values()))  # NaN where nothing is classified
    shared_path = solo_file(run.config, row.path.parent)  # that runs of a study share
    shared = (
        load_solo(run.config, shared_path) if run.solo is None and shared_path.is_file() else None
    )
    folder = RunFolder(row.path)
    gain = run.gain if shared is None else measure_gain(folder, run.config, shared)
    return replace(
        row,
        state=State.FINISHED,
        config=run.config,
        alone=run.solo or shared,
        run_gain=gain,
        verdict=describe_run(replace(run, solo=run.solo or shared, gain=gain)),
        accuracy=None if math.isnan(share) else share,
        measure=run.outcome.headline_measure,
        value=next(iter(run.outcome.scores.values())),
        promise=run.promise,
        wire_bytes=run.outcome.wire_bytes,
        attacked=run.attacks is not None,
        leaks=worst_by_kind(run.headlines),
        report=(row.path / "report.html").is_file(),
    )


def _find_date(folder: RunFolder) -> datetime:
    """Return when the run last wrote how far it came, else when its folder was changed."""
    files = (folder.result, folder.metrics, folder.config)
    readable = (file for file in files if os.access(file, os.F_OK))
    try:
        return datetime.fromtimestamp(next(readable, folder.path).stat().st_mtime, UTC)
    except (ValueError, OverflowError):  # the clock of who sent it
        return datetime.fromtimestamp(0, UTC)


def _flatten_value(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, text) of every leaf of nested settings."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flatten_value(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, str(value)
