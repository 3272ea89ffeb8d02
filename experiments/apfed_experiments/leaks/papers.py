"""The methods of the papers beside APFed: what is read in them, by the attacks that find something.

SplitNN by concatenation and by sum, APC-VFL, VFedTrans, MMVFL and V-FedMV on digits in four strips;
H-FedMV on the Handwritten features and S-FedMV on sequences that are synthetic, among four parties
with other people. The whole transcript is kept, without noise or defences.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from apfed_experiments.leaks.live import Setting
from apfed_experiments.leaks.recorded import NETWORKS, figures_of
from apfed_experiments.summary import Row
from secure_apfed.config import Config
from secure_apfed.data import find_dataset
from secure_apfed.runs.outcome import Recording
from secure_apfed.runs.run import run

__all__ = ["CASES", "Case", "config_of", "papers"]

_SEEDS = range(3)
_SEQUENCES = "synthetic_keystrokes"
_PEOPLE: Mapping[str, Mapping[str, Any]] = {
    "digits": {"dataset": "digits", "views": 4, "overlap": 1.0, "limit": 800},
    "handwritten": {
        "dataset": "handwritten", "partition": "horizontal", "clients": 4, "limit": 200,
    },
    _SEQUENCES: {"dataset": _SEQUENCES, "partition": "horizontal", "limit": 240},
}  # fmt: skip
_SUM: Mapping[str, Any] = {"scheme": "plain", "masks": "pairwise", "clip": 8.0}
_BITS = (16, 24)
_CODE: Mapping[str, Any] = {"network": "selu", "hidden": [32], "representation": 64}
_PAIRS = {"shadow_rows": 100}
_LABELS = {"labels_per_class": 4}
_NO_LABELS = {"labels_per_class": 0}
_ASKED = tuple(("averaged_membership", {"strangers": who}) for who in ("outside", "elsewhere"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One method, and what attacks it.

    Attributes:
        method, data: of the run.
        changes: in its settings; said: those that differ between cases of one method.
        attacks: by name, with their options.
    """

    method: str
    data: str
    attacks: Sequence[tuple[str, Mapping[str, Any]]]
    changes: Mapping[str, Any]
    said: str = ""


def _averaged(method: str, bits: int) -> Case:
    """MMVFL or V-FedMV; `bits` of one number of the sum."""
    attacks = [("pseudo_labels", _NO_LABELS)] if bits == _BITS[0] else []
    return Case(
        method=method, data="digits", attacks=[*attacks, ("sum_regression", _PAIRS)],
        changes={"model": {"network": "identity"}, "secure_sum": {**_SUM, "bits": bits}},
        said=f"{bits} bits",
    )  # fmt: skip


CASES = (
    Case(
        method="split_nn", data="digits", changes=NETWORKS,
        attacks=(
            ("gradient_direction", _LABELS), ("model_completion", _LABELS),
            ("inverse_network", _PAIRS),
        ),
    ),
    Case(
        method="split_nn_sum", data="digits", changes=NETWORKS,
        attacks=(("gradient_direction", _LABELS), ("sum_regression", _PAIRS)),
    ),
    Case(
        method="apc_vfl", data="digits", attacks=(("inverse_network", _PAIRS),),
        changes={
            "model": _CODE,
            "method": {"own": _CODE, "passive": _CODE, "joint": [128], "epochs": 60},
        },
    ),
    Case(
        method="vfedtrans", data="digits", attacks=(("vector_regression", _PAIRS),),
        changes={
            "model": {"network": "enriched", "hidden": [64], "representation": 64},
            "method": {"epochs": 60},
        },
    ),
    *(_averaged(method, bits) for method in ("mmvfl", "v_fedmv") for bits in _BITS),
    Case(
        method="h_fedmv", data="handwritten", attacks=_ASKED,
        changes={
            "model": {"network": "identity"}, "train": {"epochs": 4, "device": "cpu"},
            "secure_sum": {**_SUM, "clip": 32.0},
        },
    ),
    Case(
        method="s_fedmv", data=_SEQUENCES, attacks=_ASKED,
        changes={
            "model": {
                "network": "gru", "representation": 8,
                "sequences": list(find_dataset(_SEQUENCES).sequences.values()),
            },
            "method": {"rounds": 4},
            "train": {"epochs": 8, "device": "cpu"}, "secure_sum": {**_SUM, "clip": 32.0},
        },
    ),
)  # fmt: skip


def papers() -> Iterator[Setting]:
    """Each attack on each method that gives it something to read, means over its adversaries."""
    for at, case in enumerate(CASES):
        for name, options in case.attacks:
            told = ", ".join(f"{key} {value}" for key, value in options.items())
            yield Setting(
                columns={
                    "method": case.method, "data": case.data, "settings": case.said,
                    "attack": name, "options": told,
                },
                measure=partial(_read, at, name, options), seeds=_SEEDS,
            )  # fmt: skip


def config_of(case: Case, seed: int) -> Config:
    """A run of it."""
    usual: dict[str, Any] = {
        "name": f"papers-{case.method}", "seed": seed,
        "data": _PEOPLE[case.data], "party_seeds": "shared_for_comparison",
        "train": {"epochs": 20, "device": "cpu"}, "secure_sum": _SUM,
        "guard": {"mechanism": "none"}, "transcript": {"keep": "all"},
    }  # fmt: skip
    named = {"name": case.method, **case.changes.get("method", {})}
    return Config.model_validate({**usual, **case.changes, "method": named})


@lru_cache(maxsize=len(_SEEDS))
def _finished(at: int, seed: int) -> tuple[Recording, float]:
    done = run(config_of(CASES[at], seed), None)
    return done.recording, next(iter(done.accuracy.values()))


def _read(at: int, attack: str, options: Mapping[str, Any], seed: int) -> Row:
    return figures_of(*_finished(at, seed), attack, options, seed)
