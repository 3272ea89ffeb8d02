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


def make_row(
    case: str,
    seconds: float | None = None,
    *,
    peer: str | None = None,
    ratio: float | None = None,
    sent: int | None = None,
    **more: Any,
) -> Row:
    """Return the row of a case.

    Args:
        case: name of the case in the table.
        seconds: median over the repetitions; None: not measured.
        peer: name of the case or library that the case is compared with; None: no comparison.
        ratio: result of the comparison; `Bench.ratio` says what is divided by what.
        sent: bytes on the wire; None: nothing is sent.
        more: further fields.
    """
    return {"case": case, "seconds": seconds, "peer": peer, "ratio": ratio, "bytes": sent, **more}


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
        groups: function that returns the groups of cases without measuring anything; its argument
            is True for the quick version, which takes under 30 seconds.
        ratio: meaning of the rows' field `ratio`, as printed above the table.
        fields: names of further fields of the rows that the table shows.
    """

    groups: Callable[[bool], Sequence[Group]]
    ratio: str = "seconds over the peer's"
    fields: Sequence[str] = ()


def make_single_group(case: str, measure: Callable[..., Row], *arguments: Any) -> Group:
    """Return the group of one case.

    `measure`: function that takes the case's name and `arguments`, and returns the case's row.
    """
    return Group((case,), lambda _: [measure(case, *arguments)])


def interleave(
    cases: Mapping[str, Callable[[], object]],
    *,
    repetitions: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Run all cases in turn, several times; return the seconds of each repetition by case.

    A change of the machine's speed then affects all cases alike.

    `repetitions`: how often each case is measured. `warm_up`: number of calls before the measured
    ones. `clock`: function that returns seconds; `time.process_time` leaves out what other
    processes use.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repetition in range(-warm_up, repetitions):
        for name, call in cases.items():
            began = clock()
            call()
            if repetition >= 0:
                seconds[name].append(clock() - began)
    return seconds


def compare_calls(
    case: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    peer: str,
    repetitions: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    **more: Any,
) -> Row:
    """Measure a call and its peer's in turns; return the row of the call.

    Args:
        case: name of the case in the table.
        ours, theirs: functions that run our code once, and the peer's code once.
        peer: name of the peer.
        repetitions: number of measured calls of each.
        warm_up: number of calls before the measured ones.
        clock: function that returns seconds, of the clock on the wall or of the processor.
        more: further fields of the row.
    """
    calls = {"ours": ours, "peer": theirs}
    seconds = interleave(calls, repetitions=repetitions, warm_up=warm_up, clock=clock)
    return make_row(
        case,
        statistics.median(seconds["ours"]),
        peer=peer,
        ratio=median_ratio(seconds["ours"], seconds["peer"]),
        peer_seconds=statistics.median(seconds["peer"]),
        **more,
    )


def run_script(
    script: str,
    *arguments: object,
    python: str = sys.executable,
    is_ours: bool = True,
    timeout_s: float,
) -> Mapping[str, Any]:
    """Run a script of a bench and return its last line of output, parsed as JSON.

    Args:
        script: path of the script.
        arguments: command-line arguments; each is passed as text.
        python: path of the interpreter.
        is_ours: whether the script imports this project; it then gets this process's import path.
        timeout_s: seconds after which the process is killed.

    Raises RuntimeError: the script failed; the message ends with its error output.
    """
    environment = dict(os.environ)
    if is_ours:
        environment["PYTHONPATH"] = os.pathsep.join(
            str(Path(folder).resolve()) for folder in sys.path
        )
    # The interpreter is the user's own choice, and the script is one of this package.
    process = subprocess.run(  # noqa: S603
        [python, script, *map(str, arguments)],
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


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median over the repetitions of ours / theirs; repetitions with 0 are left out.

    Raises RuntimeError: every repetition has 0, since the clock was too coarse.
    """
    # A duration of 0 means that the clock did not move.
    ratios = [own / other for own, other in zip(ours, theirs, strict=True) if own and other]
    if not ratios:
        return divide_seconds(0.0, 0.0)  # raises
    return statistics.median(ratios)


def divide_seconds(ours: float, theirs: float) -> float:
    """Return a ratio of seconds.

    Raises RuntimeError: `theirs` is 0, since the clock was too coarse.
    """
    if not theirs:
        raise RuntimeError("the clock did not move while a turn was measured; measure again")
    return ours / theirs


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
