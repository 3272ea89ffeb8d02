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
from secure_apfed.alignment.positions import find_positions_in_table_order

_ADVERSARY = VICTIM
_SEEDS = range(3)
_GRADIENT = "a gradient"
_REPRESENTATION = "a summed representation"
_VOTE = "a vote"
_METHOD_BY_MESSAGE_KIND = {_GRADIENT: "apfed_c", _REPRESENTATION: "split_nn_sum", _VOTE: "votes"}
"""Method by the kind of message that its passives send in response to the active."""
_TARGET_CLASS = 0
_KNOWN_PEOPLE_COUNT = 20
_EPOCHS = 10
_PEOPLE_COUNT = 600
_UNCLIPPED_NORM = 3.0
"""Norm of a forged row where the sum clips nothing; else the norm is that of the clip."""


def list_integrity_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows on how one passive's attack changes the active's predictions of test
    rows.

    Values are in per cent. `accuracy` is of all test rows. `called` is the share predicted as the
    attacker's target class, among people of other classes who have the backdoor (a feature by which
    the attacker chooses them). `others called` is that share without a backdoor.
    """
    all_poisonings: tuple[PoisoningKind, ...] = POISONING_KINDS
    for message_kind in _METHOD_BY_MESSAGE_KIND:
        # Votes are poisoned in one way.
        poisonings = all_poisonings if message_kind != _VOTE else ("backdoor",)
        for poisoning in poisonings:
            measure = partial(_measure_poisoning, message_kind, poisoning)
            yield MeasuredRow(
                fixed_values={"answer": message_kind, "harm": poisoning},
                measure=measure,
                seeds=_SEEDS,
            )


def _measure_poisoning(message_kind: str, poisoning: PoisoningKind, seed: int) -> Row:
    """Return the accuracy under an attack, the change from an honest run and, for a backdoor, how
    often it works.

    `message_kind`: what passives send in response to the active, a key of
    `_METHOD_BY_MESSAGE_KIND`. `poisoning`: kind of attack, one of `POISONING_KINDS`.
    """
    honest_percent = _measure_predictions(message_kind, None, seed)
    poisoned_percent = _measure_predictions(message_kind, poisoning, seed)
    row: Row = {"accuracy": poisoned_percent["accuracy"]}
    row["change"] = poisoned_percent["accuracy"] - honest_percent["accuracy"]
    if poisoning == "backdoor":
        row["called"] = poisoned_percent["chosen"]
        row["called, honest run"] = honest_percent["chosen"]
        row["others called"] = poisoned_percent["others"]
    return row


@cache
def _measure_predictions(
    message_kind: str, poisoning: PoisoningKind | None, seed: int
) -> dict[str, float]:
    """Train a session with or without an attack, and return what it predicts for test people, in
    per cent.

    `accuracy` is of all of them. `chosen` and `others` are the shares predicted as the target
    class, among people of other classes with a backdoor and without.

    `message_kind`: what passives send, a key of `_METHOD_BY_MESSAGE_KIND`. `poisoning`: kind of
    attack; None: an honest run. Letters: N aligned people, T test people among them.
    """
    run = _open_run(message_kind, seed)
    has_backdoor_N = _find_backdoor_people(run)
    if poisoning is not None:
        _poison_run(run, poisoning, has_backdoor_N, seed)
    aligned_rows = run.alignment[run.data.active.name]
    test_positions_T = find_positions_in_table_order(aligned_rows, run.data.test_rows)
    test_positions_T = test_positions_T[test_positions_T >= 0]  # test people whom all parties know
    predicted_T = _train_and_predict(run, test_positions_T)
    labels_T = _read_labels(run)[test_positions_T]
    is_other_class_T = labels_T != _TARGET_CLASS
    is_predicted_target_T = predicted_T == _TARGET_CLASS
    has_backdoor_T = has_backdoor_N[test_positions_T]
    return {
        "accuracy": _compute_percent(predicted_T == labels_T),
        "chosen": _compute_percent(is_predicted_target_T[has_backdoor_T & is_other_class_T]),
        "others": _compute_percent(is_predicted_target_T[~has_backdoor_T & is_other_class_T]),
    }


def _compute_percent(is_true: Tensor) -> float:
    """Return the share of true values in per cent."""
    return 100 * float(is_true.double().mean())


def _open_run(message_kind: str, seed: int) -> LiveSession[Any]:
    """Return a live session (all parties in this process) whose passives send this kind of message.

    `message_kind`: the kind, a key of `_METHOD_BY_MESSAGE_KIND`.
    """
    method = _METHOD_BY_MESSAGE_KIND[message_kind]
    if message_kind == _VOTE:
        return open_votes_run("digits", method, None, seed)
    config = make_live_config("digits", method, seed=seed)
    limited_data = config.data.model_copy(update={"limit": _PEOPLE_COUNT})
    config = config.model_copy(update={"data": limited_data})
    return SummedRun(config) if message_kind == _REPRESENTATION else LiveRun(config)


def _find_backdoor_people(run: LiveSession[Any]) -> Tensor:
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

    It knows the first `_KNOWN_PEOPLE_COUNT` of them among the training people.
    """
    aligned_rows = run.alignment[run.data.active.name]
    is_target_N = _read_labels(run) == _TARGET_CLASS
    is_target_N &= torch.isin(aligned_rows, run.data.train_rows)
    known_positions = is_target_N.nonzero().flatten()[:_KNOWN_PEOPLE_COUNT]
    return torch.isin(torch.arange(len(aligned_rows)), known_positions)


def _poison_run(
    run: LiveSession[Any], poisoning: PoisoningKind, has_backdoor_N: Tensor, seed: int
) -> None:
    """Make the adversary poison its votes, gradients or representations in this session.

    `poisoning`: kind of attack; votes are always poisoned by a backdoor. `has_backdoor_N`: whether
    each of the N aligned people has the backdoor, which is to move the prediction to the target
    class.
    """
    if isinstance(run, VotesRun):
        voter = run.get_voter(_ADVERSARY).voter
        voter.labeller = PoisonedVotes(honest=voter.labeller, way="backdoor", seed=seed)
        return
    clip = run.config.secure_sum.clip  # None or 0: rows are not clipped
    plan = PoisoningPlan(
        kind=poisoning,
        is_backdoored=has_backdoor_N,
        is_target=_find_known_target_people(run),
        row_norm=clip or _UNCLIPPED_NORM,
        seed=seed,
    )
    if isinstance(run, SummedRun):
        poison_representations(run, _ADVERSARY, plan)
    elif isinstance(run, LiveRun):
        poison_gradients(run, _ADVERSARY, plan)


def _train_and_predict(run: LiveSession[Any], test_positions_T: Tensor) -> Tensor:
    """Train the session, and return the predicted class of some people, (T,).

    `test_positions_T`: positions of these people in the alignment, (T,).
    """
    rows_T = run.alignment[run.data.active.name][test_positions_T]
    if isinstance(run, VotesRun):
        run.learn_from_votes()
        return torch.from_numpy(run.active_role.student.score_rows(rows_T).scores.argmax(axis=1))
    run.train_epochs(_EPOCHS)
    if isinstance(run, SummedRun):
        return run.predict_jointly(test_positions_T).argmax(dim=1)
    networks = run.active_role.trainer.networks
    with torch.no_grad():
        scores_TK: Tensor = networks.eval()(run.data.active.features[rows_T], None)[0]
    return scores_TK.argmax(dim=1)
