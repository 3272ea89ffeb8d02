"""What every secure sum costs, against the way that TenSEAL's tutorials show.

A case `NAME/mM` is the whole path of one sum of M contributions of 128 x 256 float32 in one
thread: clip, quantise, encrypt, serialise, check, combine, decode. `ratio` is the tutorial's
time over the case's, each the fastest of several taken in turns (what else a machine does only
adds to short times, and more to some than to others); the tutorial is CKKS with N = 8192, primes
[60, 40, 40, 60] and `tolist()`. `bytes_per_value` is of what one passive sends. With the pool,
zeros were encrypted before the clock starts; with recovery, nobody falls silent. Longer runs
add other M and D. `share/NAME` is what one sum adds to a training step of APFed-C on
Fashion-MNIST in batches of 128, when passives encrypt at the same time: one contribution,
combine and decode over the step; `share` is its `ratio` once more, 0.05 for 5 %.
"""

import importlib.util
import itertools
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import numpy as np
import tenseal as ts
from numpy.typing import NDArray

from apfed_bench.parties import training_step
from apfed_bench.rows import (
    Bench,
    Group,
    Row,
    clock_step,
    interleave,
    median_ratio,
    quotient,
    row,
    single,
    why_no_crypten,
)
from apfed_protocols.conversation import converse
from apfed_protocols.errors import UnsafeChoiceWarning
from apfed_protocols.sums import SECURE_SUMS, StepBinding, SumAgreement
from apfed_protocols.sums.homomorphic import Encrypter
from secure_apfed.seeds import one_thread

__all__ = [
    "BENCH", "CASES", "ON_CRYPTEN", "OurPath", "PackedPaillier", "Shape", "SumPath", "TutorialPath",
    "Values", "why_no_paillier",
]  # fmt: skip

Shape = tuple[int, int]
Values = list[NDArray[np.float32]]
Parts = tuple[float, float, float]
"""Seconds to contribute, to combine and to decode."""
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
_KEY_BITS = 2048
_BITS = 16
_LEVELS = 2 ** (_BITS - 1) - 1
_SHAPE = (128, 256)
_PASSIVES = 4
_OTHER_PASSIVES = (2, 8, 16, 64)
_OTHER_SHAPES = ((128, 64), (256, 1024), (256, 15_360))
_STEP_SHAPE = (128, 64)
_TURN = 0.01
_FINE, _STEPS = 1e-4, 50
_TUTORIAL = "tutorial"
_PAILLIER = "phe-packed/m4"


class SumPath:
    """One way through a whole sum; `run` returns the seconds of its three parts."""

    contribution_bytes: int

    def prepare(self) -> None:
        """What a party does while it waits; most ways have nothing to do."""

    def run(self) -> Parts:
        raise NotImplementedError


class OurPath(SumPath):
    """A sum of the table with all its checks."""

    def __init__(self, name: str, values: Values) -> None:
        self._values, self._pool = values, name.endswith("+pool")
        agreement = SumAgreement(
            session="bench", receiver="active", combiner="aggregator", clip_norm=1.0,
            contributors=tuple(f"passive_{k}" for k in range(len(values))),
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnsafeChoiceWarning)
            described = SECURE_SUMS[CASES[name]](agreement)
        self._rounds = described.rounds
        self._receiver, self._combiner = described.receiver(), described.combiner()
        self._contributors = {me: described.contributor(me) for me in agreement.contributors}
        roles = {agreement.receiver: self._receiver, agreement.combiner: self._combiner}
        converse({**roles, **self._contributors})
        self._shape = (values[0].shape[0], values[0].shape[1])
        self._steps = itertools.count()

    def prepare(self) -> None:
        for contributor in self._contributors.values() if self._pool else ():
            assert isinstance(contributor, Encrypter)
            contributor.prepare(self._shape)

    def run(self) -> Parts:
        binding = StepBinding(
            session="bench", step=next(self._steps), rows=bytes(32), message=bytes(32)
        )
        lap = _laps()
        pairs = zip(self._contributors.items(), self._values, strict=True)
        frames = {me: role.contribute(values, binding) for (me, role), values in pairs}
        contributed, added, bodies = lap(), 0.0, frames
        if self._rounds == 2:
            requests = self._combiner.ask(frames, binding.digest)
            added += lap()
            bodies = {me: self._contributors[me].answer(requests[me]) for me in requests}
            contributed += lap()
        combined = self._combiner.combine(bodies, binding.digest)
        added += lap()
        self._receiver.decode(combined, self._shape, binding)
        decoded = lap()
        sent = [frames, bodies] if self._rounds == 2 else [frames]
        self.contribution_bytes = sum(len(next(iter(parts.values()))) for parts in sent)
        return contributed, added, decoded


class TutorialPath(SumPath):
    """CKKS as tutorials of TenSEAL show it: one vector, whose warning is not printed."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._context = ts.context(
            ts.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=[60, 40, 40, 60], n_threads=1
        )
        self._context.global_scale = 2.0**40

    def run(self) -> Parts:
        with redirect_stdout(StringIO()):
            lap = _laps()
            sent = [
                ts.ckks_vector(self._context, values.reshape(-1).tolist()).serialize()
                for values in self._values
            ]
            contributed = lap()
            total = ts.ckks_vector_from(self._context, sent[0])
            for blob in sent[1:]:
                total += ts.ckks_vector_from(self._context, blob)
            combined = total.serialize()
            added = lap()
            np.array(ts.ckks_vector_from(self._context, combined).decrypt())
            self.contribution_bytes = len(sent[0])
            return contributed, added, lap()


def _laps() -> Callable[[], float]:
    """Seconds since the last call, or since this one."""
    began = [time.perf_counter()]

    def lap() -> float:
        began.append(time.perf_counter())
        return began[-1] - began[-2]

    return lap


def why_no_paillier() -> str | None:
    """Why Paillier cannot be measured here, or None."""
    if importlib.util.find_spec("phe") is None:
        return "phe is not installed; pip install phe"
    return None


class PackedPaillier:
    """The peer of other federated learning systems: Paillier, with many fields in one number.

    After Zhang et al. 2020 (BatchCrypt), section 4: signed fixed-point values are shifted to be
    non-negative and packed side by side with room for all `passives`. One 2048-bit key. Library:
    `phe`, which is no dependency of this project.
    """

    def __init__(self, *, passives: int) -> None:
        # phe ships no types and is imported only where it is installed
        from phe import paillier  # type: ignore[import-not-found, import-untyped, unused-ignore]

        self._public, self._private = paillier.generate_paillier_keypair(n_length=_KEY_BITS)
        self._encrypted_number = paillier.EncryptedNumber
        self._width = _BITS + math.ceil(math.log2(passives))
        self._fields = (_KEY_BITS - 2) // self._width

    def contribution_bytes(self, values: int) -> int:
        """Bytes of the ciphertexts of one vector; each is a number modulo n^2."""
        return -(-values // self._fields) * 2 * _KEY_BITS // 8

    def add(self, values: list[NDArray[np.float32]]) -> NDArray[np.float64]:
        """Encrypt, serialise, add and decrypt, as one path; values lie in [-1, 1]."""
        sent = [self._encrypt(vector) for vector in values]
        totals = sent[0]
        for blobs in sent[1:]:
            pairs = zip(totals, blobs, strict=True)
            totals = [self._bytes(self._number(a) + self._number(b)) for a, b in pairs]
        return self._decrypt(totals, len(values), values[0].size)

    def _encrypt(self, values: NDArray[np.float32]) -> list[bytes]:
        shifted = (np.rint(values.reshape(-1) * _LEVELS).astype(np.int64) + _LEVELS).tolist()
        blobs = []
        for start in range(0, len(shifted), self._fields):
            places = enumerate(shifted[start : start + self._fields])
            packed = sum(value << (self._width * place) for place, value in places)
            blobs.append(self._bytes(self._public.encrypt(packed)))
        return blobs

    def _decrypt(self, blobs: list[bytes], addends: int, count: int) -> NDArray[np.float64]:
        mask = 2**self._width - 1
        fields = [
            number >> (self._width * place) & mask
            for number in (self._private.decrypt(self._number(blob)) for blob in blobs)
            for place in range(self._fields)
        ]
        sums: NDArray[np.float64] = np.array(fields[:count], dtype=np.float64)
        real: NDArray[np.float64] = (sums - addends * _LEVELS) / _LEVELS
        return real

    def _bytes(self, number: Any) -> bytes:
        raw: int = number.ciphertext()
        return raw.to_bytes(2 * _KEY_BITS // 8, "big")

    def _number(self, blob: bytes) -> Any:
        return self._encrypted_number(self._public, int.from_bytes(blob, "big"))


def _groups(quick: bool) -> Sequence[Group]:
    """Ratios at M = 4, shares of a step; unless `quick`, other M and D, and Paillier."""
    brief = [
        _table(_PASSIVES, 9 if quick else 31),
        single(_PAILLIER, _paillier, quick),
        _of_each_sum("share/{}", partial(_shares, 3 if quick else 21)),
    ]
    if quick:
        return brief
    others = [_table(passives, 3) for passives in _OTHER_PASSIVES]
    for rows, size in _OTHER_SHAPES:
        form = f"{{}}/m{_PASSIVES}/{rows}x{size}"
        others.append(_of_each_sum(form, partial(_sizes, (rows, size))))
    return brief + others


BENCH = Bench(
    groups=_groups,
    ratio="times faster than the peer; of `share/...`, the part of a step",
    fields=("bytes_per_value",),
)


def _of_each_sum(
    form: str, measure: Callable[[Mapping[str, str]], Iterator[Row]], *more: str
) -> Group:
    """The group of a case for each sum, and some more; `measure` gets case by name of a sum.

    Without CrypTen the sum that needs it is a row with the reason.
    """
    case_of = {name: form.format(name) for name in (*CASES, *more)}

    def measured(wanted: Collection[str]) -> Iterator[Row]:
        named = {name: case for name, case in case_of.items() if case in wanted}
        if ON_CRYPTEN in named and (reason := why_no_crypten()):
            yield row(named.pop(ON_CRYPTEN), reason=reason)
        if named:
            with one_thread():
                yield from measure(named)

    return Group(tuple(case_of.values()), measured)


def _table(passives: int, repetitions: int) -> Group:
    form = f"{{}}/m{passives}"
    return _of_each_sum(form, partial(_against_tutorial, passives, repetitions), _TUTORIAL)


def _against_tutorial(passives: int, repetitions: int, case_of: Mapping[str, str]) -> Iterator[Row]:
    values = _values(passives, _SHAPE)
    ours = {name: OurPath(name, values) for name in case_of if name != _TUTORIAL}
    paths: dict[str, SumPath] = {**ours, _TUTORIAL: TutorialPath(values)}
    seconds: dict[str, list[float]] = {name: [] for name in paths}
    for repetition in range(-1, repetitions):
        for name, path in paths.items():
            spent = sum(_turn(path))
            if repetition >= 0:
                seconds[name].append(spent)
    for name, case in case_of.items():
        ratio, sent = quotient(min(seconds[_TUTORIAL]), min(seconds[name])), paths[name]
        yield row(
            case, min(seconds[name]), peer=f"{_TUTORIAL}/m{passives}", ratio=ratio,
            **_size(sent.contribution_bytes, _SHAPE),
        )  # fmt: skip


def _turn(path: SumPath) -> Parts:
    """Those of the fastest run of a turn.

    Short paths run several times, so that caches are warm. Where the clock moves too coarsely to
    tell one run, they run longer, and the mean stands for all.
    """
    enough = _TURN if (coarse := clock_step()) < _FINE else _STEPS * coarse
    runs: list[Parts] = []
    began = time.perf_counter()
    while not runs or time.perf_counter() - began < enough:
        path.prepare()
        runs.append(path.run())
    if enough == _TURN:
        return min(runs, key=sum)
    contribute, combine, decode = (sum(part) / len(runs) for part in zip(*runs, strict=True))
    return contribute, combine, decode


def _sizes(shape: Shape, case_of: Mapping[str, str]) -> Iterator[Row]:
    """Each sum once at another size of a contribution, without the tutorial."""
    values = _values(_PASSIVES, shape)
    for name, case in case_of.items():
        path = OurPath(name, values)
        spent = sum(_turn(path))
        yield row(case, spent, **_size(path.contribution_bytes, shape))


def _shares(repetitions: int, case_of: Mapping[str, str]) -> Iterator[Row]:
    step, images = training_step()
    paths = {name: OurPath(name, _values(_PASSIVES, _STEP_SHAPE)) for name in case_of}
    costs: dict[str, list[float]] = {name: [] for name in paths}
    steps = []
    for repetition in range(-1, repetitions):
        steps.append(interleave({"step": step}, repetitions=1, warm_up=0)["step"][0])
        for name, path in paths.items():
            contribute, combine, decode = _turn(path)
            if repetition >= 0:
                costs[name].append(contribute / _PASSIVES + combine + decode)
    for name, spent in costs.items():
        whole = min(steps[1:])
        share = quotient(min(spent), whole)
        yield row(
            case_of[name], min(spent), peer="training step", ratio=share, share=share,
            peer_seconds=whole, images=images,
        )  # fmt: skip


@one_thread()
def _paillier(case: str, quick: bool) -> Row:
    reason = "it takes minutes; run without --quick" if quick else why_no_paillier()
    if reason is not None:
        return row(case, reason=reason)
    peer = PackedPaillier(passives=_PASSIVES)
    values = _values(_PASSIVES, _SHAPE)
    calls = {_TUTORIAL: TutorialPath(values).run, case: lambda: peer.add(values)}
    seconds = interleave(calls, repetitions=1, warm_up=0)
    return row(
        case, seconds[case][0], peer=f"{_TUTORIAL}/m{_PASSIVES}",
        ratio=median_ratio(seconds[_TUTORIAL], seconds[case]),
        **_size(peer.contribution_bytes(_SHAPE[0] * _SHAPE[1]), _SHAPE),
    )  # fmt: skip


def _size(sent: int, shape: Shape) -> dict[str, Any]:
    return {"sent": sent, "bytes_per_value": sent / (shape[0] * shape[1])}


def _values(passives: int, shape: Shape) -> Values:
    """Gradients of about a tenth of the clip bound."""
    rng = np.random.default_rng(0)
    scale = 0.1 / shape[1] ** 0.5
    return [
        rng.normal(scale=scale, size=shape).astype(np.float32, copy=False) for _ in range(passives)
    ]
