"""Audits of the privacy of votes: the real mechanisms on a passive's table in two worlds.

The worlds are two tables that differ in one person's record. A vote is a passive's row of class
scores for a person; a labeller is the semi-supervised rule that makes it; a hard vote names one
class; an answer is a hard vote under randomised response. Nothing is trained for long, so every run
uses the code that a passive runs. The auditor knows both
worlds and everything public, observes what the claim covers, and scores it by its likelihood ratio.
Where the claim assumes that noisy weights are observed (and then the own vote), the auditor
computes them from the votes of people whose features are unit vectors.

Letters: R runs of one world, U rows, F features, K classes.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from apfed_experiments.audit.bounds import (
    DELTA,
    AuditResult,
    Claim,
    bound_epsilon_by_scores,
    collect_evidence,
)
from apfed_protocols.noise import discrete_gaussian
from apfed_protocols.sums.fixed_point import FixedPoint
from secure_apfed.labellers import (
    Labeller,
    Logistic,
    PrivateLogistic,
    Ridge,
    Spreading,
    harden_votes,
)
from secure_apfed.labellers.guarantee import build_vote_release, compute_table_guarantee
from secure_apfed.labellers.kinds import Integers
from secure_apfed.privacy.accountants import gdp_epsilon, gdp_mu
from secure_apfed.privacy.randomised_response import VoteResponse

Floats = NDArray[np.float64]


def _derive_key(seed: int, *purpose: str | int) -> bytes:
    """Derive a key of 32 bytes from a seed and what it is for.

    The key is no secret: the audit is repeatable, and nobody's data are at stake.
    """
    return hashlib.sha256(repr((seed, *purpose)).encode()).digest()


@dataclass(frozen=True, kw_only=True)
class NoisySum:
    """A secure sum of votes with noise: one passive's votes and the noise of several honest
    passives.

    Attributes:
        fixed_point: fixed-point encoding, with the standard deviation of each passive's noise.
        honest_count: number of passives that add noise.
    """

    fixed_point: FixedPoint
    honest_count: int

    def reveal_sums(self, votes_RK: Floats, *, seed: int, world: int) -> Floats:
        """Return R decrypted sums of one passive's votes, (R, K), in steps of fixed point.

        Each of the R runs has one vote, with a score for each of K classes, and noise of its own.

        The other passives' votes are 0, since the reader and colluding passives can subtract them.

        `votes_RK`: the passive's vote in each run. `seed`, `world`: what the noise is derived from;
        `world` is 0 or 1.
        """
        # The audited passive is party 0.
        own_noise_RK = self._draw_noise(votes_RK.shape, seed, world, 0)
        total_RK = self.fixed_point.quantise_rows(votes_RK, own_noise_RK).astype(np.float64)
        for party in range(1, self.honest_count):
            total_RK += self._draw_noise(votes_RK.shape, seed, world, party)
        return total_RK

    def _draw_noise(
        self, shape: tuple[int, ...], seed: int, world: int, party: int
    ) -> NDArray[np.int64]:
        """Return one party's discrete Gaussian noise, integers in steps of fixed point.

        `shape`: shape of the noise. `seed`, `world`, `party`: what its key is derived from.
        """
        key = _derive_key(seed, "sum", world, party)
        return discrete_gaussian(key, deviation=self.fixed_point.noise, shape=shape)


@dataclass(frozen=True, kw_only=True)
class TwoTables:
    """A passive's table in two worlds, which differ in one row.

    Letters: U rows, F features, K classes.

    Attributes:
        features_by_world: features in world 0 and in world 1, (U, F).
        labelled_rows, labels: numbers of the labelled rows, and their labels.
        class_count: K, number of classes.
        changed_row: number of the row in which the worlds differ.
        first_unit_row: number of the first of F consecutive rows that are unit vectors, whose votes
            reveal the labeller's weights; -1: the table has none.
    """

    features_by_world: tuple[Floats, Floats]
    labelled_rows: Integers
    labels: Integers
    class_count: int
    changed_row: int
    first_unit_row: int = -1


def make_people_on_a_line(*, has_label: bool) -> TwoTables:
    """Return tables of one feature: two groups far apart, and nine people in the middle.

    The worlds differ in one person, whose record is to change as many votes as possible. Without a
    label the person lies between the middle and either group, and is that group's only link to the
    middle in a graph of neighbours. With a label the person is the only one of class 1, on the
    right or far on the left.

    `has_label`: whether the person has a label.
    """
    left_group = np.array([-2.0, -2.1, -1.9])
    middle_group = np.linspace(-0.01, 0.01, 9)
    other_people = [*left_group, *-left_group, *middle_group]
    person_0, person_1 = (1.9, -8.0) if has_label else (-1.0, 1.0)
    labelled_rows = np.array([1, 0]) if has_label else np.array([1, 4])
    return TwoTables(
        features_by_world=(
            np.array([[person_0, *other_people]]).T,
            np.array([[person_1, *other_people]]).T,
        ),
        labelled_rows=labelled_rows,
        labels=np.array([0, 1]),
        class_count=2,
        changed_row=0,
    )


def make_labelled_person() -> TwoTables:
    """Return tables of two labelled people and three unit vectors, whose votes reveal a labeller's
    weights.

    In world 1 the features of the first labelled person have the opposite sign.
    """
    features_0 = np.concatenate([np.eye(3)[:2], np.eye(3)])
    features_1 = features_0.copy()
    features_1[0] *= -1
    return TwoTables(
        features_by_world=(features_0, features_1),
        labelled_rows=np.array([0, 1]),
        labels=np.array([0, 1]),
        class_count=3,
        changed_row=0,
        first_unit_row=2,
    )


def score_answers(response: VoteResponse, run_count: int, seed: int, world: int) -> Floats:
    """Score `run_count` randomised answers to one vote: 1 for class 1, -1 for class 0, else 0.

    A vote names a class; randomised response answers with it or, at random, with another class.
    `response`: randomised response under audit. `run_count`: R. `world`: 0 or 1, the class of the
    vote. Returns the scores, (R,).
    """
    votes_RK = np.tile(np.eye(response.classes)[world], (run_count, 1))
    answers_R = response.randomise_votes(
        votes_RK, key=_derive_key(seed, "answer", world), about=b"audit"
    )
    return np.asarray((answers_R == 1).astype(np.float64) - (answers_R == 0))


def score_sums(
    noisy_sum: NoisySum, vote_by_world: tuple[Floats, Floats], run_count: int, seed: int, world: int
) -> Floats:
    """Score `run_count` noisy sums of votes along the difference of the two worlds' votes; return
    (R,).

    `noisy_sum`: noisy sum under audit. `vote_by_world`: vote of a passive on one row in each world,
    a score for each of K classes, (K,). `run_count`: R. `world`: 0 or 1, whose vote is in the sum.
    """
    total_RK = noisy_sum.reveal_sums(
        np.tile(vote_by_world[world], (run_count, 1)), seed=seed, world=world
    )
    return np.asarray(total_RK @ (vote_by_world[1] - vote_by_world[0]))


def score_all_answers(
    labeller: Labeller,
    response: VoteResponse,
    tables: TwoTables,
    run_count: int,
    seed: int,
    world: int,
) -> Floats:
    """Score `run_count` sets of randomised answers on all rows by their log likelihood ratio, (R,).

    Letters: R runs, U rows, F features, K classes.

    `labeller`: semi-supervised rule that makes the votes. `response`: randomised response of the
    hard votes. `tables`: two tables that differ in one record, one for each world. `world`: 0 or 1,
    whose table the passive has.
    """
    votes_by_world = [
        harden_votes(
            labeller.label_rows(x_UF, tables.labelled_rows, tables.labels, tables.class_count)
        )
        for x_UF in tables.features_by_world
    ]
    repeated_votes = np.tile(votes_by_world[world], (run_count, 1))
    answers = response.randomise_votes(
        repeated_votes, key=_derive_key(seed, "answers", world), about=b"audit"
    )
    votes_0_UK, votes_1_UK = votes_by_world
    answers_RUK = np.eye(tables.class_count)[answers].reshape(run_count, *votes_0_UK.shape)
    # An answer equal to the vote is e^epsilon times as likely as one other class, so each answer
    # that agrees with world 1's vote, and not with world 0's, adds epsilon.
    agreement_R = (answers_RUK * (votes_1_UK - votes_0_UK)).sum(axis=(1, 2))
    return np.asarray(agreement_R * response.epsilon)


MakeLabeller = Callable[[bytes], PrivateLogistic]
"""A function that returns a private labeller with the key of its noise."""


@dataclass(frozen=True, kw_only=True)
class _WeightReadings:
    """What an auditor observes of a private labeller (a passive's rule that votes, whose weights
    are noised) in one world.

    Letters: R runs, K classes.

    Attributes:
        log_ratio: log likelihood ratio of the noisy weights, world 1 over world 0, (R,).
        person_votes: the person's hard vote, (R, K).
        votes_by_world: the hard vote that these weights would give the person in each world.
    """

    log_ratio: Floats
    person_votes: Floats
    votes_by_world: tuple[Floats, Floats]


def _observe_weights(
    make_labeller: MakeLabeller, tables: TwoTables, run_count: int, seed: int, world: int
) -> _WeightReadings:
    """Fit a private labeller `run_count` times, and compute its noisy weights from votes on unit
    vectors.

    A labeller is a passive's rule that votes; the weights of a private one are noised. Weights are
    in units of the noise. Letters: R runs, U rows, F features, K classes.

    `make_labeller`: function that returns the labeller for a key of its noise. `tables`: two tables
    that differ in one record, one for each world. `world`: 0 or 1, whose table is fitted.
    """
    # There is one row for each feature that is 1 in it, and all others 0.
    feature_count = tables.features_by_world[0].shape[1]
    unit_rows = slice(tables.first_unit_row, tables.first_unit_row + feature_count)
    labelled = tables.labelled_rows
    labels = tables.labels
    votes_RUK = np.stack(
        [
            make_labeller(_derive_key(seed, "weights", world, run)).label_rows(
                tables.features_by_world[world], labelled, labels, tables.class_count
            )
            for run in range(run_count)
        ]
    )
    # Logits of a unit vector are weights, up to a constant for each row.
    log_votes_RFK = np.log(votes_RUK[:, unit_rows])
    weights_RFK = log_votes_RFK - log_votes_RFK.mean(axis=2, keepdims=True)
    # The auditor computes both worlds' weights without noise, in units of the noise; the key is
    # never used.
    unused_key_labeller = make_labeller(bytes(32))
    sigma = unused_key_labeller.compute_sigma(
        labelled_count=len(labelled), classes=tables.class_count
    )
    mean_0_FK, mean_1_FK = (
        _fit_noiseless_weights(unused_key_labeller, x_UF, tables) / sigma
        for x_UF in tables.features_by_world
    )
    # Log likelihood ratio of two normal distributions of variance 1.
    middle_FK = (mean_0_FK + mean_1_FK) / 2
    ratio_R = ((weights_RFK - middle_FK) * (mean_1_FK - mean_0_FK)).sum(axis=(1, 2))
    vote_0_RK, vote_1_RK = (
        _vote_with_weights(x_UF[tables.changed_row], weights_RFK)
        for x_UF in tables.features_by_world
    )
    person_votes_RK = harden_votes(votes_RUK[:, tables.changed_row])
    return _WeightReadings(
        log_ratio=ratio_R, person_votes=person_votes_RK, votes_by_world=(vote_0_RK, vote_1_RK)
    )


def _fit_noiseless_weights(labeller: PrivateLogistic, x_UF: Floats, tables: TwoTables) -> Floats:
    """Return the weights (F, K) that a labeller fits to the labelled rows of x before its noise."""
    labelled_nF = labeller.normalise_rows(x_UF)[tables.labelled_rows]
    return labeller.fit_weights(labelled_nF, tables.labels, tables.class_count)


def _vote_with_weights(x_F: Floats, weights_RFK: Floats) -> Floats:
    """Return the hard votes (R, K) that weights of R runs give one person with features x."""
    logits_RK = np.einsum("f,rfk->rk", x_F, weights_RFK)
    return harden_votes(np.exp(logits_RK))


def score_weights(
    make_labeller: MakeLabeller, tables: TwoTables, run_count: int, seed: int, world: int
) -> Floats:
    """Score `run_count` noisy weights of a labeller by their log likelihood ratio; return the
    scores, (R,).

    Other people's votes reveal these weights. `make_labeller`: function that returns the labeller
    for a key of its noise. `tables`: two tables that differ in one record, one for each world.
    `world`: 0 or 1, whose table is fitted.
    """
    return _observe_weights(make_labeller, tables, run_count, seed, world).log_ratio


def score_weights_and_answer(
    make_labeller: MakeLabeller,
    response: VoteResponse,
    tables: TwoTables,
    run_count: int,
    seed: int,
    world: int,
) -> Floats:
    """Score `run_count` noisy weights of a labeller together with the person's own randomised
    answer.

    The scores, (R,), are log likelihood ratios. `make_labeller`: function that returns the labeller
    for a key of its noise. `response`: randomised response of the person's vote. `tables`: two
    tables that differ in one record, one for each world. `world`: 0 or 1, whose table the passive
    has.
    """
    readings = _observe_weights(make_labeller, tables, run_count, seed, world)
    answers_R = response.randomise_votes(
        readings.person_votes, key=_derive_key(seed, "own", world), about=b"audit"
    )
    vote_0_RK, vote_1_RK = readings.votes_by_world
    # 1 where an answer agrees with the vote of world 1 only, -1 for world 0 only, else 0.
    agreement_RK = vote_1_RK - vote_0_RK
    return readings.log_ratio + response.epsilon * agreement_RK[np.arange(run_count), answers_R]


def score_weights_and_sum(
    make_labeller: MakeLabeller,
    noisy_sum: NoisySum,
    tables: TwoTables,
    run_count: int,
    seed: int,
    world: int,
) -> Floats:
    """Score `run_count` noisy weights of a labeller together with the noisy sum of votes on the
    person's row.

    The scores, (R,), are log likelihood ratios. `make_labeller`: function that returns the labeller
    for a key of its noise. `noisy_sum`: noisy sum of the passives' votes. `tables`: two tables that
    differ in one record, one for each world. `world`: 0 or 1, whose table the passive has.
    """
    readings = _observe_weights(make_labeller, tables, run_count, seed, world)
    total_RK = noisy_sum.reveal_sums(readings.person_votes, seed=seed, world=world)
    # The sums without noise that these weights would give in each world.
    mean_0_RK, mean_1_RK = (
        noisy_sum.fixed_point.max_level * votes_RK for votes_RK in readings.votes_by_world
    )
    # The noise of all honest passives adds up; sums are in steps of fixed point.
    variance = noisy_sum.honest_count * noisy_sum.fixed_point.noise**2
    middle_RK = (mean_0_RK + mean_1_RK) / 2
    sum_ratio_R = ((total_RK - middle_RK) * (mean_1_RK - mean_0_RK)).sum(axis=1) / variance
    return np.asarray(readings.log_ratio + sum_ratio_R)


# Claims on the privacy of votes.
#
# Two cases are expected to exceed their claim: the epsilon of one vote, with the labeller held
# fixed, is compared with a whole record, which also changes other people's votes.


@dataclass(frozen=True, kw_only=True)
class VoteCase(Claim):
    """An audit of votes, whose claim is an epsilon at `DELTA`.

    Attributes:
        is_gaussian: whether the mechanism is Gaussian DP, so that the bound on mu counts, too.
        compute_scores: function of the number of runs R, a seed and the world that returns scores,
            (R,).
    """

    is_gaussian: bool = False
    compute_scores: Callable[[int, int, int], Floats]


def measure_vote_case(case: VoteCase, *, run_count: int, seed: int, level: float) -> AuditResult:
    """Run one case `run_count` times in each of two worlds, and bound its epsilon from below.

    The worlds are two tables that differ in one record. `level`: probability that the bound is
    wrong, at most; two bounds share it equally.
    """
    began = time.monotonic()
    scores_0, scores_1 = (case.compute_scores(run_count, seed, world) for world in (0, 1))
    # A Gaussian mechanism has a second bound, by mu, and the larger one counts.
    bound_level = level / 2 if case.is_gaussian else level
    epsilon_low = bound_epsilon_by_scores(scores_0, scores_1, delta=DELTA, level=bound_level)
    if case.is_gaussian:
        evidence = collect_evidence(scores_0, scores_1, level=bound_level)
        epsilon_low = max(epsilon_low, evidence.bound_epsilon(DELTA))
    values_by_name = {
        "delta": DELTA,
        "claim_epsilon": case.claimed_value,
        "epsilon_low": epsilon_low,
        "runs": 2 * run_count,
        "level": level,
        "seconds": time.monotonic() - began,
    }
    return AuditResult(
        claim=case,
        has_exceeded=epsilon_low > case.claimed_value,
        run_count_text=f"{2 * run_count} runs",
        values_by_name=values_by_name,
    )


_THREE_CLASS_RESPONSE = VoteResponse(epsilon=2.0, classes=3)
_TWO_CLASS_RESPONSE = VoteResponse(epsilon=1.0, classes=2)
_HONEST_PASSIVES = 2
_FIXED_POINT_STEPS = 127
_NOISE_STEPS = 127
_NOISY_SUM = NoisySum(
    fixed_point=FixedPoint(clip_norm=1.0, bits=8, contributor_count=3, noise=_NOISE_STEPS),
    honest_count=_HONEST_PASSIVES,
)
_build_audited_release = partial(
    build_vote_release,
    deviation=_NOISE_STEPS,
    honest=_HONEST_PASSIVES,
    steps=_FIXED_POINT_STEPS,
    classes=3,
)
_HARD_VOTE_RELEASE = _build_audited_release(Logistic(), hard=True)
_SOFT_VOTE_RELEASE = _build_audited_release(Ridge(), hard=False)
_HARD_VOTE_BY_WORLD = (np.array([1.0, 0.0, 0.0]), np.array([0.0, 1.0, 0.0]))
_SIGNED_VOTE_BY_WORLD = (np.array([1.0, 0.0, 0.0]), np.array([-1.0, 0.0, 0.0]))
_WEIGHTS_EPSILON = 6.0


def _make_labeller(key: bytes) -> PrivateLogistic:
    """Return a private labeller under this key."""
    return PrivateLogistic(epsilon=_WEIGHTS_EPSILON, delta=DELTA, key=key)


_PRIVATE_LABELLER = _make_labeller(bytes(32))
VOTE_CASES: Mapping[str, VoteCase] = {
    "one answer": VoteCase(
        title="one vote under randomised response: its answer",
        scope="one vote, labeller held fixed",
        claimed_value=_THREE_CLASS_RESPONSE.epsilon,
        compute_scores=partial(score_answers, _THREE_CLASS_RESPONSE),
    ),
    "one vote in a sum": VoteCase(
        title="one hard vote in a sum under discrete noise: the sum",
        scope="one vote, labeller held fixed",
        claimed_value=_HARD_VOTE_RELEASE.epsilon_of(1, DELTA),
        is_gaussian=True,
        compute_scores=partial(score_sums, _NOISY_SUM, _HARD_VOTE_BY_WORLD),
    ),
    "one signed vote in a sum": VoteCase(
        title="one row of a ridge's votes in a sum under discrete noise: the sum",
        scope="one vote, labeller held fixed",
        claimed_value=_SOFT_VOTE_RELEASE.epsilon_of(1, DELTA),
        is_gaussian=True,
        compute_scores=partial(score_sums, _NOISY_SUM, _SIGNED_VOTE_BY_WORLD),
    ),
    "inductive, no label": VoteCase(
        title="logistic regression, a record without a label replaced: all answers",
        scope="the whole record of a person without a label",
        claimed_value=compute_table_guarantee(
            Logistic(), _TWO_CLASS_RESPONSE, delta=DELTA
        ).unlabelled_epsilon,
        compute_scores=partial(
            score_all_answers,
            Logistic(),
            _TWO_CLASS_RESPONSE,
            make_people_on_a_line(has_label=False),
        ),
    ),
    "transductive, no label": VoteCase(
        title="label spreading, a record without a label replaced: all answers",
        scope="one vote, labeller held fixed",
        claimed_value=_TWO_CLASS_RESPONSE.epsilon,
        is_expected_to_exceed=True,
        compute_scores=partial(
            score_all_answers,
            Spreading(neighbours=2),
            _TWO_CLASS_RESPONSE,
            make_people_on_a_line(has_label=False),
        ),
    ),
    "weights as they are": VoteCase(
        title="logistic regression, a labelled record replaced: all answers",
        scope="one vote, labeller held fixed",
        claimed_value=_TWO_CLASS_RESPONSE.epsilon,
        is_expected_to_exceed=True,
        compute_scores=partial(
            score_all_answers,
            Logistic(),
            _TWO_CLASS_RESPONSE,
            make_people_on_a_line(has_label=True),
        ),
    ),
    "private weights": VoteCase(
        title="private logistic regression, a labelled record replaced: others' votes, bare",
        scope="the weights",
        claimed_value=gdp_epsilon(gdp_mu(_WEIGHTS_EPSILON, DELTA), DELTA),
        is_gaussian=True,
        compute_scores=partial(score_weights, _make_labeller, make_labelled_person()),
    ),
    "private weights, own answer": VoteCase(
        title="private logistic regression, a labelled record replaced: weights, own answer",
        scope="the whole record of a labelled person",
        claimed_value=compute_table_guarantee(
            _PRIVATE_LABELLER, _THREE_CLASS_RESPONSE, delta=DELTA
        ).labelled_epsilon,
        compute_scores=partial(
            score_weights_and_answer, _make_labeller, _THREE_CLASS_RESPONSE, make_labelled_person()
        ),
    ),
    "private weights, own vote in a sum": VoteCase(
        title="private logistic regression, a labelled record replaced: weights, noisy sum",
        scope="the whole record of a labelled person",
        claimed_value=compute_table_guarantee(
            _PRIVATE_LABELLER, _HARD_VOTE_RELEASE, delta=DELTA
        ).labelled_epsilon,
        is_gaussian=True,
        compute_scores=partial(
            score_weights_and_sum, _make_labeller, _NOISY_SUM, make_labelled_person()
        ),
    ),
}
