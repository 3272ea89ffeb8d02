"""Votes by randomised response: each is kept or replaced by chance before it leaves its party.

Run by: every passive, on its hard votes. Against: everybody who reads single answers, the active
and the aggregator included; nobody has to be trusted with a sum.

Guarantee: each answer is epsilon-DP, delta 0, for the replacement of one vote by any other or by
none, WITH THE LABELLER HELD FIXED. What that says of a person depends on the labeller:
`secure_apfed.labellers.guarantee`.

Letters: M parties, U rows, K classes.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.randomness import derive_key
from secure_apfed.privacy.label_mechanism import LabelResponse, chances, check_strength

__all__ = ["VoteResponse"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class VoteResponse:
    """K-ary randomised response on a hard vote; who has no vote answers any class alike.

    That, too, keeps each answer's ratio within e^epsilon: 1 / K lies between the two probabilities
    (e^epsilon + K - 1)^-1 and e^epsilon (e^epsilon + K - 1)^-1 of randomised response.

    Attributes:
        epsilon: of one answer, above 0 and at most 40.
        classes: K, at least 2.
        mu: infinite, for its account is that of pure DP: epsilons add up.
    """

    mu: ClassVar[float] = math.inf
    accountant: ClassVar[str] = "pure"

    epsilon: float
    classes: int

    def __post_init__(self) -> None:
        check_strength(self.epsilon, self.classes)

    @property
    def noise_multiplier(self) -> float:
        """1 / epsilon: the scale of Laplace noise of that epsilon, in sensitivities."""
        return 1 / self.epsilon

    @property
    def keep_probability(self) -> float:
        return self._response.keep_probability

    @property
    def other_probability(self) -> float:
        """Of each single class that was not voted for."""
        return self._response.replace_probability / (self.classes - 1)

    @property
    def _response(self) -> LabelResponse:
        return LabelResponse(epsilon=self.epsilon, classes=self.classes)

    def epsilon_of(self, releases: int, delta: float) -> float:
        """Epsilon of `releases` answers about one person; any delta does."""
        return releases * self.epsilon

    def answer(self, votes_UK: Floats, *, key: bytes, about: bytes) -> Integers:
        """Return one class a row; the same arguments give the same answers.

        Args:
            votes_UK: unit vectors, or zeros for no vote; see `labellers.hard`.
            key: 32 secret bytes; whoever has them can tell what was kept.
            about: what names the people and the question. Answers about other people, or to another
                question, must never share their chance: where they did, equal answers would tell
                that votes are equal.

        Raises:
            LocalProtocolError: votes of another form, or a key of the wrong length.
        """
        if votes_UK.ndim != 2 or votes_UK.shape[1] != self.classes:
            raise LocalProtocolError(
                f"votes are of shape (rows, {self.classes}), got {votes_UK.shape}"
            )
        silent_U = ~votes_UK.any(axis=1)
        if not (np.isin(votes_UK, (0.0, 1.0)).all() and (votes_UK.sum(axis=1) <= 1).all()):
            raise LocalProtocolError("votes under randomised response are unit vectors or zeros")
        own_key = derive_key(key, b"vote response", about)
        _, choice_U = chances(own_key, "no vote", votes_UK.astype("<f8"), count=len(votes_UK))
        any_U = (choice_U % np.uint64(self.classes)).astype(np.int64)
        # Randomised response maps a uniform class to a uniform class.
        asked_U = torch.from_numpy(np.where(silent_U, any_U, votes_UK.argmax(axis=1)))
        answers: Integers = self._response.answer(asked_U, key=own_key).numpy()
        return answers

    def estimate(self, answers_MU: Integers) -> Floats:
        """Return an unbiased estimate_UK of the sum of the M votes; no vote counts 1/K each.

        An answer is class k with probability q + (p - q) v_k, so (count_k - M q) / (p - q).
        """
        counts_UK = (answers_MU[:, :, None] == np.arange(self.classes)).sum(axis=0)
        p, q = self.keep_probability, self.other_probability
        return np.asarray((counts_UK - len(answers_MU) * q) / (p - q), dtype=np.float64)

    def variance(self, votes_UK: Floats, *, parties: int) -> Floats:
        """Return the variance_UK of the estimate, given the sum of the votes of all parties.

        It is linear in the sum: with an unbiased estimate in its place it is unbiased, too. Each
        party without a vote adds (K - 1) / K^2 to what stands here.
        """
        p, q = self.keep_probability, self.other_probability
        total_UK = votes_UK * p * (1 - p) + (parties - votes_UK) * q * (1 - q)
        return np.asarray(total_UK / (p - q) ** 2, dtype=np.float64)

    def __str__(self) -> str:
        return f"{self.classes}-ary randomised response of epsilon {self.epsilon:.4g} a vote"

    def statement(self) -> str:
        return (
            f"each vote is answered by {self}, kept with probability {self.keep_probability:.3g}: "
            "delta 0, against everybody, who reads single answers included, with the labeller held "
            "fixed"
        )
