"""Randomised response: on the active's labels before training, on votes before they leave.

Run by: the active, on its training labels, each of them once; every passive, on its hard votes.
Protects from: any reader of results that depend on the labels, such as released representations and
the finished model; and any reader of single votes, including the active and the aggregator, so that
no party has to be trusted with a sum. A mechanism declares its own epsilon and what that covers, so
that the report is exact.

Letters: N labels, K classes, M parties, U rows of votes.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.randomness import derive_key, keystream
from secure_apfed.errors import ConfigError, DataError, ModelError
from secure_apfed.settings.privacy import LARGEST_LABEL_EPSILON, LabelSettings

__all__ = [
    "LABEL_MECHANISMS",
    "LabelMechanism",
    "LabelResponse",
    "MultiStageResponse",
    "NoLabelPrivacy",
    "VoteResponse",
    "find_first_epoch",
    "make_label_mechanism",
]

_PURPOSE = b"secure-apfed label response v1"
# How far a prior's probabilities may be from 1 together.
_SUM_TOLERANCE = 1e-3
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LabelMechanism(ABC):
    """A mechanism that randomises labels before training (local label differential privacy).

    Attributes:
        name: the mechanism's key in the table `LABEL_MECHANISMS`.
        unsafe: whether it protects nothing; True unless a class sets it to False.
        stages: number of disjoint parts of the labels. They are randomised one after the other, and
            the later ones with a prior from the model that was trained so far.
        epsilon: epsilon_y, the privacy cost of one randomised label (answer), at delta 0: above 0
            and at most 40, or infinite without protection.
        classes: K, at least 2; without protection 0 where labels are numbers.
    """

    name: ClassVar[str]
    unsafe: ClassVar[bool] = True
    stages: ClassVar[int] = 1

    epsilon: float
    classes: int

    def __post_init__(self) -> None:
        """Check that epsilon and the number of classes are in range. Raises ConfigError."""
        _check_strength(self.epsilon, self.classes)

    @abstractmethod
    def randomise_labels(
        self, labels_N: torch.Tensor, *, key: bytes, prior_NK: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the labels to train on; the same arguments give the same answers.

        Args:
            labels_N: the true labels, int64 of shape (N,), each in 0..K-1; each is randomised
                (answered) only once.
            key: 32 secret bytes, from which randomness is derived; whoever has them and the answers
                could tell which answers are true labels.
            prior_NK: a probability of each class for each row, made without these labels; None:
                uniform. Only mechanisms of several stages read it.

        Raises:
            LocalProtocolError: arguments of a wrong type or shape.
            DataError: a label outside 0..K-1.
            ModelError: the prior is not a probability.
        """

    @abstractmethod
    def describe_guarantee(self) -> str:
        """Return the guarantee in words, for the report."""


def _check_strength(epsilon: float, classes: int) -> None:
    """Raise ConfigError unless epsilon and number of classes are in range."""
    if not 0 < epsilon <= LARGEST_LABEL_EPSILON:
        raise ConfigError(
            f"epsilon_y lies above 0 and up to {LARGEST_LABEL_EPSILON:g}, got {epsilon}; "
            "leave label privacy out for none"
        )
    if classes < 2:
        raise ConfigError(f"randomised response needs at least 2 classes, got {classes}")


def _check_labels(labels_N: torch.Tensor, classes: int) -> NDArray[np.int64]:
    """Return the labels as an array (N,), after checking type, shape and range 0..classes-1.

    Raises LocalProtocolError: wrong type or shape; DataError: out of range.
    """
    if labels_N.dtype != torch.int64 or labels_N.ndim != 1:
        raise LocalProtocolError(
            f"labels are int64 of shape (N,), got {labels_N.dtype} of shape {tuple(labels_N.shape)}"
        )
    labels: NDArray[np.int64] = labels_N.cpu().numpy()
    is_outside = (labels < 0) | (labels >= classes)
    if is_outside.any():
        row = int(is_outside.argmax())
        raise DataError(
            f"row {row} has label {labels[row]}, expected 0..{classes - 1}; "
            "map the labels to consecutive classes first"
        )
    return labels


def _draw_words(
    key: bytes, mechanism: str, *inputs: NDArray[np.generic], count: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return two arrays of independent 64-bit random words, one word in each for every label.

    They are derived from the arguments alone. So a resumed run repeats its answers, and other
    labels under the same key get independent words.

    `mechanism`: name and parameters of the mechanism, as text. `inputs`: the labels (or votes), and
    the prior if there is one. `count`: number of labels.
    """
    digest = hashlib.blake2b()
    for values in inputs:
        digest.update(np.ascontiguousarray(values).tobytes())
    stream = keystream(key, _PURPOSE, mechanism.encode(), digest.digest(), length=16 * count)
    first_words, second_words = np.frombuffer(stream, dtype="<u8").reshape(2, -1)
    return first_words, second_words


def _draw_with_probability(
    words: NDArray[np.uint64], probability: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Return a mask whose entries are True with these probabilities, each in [0, 1).

    Each is rounded up to a multiple of 2^-64: the mask is True where a random word is below it.

    `words`: uniform 64-bit random words, of the shape of `probability`.
    """
    word_bounds = [math.ceil(share * 2**64) for share in probability.ravel().tolist()]
    return words < np.array(word_bounds, dtype=np.uint64).reshape(probability.shape)


def _pick_uniformly(words: NDArray[np.uint64], count: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Return a random index in 0..count-1 for each 64-bit word, uniform to within count / 2^64.

    `count`: one number, or one for each word.
    """
    return (words % np.asarray(count).astype(np.uint64)).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class NoLabelPrivacy(LabelMechanism):
    """A mechanism without protection, which returns the label itself; epsilon_y is infinite."""

    name: ClassVar[str] = "none"
    unsafe: ClassVar[bool] = True

    epsilon: float = math.inf

    def __post_init__(self) -> None:
        """Accept any epsilon and number of classes, in place of the base class's check."""

    def randomise_labels(
        self, labels_N: torch.Tensor, *, key: bytes, prior_NK: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the labels unchanged, after checking their range.

        With 0 classes the labels are numbers of a regression, which have no range.
        """
        if self.classes:
            _check_labels(labels_N, self.classes)
        return labels_N

    def describe_guarantee(self) -> str:
        return "no label DP"


@dataclass(frozen=True, kw_only=True)
class LabelResponse(LabelMechanism):
    """A K-ary randomised response, which keeps or replaces each label once, before training.

    Protects from: any reader of results that depend on the labels, such as the released
    representations and the finished model. Guarantee: epsilon_y label differential privacy, delta
    0, replace-one label, features public. Every later step reads the randomised labels only, so it
    holds for any number of epochs. It does not protect features. Test accuracy must be measured on
    true labels of rows that are not trained on.
    """

    name: ClassVar[str] = "randomised_response"
    unsafe: ClassVar[bool] = False

    @property
    def keep_probability(self) -> float:
        """The probability of answering the true class, e^epsilon / (e^epsilon + K - 1).

        Kairouz, Oh and Viswanath 2016, K-ary randomised response.
        """
        return 1 - self.replace_probability

    @property
    def replace_probability(self) -> float:
        """The probability of answering any other class, (K - 1) / (e^epsilon + K - 1)."""
        return (self.classes - 1) / (math.exp(self.epsilon) + self.classes - 1)

    def describe_guarantee(self) -> str:
        return (
            f"label DP, epsilon_y {self.epsilon:g}, delta 0, for any number of epochs: "
            f"{self.classes}-ary randomised response keeps a training label with probability "
            f"{self.keep_probability:.3g}; features are not covered"
        )

    def randomise_labels(
        self, labels_N: torch.Tensor, *, key: bytes, prior_NK: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Replace each label with `replace_probability` by another class, chosen uniformly.

        Randomness is compared with the probability as 64-bit integers. The probability is rounded
        up, which only lowers epsilon. The other class is uniform to within K / 2^64.

        `labels_N`: true labels, each in 0..K-1. `key`: 32 secret bytes, from which randomness is
        derived. `prior_NK` is not used.
        """
        labels = _check_labels(labels_N, self.classes)
        mechanism = f"{float(self.epsilon)!r} {self.classes}"
        replacement_words, class_words = _draw_words(
            key, mechanism, labels.astype("<i8"), count=len(labels)
        )
        probability = np.full(len(labels), self.replace_probability)
        is_replaced = _draw_with_probability(replacement_words, probability)
        offset = 1 + _pick_uniformly(class_words, self.classes - 1)
        other_labels = (labels + offset) % self.classes
        return torch.from_numpy(np.where(is_replaced, other_labels, labels)).to(labels_N.device)


def find_first_epoch(stage: int, *, stages: int, epochs: int) -> int:
    """Return the first epoch that trains on the labels of this stage; both count from 0.

    A label mechanism with several stages randomises disjoint parts of the labels one after the
    other, and uses the model that was trained on earlier parts. The stages share the epochs as
    evenly as whole epochs allow.

    `stages`: number of stages. `epochs`: number of epochs of the run.
    """
    return stage * epochs // stages


@dataclass(frozen=True, kw_only=True)
class MultiStageResponse(LabelMechanism):
    """A mechanism (LP-MST) that randomises labels in stages, and uses a trained model as prior.

    Ghazi, Golowich, Kumar, Manurangsi and Zhang 2021, Deep Learning with Label Differential
    Privacy, Algorithms 1 to 3. The training rows are cut into disjoint parts, one for each stage.
    The first part's labels are randomised (answered) by randomised response. Each later part's are
    answered by the paper's `RRWithPrior`, whose prior is the model that was trained on the earlier
    answers. Only the k classes that the model finds likeliest are answered, so that fewer answers
    are noise where the model knows something. There are two deviations. One model continues
    training where the paper trains a new one in each stage. Its priors are used without the
    paper's temperature.

    Guarantee: epsilon_y label DP, as of `LabelResponse`, since each label is answered once, and a
    prior depends on answers for other labels only. A bad prior costs accuracy and no privacy.
    Needs: parts that do not depend on labels, and a model that has seen labels only through these
    answers.
    """

    name: ClassVar[str] = "lp_mst"
    unsafe: ClassVar[bool] = False
    stages: ClassVar[int] = 2

    def describe_guarantee(self) -> str:
        return (
            f"label DP, epsilon_y {self.epsilon:g}, delta 0, for any number of epochs: each "
            f"training label is answered once, in one of {self.stages} stages (LP-MST); "
            "features are not covered"
        )

    def choose_widths(self, prior_NK: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the number k of likeliest classes that may be answered, for each row, (N,).

        It maximises the expected probability of a true answer (Algorithm 2, line 2). That is
        e^epsilon / (e^epsilon + k - 1) times the summed prior of the k likeliest classes. Of equal
        ones the smallest k is taken.

        `prior_NK`: a probability of each of K classes for each of N rows.
        """
        sorted_prior_NK = np.sort(prior_NK, axis=1)[:, ::-1]
        keep_K = math.exp(self.epsilon) / (math.exp(self.epsilon) + np.arange(prior_NK.shape[1]))
        # Column k - 1 has the expected probability of a true answer with k classes.
        truth_probability_NK: NDArray[np.float64] = keep_K * sorted_prior_NK.cumsum(axis=1)
        best_column_N: NDArray[np.int64] = truth_probability_NK.argmax(axis=1)
        return best_column_N + 1

    def randomise_labels(
        self, labels_N: torch.Tensor, *, key: bytes, prior_NK: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a randomised label for each true one, by the paper's Algorithm 1 (RRWithPrior).

        For each row only the k likeliest classes are answered, with k from `choose_widths`. A label
        among them is kept with probability e^epsilon / (e^epsilon + k - 1), and otherwise becomes
        one of the other k - 1. Any other label becomes one of the k. Probabilities are rounded as
        in `LabelResponse`.

        Args:
            labels_N: true labels, each in 0..K-1.
            key: 32 secret bytes, from which randomness is derived.
            prior_NK: probability of each class by row, made without these labels; None: uniform.
        """
        labels = _check_labels(labels_N, self.classes)
        every_row = np.arange(len(labels))
        prior = self._check_prior(prior_NK, len(labels))
        likely_count = self.choose_widths(prior)  # k
        # Classes in decreasing probability, ties in class order; then the true class's rank there.
        order_NK = np.argsort(-prior, axis=1, kind="stable")
        true_rank = np.argsort(order_NK, axis=1, kind="stable")[every_row, labels]
        mechanism = f"lp_mst {float(self.epsilon)!r} {self.classes}"
        inputs = (labels.astype("<i8"), prior.astype("<f8"))
        replacement_words, class_words = _draw_words(key, mechanism, *inputs, count=len(labels))
        replace_probability = (likely_count - 1) / (math.exp(self.epsilon) + likely_count - 1)
        is_replaced = _draw_with_probability(replacement_words, replace_probability)
        # With k = 1 there is no other class, and no label is replaced; the maximum avoids modulo 0.
        offset = 1 + _pick_uniformly(class_words, np.maximum(likely_count - 1, 1))
        other_rank = (true_rank + offset) % likely_count
        kept_or_other_rank = np.where(is_replaced, other_rank, true_rank)
        uniform_rank = _pick_uniformly(class_words, likely_count)
        answered_rank = np.where(true_rank < likely_count, kept_or_other_rank, uniform_rank)
        randomised_labels = order_NK[every_row, answered_rank]
        return torch.from_numpy(randomised_labels).to(labels_N.device)

    def _check_prior(self, prior_NK: torch.Tensor | None, count: int) -> NDArray[np.float64]:
        """Return the prior of `count` rows as an array (N, K); None: uniform.

        Raises LocalProtocolError: wrong shape or type; ModelError: not probabilities.
        """
        if prior_NK is None:
            return np.full((count, self.classes), 1 / self.classes)
        if tuple(prior_NK.shape) != (count, self.classes) or not prior_NK.is_floating_point():
            raise LocalProtocolError(
                f"a prior has shape ({count}, {self.classes}), a probability of each class for "
                f"each label, got {prior_NK.dtype} of shape {tuple(prior_NK.shape)}"
            )
        prior: NDArray[np.float64] = prior_NK.detach().double().cpu().numpy()
        if not (prior >= 0).all() or (abs(prior.sum(axis=1) - 1) > _SUM_TOLERANCE).any():
            raise ModelError(
                "the model gives no probabilities for the next part of the labels; did its "
                "training diverge? lower train.learning_rate or train.max_gradient_norm"
            )
        return prior


@dataclass(frozen=True, kw_only=True)
class VoteResponse:
    """A K-ary randomised response on hard votes, each for one class.

    A row without a vote is answered with a uniform class.

    Guarantee: each answer is epsilon-DP, delta 0, for the replacement of one vote by any other or
    by none, WITH THE LABELLER (the model that votes) HELD FIXED. Randomised response answers a
    class with probability 1 / (e^epsilon + K - 1) or e^epsilon / (e^epsilon + K - 1). A row without
    a vote gets each class with probability 1 / K, which lies between them. So their ratios stay
    within e^epsilon. The guarantee for a person depends on the labeller; see
    `secure_apfed.labellers.guarantee`.

    Attributes:
        epsilon: privacy cost of one randomised vote, above 0 and at most 40.
        classes: K, at least 2.
        mu: infinite, since no Gaussian DP is claimed: under pure DP epsilons add up.
        largest_epsilon: the largest epsilon, 40.
    """

    mu: ClassVar[float] = math.inf
    accountant: ClassVar[str] = "pure"
    largest_epsilon: ClassVar[float] = LARGEST_LABEL_EPSILON

    epsilon: float
    classes: int

    def __post_init__(self) -> None:
        """Check that epsilon and the number of classes are in range. Raises ConfigError."""
        _check_strength(self.epsilon, self.classes)

    @property
    def noise_multiplier(self) -> float:
        """1 / epsilon, by which the ledger's log identifies the mechanism's strength.

        It would be the scale of Laplace noise of this epsilon, in sensitivities.
        """
        return 1 / self.epsilon

    @property
    def keep_probability(self) -> float:
        """The probability of answering the class that was voted for."""
        return self._label_mechanism.keep_probability

    @property
    def other_probability(self) -> float:
        """The probability of answering each single class that was not voted for."""
        return self._label_mechanism.replace_probability / (self.classes - 1)

    @property
    def _label_mechanism(self) -> LabelResponse:
        """The label mechanism with the same epsilon and classes, which computes its
        probabilities.
        """
        return LabelResponse(epsilon=self.epsilon, classes=self.classes)

    def epsilon_of(self, releases: int, delta: float) -> float:
        """Return the epsilon of `releases` answers about one person, at any delta."""
        return releases * self.epsilon

    def randomise_votes(self, votes_UK: Floats, *, key: bytes, about: bytes) -> Integers:
        """Return one answered class for each row, (U,); the same arguments give the same answers.

        Args:
            votes_UK: unit vectors, or zeros for no vote; see `labellers.harden_votes`.
            key: 32 secret bytes; with them one could tell which answers are true.
            about: bytes that identify the rows' people and the request. Other people or requests
                get independent randomness: if they shared it, equal answers would reveal equal
                votes.

        Raises:
            LocalProtocolError: votes of another shape or other values.
        """
        if votes_UK.ndim != 2 or votes_UK.shape[1] != self.classes:
            raise LocalProtocolError(
                f"votes are of shape (rows, {self.classes}), got {votes_UK.shape}"
            )
        has_no_vote_U = ~votes_UK.any(axis=1)
        if not (np.isin(votes_UK, (0.0, 1.0)).all() and (votes_UK.sum(axis=1) <= 1).all()):
            raise LocalProtocolError("votes under randomised response are unit vectors or zeros")
        request_key = derive_key(key, b"vote response", about)
        _, words_U = _draw_words(
            request_key, "no vote", votes_UK.astype("<f8"), count=len(votes_UK)
        )
        random_class_U = _pick_uniformly(words_U, self.classes)
        # A row without a vote gets a uniform class, which randomised response leaves uniform.
        classes_U = np.where(has_no_vote_U, random_class_U, votes_UK.argmax(axis=1))
        answers = self._label_mechanism.randomise_labels(
            torch.from_numpy(classes_U), key=request_key
        )
        answered_U: Integers = answers.numpy()
        return answered_U

    def estimate_sum(self, answers_MU: Integers) -> Floats:
        """Return an unbiased estimate of the sum of the votes of M parties, (U, K).

        A missing vote counts 1 / K for each class. Let v_k be 1 for a vote for class k, else 0. An
        answer is k with probability q + (p - q) v_k, where p is `keep_probability` and q is
        `other_probability`. So the estimate is (count_k - M q) / (p - q), where count_k of the M
        answers are k.

        `answers_MU`: the class that each of M parties answered for each of U rows.
        """
        counts_UK = (answers_MU[:, :, None] == np.arange(self.classes)).sum(axis=0)
        p = self.keep_probability
        q = self.other_probability
        return np.asarray((counts_UK - len(answers_MU) * q) / (p - q), dtype=np.float64)

    def __str__(self) -> str:
        return f"{self.classes}-ary randomised response of epsilon {self.epsilon:.4g} a vote"

    def describe_guarantee(self) -> str:
        """Return the guarantee of one randomised vote, in words."""
        return (
            f"each vote is answered by {self}, kept with probability {self.keep_probability:.3g}: "
            "delta 0, against everybody, who reads single answers included, with the labeller held "
            "fixed"
        )


def make_label_mechanism(settings: LabelSettings, *, classes: int) -> LabelMechanism:
    """Return the configured label mechanism.

    `classes`: K, number of classes. Raises ConfigError: the mechanism needs two or more.
    """
    mechanism_class = LABEL_MECHANISMS[settings.mechanism]
    # Without a mechanism no epsilon is configured, and it is infinite.
    return mechanism_class(epsilon=settings.epsilon or math.inf, classes=classes)


LABEL_MECHANISMS: Mapping[str, type[LabelMechanism]] = {
    mechanism.name: mechanism for mechanism in (NoLabelPrivacy, LabelResponse, MultiStageResponse)
}
