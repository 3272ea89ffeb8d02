"""The settings under which methods are shown: by the main job, studies of gains, and examples.

They were chosen on development sets (digits, handwritten numerals, breast cancer, wine), test rows
included, so metrics on these sets are metrics of development. None was chosen by metrics on the
public tables in docs/apfed-without-labels.md.
`tests/experiments/test_shown.py` holds the main job's files
against them, and tests that none of them shows a method undertrained.
"""

from collections.abc import Mapping
from typing import Any

JOINT_TRAINING: Mapping[str, Any] = {
    "epochs": 250,
    "batch_size": 128,
    "learning_rate": 0.02,
    "evaluate_every": 250,
    "spread_labels": True,
}
"""`train` of methods whose task loss trains the active's network: SingleVL, APFed with labels
"joint", TVFL."""
NETWORK: Mapping[str, Any] = {
    "model": {"hidden": [128], "representation": 64, "projection": 64, "dropout": 0.0},
    "train": JOINT_TRAINING,
    "secure_sum": {"scheme": "plain", "clip": None},
    "passives": {"default": {"weight": 10.0}},
}
"""Settings of a run of these methods, besides its method and data."""
LABELS_AFTER: Mapping[str, Any] = {
    "model": {"hidden": [128], "representation": 64, "projection": 16, "dropout": 0.0},
    "train": {
        "epochs": 5,
        "batch_size": 128,
        "learning_rate": 0.02,
        "max_gradient_norm": 1.0,
        "evaluate_every": 5,
        "labels": "after",
    },
    "secure_sum": {"scheme": "plain", "masks": "pairwise", "clip": 1.0},
    "passives": {"default": {"weight": 10.0}},
}
"""APFed whose labels come after the exchange. What 16 numbers a row and five epochs reveal of the
passives' columns: docs/apfed-without-labels.md."""
FROZEN: Mapping[str, Any] = {"mechanism": "frozen_gaussian", "clip": 1.0}
"""The guard (clip and noise of representations) under which APFed is shown; each row of a table
sets its own epsilon."""
MIXED_OBJECTIVES: Mapping[str, Any] = {
    "default": {"objective": {"name": "contrastive"}, "weight": 10.0},
    "passive-1": {"objective": {"name": "reconstruction"}, "weight": 10.0},
}
"""Settings of passives with mixed objectives: passive-1 reconstructs, the others contrast."""
