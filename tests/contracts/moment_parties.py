"""All parties of a noisy moment in one process, for tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfed_protocols import moments
from apfed_protocols.conversation import converse
from apfed_protocols.noise import discrete_gaussian
from apfed_protocols.randomness import KEY_BYTES

PEOPLE, OTHERS = bytes(31) + b"\1", bytes(31) + b"\2"
_SESSIONS = count()
_KEY = bytes(32)


def moment_agreement(passives: int = 3, **changes: Any) -> moments.MomentAgreement:
    """Each call names a session of its own: an agreement is used once."""
    usual: dict[str, Any] = {
        "session": f"moment {next(_SESSIONS)}", "receiver": "active", "combiner": "aggregator",
        "dealer": "dealer", "contributors": tuple(f"passive_{k}" for k in range(1, passives + 1)),
        "people": 19, "features": 5, "columns": 3, "noise": 20,
    }  # fmt: skip
    return moments.MomentAgreement(**usual | changes)


@dataclass(frozen=True)
class Planted:
    """What the parties hold, and what must open."""

    signs: NDArray[np.int8]
    votes: Sequence[NDArray[np.float64]]
    noise: Sequence[NDArray[np.int64] | None]

    def moment(self, agreement: moments.MomentAgreement) -> NDArray[np.int64]:
        """The integer sum, computed in the clear; exact where votes are multiples of a step."""
        total = self.signs.astype(np.int64).T @ self.steps(agreement)
        for noise in self.noise:
            total += 0 if noise is None else noise
        return total

    def steps(self, agreement: moments.MomentAgreement) -> NDArray[np.int64]:
        """The sum of the votes in steps."""
        levels = agreement.vote_steps
        return sum(
            (np.trunc(vote * levels).astype(np.int64) for vote in self.votes),
            np.zeros((agreement.people, agreement.columns), np.int64),
        )


def planted(agreement: moments.MomentAgreement, seed: int = 0) -> Planted:
    """Hard votes of some, soft votes of others, and noise where it was agreed."""
    rng = np.random.default_rng(seed)
    shape = (agreement.people, agreement.columns)
    votes = []
    for k in range(len(agreement.contributors)):
        hard = np.eye(agreement.columns)[rng.integers(0, agreement.columns, agreement.people)]
        soft = rng.dirichlet(np.ones(agreement.columns), agreement.people)
        sign = rng.choice((-1, 1), shape) if agreement.signed else 1
        votes.append(sign * (soft if k % 2 else hard))
    moment = (agreement.features, agreement.columns)
    noise = [
        discrete_gaussian(
            _KEY, bytes([seed]), name.encode(), deviation=agreement.noise, shape=moment
        )
        if agreement.noise
        else None
        for name in agreement.contributors
    ]
    signs = rng.choice((-1, 1), (agreement.people, agreement.features)).astype(np.int8)
    return Planted(signs, votes, noise)


@dataclass(frozen=True)
class Overheard:
    """Every message of one moment, and what opened."""

    seeds: bytes
    sign_seed: bytes
    shares: Sequence[bytes]
    votes: dict[str, bytes]
    signs: bytes
    answer: bytes
    opened: NDArray[np.int64]


class MomentParties:
    """All roles of one moment after setup; what they send is kept on the way."""

    def __init__(self, agreement: moments.MomentAgreement) -> None:
        self.agreement = agreement
        self.receiver = moments.MomentReceiver(agreement)
        self.combiner = moments.MomentCombiner(agreement)
        self.dealer = moments.MomentDealer(agreement)
        self.contributors = {
            name: moments.MomentContributor(agreement, name) for name in agreement.contributors
        }
        others = {"active": self.receiver, "aggregator": self.combiner, "dealer": self.dealer}
        converse({**others, **self.contributors})

    def contribute(self, held: Planted, people: bytes = PEOPLE) -> dict[str, bytes]:
        each = zip(self.contributors.items(), held.votes, held.noise, strict=True)
        return {name: role.contribute(votes, people, noise) for (name, role), votes, noise in each}

    def play(self, held: Planted) -> Overheard:
        """One function that plays all roles, in the order of the protocol."""
        seeds, sign_seed, *shares = (out.body for out in self.dealer.deal())
        votes = self.contribute(held)
        signs = self.receiver.ask(sign_seed, held.signs, PEOPLE)
        for block in shares:
            self.receiver.take(block)
        answer = self.combiner.answer(seeds, votes, signs, PEOPLE)
        opened = self.receiver.open(answer)
        return Overheard(seeds, sign_seed, shares, votes, signs, answer, opened)

    def play_with_bits(
        self, held: Planted, bits: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What an active opens that sends any bits for e, and the signs sigma that they make.

        `bits` chooses them from the packed signs alpha.
        """
        agreed, frames = self.agreement, moments.MomentFrames(self.agreement)
        seeds, sign_seed, *shares = (out.body for out in self.dealer.deal())
        votes = self.contribute(held)
        alpha = moments.hiding_bits(agreed, sign_seed[-KEY_BYTES:])
        e_packed = bits(alpha)
        vars(self.receiver)["_asked"] = (e_packed ^ alpha, e_packed, PEOPLE)
        for block in shares:
            self.receiver.take(block)
        asked = frames.pack(moments.MessageKind.SIGNS, e_packed.tobytes(), people=PEOPLE)
        opened = self.receiver.open(self.combiner.answer(seeds, votes, asked, PEOPLE))
        sigma = np.unpackbits(e_packed ^ alpha, count=agreed.people * agreed.features)
        return opened, 1 - 2 * sigma.astype(np.int64).reshape(agreed.people, agreed.features)
