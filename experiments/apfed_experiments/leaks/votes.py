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
_NEIGHBOUR_COUNT = 10
_DATA_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "digits": {"dataset": "digits", "views": 4, "overlap": 1.0, "labelled": 50},
    "breast_cancer": {"dataset": "breast_cancer", "overlap": 1.0, "labelled": 20},
}
# What is revealed (the sum of votes or each vote), method, epsilon.
_REVEALED_METHODS: tuple[tuple[str, str, float | None], ...] = (
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
        data: key of `_DATA_SETTINGS`.
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
        "data": _DATA_SETTINGS[data],
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


_ALIGNMENT_BY_DATA: dict[tuple[str, int], Mapping[str, Tensor]] = {}


def open_votes_run(
    data: str, method: str, epsilon: float | None, seed: int, labeller: str = "spreading"
) -> VotesRun:
    """Return a new live session with votes, on the same people as earlier ones.

    Earlier sessions do not count towards limits. A vote is a passive's row of class scores.

    `data`: key of `_DATA_SETTINGS`. `method`: name of the method. `epsilon`: privacy of one vote;
    None: no noise. `labeller`: rule by which passives vote.
    """
    config = make_labels_config(data, method, epsilon=epsilon, seed=seed, labeller=labeller)
    run = VotesRun(config, _load_data(data, seed), alignment=_ALIGNMENT_BY_DATA.get((data, seed)))
    _ALIGNMENT_BY_DATA[data, seed] = run.alignment
    return run


def _make_vote_row(
    measure: Callable[[int], Row],
    data: str,
    revealed: str,
    epsilon: float | None,
    *,
    seeds: Sequence[int] = _SEEDS,
    **further_columns: object,
) -> MeasuredRow:
    """Return one row of a table on votes.

    `measure`: function that returns the values of a seed. `revealed`: "sum" or "each", whether the
    active reads the sum of the passives' votes or each vote. `epsilon`: privacy of one vote; None:
    no noise. `further_columns`: further columns.
    """
    columns = {"data": data, "opened": revealed, "epsilon": epsilon, **further_columns}
    return MeasuredRow(fixed_values=columns, measure=measure, seeds=seeds)


def list_chosen_label_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows of an active that chooses labels to find each person's neighbours.

    It gives each class but the last to one person, and the last class to all others. Votes for
    class k then say how near everybody is to person k in the passives' features. Measured is the
    share of the ten nearest people in a passive's features whom the active names, after one run and
    several. The baseline names the ten nearest in the active's own features; chance is ten of all
    people.
    """
    for data, (revealed, method, epsilon), run_count in product(
        _DATA_SETTINGS, _REVEALED_METHODS, (1, 8)
    ):
        measure = partial(_measure_neighbours, data, method, epsilon, run_count)
        yield _make_vote_row(measure, data, revealed, epsilon, seeds=range(3), runs=run_count)


def _measure_neighbours(
    data: str, method: str, epsilon: float | None, run_count: int, seed: int
) -> Row:
    """Return the share of the landmarks' nearest neighbours that votes name, with baseline and
    chance.

    Landmarks are random people to whom the active gives a class of their own. The baseline takes
    the nearest in the active's own features. `epsilon`: privacy of one vote; None: no noise.
    `run_count`: number of runs whose votes are averaged. Letters: U people, k landmarks.
    """
    session = open_votes_run(data, method, epsilon, seed)
    rows = session.ballot.rows.sort().values  # people whom the active requests votes on
    rng = np.random.default_rng(seed)
    landmarks = rng.choice(len(rows), size=session.active_role.classes - 1, replace=False)
    votes_by_run = [_request_landmark_votes(session, rows, landmarks, rng)]
    for _ in range(1, run_count):
        later_run = open_votes_run(data, method, epsilon, seed)
        votes_by_run.append(_request_landmark_votes(later_run, rows, landmarks, rng))
    votes_Uk = np.mean(votes_by_run, axis=0)
    votes_Uk[landmarks, np.arange(len(landmarks))] = -np.inf  # a landmark is not its own neighbour
    named_neighbours = np.argsort(-votes_Uk, axis=0)[:_NEIGHBOUR_COUNT].T
    nearest_by_party = {
        table.name: _find_nearest(table.features[session.alignment[table.name]][rows], landmarks)
        for table in session.data.tables
    }
    nearest_by_active = nearest_by_party.pop(session.data.active.name)
    nearest_of_passives = list(nearest_by_party.values())
    return {
        "found": fmean(
            _compute_overlap(named_neighbours, nearest) for nearest in nearest_of_passives
        ),
        "baseline": fmean(
            _compute_overlap(nearest_by_active, nearest) for nearest in nearest_of_passives
        ),
        "chance": _NEIGHBOUR_COUNT / len(rows),
    }


def _request_landmark_votes(
    session: VotesRun, rows: Tensor, landmarks: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return everybody's votes for the class of each landmark, (U, k): higher is nearer.

    A landmark is a person who gets a class of its own. Soft votes have a share for the landmark
    whoever else is labelled, so all people are labelled. A hard vote is for the nearest labelled
    person: only a tenth of the people is labelled, so that about ten people vote for each landmark.

    `rows`: the U people on whom votes are requested. `landmarks`: positions in `rows` of the k
    people who get a class of their own. `rng`: generator that chooses who is labelled.
    """
    labelled_positions = np.arange(len(rows))
    if "votes are answered singly" in session.config.method.exchange_facts:
        labelled_positions = rng.choice(
            len(rows), size=len(rows) // _NEIGHBOUR_COUNT, replace=False
        )
    last_class = session.active_role.classes - 1
    labels = dict.fromkeys(rows[labelled_positions].tolist(), last_class)
    for landmark_class, position in enumerate(landmarks):
        labels[int(rows[position])] = landmark_class
    _, votes_UK = session.request_votes(rows, labels)
    return np.asarray(votes_UK[:, :last_class])


def _find_nearest(features_U: Tensor, landmarks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ten rows nearest to each of k rows (landmarks), (k, 10), without itself.

    `features_U`: features of all U rows. `landmarks`: positions of the k rows.
    """
    features_UF = features_U.flatten(1).double().numpy()
    search = NearestNeighbors(n_neighbors=_NEIGHBOUR_COUNT + 1).fit(features_UF)
    neighbours = search.kneighbors(features_UF[landmarks], return_distance=False)
    return np.stack(
        [
            row[row != landmark][:_NEIGHBOUR_COUNT]
            for row, landmark in zip(neighbours, landmarks, strict=True)
        ]
    )


def _compute_overlap(
    named_neighbours: NDArray[np.int64], true_neighbours: NDArray[np.int64]
) -> float:
    """Return the mean share of true neighbours among those that were named; both are (k, 10)."""
    pairs = zip(named_neighbours, true_neighbours, strict=True)
    return fmean(len(set(named) & set(expected)) / _NEIGHBOUR_COUNT for named, expected in pairs)


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
    for data, (revealed, method, epsilon), run_count in product(_DATA_SETTINGS, cases, (1, 4, 16)):
        measure = partial(_measure_repeats, data, method, epsilon, run_count)
        yield _make_vote_row(measure, data, revealed, epsilon, runs=run_count)


def _measure_repeats(data: str, method: str, epsilon: float, run_count: int, seed: int) -> Row:
    """Return the share of people whose most voted class is read from several runs' noisy votes.

    The votes of the runs are averaged. The epsilon of all runs together is returned, too.
    `run_count`: number of runs, each with its own noise.
    """
    session = open_votes_run(data, method, epsilon, seed)
    votes_by_run = [session.request_votes()[1]]
    for _ in range(1, run_count):
        session = open_votes_run(data, method, epsilon, seed)
        votes_by_run.append(session.request_votes()[1])
    truth_UK = np.sum(
        [session.get_voter(name).cast_votes(session.ballot) for name in session.voters], axis=0
    )
    voted_class_U1 = np.mean(votes_by_run, axis=0).argmax(axis=1)[:, None]
    # Hard votes tie often: any of the classes with the most votes counts as read.
    is_read_U1 = np.take_along_axis(truth_UK, voted_class_U1, axis=1) >= truth_UK.max(
        1, keepdims=True
    )
    return {"class read": float(is_read_U1.mean()), "epsilon spent": epsilon * run_count}


def list_vote_membership_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows of an attack on membership: is a person in the passives' tables?

    Votes of two runs are compared whose labels differ in that person only. The score is the
    distance of the votes on all other people. Half of the candidates are in the tables. The active
    knows the truth from the intersection; this measures what votes alone reveal to a reader.
    """
    for data, (revealed, method, epsilon) in product(_DATA_SETTINGS, _REVEALED_METHODS):
        yield _make_vote_row(
            partial(_measure_membership, data, method, epsilon), data, revealed, epsilon
        )


_CANDIDATE_COUNT = 16  # people whose membership is guessed


def _measure_membership(data: str, method: str, epsilon: float | None, seed: int) -> Row:
    """Return the AUC with which the distance of the votes of two runs tells members from others.

    Members are in the passives' tables. The runs differ in the label of the candidate only.
    `epsilon`: privacy of one vote; None: no noise.
    """
    session = open_votes_run(data, method, epsilon, seed)
    labelled_rows = session.ballot.rows[session.ballot.labelled].tolist()
    honest_labels = dict(zip(labelled_rows, session.ballot.labels.tolist(), strict=True))
    classes = session.active_role.classes
    unlabelled_rows = session.ballot.rows[
        ~torch.isin(session.ballot.rows, torch.tensor(labelled_rows))
    ]
    rng = np.random.default_rng(seed)
    candidate_positions = rng.choice(len(unlabelled_rows), size=_CANDIDATE_COUNT, replace=False)
    distances = []
    are_members = []
    for index, candidate in enumerate(unlabelled_rows[candidate_positions].tolist()):
        is_member = index % 2 == 0  # every second candidate is made unknown to all passives
        votes_by_label = []
        for label in (0, classes - 1):  # the label of the candidate in the first and second run
            session = open_votes_run(data, method, epsilon, seed)
            if not is_member:
                for name in session.voters:
                    session.get_voter(name).is_known_N[candidate] = False
            _, votes_UK = session.request_votes(None, honest_labels | {candidate: label})
            votes_by_label.append(votes_UK[session.ballot.rows.numpy() != candidate])
        distances.append(float(np.abs(votes_by_label[0] - votes_by_label[1]).sum()))
        are_members.append(is_member)
    return {"auc": float(roc_auc_score(are_members, distances))}


def list_poisoned_vote_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows of one passive that poisons its votes.

    The measured value is the accuracy in per cent of the student, the active's model that learns
    from votes.
    """
    poisonings: tuple[Poison | None, ...] = (None, "random", "constant", "flip", "rotate")
    for data, (revealed, method, epsilon), poisoning in product(
        _DATA_SETTINGS, _REVEALED_METHODS, poisonings
    ):
        measure = partial(_measure_poisoning, data, method, epsilon, poisoning)
        yield _make_vote_row(measure, data, revealed, epsilon, adversary=poisoning or "none")


def _measure_poisoning(
    data: str, method: str, epsilon: float | None, poisoning: Poison | None, seed: int
) -> Row:
    """Return the student's accuracy where one passive poisons its votes, and the change from an
    honest run.

    The student is the active's model, which learns from votes. If single votes are revealed, the
    row also says how far the poisoned and the other votes agree.

    `epsilon`: privacy of one vote; None: no noise. `poisoning`: kind of poisoning; None: the
    passive is honest.
    """
    honest_accuracy, _ = _measure_accuracy(data, method, epsilon, None, seed)
    accuracy, agreement_by_passive = _measure_accuracy(data, method, epsilon, poisoning, seed)
    row: Row = {"accuracy": accuracy, "change": accuracy - honest_accuracy}
    if agreement_by_passive:
        row["its agreement"] = agreement_by_passive[VICTIM]
        row["of the others"] = fmean(
            share for name, share in agreement_by_passive.items() if name != VICTIM
        )
    return row


@cache
def _measure_accuracy(
    data: str, method: str, epsilon: float | None, poisoning: Poison | None, seed: int
) -> tuple[float, Mapping[str, float]]:
    """Return the student's accuracy in per cent, and each passive's agreement with the others'
    votes.

    The student is the active's model, which learns from votes. The agreement is empty unless single
    votes are revealed.

    `epsilon`: privacy of one vote; None: no noise. `poisoning`: kind of poisoning by one passive;
    None: all are honest.
    """
    session = open_votes_run(data, method, epsilon, seed)
    if poisoning is not None:
        voter = session.get_voter(VICTIM).voter
        voter.labeller = PoisonedVotes(honest=voter.labeller, way=poisoning, seed=seed)
    session.learn_from_votes()
    agreement_by_passive = {
        name: agreement.others or 0.0
        for name, agreement in session.active_role.agreement_by_party.items()
    }
    predictions = session.active_role.student.score_rows(session.data.test_rows)
    return 100 * ACCURACY.compute_value(predictions), agreement_by_passive
