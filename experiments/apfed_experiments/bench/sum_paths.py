"""Ways through a whole sum in one process: each sum of the table, and the tutorials' way."""

import itertools
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO

import numpy as np
import tenseal as ts
from numpy.typing import NDArray

from apfed_protocols.conversation import converse
from apfed_protocols.errors import UnsafeChoiceWarning
from apfed_protocols.sums import SECURE_SUMS, StepBinding, SumAgreement
from apfed_protocols.sums.homomorphic import Encrypter

__all__ = ["CASES", "ON_CRYPTEN", "OurPath", "Shape", "SumPath", "TutorialPath", "Values"]

Shape = tuple[int, int]
Values = list[NDArray[np.float32]]

ON_CRYPTEN = "crypten"
# case -> sum of the table
CASES: Mapping[str, str] = {
    "ckks": "ckks",
    "ckks+pool": "ckks",
    "ckks-fast": "bfv",
    "ckks-fast+pool": "bfv",
    "bfv+masks": "bfv + pairwise masks",
    "bfv+masks+pool": "bfv + pairwise masks",
    "masked": "plain + pairwise masks",
    "masked-recovery": "plain + recoverable masks",
    ON_CRYPTEN: "crypten",
    "plain": "plain",
}


class SumPath(ABC):
    """One way through a whole sum; `run` returns the seconds of its three parts."""

    contribution_bytes: int

    def prepare(self) -> None:
        """What a party does while it waits; most ways have nothing to do."""
        return

    @abstractmethod
    def run(self) -> tuple[float, float, float]: ...


class OurPath(SumPath):
    """A sum of the table with all its checks."""

    def __init__(self, name: str, values: Values) -> None:
        self._values, self._pool = values, name.endswith("+pool")
        agreement = SumAgreement(
            session="bench",
            receiver="active",
            combiner="aggregator",
            contributors=tuple(f"passive_{k}" for k in range(len(values))),
            clip_norm=1.0,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnsafeChoiceWarning)
            described = SECURE_SUMS[CASES[name]](agreement)
        self._rounds = described.rounds
        self._receiver, self._combiner = described.receiver(), described.combiner()
        self._contributors = {me: described.contributor(me) for me in agreement.contributors}
        converse(
            {
                agreement.receiver: self._receiver,
                agreement.combiner: self._combiner,
                **self._contributors,
            }
        )
        self._shape = (values[0].shape[0], values[0].shape[1])
        self._steps = itertools.count()

    def prepare(self) -> None:
        for contributor in self._contributors.values() if self._pool else ():
            assert isinstance(contributor, Encrypter)
            contributor.prepare(self._shape)

    def run(self) -> tuple[float, float, float]:
        binding = StepBinding(
            session="bench", step=next(self._steps), rows=bytes(32), message=bytes(32)
        )
        clock = _Clock()
        frames = {
            me: contributor.contribute(values, binding)
            for (me, contributor), values in zip(
                self._contributors.items(), self._values, strict=True
            )
        }
        contributed, added, bodies = clock.lap(), 0.0, frames
        if self._rounds == 2:
            requests = self._combiner.ask(frames, binding.digest)
            added += clock.lap()
            bodies = {me: self._contributors[me].answer(requests[me]) for me in requests}
            contributed += clock.lap()
        combined = self._combiner.combine(bodies, binding.digest)
        added += clock.lap()
        self._receiver.decode(combined, self._shape, binding)
        decoded = clock.lap()
        sent = [frames, bodies] if self._rounds == 2 else [frames]
        self.contribution_bytes = sum(len(next(iter(each.values()))) for each in sent)
        return contributed, added, decoded


class TutorialPath(SumPath):
    """CKKS as tutorials of TenSEAL show it: one vector, whose warning is not printed."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._context = ts.context(
            ts.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=[60, 40, 40, 60], n_threads=1
        )
        self._context.global_scale = 2.0**40

    def run(self) -> tuple[float, float, float]:
        with redirect_stdout(StringIO()):
            clock = _Clock()
            sent = [
                ts.ckks_vector(self._context, values.reshape(-1).tolist()).serialize()
                for values in self._values
            ]
            contributed = clock.lap()
            total = ts.ckks_vector_from(self._context, sent[0])
            for blob in sent[1:]:
                total += ts.ckks_vector_from(self._context, blob)
            combined = total.serialize()
            added = clock.lap()
            np.array(ts.ckks_vector_from(self._context, combined).decrypt())
            self.contribution_bytes = len(sent[0])
            return contributed, added, clock.lap()


@dataclass
class _Clock:
    """Seconds between one lap and the next."""

    began: float = 0.0

    def __post_init__(self) -> None:
        self.began = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        spent, self.began = now - self.began, now
        return spent
