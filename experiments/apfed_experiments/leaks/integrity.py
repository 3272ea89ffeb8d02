"""A passive that spoils or steers the active's model, by what it may answer within all rules.

Digits in four strips. In gradients (APFed) and summed representations (a split network) 600 people
have all labels, and the adversary knows twenty people of the first class. In votes 50 of all people
have a label. A backdoor is for the tenth of people whose strip is brightest.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from apfed_attacks.live.integrity import (
    HARMS,
    Harm,
    Steering,
    poison_gradients,
    poison_representations,
)
from apfed_attacks.live.runs import (
    LiveRun,
    LiveSession,
    PoisonedVotes,
    SummedRun,
    VotesRun,
    choose_people,
)
from apfed_experiments.leaks.live import VICTIM, Setting, live_config
from apfed_experiments.leaks.votes import open_votes
from apfed_experiments.summary import Row
from secure_apfed.methods.alignment import positions_of

_ADVERSARY = VICTIM
_SEEDS = range(3)
_GRADIENT = "a gradient"
_REPRESENTATION = "a summed representation"
_VOTE = "a vote"
_ANSWERS = {_GRADIENT: "apfed_c", _REPRESENTATION: "split_nn_sum", _VOTE: "votes"}
"""Method by the kind of answer that its passives give."""
_TARGET = 0
_KNOWN = 20
_EPOCHS = 10
_PEOPLE = 600
_LENGTH = 3.0
"""Norm of a forged row where the sum clips nothing; else the norm is that of the clip."""


def integrity() -> Iterator[Setting]:
    """Yield settings: one passive's harm, and how the active's predictions of test rows change.

    Accuracy in per cent; *called*: the share of the chosen people of other classes who are called
    the target class, against the share among all other people.
    """
    harms: tuple[Harm, ...] = HARMS
    for answer in _ANSWERS:
        for harm in harms if answer != _VOTE else ("backdoor",):
            measure = partial(_measure_harm, answer, harm)
            yield Setting(columns={"answer": answer, "harm": harm}, measure=measure, seeds=_SEEDS)


def _measure_harm(answer: str, harm: Harm, seed: int) -> Row:
    """Return the accuracy under this harm against an honest run and, of a backdoor, how often it
    works.

    `answer`: how the adversary answers: random, reversed, replayed, backdoor.
    """
    honest = _measure_predictions(answer, None, seed)
    harmed = _measure_predictions(answer, harm, seed)
    row: Row = {"accuracy": harmed["accuracy"]}
    row["change"] = harmed["accuracy"] - honest["accuracy"]
    if harm == "backdoor":
        row["called"] = harmed["chosen"]
        row["called, honest run"] = honest["chosen"]
        row["others called"] = harmed["others"]
    return row


@cache
def _measure_predictions(answer: str, harm: Harm | None, seed: int) -> dict[str, float]:
    """Return the accuracy, and which shares are called the target class, in per cent.

    `answer`: how the adversary answers: random, reversed, replayed, backdoor. `harm`: what the
    adversary does; None: honest run.
    """
    run = _open_run(answer, seed)
    chosen_N = _find_chosen(run)
    if harm is not None:
        _spoil_run(run, harm, chosen_N, seed)
    aligned = run.alignment[run.data.active.name]
    test_T = positions_of(aligned, run.data.test_rows)
    test_T = test_T[test_T >= 0]
    predicted_T = _predict_rows(run, test_T)
    labels_T = _read_labels(run)[test_T]
    other_T = labels_T != _TARGET
    called_T = predicted_T == _TARGET
    chosen_T = chosen_N[test_T]
    return {
        "accuracy": _compute_percent(predicted_T == labels_T),
        "chosen": _compute_percent(called_T[chosen_T & other_T]),
        "others": _compute_percent(called_T[~chosen_T & other_T]),
    }


def _compute_percent(is_so: Tensor) -> float:
    """Return the share of True in per cent."""
    return 100 * float(is_so.double().mean())


def _open_run(answer: str, seed: int) -> LiveSession[Any]:
    """Open a live session whose passives answer in this way."""
    method = _ANSWERS[answer]
    if answer == _VOTE:
        return open_votes("digits", method, None, seed)
    config = live_config("digits", method, seed=seed)
    few = config.data.model_copy(update={"limit": _PEOPLE})
    config = config.model_copy(update={"data": few})
    return SummedRun(config) if answer == _REPRESENTATION else LiveRun(config)


def _find_chosen(run: LiveSession[Any]) -> Tensor:
    """Return whom the adversary's backdoor is for, by its own columns, (N,), bool."""
    table = next(table for table in run.data.passives if table.name == _ADVERSARY)
    rows_NF = table.features[run.alignment[_ADVERSARY]].flatten(1)
    return torch.from_numpy(choose_people(rows_NF.double().numpy()))


def _read_labels(run: LiveSession[Any]) -> Tensor:
    """Return the true labels of all people, (N,)."""
    active = run.data.active
    assert active.labels is not None
    return active.labels[run.alignment[active.name]]


def _find_target(run: LiveSession[Any]) -> Tensor:
    """Return the people of the target class whom the adversary knows, (N,), bool."""
    aligned = run.alignment[run.data.active.name]
    is_target_N = _read_labels(run) == _TARGET
    is_target_N &= torch.isin(aligned, run.data.train_rows)
    known = is_target_N.nonzero().flatten()[:_KNOWN]
    return torch.isin(torch.arange(len(aligned)), known)


def _spoil_run(run: LiveSession[Any], harm: Harm, chosen_N: Tensor, seed: int) -> None:
    """Let the adversary take the passive's place: poison its votes, gradients or representations.

    `chosen_N`: people to be moved to the target class.
    """
    if isinstance(run, VotesRun):
        voter = run.get_voter(_ADVERSARY)
        voter.labeller = PoisonedVotes(honest=voter.labeller, way="backdoor", seed=seed)
        return
    clip = run.config.secure_sum.clip
    steering = Steering(
        harm=harm,
        chosen=chosen_N,
        target=_find_target(run),
        length=clip or _LENGTH,
        seed=seed,
    )
    if isinstance(run, SummedRun):
        poison_representations(run, _ADVERSARY, steering)
    elif isinstance(run, LiveRun):
        poison_gradients(run, _ADVERSARY, steering)


def _predict_rows(run: LiveSession[Any], test_T: Tensor) -> Tensor:
    """Train, and return the class of each of these people, (T,).

    `test_T`: alignment positions.
    """
    rows_T = run.alignment[run.data.active.name][test_T]
    if isinstance(run, VotesRun):
        run.learn_from_votes()
        return torch.from_numpy(run.learner.student.score_rows(rows_T).scores.argmax(axis=1))
    run.train_epochs(_EPOCHS)
    if isinstance(run, SummedRun):
        return run.predict_jointly(test_T).argmax(dim=1)
    networks = run.learner.trainer.networks
    with torch.no_grad():
        scores_TK: Tensor = networks.eval()(run.data.active.features[rows_T], None)[0]
    return scores_TK.argmax(dim=1)
