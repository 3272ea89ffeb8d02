"""Measures whether an attack finds what was planted, and nothing where nothing leaked.

For authors of attacks: call `secure_apfed.testing.check_attack` in a test of your own. Ours are
tested with the same function wherever they read arrays (`tests/attacks/test_attacks_contract.py`).

Letters: A rows, D numbers of a representation, F features.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from apfed_attacks.foreign import Finding, evaluate
from apfed_attacks.interface import Attack
from apfed_attacks.table import find_attack
from secure_apfed.config import AttackChoice
from secure_apfed.errors import PromiseError

__all__ = ["check_attack", "plant_leak"]

# Sizes of the synthetic arrays.
_ROWS = 240
_COLUMNS = 4
_CLASSES = 3
_DIMENSION = 6  # of h
_EPOCHS = 2
_ROWS_LEFT_OUT = 20  # of each epoch
_QUIET_SEEDS = 3  # draws of noise in which nothing may be found


def check_attack(
    name: str,
    *,
    options: Mapping[str, Any] | None = None,
    planted: Mapping[str, Any] | None = None,
    quiet: Mapping[str, Any] | None = None,
) -> None:
    """Refuse an attack that misses a planted leak, or finds one where nothing leaked.

    An attack that changes its arrays, or scores differently under one seed, is refused, too.

    Args:
        name: name of a built-in attack, of one that an installed package declares, or
            package.module:Name.
        options: options of the attack; None: its defaults.
        planted: arguments of `apfed_attacks.evaluate` whose h reveals what the attack guesses;
            None: those of `plant_leak`.
        quiet: arguments like `planted`, with an h that reveals nothing; None: h is noise, drawn
            three times.

    Raises:
        PromiseError: names the attack, and what it found or missed.
        ConfigError: there is no such attack, or an option is wrong.
    """
    choice = AttackChoice(name=name, options=dict(options or {}))
    kind = find_attack(name)
    arrays = dict(planted or plant_leak(kind.target))
    before = _copy_arrays(arrays)
    findings = _mount_attack(kind, choice, arrays, seed=0)
    if not any(finding.is_significant for finding in findings):
        best = max(findings, key=lambda finding: finding.advantage)
        raise PromiseError(
            f"{name} misses a planted leak of {kind.target}: its best score is {best.score:.3g}, "
            f"where guessing without what was sent gets {best.baseline:.3g}; mend it, or give "
            "arrays with a leak that it reads, as planted={...}"
        )
    if not _are_equal(before, arrays):
        raise PromiseError(f"{name} writes to the arrays that it reads; copy what it changes")
    repeated = _mount_attack(kind, choice, arrays, seed=0)
    if _list_scores(findings) != _list_scores(repeated):
        raise PromiseError(
            f"{name} scores differently each time under one seed; draw from `seed` alone"
        )
    for seed in range(_QUIET_SEEDS):
        quiet_arrays = dict(quiet or plant_leak(kind.target, leaks=False, seed=seed))
        findings = _mount_attack(kind, choice, quiet_arrays, seed=seed)
        false_alarm = next((finding for finding in findings if finding.is_significant), None)
        if false_alarm is not None:
            raise PromiseError(
                f"{name} finds {kind.target} in noise: score {false_alarm.score:.3g}, where "
                f"guessing without it gets {false_alarm.baseline:.3g}; see what its baselines and "
                "decoys lack"
            )


def plant_leak(target: str, *, leaks: bool = True, seed: int = 0) -> dict[str, Any]:
    """Return arguments of `apfed_attacks.evaluate` for two epochs of synthetic data.

    As in a run, each epoch leaves out some rows: those of an incomplete last batch.

    `target`: "labels" or "features". `leaks`: whether the representations h depend on the target;
    else they are noise.
    """
    draw = np.random.default_rng(seed)
    labels_A = draw.integers(0, _CLASSES, _ROWS)
    features_AF = draw.normal(size=(_ROWS, _COLUMNS))
    own_AF = draw.normal(size=(_ROWS, _COLUMNS))
    noise_AD = draw.normal(size=(_ROWS, _DIMENSION))
    mix_FD = draw.normal(size=(_COLUMNS, _DIMENSION))
    if target == "labels":
        centres_KD = 4 * draw.normal(size=(_CLASSES, _DIMENSION))
        h_AD = centres_KD[labels_A] + noise_AD if leaks else noise_AD
        return {**_release_in_epochs(h_AD, draw), "labels": labels_A, "own": own_AF}
    h_AD = np.tanh(0.3 * features_AF @ mix_FD) if leaks else noise_AD
    return {**_release_in_epochs(h_AD, draw), "features": features_AF, "own": own_AF}


def _release_in_epochs(h_AD: NDArray[np.float64], draw: np.random.Generator) -> dict[str, Any]:
    """Return h and steps: each epoch releases most of the A rows once, in an order of its own.

    `h_AD`: representation of each row, D numbers.
    """
    steps = [draw.permutation(_ROWS)[:-_ROWS_LEFT_OUT] for _ in range(_EPOCHS)]
    return {"h": [h_AD[rows_B] for rows_B in steps], "steps": steps}


def _mount_attack(
    kind: type[Attack], choice: AttackChoice, arrays: Mapping[str, Any], *, seed: int
) -> tuple[Finding, ...]:
    """Return what the attack finds in the arrays, one finding for each set of options.

    `kind`: class of the attack. `choice`: its name and options; without options those of its suite
    are used. `arrays`: arguments of `apfed_attacks.evaluate`.

    Raises:
        PromiseError: the attack reads something else.
    """
    suite = [choice]
    if not choice.options:
        proposed = (dict(options) for options in kind.suite)
        suite = [AttackChoice(name=choice.name, options=options) for options in proposed]
    evaluation = evaluate(attacks=suite, seed=seed, on_progress=lambda _: None, **arrays)
    if not evaluation.findings:
        raise PromiseError(
            f"{choice.name} was not mounted: {evaluation.explain_omission()}; give arrays that it "
            "reads, as planted={...}"
        )
    return tuple(evaluation.findings)


def _list_scores(findings: Sequence[Finding]) -> list[dict[str, float | None]]:
    """Return the metrics of every result: with the releases as they were, and exchanged between
    rows.

    All are compared, since one score alone may repeat by chance.
    """
    return [dict(result.score) for finding in findings for result in finding.results]


def _copy_arrays(arrays: Any) -> Any:
    """Return copies of arrays, or of collections of arrays, to notice any change."""
    if isinstance(arrays, Mapping):
        return {name: _copy_arrays(value) for name, value in arrays.items()}
    if isinstance(arrays, list | tuple):
        return [_copy_arrays(value) for value in arrays]
    return torch.as_tensor(arrays).detach().clone()


def _are_equal(before: Any, after: Any) -> bool:
    """Return whether arrays, and collections of arrays, are as before."""
    if isinstance(before, Mapping):
        return all(_are_equal(before[name], after[name]) for name in before)
    if isinstance(before, list | tuple):
        return all(map(_are_equal, before, after))
    return torch.equal(torch.as_tensor(before), torch.as_tensor(after))
