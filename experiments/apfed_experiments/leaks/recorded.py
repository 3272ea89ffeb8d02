"""Leaks of finished runs: labels under APFed, votes beside joint training, other methods."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from statistics import fmean
from typing import Any

from apfed_attacks.interface import AttackResult
from apfed_attacks.run import run_attacks
from apfed_experiments.leaks.live import Setting
from apfed_experiments.leaks.votes import labels_config
from apfed_experiments.study import base_config
from apfed_experiments.summary import Row
from secure_apfed.config import AttackChoice, Config
from secure_apfed.data import find_dataset
from secure_apfed.runs.outcome import Recording
from secure_apfed.runs.run import run

_SEEDS = range(5)
_DATA = ("all-labels-digits", "all-labels-breast-cancer")
_NOISE = {"clip": 1.0, "sigma": 0.5, "noise": "reproducible_insecure"}
_GUARDS: Mapping[str, Mapping[str, Any]] = {
    "none": {"mechanism": "none"},
    "fresh": {"mechanism": "gaussian", **_NOISE},
    "frozen": {"mechanism": "frozen_gaussian", **_NOISE},
}
_KNOWN = (1, 4, 40, 0)
NETWORKS: Mapping[str, Any] = {
    "model": {"network": "mlp", "hidden": [64], "representation": 32, "dropout": 0.2},
    "train": {
        "epochs": 20,
        "batch_size": 64,
        "learning_rate": 0.1,
        "max_gradient_norm": 1.0,
        "device": "cpu",
    },
}
_METHODS: Mapping[str, Mapping[str, Any]] = {
    "votes": NETWORKS,
    "votes_randomised": {"epsilon": 4.0, **NETWORKS},
    "apfed_c": {"passives": {"default": {"weight": 10.0}}, **NETWORKS},
    "tvfl": NETWORKS,
    "joint_teacher_sum": {
        "method": {"name": "joint_teacher_sum", "labels": "spreading"},
        **NETWORKS,
        "secure_sum": {"scheme": "plain", "masks": "pairwise", "clip": 8.0},
    },
}
_PAIRS = {"shadow_rows": 100}
_ONE_LABEL = {"labels_per_class": 1}
_MORE_LABELS = {"labels_per_class": 20}  # joint training observes the few labelled rows alone
_ATTACKS: Mapping[str, tuple[tuple[str, Mapping[str, Any]], ...]] = {
    "features": (
        ("vote_regression", _PAIRS),
        ("contrastive_inversion", _PAIRS),
        ("inverse_network", _PAIRS),
        ("gradient_regression", _PAIRS),
        ("sum_regression", _PAIRS),
    ),
    "labels": (
        ("shown_labels", _ONE_LABEL),
        ("model_completion", _ONE_LABEL),
        ("gradient_direction", _MORE_LABELS),
    ),
    "membership": (("membership", {"shadow_models": 16, "epochs": 20}),),
}
_NEEDED: Mapping[str, AbstractSet[str]] = {
    "vote_regression": {"passives vote"},
    "shown_labels": {"labels are shown"},
    "contrastive_inversion": {"gradients are summed"},
    "gradient_regression": {"gradients are summed"},
    "inverse_network": {"passives send representations"},
    "sum_regression": {"representations are summed"},
    "model_completion": {"the active sends representations", "gradients are returned"},
    "gradient_direction": {"gradients are returned"},
    "membership": {"the active predicts alone"},
}
_PAPER_SEEDS = range(3)
_SEQUENCES = "synthetic_keystrokes"
_PEOPLE: Mapping[str, Mapping[str, Any]] = {
    "digits": {"dataset": "digits", "views": 4, "overlap": 1.0, "limit": 800},
    "handwritten": {
        "dataset": "handwritten",
        "partition": "horizontal",
        "clients": 4,
        "limit": 200,
    },
    _SEQUENCES: {"dataset": _SEQUENCES, "partition": "horizontal", "limit": 240},
}
_SUM: Mapping[str, Any] = {"scheme": "plain", "masks": "pairwise", "clip": 8.0}
_BITS = (16, 24)
_CODE: Mapping[str, Any] = {"network": "selu", "hidden": [32], "representation": 64}
_LABELS = {"labels_per_class": 4}
_NO_LABELS = {"labels_per_class": 0}
_ASKED = tuple(("averaged_membership", {"strangers": group}) for group in ("outside", "elsewhere"))


# A1 and A2: labels out of representations, against what a passive's own features tell.
#
# The runs of the main job without noise, with noise that is fresh in every epoch, and with noise
# that is frozen; the whole transcript is kept.


def labels() -> Iterator[Setting]:
    """Yield settings by noise and by the labels that passives know.

    Figures are balanced accuracies, means over the passives.
    """
    for name, noise, known in product(_DATA, _GUARDS, _KNOWN):
        data = name.removeprefix("all-labels-")
        columns = {"data": data, "noise": noise, "labels a class": known or "none"}
        measure = partial(_measure_labels, name, noise, known)
        yield Setting(columns=columns, measure=measure, seeds=_SEEDS)


@lru_cache(maxsize=len(_SEEDS))
def _run_settings(settings: str) -> tuple[Recording, float]:
    """Run these settings, for several attacks to read; return the recording and its accuracy."""
    result = run(Config.model_validate_json(settings), None)
    return result.recording, next(iter(result.accuracy.values()))


def _make_guarded_config(name: str, noise: str, seed: int) -> Config:
    """Return the main job's run with another guard; a plain sum changes no result here."""
    settings = base_config(name).model_dump(mode="json") | {
        "seed": seed,
        "party_seeds": "shared_for_comparison",
        "guard": _GUARDS[noise],
    }
    settings["transcript"]["keep"] = "all"
    settings["secure_sum"] |= {"scheme": "plain", "masks": "none"}
    return Config.model_validate(settings)


def _measure_labels(name: str, noise: str, known: int, seed: int) -> Row:
    """Return what both attacks and the best of their baselines reach, with the same labels.

    Where no label is known the clusters are named by the truth. x: the best baseline of A1, that is
    probes on a passive's own features, alone or beside decoys. Figures are means over the passives,
    but for the advantages of each.
    """
    recording, _ = _run_settings(
        _make_guarded_config(name, noise, seed).model_dump_json(exclude_defaults=True)
    )
    options = {"labels_per_class": known}
    once, course = (
        {
            result.adversary: result
            for result in run_attacks(
                recording, [AttackChoice(name=name, options=options)], seed=seed
            )
            if result.applicable
        }
        for name in ("model_completion", "temporal")
    )
    return {
        "x": fmean(_get_score(result) - _get_advantage(result) for result in once.values()),
        "A1": fmean(map(_get_score, once.values())),
        "A2": fmean(map(_get_score, course.values())),
        "A1 less x": fmean(map(_get_advantage, once.values())),
        "A2 less x": fmean(map(_get_advantage, course.values())),
        "A2 less A1": fmean(
            _get_score(course[name]) - _get_score(result) for name, result in once.items()
        ),
        **{f"A1 less x, {name}": _get_advantage(result) for name, result in once.items()},
        **{f"A2 less x, {name}": _get_advantage(result) for name, result in course.items()},
    }


def _get_advantage(result: AttackResult) -> float:
    """Return the advantage of a result that applies."""
    assert result.advantage is not None  # every result that applies has one
    return result.advantage


def _get_score(result: AttackResult) -> float:
    """Return the balanced accuracy of a result that applies."""
    figure = result.score["balanced_accuracy"]
    assert figure is not None  # every result that applies has one
    return figure


# What is read of votes beside what is read under APFed-C and joint training, with few labels.


def few_labels() -> Iterator[Setting]:
    """Yield settings of each attack that a method gives something to read.

    Figures are means over all adversaries and victims of the attack.
    """
    for data, target in product(("digits", "breast_cancer"), _ATTACKS):
        for method, (name, options) in product(_METHODS, _ATTACKS[target]):
            # Whether there is something for the attack, as its own reasons and roles have it.
            if _NEEDED[name] & _make_labels_config("digits", method, 0).method.facts:
                columns = {"data": data, "target": target, "method": method, "attack": name}
                measure = partial(
                    _measure_attack, partial(_make_labels_config, data, method), name, options
                )
                yield Setting(columns=columns, measure=measure, seeds=_SEEDS)


def _make_labels_config(data: str, method: str, seed: int) -> Config:
    """Return the run of a method where few rows have a label."""
    return labels_config(data, method, seed=seed, **_METHODS[method])


def _measure_attack(
    config_of: Callable[[int], Config], attack: str, options: Mapping[str, Any], seed: int
) -> Row:
    """Return what the attack reaches, means over adversaries and victims, beside the accuracy.

    `config_of`: settings by seed. `options`: of the attack.
    """
    recording, accuracy = _run_settings(config_of(seed).model_dump_json(exclude_defaults=True))
    choice = AttackChoice(name=attack, options=dict(options))
    mounted = run_attacks(recording, [choice], seed=seed)
    results = [result for result in mounted if result.advantage is not None]
    if not results:
        return {"accuracy": 100 * accuracy, "refused": str(mounted[0].reason)}
    metric = str(results[0].metric)
    return {
        "reached": fmean(result.score[metric] or 0.0 for result in results),
        "baseline": fmean(
            result.baselines[str(result.baseline)][metric] or 0.0 for result in results
        ),
        "advantage": fmean(result.advantage or 0.0 for result in results),
        "metric": metric,
        "best baseline": Counter(str(result.baseline) for result in results).most_common(1)[0][0],
        "scored": fmean(result.counts["scored"] for result in results),
        "accuracy": 100 * accuracy,
    }


# The methods of the papers beside APFed: what is read in them, by the attacks that find something.
#
# SplitNN by concatenation and by sum, APC-VFL, VFedTrans, MMVFL and V-FedMV on digits in four
# strips; H-FedMV on the Handwritten features and S-FedMV on sequences that are synthetic, among
# four parties with other people. The whole transcript is kept, without noise or defences.


@dataclass(frozen=True, kw_only=True)
class Case:
    """A method and the attacks on it; `note`: settings that differ between cases of one method."""

    method: str
    data: str
    attacks: Sequence[tuple[str, Mapping[str, Any]]]
    changes: Mapping[str, Any]
    note: str = ""


def _make_averaging_case(method: str, bits: int) -> Case:
    """Return the case of MMVFL or V-FedMV with `bits` of one number of the sum."""
    attacks = [("pseudo_labels", _NO_LABELS)] if bits == _BITS[0] else []
    return Case(
        method=method,
        data="digits",
        attacks=[*attacks, ("sum_regression", _PAIRS)],
        changes={"model": {"network": "identity"}, "secure_sum": {**_SUM, "bits": bits}},
        note=f"{bits} bits",
    )


CASES = (
    Case(
        method="split_nn",
        data="digits",
        changes=NETWORKS,
        attacks=(
            ("gradient_direction", _LABELS),
            ("model_completion", _LABELS),
            ("inverse_network", _PAIRS),
        ),
    ),
    Case(
        method="split_nn_sum",
        data="digits",
        changes=NETWORKS,
        attacks=(("gradient_direction", _LABELS), ("sum_regression", _PAIRS)),
    ),
    Case(
        method="apc_vfl",
        data="digits",
        attacks=(("inverse_network", _PAIRS),),
        changes={
            "model": _CODE,
            "method": {"own": _CODE, "passive": _CODE, "joint": [128], "epochs": 60},
        },
    ),
    Case(
        method="vfedtrans",
        data="digits",
        attacks=(("vector_regression", _PAIRS),),
        changes={
            "model": {"network": "enriched", "hidden": [64], "representation": 64},
            "method": {"epochs": 60},
        },
    ),
    *(_make_averaging_case(method, bits) for method in ("mmvfl", "v_fedmv") for bits in _BITS),
    Case(
        method="h_fedmv",
        data="handwritten",
        attacks=_ASKED,
        changes={
            "model": {"network": "identity"},
            "train": {"epochs": 4, "device": "cpu"},
            "secure_sum": {**_SUM, "clip": 32.0},
        },
    ),
    Case(
        method="s_fedmv",
        data=_SEQUENCES,
        attacks=_ASKED,
        changes={
            "model": {
                "network": "gru",
                "representation": 8,
                "sequences": list(find_dataset(_SEQUENCES).sequences.values()),
            },
            "method": {"rounds": 4},
            "train": {"epochs": 8, "device": "cpu"},
            "secure_sum": {**_SUM, "clip": 32.0},
        },
    ),
)


def papers() -> Iterator[Setting]:
    """Yield each attack on each method that gives it something to read.

    Figures are means over the attack's adversaries.
    """
    for case in CASES:
        for name, options in case.attacks:
            options_text = ", ".join(f"{key} {value}" for key, value in options.items())
            columns = {"method": case.method, "data": case.data, "settings": case.note}
            measure = partial(_measure_attack, partial(config_of, case), name, options)
            columns |= {"attack": name, "options": options_text}
            yield Setting(columns=columns, measure=measure, seeds=_PAPER_SEEDS)


def config_of(case: Case, seed: int) -> Config:
    """Return the run of one case under a seed: all messages are kept, without a guard."""
    usual: dict[str, Any] = {
        "name": f"papers-{case.method}",
        "seed": seed,
        "data": _PEOPLE[case.data],
        "party_seeds": "shared_for_comparison",
        "train": {"epochs": 20, "device": "cpu"},
        "secure_sum": _SUM,
        "guard": {"mechanism": "none"},
        "transcript": {"keep": "all"},
    }
    method_settings = {"name": case.method, **case.changes.get("method", {})}
    return Config.model_validate({**usual, **case.changes, "method": method_settings})
