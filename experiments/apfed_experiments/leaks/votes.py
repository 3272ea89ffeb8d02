"""Votes in live runs: leakage by chosen labels and repeated runs, and damage by poisoned votes.

A vote is a passive's row of class scores for a person, from which the active's model (the student)
learns. Digits in four strips with 50 labels and breast cancer with 20; votes by label spreading.
Epsilon is the privacy of one vote at one passive: by noise in the sum, or by randomised response.
All rules of the protocol are enforced.

Letters: N people, U rows that are voted on, K classes, k classes but the last, F features.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from apfed_attacks.live.runs import Poison, PoisonedVotes, VotesRun
from apfed_experiments.leaks.live import VICTIM, MeasuredRow
from apfed_experiments.summary import Row
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.measures.table import ACCURACY

_SEEDS = range(5)
_NEIGHBOURS = 10
_DATA: Mapping[str, Mapping[str, Any]] = {
    "digits": {"dataset": "digits", "views": 4, "overlap": 1.0, "labelled": 50},
    "breast_cancer": {"dataset": "breast_cancer", "overlap": 1.0, "labelled": 20},
}
# What is revealed (the sum of votes or each vote), method, epsilon.
_REVEALS: tuple[tuple[str, str, float | None], ...] = (
    ("sum", "votes", None),
    ("sum", "votes", 4.0),
    ("each", "votes_randomised", 4.0),
)


def make_labels_config(
    data: str,
    method: str,
    /,
    *,
    epsilon: float | None = None,
    labeller: str | None = None,
    seed: int = 0,
    **changes: Any,
) -> Config:
    """Return the configuration of a run with few labelled rows.

    Args:
        data: key of `_DATA`.
        method: name of the method.
        epsilon: privacy of one vote; None: no noise.
        labeller: rule by which passives vote; None: the method has no such rule, or its default.
        seed: seed of the run.
        changes: top-level settings in place of the usual ones.
    """
    method_settings = {"name": method, "epsilon": epsilon, "labeller": labeller}
    settings: dict[str, Any] = {
        "name": f"few-labels-{data}",
        "seed": seed,
        "method": {key: value for key, value in method_settings.items() if value is not None},
        "party_seeds": "shared_for_comparison",
        "data": _DATA[data],
        "model": {"network": "random_features"},
        "train": {"epochs": 1, "batch_size": 64, "learning_rate": 0.1, "device": "cpu"},
        "secure_sum": {"scheme": "plain", "masks": "pairwise"},
        "guard": {"mechanism": "none"},
    }
    return Config.model_validate(settings | changes)


@cache
def _load_data(name: str, seed: int) -> VerticalData:
    """Return the data set with this name and seed, which sessions share."""
    return load_data(make_labels_config(name, "votes").data, seed=seed)


_ALIGNMENTS: dict[tuple[str, int], Mapping[str, Tensor]] = {}


def open_votes_run(
    data: str, method: str, epsilon: float | None, seed: int, labeller: str = "spreading"
) -> VotesRun:
    """Return a new live session with votes, on the same people as earlier ones.

    Earlier sessions do not count towards limits. A vote is a passive's row of class scores.

    `data`: key of `_DATA`. `method`: name of the method. `epsilon`: privacy of one vote; None: no
    noise. `labeller`: rule by which passives vote.
    """
    config = make_labels_config(data, method, epsilon=epsilon, seed=seed, labeller=labeller)
    run = VotesRun(config, _load_data(data, seed), alignment=_ALIGNMENTS.get((data, seed)))
    _ALIGNMENTS[data, seed] = run.alignment
    return run


def _make_vote_row(
    measure: Callable[[int], Row],
    data: str,
    revealed: str,
    epsilon: float | None,
    *,
    seeds: Sequence[int] = _SEEDS,
    **more: object,
) -> MeasuredRow:
    """Return one row of a table on votes.

    `measure`: function that returns the values of a seed. `revealed`: "sum" or "each", whether the
    active reads the sum of the passives' votes or each vote. `epsilon`: privacy of one vote; None:
    no noise. `more`: further columns.
    """
    columns = {"data": data, "opened": revealed, "epsilon": epsilon, **more}
    return MeasuredRow(columns=columns, measure=measure, seeds=seeds)


def list_chosen_label_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows of an active that chooses labels to find each person's neighbours.

    It gives each class but the last to one person, and the last class to all others. Votes for
    class k then say how near everybody is to person k in the passives' features. Measured is the
    share of the ten nearest people in a passive's features whom the active names, after one run and
    several. The baseline names the ten nearest in the active's own features; chance is ten of all
    people.
    """
    for data, (revealed, method, epsilon), runs in product(_DATA, _REVEALS, (1, 8)):
        measure = partial(_measure_neighbours, data, method, epsilon, runs)
        yield _make_vote_row(measure, data, revealed, epsilon, seeds=range(3), runs=runs)


def _measure_neighbours(data: str, method: str, epsilon: float | None, runs: int, seed: int) -> Row:
    """Return the share of the landmarks' nearest neighbours that votes name, with baseline and
    chance.

    Landmarks are random people to whom the active gives a class of their own. The baseline takes
    the nearest in the active's own features. `epsilon`: privacy of one vote; None: no noise.
    `runs`: number of runs whose votes are averaged. Letters: U people, k landmarks.
    """
    run = open_votes_run(data, method, epsilon, seed)
    rows = run.ballot.rows.sort().values  # people whom the active requests votes on
    draw = np.random.default_rng(seed)
    landmarks = draw.choice(len(rows), size=run.active_role.classes - 1, replace=False)
    votes_by_run = [_request_landmark_votes(run, rows, landmarks, draw)]
    for _ in range(1, runs):
        later_run = open_votes_run(data, method, epsilon, seed)
        votes_by_run.append(_request_landmark_votes(later_run, rows, landmarks, draw))
    votes_Uk = np.mean(votes_by_run, axis=0)
    votes_Uk[landmarks, np.arange(len(landmarks))] = -np.inf  # a landmark is not its own neighbour
    named = np.argsort(-votes_Uk, axis=0)[:_NEIGHBOURS].T
    nearest_by_party = {
        table.name: _find_nearest(table.features[run.alignment[table.name]][rows], landmarks)
        for table in run.data.tables
    }
    nearest_by_active = nearest_by_party.pop(run.data.active.name)
    passives_nearest = list(nearest_by_party.values())
    return {
        "found": fmean(_compute_overlap(named, nearest) for nearest in passives_nearest),
        "baseline": fmean(
            _compute_overlap(nearest_by_active, nearest) for nearest in passives_nearest
        ),
        "chance": _NEIGHBOURS / len(rows),
    }


def _request_landmark_votes(
    run: VotesRun, rows: Tensor, landmarks: NDArray[np.int64], draw: np.random.Generator
) -> NDArray[np.float64]:
    """Return everybody's votes for the class of each landmark, (U, k): higher is nearer.

    A landmark is a person who gets a class of its own. Soft votes have a share for the landmark
    whoever else is labelled, so all people are labelled. A hard vote is for the nearest labelled
    person: only a tenth of the people is labelled, so that about ten people vote for each landmark.

    `rows`: the U people on whom votes are requested. `landmarks`: positions in `rows` of the k
    people who get a class of their own. `draw`: generator that chooses who is labelled.
    """
    labelled = np.arange(len(rows))
    if "votes are answered singly" in run.config.method.exchange_facts:
        labelled = draw.choice(len(rows), size=len(rows) // _NEIGHBOURS, replace=False)
    last_class = run.active_role.classes - 1
    labels = dict.fromkeys(rows[labelled].tolist(), last_class)
    for number, position in enumerate(landmarks):
        labels[int(rows[position])] = number
    _, votes_UK = run.request_votes(rows, labels)
    return np.asarray(votes_UK[:, :last_class])


def _find_nearest(rows_U: Tensor, landmarks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ten rows nearest to each of k rows (landmarks), (k, 10), without itself.

    `rows_U`: features of all U rows. `landmarks`: positions of the k rows.
    """
    features_UF = rows_U.flatten(1).double().numpy()
    search = NearestNeighbors(n_neighbors=_NEIGHBOURS + 1).fit(features_UF)
    neighbours = search.kneighbors(features_UF[landmarks], return_distance=False)
    return np.stack(
        [
            row[row != landmark][:_NEIGHBOURS]
            for row, landmark in zip(neighbours, landmarks, strict=True)
        ]
    )


def _compute_overlap(neighbours: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    """Return the mean share of true neighbours among those that were named; both are (k, 10)."""
    pairs = zip(neighbours, truth, strict=True)
    return fmean(len(set(named) & set(expected)) / _NEIGHBOURS for named, expected in pairs)


def list_repeated_vote_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows of an active that averages the noisy votes of new runs on the same
    people.

    Measured is the share of people for whom the class with the most votes, on average, is also that
    of the votes without noise. Every run has its own privacy budget.
    """
    cases = (
        ("each", "votes_randomised", 1.0),
        ("each", "votes_randomised", 4.0),
        ("sum", "votes", 4.0),
    )
    for data, (revealed, method, epsilon), runs in product(_DATA, cases, (1, 4, 16)):
        measure = partial(_measure_repeats, data, method, epsilon, runs)
        yield _make_vote_row(measure, data, revealed, epsilon, runs=runs)


def _measure_repeats(data: str, method: str, epsilon: float, runs: int, seed: int) -> Row:
    """Return the share of people whose most voted class is read from several runs' noisy votes.

    The votes of the runs are averaged. The epsilon of all runs together is returned, too. `runs`:
    number of runs, each with its own noise.
    """
    run = open_votes_run(data, method, epsilon, seed)
    votes_by_run = [run.request_votes()[1]]
    for _ in range(1, runs):
        run = open_votes_run(data, method, epsilon, seed)
        votes_by_run.append(run.request_votes()[1])
    truth_UK = np.sum([run.get_voter(name).cast_votes(run.ballot) for name in run.voters], axis=0)
    named_U1 = np.mean(votes_by_run, axis=0).argmax(axis=1)[:, None]
    # Hard votes tie often: any of the classes with the most votes counts as read.
    is_read_U1 = np.take_along_axis(truth_UK, named_U1, axis=1) >= truth_UK.max(1, keepdims=True)
    return {"class read": float(is_read_U1.mean()), "epsilon spent": epsilon * runs}


def list_vote_membership_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows of an attack on membership: is a person in the passives' tables?

    Votes of two runs are compared whose labels differ in that person only. The score is the
    distance of the votes on all other people. Half of the candidates are in the tables. The active
    knows the truth from the intersection; this measures what votes alone reveal to a reader.
    """
    for data, (revealed, method, epsilon) in product(_DATA, _REVEALS):
        yield _make_vote_row(
            partial(_measure_membership, data, method, epsilon), data, revealed, epsilon
        )


_CANDIDATES = 16  # people whose membership is guessed


def _measure_membership(data: str, method: str, epsilon: float | None, seed: int) -> Row:
    """Return the AUC with which the distance of the votes of two runs tells members from others.

    Members are in the passives' tables. The runs differ in the label of the candidate only.
    `epsilon`: privacy of one vote; None: no noise.
    """
    run = open_votes_run(data, method, epsilon, seed)
    labelled_rows = run.ballot.rows[run.ballot.labelled].tolist()
    honest_labels = dict(zip(labelled_rows, run.ballot.labels.tolist(), strict=True))
    classes = run.active_role.classes
    unlabelled = run.ballot.rows[~torch.isin(run.ballot.rows, torch.tensor(labelled_rows))]
    draw = np.random.default_rng(seed)
    chosen = draw.choice(len(unlabelled), size=_CANDIDATES, replace=False)
    distances = []
    are_members = []
    for number, candidate in enumerate(unlabelled[chosen].tolist()):
        is_member = number % 2 == 0  # every second candidate is made unknown to all passives
        votes_by_label = []
        for label in (0, classes - 1):  # the label of the candidate in the first and second run
            run = open_votes_run(data, method, epsilon, seed)
            if not is_member:
                for name in run.voters:
                    run.get_voter(name).is_known_N[candidate] = False
            _, votes_UK = run.request_votes(None, honest_labels | {candidate: label})
            votes_by_label.append(votes_UK[run.ballot.rows.numpy() != candidate])
        distances.append(float(np.abs(votes_by_label[0] - votes_by_label[1]).sum()))
        are_members.append(is_member)
    return {"auc": float(roc_auc_score(are_members, distances))}


def list_poisoned_vote_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows of one passive that poisons its votes.

    The measured value is the accuracy in per cent of the student, the active's model that learns
    from votes.
    """
    ways: tuple[Poison | None, ...] = (None, "random", "constant", "flip", "rotate")
    for data, (revealed, method, epsilon), way in product(_DATA, _REVEALS, ways):
        measure = partial(_measure_poisoning, data, method, epsilon, way)
        yield _make_vote_row(measure, data, revealed, epsilon, adversary=way or "none")


def _measure_poisoning(
    data: str, method: str, epsilon: float | None, way: Poison | None, seed: int
) -> Row:
    """Return the student's accuracy where one passive poisons its votes, and the change from an
    honest run.

    The student is the active's model, which learns from votes. If single votes are revealed, the
    row also says how far the poisoned and the other votes agree.

    `epsilon`: privacy of one vote; None: no noise. `way`: kind of poisoning; None: the passive is
    honest.
    """
    honest_accuracy, _ = _measure_accuracy(data, method, epsilon, None, seed)
    accuracy, agreement = _measure_accuracy(data, method, epsilon, way, seed)
    row: Row = {"accuracy": accuracy, "change": accuracy - honest_accuracy}
    if agreement:
        row["its agreement"] = agreement[VICTIM]
        row["of the others"] = fmean(share for name, share in agreement.items() if name != VICTIM)
    return row


@cache
def _measure_accuracy(
    data: str, method: str, epsilon: float | None, way: Poison | None, seed: int
) -> tuple[float, Mapping[str, float]]:
    """Return the student's accuracy in per cent, and each passive's agreement with the others'
    votes.

    The student is the active's model, which learns from votes. The agreement is empty unless single
    votes are revealed.

    `epsilon`: privacy of one vote; None: no noise. `way`: kind of poisoning by one passive; None:
    all are honest.
    """
    run = open_votes_run(data, method, epsilon, seed)
    if way is not None:
        voter = run.get_voter(VICTIM).voter
        voter.labeller = PoisonedVotes(honest=voter.labeller, way=way, seed=seed)
    run.learn_from_votes()
    agreement = {name: agreed.others or 0.0 for name, agreed in run.active_role.agreement.items()}
    scored = run.active_role.student.score_rows(run.data.test_rows)
    return 100 * ACCURACY.compute_value(scored), agreement
