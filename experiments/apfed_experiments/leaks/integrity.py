"""A passive that spoils or steers the active's model by what it sends, within all rules.

Digits in four strips. It sends gradients (APFed) or summed representations (a split network), with
600 labelled people, of whom the adversary knows twenty of the first class; or votes, with 50
labelled people. A backdoor is for the tenth of people whose strip is brightest.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from apfed_attacks.live.integrity import (
    POISONING_KINDS,
    PoisoningKind,
    PoisoningPlan,
    poison_gradients,
    poison_representations,
)
from apfed_attacks.live.runs import (
    LiveRun,
    LiveSession,
    PoisonedVotes,
    SummedRun,
    VotesRun,
    choose_backdoored_people,
)
from apfed_experiments.leaks.live import VICTIM, MeasuredRow, make_live_config
from apfed_experiments.leaks.votes import open_votes_run
from apfed_experiments.summary import Row
from secure_apfed.methods.alignment import find_positions_in_table_order

_ADVERSARY = VICTIM
_SEEDS = range(3)
_GRADIENT = "a gradient"
_REPRESENTATION = "a summed representation"
_VOTE = "a vote"
_METHOD_BY_ANSWER = {_GRADIENT: "apfed_c", _REPRESENTATION: "split_nn_sum", _VOTE: "votes"}
"""Method by the kind of message that its passives send in response to the active."""
_TARGET = 0
_KNOWN_PEOPLE = 20
_EPOCHS = 10
_PEOPLE = 600
_UNCLIPPED_NORM = 3.0
"""Norm of a forged row where the sum clips nothing; else the norm is that of the clip."""


def list_integrity_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows on how one passive's attack changes the active's predictions of test
    rows.

    Values are in per cent. `accuracy` is of all test rows. `called` is the share predicted as the
    attacker's target class, among people of other classes who have the backdoor (a feature by which
    the attacker chooses them). `others called` is that share without a backdoor.
    """
    all_harms: tuple[PoisoningKind, ...] = POISONING_KINDS
    for answer in _METHOD_BY_ANSWER:
        harms = all_harms if answer != _VOTE else ("backdoor",)  # votes are poisoned in one way
        for harm in harms:
            measure = partial(_measure_harm, answer, harm)
            yield MeasuredRow(
                columns={"answer": answer, "harm": harm}, measure=measure, seeds=_SEEDS
            )


def _measure_harm(answer: str, harm: PoisoningKind, seed: int) -> Row:
    """Return the accuracy under an attack, the change from an honest run and, for a backdoor, how
    often it works.

    `answer`: what passives send in response to the active, a key of `_METHOD_BY_ANSWER`. `harm`:
    kind of attack, one of `POISONING_KINDS`.
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
def _measure_predictions(answer: str, harm: PoisoningKind | None, seed: int) -> dict[str, float]:
    """Train a session with or without an attack, and return what it predicts for test people, in
    per cent.

    `accuracy` is of all of them. `chosen` and `others` are the shares predicted as the target
    class, among people of other classes with a backdoor and without.

    `answer`: what passives send, a key of `_METHOD_BY_ANSWER`. `harm`: kind of attack; None: an
    honest run. Letters: N aligned people, T test people among them.
    """
    run = _open_run(answer, seed)
    has_backdoor_N = _choose_people(run)
    if harm is not None:
        _poison_run(run, harm, has_backdoor_N, seed)
    aligned = run.alignment[run.data.active.name]
    test_T = find_positions_in_table_order(aligned, run.data.test_rows)
    test_T = test_T[test_T >= 0]  # test people whom all parties know
    predicted_T = _train_and_predict(run, test_T)
    labels_T = _read_labels(run)[test_T]
    is_other_T = labels_T != _TARGET
    is_called_T = predicted_T == _TARGET
    has_backdoor_T = has_backdoor_N[test_T]
    return {
        "accuracy": _compute_percent(predicted_T == labels_T),
        "chosen": _compute_percent(is_called_T[has_backdoor_T & is_other_T]),
        "others": _compute_percent(is_called_T[~has_backdoor_T & is_other_T]),
    }


def _compute_percent(is_so: Tensor) -> float:
    """Return the share of true values in per cent."""
    return 100 * float(is_so.double().mean())


def _open_run(answer: str, seed: int) -> LiveSession[Any]:
    """Return a live session (all parties in this process) whose passives send this kind of message.

    `answer`: the kind, a key of `_METHOD_BY_ANSWER`.
    """
    method = _METHOD_BY_ANSWER[answer]
    if answer == _VOTE:
        return open_votes_run("digits", method, None, seed)
    config = make_live_config("digits", method, seed=seed)
    limited = config.data.model_copy(update={"limit": _PEOPLE})
    config = config.model_copy(update={"data": limited})
    return SummedRun(config) if answer == _REPRESENTATION else LiveRun(config)


def _choose_people(run: LiveSession[Any]) -> Tensor:
    """Return whether each of the N aligned people has the backdoor, (N,).

    The adversary chooses them by its own columns.
    """
    table = next(table for table in run.data.passives if table.name == _ADVERSARY)
    rows_NF = table.features[run.alignment[_ADVERSARY]].flatten(1)
    return torch.from_numpy(choose_backdoored_people(rows_NF.double().numpy()))


def _read_labels(run: LiveSession[Any]) -> Tensor:
    """Return the true labels of all N aligned people, (N,)."""
    active = run.data.active
    assert active.labels is not None
    return active.labels[run.alignment[active.name]]


def _find_known_target_people(run: LiveSession[Any]) -> Tensor:
    """Return whether the adversary knows of each of the N aligned people that it is of the target
    class, (N,).

    It knows the first `_KNOWN_PEOPLE` of them among the training people.
    """
    aligned = run.alignment[run.data.active.name]
    is_target_N = _read_labels(run) == _TARGET
    is_target_N &= torch.isin(aligned, run.data.train_rows)
    known = is_target_N.nonzero().flatten()[:_KNOWN_PEOPLE]
    return torch.isin(torch.arange(len(aligned)), known)


def _poison_run(
    run: LiveSession[Any], harm: PoisoningKind, has_backdoor_N: Tensor, seed: int
) -> None:
    """Make the adversary poison its votes, gradients or representations in this session.

    `harm`: kind of attack; votes are always poisoned by a backdoor. `has_backdoor_N`: whether each
    of the N aligned people has the backdoor, which is to move the prediction to the target class.
    """
    if isinstance(run, VotesRun):
        voter = run.get_voter(_ADVERSARY).voter
        voter.labeller = PoisonedVotes(honest=voter.labeller, way="backdoor", seed=seed)
        return
    clip = run.config.secure_sum.clip  # None or 0: rows are not clipped
    steering = PoisoningPlan(
        kind=harm,
        is_backdoored=has_backdoor_N,
        is_target=_find_known_target_people(run),
        row_norm=clip or _UNCLIPPED_NORM,
        seed=seed,
    )
    if isinstance(run, SummedRun):
        poison_representations(run, _ADVERSARY, steering)
    elif isinstance(run, LiveRun):
        poison_gradients(run, _ADVERSARY, steering)


def _train_and_predict(run: LiveSession[Any], test_T: Tensor) -> Tensor:
    """Train the session, and return the predicted class of some people, (T,).

    `test_T`: positions of these people in the alignment, (T,).
    """
    rows_T = run.alignment[run.data.active.name][test_T]
    if isinstance(run, VotesRun):
        run.learn_from_votes()
        return torch.from_numpy(run.active_role.student.score_rows(rows_T).scores.argmax(axis=1))
    run.train_epochs(_EPOCHS)
    if isinstance(run, SummedRun):
        return run.predict_jointly(test_T).argmax(dim=1)
    networks = run.active_role.trainer.networks
    with torch.no_grad():
        scores_TK: Tensor = networks.eval()(run.data.active.features[rows_T], None)[0]
    return scores_TK.argmax(dim=1)
