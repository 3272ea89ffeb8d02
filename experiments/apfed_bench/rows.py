"""The common form of all benches: cases that are named before they are measured.

A bench is a list of groups; the cases of a group are measured in turns by one function, so that a
change of the machine's speed affects them alike. A bench declares its cases without measuring
anything, so that one row can be measured without the others. Seconds are medians over repetitions
unless a bench says otherwise. A peer that is not installed is a row without seconds, with the
reason.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from apfed_protocols.crypten import load_crypten
from apfed_protocols.errors import LocalProtocolError

Row: TypeAlias = dict[str, Any]
"""Measured values of one row of a benchmark's table, by name (`make_row` lists the names)."""
_COARSE_CLOCK = "the clock did not move while a turn was measured; measure again"


def make_row(
    case: str,
    seconds: float | None = None,
    *,
    peer: str | None = None,
    ratio: float | None = None,
    sent_bytes: int | None = None,
    **further_fields: Any,
) -> Row:
    """Return the row of a case.

    Args:
        case: name of the case in the table.
        seconds: median over the repetitions; None: not measured.
        peer: name of the case or library that the case is compared with; None: no comparison.
        ratio: result of the comparison; `Bench.ratio_meaning` says what is divided by what.
        sent_bytes: bytes on the wire; None: nothing is sent.
        further_fields: further fields.
    """
    return {
        "case": case,
        "seconds": seconds,
        "peer": peer,
        "ratio": ratio,
        "bytes": sent_bytes,
        **further_fields,
    }


@dataclass(frozen=True)
class Group:
    """A group of cases that are measured together.

    Attributes:
        cases: names of the cases.
        measure: function that takes the names of the wanted cases and returns their rows; it
            measures these, the cases that they are compared with, and nothing else.
    """

    cases: Sequence[str]
    measure: Callable[[Collection[str]], Iterable[Row]]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A bench: the measurements of one part of the library.

    Attributes:
        make_groups: function that returns the groups of cases without measuring anything; its
            argument is True for the quick version, which takes under 30 seconds.
        ratio_meaning: meaning of the rows' field `ratio`, as printed above the table.
        further_fields: names of further fields of the rows that the table shows.
    """

    make_groups: Callable[[bool], Sequence[Group]]
    ratio_meaning: str = "seconds over the peer's"
    further_fields: Sequence[str] = ()


def make_single_group(case: str, measure: Callable[..., Row], *arguments: Any) -> Group:
    """Return the group of one case.

    `measure`: function that takes the case's name and `arguments`, and returns the case's row.
    """
    return Group((case,), lambda _: [measure(case, *arguments)])


def time_calls_in_turns(
    call_by_case: Mapping[str, Callable[[], object]],
    *,
    repetitions: int,
    warm_up_calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Run all cases in turn, several times; return the seconds of each repetition by case.

    A change of the machine's speed then affects all cases alike.

    `repetitions`: how often each case is measured. `warm_up_calls`: number of calls before the
    measured ones. `clock`: function that returns seconds; `time.process_time` leaves out what other
    processes use.
    """
    seconds_by_case: dict[str, list[float]] = {case: [] for case in call_by_case}
    for repetition in range(-warm_up_calls, repetitions):
        for name, call in call_by_case.items():
            began = clock()
            call()
            if repetition >= 0:
                seconds_by_case[name].append(clock() - began)
    return seconds_by_case


def compare_calls(
    case: str,
    own_call: Callable[[], object],
    peer_call: Callable[[], object],
    *,
    peer: str,
    repetitions: int,
    warm_up_calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    **further_fields: Any,
) -> Row:
    """Measure a call and its peer's in turns; return the row of the call.

    Args:
        case: name of the case in the table.
        own_call, peer_call: functions that run our code once, and the peer's code once.
        peer: name of the peer.
        repetitions: number of measured calls of each.
        warm_up_calls: number of calls before the measured ones.
        clock: function that returns seconds, of the clock on the wall or of the processor.
        further_fields: further fields of the row.
    """
    call_by_case = {"ours": own_call, "peer": peer_call}
    seconds_by_case = time_calls_in_turns(
        call_by_case, repetitions=repetitions, warm_up_calls=warm_up_calls, clock=clock
    )
    return make_row(
        case,
        statistics.median(seconds_by_case["ours"]),
        peer=peer,
        ratio=compute_median_ratio(seconds_by_case["ours"], seconds_by_case["peer"]),
        peer_seconds=statistics.median(seconds_by_case["peer"]),
        **further_fields,
    )


def run_script(
    script: str,
    *arguments: object,
    interpreter: str = sys.executable,
    needs_project: bool = True,
    timeout_s: float,
) -> Mapping[str, Any]:
    """Run a script of a bench and return its last line of output, parsed as JSON.

    Args:
        script: path of the script.
        arguments: command-line arguments; each is passed as text.
        interpreter: path of the interpreter.
        needs_project: whether the script imports this project; it then gets this process's import
            path.
        timeout_s: seconds after which the process is killed.

    Raises RuntimeError: the script failed; the message ends with its error output.
    """
    environment = dict(os.environ)
    if needs_project:
        environment["PYTHONPATH"] = os.pathsep.join(
            str(Path(folder).resolve()) for folder in sys.path
        )
    # The interpreter is the user's own choice, and the script is one of this package.
    process = subprocess.run(  # noqa: S603
        [interpreter, script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=timeout_s,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(f"{'/'.join(map(str, arguments))} failed: {process.stderr[-2000:]}")
    result: Mapping[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return result


def compute_median_ratio(own_seconds: list[float], peer_seconds: list[float]) -> float:
    """Return the median over the repetitions of own / peer's seconds, without repetitions with 0.

    Raises RuntimeError: every repetition has 0, since the clock was too coarse.
    """
    # A duration of 0 means that the clock did not move.
    pairs = zip(own_seconds, peer_seconds, strict=True)
    ratios = [own / peer for own, peer in pairs if own and peer]
    if not ratios:
        raise RuntimeError(_COARSE_CLOCK)
    return statistics.median(ratios)


def divide_seconds(numerator_seconds: float, denominator_seconds: float) -> float:
    """Return a ratio of seconds.

    Raises RuntimeError: `denominator_seconds` is 0, since the clock was too coarse.
    """
    if not denominator_seconds:
        raise RuntimeError(_COARSE_CLOCK)
    return numerator_seconds / denominator_seconds


def measure_clock_step() -> float:
    """Return the clock's least step in seconds; on some virtual machines it is many
    milliseconds.
    """
    steps = []
    for _ in range(5):  # five attempts, since another process may interrupt one
        began = now = time.perf_counter()
        while now == began:
            now = time.perf_counter()
        steps.append(now - began)
    return min(steps)


def find_crypten_error() -> str:
    """Return why CrypTen cannot be loaded; empty if it can."""
    try:
        load_crypten()
    except LocalProtocolError as error:
        return str(error)
    return ""
