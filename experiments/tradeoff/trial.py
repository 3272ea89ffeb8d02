"""One trial of a study: a run with its attacks. One that fails leaves the others alone."""

from dataclasses import dataclass
from pathlib import Path

from experiments.measured import Measurement, measure
from experiments.tradeoff.outcome import Outcome, read_outcome
from experiments.tradeoff.study import Point
from experiments.trials import finish_trial, refuse_another_run
from protocols.errors import LocalProtocolError, RemoteProtocolError
from secure_apfed.config import Config
from secure_apfed.errors import ApfedError

__all__ = ["Failure", "Trial", "attempt", "trials_of"]


@dataclass(frozen=True)
class Failure:
    """A trial that ended with an error; the next start of the study tries it again."""

    trial: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a point.

    Attributes:
        folder: of the study.
        centralised: all features in one table; leaves a file of figures instead of a run folder.
    """

    config: Config
    folder: Path
    centralised: bool

    def refuse_another_run(self) -> None:
        """Raise before anything is run.

        Raises:
            CheckpointError: what lies in its place has other settings.
        """
        if not self.centralised:
            refuse_another_run(self.config, self.folder / self.config.name)
        elif self._measurement.file.exists():
            measure(self._measurement)

    def finish(self) -> Outcome:
        """Run and attack what is not done yet, and read it.

        Raises:
            ApfedError, LocalProtocolError, RemoteProtocolError: as `secure_apfed.runs.run`.
        """
        if self.centralised:
            found = measure(self._measurement)
            return Outcome(
                accuracy=found.accuracy, epsilon_x=found.epsilon_x, epsilon_y=found.epsilon_y,
                releases=found.releases, leaks={},
            )  # fmt: skip
        path = self.folder / self.config.name
        finish_trial(self.config, path)
        return read_outcome(path)

    @property
    def _measurement(self) -> Measurement:
        file = self.folder / f"{self.config.name}.json"
        return Measurement(config=self.config, file=file, centralised=True)


def trials_of(point: Point, folder: Path) -> list[Trial]:
    """The trials of a point, by seed."""
    return [
        Trial(config=config, folder=folder, centralised=point.centralised)
        for config in point.configs
    ]


def attempt(trial: Trial) -> tuple[str, Outcome | Failure]:
    """Finish a trial; an error that is meant for people becomes a failure."""
    name = trial.config.name
    try:
        return name, trial.finish()
    except (ApfedError, LocalProtocolError, RemoteProtocolError) as error:
        return name, Failure(name, f"{type(error).__name__}: {error}")
