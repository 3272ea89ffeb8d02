"""All parties of a secure sum in one process, for tests."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.conversation import converse
from apfed_protocols.errors import UnsafeChoiceWarning
from apfed_protocols.sums import (
    SECURE_SUMS,
    PlainSum,
    SecureSum,
    StepBinding,
    SumAgreement,
    SumCombiner,
    SumContributor,
    SumReceiver,
)
from tests.with_crypten import usable

CHOICES: Mapping[str, Callable[[SumAgreement], SecureSum]] = {
    **{name: SECURE_SUMS[name] for name in usable(SECURE_SUMS)},
    "plain, quantised": partial(PlainSum, quantise=True),
}


def agreement(passives: int = 3, **changes: Any) -> SumAgreement:
    usual = SumAgreement(
        session="test",
        receiver="active",
        combiner="aggregator",
        contributors=tuple(f"passive_{k}" for k in range(1, passives + 1)),
        clip_norm=1.0,
    )
    return replace(usual, **changes)


def binding(step: int, *, session: str = "test", message: int = 0) -> StepBinding:
    return StepBinding(session=session, step=step, rows=bytes(32), message=bytes([message] * 32))


def make(choice: str, agreed: SumAgreement) -> SecureSum:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        return CHOICES[choice](agreed)


class Parties:
    """The three kinds of role after setup, and a step counter that only goes up."""

    def __init__(self, secure_sum: SecureSum) -> None:
        self.sum = secure_sum
        agreed = secure_sum.agreement
        self.names = agreed.contributors
        self.receiver: SumReceiver = secure_sum.receiver()
        self.combiner: SumCombiner = secure_sum.combiner()
        self.contributors: dict[str, SumContributor] = {
            name: secure_sum.contributor(name) for name in self.names
        }
        roles = {agreed.receiver: self.receiver, agreed.combiner: self.combiner}
        converse({**roles, **self.contributors})
        self._step = 0

    def next(self) -> StepBinding:
        self._step += 1
        return binding(self._step, session=self.sum.agreement.session)

    def contribute(
        self, values: Sequence[NDArray[Any]], bound: StepBinding | Mapping[str, StepBinding]
    ) -> dict[str, bytes]:
        return {
            name: self.contributors[name].contribute(
                value, bound if isinstance(bound, StepBinding) else bound[name]
            )
            for name, value in zip(self.names, values, strict=True)
        }

    def combine(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None = None
    ) -> bytes:
        """The aggregator's part, and the passives' second round where there is one.

        Answers come in the order of the contributions.
        """
        if self.sum.rounds == 1:
            return self.combiner.combine(contributions, binding_digest)
        requests = self.combiner.ask(contributions, binding_digest)
        answers = {name: self.contributors[name].answer(requests[name]) for name in contributions}
        return self.combiner.combine(answers, binding_digest)

    def add(self, values: Sequence[NDArray[Any]]) -> NDArray[Any]:
        bound = self.next()
        combined = self.combine(self.contribute(values, bound), bound.digest)
        rows, columns = values[0].shape
        return self.receiver.decode(combined, (rows, columns), bound)


@cache
def _shared(choice: str, passives: int, bits: int) -> Parties:
    return Parties(make(choice, agreement(passives, bits=bits)))


def parties(choice: str, passives: int = 3, bits: int = 16) -> Parties:
    """Parties that tests share; each sum takes a fresh step, and none is refused.

    Those of two rounds are not shared: a step that a test leaves unfinished ends their session.
    """
    if SECURE_SUMS.get(choice, PlainSum).rounds == 2:
        return Parties(make(choice, agreement(passives, bits=bits)))
    return _shared(choice, passives, bits)


def fresh_parties(choice: str) -> Parties:
    """Parties that no other test uses: a receiver that refused a sum opens no further one."""
    return Parties(parties(choice).sum)


def random_values(passives: int, shape: tuple[int, int] = (3, 5), seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for _ in range(passives)]
