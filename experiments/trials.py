"""The runs behind a comparison: every method, plain and protected, over several seeds.

A comparison starts from one YAML file, the protected run; every other one is derived from
it by a variant, so that all share data, networks and optimiser.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attacks.interface import AttackResult
from experiments.finish import mount_attacks
from experiments.report.folder import Outcome
from protocols.errors import UnsafeChoiceWarning
from secure_apfed.config import Config
from secure_apfed.errors import CheckpointError
from secure_apfed.folder_files import read_json
from secure_apfed.privacy import GuardSettings
from secure_apfed.runs import RunFolder, run
from secure_apfed.runs.folder import own_subfolder
from secure_apfed.settings.training import SumSettings

__all__ = [
    "VARIANTS",
    "Trial",
    "TrialResult",
    "Variant",
    "finish_trial",
    "read_trial",
    "refuse_another_run",
    "run_trial",
    "trials",
]


@dataclass(frozen=True)
class Variant:
    """How a run differs from the protected one.

    Attributes:
        label: for people; method: a key of METHODS.
        protected: None where there is nothing to protect: nothing leaves the active.
    """

    label: str
    method: str
    protected: bool | None

    @property
    def key(self) -> str:
        """For folder names."""
        suffix = {None: "", True: "-protected", False: "-plain"}[self.protected]
        return f"{self.method}{suffix}"

    def of(self, base: Config, seed: int) -> Config:
        """The run of this variant with this seed."""
        changes: dict[str, Any] = {
            "name": f"{base.name}-{self.key}-seed{seed}",
            "seed": seed,
            "method": self.method,
        }
        if not self.protected:
            changes["guard"] = GuardSettings(mechanism="none")
            changes["secure_sum"] = SumSettings(scheme="plain", clip=base.secure_sum.clip)
        return base.model_copy(update=changes)


VARIANTS: tuple[Variant, ...] = (
    Variant("SingleVL", "single_view", None),
    Variant("TVFL", "tvfl", False),
    Variant("TVFL", "tvfl", True),
    Variant("APFed-R", "apfed_r", False),
    Variant("APFed-R", "apfed_r", True),
    Variant("APFed-C", "apfed_c", False),
    Variant("APFed-C", "apfed_c", True),
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a comparison and where it lies."""

    variant: Variant
    config: Config
    folder: Path


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What a comparison reads of one run.

    Attributes:
        accuracy: by inference variant.
        epsilon: epsilon_x; 0 where nothing was released, infinite without a guard.
        advantages: of the attacks on labels that apply, by setting.
    """

    variant: Variant
    seed: int
    accuracy: Mapping[str, float]
    wire_bytes: int
    epsilon: float
    seconds: float
    advantages: Mapping[str, float]


def trials(base: Config, folder: Path, seeds: Sequence[int]) -> Iterator[Trial]:
    """All runs of the comparison that `base` describes."""
    for seed in seeds:
        for variant in VARIANTS:
            config = variant.of(base, seed)
            yield Trial(variant=variant, config=config, folder=folder / config.name)


def run_trial(trial: Trial) -> TrialResult:
    """Run one trial with its attacks on one thread; go on where an earlier one was stopped.

    Raises:
        ApfedError: as `secure_apfed.runs.run`.
    """
    finish_trial(trial.config, trial.folder)
    return read_trial(trial)


def finish_trial(config: Config, path: Path) -> None:
    """Run and attack, on one thread; do nothing that the folder shows to be done.

    Raises:
        CheckpointError: the folder is a link, or holds a run with other settings.
        ApfedError: as `secure_apfed.runs.run`.
    """
    torch.set_num_threads(1)
    folder = RunFolder(own_subfolder(path))
    refuse_another_run(config, path)
    with warnings.catch_warnings():
        # The plain variants are unsafe by name, and the tables say so.
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        if not folder.result.exists():
            run(config, path, resume=folder.checkpoint.exists())
        if not (path / "attacks.json").exists():
            mount_attacks(path)


def refuse_another_run(config: Config, path: Path) -> None:
    """Raise where the folder holds a run, finished or not, that these settings did not start.

    Raises:
        CheckpointError: it does.
    """
    folder = RunFolder(path)
    begun = folder.result.exists() or folder.checkpoint.exists()
    if begun and folder.load_config() != config:
        raise CheckpointError(
            f"{path} holds a run with other settings; remove it, or choose another folder"
        )


def read_trial(trial: Trial) -> TrialResult:
    """Read a finished trial from its folder."""
    folder = RunFolder(trial.folder)
    result = read_json(folder.result, Outcome)
    attacks = read_json(trial.folder / "attacks.json", tuple[AttackResult, ...])
    return TrialResult(
        variant=trial.variant,
        seed=trial.config.seed,
        accuracy=result.accuracy,
        wire_bytes=result.wire_bytes,
        epsilon=result.privacy.epsilon_x,
        seconds=result.seconds,
        advantages={
            one.setting: one.advantage
            for one in attacks
            if one.target == "labels" and one.advantage is not None
        },
    )
