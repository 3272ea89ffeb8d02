"""A finished run as its folder tells it: what was asked, what it reached, what attacks reached.

Read by: everything that reports or compares runs. A folder may have been sent by somebody else, so
only plain files of bounded size and of the types named here are read
(`secure_apfed.files`), and files that the run noted digests of are as it left them.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from apfed_attacks.interface import AttackResult
from apfed_experiments.solo import SoloRecord, read_solo
from secure_apfed.config import Config
from secure_apfed.errors import CheckpointError
from secure_apfed.files import read_json
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import Outcome, read_outcome
from secure_apfed.runs.spending import shown_figure

__all__ = ["FinishedRun", "read_finished_run"]


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """One finished run.

    Attributes:
        config, outcome: what was asked and reached.
        attacks: their results; None where none were mounted.
        solo: what the active would do alone; None where nobody measured it.
    """

    config: Config
    outcome: Outcome
    attacks: tuple[AttackResult, ...] | None
    solo: SoloRecord | None = None

    @property
    def figure(self) -> str:
        """What `epsilon` is called, of `secure_apfed.privacy_rows.FIGURES`."""
        return self.config.method.figure

    @property
    def epsilon(self) -> float:
        """Of one row's releases where representations are sent or nobody is asked, else of a
        person's votes or contributions at the passive where they cost most; inf: nothing is
        promised.
        """
        spent = self.outcome.contributions.values()
        passives = max((account.epsilon for account in spent), default=math.inf)
        _, epsilon = shown_figure(self.config, self.outcome.privacy.epsilon_x, passives)
        return math.inf if epsilon is None else epsilon


def read_finished_run(path: Path) -> FinishedRun:
    """Read a run folder.

    Raises:
        CheckpointError: a file is missing or not as this version writes it, or the run has not
            finished.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such run folder")
    folder = RunFolder(path)
    if not folder.result.is_file():
        begun = folder.config.is_file()
        reason = (
            "the run has not finished; continue it with --resume"
            if begun
            else "it is no run folder"
        )
        raise CheckpointError(f"{path}: has no result.json: {reason}")
    folder.check(folder.config, folder.result)
    attacks, config = path / "attacks.json", folder.load_config()
    return FinishedRun(
        config=config,
        outcome=read_outcome(folder),
        attacks=read_json(attacks, tuple[AttackResult, ...]) if attacks.is_file() else None,
        solo=read_solo(config, folder.solo) if folder.solo.is_file() else None,
    )
