"""What stands between the active's labels and everything that is trained on them.

Run by: the active, on its training labels, each of them once. A mechanism states its own
epsilon_y and what that covers, so that the report says no more than was done.

Letters: N labels, K classes.
"""

import hashlib
import math
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from protocols.errors import LocalProtocolError
from protocols.randomness import keystream
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.privacy.settings import LARGEST_LABEL_EPSILON as LARGEST_EPSILON

__all__ = [
    "LARGEST_EPSILON",
    "LabelMechanism",
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
