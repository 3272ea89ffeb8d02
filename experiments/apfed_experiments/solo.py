"""What the active would do alone, beside every run: all solo baselines, on the same data and rows.

A run's help is worth what it adds to the best of these, chosen by the active's own labels
(`secure_apfed.solo.choice`). The file depends on data, seed, network and training alone, so that
the runs of a study that share these share it, too.

What is written beside a promise is part of it. Where a run answers its training labels through a
mechanism, its baselines learn from those answers, and are chosen by them; where it trains by DP-SGD
they would tell of rows what its noise does not cover, and there are none (`beside_run`). A study
measures the active alone without any privacy, since nothing is sent: its baselines know the labels
as they are (`keep_solo`), and it is no part of what its runs promise.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field

from secure_apfed.config import Config
from secure_apfed.data import OwnData, VerticalData, files_digest, load_data
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.files import own_subfolder, read_json, to_json, write_atomically
from secure_apfed.measures import ACCURACY, MEASURES, Measure, find_measure
from secure_apfed.methods import Start, fresh_secrets
from secure_apfed.methods.student import Student, student_of, train_student, with_prior
from secure_apfed.methods.votes import prior_of
from secure_apfed.runs.folder import RunFolder, read_sealed, write_sealed
from secure_apfed.runs.outcome import Written
from secure_apfed.seeds import one_thread, undisturbed
from secure_apfed.solo import BASELINES, SoloTask
from secure_apfed.solo.choice import (
    DETECTORS,
    BaselineResult,
    best,
    compare,
    compare_detectors,
    compare_numbers,
)
from secure_apfed.solo.interface import FitStore

__all__ = [
    "LEFT_OUT", "SoloRecord", "beside_run", "fits_beside", "keep_solo", "read_solo",
    "settings_digest", "solo_file", "taught_alone",
]  # fmt: skip

LEFT_OUT = (
    "what the active does alone is left out: without the noise of dp_sgd it would tell of training "
    "rows what this run's epsilons do not cover; to see it, run method single_view without dp_sgd, "
    "in another folder"
)


class SoloRecord(Written):
    """The file: digests of the settings and of the active's own table, the measure, each
    baseline's, and whether labels are true or what a run's label mechanism answered for training
    rows.
    """

    settings: str
    baselines: tuple[BaselineResult, ...] = Field(min_length=1)
    files: str = ""
    labels: Literal["true", "answered"] = "true"
    measure: Annotated[str, AfterValidator(lambda name: find_measure(name).name)] = ACCURACY.name

    @property
    def judged_by(self) -> Measure:
        return MEASURES[self.measure]

    @property
    def best(self) -> BaselineResult:
        """The one that the active's own labels choose."""
        return best(self.baselines, measure=self.judged_by)

    @property
    def chosen(self) -> str:
        """By what the best was: without labels there is only what favours it."""
        if all(found.name in DETECTORS for found in self.baselines):
            return "by the test rows, in its favour"
        return "by its own labels" if self.labels == "true" else "by the answers for its labels"

    def sentence(self, reached: float) -> str:
        """How a run of this value stands beside it; one run shows no more than that."""
        alone, measure = self.best, self.judged_by
        learnt = "" if self.labels == "true" else ", taught by the same answers,"
        return (
            f"{measure.gain_text(reached, alone.test)} in {measure.title} against {alone.title}, "
            f"the best that the active does alone{learnt} {self.chosen} "
            f"({measure.text(alone.test)}); "
            "one run shows no gain, only several seeds do (secure-apfed run CONFIG --seeds 5)"
        )


def settings_digest(config: Config) -> str:
    """SHA-256 (hex) of all that solo baselines depend on."""
    of = {
        "data": config.data.model_dump(mode="json"), "seed": config.seed,
        "model": config.model.model_dump(mode="json"),
        # No baseline weighs classes, or takes another loss.
        "train": config.train.model_dump(mode="json", exclude={"class_weights", "loss"}),
        **({} if config.measure == ACCURACY.name else {"measure": config.measure}),
        **({"labels": config.labels.model_dump(mode="json")} if config.labels_are_private else {}),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()


def solo_file(config: Config, folder: Path) -> Path:
    """Where a study keeps the baselines of this data, seed, network and training."""
    return folder / f"solo-{settings_digest(config)[:16]}.json"


@undisturbed()
def keep_solo(config: Config, path: Path, *, data: VerticalData | None = None) -> SoloRecord:
    """Measure the baselines of labels as they are and write the file, unless it is there.

    Raises:
        ConfigError: the labels are private: then they are for a finished run (`beside_run`).
        CheckpointError: what lies there is of other settings, or of a table that was edited.
    """
    if config.labels_are_private:
        raise ConfigError(
            f"{config.name}: labels and dp_sgd keep training labels private, and baselines of the "
            "labels as they are would tell them; measure them for settings without both"
        )
    files = files_digest(config.data, of=[config.data.active_name])
    if path.is_file():
        kept = read_solo(config, path)
        if kept.files not in ("", files):
            raise CheckpointError(
                f"{path} holds solo baselines of a table that was edited since; remove it and "
                "measure again"
            )
        return kept
    own = (data or load_data(config.data, seed=config.seed)).own(config.data.active_name)
    assert own is not None
    return _measured(config, path, own, files=files)


def beside_run(config: Config, folder: Path, trained: OwnData | None) -> SoloRecord | None:
    """The baselines of a finished run, of the very rows and labels that it trained on.

    `trained` is that of its `RunResult`; None: only what was written is read. None where nobody
    measured them, and under DP-SGD (`LEFT_OUT`).
    """
    path = RunFolder(folder).solo
    if config.dp_sgd is not None:
        return None
    if trained is not None:
        return _measured(config, path, trained)
    return read_solo(config, path) if path.is_file() else None


def _measured(config: Config, path: Path, own: OwnData, *, files: str = "") -> SoloRecord:
    """Measure on one thread, and write."""
    with one_thread():
        if config.data.anomaly is not None:
            found = _anomalies(config, own)
        else:
            found = _numbers(config, own) if own.targets else _classes(config, own)
    record = SoloRecord(
        settings=settings_digest(config), baselines=tuple(found), measure=config.measure,
        files=files, labels="answered" if config.labels_are_private else "true",
    )  # fmt: skip
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, to_json(record.model_dump(mode="json")).encode())
    return record


def _anomalies(config: Config, own: OwnData) -> list[BaselineResult]:
    """Detectors of the training rows; no label chooses among them."""
    table, test = own.table, own.test_rows
    assert table.labels is not None
    return compare_detectors(
        table.features[own.train_rows], table.features[test], table.labels[test],
        measure=MEASURES[config.measure], seed=config.seed,
    )  # fmt: skip


def _numbers(config: Config, own: OwnData) -> list[BaselineResult]:
    """Regressions of the labelled rows, in the unit of the labels."""
    table, targets = own.table, own.targets
    assert table.labels is not None
    assert targets is not None
    parts = [
        (table.features[rows], targets.decode(table.labels[rows]))
        for rows in (own.labelled_rows, own.test_rows)
    ]
    return compare_numbers(*parts[0], *parts[1], measure=MEASURES[config.measure], seed=config.seed)


def _classes(config: Config, own: OwnData) -> list[BaselineResult]:
    table, rows = own.table, own.train_rows
    assert table.labels is not None
    labelled = torch.isin(rows, own.labelled_rows).nonzero().flatten()
    task = SoloTask.of(
        table.features[rows], labelled, table.labels[rows[labelled]], classes=len(own.classes),
        seed=config.seed, model=config.model, train=config.train,
    )  # fmt: skip
    return compare(
        task, table.features[own.test_rows], table.labels[own.test_rows],
        baselines=BASELINES, measure=MEASURES[config.measure],
    )  # fmt: skip


def taught_alone(config: Config, data: VerticalData) -> Student:
    """The student of a run with votes as it is without help: taught by the active's prior alone."""
    name = data.active.name
    own = Start(config=config, data=data).own(name, fresh_secrets(config, name), {})
    student = student_of(own, torch.arange(len(data.active.ids)))
    student.teach(with_prior(None, student, prior_of(config), seed=config.seed))
    train_student(student, config)
    return student


def read_solo(config: Config, path: Path) -> SoloRecord:
    """What `keep_solo` wrote; CheckpointError: of other data or settings, or none of ours."""
    record = read_json(path, SoloRecord)
    if record.settings != settings_digest(config):
        raise CheckpointError(
            f"{path} holds solo baselines of other data or settings; remove it and measure again"
        )
    return record


def fits_beside(folder: Path) -> FitStore:
    """Keep fits that several of a study's runs ask for in a folder `fits` of theirs.

    The code is not in their names, as it is not in a finished run's: a study after a change of a
    baseline begins in another folder. Two processes that ask at once both fit, and find the same.
    """

    def once(name: str, make: Callable[[], bytes]) -> bytes:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = own_subfolder(folder / "fits") / name
        if path.is_file():
            return read_sealed(path)
        content = make()
        write_sealed(path, content)
        return content

    return once
