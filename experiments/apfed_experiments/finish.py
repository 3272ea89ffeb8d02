"""What follows a finished run: the attacks that its config or its user names."""

from collections.abc import Iterable
from pathlib import Path

import torch

from apfed_attacks.interface import AttackResult, Guess
from apfed_attacks.recorded import truth_of
from apfed_attacks.run import expand, mount
from apfed_experiments.finished import (
    Reconstruction,
    keep_examples,
    key_of,
    read_examples,
    write_examples,
)
from secure_apfed.config import AttackChoice
from secure_apfed.data import VerticalData
from secure_apfed.errors import CheckpointError
from secure_apfed.files import make_private, read_json
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import Recording, load_recording

__all__ = ["mount_attacks"]


def mount_attacks(
    folder: Path,
    choices: Iterable[AttackChoice] | None = None,
    *,
    seed: int | None = None,
    device: torch.device | None = None,
    data: VerticalData | None = None,
    recording: Recording | None = None,
) -> tuple[AttackResult, ...]:
    """Mount attacks on a finished run and write attacks.json; return the results of all.

    Results that the file holds of attacks not mounted now are kept.

    Args:
        folder: of the run.
        choices: names and options; the config's unless given.
        seed: of the attacks; the run's unless given.
        device: where they compute; by default where the run did.
        data: of the run, where it is loaded already.
        recording: of the run, where it was played a moment ago.

    Raises:
        ConfigError: an unknown attack or option.
        CheckpointError: the folder is no finished run, or attacks.json holds something else.
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
        recording,
        chosen,
        seed=config.seed if seed is None else seed,
        device=device,
        on_score=keep,
    )
    earlier = _others(folder, {choice.name for choice in chosen})
    kept = {key_of(result) for result in earlier}
    every = (*earlier, *results)
    RunFolder(folder).write_json(folder / "attacks.json", [result.as_json() for result in every])
    past = {key: one for key, one in read_examples(folder).items() if key in kept}
    write_examples(folder, past | examples)
    return every


def _others(folder: Path, mounted: set[str]) -> list[AttackResult]:
    """Return the results of earlier attacks that are not mounted again."""
    path = folder / "attacks.json"
    if not path.is_file():
        return []
    try:
        past = read_json(path, tuple[AttackResult, ...])
    except CheckpointError as error:
        raise CheckpointError(f"{error}; or remove it and attack again") from None
    return [result for result in past if result.attack not in mounted]
