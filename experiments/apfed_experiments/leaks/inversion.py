"""A5 in live runs: an honest active inverts the sums of APFed-C, against the number of passives.

Letters: N people, M passives, D numbers of a representation.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from apfed_attacks.features.contrastive_inversion import Question, explain_sums
from apfed_attacks.live.runs import LiveRun
from apfed_attacks.recorded import view_of
from apfed_attacks.run import mount
from apfed_attacks.scoring import explained
from apfed_attacks.view import Knowledge, batches
from apfed_experiments.leaks.sessions import (
    VICTIM,
    centred_cosine,
    cosine,
    features_of,
    live_config,
    open_run,
    protected,
)
from apfed_experiments.summary import Row, Setting
from secure_apfed.config import AttackChoice

__all__ = ["inversion"]

# A seed of Fashion-MNIST takes longer than all of digits.
_SEEDS = {"digits-in-6": range(3), "fashion_mnist-in-6": range(1)}
_STEPS = 3
_ITERATIONS = 300


def inversion() -> Iterator[Setting]:
    """A5: z^p out of honest steps, and x^p from there."""
    for (name, seeds), passives in product(_SEEDS.items(), (1, 2, 5)):
        yield Setting(
            columns={"data": name.removesuffix("-in-6"), "M": passives},
            measure=partial(_measured, name, passives), seeds=seeds,
        )  # fmt: skip


def _measured(name: str, passives: int, seed: int) -> Row:
    run = open_run(live_config(name, "apfed_c", seed=seed, **protected(passives)), passives)
    found, naive, truth = _inverted(run)
    choice = AttackChoice(name="contrastive_inversion", options={"iterations": 100})
    mounted = mount(run.recording, [choice], seed=seed)
    mean = truth.mean(dim=1)
    return {
        "r2 of z": _mean_of(explained, found, truth),
        "cosine of z": _mean_of(cosine, found, truth),
        "cosine, centred": _mean_of(centred_cosine, found, truth),
        "cosine of -G": _mean_of(cosine, naive, truth),
        "cosine of the mean": _mean_of(cosine, mean.mean(dim=0).expand_as(found), truth),
        **features_of(next(one for one in mounted if one.victim == VICTIM)),
    }


def _mean_of(figure: Callable[[Any, Any], float | None], found: Tensor, truth: Tensor) -> float:
    """Mean over the passives, whose representations are (N, M, D)."""
    values = [figure(found.numpy(), one.numpy()) if figure is explained else figure(found, one)
              for one in truth.unbind(dim=1)]  # fmt: skip
    return sum(value or 0.0 for value in values) / len(values)


def _inverted(run: LiveRun) -> tuple[Tensor, Tensor, Tensor]:
    """Go on honestly for an epoch.

    Returns:
        Of its first steps: recovered z (N, D), -sum (N, D) and the truth (N, M, D).
    """
    held: dict[int, Tensor] = {}

    def look(step: int, rows_B: Tensor) -> None:
        if len(held) < _STEPS:
            people = run.sent(rows_B)
            held[step] = torch.stack(
                [run.representations(name, people) for name in run.passives], dim=1
            )

    run.train(1, before=look)
    view = view_of(run.recording, [run.data.active.name], knowledge=Knowledge(classes=10))
    contributors = list(view.agreed.values())
    found, naive, truth = [], [], []
    for step, _, sent in batches(view, view.epochs[-1]):
        if step in held:
            question = Question.of(sent, view.opened[step])
            found.append(explain_sums([question], contributors, _ITERATIONS))
            naive.append(-question.sum)
            truth.append(held[step])
    return torch.cat(found), torch.cat(naive), torch.cat(truth)
