"""Every secret of a sum that lives in this process, and every message that was sent."""

import base64
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import tenseal.sealapi as seal

from apfed_protocols.conversation import Outgoing
from apfed_protocols.seal import RunKey
from apfed_protocols.sums import SecureSum, StepBinding
from apfed_protocols.sums.crypten_sum import CryptenContributor
from apfed_protocols.sums.masked import PairwiseSeeds
from apfed_protocols.sums.recoverable import StepKeys
from apfed_protocols.sums.seal_cipher import SealForm, scratch_file


def secrets_alive() -> set[bytes]:
    """Private keys, pair seeds, self-mask seeds and share keys of all roles in this process."""
    kinds = RunKey, StepKeys, PairwiseSeeds, CryptenContributor
    return {secret for thing in alive(*kinds) for secret in _secrets_of(thing)}


def alive(*kinds: type) -> list[Any]:
    """All objects of these classes in this process; `isinstance` would wake lazy modules."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]


def _secrets_of(thing: Any) -> Iterator[bytes]:
    if isinstance(thing, RunKey):
        yield vars(thing)["_private"].private_bytes_raw()
    elif isinstance(thing, StepKeys):
        yield thing.seed
    elif isinstance(thing, PairwiseSeeds):
        yield from vars(thing).get("_seeds", {}).values()
    elif isinstance(thing, CryptenContributor):
        yield vars(thing)["_secret"]


class SealKeys:
    """Numbers of every secret key that SEAL makes from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._generators: list[Any] = []
        self._genuine = seal.KeyGenerator
        monkeypatch.setattr(seal, "KeyGenerator", self._generator)

    def _generator(self, context: Any) -> Any:
        self._generators.append(self._genuine(context))
        return self._generators[-1]

    def numbers(self) -> set[bytes]:
        keys = (made.secret_key() for made in self._generators)
        return {part for key in keys for part in self.numbers_of(key)}

    @staticmethod
    def numbers_of(key: Any) -> list[bytes]:
        """Two runs of four numbers of a public or secret key, as SEAL keeps them."""
        with scratch_file() as scratch:
            content = SealForm.content(scratch.save(key))
        return [content[-32:], content[-32 * 512 :][:32]]


def shown_in(secrets: Iterable[bytes], told: bytes) -> list[bytes]:
    """The secrets that `told` shows: raw, in hexadecimal, in base64, or as Python prints them."""
    return [
        secret
        for secret in secrets
        if any(form in told for form in (
            secret, secret.hex().encode(), base64.b64encode(secret)[:40],
            repr(secret)[2:-1].encode(),
        ))
    ]  # fmt: skip


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
