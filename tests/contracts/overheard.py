"""A sum whose every message is kept, and the secrets that lived while it was sent."""

from typing import Any

import numpy as np

from apfed_protocols.conversation import Outgoing
from apfed_protocols.sums import SecureSum, StepBinding
from tests.contracts.sum_secrets import secrets_alive

__all__ = ["OVERHEARD_SHAPE", "Overheard"]

OVERHEARD_SHAPE = (4, 8)


class Overheard:
    """All roles of one sum, and every byte that any of them sends."""

    def __init__(self, secure_sum: SecureSum) -> None:
        self.sum = secure_sum
        self.names = self.sum.agreement.contributors
        self.roles: dict[str, Any] = {
            "active": self.sum.receiver(),
            "aggregator": self.sum.combiner(),
            **{name: self.sum.contributor(name) for name in self.names},
        }
        self.messages: list[Outgoing] = []
        self.frames: list[bytes] = []
        self.secrets = secrets_alive()
        queue = [(me, out) for me, role in self.roles.items() for out in role.start()]
        while queue:
            sender, out = queue.pop(0)
            self.messages.append(out)
            self.frames.append(out.body)
            answers = self.roles[out.receiver].receive(sender, out.body)
            queue += [(out.receiver, answer) for answer in answers]

    def step(self, bound: StepBinding) -> None:
        self.secrets |= secrets_alive()
        values = np.random.default_rng(bound.step).normal(size=OVERHEARD_SHAPE)
        bodies = {name: self.roles[name].contribute(values, bound) for name in self.names}
        self.secrets |= secrets_alive()
        self.frames += bodies.values()
        if self.sum.rounds == 2:
            requests = self.roles["aggregator"].ask(bodies)
            bodies = {name: self.roles[name].answer(requests[name]) for name in requests}
            self.frames += [*requests.values(), *bodies.values()]
        self.frames.append(self.roles["aggregator"].combine(bodies))
        self.roles["active"].decode(self.frames[-1], OVERHEARD_SHAPE, bound)

    @property
    def wire(self) -> bytes:
        """All that was sent."""
        return b"".join(self.frames)
