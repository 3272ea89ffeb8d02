"""A file of new rows, read in one piece."""

from collections.abc import Sequence
from pathlib import Path

import torch

from secure_apfed.data import FeatureEncoding, load_blocks

__all__ = ["load_features"]


def load_features(
    path: Path, encoding: FeatureEncoding, *, id_columns: Sequence[str] = ()
) -> tuple[tuple[str, ...], torch.Tensor]:
    """All IDs and features, in the file's order."""
    blocks = list(load_blocks(path, encoding, id_columns=id_columns))
    return tuple(name for ids, _ in blocks for name in ids), torch.cat([one for _, one in blocks])
