"""One run of which only the figures are kept: one small file, read instead of run again.

Shared by sweeps and studies. A run on everybody's features in one table is kept this way, too:
as a run folder it would look like a run of the active alone.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.centralised import centralise
from protocols.errors import UnsafeChoiceWarning
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.errors import CheckpointError
from secure_apfed.plain_json import to_json
from secure_apfed.runs import run
from secure_apfed.runs.folder import write_atomically

__all__ = ["Measured", "Measurement", "measure"]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run and the file of its figures.

    Attributes:
        centralised: all features in one table at the active.
    """

    config: Config
    file: Path
    centralised: bool = False

    @property
    def digest(self) -> str:
        """SHA-256 of the settings that differ from the defaults; the code is not in it."""
        told = self.config.model_dump_json(exclude_defaults=True) + str(self.centralised)
        return hashlib.sha256(told.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is kept of a run.

    Attributes:
        accuracy: of the method's own inference, 0 to 1.
        epsilon_x, epsilon_y, releases: as the run's account says.
        settings: digest of the settings.
    """

    accuracy: float
    epsilon_x: float
    epsilon_y: float
    releases: int
    settings: str


def measure(wanted: Measurement) -> Measured:
    """Run on one thread, or read what an earlier run found.

    Raises:
        CheckpointError: the file holds no figures, or those of a run with other settings.
        ApfedError: as `secure_apfed.runs.run`.
    """
    if wanted.file.exists():
        return _read(wanted)
    torch.set_num_threads(1)
    config = wanted.config
    data = load_data(config.data, seed=config.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)  # a plain sum gives the same sums
        result = run(config, None, data=centralise(data) if wanted.centralised else data)
    found = Measured(
        accuracy=result.accuracy[config.method],
        epsilon_x=result.privacy.epsilon_x,
        epsilon_y=result.privacy.epsilon_y,
        releases=result.privacy.releases,
        settings=wanted.digest,
    )
    wanted.file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(wanted.file, to_json(asdict(found)).encode())
    return found


def _read(wanted: Measurement) -> Measured:
    try:
        told: Mapping[str, Any] = json.loads(wanted.file.read_bytes())
        found = Measured(
            accuracy=float(told["accuracy"]),
            epsilon_x=float(told["epsilon_x"]),
            epsilon_y=float(told["epsilon_y"]),
            releases=int(told["releases"]),
            settings=str(told["settings"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{wanted.file} holds no figures of a run; remove it and run again"
        ) from error
    if found.settings != wanted.digest:
        raise CheckpointError(
            f"{wanted.file} is of a run with other settings; remove it, or choose another folder"
        )
    return found
