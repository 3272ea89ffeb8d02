"""The privacy cost of votes for one person's record at one passive, where only votes or functions
of votes are sent. A vote is one row of class scores.

Run by: every passive, before it votes. Two guarantees are distinguished:

*One vote*: how far one row of votes can change, with a fixed labeller. Rows have L1 norm 1 at most.
For two such rows a and b without negative numbers |a - b|^2 <= |a|^2 + |b|^2 <= 2; with negative
ones |a - b| <= 2.

*One record*: the person's features at that passive are replaced; who is labelled, the labels, the
IDs and all settings stay.
- Without a label: an inductive labeller reads the row for its own vote only, so no other vote
  changes. With a transductive one other votes change without a bound: there is no guarantee.
- With a label: the fitted classifier changes, and every vote with it. If the classifier is mu-GDP
  (`PrivateLogistic`), all votes but the person's own are post-processing of it, and given it the
  own vote is one vote: the two compose. Without noise on it there is no guarantee.
The guarantee for the passive's table is the worse of both.

Letters: U rows, K classes, L fixed-point steps that make 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from secure_apfed.errors import ConfigError
from secure_apfed.labellers.kinds import Labeller
from secure_apfed.privacy.accountants import gdp_epsilon
from secure_apfed.privacy.contributions import SummedRelease, min_deviation
from secure_apfed.privacy.randomised_response import VoteResponse

VoteMechanism = VoteResponse | SummedRelease
"""The mechanism through which votes are revealed: randomised response, or a noisy sum."""

_ROUNDING = 1 + 1e-9
"""Factor on distances that covers rounding errors of floating point."""


def compute_vote_distance(*, signed: bool) -> float:
    """Return the largest L2 distance of two rows of votes, each with L1 norm at most 1.

    It is sqrt 2, or 2 if `signed`, that is if votes may be negative.
    """
    return 2.0 if signed else math.sqrt(2)


def compute_distance_in_steps(
    *, steps: float, numbers: int, signed: bool, integers: bool = False
) -> float:
    """Return the largest L2 distance of two rows of votes in fixed-point steps, rounding included.

    Args:
        steps: number of fixed-point steps that encode the value 1: `FixedPoint.max_level /
            clip_norm`. Clipping brings no two rows further apart, so it adds nothing here.
        numbers: K, length of a row of votes. Rounding moves each number by at most half a step in
            either row, so the rows move by sqrt(K) together.
        signed: whether votes may be negative.
        integers: whether votes are whole numbers of steps already, within the same bound, so that
            nothing is rounded.
    """
    distance = compute_vote_distance(signed=signed) * steps * _ROUNDING
    return distance if integers else distance + math.sqrt(numbers)


def build_vote_release(
    labeller: Labeller,
    *,
    hard: bool,
    deviation: int,
    honest: int,
    steps: float,
    classes: int,
    integers: bool = False,
) -> SummedRelease:
    """Return the privacy mechanism of one person's vote in a noisy sum of votes.

    One person changes one row of K votes. All other rows and their noise are independent of it, so
    the mechanism covers K numbers, however many rows are voted on.

    Args:
        labeller: the rule by which the passive votes; `labeller.signed` says whether votes may be
            negative.
        hard: whether each vote names one class (`labellers.harden_votes`). Such votes are not
            negative, and not rounded if L is an integer.
        deviation: standard deviation of each passive's noise on each vote, in fixed-point steps.
        honest: number of passives whose noise is counted: those that do not collude.
        steps: L, number of fixed-point steps that encode the value 1.
        classes: K, number of classes.
        integers: whether votes are whole numbers of steps already.
    """
    # Whole numbers of steps need no rounding, which would add to the distance.
    is_exact = integers or (hard and float(steps).is_integer())
    signed = labeller.signed and not hard
    sensitivity = compute_distance_in_steps(
        steps=steps, numbers=classes, signed=signed, integers=is_exact
    )
    return SummedRelease(
        deviation=deviation, honest=honest, sensitivity=sensitivity, numbers=classes
    )


@dataclass(frozen=True, kw_only=True)
class TableGuarantee:
    """The epsilons of one person at one passive, at `delta`; infinite: no guarantee.

    Attributes:
        vote_epsilon: epsilon of the person's own vote, with the labeller held fixed.
        unlabelled_epsilon, labelled_epsilon: epsilon of the whole record of a person without a
            label, and with one.
        delta: the probability that an epsilon does not hold.
        is_pure: whether `vote_epsilon` and `unlabelled_epsilon` hold at delta 0.
        labeller: how the labeller works, in words.
        reader: against whom votes are protected, in words.
    """

    vote_epsilon: float
    unlabelled_epsilon: float
    labelled_epsilon: float
    delta: float
    is_pure: bool
    labeller: str
    reader: str

    @property
    def epsilon(self) -> float:
        """epsilon_table, the cost of any person's whole record at the passive: the larger one."""
        return max(self.unlabelled_epsilon, self.labelled_epsilon)

    def _describe_cases(self) -> tuple[str, ...]:
        """Return in words the epsilons of one vote, of an unlabelled and of a labelled record."""
        suffix = " at delta 0" if self.is_pure else f" at delta {self.delta:g}"
        return (
            (
                "one person's own vote, labeller held fixed: epsilon "
                f"{_format_epsilon(self.vote_epsilon)}{suffix}"
            ),
            _describe_record("without a label", self.unlabelled_epsilon, suffix),
            _describe_record("with a label", self.labelled_epsilon, f" at delta {self.delta:g}"),
        )

    def describe_guarantee(self) -> str:
        """Return the guarantee in words, for the report."""
        if math.isfinite(self.epsilon):
            figures = (
                f"epsilon_table {_format_epsilon(self.epsilon)} at delta {self.delta:g} covers the "
                "whole record of any person at one passive"
            )
        else:
            figures = "NO guarantee for the passive's table: not every record is covered"
        public = (
            "one release; who has a label, the labels, IDs, the encoding of features and all "
            "settings are public and stay as they are; a person's records at several passives add "
            "up"
        )
        return "; ".join(
            [f"votes: {figures}", *self._describe_cases(), self.labeller, self.reader, public]
        )


def compute_table_guarantee(
    labeller: Labeller, vote_mechanism: VoteMechanism, *, delta: float
) -> TableGuarantee:
    """Return the guarantee for a passive's table whose votes are revealed once.

    Args:
        labeller: the rule by which the passive votes. Its `inductive` says whether a person's row
            changes other people's votes, and its `model` what its fitted weights cost.
        vote_mechanism: the mechanism through which votes are revealed: `VoteResponse`, or a noisy
            sum (`build_vote_release`).
        delta: the probability that an epsilon does not hold.
    """
    if not 0 < delta < 1:
        raise ConfigError(f"expected 0 < delta < 1, got {delta}")
    # With the labeller held fixed, its weights reveal nothing.
    own_vote_epsilon = _compose_with_vote(vote_mechanism, weights_mu=0.0, delta=delta)
    weights_mu = labeller.model.mu
    covers_labelled = labeller.inductive and math.isfinite(weights_mu)
    labelled_epsilon = (
        _compose_with_vote(vote_mechanism, weights_mu, delta) if covers_labelled else math.inf
    )
    return TableGuarantee(
        vote_epsilon=own_vote_epsilon,
        unlabelled_epsilon=own_vote_epsilon if labeller.inductive else math.inf,
        labelled_epsilon=labelled_epsilon,
        delta=delta,
        is_pure=isinstance(vote_mechanism, VoteResponse),
        labeller=labeller.describe_labelling(),
        reader=_describe_reader(vote_mechanism),
    )


def calibrate_votes(
    labeller: Labeller,
    make_release: Callable[[int], SummedRelease],
    *,
    epsilon: float,
    delta: float,
) -> int:
    """Return the least noise of each passive that keeps one vote within epsilon.

    The result is a standard deviation in fixed-point steps; the labeller is held fixed.

    `labeller`: the rule by which the passive votes, named in the error. `make_release`: function
    from a standard deviation in fixed-point steps to the noisy sum with that noise
    (`build_vote_release`). Raises ConfigError: no deviation that a sum can carry suffices.
    """
    return min_deviation(
        # Each person is voted on once, so there is 1 release of a row.
        lambda deviation: make_release(deviation).epsilon_of(1, delta) <= epsilon,
        f"votes of the labeller {labeller.name} at epsilon {epsilon:g} over 1 releases",
        "use fewer bits, a larger epsilon, or a smaller share of it for weights",
    )


def _compose_with_vote(vote_mechanism: VoteMechanism, weights_mu: float, delta: float) -> float:
    """Return the epsilon at `delta` of two releases to one reader: fitted weights, then one vote.

    `vote_mechanism`: the mechanism through which the vote is revealed. `weights_mu`: the weights
    are mu-GDP; 0: they reveal nothing.
    """
    if isinstance(vote_mechanism, VoteResponse):
        # Sequential composition of (epsilon, delta) and (epsilon', 0).
        return vote_mechanism.epsilon + gdp_epsilon(weights_mu, delta)
    return replace(vote_mechanism, beside_mu=weights_mu).epsilon_of(1, delta)


def _describe_reader(vote_mechanism: VoteMechanism) -> str:
    """Return in words against whom the mechanism that reveals votes protects them."""
    if isinstance(vote_mechanism, VoteResponse):
        return vote_mechanism.describe_guarantee()
    return (
        f"votes are opened as a sum alone, under {vote_mechanism}: against whoever reads it, "
        "together with all passives whose noise is not counted, as long as the secure sum keeps "
        "single contributions from readers"
    )


def _describe_record(person: str, epsilon: float, suffix: str) -> str:
    """Return in words the epsilon of a person's whole record.

    `person`: qualifies the person in the sentence, such as "with a label". `suffix`: states the
    delta, such as " at delta 1e-05".
    """
    if math.isinf(epsilon):
        return f"the whole record of a person {person}: no guarantee"
    return f"the whole record of a person {person}: epsilon {_format_epsilon(epsilon)}{suffix}"


def _format_epsilon(epsilon: float) -> str:
    """Return an epsilon with four significant digits."""
    return f"{epsilon:.4g}"
