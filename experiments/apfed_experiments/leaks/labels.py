"""A1 and A2: labels out of representations, against what a passive's own features tell.

The runs of the main job without noise, with noise that is fresh in every epoch, and with noise
that is frozen; the whole transcript is kept.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from itertools import product
from statistics import fmean
from typing import Any

from apfed_attacks.interface import AttackResult
from apfed_attacks.run import mount
from apfed_experiments.leaks.live import Setting
from apfed_experiments.study import base_config
from apfed_experiments.summary import Row
from secure_apfed.config import AttackChoice, Config
from secure_apfed.runs.outcome import Recording
from secure_apfed.runs.run import run

__all__ = ["labels"]

_SEEDS = range(5)
_DATA = ("all-labels-digits", "all-labels-breast-cancer")
_NOISE = {"clip": 1.0, "sigma": 0.5, "noise": "reproducible_insecure"}
_GUARDS: Mapping[str, Mapping[str, Any]] = {
    "none": {"mechanism": "none"},
    "fresh": {"mechanism": "gaussian", **_NOISE},
    "frozen": {"mechanism": "frozen_gaussian", **_NOISE},
}
_KNOWN = (1, 4, 40, 0)


def labels() -> Iterator[Setting]:
    """Balanced accuracies, means over the passives, by noise and by labels that they know."""
    for name, noise, known in product(_DATA, _GUARDS, _KNOWN):
        columns = {
            "data": name.removeprefix("all-labels-"), "noise": noise,
            "labels a class": known or "none",
        }  # fmt: skip
        measure = partial(_read_labels, name, noise, known)
        yield Setting(columns=columns, measure=measure, seeds=_SEEDS)


@lru_cache(maxsize=len(_SEEDS))
def _recording(name: str, noise: str, seed: int) -> Recording:
    """The main job's run with another guard; its sum is plain, which changes no result here."""
    settings = base_config(name).model_dump(mode="json") | {
        "seed": seed, "party_seeds": "shared_for_comparison", "guard": _GUARDS[noise],
    }  # fmt: skip
    settings["transcript"]["keep"] = "all"
    settings["secure_sum"] |= {"scheme": "plain", "masks": "none"}
    return run(Config.model_validate(settings), None).recording


def _read_labels(name: str, noise: str, known: int, seed: int) -> Row:
    """What both attacks reach and the best of their baselines, with the same labels.

    Where no label is known the clusters are named by the truth. x: the best baseline of A1, that is
    probes on a passive's own features, alone or beside decoys. Figures are means over the passives,
    but for the advantages of each.
    """
    recording = _recording(name, noise, seed)
    options = {"labels_per_class": known}
    once, course = (
        {one.adversary: one
         for one in mount(recording, [AttackChoice(name=name, options=options)], seed=seed)
         if one.applicable}
        for name in ("model_completion", "temporal")
    )  # fmt: skip
    return {
        "x": fmean(_reached(one) - _advantage(one) for one in once.values()),
        "A1": fmean(map(_reached, once.values())),
        "A2": fmean(map(_reached, course.values())),
        "A1 less x": fmean(map(_advantage, once.values())),
        "A2 less x": fmean(map(_advantage, course.values())),
        "A2 less A1": fmean(_reached(course[name]) - _reached(one) for name, one in once.items()),
        **{f"A1 less x, {name}": _advantage(one) for name, one in once.items()},
        **{f"A2 less x, {name}": _advantage(one) for name, one in course.items()},
    }


def _advantage(result: AttackResult) -> float:
    assert result.advantage is not None  # every result that applies has one
    return result.advantage


def _reached(result: AttackResult) -> float:
    figure = result.score["balanced_accuracy"]
    assert figure is not None  # every result that applies has one
    return figure
