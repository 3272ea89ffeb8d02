"""What is read of votes beside what is read under APFed-C and joint training, with few labels."""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from itertools import product
from statistics import fmean
from typing import Any

from apfed_attacks.run import mount
from apfed_experiments.leaks.live import Setting
from apfed_experiments.leaks.votes import labels_config
from apfed_experiments.summary import Row
from secure_apfed.config import AttackChoice
from secure_apfed.runs.outcome import Recording
from secure_apfed.runs.run import run

__all__ = ["NETWORKS", "few_labels", "figures_of"]

_SEEDS = range(5)
NETWORKS: Mapping[str, Any] = {
    "model": {"network": "mlp", "hidden": [64], "representation": 32, "dropout": 0.2},
    "train": {
        "epochs": 20, "batch_size": 64, "learning_rate": 0.1, "max_gradient_norm": 1.0,
        "device": "cpu",
    },
}  # fmt: skip
_METHODS: Mapping[str, Mapping[str, Any]] = {
    "votes": NETWORKS, "votes_randomised": {"epsilon": 4.0, **NETWORKS},
    "apfed_c": {"passives": {"default": {"weight": 10.0}}, **NETWORKS}, "tvfl": NETWORKS,
    "joint_teacher": {"method": {"name": "joint_teacher", "labels": "spreading"}, **NETWORKS},
}  # fmt: skip
_PAIRS = {"shadow_rows": 100}
_ONE_LABEL = {"labels_per_class": 1}
_MORE_LABELS = {"labels_per_class": 20}  # joint training observes the few labelled rows alone
_ATTACKS: Mapping[str, tuple[tuple[str, Mapping[str, Any]], ...]] = {
    "features": (
        ("vote_regression", _PAIRS), ("contrastive_inversion", _PAIRS), ("inverse_network", _PAIRS),
    ),
    "labels": (("shown_labels", _ONE_LABEL), ("model_completion", _ONE_LABEL),
        ("gradient_direction", _MORE_LABELS),
    ),
    "membership": (("membership", {"shadow_models": 16, "epochs": 20}),),
}  # fmt: skip


def few_labels() -> Iterator[Setting]:
    """Means over all adversaries and victims of an attack; which one applies follows the method."""
    for data, target in product(("digits", "breast_cancer"), _ATTACKS):
        for method, (name, options) in product(_METHODS, _ATTACKS[target]):
            if _reads(name, method):
                yield Setting(
                    columns={"data": data, "target": target, "method": method, "attack": name},
                    measure=partial(_read, data, method, name, options), seeds=_SEEDS,
                )  # fmt: skip


def _reads(attack: str, method: str) -> bool:
    """Whether there is something for the attack, as its own reasons and roles have it."""
    needed = {
        "vote_regression": {"passives vote"},
        "shown_labels": {"labels are shown"},
        "contrastive_inversion": {"gradients are summed"},
        "inverse_network": {"passives send representations"},
        "model_completion": {"the active sends representations", "gradients are returned"},
        "gradient_direction": {"gradients are returned"},
        "membership": {"the active predicts alone"},
    }[attack]
    return bool(needed & labels_config("digits", method, **_METHODS[method]).method.happens)


@lru_cache(maxsize=2)
def _finished(data: str, method: str, seed: int) -> tuple[Recording, float]:
    done = run(labels_config(data, method, seed=seed, **_METHODS[method]), None)
    return done.recording, next(iter(done.accuracy.values()))


def _read(data: str, method: str, attack: str, options: Mapping[str, Any], seed: int) -> Row:
    return figures_of(*_finished(data, method, seed), attack, options, seed)


def figures_of(
    recording: Recording, accuracy: float, attack: str, options: Mapping[str, Any], seed: int
) -> Row:
    """What the attack reaches, means over its adversaries and victims, beside the accuracy."""
    choice = AttackChoice(name=attack, options=dict(options))
    mounted = mount(recording, [choice], seed=seed)
    results = [one for one in mounted if one.advantage is not None]
    if not results:
        return {"accuracy": 100 * accuracy, "refused": str(mounted[0].reason)}
    metric = str(results[0].metric)
    return {
        "reached": fmean(one.score[metric] or 0.0 for one in results),
        "baseline": fmean(one.baselines[str(one.baseline)][metric] or 0.0 for one in results),
        "advantage": fmean(one.advantage or 0.0 for one in results),
        "metric": metric,
        "best baseline": Counter(str(one.baseline) for one in results).most_common(1)[0][0],
        "scored": fmean(one.counts["scored"] for one in results),
        "accuracy": 100 * accuracy,
    }
