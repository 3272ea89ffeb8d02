"""What follows a finished run: the attacks that its config names, then its report."""

from pathlib import Path

from attacks.interface import AttackResult
from attacks.run import mount
from secure_apfed.runs import RunFolder, load_recording

__all__ = ["mount_attacks"]


def mount_attacks(folder: Path) -> tuple[AttackResult, ...]:
    """Mount the attacks of a finished run's config and write attacks.json; return their results.

    Raises:
        ConfigError: an unknown attack or option.
        CheckpointError: the folder is no finished run.
    """
    recording = load_recording(folder)
    config = recording.config
    results = mount(recording, config.attacks, seed=config.seed)
    written = [result.as_json() for result in results]
    RunFolder(folder).write_json(folder / "attacks.json", written)
    return results
