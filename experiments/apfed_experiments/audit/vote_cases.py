"""What is claimed of votes, case by case, and whether the audit stays under it.

Two cases are expected to exceed: they hold the figure of one vote, the labeller held fixed, against
a whole record that moves other people's votes.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from apfed_experiments.audit.bounds import epsilon_from, evidence_from
from apfed_experiments.audit.cases import DELTA
from apfed_experiments.audit.votes import (
    NoisySum,
    Scores,
    labelled_person,
    one_answer,
    one_vote_in_a_moment,
    one_vote_in_a_sum,
    people_on_a_line,
    record_in_answers,
    record_in_weights,
    weights_and_answer,
    weights_and_sum,
)
from apfed_protocols.sums.fixed_point import FixedPoint
from secure_apfed.labellers import Logistic, PrivateLogistic, Ridge, Spreading
from secure_apfed.labellers.guarantee import summed_votes, table_guarantee, vote_distance
from secure_apfed.privacy.accountants import GaussianRelease, gdp_epsilon, gdp_mu
from secure_apfed.privacy.randomised_response import VoteResponse

__all__ = ["VOTE_CASES", "VoteCase", "VoteResult", "play_vote_case"]


@dataclass(frozen=True, kw_only=True)
class VoteCase:
    """One audit.

    Attributes:
        title: for people; says: what the claim is the claim of.
        claim: epsilon at `DELTA`.
        gaussian: whether the mechanism is Gaussian, so that the bound on mu counts as well.
        exceeded: whether the audit is expected to prove the claim wrong for this record.
        scores: of (runs a world, seed).
    """

    title: str
    says: str
    claim: float
    gaussian: bool
    exceeded: bool
    scores: Callable[[int, int], Scores]


@dataclass(frozen=True, kw_only=True)
class VoteResult:
    """What one case showed: the bound holds with the case's level of significance."""

    case: VoteCase
    runs: int
    epsilon_low: float
    level: float
    seconds: float

    @property
    def exceeded(self) -> bool:
        return self.epsilon_low > self.case.claim

    def sentence(self) -> str:
        verdict = "EXCEEDS the claim for" if self.exceeded else "stays under the claim for"
        return (
            f"{self.case.title}: epsilon at least {self.epsilon_low:.2f} {verdict} "
            f"{self.case.says}, {self.case.claim:.2f} ({self.runs} runs, {self.seconds:.0f} s)"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.case.title, "claim_of": self.case.says, "delta": DELTA,
            "claim_epsilon": self.case.claim, "epsilon_low": self.epsilon_low, "runs": self.runs,
            "level": self.level, "exceeded": self.exceeded, "expected": self.case.exceeded,
            "seconds": self.seconds,
        }  # fmt: skip


def play_vote_case(case: VoteCase, *, runs: int, seed: int, level: float) -> VoteResult:
    """Run one case `runs` times in each world and bound epsilon at significance `level`."""
    began = time.monotonic()
    scores_0, scores_1 = case.scores(runs, seed)
    share = level / 2 if case.gaussian else level
    low = epsilon_from(scores_0, scores_1, delta=DELTA, level=share)
    if case.gaussian:
        low = max(low, evidence_from(scores_0, scores_1, level=share).epsilon_low(DELTA))
    return VoteResult(
        case=case, runs=2 * runs, epsilon_low=low, level=level, seconds=time.monotonic() - began
    )


_ANSWER = VoteResponse(epsilon=2.0, classes=3)
_TWO = VoteResponse(epsilon=1.0, classes=2)
_HONEST, _LEVELS, _DEVIATION = 2, 127, 127
_ADDED = NoisySum(
    point=FixedPoint(clip_norm=1.0, bits=8, contributors=3, noise=_DEVIATION), honest=_HONEST
)
_SUM = summed_votes(
    Logistic(), hard=True, deviation=_DEVIATION, honest=_HONEST, steps=_LEVELS, classes=3
)
_SOFT = summed_votes(
    Ridge(), hard=False, deviation=_DEVIATION, honest=_HONEST, steps=_LEVELS, classes=3
)
_HARD_VOTES = (np.array([1.0, 0.0, 0.0]), np.array([0.0, 1.0, 0.0]))
_SIGNED_VOTES = (np.array([1.0, 0.0, 0.0]), np.array([-1.0, 0.0, 0.0]))
_WEIGHTS = 6.0
_OPENED = GaussianRelease(noise_multiplier=1.0)


def _private(key: bytes) -> PrivateLogistic:
    return PrivateLogistic(epsilon=_WEIGHTS, delta=DELTA, key=key)


_PRIVATE = _private(bytes(32))

VOTE_CASES: Mapping[str, VoteCase] = {
    "one answer": VoteCase(
        title="one vote under randomised response: its answer",
        says="one vote, labeller held fixed",
        claim=_ANSWER.epsilon, gaussian=False, exceeded=False,
        scores=partial(one_answer, _ANSWER),
    ),
    "one vote in a sum": VoteCase(
        title="one hard vote in a sum under discrete noise: the sum",
        says="one vote, labeller held fixed",
        claim=_SUM.epsilon_of(1, DELTA), gaussian=True, exceeded=False,
        scores=partial(one_vote_in_a_sum, _ADDED, _HARD_VOTES),
    ),
    "one signed vote in a sum": VoteCase(
        title="one row of a ridge's votes in a sum under discrete noise: the sum",
        says="one vote, labeller held fixed",
        claim=_SOFT.epsilon_of(1, DELTA), gaussian=True, exceeded=False,
        scores=partial(one_vote_in_a_sum, _ADDED, _SIGNED_VOTES),
    ),
    "one vote in a moment": VoteCase(
        title="one hard vote in a moment under Gaussian noise: the moment",
        says="one vote, labeller held fixed",
        claim=gdp_epsilon(_OPENED.mu, DELTA), gaussian=True, exceeded=False,
        scores=partial(
            one_vote_in_a_moment, _OPENED.noise_multiplier * vote_distance(signed=False)
        ),
    ),
    "inductive, no label": VoteCase(
        title="logistic regression, a record without a label replaced: all answers",
        says="the whole record of a person without a label",
        claim=table_guarantee(Logistic(), _TWO, delta=DELTA).unlabelled,
        gaussian=False, exceeded=False,
        scores=partial(record_in_answers, Logistic(), _TWO, people_on_a_line(labelled=False)),
    ),
    "transductive, no label": VoteCase(
        title="label spreading, a record without a label replaced: all answers",
        says="one vote, labeller held fixed",
        claim=_TWO.epsilon, gaussian=False, exceeded=True,
        scores=partial(
            record_in_answers, Spreading(neighbours=2), _TWO, people_on_a_line(labelled=False)
        ),
    ),
    "weights as they are": VoteCase(
        title="logistic regression, a labelled record replaced: all answers",
        says="one vote, labeller held fixed",
        claim=_TWO.epsilon, gaussian=False, exceeded=True,
        scores=partial(record_in_answers, Logistic(), _TWO, people_on_a_line(labelled=True)),
    ),
    "private weights": VoteCase(
        title="private logistic regression, a labelled record replaced: others' votes, bare",
        says="the weights",
        claim=gdp_epsilon(gdp_mu(_WEIGHTS, DELTA), DELTA), gaussian=True, exceeded=False,
        scores=partial(record_in_weights, _private, labelled_person()),
    ),
    "private weights, own answer": VoteCase(
        title="private logistic regression, a labelled record replaced: weights, own answer",
        says="the whole record of a labelled person",
        claim=table_guarantee(_PRIVATE, _ANSWER, delta=DELTA).labelled,
        gaussian=False, exceeded=False,
        scores=partial(weights_and_answer, _private, _ANSWER, labelled_person()),
    ),
    "private weights, own vote in a sum": VoteCase(
        title="private logistic regression, a labelled record replaced: weights, noisy sum",
        says="the whole record of a labelled person",
        claim=table_guarantee(_PRIVATE, _SUM, delta=DELTA).labelled,
        gaussian=True, exceeded=False,
        scores=partial(weights_and_sum, _private, _ADDED, labelled_person()),
    ),
}  # fmt: skip
