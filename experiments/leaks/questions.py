"""A6 and A7 in live runs: an active that chooses what it sends, with rules and without.

Letters: N people, D numbers of a representation.
"""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from attacks.chosen_representations import ChosenRepresentations
from attacks.decoder_extraction import DecoderExtraction
from attacks.live import LiveRun
from attacks.metrics import explained
from attacks.recorded import reveal_features, view_of
from attacks.run import result_of
from attacks.unprotected import ALL_RULES, Rule
from attacks.view import Budget, Knowledge, Played
from experiments.leaks.sessions import UNPROTECTED, VICTIM, Row, features_of, open_run, sum_for
from protocols.errors import RemoteProtocolError

__all__ = ["chosen", "decoder"]


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
    for data, passives in product(("digits in 6", "fashion_mnist in 6"), (1, 2, 5)):
        for rules_name, rules, options in ways:
            attack = ChosenRepresentations(people=options.get("people", 30), **_without(options))
            run = open_run(sum_for(data, "apfed_c", passives, rules), passives, rules)
            everybody = torch.arange(len(run.method.alignment[run.data.active.name]))
            truth = torch.stack([run.representations(name, everybody) for name in run.passives])
            row: Row = {
                "data": data.removesuffix(" in 6"), "M": passives, "rules": rules_name,
                **_without(options),
            }  # fmt: skip
            try:
                people, found = _read(run, attack)
            except RemoteProtocolError as refusal:
                yield {**row, "refused": str(refusal)}
                continue
            total = truth[:, people].sum(dim=0)
            found, total = found - found.mean(dim=0), total - total.mean(dim=0)
            yield {
                **row,
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
    cases: tuple[tuple[str, int, int, int], ...] = (
        ("breast_cancer", 1, 64, 0), ("digits", 1, 64, 60), ("digits", 3, 64, 60),
        ("digits", 3, 16, 60),
    )  # fmt: skip
    ways: tuple[tuple[str, frozenset[Rule], Row], ...] = (
        ("no rules", UNPROTECTED, {}),
        ("all rules", ALL_RULES, {}),
        ("all rules", ALL_RULES, {"spread": 0.06}),
        ("all rules", ALL_RULES, {"spread": 0.3}),
        ("all rules", ALL_RULES, {"decoys": 0.52}),
    )
    for name, passives, size, pairs in cases:
        for hidden in ([], [64]):
            for rules_name, rules, options in ways:
                config = sum_for(name, "apfed_r", passives, rules, hidden=hidden, projection=size)
                run = open_run(config, passives, rules)
                table = run.data.passives[0]
                count = pairs or table.features[0].numel() + 1
                attack = DecoderExtraction(shadow_rows=count, **options)
                result = result_of(
                    attack, run.recording, (run.data.active.name,), VICTIM, seed=0, seat=run
                )
                yield {
                    "data": name, "M": passives, "D": size,
                    "decoder": "one hidden layer" if hidden else "linear", "pairs": count,
                    "rules": rules_name, **options, **features_of(result),
                }  # fmt: skip
