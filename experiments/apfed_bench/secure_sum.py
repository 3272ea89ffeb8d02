"""Cost of every secure sum, against a sum as TenSEAL's tutorials show it.

A case `NAME/m4` is the whole path of one sum of four contributions of 128 x 256 float32, one of
`NAME/m50` of fifty of 256 x 64, one of `NAME/m3` of three of 64 x 16, a small batch; all parties
in one thread: clip, quantise, encrypt, serialise, check, combine, decode. `ratio` is the tutorial's
time over the case's, each the fastest of several taken in turns (what else a machine does only adds
to short times, and more to some than to others); the tutorial is CKKS with N = 8192, primes [60,
40, 40, 60] and `tolist()`. `bytes_per_value` is of what one passive sends. With recovery nobody
falls silent.
"""

import itertools
import math
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import redirect_stdout
from functools import partial
from io import StringIO

import numpy as np
import tenseal as ts
from numpy.typing import NDArray

from apfed_bench.rows import (
    Bench,
    Group,
    Row,
    divide_seconds,
    find_crypten_error,
    make_row,
    measure_clock_step,
)
from apfed_protocols.conversation import converse
from apfed_protocols.errors import UnsafeChoiceWarning
from apfed_protocols.sums import SECURE_SUMS, StepBinding, SumAgreement
from secure_apfed.base.seeds import one_thread

Shape = tuple[int, int]
Contributions = list[NDArray[np.float32]]
_CRYPTEN_CASE = "crypten"
# case -> sum of the table
CASES: Mapping[str, str] = {
    "ckks": "ckks",
    "ckks-fast": "bfv",
    "bfv+masks": "bfv + pairwise masks",
    "masked": "plain + pairwise masks",
    "masked-recovery": "plain + recoverable masks",
    _CRYPTEN_CASE: "crypten",
    "plain": "plain",
}
_SHAPE_BY_PASSIVE_COUNT: Mapping[int, Shape] = {
    3: (64, 16),
    4: (128, 256),
    50: (256, 64),
}  # by how many contribute
_MIN_TURN_S = 0.01  # a turn lasts at least so long
_FINE_CLOCK_S = 1e-4  # a clock with smaller steps can measure a single run
_CLOCK_STEPS_PER_TURN = 50  # with a coarser clock a turn lasts so many of its steps
_TUTORIAL = "tutorial"


class OurSumRun:
    """The whole path of one of our secure sums, from the contributions to their sum, with all
    checks.

    Attributes:
        contribution_bytes: number of bytes that one contributor sent in the last run.
    """

    contribution_bytes: int

    def __init__(self, name: str, contributions: Contributions) -> None:
        """Make all roles of a sum and run their set-up.

        `name`: key of `CASES`. `contributions`: contribution of each passive, one array each.
        """
        self._contributions = contributions
        agreement = SumAgreement(
            session="bench",
            receiver="active",
            aggregator="aggregator",
            clip_norm=1.0,
            contributors=tuple(f"passive_{k}" for k in range(len(contributions))),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnsafeChoiceWarning)
            sum_class = SECURE_SUMS[CASES[name]]
            # Unsafe sums are measured, too: this consents that one party may read a contribution.
            sum_scheme = sum_class(agreement, allow_single_reader=not sum_class.needs_all)
        self._round_count = sum_scheme.rounds
        self._receiver = sum_scheme.make_receiver()
        self._aggregator = sum_scheme.make_aggregator()
        self._role_by_contributor = {
            name: sum_scheme.make_contributor(name) for name in agreement.contributors
        }
        roles = {agreement.receiver: self._receiver, agreement.aggregator: self._aggregator}
        converse({**roles, **self._role_by_contributor})
        self._shape = (contributions[0].shape[0], contributions[0].shape[1])
        self._step_numbers = itertools.count()

    def run(self) -> float:
        """Run one step of all roles and return its seconds."""
        # What every contribution is bound to; 32 zero bytes stand for digests of rows and message.
        binding = StepBinding(
            session="bench", step=next(self._step_numbers), rows=bytes(32), message=bytes(32)
        )
        began = time.perf_counter()
        roles_and_contributions = zip(
            self._role_by_contributor.items(), self._contributions, strict=True
        )
        # Messages by contributor.
        message_by_contributor = {
            me: role.contribute(values, binding) for (me, role), values in roles_and_contributions
        }
        messages_of_rounds = [message_by_contributor]
        # Recoverable masks need a second round, in which contributors help to remove the masks.
        if self._round_count == 2:
            request_by_contributor = self._aggregator.ask(message_by_contributor, binding.digest)
            answer_by_contributor = {
                me: self._role_by_contributor[me].answer(request_by_contributor[me])
                for me in request_by_contributor
            }
            messages_of_rounds.append(answer_by_contributor)
        combined = self._aggregator.combine(messages_of_rounds[-1], binding.digest)
        self._receiver.decode(combined, self._shape, binding)
        seconds = time.perf_counter() - began
        # All contributors send equally many bytes, so those of the first are counted.
        self.contribution_bytes = 0
        for messages in messages_of_rounds:
            first_message = next(iter(messages.values()))
            self.contribution_bytes += len(first_message)
        return seconds


class TutorialSumRun:
    """A sum under CKKS as TenSEAL's tutorials show it, with each contribution as one vector.

    Attributes:
        contribution_bytes: number of bytes that one contributor sent in the last run.
    """

    contribution_bytes: int

    def __init__(self, contributions: Contributions) -> None:
        """Make TenSEAL's context with the tutorial's parameters.

        `contributions`: contribution of each passive, one array each.
        """
        self._contributions = contributions
        # Ring dimension 8192, primes of these bits, scale 2**40.
        self._context = ts.context(
            ts.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=[60, 40, 40, 60], n_threads=1
        )
        self._context.global_scale = 2.0**40

    def run(self) -> float:
        """Encrypt, add and decrypt all contributions and return the seconds."""
        with redirect_stdout(StringIO()):  # TenSEAL prints a warning
            began = time.perf_counter()
            messages = [
                ts.ckks_vector(self._context, contribution.reshape(-1).tolist()).serialize()
                for contribution in self._contributions
            ]
            total = ts.ckks_vector_from(self._context, messages[0])
            for message in messages[1:]:
                total += ts.ckks_vector_from(self._context, message)
            combined = total.serialize()
            np.array(ts.ckks_vector_from(self._context, combined).decrypt())  # only timed
            seconds = time.perf_counter() - began
            self.contribution_bytes = len(messages[0])
            return seconds


_CASE_NAMES = (*CASES, _TUTORIAL)


def _measure_sums(
    passive_count: int, repetitions: int, wanted_cases: Collection[str]
) -> Iterator[Row]:
    """Yield the rows of the wanted cases of sums with this number of passives.

    A case that needs CrypTen, where that is missing, is a row with the reason. `repetitions`: how
    often each case is measured.
    """
    case_by_name = {name: f"{name}/m{passive_count}" for name in _CASE_NAMES}
    wanted_case_by_name = {
        name: case for name, case in case_by_name.items() if case in wanted_cases
    }
    if _CRYPTEN_CASE in wanted_case_by_name and (reason := find_crypten_error()):
        yield make_row(wanted_case_by_name.pop(_CRYPTEN_CASE), reason=reason)
    if wanted_case_by_name:
        with one_thread():
            yield from _compare_with_tutorial(passive_count, repetitions, wanted_case_by_name)


BENCH = Bench(
    make_groups=lambda quick: [
        Group(
            tuple(f"{name}/m{passives}" for name in _CASE_NAMES),
            partial(_measure_sums, passives, 3 if passives > 4 else 9 if quick else 31),
        )
        for passives in ((4,) if quick else _SHAPE_BY_PASSIVE_COUNT)
    ],
    ratio_meaning="times faster than the peer",
    further_fields=("bytes_per_value",),
)


def _compare_with_tutorial(
    passive_count: int, repetitions: int, case_by_name: Mapping[str, str]
) -> Iterator[Row]:
    """Yield a row for each sum: its fastest time, against that of TenSEAL's tutorial; they take
    turns.

    `passive_count`: number of contributors. `repetitions`: how often each case is measured.
    `case_by_name`: name of the row by that of the sum.
    """
    shape = _SHAPE_BY_PASSIVE_COUNT[passive_count]
    contributions = _draw_gradients(shape, passive_count)
    our_run_by_name = {
        name: OurSumRun(name, contributions) for name in case_by_name if name != _TUTORIAL
    }
    sum_run_by_name: dict[str, OurSumRun | TutorialSumRun] = {
        **our_run_by_name,
        _TUTORIAL: TutorialSumRun(contributions),
    }
    seconds_by_name: dict[str, list[float]] = {name: [] for name in sum_run_by_name}
    for repetition in range(-1, repetitions):  # one repetition more, to warm up
        is_warm_up = repetition < 0
        for name, sum_run in sum_run_by_name.items():
            turn_seconds = _time_turn(sum_run)
            if not is_warm_up:
                seconds_by_name[name].append(turn_seconds)
    for name, case in case_by_name.items():
        sent_bytes = sum_run_by_name[name].contribution_bytes
        yield make_row(
            case,
            min(seconds_by_name[name]),
            peer=f"{_TUTORIAL}/m{passive_count}",
            sent_bytes=sent_bytes,
            ratio=divide_seconds(min(seconds_by_name[_TUTORIAL]), min(seconds_by_name[name])),
            bytes_per_value=sent_bytes / math.prod(shape),
        )


def _time_turn(sum_run: OurSumRun | TutorialSumRun) -> float:
    """Run a path for the length of a turn, at least once; return the seconds of its fastest run.

    If the clock is too coarse to measure a single run, the turn is longer, and the mean of its runs
    is returned.
    """
    clock_step_s = measure_clock_step()
    has_fine_clock = clock_step_s < _FINE_CLOCK_S
    turn_s = _MIN_TURN_S if has_fine_clock else _CLOCK_STEPS_PER_TURN * clock_step_s
    run_seconds: list[float] = []
    began = time.perf_counter()
    while not run_seconds or time.perf_counter() - began < turn_s:
        run_seconds.append(sum_run.run())
    return min(run_seconds) if has_fine_clock else sum(run_seconds) / len(run_seconds)


def _draw_gradients(shape: Shape, passive_count: int) -> Contributions:
    """Return a random gradient for each passive, with row norms of about a tenth of the clip norm,
    1.
    """
    rng = np.random.default_rng(0)
    standard_deviation = 0.1 / shape[1] ** 0.5
    return [
        rng.normal(scale=standard_deviation, size=shape).astype(np.float32, copy=False)
        for _ in range(passive_count)
    ]
