"""What attacks on features rebuilt, beside the originals: a few rows of each, for pictures.

Held by: the experimenter. The file shows real people's features, so its owner alone may read
it, and only image-shaped features are kept.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from apfed_attacks.interface import AttackResult, Guess
from apfed_attacks.scoring import Truth
from secure_apfed.errors import CheckpointError
from secure_apfed.files import read_bytes
from secure_apfed.runs.folder import write_atomically

__all__ = ["FILE", "Reconstruction", "keep_examples", "key_of", "read_examples", "write_examples"]

FILE = "reconstructions.safetensors"
_ROWS = 8
_IMAGE_DIMENSIONS = 3


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """The first scored rows: `original` and `rebuilt`, each (rows, channels, height, width)."""

    original: Tensor
    rebuilt: Tensor


def key_of(result: AttackResult) -> str:
    """Return what tells this result from the others of its run."""
    told = (result.attack, result.adversary, result.victim, sorted(result.knowledge.items()))
    return f"{result.attack}-{hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]}"


def keep_examples(result: AttackResult, guess: Guess, truth: Truth) -> Reconstruction | None:
    """Return the rows of a guess at features to show.

    None where they are no pictures, or where what was released helped no variant.
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
    for key, one in examples.items():
        tensors[f"{key}.original"] = one.original.contiguous()
        tensors[f"{key}.rebuilt"] = one.rebuilt.contiguous()
    write_atomically(path, save(tensors), private=True)


def read_examples(folder: Path) -> dict[str, Reconstruction]:
    """Read what `write_examples` wrote; empty where there is nothing.

    Raises:
        CheckpointError: other content than that.
    """
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
