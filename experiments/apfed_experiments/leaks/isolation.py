"""A8 in live runs: ways to one passive's part of the sum, against each rule of the protocol."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from apfed_attacks.features.isolation import Isolation
from apfed_attacks.live.runs import ALL_RULES, LiveRun, Rule
from apfed_attacks.recorded import reveal_features
from apfed_attacks.view import Knowledge
from apfed_experiments.leaks.sessions import (
    UNPROTECTED,
    VICTIM,
    centred_cosine,
    live_config,
    open_run,
)
from apfed_experiments.summary import Row, Setting
from secure_apfed.config import Config
from secure_apfed.secure_sums import sum_kind

__all__ = ["isolation"]


def isolation() -> Iterator[Setting]:
    """A8: ways to one passive's part, against each rule by itself and all of them."""
    single = {
        "weight": Rule.WEIGHT, "unequal": Rule.BINDING, "subset": Rule.PARTICIPANTS,
    }  # fmt: skip
    for method in ("apfed_c", "apfed_r"):
        for way, rule in single.items():
            yield _setting(method, "no rules", UNPROTECTED, way=way)
            yield _setting(method, f"only {rule}", frozenset({rule}), way=way)
            if way == "unequal":
                yield _setting(method, "only norms", frozenset({Rule.NORMS}), way=way)
                yield _setting(method, "only norms", frozenset({Rule.NORMS}), way=way, far=9e3)
            yield _setting(method, f"all but {rule}", ALL_RULES - {rule}, way=way)
            yield _setting(method, "all rules", ALL_RULES, way=way)
        for colluding in (0, 1, 2):
            yield _setting(method, "all rules", ALL_RULES, way="collusion", colluding=colluding)


class _Remembering(LiveRun):
    """Keeps the victim's real part of the first question."""

    truth: Tensor | None = None

    def ask(self, *args: Any, **options: Any) -> Tensor:
        found = super().ask(*args, **options)
        if self.truth is None:
            self.truth = self.contributed(VICTIM).double()
        return found


def _setting(method: str, title: str, rules: frozenset[Rule], **options: Any) -> Setting:
    masked = Rule.PARTICIPANTS in rules and Rule.BINDING in rules
    config = live_config("digits", method, masks="pairwise" if masked else "none")
    columns = {"method": method, "way": options["way"], "rules": title}
    return Setting(
        columns={**columns, "sum": sum_kind(config.secure_sum).name, **options},
        measure=partial(_isolated, config, rules, Isolation(**options)),
    )


def _isolated(config: Config, rules: frozenset[Rule], attack: Isolation, seed: int) -> Row:
    run = open_run(config, 3, rules, kind=_Remembering)
    assert isinstance(run, _Remembering)
    shadow = reveal_features(run.recording, VICTIM, attack.shadow_rows, seed)
    knowledge = Knowledge(classes=10, victim=VICTIM, shadow=shadow)
    found = attack.play(run, knowledge, seed)["isolated"]
    assert run.truth is not None
    return {
        "relative error": float((found - run.truth).norm() / run.truth.norm()),
        "cosine, centred": centred_cosine(found, run.truth),
    }
