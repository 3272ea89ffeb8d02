"""Studies: a declaration of what is measured and compared, and the function that runs any of them.

`run_study` measures what is missing, and writes the table of each part as CSV, Markdown and JSON,
the reports of runs, and one page.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from joblib import Parallel, delayed

from apfed_experiments.columns import Table, write_text
from apfed_experiments.report import write_report
from apfed_experiments.report.page import Part, write_study_page
from apfed_experiments.study import Failure, OnDone, Trial, finish_trial
from secure_apfed.base.files import to_json

PAGE_NAME = "index.html"


class Measurements(Protocol):
    """A study's measurements, of any type that lists the failures among them."""

    @property
    def failures(self) -> Sequence[Failure]: ...


_M = TypeVar("_M", bound=Measurements)


@dataclass(frozen=True, kw_only=True)
class Study(Generic[_M]):
    """The declaration of a study.

    Attributes:
        title: title of the study's page.
        reading_guide: sentences on how to read the tables.
        folder: where everything is stored and a stopped study resumes; None: nothing is written.
        measure: function of `jobs` and `on_done` that measures what the folder lacks and returns
            all measurements (for runs: `apfed_experiments.study.run_points`).
        compare: function that makes tables and verdicts of the measurements and draws pictures.
        measure_first: function of `jobs` and `on_done` that measures a first part and returns
            sentences that are shown before the rest is measured; None: nothing is shown first.
        unit_name: name of the measurements that progress counts, in the plural.
        reported_trials: runs whose reports are written and linked from the page.
    """

    title: str
    reading_guide: str
    folder: Path | None
    measure: Callable[..., _M]
    compare: Callable[[_M], Sequence[Part]]
    measure_first: Callable[..., Sequence[str]] | None = None
    unit_name: str = "runs"
    reported_trials: Sequence[Trial] = ()


@dataclass(frozen=True, kw_only=True)
class StudyResults:
    """The results of a study, which are also stored in its folder.

    Attributes:
        measurements: all measurements, as `Study.measure` returns them.
        parts: tables, verdicts and pictures, one part for each data set or question.
    """

    study: Study[Any]
    measurements: Any
    parts: Sequence[Part]

    @property
    def failures(self) -> Sequence[Failure]:
        """Return the runs that ended with an error."""
        failures: Sequence[Failure] = self.measurements.failures
        return failures

    @property
    def tables(self) -> list[Table]:
        """Return the table of each part."""
        return [part.table for part in self.parts]

    @property
    def page(self) -> Path | None:
        """Return the path of the study's page; None where nothing is written."""
        folder = self.study.folder
        return None if folder is None else folder / PAGE_NAME

    def as_json(self) -> dict[str, Any]:
        """Return the rows of all tables, and failures, as plain values."""
        return {
            "study": self.study.title,
            "reading": self.study.reading_guide,
            "tables": {part.name: part.table.export_rows() for part in self.parts},
            "failures": {failure.trial: failure.message for failure in self.failures},
            "page": self.page,
        }


def run_study(
    study: Study[Any], *, jobs: int = 1, on_done: OnDone = lambda done, total: None
) -> StudyResults:
    """Measure what a study lacks; write tables, pictures, reports and the page; return the results.

    `jobs`: number of processes. `on_done`: function that is called after each measurement.

    Raises CheckpointError: the folder holds metrics of other settings. Errors of the study's runs
    are passed on.
    """
    folder = study.folder
    if folder is not None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    measurements = study.measure(jobs=jobs, on_done=on_done)
    failed_names = {failure.trial for failure in measurements.failures}
    reported_trials = [trial for trial in study.reported_trials if trial.name not in failed_names]
    # Worker processes of this machine write reports, wherever the runs were computed, while this
    # process compares. They begin here; their pages are awaited below.
    pages = Parallel(n_jobs=jobs, backend="loky", return_as="generator")(
        delayed(_write_trial_report)(trial) for trial in reported_trials
    )
    results = StudyResults(
        study=study, measurements=measurements, parts=study.compare(measurements)
    )
    if folder is not None:
        sentences = describe_failures(measurements.failures)
        for part in results.parts:
            _write_table(folder / part.name, part, sentences)
        links = [
            (trial.name, f"{page.relative_to(folder)}")
            for trial, page in zip(reported_trials, pages, strict=True)
        ]
        write_study_page(
            folder / PAGE_NAME,
            title=study.title,
            reading_guide=study.reading_guide,
            parts=results.parts,
            reports=links,
            failures=sentences,
        )
    return results


def _write_trial_report(trial: Trial) -> Path:
    """Write the report of a finished trial (a run of the study), and return its path.

    The local models that the study measured are shown in it.
    """
    return write_report(trial.path, local_models=finish_trial(trial).local_models)


def _write_table(base_path: Path, part: Part, failures: Sequence[str]) -> None:
    """Write the table of a part of the study (such as one data set) as CSV, Markdown and JSON.

    `base_path`: path without suffix, whose name may hold dots. `failures`: sentences that the
    Markdown file ends with.
    """
    content_by_suffix = {
        "csv": part.table.format_csv(),
        "md": part.table.format_markdown([*part.notes, *failures]),
        "json": to_json({"rows": part.table.export_rows()}, indent=1),
    }
    for suffix, content in content_by_suffix.items():
        write_text(base_path.with_name(f"{base_path.name}.{suffix}"), content)


def describe_failures(failures: Sequence[Failure]) -> list[str]:
    """Return a sentence for each error message, with the trials that it ended."""
    trials_by_message: dict[str, list[str]] = {}
    for failure in failures:
        trials_by_message.setdefault(failure.message, []).append(failure.trial)
    return [
        f"Failed and left out: {', '.join(trials)}: {message}"
        for message, trials in trials_by_message.items()
    ]
