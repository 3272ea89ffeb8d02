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
from apfed_experiments.leaks.live import MeasuredRow
from apfed_experiments.leaks.votes import make_labels_config
from apfed_experiments.study import load_base_config
from apfed_experiments.summary import Row
from secure_apfed.config import AttackChoice, Config
from secure_apfed.data import find_dataset
from secure_apfed.runs.outcome import Recording
from secure_apfed.runs.run import run

_SEEDS = range(5)
_BASE_CONFIG_NAMES = ("all-labels-digits", "all-labels-breast-cancer")
_NOISE_SETTINGS = {"clip": 1.0, "sigma": 0.5, "noise": "reproducible_insecure"}
_GUARD_BY_NOISE: Mapping[str, Mapping[str, Any]] = {
    "none": {"mechanism": "none"},
    "fresh": {"mechanism": "gaussian", **_NOISE_SETTINGS},
    "frozen": {"mechanism": "frozen_gaussian", **_NOISE_SETTINGS},
}
_KNOWN_LABELS_PER_CLASS = (1, 4, 40, 0)
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
_SETTINGS_BY_METHOD: Mapping[str, Mapping[str, Any]] = {
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
_HUNDRED_PAIRS = {"shadow_rows": 100}
_ONE_LABEL = {"labels_per_class": 1}
_MORE_LABELS = {"labels_per_class": 20}  # joint training observes the few labelled rows alone
_ATTACKS_BY_TARGET: Mapping[str, tuple[tuple[str, Mapping[str, Any]], ...]] = {
    "features": (
        ("vote_regression", _HUNDRED_PAIRS),
        ("contrastive_inversion", _HUNDRED_PAIRS),
        ("inverse_network", _HUNDRED_PAIRS),
        ("gradient_regression", _HUNDRED_PAIRS),
        ("sum_regression", _HUNDRED_PAIRS),
    ),
    "labels": (
        ("shown_labels", _ONE_LABEL),
        ("model_completion", _ONE_LABEL),
        ("gradient_direction", _MORE_LABELS),
    ),
    "membership": (("membership", {"shadow_models": 16, "epochs": 20}),),
}
_FACTS_BY_ATTACK: Mapping[str, AbstractSet[str]] = {
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
_SEQUENCE_DATA = "synthetic_keystrokes"
_PAPER_DATA: Mapping[str, Mapping[str, Any]] = {
    "digits": {"dataset": "digits", "views": 4, "overlap": 1.0, "limit": 800},
    "handwritten": {
        "dataset": "handwritten",
        "partition": "horizontal",
        "clients": 4,
        "limit": 200,
    },
    _SEQUENCE_DATA: {"dataset": _SEQUENCE_DATA, "partition": "horizontal", "limit": 240},
}
_MASKED_SUM: Mapping[str, Any] = {"scheme": "plain", "masks": "pairwise", "clip": 8.0}
_SUM_BITS = (16, 24)
_CODE_MODEL: Mapping[str, Any] = {"network": "selu", "hidden": [32], "representation": 64}
_FOUR_LABELS = {"labels_per_class": 4}
_NO_LABELS = {"labels_per_class": 0}
_AVERAGED_MEMBERSHIP = tuple(
    ("averaged_membership", {"strangers": group}) for group in ("outside", "elsewhere")
)


# A1 and A2: labels inferred from representations, against what a passive's own features reveal. A1
# reads single representations, A2 all that a person had over the epochs.
#
# The runs of the main job without noise, with fresh noise in every epoch, and with frozen noise;
# the whole transcript is kept.


def list_label_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows of attacks A1 and A2: a passive infers labels from representations.

    A1 reads one representation of a person, A2 all over time. Rows differ in the guard's noise and
    in the number of labels that passives know. Values are balanced accuracies, averaged over the
    passives.
    """
    for config_name, noise, labels_per_class in product(
        _BASE_CONFIG_NAMES, _GUARD_BY_NOISE, _KNOWN_LABELS_PER_CLASS
    ):
        data = config_name.removeprefix("all-labels-")
        columns = {"data": data, "noise": noise, "labels a class": labels_per_class or "none"}
        measure = partial(_measure_labels, config_name, noise, labels_per_class)
        yield MeasuredRow(fixed_values=columns, measure=measure, seeds=_SEEDS)


@lru_cache(maxsize=len(_SEEDS))
def _run_settings(settings: str) -> tuple[Recording, float]:
    """Return the recording and the accuracy of a run; recent runs are cached for several attacks.

    `settings`: settings of the run as JSON, which can be a key of the cache.
    """
    result = run(Config.model_validate_json(settings), None)
    return result.recording, next(iter(result.accuracy.values()))


def _make_guarded_config(config_name: str, noise: str, seed: int) -> Config:
    """Return the configuration of a run of the main job with another guard and a plain sum.

    The sum changes no result here. `config_name`: name of the base configuration. `noise`: key of
    `_GUARD_BY_NOISE`, which noise the guard adds to representations.
    """
    settings = load_base_config(config_name).model_dump(mode="json") | {
        "seed": seed,
        "party_seeds": "shared_for_comparison",
        "guard": _GUARD_BY_NOISE[noise],
    }
    settings["transcript"]["keep"] = "all"
    settings["secure_sum"] |= {"scheme": "plain", "masks": "none"}
    return Config.model_validate(settings)


def _measure_labels(config_name: str, noise: str, labels_per_class: int, seed: int) -> Row:
    """Return the balanced accuracies of both attacks and of the best baseline with the same labels.

    A1 is model completion; A2 reads a person's representations over time. In the row, "x" is the
    best baseline of A1: a classifier on a passive's own features, alone or beside random columns.
    Values are means over the passives, except the advantage of each.

    `config_name`: name of the base configuration. `noise`: key of `_GUARD_BY_NOISE`.
    `labels_per_class`: number of labels of each class that a passive knows; 0: clusters are matched
    to classes by the truth.
    """
    config = _make_guarded_config(config_name, noise, seed)
    recording, _ = _run_settings(config.model_dump_json(exclude_defaults=True))
    attack_run = partial(
        _attack_by_adversary, recording, {"labels_per_class": labels_per_class}, seed
    )
    completion_by_adversary = attack_run("model_completion")
    temporal_by_adversary = attack_run("temporal")
    return {
        "x": fmean(
            _get_score(result) - _get_advantage(result)
            for result in completion_by_adversary.values()
        ),
        "A1": fmean(map(_get_score, completion_by_adversary.values())),
        "A2": fmean(map(_get_score, temporal_by_adversary.values())),
        "A1 less x": fmean(map(_get_advantage, completion_by_adversary.values())),
        "A2 less x": fmean(map(_get_advantage, temporal_by_adversary.values())),
        "A2 less A1": fmean(
            _get_score(temporal_by_adversary[name]) - _get_score(result)
            for name, result in completion_by_adversary.items()
        ),
        **{
            f"A1 less x, {name}": _get_advantage(result)
            for name, result in completion_by_adversary.items()
        },
        **{
            f"A2 less x, {name}": _get_advantage(result)
            for name, result in temporal_by_adversary.items()
        },
    }


def _attack_by_adversary(
    recording: Recording, options: Mapping[str, Any], seed: int, attack: str
) -> dict[str, AttackResult]:
    """Return the results of one attack that apply, by adversary."""
    choice = AttackChoice(name=attack, options=dict(options))
    results = run_attacks(recording, [choice], seed=seed)
    return {result.adversary: result for result in results if result.applicable}


def _get_advantage(result: AttackResult) -> float:
    """Return the advantage of a result that applies."""
    assert result.advantage is not None  # every result that applies has one
    return result.advantage


def _get_score(result: AttackResult) -> float:
    """Return the balanced accuracy of a result that applies."""
    accuracy = result.score["balanced_accuracy"]
    assert accuracy is not None  # every result that applies has one
    return accuracy


# Attacks on votes beside attacks on APFed-C and joint training, with few labels.


def list_few_label_rows() -> Iterator[MeasuredRow]:
    """Yield the table's row of each method with each attack that applies to its messages.

    Few rows have labels. Values are means over all adversaries and victims of the attack.
    """
    for data, target in product(("digits", "breast_cancer"), _ATTACKS_BY_TARGET):
        for method, (name, options) in product(_SETTINGS_BY_METHOD, _ATTACKS_BY_TARGET[target]):
            # An attack applies if the method's messages are of a kind that it reads.
            if (
                _FACTS_BY_ATTACK[name]
                & _make_labels_config("digits", method, 0).method.exchange_facts
            ):
                columns = {"data": data, "target": target, "method": method, "attack": name}
                measure = partial(
                    _measure_attack, partial(_make_labels_config, data, method), name, options
                )
                yield MeasuredRow(fixed_values=columns, measure=measure, seeds=_SEEDS)


def _make_labels_config(data: str, method: str, seed: int) -> Config:
    """Return the configuration of a method's run with few labelled rows."""
    return make_labels_config(data, method, seed=seed, **_SETTINGS_BY_METHOD[method])


def _measure_attack(
    make_config: Callable[[int], Config], attack: str, options: Mapping[str, Any], seed: int
) -> Row:
    """Return the metrics of an attack on a run, averaged over adversaries and victims.

    The run's accuracy in per cent is added.

    `make_config`: function that returns the run's configuration for a seed. `attack`, `options`:
    name and options of the attack.
    """
    recording, accuracy = _run_settings(make_config(seed).model_dump_json(exclude_defaults=True))
    choice = AttackChoice(name=attack, options=dict(options))
    all_results = run_attacks(recording, [choice], seed=seed)
    results = [result for result in all_results if result.advantage is not None]
    # The attack applied to nobody: its row has the reason.
    if not results:
        return {"accuracy": 100 * accuracy, "refused": str(all_results[0].reason)}
    metric = str(results[0].metric)
    best_baselines = [str(result.baseline) for result in results]
    baseline_scores = [
        result.baselines[name][metric] or 0.0
        for result, name in zip(results, best_baselines, strict=True)
    ]
    return {
        "reached": fmean(result.score[metric] or 0.0 for result in results),
        "baseline": fmean(baseline_scores),
        "advantage": fmean(result.advantage or 0.0 for result in results),
        "metric": metric,
        "best baseline": Counter(best_baselines).most_common(1)[0][0],
        "scored": fmean(result.counts["scored"] for result in results),
        "accuracy": 100 * accuracy,
    }


# Attacks on the methods of the papers beside APFed, as far as they find something.
#
# SplitNN by concatenation and by sum, APC-VFL, VFedTrans, MMVFL and V-FedMV on digits in four
# strips; H-FedMV on the Handwritten features and S-FedMV on sequences that are synthetic, among
# four parties with other people. The whole transcript is kept, without noise or defences.


@dataclass(frozen=True, kw_only=True)
class PaperCase:
    """A method and the attacks on it.

    Attributes:
        method: name of the method.
        data_name: key of `_PAPER_DATA`.
        attacks: name and options of each attack.
        settings: settings of the run that differ from the usual ones.
        note: what differs between cases of one method, for people.
    """

    method: str
    data_name: str
    attacks: Sequence[tuple[str, Mapping[str, Any]]]
    settings: Mapping[str, Any]
    note: str = ""


def _make_averaging_case(method: str, bits: int) -> PaperCase:
    """Return the case of MMVFL or V-FedMV with sums of numbers of `bits` bits.

    Pseudo-labels are attacked in the first case only, since bits do not change them.
    """
    attacks = [("pseudo_labels", _NO_LABELS)] if bits == _SUM_BITS[0] else []
    return PaperCase(
        method=method,
        data_name="digits",
        attacks=[*attacks, ("sum_regression", _HUNDRED_PAIRS)],
        settings={"model": {"network": "identity"}, "secure_sum": {**_MASKED_SUM, "bits": bits}},
        note=f"{bits} bits",
    )


CASES = (
    PaperCase(
        method="split_nn",
        data_name="digits",
        settings=NETWORKS,
        attacks=(
            ("gradient_direction", _FOUR_LABELS),
            ("model_completion", _FOUR_LABELS),
            ("inverse_network", _HUNDRED_PAIRS),
        ),
    ),
    PaperCase(
        method="split_nn_sum",
        data_name="digits",
        settings=NETWORKS,
        attacks=(("gradient_direction", _FOUR_LABELS), ("sum_regression", _HUNDRED_PAIRS)),
    ),
    PaperCase(
        method="apc_vfl",
        data_name="digits",
        attacks=(("inverse_network", _HUNDRED_PAIRS),),
        settings={
            "model": _CODE_MODEL,
            "method": {"own": _CODE_MODEL, "passive": _CODE_MODEL, "joint": [128], "epochs": 60},
        },
    ),
    PaperCase(
        method="vfedtrans",
        data_name="digits",
        attacks=(("vector_regression", _HUNDRED_PAIRS),),
        settings={
            "model": {"network": "enriched", "hidden": [64], "representation": 64},
            "method": {"epochs": 60},
        },
    ),
    *(_make_averaging_case(method, bits) for method in ("mmvfl", "v_fedmv") for bits in _SUM_BITS),
    PaperCase(
        method="h_fedmv",
        data_name="handwritten",
        attacks=_AVERAGED_MEMBERSHIP,
        settings={
            "model": {"network": "identity"},
            "train": {"epochs": 4, "device": "cpu"},
            "secure_sum": {**_MASKED_SUM, "clip": 32.0},
        },
    ),
    PaperCase(
        method="s_fedmv",
        data_name=_SEQUENCE_DATA,
        attacks=_AVERAGED_MEMBERSHIP,
        settings={
            "model": {
                "network": "gru",
                "representation": 8,
                "sequences": list(find_dataset(_SEQUENCE_DATA).sequences.values()),
            },
            "method": {"rounds": 4},
            "train": {"epochs": 8, "device": "cpu"},
            "secure_sum": {**_MASKED_SUM, "clip": 32.0},
        },
    ),
)


def list_paper_rows() -> Iterator[MeasuredRow]:
    """Yield the table's row of each case (a method and its data) with each of its attacks.

    Values are means over the attack's adversaries and victims.
    """
    for case in CASES:
        for name, options in case.attacks:
            options_text = ", ".join(f"{key} {value}" for key, value in options.items())
            columns = {"method": case.method, "data": case.data_name, "settings": case.note}
            measure = partial(_measure_attack, partial(make_paper_config, case), name, options)
            columns |= {"attack": name, "options": options_text}
            yield MeasuredRow(fixed_values=columns, measure=measure, seeds=_PAPER_SEEDS)


def make_paper_config(case: PaperCase, seed: int) -> Config:
    """Return the configuration of a case's run (a paper's method), without a guard and with its
    whole transcript, which attacks read.
    """
    shared_settings: dict[str, Any] = {  # of all cases
        "name": f"papers-{case.method}",
        "seed": seed,
        "data": _PAPER_DATA[case.data_name],
        "party_seeds": "shared_for_comparison",
        "train": {"epochs": 20, "device": "cpu"},
        "secure_sum": _MASKED_SUM,
        "guard": {"mechanism": "none"},
        "transcript": {"keep": "all"},
    }
    method_settings = {"name": case.method, **case.settings.get("method", {})}
    return Config.model_validate({**shared_settings, **case.settings, "method": method_settings})
