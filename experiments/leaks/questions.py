"""A6 and A7 in live runs: an active that chooses what it sends, with rules and without.

Letters: N people, D numbers of a representation.
"""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from attacks.features.chosen_representations import ChosenRepresentations
from attacks.features.decoder_extraction import DecoderExtraction
from attacks.live.apfed import LiveRun
from attacks.live.play import play_from
from attacks.live.strategy import people_to_ask
from attacks.live.unprotected import ALL_RULES, Rule
from attacks.metrics import explained
from attacks.recorded import reveal_features, truth_of, view_of
from attacks.view import Budget, Knowledge, Played
from experiments.leaks.sessions import (
    UNPROTECTED,
    VICTIM,
    Row,
    features_of,
    open_run,
    over_seeds,
    sum_for,
)
from protocols.errors import RemoteProtocolError

__all__ = ["chosen", "decoder", "read_features", "read_sum"]

_SEEDS = range(1)


def chosen() -> Iterator[Row]:
    """A6: directions that the active chose; what it reads of the sum of z, both centred."""
    ways: tuple[tuple[str, frozenset[Rule], Row], ...] = (
        ("no rules", UNPROTECTED, {"people": 128}),
        ("all rules", ALL_RULES, {}),
        ("all rules", ALL_RULES, {"spread": 0.02}),
        ("all rules", ALL_RULES, {"spread": 0.06}),
        ("all rules", ALL_RULES, {"spread": 0.3}),
        ("all rules", ALL_RULES, {"decoys": 0.52}),
    )
    for data, passives in product(("digits-in-6", "fashion_mnist-in-6"), (1, 2, 5)):
        for rules_name, rules, options in ways:
            attack = ChosenRepresentations(people=options.get("people", 30), **_without(options))
            run = open_run(sum_for(data, "apfed_c", passives, rules), passives, rules)
            row: Row = {
                "data": data.removesuffix("-in-6"), "M": passives, "rules": rules_name,
                **_without(options),
            }  # fmt: skip
            try:
                yield {**row, **read_sum(run, attack)}
            except RemoteProtocolError as refusal:
                yield {**row, "refused": str(refusal)}


def read_sum(run: LiveRun, attack: ChosenRepresentations) -> Row:
    """Largest error of a row and R^2 of the sum of the passives' z, both centred.

    Raises:
        RemoteProtocolError: a party refused.
    """
    everybody = torch.arange(len(run.alignment[run.data.active.name]))
    truth = torch.stack([run.representations(name, everybody) for name in run.passives])
    people, found = _read(run, attack)
    total = truth[:, people].sum(dim=0)
    found, total = found - found.mean(dim=0), total - total.mean(dim=0)
    return {
        "largest error": float((found - total).norm(dim=1).max()),
        "r2": explained(found.numpy(), total.numpy()),
    }


def _without(options: Row) -> Row:
    return {name: value for name, value in options.items() if name != "people"}


def _read(run: LiveRun, attack: ChosenRepresentations) -> tuple[Tensor, Tensor]:
    active = run.data.active.name
    shadow = reveal_features(run.recording, VICTIM, 2, 0)
    knowledge = Knowledge(classes=10, victim=VICTIM, shadow=shadow)
    played = Played(attack.name, attack.play(run, knowledge, 0))
    return attack.representations(
        view_of(run.recording, [active], knowledge=knowledge, budget=Budget(iterations=500),
                played=played)
    )  # fmt: skip


def decoder() -> Iterator[Row]:
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
        for hidden, (rules_name, rules, options) in product(([], [64]), ways):
            rows = []
            for seed in _SEEDS:
                config = sum_for(
                    name, "apfed_r", passives, rules, seed=seed, hidden=hidden, projection=size
                )
                run = open_run(config, passives, rules)
                attack = DecoderExtraction(people=pairs + 68, shadow_rows=pairs, **options)
                rows.append(read_features(run, attack))
            yield {
                "data": name, "M": passives, "D": size,
                "decoder": "one hidden layer" if hidden else "linear", "pairs": pairs,
                "rules": rules_name, **options, **over_seeds(rows, same=()),
            }  # fmt: skip


def read_features(run: LiveRun, attack: DecoderExtraction) -> Row:
    """What it reads of the victim's features, beside the error that its known pairs leave.

    Known pairs say nothing of what they do not vary in, as a pixel that is black in all of them:
    "floor" is the mean squared distance of the others from the affine hull of the pairs.
    """
    seed = run.config.seed
    shadow = reveal_features(run.recording, VICTIM, attack.shadow_rows, seed)
    asked = people_to_ask(run, Knowledge(classes=10, shadow=shadow), attack.people)
    result = play_from(run, attack, VICTIM, seed=seed)
    row = features_of(result)
    if not result.applicable:
        return row
    truth = truth_of(run.recording).features[VICTIM].flatten(1).double()
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
