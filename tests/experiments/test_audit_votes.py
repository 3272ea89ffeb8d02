"""The audit of votes: claims hold where they are made, and planted bugs are caught."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_experiments.audit.bounds import DELTA, AuditResult
from apfed_experiments.audit.votes import (
    VOTE_CASES,
    NoisySum,
    TwoTables,
    make_labelled_person,
    make_people_on_a_line,
    measure_vote_case,
    score_all_answers,
    score_answers,
    score_sums,
    score_weights,
    score_weights_and_sum,
)
from apfed_protocols.sums.fixed_point import FixedPoint
from secure_apfed import labellers
from secure_apfed.labellers.guarantee import compute_table_guarantee
from secure_apfed.privacy.randomised_response import LabelResponse, VoteResponse

Floats = NDArray[np.float64]
Scores = Callable[[int, int, int], Floats]
LEVEL = 0.005


def audit_case(name: str, **planted: Any) -> AuditResult:
    """One case, or the same claim with something planted in what is played."""
    case = replace(VOTE_CASES[name], **planted)
    # Labelling takes a millisecond a run; what is answered for at once takes nothing.
    runs = 500 if name.startswith("private") else 4000
    return measure_vote_case(case, run_count=runs, seed=7, level=LEVEL)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", VOTE_CASES)
def test_each_claim_stands_or_falls_as_expected(name: str) -> None:
    result = audit_case(name)
    assert result.has_exceeded == result.claim.is_expected_to_exceed
    # The attack is a real one: where it proves nothing, it would catch no bug either.
    assert result.values_by_name["epsilon_low"] > 0.2 * result.claim.claimed_value


class KeepsTooOften(VoteResponse):
    """The planted bug: the answer's epsilon is one more than is said."""

    @property
    def _label_mechanism(self) -> LabelResponse:
        return LabelResponse(epsilon=self.epsilon + 1, classes=self.classes)


class HalfTheNoise(labellers.PrivateLogistic):
    """The planted bug: half of the deviation on the weights."""

    def compute_sigma(self, *, labelled_count: int, classes: int) -> float:
        return super().compute_sigma(labelled_count=labelled_count, classes=classes) / 2


class Unclipped(labellers.PrivateLogistic):
    """The planted bug: rows are as long as they are."""

    def normalise_rows(self, features_UF: Floats) -> Floats:
        return features_UF.copy()


class RowsAsIfTheyWereMany(labellers.PrivateLogistic):
    """The planted bug: the loss is a mean over n, its sensitivity one over all U rows."""

    def compute_sensitivity(self, *, labelled_count: int, classes: int) -> float:
        return super().compute_sensitivity(labelled_count=5, classes=classes)


def private(kind: type[labellers.PrivateLogistic], key: bytes) -> labellers.PrivateLogistic:
    return kind(epsilon=6.0, delta=DELTA, key=key)


def make_noisy_sum(noise: int) -> NoisySum:
    return NoisySum(
        fixed_point=FixedPoint(clip_norm=1.0, bits=8, contributor_count=3, noise=noise),
        honest_count=2,
    )


ONE = np.eye(3)[0]
OTHER = np.eye(3)[1]


def long_person() -> TwoTables:
    """The labelled person is twenty long, and still turns into the opposite."""
    tables = make_labelled_person()
    stretch_U1 = np.array([20.0, 1, 1, 1, 1])[:, None]
    first, second = tables.features_by_world
    return replace(tables, features_by_world=(stretch_U1 * first, stretch_U1 * second))


def make_sum_score(sums: NoisySum, other: Floats = OTHER) -> Scores:
    return partial(score_sums, sums, (ONE, other))


def make_weights_score(kind: type[labellers.PrivateLogistic], tables: TwoTables) -> Scores:
    return partial(score_weights, partial(private, kind), tables)


def make_answers_score(labeller: labellers.Labeller, tables: TwoTables) -> Scores:
    return partial(score_all_answers, labeller, VoteResponse(epsilon=1.0, classes=2), tables)


# What is planted in the long person is the missing clip, not the person, who passes below.
UNLABELLED, LABELLED = (make_people_on_a_line(has_label=labelled) for labelled in (False, True))
PERSON = make_labelled_person()
PLANTED: dict[str, tuple[str, Scores]] = {
    "randomised response that keeps the truth too often": (
        "one answer",
        partial(score_answers, KeepsTooOften(epsilon=2.0, classes=3)),
    ),
    "half of the noise on the sum": ("one vote in a sum", make_sum_score(make_noisy_sum(64))),
    "noise of one honest party fewer than is counted": (
        "one vote in a sum",
        make_sum_score(replace(make_noisy_sum(90), honest_count=1)),
    ),
    "sqrt 2 for votes with signs": ("one vote in a sum", make_sum_score(make_noisy_sum(127), -ONE)),
    "half of the noise on the weights": (
        "private weights",
        make_weights_score(HalfTheNoise, PERSON),
    ),
    "rows that are not clipped": ("private weights", make_weights_score(Unclipped, long_person())),
    "the sensitivity of another n": (
        "private weights",
        make_weights_score(RowsAsIfTheyWereMany, PERSON),
    ),
    "a labelled person's own vote forgotten": (
        "private weights",
        partial(
            score_weights_and_sum,
            partial(private, labellers.PrivateLogistic),
            make_noisy_sum(64),
            PERSON,
        ),
    ),
    "a labelled person claimed as one without": (
        "inductive, no label",
        make_answers_score(labellers.Logistic(), LABELLED),
    ),
    "a transductive labeller claimed as inductive": (
        "inductive, no label",
        make_answers_score(labellers.Spreading(neighbours=2), UNLABELLED),
    ),
}


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("bug", [*PLANTED, "none: a long person, clipped"])
def test_planted_bugs_are_caught(bug: str) -> None:
    clipped = "private weights", make_weights_score(labellers.PrivateLogistic, long_person())
    name, scores = PLANTED.get(bug, clipped)
    assert not VOTE_CASES[name].is_expected_to_exceed
    assert audit_case(name, compute_scores=scores).has_exceeded == (bug in PLANTED)


def test_the_worlds_differ_in_one_person_who_moves_as_many_votes_as_told() -> None:
    """A person without a label moves a chain of others through a graph, and none otherwise."""
    for tables in (UNLABELLED, LABELLED, PERSON):
        first, second = tables.features_by_world
        assert np.flatnonzero((first != second).any(axis=1)).tolist() == [tables.changed_row]
        assert (tables.changed_row in tables.labelled_rows) == (tables is not UNLABELLED)

    def count_moved_votes(labeller: Any) -> int:
        known = UNLABELLED.labelled_rows, UNLABELLED.labels, UNLABELLED.class_count
        votes = [
            labellers.harden_votes(labeller.label_rows(x_UF, *known))
            for x_UF in UNLABELLED.features_by_world
        ]
        return int((votes[0] != votes[1]).any(axis=1).sum())

    assert count_moved_votes(labellers.Spreading(neighbours=2)) == 10
    assert count_moved_votes(labellers.Logistic()) == count_moved_votes(labellers.Ridge()) == 1


def test_claims_are_the_guarantees_of_the_table() -> None:
    private_one = private(labellers.PrivateLogistic, bytes(32))
    answer = VoteResponse(epsilon=2.0, classes=3)
    found = compute_table_guarantee(private_one, answer, delta=DELTA)
    assert VOTE_CASES["private weights, own answer"].claimed_value == found.labelled_epsilon
    assert VOTE_CASES["one answer"].claimed_value == found.vote_epsilon
    bare = compute_table_guarantee(labellers.make_labeller("spreading"), answer, delta=DELTA)
    assert not np.isfinite(bare.epsilon)
