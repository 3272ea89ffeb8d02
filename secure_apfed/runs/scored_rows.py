"""What the active's model said of its test rows, kept beside the model for intervals and curves.

Run by: the active, or whoever plays it. The file holds test labels and is its owner's alone.
"""

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from secure_apfed.errors import CheckpointError, DataError
from secure_apfed.files import read_bytes, write_atomically
from secure_apfed.measures import Scored
from secure_apfed.runs.folder import RunFolder, save_tensors

__all__ = ["keep_scored", "read_scored"]


def keep_scored(folder: RunFolder, said: Mapping[str, Scored]) -> None:
    """Write truth and scores of each inference variant."""
    tensors = {}
    for name, scored in said.items():
        tensors[f"{name}/truth"] = torch.from_numpy(scored.truth)
        tensors[f"{name}/scores"] = torch.from_numpy(scored.scores)
    write_atomically(folder.scored, save_tensors(tensors), private=True)


def read_scored(folder: RunFolder, variant: str, *, threshold: float | None) -> Scored | None:
    """Read what one variant said, decided at a threshold; None where nobody kept it.

    Raises:
        CheckpointError: the file is not as a run left it.
    """
    if not folder.scored.exists():
        return None
    folder.check(folder.scored)
    try:
        tensors = load(read_bytes(folder.scored))
        truth, scores = tensors[f"{variant}/truth"], tensors[f"{variant}/scores"]
        if scores.ndim == 1:
            return Scored(truth=truth.numpy(), scores=scores.double().numpy())
        if not scores.isfinite().all():  # the training diverged, and its measures are NaN
            return Scored(truth=truth.numpy(), scores=scores.double().numpy(), threshold=threshold)
        return Scored.of_classes(truth.numpy(), scores.numpy()).at(threshold)
    except (KeyError, OverflowError, SafetensorError, DataError) as error:
        raise CheckpointError(
            f"{folder.scored} holds no scores of {variant}: {error}; restore it from a copy, or "
            "remove it to go on without"
        ) from error
