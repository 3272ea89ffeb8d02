"""Audits of what votes cost: a person's record at one passive in two worlds, the real mechanisms.

Nothing is trained for long here, so every run is played through the code that a passive runs: the
labeller, the randomised answer, the noisy sum. The auditor knows both worlds and all that is
public, reads what the claim says may be read, and scores it by its likelihood ratio. Where the
claim takes noisy weights as read (weights, then the own vote), the auditor reads them: out of the
votes of people whose features are unit vectors.

Letters: R runs of one world, U rows, F features, K classes, P numbers of a row of Phi.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from apfed_experiments.audit.bounds import DELTA, Claim, Result, epsilon_from, evidence_from
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
from secure_apfed.labellers.guarantee import build_vote_release, table_guarantee
from secure_apfed.labellers.kinds import Integers
from secure_apfed.privacy.accountants import gdp_epsilon, gdp_mu
from secure_apfed.privacy.randomised_response import VoteResponse

Floats = NDArray[np.float64]


def _derive_key(seed: int, *use: str | int) -> bytes:
    """Derive a key for a repeatable audit, where nobody's data are at stake."""
    return hashlib.sha256(repr((seed, *use)).encode()).digest()


@dataclass(frozen=True, kw_only=True)
class NoisySum:
    """A noisy sum: what a passive adds, and the noise of n honest ones.

    The deviation of each one's noise is that of the fixed point.
    """

    point: FixedPoint
    honest: int

    def open_sums(self, votes_RK: Floats, *, seed: int, world: int) -> Floats:
        """Open R sums in which the others' votes are 0; reader and colluders can subtract them.

        `world`: 0 or 1, which of the two tables is read.
        """
        opened_RK = self.point.quantise_rows(
            votes_RK, self._draw_noise(votes_RK.shape, seed, world, 0)
        )
        total_RK = opened_RK.astype(np.float64)
        for party in range(1, self.honest):
            total_RK += self._draw_noise(votes_RK.shape, seed, world, party)
        return total_RK

    def _draw_noise(
        self, shape: tuple[int, ...], seed: int, world: int, party: int
    ) -> NDArray[np.int64]:
        """Draw one party's noise, integers in steps of fixed point."""
        key = _derive_key(seed, "sum", world, party)
        return discrete_gaussian(key, deviation=self.point.noise, shape=shape)


@dataclass(frozen=True, kw_only=True)
class TwoTables:
    """A passive's table (U, F) in two worlds, which differ in the row `person`.

    `labelled`: rows with a label; `labels`: their labels; `readable`: first of F rows that are unit
    vectors, or -1.
    """

    features: tuple[Floats, Floats]
    labelled: Integers
    labels: Integers
    classes: int
    person: int
    readable: int = -1


def people_on_a_line(*, labelled: bool) -> TwoTables:
    """Return two groups with a label each, far apart, and nine people in the middle.

    Without a label the person sits between the middle and one group or the other; the middle's
    graph has no other edge to a group. With a label the person is the only one of class 1, and
    stands on the right or far on the left, beyond class 0.
    """
    left_side = np.array([-2.0, -2.1, -1.9])
    middle = np.linspace(-0.01, 0.01, 9)
    people = [0.0, *left_side, *-left_side, *middle]
    worlds = []
    for position in (1.9, -8.0) if labelled else (-1.0, 1.0):
        people[0] = position
        worlds.append(np.array(people)[:, None])
    known = np.array([1, 0]) if labelled else np.array([1, 4])
    return TwoTables(
        features=(worlds[0], worlds[1]),
        labelled=known,
        labels=np.array([0, 1]),
        classes=2,
        person=0,
    )


def make_labelled_person() -> TwoTables:
    """Return tables of two labelled people and three unit vectors; the worlds differ in one of the
    people, who becomes its opposite.
    """
    world = np.concatenate([np.eye(3)[:2], np.eye(3)])
    other = world.copy()
    other[0] *= -1
    return TwoTables(
        features=(world, other),
        labelled=np.array([0, 1]),
        labels=np.array([0, 1]),
        classes=3,
        person=0,
        readable=2,
    )


def one_answer(response: VoteResponse, runs: int, seed: int, world: int) -> Floats:
    """Score randomised answers to one vote: 1 for world 1's class, -1 for world 0's, else 0."""
    votes_RK = np.tile(np.eye(response.classes)[world], (runs, 1))
    answers_R = response.randomise_votes(
        votes_RK, key=_derive_key(seed, "answer", world), about=b"audit"
    )
    return np.asarray((answers_R == 1).astype(np.float64) - (answers_R == 0))


def one_vote_in_a_sum(
    added: NoisySum, votes: tuple[Floats, Floats], runs: int, seed: int, world: int
) -> Floats:
    """Score noisy sums with one row of votes or another."""
    opened_RK = added.open_sums(np.tile(votes[world], (runs, 1)), seed=seed, world=world)
    return np.asarray(opened_RK @ (votes[1] - votes[0]))


def record_in_answers(
    labeller: Labeller, response: VoteResponse, tables: TwoTables, runs: int, seed: int, world: int
) -> Floats:
    """Score all randomised answers of a passive by their likelihood ratio.

    `runs`: R. `world`: 0 or 1, which of the two tables is read.
    """
    votes = [
        harden_votes(labeller.label_rows(x_UF, tables.labelled, tables.labels, tables.classes))
        for x_UF in tables.features
    ]
    repeated_votes = np.tile(votes[world], (runs, 1))
    answers = response.randomise_votes(
        repeated_votes, key=_derive_key(seed, "answers", world), about=b"audit"
    )
    chosen = np.eye(tables.classes)[answers].reshape(runs, *votes[0].shape)
    return np.asarray((chosen * (votes[1] - votes[0])).sum(axis=(1, 2)) * response.epsilon)


Private = Callable[[bytes], PrivateLogistic]


@dataclass(frozen=True, kw_only=True)
class _Read:
    """The readings of a private labeller in one world.

    `ratio`: log likelihood of world 1's weights over world 0's (R,); `votes`: the person's hard
    vote (R, K); `votes_by_world`: that vote under these weights in each world.
    """

    ratio: Floats
    votes: Floats
    votes_by_world: tuple[Floats, Floats]


def _observe_weights(
    private: Private, tables: TwoTables, runs: int, seed: int, world: int
) -> _Read:
    """Label R times under fresh keys; read the weights, in units of the noise, of readable rows.

    `runs`: R. `world`: 0 or 1, which of the two tables is read.
    """
    readable = slice(tables.readable, tables.readable + tables.features[0].shape[1])
    known = tables.labelled
    labels = tables.labels
    votes_RUK = np.stack(
        [
            private(_derive_key(seed, "weights", world, run)).label_rows(
                tables.features[world], known, labels, tables.classes
            )
            for run in range(runs)
        ]
    )
    log_RFK = np.log(votes_RUK[:, readable])
    weights_RFK = log_RFK - log_RFK.mean(axis=2, keepdims=True)
    # Both worlds' weights without noise, in its units; the auditor computes them himself.
    clean = private(bytes(32))
    sigma = clean.compute_sigma(labelled=len(tables.labelled), classes=tables.classes)
    mean_0, mean_1 = (
        clean.fit_weights(clean.normalise_rows(x_UF)[known], labels, tables.classes) / sigma
        for x_UF in tables.features
    )
    ratio_R = ((weights_RFK - (mean_0 + mean_1) / 2) * (mean_1 - mean_0)).sum(axis=(1, 2))
    answers_0, answers_1 = (
        harden_votes(np.exp(np.einsum("f,rfk->rk", x_UF[tables.person], weights_RFK)))
        for x_UF in tables.features
    )
    own_RK = harden_votes(votes_RUK[:, tables.person])
    return _Read(ratio=ratio_R, votes=own_RK, votes_by_world=(answers_0, answers_1))


def record_in_weights(
    private: Private, tables: TwoTables, runs: int, seed: int, world: int
) -> Floats:
    """Score the weights only, as other people's votes reveal them."""
    return _observe_weights(private, tables, runs, seed, world).ratio


def weights_and_answer(
    private: Private, response: VoteResponse, tables: TwoTables, runs: int, seed: int, world: int
) -> Floats:
    """Score the weights together with the person's own randomised answer.

    `runs`: R. `world`: 0 or 1, which of the two tables is read.
    """
    read = _observe_weights(private, tables, runs, seed, world)
    answers_R = response.randomise_votes(
        read.votes, key=_derive_key(seed, "own", world), about=b"audit"
    )
    gain_RK = read.votes_by_world[1] - read.votes_by_world[0]
    return read.ratio + response.epsilon * gain_RK[np.arange(runs), answers_R]


def weights_and_sum(
    private: Private, added: NoisySum, tables: TwoTables, runs: int, seed: int, world: int
) -> Floats:
    """Score the weights together with the sum of hard votes at the person's row.

    `runs`: R. `world`: 0 or 1, which of the two tables is read.
    """
    read = _observe_weights(private, tables, runs, seed, world)
    opened_RK = added.open_sums(read.votes, seed=seed, world=world)
    mean_0, mean_1 = (added.point.levels * votes_RK for votes_RK in read.votes_by_world)
    variance = added.honest * added.point.noise**2
    own_R = ((opened_RK - (mean_0 + mean_1) / 2) * (mean_1 - mean_0)).sum(axis=1) / variance
    return np.asarray(read.ratio + own_R)


# What is claimed of votes, case by case, and whether the audit stays under it.
#
# Two cases are expected to exceed: they hold the figure of one vote, the labeller held fixed,
# against a whole record that moves other people's votes.


@dataclass(frozen=True, kw_only=True)
class VoteCase(Claim):
    """An audit of votes; the claim is an epsilon at `DELTA`; where `gaussian`, the bound on mu
    counts, too. Scores are of (runs, seed, world).
    """

    gaussian: bool = False
    scores: Callable[[int, int, int], Floats]


def play_vote_case(case: VoteCase, *, runs: int, seed: int, level: float) -> Result:
    """Run one case `runs` times in each world and bound epsilon at significance `level`."""
    began = time.monotonic()
    scores_0, scores_1 = (case.scores(runs, seed, world) for world in (0, 1))
    share = level / 2 if case.gaussian else level
    low = epsilon_from(scores_0, scores_1, delta=DELTA, level=share)
    if case.gaussian:
        low = max(low, evidence_from(scores_0, scores_1, level=share).epsilon_low(DELTA))
    result = {
        "delta": DELTA,
        "claim_epsilon": case.claim,
        "epsilon_low": low,
        "runs": 2 * runs,
        "level": level,
        "seconds": time.monotonic() - began,
    }
    return Result(case=case, exceeded=low > case.claim, counted=f"{2 * runs} runs", figures=result)


_ANSWER = VoteResponse(epsilon=2.0, classes=3)
_TWO = VoteResponse(epsilon=1.0, classes=2)
_HONEST = 2
_LEVELS = 127
_DEVIATION = 127
_ADDED = NoisySum(
    point=FixedPoint(clip_norm=1.0, bits=8, contributors=3, noise=_DEVIATION), honest=_HONEST
)
_SUM = build_vote_release(
    Logistic(), hard=True, deviation=_DEVIATION, honest=_HONEST, steps=_LEVELS, classes=3
)
_SOFT = build_vote_release(
    Ridge(), hard=False, deviation=_DEVIATION, honest=_HONEST, steps=_LEVELS, classes=3
)
_HARD_VOTES = (np.array([1.0, 0.0, 0.0]), np.array([0.0, 1.0, 0.0]))
_SIGNED_VOTES = (np.array([1.0, 0.0, 0.0]), np.array([-1.0, 0.0, 0.0]))
_WEIGHTS = 6.0


def _make_labeller(key: bytes) -> PrivateLogistic:
    """Return a private labeller under this key."""
    return PrivateLogistic(epsilon=_WEIGHTS, delta=DELTA, key=key)


_PRIVATE = _make_labeller(bytes(32))
VOTE_CASES: Mapping[str, VoteCase] = {
    "one answer": VoteCase(
        title="one vote under randomised response: its answer",
        says="one vote, labeller held fixed",
        claim=_ANSWER.epsilon,
        scores=partial(one_answer, _ANSWER),
    ),
    "one vote in a sum": VoteCase(
        title="one hard vote in a sum under discrete noise: the sum",
        says="one vote, labeller held fixed",
        claim=_SUM.epsilon_of(1, DELTA),
        gaussian=True,
        scores=partial(one_vote_in_a_sum, _ADDED, _HARD_VOTES),
    ),
    "one signed vote in a sum": VoteCase(
        title="one row of a ridge's votes in a sum under discrete noise: the sum",
        says="one vote, labeller held fixed",
        claim=_SOFT.epsilon_of(1, DELTA),
        gaussian=True,
        scores=partial(one_vote_in_a_sum, _ADDED, _SIGNED_VOTES),
    ),
    "inductive, no label": VoteCase(
        title="logistic regression, a record without a label replaced: all answers",
        says="the whole record of a person without a label",
        claim=table_guarantee(Logistic(), _TWO, delta=DELTA).unlabelled,
        scores=partial(record_in_answers, Logistic(), _TWO, people_on_a_line(labelled=False)),
    ),
    "transductive, no label": VoteCase(
        title="label spreading, a record without a label replaced: all answers",
        says="one vote, labeller held fixed",
        claim=_TWO.epsilon,
        exceeded=True,
        scores=partial(
            record_in_answers, Spreading(neighbours=2), _TWO, people_on_a_line(labelled=False)
        ),
    ),
    "weights as they are": VoteCase(
        title="logistic regression, a labelled record replaced: all answers",
        says="one vote, labeller held fixed",
        claim=_TWO.epsilon,
        exceeded=True,
        scores=partial(record_in_answers, Logistic(), _TWO, people_on_a_line(labelled=True)),
    ),
    "private weights": VoteCase(
        title="private logistic regression, a labelled record replaced: others' votes, bare",
        says="the weights",
        claim=gdp_epsilon(gdp_mu(_WEIGHTS, DELTA), DELTA),
        gaussian=True,
        scores=partial(record_in_weights, _make_labeller, make_labelled_person()),
    ),
    "private weights, own answer": VoteCase(
        title="private logistic regression, a labelled record replaced: weights, own answer",
        says="the whole record of a labelled person",
        claim=table_guarantee(_PRIVATE, _ANSWER, delta=DELTA).labelled,
        scores=partial(weights_and_answer, _make_labeller, _ANSWER, make_labelled_person()),
    ),
    "private weights, own vote in a sum": VoteCase(
        title="private logistic regression, a labelled record replaced: weights, noisy sum",
        says="the whole record of a labelled person",
        claim=table_guarantee(_PRIVATE, _SUM, delta=DELTA).labelled,
        gaussian=True,
        scores=partial(weights_and_sum, _make_labeller, _ADDED, make_labelled_person()),
    ),
}
