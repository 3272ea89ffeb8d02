"""A6 and A7 in live runs: an active that chooses what it sends, with rules, without, under noise.

Under noise all rules hold; three passives of digits add discrete Gaussian noise to their
contributions. The active gets round the rule against near-constant batches with decoys, and asks
about everybody once, or as often as the contract's epochs allow and averages.

Letters: N people, D numbers of a representation.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from apfed_attacks.features.chosen_representations import ChosenRepresentations
from apfed_attacks.features.decoder_extraction import DecoderExtraction
from apfed_attacks.live.runs import ALL_RULES, LiveRun, Rule, play_from
from apfed_attacks.live.strategy import people_to_ask
from apfed_attacks.recorded import reveal_features, truth_of, view_of
from apfed_attacks.scoring import explained
from apfed_attacks.view import Budget, Knowledge, Played
from apfed_experiments.finished_run import read_finished_run
from apfed_experiments.leaks.sessions import UNPROTECTED, VICTIM, features_of, open_sum, sum_for
from apfed_experiments.summary import Row, Setting
from secure_apfed.runs.run import run
from secure_apfed.settings.objective import ReconstructionSettings

__all__ = ["chosen", "decoder", "noise"]

_SEEDS = range(5)  # under noise
_PASSIVES = 3
_DECOYS = 0.52
_STRENGTHS: tuple[Mapping[str, float] | None, ...] = (
    None, {"sigma": 0.01}, {"sigma": 0.1}, {"epsilon": 8.0},
)  # fmt: skip


def chosen() -> Iterator[Setting]:
    """A6: directions that the active chose; what it reads of the sum of z, both centred."""
    ways: tuple[tuple[str, frozenset[Rule], int, Row], ...] = (
        # rules, people whose z is read, how rows differ
        ("no rules", UNPROTECTED, 128, {}),
        ("all rules", ALL_RULES, 30, {}),
        ("all rules", ALL_RULES, 30, {"spread": 0.02}),
        ("all rules", ALL_RULES, 30, {"spread": 0.06}),
        ("all rules", ALL_RULES, 30, {"spread": 0.3}),
        ("all rules", ALL_RULES, 30, {"decoys": 0.52}),
    )
    for data, passives in product(("digits-in-6", "fashion_mnist-in-6"), (1, 2, 5)):
        for title, rules, people, options in ways:
            columns = {"data": data.removesuffix("-in-6"), "M": passives, "rules": title}
            opened = partial(open_sum, data, "apfed_c", passives, rules)
            attack = ChosenRepresentations(people=people, **options)
            measure = partial(_read_sum, opened, attack)
            yield Setting(columns={**columns, **options}, measure=measure)


def _read_sum(opened: Callable[..., LiveRun], attack: ChosenRepresentations, seed: int) -> Row:
    """Largest error of a row and R^2 of the sum of the passives' z, both centred."""
    live = opened(seed=seed)
    everybody = torch.arange(len(live.alignment[live.data.active.name]))
    truth = torch.stack([live.representations(name, everybody) for name in live.passives])
    people, found = _read(live, attack)
    total = truth[:, people].sum(dim=0)
    found, total = found - found.mean(dim=0), total - total.mean(dim=0)
    return {
        "largest error": float((found - total).norm(dim=1).max()),
        "r2": explained(found.numpy(), total.numpy()),
    }


def _read(live: LiveRun, attack: ChosenRepresentations) -> tuple[Tensor, Tensor]:
    active = live.data.active.name
    shadow = reveal_features(live.recording, VICTIM, 2, 0)
    knowledge = Knowledge(classes=10, victim=VICTIM, shadow=shadow)
    played = Played(attack.name, attack.play(live, knowledge, 0))
    return attack.representations(
        view_of(live.recording, [active], knowledge=knowledge, budget=Budget(iterations=500),
                played=played)
    )  # fmt: skip


def decoder() -> Iterator[Setting]:
    """A7: one point for all, against linear and other decoders."""
    everything: tuple[tuple[str, frozenset[Rule], Row], ...] = (
        ("no rules", UNPROTECTED, {}),
        ("all rules", ALL_RULES, {}),
        ("all rules", ALL_RULES, {"spread": 0.02}),
        ("all rules", ALL_RULES, {"spread": 0.06}),
        ("all rules", ALL_RULES, {"decoys": 0.52}),
    )
    cases = (
        # data, passives, numbers of a representation, known pairs, ways
        ("breast_cancer", 1, 64, 11, everything),
        ("breast_cancer", 1, 64, 60, everything[2:]),
        ("digits", 1, 64, 60, everything),
        ("digits", 1, 64, 480, everything[:1]),
        ("digits", 3, 64, 60, everything),
        ("digits", 3, 16, 60, everything),
    )
    for name, passives, size, pairs, ways in cases:
        for hidden, (title, rules, options) in product(([], [64]), ways):
            opened = partial(
                open_sum, name, "apfed_r", passives, rules, hidden=hidden, projection=size
            )
            attack = DecoderExtraction(people=pairs + 68, shadow_rows=pairs, **options)
            columns = {
                "data": name, "M": passives, "D": size,
                "decoder": "one hidden layer" if hidden else "linear", "pairs": pairs,
                "rules": title,
            }  # fmt: skip
            measure = partial(_read_features, opened, attack)
            yield Setting(columns={**columns, **options}, measure=measure)


def _read_features(opened: Callable[..., LiveRun], attack: DecoderExtraction, seed: int) -> Row:
    """What it reads of the victim's features, beside the error that its known pairs leave.

    Known pairs say nothing of what they do not vary in, as a pixel that is black in all of them:
    "floor" is the mean squared distance of the others from the affine hull of the pairs.
    """
    live = opened(seed=seed)
    shadow = reveal_features(live.recording, VICTIM, attack.shadow_rows, seed)
    asked = people_to_ask(live, Knowledge(classes=10, shadow=shadow), attack.people)
    result = play_from(live, attack, VICTIM, seed=seed)
    row = features_of(result)
    if not result.applicable:
        return row
    truth = truth_of(live.recording).features[VICTIM].flatten(1).double()
    others = truth[asked[~torch.isin(asked, shadow.positions)]]
    floor = _beyond(truth[shadow.positions], others)
    return {**row, "floor": floor, "mse less floor": row["mse of x"] - floor}


def _beyond(known_NF: Tensor, others_NF: Tensor) -> float:
    """Mean squared distance, a number, of rows from the affine hull of the known ones."""
    middle_F = known_NF.mean(dim=0)
    _, sizes, axes = torch.linalg.svd(known_NF - middle_F, full_matrices=False)
    inside = axes[sizes > 1e-9 * sizes[0]]
    away_NF = others_NF - middle_F
    return float((away_NF - away_NF @ inside.T @ inside).square().mean())


def noise() -> Iterator[Setting]:
    """What is read in one round of questions and in many; epsilon and accuracy of 20 epochs.

    The noise is fresh in every run, so that the seeds differ in it, too; some runs are shaken
    off their way by it, which the least and the greatest accuracy show.
    """
    for method, strength in product(("apfed_r", "apfed_c"), _STRENGTHS):
        settings: Row = {
            "method": method, "passives": _PASSIVES, "rules": ALL_RULES, "noise": strength,
        }  # fmt: skip
        objective = sum_for("digits", **settings).method.own_objective
        decodes = isinstance(objective, ReconstructionSettings)
        told = strength and " ".join(f"{name} {value:g}" for name, value in strength.items())
        yield Setting(
            columns={
                "method": method, "noise": told or "none",
                "reads": "x of one passive" if decodes else "sum of z",
            },
            measure=partial(_under_noise, _decoded if decodes else _summed, settings),
            seeds=_SEEDS, ends=("accuracy",),
        )  # fmt: skip


def _under_noise(
    read: Callable[[Callable[..., LiveRun], int], Row], settings: Mapping[str, Any], seed: int
) -> Row:
    """What is read, and of an honest run the accuracy and what it costs each passive."""
    found = read(partial(open_sum, **settings), seed)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        run(sum_for("digits", seed=seed, **settings), path)
        told = read_finished_run(path).outcome
    spent = max((one.epsilon for one in told.contributions.values()), default=None)
    return {**found, "epsilon": spent, "accuracy": told.accuracy[told.method]}


def _decoded(opened: Callable[..., LiveRun], seed: int) -> Row:
    row: Row = {}
    for repeats in (1, 16):
        attack = DecoderExtraction(people=128, shadow_rows=60, decoys=_DECOYS, repeats=repeats)
        found = _read_features(partial(opened, "digits", hidden=[]), attack, seed)
        row[f"r2, asked {repeats} times"] = found["r2 of x"]
        row[f"mse, asked {repeats} times"] = found["mse of x"]
        row["baseline r2"] = found["its r2"]
    return row


def _summed(opened: Callable[..., LiveRun], seed: int) -> Row:
    row: Row = {}
    for repeats in (1, 8):  # of two questions each
        attack = ChosenRepresentations(people=30, decoys=_DECOYS, repeats=repeats)
        found = _read_sum(partial(opened, "digits-in-6"), attack, seed)
        row[f"r2, asked {2 * repeats} times"] = found["r2"]
    return row
