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

from apfed_attacks.headlines import Headline, select_best_by_kind
from apfed_attacks.interface import NOT_ATTACKED
from apfed_experiments.baselines import (
    DIFFERENT_TEST_ROWS,
    BaselinesRecord,
    RunGain,
    load_baselines,
    locate_baselines,
    measure_gain,
)
from apfed_experiments.finished import FinishedRun, load_finished_run
from apfed_experiments.verdict import VerdictLine, describe_run
from secure_apfed.base.files import count_lines
from secure_apfed.config import Config
from secure_apfed.data.catalogue import view_count
from secure_apfed.errors import ApfedError, DataError
from secure_apfed.measures.table import ACCURACY, Measure
from secure_apfed.runs.folder import RunFolder
from secure_apfed.settings.promises import Promise, spell_epsilon

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


class RunState(StrEnum):
    """The state of a run folder: finished, unfinished (to resume), or broken (not to be read)."""

    FINISHED = "finished"
    UNFINISHED = "unfinished"
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run folder in a list of runs.

    Attributes:
        path: the run's folder.
        name: path of the folder relative to the one that was listed.
        state: whether the run is finished.
        reason: why the folder is broken, or how many epochs are done.
        date: time of the last change of the file that records the run's progress.
        config: settings of the run; None: they cannot be read.
        accuracy: accuracy of the method's own inference, 0 to 1; None: not known, or the task is no
            classification.
        measure, score: the measure that the run is judged by, and its value.
        alone: local models of the active; None: not measured.
        run_gain: gain over the best local model, on the same test rows; None: not known.
        guarantee: weakest guarantee on what leaves a party.
        wire_bytes: number of bytes sent on all links.
        leak_by_direction: attack with the highest advantage, by leak direction (who reads whose
            what).
        is_attacked: whether any attack was mounted.
        has_report: whether the folder holds a report.
        verdict_lines: lines of the summary of a finished run.
    """

    path: Path
    name: str
    state: RunState
    reason: str = ""
    date: datetime
    config: Config | None = None
    accuracy: float | None = None
    measure: Measure = ACCURACY
    score: float | None = None
    local_models: BaselinesRecord | None = None
    run_gain: RunGain | None = None
    guarantee: Promise | None = None
    wire_bytes: int | None = None
    leak_by_direction: Mapping[str, Headline]
    is_attacked: bool = False
    has_report: bool = False
    verdict_lines: tuple[VerdictLine, ...] = ()

    @property
    def gain(self) -> float | None:
        """Return the gain over the best local model on the same rows, in the measure's unit."""
        return None if self.run_gain is None else self.run_gain.value

    @property
    def score_text(self) -> str:
        """Return the value of the run's measure, such as "95.2 %" (accuracy) or "AUC 0.952".

        It is empty for an unfinished run.
        """
        if self.score is None:
            return ""
        text = self.measure.format_value(self.score)
        return text if self.measure is ACCURACY else f"{self.measure.title} {text}"

    @property
    def gain_text(self) -> str:
        """Return the gain with its unit, or why there is none; empty for an unfinished run."""
        if self.score is None:
            return ""
        if self.local_models is None:
            return "alone not measured"
        if self.local_models.headline_measure != self.measure:
            return f"alone measured by {self.local_models.headline_measure.title}"
        return DIFFERENT_TEST_ROWS if self.run_gain is None else self.run_gain.value_text

    @property
    def data_text(self) -> str:
        """Return the data set, its number of parties and of labelled rows as text."""
        if self.config is None:
            return ""
        data = self.config.data
        parties = "parties with people of their own" if data.is_horizontal else "parties"
        parts = [data.dataset, f"{view_count(data)} {parties}"]
        if isinstance(data.labelled, int):
            parts.append(f"{data.labelled} labelled")
        elif data.labelled is not None:
            parts.append(f"{100 * data.labelled:g} % labelled")
        return ", ".join(parts)

    def list_cells(self) -> tuple[str, ...]:
        """Return the texts of this run under `WORTH_HEADER`."""
        method = "" if self.config is None else self.config.method.name
        epsilon = "" if self.guarantee is None else spell_epsilon(self.guarantee.epsilon)
        leaks = ", ".join(
            f"{kind} {headline.advantage:+.2f}"
            for kind, headline in self.leak_by_direction.items()
            if headline.best_attack is not None
        )
        if not leaks and self.state is RunState.FINISHED:
            leaks = NOT_ATTACKED
        state = f"{self.state}: {self.reason}" if self.reason else str(self.state)
        date = self.date.strftime("%Y-%m-%d %H:%M")
        return (
            self.name,
            method,
            self.data_text,
            self.score_text,
            self.gain_text,
            epsilon,
            leaks,
            date,
            state,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the run as plain values; shares are from 0 to 1, and None means unknown."""
        config = self.config
        local_models = self.local_models
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
            "value": self.score,
            "best_alone": None
            if local_models is None
            else {
                "name": local_models.best.name,
                "measure": local_models.measure,
                "value": local_models.best.test,
            },
            "gain": self.gain,
            "epsilon": None if self.guarantee is None else self.guarantee.epsilon,
            "promise": None if self.guarantee is None else self.guarantee.as_json(),
            "wire_bytes": self.wire_bytes,
            "attacked": self.is_attacked,
            "verdict": dict(self.verdict_lines),
            "worst_attacks": {
                kind: leak.as_json() for kind, leak in self.leak_by_direction.items()
            },
        }


def list_runs(top_folder: Path) -> list[ListedRun]:
    """Return the runs in all run folders at or below `top_folder`, the newest first.

    Runs whose study stores metrics only have no run folder, and are not listed.

    Raises DataError: the folder `top_folder` does not exist.
    """
    if not top_folder.is_dir():
        raise DataError(
            f"{top_folder}: there is no such folder; give the one that run folders lie below"
        )
    runs = [_load_listed_run(path, top_folder) for path in _iter_run_folders(top_folder)]
    return sorted(runs, key=lambda run: run.date, reverse=True)


def flatten_settings(config: Config) -> dict[str, str]:
    """Return the settings that differ from the defaults, as text by dotted path."""
    settings = config.model_dump(mode="json", exclude_defaults=True)
    return dict(_flatten_value(settings, ""))


def _iter_run_folders(top_folder: Path) -> Iterator[Path]:
    """Yield all run folders at or below `top_folder`, then all folders that cannot be read.

    Folders inside a run folder are not searched. A folder that cannot be read is yielded, since the
    list then shows why.
    """
    unreadable_folders: list[Path] = []

    def note_unreadable(error: OSError) -> None:
        """Note a folder that os.walk could not list."""
        unreadable_folders.append(Path(error.filename))

    for path, subfolders, files in os.walk(top_folder, onerror=note_unreadable):
        is_begun_run = "config.yaml" in files and (
            "contract.json" in files or "parties" in subfolders
        )
        if is_begun_run or "result.json" in files:
            subfolders.clear()  # os.walk then does not enter them
            yield Path(path)
    yield from unreadable_folders


def _load_listed_run(path: Path, top_folder: Path) -> ListedRun:
    """Return the run in a folder; one that cannot be read is broken, with the reason.

    `top_folder`: the folder that is listed.
    """
    folder = RunFolder(path)
    name = path.relative_to(top_folder).as_posix() if path != top_folder else path.resolve().name
    listed_run = ListedRun(
        path=path,
        name=_decode_name(name),
        state=RunState.BROKEN,
        date=_find_last_progress(folder),
        leak_by_direction={},
    )
    try:
        if not os.access(path, os.R_OK | os.X_OK):
            return replace(listed_run, reason="the folder may not be entered; ask its owner")
        if folder.result.is_file():
            return _complete_run(listed_run, load_finished_run(path))
        config = folder.load_config()
        epochs_done = count_lines(folder.metrics) if folder.metrics.is_file() else 0
        reason = f"{epochs_done} of {config.train.epochs} epochs; continue it with --resume"
        return replace(listed_run, state=RunState.UNFINISHED, reason=reason, config=config)
    except (ApfedError, OSError) as error:
        message = str(error).replace(f"{path}{os.sep}", "")
        return replace(listed_run, reason=_decode_name(message))


def _decode_name(name: str) -> str:
    """Return a file name in which bytes that are not UTF-8 are replaced by U+FFFD."""
    return os.fsencode(name).decode("utf-8", "replace")


def _complete_run(listed_run: ListedRun, run: FinishedRun) -> ListedRun:
    """Return a listed run with the results of the finished run in its folder.

    Local models are the run's own, or those that the runs of a study share, one folder above.
    """
    # The method's own mode of inference comes first; its accuracy is NaN in a regression.
    accuracy = next(iter(run.outcome.accuracy.values()))
    local_models = run.local_models
    gain = run.gain
    study_baselines_path = locate_baselines(run.config, listed_run.path.parent)
    if local_models is None and study_baselines_path.is_file():
        local_models = load_baselines(run.config, study_baselines_path)
        gain = measure_gain(RunFolder(listed_run.path), run.config, local_models)
    return replace(
        listed_run,
        state=RunState.FINISHED,
        config=run.config,
        local_models=local_models,
        run_gain=gain,
        verdict_lines=describe_run(replace(run, local_models=local_models, gain=gain)),
        accuracy=None if math.isnan(accuracy) else accuracy,
        measure=run.outcome.headline_measure,
        score=next(iter(run.outcome.scores.values())),
        guarantee=run.weakest_guarantee,
        wire_bytes=run.outcome.wire_bytes,
        is_attacked=run.attacks is not None,
        leak_by_direction=select_best_by_kind(run.headlines),
        has_report=(listed_run.path / "report.html").is_file(),
    )


def _find_last_progress(folder: RunFolder) -> datetime:
    """Return when the run last made progress.

    It is when the first of these files that exists changed last: result, metrics, settings. Without
    them it is when the folder changed. If the time is out of range, as a wrong clock at the file's
    sender may write it, the result is 1970.
    """
    files = (folder.result, folder.metrics, folder.config)
    existing_files = (file for file in files if os.access(file, os.F_OK))
    try:
        return datetime.fromtimestamp(next(existing_files, folder.path).stat().st_mtime, UTC)
    except (ValueError, OverflowError):
        return datetime.fromtimestamp(0, UTC)


def _flatten_value(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield dotted path and text of every leaf of nested settings.

    `key`: dotted path of `value`; empty: top level.
    """
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flatten_value(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, str(value)
