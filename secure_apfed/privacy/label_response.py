"""K-ary randomised response on labels: each is kept or replaced by chance, once, before training.

Run by: the active, on its training labels. Against: whoever reads anything that the labels
move afterwards, the released representations and the finished model included.

Guarantee: epsilon_y label differential privacy, delta 0, replace-one label, features public.
As every later step reads the randomised labels only, it holds for any number of epochs and
composes with nothing. It says nothing of features. Test accuracy must be taken on
untouched labels that train nothing.

Letters: N rows, K classes.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch

from protocols.errors import LocalProtocolError
from protocols.randomness import keystream
from secure_apfed.errors import ConfigError, DataError

__all__ = ["LabelResponse", "randomise_labels"]

_PURPOSE = b"secure-apfed label response v1"
_WORD = 2**64
_LARGEST_EPSILON = 40.0


@dataclass(frozen=True, kw_only=True)
class LabelResponse:
    """What happens to one label, apart from any randomness.

    Attributes:
        epsilon: epsilon_y, above 0 and at most 40.
        classes: K, at least 2.
    """

    epsilon: float
    classes: int

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= _LARGEST_EPSILON:
            raise ConfigError(
                f"epsilon_y lies above 0 and up to {_LARGEST_EPSILON:g}, got {self.epsilon}; "
                "leave label privacy out for none"
            )
        if self.classes < 2:
            raise ConfigError(f"randomised response needs at least 2 classes, got {self.classes}")

    @property
    def keep_probability(self) -> float:
        """e^eps / (e^eps + K - 1), K-ary randomised response (Kairouz, Oh and Viswanath 2016)."""
        return 1 - self.replace_probability

    @property
    def replace_probability(self) -> float:
        """(K - 1) / (e^eps + K - 1): that some other class is answered."""
        return (self.classes - 1) / (math.exp(self.epsilon) + self.classes - 1)

    def statement(self) -> str:
        """What is guaranteed, in words for the report."""
        return (
            f"label DP, epsilon_y {self.epsilon:g}, delta 0, for any number of epochs: "
            f"{self.classes}-ary randomised response keeps a training label with probability "
            f"{self.keep_probability:.3g}; features are not covered"
        )


def randomise_labels(
    labels_N: torch.Tensor, response: LabelResponse, *, key: bytes
) -> torch.Tensor:
    """Return the labels to train on.

    A function of the key and all labels, so that a resumed run trains on the same ones, and
    that other labels under the same key get independent chances. The chances are 64-bit
    integers: the chance of a replacement is rounded up, which only lowers epsilon, and which
    class replaces is uniform to within a share of K / 2^64.

    Args:
        labels_N: int64 of shape (N,), each in 0..K-1.
        response: the mechanism.
        key: 32 secret bytes; whoever has them and the result can tell which labels were kept.

    Raises:
        LocalProtocolError: not a vector of int64, or a key of the wrong length.
        DataError: a label outside 0..K-1.
    """
    if labels_N.dtype != torch.int64 or labels_N.ndim != 1:
        raise LocalProtocolError(
            f"labels are int64 of shape (N,), got {labels_N.dtype} of shape {tuple(labels_N.shape)}"
        )
    labels = labels_N.cpu().numpy()
    outside = (labels < 0) | (labels >= response.classes)
    if outside.any():
        row = int(outside.argmax())
        raise DataError(
            f"row {row} has label {labels[row]}, expected 0..{response.classes - 1}; "
            "map the labels to consecutive classes first"
        )
    content = hashlib.blake2b(labels.astype("<i8").tobytes()).digest()
    facts = f"{response.epsilon!r} {response.classes}".encode()
    stream = keystream(key, _PURPOSE, facts, content, length=16 * len(labels))
    chance, choice = np.frombuffer(stream, dtype="<u8").reshape(2, -1)
    replaced = chance < np.uint64(math.ceil(response.replace_probability * _WORD))
    others = np.uint64(response.classes - 1)
    moved = (labels + 1 + (choice % others).astype(np.int64)) % response.classes
    return torch.from_numpy(np.where(replaced, moved, labels)).to(labels_N.device)
