"""Ballots in live runs: what chosen labels and repeated runs read, and what poisoned votes spoil.

Digits in four strips with 50 labels and breast cancer with 20; votes by label spreading. An epsilon
is of one vote at one passive: noise under the sum, or randomised response. All rules hold.

Letters: U rows asked about, K classes.
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
from apfed_experiments.leaks.live import VICTIM, Setting
from apfed_experiments.summary import Row
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.measures.table import ACCURACY

_SEEDS = range(5)
_NEAR = 10
_DATA: Mapping[str, Mapping[str, Any]] = {
    "digits": {"dataset": "digits", "views": 4, "overlap": 1.0, "labelled": 50},
    "breast_cancer": {"dataset": "breast_cancer", "overlap": 1.0, "labelled": 20},
}
# Name for the table, method, epsilon.
_OPENINGS: tuple[tuple[str, str, float | None], ...] = (
    ("sum", "votes", None),
    ("sum", "votes", 4.0),
    ("each", "votes_randomised", 4.0),
)


def labels_config(
    data: str,
    method: str,
    /,
    *,
    epsilon: float | None = None,
    labeller: str | None = None,
    seed: int = 0,
    **changes: Any,
) -> Config:
    """Return a run with few labels; votes by this labeller, under noise of this epsilon."""
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
    return load_data(labels_config(name, "votes").data, seed=seed)


_ALIGNED: dict[tuple[str, int], Mapping[str, Tensor]] = {}


def open_votes(
    data: str, method: str, epsilon: float | None, seed: int, labeller: str = "spreading"
) -> VotesRun:
    """Open a new run on the same people, which nobody counts together with an earlier one.

    `labeller`: its name.
    """
    config = labels_config(data, method, epsilon=epsilon, seed=seed, labeller=labeller)
    run = VotesRun(config, _load_data(data, seed), alignment=_ALIGNED.get((data, seed)))
    _ALIGNED[data, seed] = run.alignment
    return run


def _make_setting(
    measure: Callable[[int], Row],
    data: str,
    opened: str,
    epsilon: float | None,
    *,
    seeds: Sequence[int] = _SEEDS,
    **more: object,
) -> Setting:
    """Return the setting of one line of a table on votes.

    `measure`: returns the row of a seed. `opened`: what is revealed, in words.
    """
    columns = {"data": data, "opened": opened, "epsilon": epsilon, **more}
    return Setting(columns=columns, measure=measure, seeds=seeds)


def chosen_labels() -> Iterator[Setting]:
    """Yield settings: the active labels one person a class, and others with the last class.

    Column k of what it opens is then how near everybody is to person k, summed over the passives.
    Measured: which share of the ten people nearest to k in the victim's features (by its table) are
    among the ten that it names, for one run and several; the baseline names the nearest in its own
    features, and chance ten of all.
    """
    for data, (opened, method, epsilon), runs in product(_DATA, _OPENINGS, (1, 8)):
        measure = partial(_measure_neighbours, data, method, epsilon, runs)
        yield _make_setting(measure, data, opened, epsilon, seeds=range(3), runs=runs)


def _measure_neighbours(data: str, method: str, epsilon: float | None, runs: int, seed: int) -> Row:
    """Return which share of the nearest neighbours of chosen people the revealed votes name, beside
    the active's own features and chance.

    `runs`: how often.
    """
    run = open_votes(data, method, epsilon, seed)
    rows = run.ballot.rows.sort().values
    draw = np.random.default_rng(seed)
    landmarks = draw.choice(len(rows), size=run.learner.classes - 1, replace=False)
    later = (open_votes(data, method, epsilon, seed) for _ in range(1, runs))
    votes_Uk = np.mean(
        [_measure_landmarks(ran, rows, landmarks, draw) for ran in (run, *later)], axis=0
    )
    neighbours_by_party = {
        table.name: _find_nearest(table.features[run.alignment[table.name]][rows], landmarks)
        for table in run.data.tables
    }
    votes_Uk[landmarks, np.arange(len(landmarks))] = -np.inf
    neighbours = np.argsort(-votes_Uk, axis=0)[:_NEAR].T
    others = [name for name in neighbours_by_party if name != run.data.active.name]
    return {
        "found": fmean(_compute_overlap(neighbours, neighbours_by_party[name]) for name in others),
        "baseline": fmean(
            _compute_overlap(neighbours_by_party[run.data.active.name], neighbours_by_party[name])
            for name in others
        ),
        "chance": _NEAR / len(rows),
    }


def _measure_landmarks(
    run: VotesRun, rows: Tensor, landmarks: NDArray[np.int64], draw: np.random.Generator
) -> NDArray[np.float64]:
    """Return how near everybody is to each landmark, as estimated from the votes.

    A soft vote has a share for the landmark whoever else is labelled, so all are. A hard one is for
    whoever is nearest: with a tenth of all labelled, about ten people vote for each landmark.
    """
    others = np.arange(len(rows))
    if "votes are answered singly" in run.config.method.facts:
        others = draw.choice(len(rows), size=len(rows) // _NEAR, replace=False)
    last = run.learner.classes - 1
    labels = dict.fromkeys(rows[others].tolist(), last)
    labels |= {int(rows[place]): number for number, place in enumerate(landmarks)}
    _, votes = run.request_votes(rows, labels)
    return np.asarray(votes[:, :last])


def _find_nearest(rows_U: Tensor, landmarks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ten nearest rows of each landmark, (landmarks, 10), without itself."""
    features_UF = rows_U.flatten(1).double().numpy()
    search = NearestNeighbors(n_neighbors=_NEAR + 1).fit(features_UF)
    neighbours = search.kneighbors(features_UF[landmarks], return_distance=False)
    return np.stack(
        [row[row != landmark][:_NEAR] for row, landmark in zip(neighbours, landmarks, strict=True)]
    )


def _compute_overlap(neighbours: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    """Return the mean share of true neighbours among those named."""
    pairs = zip(neighbours, truth, strict=True)
    return fmean(len(set(guessed) & set(expected)) / _NEAR for guessed, expected in pairs)


def repeated_votes() -> Iterator[Setting]:
    """Yield settings: each person's class at the passives, from new runs on the same people.

    Measured: for which share of the people the class with the most votes in the mean of the
        revealed votes is that of the votes without noise. Each run is a run of its own, with its
        own budget.
    """
    cases = (
        ("each", "votes_randomised", 1.0),
        ("each", "votes_randomised", 4.0),
        ("sum", "votes", 4.0),
    )
    for data, (opened, method, epsilon), runs in product(_DATA, cases, (1, 4, 16)):
        measure = partial(_measure_repeats, data, method, epsilon, runs)
        yield _make_setting(measure, data, opened, epsilon, runs=runs)


def _measure_repeats(data: str, method: str, epsilon: float, runs: int, seed: int) -> Row:
    """Return for which share of the people the class with most votes is read from the mean of many
    openings.

    `runs`: how often.
    """
    totals = []
    run = open_votes(data, method, epsilon, seed)
    for number in range(runs):
        run = open_votes(data, method, epsilon, seed) if number else run
        _, votes = run.request_votes()
        totals.append(votes)
    truth_UK = np.sum([run.get_voter(name).cast_votes(run.ballot) for name in run.voters], axis=0)
    named_U1 = np.mean(totals, axis=0).argmax(axis=1)[:, None]
    # Hard votes tie often: any class of those with most votes will do.
    reached_U1 = np.take_along_axis(truth_UK, named_U1, axis=1) >= truth_UK.max(1, keepdims=True)
    return {"class read": float(reached_U1.mean()), "epsilon spent": epsilon * runs}


def vote_membership() -> Iterator[Setting]:
    """Yield settings of two runs whose labels differ in one person: does its row vote?

    Half of the candidates are in the passives' tables. The statistic is how far the two openings
    lie apart for all other people. The active knows the answer from the intersection: this is what
    the two revealed answers alone let a reader infer.
    """
    for data, (opened, method, epsilon) in product(_DATA, _OPENINGS):
        yield _make_setting(
            partial(_measure_membership, data, method, epsilon), data, opened, epsilon
        )


_CANDIDATES = 16


def _measure_membership(data: str, method: str, epsilon: float | None, seed: int) -> Row:
    """Return the AUC of the distance between two openings."""
    run = open_votes(data, method, epsilon, seed)
    honest = dict(
        zip(run.ballot.rows[run.ballot.labelled].tolist(), run.ballot.labels.tolist(), strict=True)
    )
    classes = run.learner.classes
    free = run.ballot.rows[~torch.isin(run.ballot.rows, torch.tensor(list(honest)))]
    draw = np.random.default_rng(seed)
    chosen = draw.choice(len(free), size=_CANDIDATES, replace=False)
    distances = []
    inside = []
    for number, candidate in enumerate(free[chosen].tolist()):
        member = number % 2 == 0
        results = []
        for label in (0, classes - 1):
            run = open_votes(data, method, epsilon, seed)
            if not member:
                for name in run.voters:
                    run.get_voter(name).is_known_N[candidate] = False
            _, votes = run.request_votes(None, honest | {candidate: label})
            results.append(votes[run.ballot.rows.numpy() != candidate])
        distances.append(float(np.abs(results[0] - results[1]).sum()))
        inside.append(member)
    return {"auc": float(roc_auc_score(inside, distances))}


def poisoned_votes() -> Iterator[Setting]:
    """Yield settings: one passive votes against what its features say.

    The figure is the accuracy of the student, in per cent.
    """
    ways: tuple[Poison | None, ...] = (None, "random", "constant", "flip", "rotate")
    for data, (opened, method, epsilon), way in product(_DATA, _OPENINGS, ways):
        measure = partial(_measure_poisoning, data, method, epsilon, way)
        yield _make_setting(measure, data, opened, epsilon, adversary=way or "none")


def _measure_poisoning(
    data: str, method: str, epsilon: float | None, way: Poison | None, seed: int
) -> Row:
    """Return the student's accuracy where one passive spoils its votes, and how far votes agree.

    `way`: how the passive spoils its votes; None: honest.
    """
    honest, _ = _measure_accuracy(data, method, epsilon, None, seed)
    reached, agreement = _measure_accuracy(data, method, epsilon, way, seed)
    row: Row = {"accuracy": reached, "change": reached - honest}
    if agreement:
        row["its agreement"] = agreement[VICTIM]
        row["of the others"] = fmean(share for name, share in agreement.items() if name != VICTIM)
    return row


@cache
def _measure_accuracy(
    data: str, method: str, epsilon: float | None, way: Poison | None, seed: int
) -> tuple[float, Mapping[str, float]]:
    """Return the accuracy in per cent, and how far each passive agrees with others.

    The agreement is known where single answers are revealed.

    `way`: how the passive spoils its votes; None: honest.
    """
    run = open_votes(data, method, epsilon, seed)
    if way is not None:
        victim = run.get_voter(VICTIM)
        victim.labeller = PoisonedVotes(honest=victim.labeller, way=way, seed=seed)
    run.learn_from_votes()
    agreement = {name: agreed.others or 0.0 for name, agreed in run.learner.agreement.items()}
    return 100 * ACCURACY.compute_value(
        run.learner.student.score_rows(run.data.test_rows)
    ), agreement
