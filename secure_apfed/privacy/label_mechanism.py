"""What stands between the active's labels and everything that is trained on them.

Run by: the active, on its training labels, each of them once. A mechanism states its own
epsilon_y and what that covers, so that the report says no more than was done.

Letters: N labels, K classes.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.randomness import keystream
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.settings.privacy import LARGEST_LABEL_EPSILON as LARGEST_EPSILON
from secure_apfed.settings.privacy import LabelSettings

__all__ = [
    "LARGEST_EPSILON",
    "LabelMechanism",
    "LabelResponse",
    "NoLabelPrivacy",
    "chances",
    "check_labels",
    "check_strength",
    "is_below",
]

_PURPOSE = b"secure-apfed label response v1"


class LabelMechanism(Protocol):
    """One way of answering for labels.

    Attributes:
        name: its key in the table `LABEL_MECHANISMS`.
        unsafe: whether it protects nothing.
    """

    name: ClassVar[str]
    unsafe: ClassVar[bool]

    @property
    def epsilon(self) -> float:
        """epsilon_y of one label's answer, at delta 0; infinite without protection."""
        ...

    @property
    def stages(self) -> int:
        """Into how many disjoint parts the labels are cut; later ones are answered with a prior."""
        ...

    def answer(
        self, labels_N: torch.Tensor, *, key: bytes, prior_NK: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the labels to train on; the same arguments give the same answers.

        Args:
            labels_N: int64 of shape (N,), each in 0..K-1; never answered before.
            key: 32 secret bytes; whoever has them and the answers can tell what was kept.
            prior_NK: a probability of each class for each row, made without these labels;
                None: all classes are alike. Only mechanisms of several stages read it.

        Raises:
            LocalProtocolError: arguments of a wrong type or shape.
            DataError: a label outside 0..K-1.
            ModelError: a prior that is no probability.
        """
        ...

    def statement(self) -> str:
        """What is guaranteed, in words for the report."""
        ...


def check_strength(epsilon: float, classes: int) -> None:
    """Check what every mechanism that protects asks of its numbers.

    Raises:
        ConfigError: says which is out of range.
    """
    if not 0 < epsilon <= LARGEST_EPSILON:
        raise ConfigError(
            f"epsilon_y lies above 0 and up to {LARGEST_EPSILON:g}, got {epsilon}; "
            "leave label privacy out for none"
        )
    if classes < 2:
        raise ConfigError(f"randomised response needs at least 2 classes, got {classes}")


def check_labels(labels_N: torch.Tensor, classes: int) -> NDArray[np.int64]:
    """Return the labels as an array once they are what every mechanism takes.

    Raises:
        LocalProtocolError: not a vector of int64.
        DataError: a label outside 0..K-1.
    """
    if labels_N.dtype != torch.int64 or labels_N.ndim != 1:
        raise LocalProtocolError(
            f"labels are int64 of shape (N,), got {labels_N.dtype} of shape {tuple(labels_N.shape)}"
        )
    labels: NDArray[np.int64] = labels_N.cpu().numpy()
    outside = (labels < 0) | (labels >= classes)
    if outside.any():
        row = int(outside.argmax())
        raise DataError(
            f"row {row} has label {labels[row]}, expected 0..{classes - 1}; "
            "map the labels to consecutive classes first"
        )
    return labels


def chances(
    key: bytes, facts: str, *contents: NDArray[np.generic], count: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return two independent 64-bit words for each of `count` labels.

    A function of everything given, so that a resumed run gets the same ones and that other
    labels under the same key get independent ones.

    Args:
        key: 32 secret bytes.
        facts: the mechanism and its numbers.
        contents: what is answered: labels, and the prior where there is one.
        count: N.
    """
    digest = hashlib.blake2b()
    for content in contents:
        digest.update(np.ascontiguousarray(content).tobytes())
    stream = keystream(key, _PURPOSE, facts.encode(), digest.digest(), length=16 * count)
    chance, choice = np.frombuffer(stream, dtype="<u8").reshape(2, -1)
    return chance, choice


def is_below(words: NDArray[np.uint64], probability: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which of the words fall below a probability in [0, 1), rounded up to a multiple of 2^-64."""
    bounds = [math.ceil(share * 2**64) for share in probability.ravel().tolist()]
    return words < np.array(bounds, dtype=np.uint64).reshape(probability.shape)


@dataclass(frozen=True, kw_only=True)
class NoLabelPrivacy:
    """No protection, by name: answers with the label itself; epsilon_y is infinite.

    Attributes:
        classes: K; 0 where labels are numbers.
    """

    name: ClassVar[str] = "none"
    unsafe: ClassVar[bool] = True

    classes: int

    @classmethod
    def from_settings(cls, settings: LabelSettings, *, classes: int) -> "NoLabelPrivacy":
        return cls(classes=classes)

    @property
    def epsilon(self) -> float:
        return math.inf

    @property
    def stages(self) -> int:
        return 1

    def answer(
        self, labels_N: torch.Tensor, *, key: bytes, prior_NK: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.classes:
            check_labels(labels_N, self.classes)
        return labels_N

    def statement(self) -> str:
        return "no label DP"


@dataclass(frozen=True, kw_only=True)
class LabelResponse:
    """K-ary randomised response: each label is kept or replaced by chance, once, before training.

    Against: whoever reads anything that the labels move afterwards, the released representations
    and the finished model included. Guarantee: epsilon_y label differential privacy, delta 0,
    replace-one label, features public. As every later step reads the randomised labels only, it
    holds for any number of epochs and composes with nothing. It says nothing of features. Test
    accuracy must be taken on untouched labels that train nothing.

    Attributes:
        epsilon: epsilon_y, above 0 and at most 40.
        classes: K, at least 2.
    """

    name: ClassVar[str] = "randomised_response"
    unsafe: ClassVar[bool] = False

    epsilon: float
    classes: int

    def __post_init__(self) -> None:
        check_strength(self.epsilon, self.classes)

    @classmethod
    def from_settings(cls, settings: LabelSettings, *, classes: int) -> "LabelResponse":
        assert settings.epsilon is not None
        return cls(epsilon=settings.epsilon, classes=classes)

    @property
    def stages(self) -> int:
        return 1  # everything is answered before training

    @property
    def keep_probability(self) -> float:
        """e^eps / (e^eps + K - 1), K-ary randomised response (Kairouz, Oh and Viswanath 2016)."""
        return 1 - self.replace_probability

    @property
    def replace_probability(self) -> float:
        """(K - 1) / (e^eps + K - 1): that some other class is answered."""
        return (self.classes - 1) / (math.exp(self.epsilon) + self.classes - 1)

    def statement(self) -> str:
        return (
            f"label DP, epsilon_y {self.epsilon:g}, delta 0, for any number of epochs: "
            f"{self.classes}-ary randomised response keeps a training label with probability "
            f"{self.keep_probability:.3g}; features are not covered"
        )

    def answer(
        self, labels_N: torch.Tensor, *, key: bytes, prior_NK: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the labels to train on; see `LabelMechanism.answer`.

        The chances are 64-bit integers: the chance of a replacement is rounded up, which only
        lowers epsilon, and which class replaces is uniform to within a share of K / 2^64.
        """
        labels = check_labels(labels_N, self.classes)
        facts = f"{float(self.epsilon)!r} {self.classes}"
        chance, choice = chances(key, facts, labels.astype("<i8"), count=len(labels))
        replaced = is_below(chance, np.full(len(labels), self.replace_probability))
        others = np.uint64(self.classes - 1)
        moved = (labels + 1 + (choice % others).astype(np.int64)) % self.classes
        return torch.from_numpy(np.where(replaced, moved, labels)).to(labels_N.device)
