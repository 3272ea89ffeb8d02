"""A finished run as its folder tells it, and the attacks that follow it.

Read by: everything that reports or compares runs. A folder may have been sent by somebody else, so
only plain files of bounded size and of the types named here are read
(`secure_apfed.files`), and files that the run noted digests of are as it left them. A few rows that
attacks on features rebuilt are kept beside the originals, for pictures: that file shows real
people's features, so its owner alone may read it, and only image-shaped features are kept.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from apfed_attacks.interface import AttackResult, Guess
from apfed_attacks.recorded import truth_of
from apfed_attacks.run import expand, mount
from apfed_attacks.scoring import Truth
from apfed_experiments.solo import SoloRecord, read_solo
from secure_apfed.config import AttackChoice, Config
from secure_apfed.data import VerticalData
from secure_apfed.errors import CheckpointError
from secure_apfed.files import make_private, read_bytes, read_json, write_atomically
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import Outcome, Recording, load_recording, read_outcome

__all__ = [
    "FILE", "FinishedRun", "Reconstruction", "keep_examples", "key_of", "mount_attacks",
    "read_examples", "read_finished_run", "write_examples",
]  # fmt: skip

FILE = "reconstructions.safetensors"
_ROWS = 8
_IMAGE_DIMENSIONS = 3


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """One finished run: what was asked and reached, results of attacks, None where none were
    mounted, and what the active would do alone, None where nobody measured it.
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
        if self.config.method.figure == "epsilon_x":
            return self.outcome.privacy.epsilon_x
        spent = self.outcome.contributions.values()
        return max((account.epsilon for account in spent), default=math.inf)


def read_finished_run(path: Path) -> FinishedRun:
    """Raises CheckpointError where a file is missing or not as this version writes it, or it has
    not finished.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such run folder")
    folder = RunFolder(path)
    if not folder.result.is_file():
        unfinished = "the run has not finished; continue it with --resume"
        reason = unfinished if folder.config.is_file() else "it is no run folder"
        raise CheckpointError(f"{path}: has no result.json: {reason}")
    folder.check(folder.config, folder.result)
    attacks, config = path / "attacks.json", folder.load_config()
    return FinishedRun(
        config=config,
        outcome=read_outcome(folder),
        attacks=read_json(attacks, tuple[AttackResult, ...]) if attacks.is_file() else None,
        solo=read_solo(config, folder.solo) if folder.solo.is_file() else None,
    )


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """The first scored rows: `original` and `rebuilt`, each (rows, channels, height, width)."""

    original: Tensor
    rebuilt: Tensor


def key_of(result: AttackResult) -> str:
    told = (result.attack, result.adversary, result.victim, sorted(result.knowledge.items()))
    return f"{result.attack}-{hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]}"


def keep_examples(result: AttackResult, guess: Guess, truth: Truth) -> Reconstruction | None:
    """The rows of a guess at features to show; None where they are no pictures, or where what was
    released helped no variant.
    """
    if result.victim is None or result.variant is None or result.variant not in guess.attacks:
        return None
    features = truth.features[result.victim]
    if features.dim() != 1 + _IMAGE_DIMENSIONS:
        return None
    rows = torch.isin(guess.positions, truth.trained).nonzero().flatten()[:_ROWS]
    rebuilt = torch.from_numpy(guess.attacks[result.variant].values).float()[rows]
    original = features[guess.positions[rows]].float()
    return Reconstruction(original, rebuilt.reshape(original.shape))


def write_examples(folder: Path, examples: Mapping[str, Reconstruction]) -> None:
    """Write a run's examples by `key_of`; nothing is left where there are none."""
    path = folder / FILE
    if not examples:
        path.unlink(missing_ok=True)
        return
    tensors = {}
    for key, example in examples.items():
        tensors[f"{key}.original"] = example.original.contiguous()
        tensors[f"{key}.rebuilt"] = example.rebuilt.contiguous()
    write_atomically(path, save(tensors), private=True)


def read_examples(folder: Path) -> dict[str, Reconstruction]:
    """What `write_examples` wrote; empty: nothing did; CheckpointError: another content."""
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        tensors = load(read_bytes(path))
        keys = {name.removesuffix(".original") for name in tensors if name.endswith(".original")}
        return {
            key: Reconstruction(tensors[f"{key}.original"], tensors[f"{key}.rebuilt"])
            for key in sorted(keys)
        }
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path}: holds no rebuilt images ({error}); remove it and attack again"
        ) from None


def mount_attacks(
    folder: Path, choices: Iterable[AttackChoice] | None = None, *, seed: int | None = None,
    device: torch.device | None = None, data: VerticalData | None = None,
    recording: Recording | None = None,
) -> tuple[AttackResult, ...]:  # fmt: skip
    """Mount attacks on a finished run and write attacks.json; return the results of all.

    Results that the file holds of attacks not mounted now are kept; what is not given is the run's.
    Raises ConfigError: an unknown attack or option; CheckpointError: the folder is no finished run,
    or attacks.json holds something else.
    """
    recording = recording or load_recording(folder, data=data)
    make_private(folder)
    config = recording.config
    chosen = expand(config.attacks if choices is None else choices)
    examples: dict[str, Reconstruction] = {}

    def keep(result: AttackResult, guess: Guess) -> None:
        if result.target == "features":
            example = keep_examples(result, guess, truth_of(recording))
            if example is not None:
                examples[key_of(result)] = example

    results = mount(
        recording, chosen, seed=config.seed if seed is None else seed, device=device, on_score=keep
    )
    path, mounted = folder / "attacks.json", {choice.name for choice in chosen}
    try:
        past_results = read_json(path, tuple[AttackResult, ...]) if path.is_file() else ()
    except CheckpointError as error:
        raise CheckpointError(f"{error}; or remove it and attack again") from None
    earlier = [result for result in past_results if result.attack not in mounted]
    kept = {key_of(result) for result in earlier}
    every = (*earlier, *results)
    RunFolder(folder).write_json(path, [result.as_json() for result in every])
    past = {key: example for key, example in read_examples(folder).items() if key in kept}
    write_examples(folder, past | examples)
    return every
