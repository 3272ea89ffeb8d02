"""Live sessions that the tables share: data, networks, and what a figure is.

Letters: N people, D numbers of a representation.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from apfed_attacks.interface import AttackResult
from apfed_attacks.live.runs import ALL_RULES, LiveRun, Rule
from apfed_experiments.summary import Row
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data

__all__ = [
    "UNPROTECTED", "VICTIM", "centred_cosine", "cosine", "features_of", "live_config", "open_run",
    "open_sum", "protected", "sum_for",
]  # fmt: skip

VICTIM = "passive-1"
UNPROTECTED: frozenset[Rule] = frozenset()
_HONEST_EPOCHS = 3
_DATA: Mapping[str, Mapping[str, Any]] = {
    "digits": {"dataset": "digits", "views": 4, "overlap": 1.0},
    "digits-in-6": {"dataset": "digits", "views": 6, "active_view": 3, "overlap": 1.0},
    "fashion_mnist-in-6": {
        "dataset": "fashion_mnist", "views": 6, "active_view": 3, "overlap": 1.0, "limit": 2000,
    },
    "mnist-in-2": {"dataset": "mnist", "views": 2, "overlap": 1.0, "limit": 2000},
    "breast_cancer": {"dataset": "breast_cancer", "overlap": 1.0},
}  # fmt: skip


def live_config(
    data: str,
    method: str,
    *,
    masks: str = "pairwise",
    scheme: str = "plain",
    clip: float | None = 1.0,
    seed: int = 0,
    noise: Mapping[str, float] | None = None,
    **model: Any,
) -> Config:
    """A run of 20 epochs on one of the data sets here, with perceptrons.

    `noise` is that of the passives under the sum, `model` what differs in the networks.
    """
    return Config.model_validate(
        {
            "name": f"leaks-{data}",
            "seed": seed,
            "party_seeds": "shared_for_comparison",
            "method": method,
            "data": _DATA[data],
            "model": {
                "network": "mlp", "hidden": [64], "representation": 32, "projection": 64,
                "dropout": 0.2, **model,
            },
            "train": {
                "epochs": 20, "batch_size": 64, "learning_rate": 0.1, "max_gradient_norm": 1.0,
                "device": "cpu",
            },
            "alignment": {"protocol": "ecdh"},
            "secure_sum": {
                "scheme": scheme, "masks": masks, "clip": clip, "allow_single_passive": True,
                "noise": noise,
            },
            "guard": {"mechanism": "none"},
        }
    )  # fmt: skip


@cache
def _data(name: str, passives: int, seed: int) -> VerticalData:
    """The data set, with the first of its passives only."""
    data = load_data(live_config(name, "apfed_c").data, seed=seed)
    return replace(data, passives=data.passives[:passives])


_ALIGNED: dict[tuple[str, int, int], Mapping[str, Tensor]] = {}


def open_run(
    config: Config,
    passives: int,
    rules: Collection[Rule] = ALL_RULES,
    *,
    kind: type[LiveRun] = LiveRun,
) -> LiveRun:
    """A session that has trained for some epochs; the same data is aligned once."""
    of_data = config.name.removeprefix("leaks-"), passives, config.seed
    known = _ALIGNED.get(of_data)
    run = kind(config, _data(*of_data), rules=rules, alignment=known)
    _ALIGNED[of_data] = run.alignment
    run.train(_HONEST_EPOCHS)
    return run


def sum_for(
    data: str, method: str, passives: int, rules: frozenset[Rule], **changes: Any
) -> Config:
    """Without rules a plain sum and no clip; with them a protected one."""
    if rules != ALL_RULES:
        return live_config(data, method, masks="none", clip=None, **changes)
    return live_config(data, method, **protected(passives), **changes)


def open_sum(
    data: str, method: str, passives: int, rules: frozenset[Rule], **changes: Any
) -> LiveRun:
    """A session under `sum_for` these."""
    return open_run(sum_for(data, method, passives, rules, **changes), passives, rules)


def protected(passives: int) -> dict[str, Any]:
    """Settings of a protected sum: one passive has nobody to share masks with."""
    return {} if passives > 1 else {"scheme": "ckks", "masks": "none"}


def cosine(found_ND: Tensor, truth_ND: Tensor) -> float:
    """Mean cosine of the rows."""
    return float(F.cosine_similarity(found_ND, truth_ND).mean())


def centred_cosine(found_ND: Tensor, truth_ND: Tensor) -> float:
    """Mean cosine of the rows after each column's mean is taken away."""
    return cosine(found_ND - found_ND.mean(dim=0), truth_ND - truth_ND.mean(dim=0))


def features_of(result: AttackResult) -> Row:
    """The figures of an attack on features, or who refused."""
    if not result.applicable or result.baseline is None:
        return {"refused": result.reason}
    return {
        "best": result.variant,
        "r2 of x": result.score["r2"],
        "mse of x": result.score["mse"],
        "baseline": result.baseline,
        "its r2": result.baselines[result.baseline]["r2"],
    }
