"""A8 in live runs: ways to one passive's part of the sum, against each rule of the protocol."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from attacks.features.isolation import Isolation
from attacks.live.apfed import LiveRun
from attacks.live.unprotected import ALL_RULES, Rule
from attacks.recorded import reveal_features
from attacks.view import Knowledge
from experiments.leaks.sessions import (
    UNPROTECTED,
    VICTIM,
    Row,
    centred_cosine,
    live_config,
    open_run,
)
from protocols.errors import RemoteProtocolError

__all__ = ["isolation"]


def isolation() -> Iterator[Row]:
    """A8: ways to one passive's part, against each rule by itself and all of them."""
    single = {
        "weight": Rule.WEIGHT, "unequal": Rule.BINDING, "subset": Rule.PARTICIPANTS,
    }  # fmt: skip
    for method in ("apfed_c", "apfed_r"):
        for way, rule in single.items():
            yield _isolated(method, "no rules", UNPROTECTED, way=way)
            yield _isolated(method, f"only {rule}", frozenset({rule}), way=way)
            if way == "unequal":
                yield _isolated(method, "only norms", frozenset({Rule.NORMS}), way=way)
                yield _isolated(method, "only norms", frozenset({Rule.NORMS}), way=way, far=9e3)
            yield _isolated(method, f"all but {rule}", ALL_RULES - {rule}, way=way)
            yield _isolated(method, "all rules", ALL_RULES, way=way)
        for colluding in (0, 1, 2):
            yield _isolated(method, "all rules", ALL_RULES, way="collusion", colluding=colluding)


class _Remembering(LiveRun):
    """Keeps the victim's real part of the first question."""

    truth: Tensor | None = None

    def ask(self, *args: Any, **options: Any) -> Tensor:
        found = super().ask(*args, **options)
        if self.truth is None:
            self.truth = self.contributed(VICTIM).double()
        return found


def _isolated(method: str, rules_name: str, rules: frozenset[Rule], **options: Any) -> Row:
    masked = Rule.PARTICIPANTS in rules and Rule.BINDING in rules
    config = live_config("digits", method, masks="pairwise" if masked else "none")
    run = open_run(config, 3, rules, kind=_Remembering)
    assert isinstance(run, _Remembering)
    attack = Isolation(**options)
    row = {"method": method, "way": attack.way, "rules": rules_name, "sum": config.secure_sum.name}
    for name in ("far", "colluding"):
        if name in options:
            row[name] = options[name]
    shadow = reveal_features(run.recording, VICTIM, attack.shadow_rows, 0)
    knowledge = Knowledge(classes=10, victim=VICTIM, shadow=shadow)
    try:
        notes = attack.play(run, knowledge, 0)
    except RemoteProtocolError as refusal:
        return {**row, "refused": str(refusal)}
    assert run.truth is not None
    found, truth = notes["isolated"], run.truth
    return {
        **row,
        "relative error": float((found - truth).norm() / truth.norm()),
        "cosine, centred": centred_cosine(found, truth),
    }
