"""What follows a finished run: the attacks that its config names, then its report."""

import json
from pathlib import Path

from attacks.interface import AttackResult
from attacks.run import mount
from secure_apfed.runs import load_recording

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
    if config.attacks:
        half = folder / "attacks.json.part"
        half.write_text(json.dumps([result.as_json() for result in results], indent=1))
        half.replace(folder / "attacks.json")
    return results
