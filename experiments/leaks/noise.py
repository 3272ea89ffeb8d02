"""A6 and A7 against noise under the sum, and what that noise costs an honest run.

All rules hold; three passives of digits add discrete Gaussian noise to their contributions. The
active gets round the rule against near-constant batches with decoys, and asks about everybody
once, or as often as the contract's epochs allow and averages.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from attacks.features.chosen_representations import ChosenRepresentations
from attacks.features.decoder_extraction import DecoderExtraction
from attacks.live.unprotected import ALL_RULES
from experiments.leaks.questions import read_features, read_sum
from experiments.leaks.sessions import Row, open_run, over_seeds, sum_for
from secure_apfed.runs import run

__all__ = ["noise"]

_SEEDS = range(5)
_PASSIVES = 3
_DECOYS = 0.52
_STRENGTHS: tuple[Mapping[str, float] | None, ...] = (
    None, {"sigma": 0.01}, {"sigma": 0.1}, {"epsilon": 8.0},
)  # fmt: skip


def noise() -> Iterator[Row]:
    """What is read in one round of questions and in many; epsilon and accuracy of 20 epochs.

    The noise is fresh in every run, so that the seeds differ in it, too; some runs are shaken
    off their way by it, which the least and the greatest accuracy show.
    """
    for method in ("apfed_r", "apfed_c"):
        for strength in _STRENGTHS:
            rows = [_of_seed(method, strength, seed) for seed in _SEEDS]
            accuracies = [row["accuracy"] for row in rows]
            yield {
                **over_seeds(rows, same=("method", "noise", "reads")),
                "least accuracy": min(accuracies),
                "greatest accuracy": max(accuracies),
            }


def _of_seed(method: str, strength: Mapping[str, float] | None, seed: int) -> Row:
    read = _features if method == "apfed_r" else _representations
    told = strength and " ".join(f"{name} {value:g}" for name, value in strength.items())
    return {
        "method": method,
        "noise": told or "none",
        "reads": "x of one passive" if method == "apfed_r" else "sum of z",
        **read(strength, seed),
        **_honest(method, strength, seed),
    }


def _features(strength: Mapping[str, float] | None, seed: int) -> Row:
    row: Row = {}
    for repeats in (1, 16):
        config = sum_for("digits", "apfed_r", _PASSIVES, ALL_RULES, seed=seed, noise=strength,
                         hidden=[])  # fmt: skip
        attack = DecoderExtraction(people=128, shadow_rows=60, decoys=_DECOYS, repeats=repeats)
        found = read_features(open_run(config, _PASSIVES), attack)
        row[f"r2, asked {repeats} times"] = found["r2 of x"]
        row[f"mse, asked {repeats} times"] = found["mse of x"]
        row["baseline r2"] = found["its r2"]
    return row


def _representations(strength: Mapping[str, float] | None, seed: int) -> Row:
    row: Row = {}
    for repeats in (1, 8):  # of two questions each
        config = sum_for("digits-in-6", "apfed_c", _PASSIVES, ALL_RULES, seed=seed, noise=strength)
        attack = ChosenRepresentations(people=30, decoys=_DECOYS, repeats=repeats)
        found = read_sum(open_run(config, _PASSIVES), attack)
        row[f"r2, asked {2 * repeats} times"] = found["r2"]
    return row


def _honest(method: str, strength: Mapping[str, float] | None, seed: int) -> Row:
    """Accuracy after all epochs, and what they cost each passive."""
    config = sum_for("digits", method, _PASSIVES, ALL_RULES, seed=seed, noise=strength)
    with TemporaryDirectory() as folder:
        accuracy = run(config, Path(folder) / "run").accuracy
        told = json.loads((Path(folder) / "run" / "result.json").read_bytes())
    spent = [float(one["epsilon"]) for one in told["contributions"].values()]
    return {"epsilon": max(spent, default=None), "accuracy": accuracy[method]}
