"""Make the folders of a trial, or compare its scores with those of one process.

python docs/examples/flower_vertical/vertical/settle.py FOLDER [compare]

In reality each party has its own columns, makes its own keys, and tells the others the public one
by telephone.
"""

import json
import secrets
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale

from apfed_protocols import fresh_identity

HOSTS = ("clinic", "laboratory", "pharmacy")


def settle_parties(folder: Path) -> None:
    features, labels = load_breast_cancer(return_X_y=True)
    tables = dict(zip(HOSTS, np.split(scale(features), 3, axis=1), strict=True))
    tables["server"] = labels[:, None].astype(float)
    identities = {name: fresh_identity() for name in tables}
    known = {name: identity.public.hex() for name, identity in identities.items()}
    for name, table in tables.items():
        disk = folder / name
        disk.mkdir(parents=True, mode=0o700)
        np.save(disk / "table.npy", table)
        (disk / "identity").write_bytes(identities[name].secret_bytes())
        (disk / "key").write_bytes(secrets.token_bytes(32))
        (disk / "known.json").write_text(json.dumps(known))


def compare_scores(folder: Path, rate: float = 0.5) -> float:
    """Return how far the scores are from those of the same loop over all columns in one process."""
    together = np.hstack([np.load(folder / name / "table.npy") for name in HOSTS])
    labels = np.load(folder / "server" / "table.npy")
    w, residual = np.zeros((together.shape[1], 1)), np.zeros_like(labels)
    every_score = np.load(folder / "server" / "scores.npy")
    for _ in every_score:
        w += rate * together.T @ residual / len(residual)
        residual = labels - 1 / (1 + np.exp(-together @ w))
    return float(abs(every_score[-1] - together @ w).max())


if __name__ == "__main__":
    home = Path(sys.argv[1])
    if "compare" in sys.argv:
        print(f"scores differ {compare_scores(home):.1e}")
    else:
        settle_parties(home)
