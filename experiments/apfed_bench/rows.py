"""The one form of every benchmark: cases that are named before they are measured.

A bench is a list of groups: cases that one function measures in turns, so that a drift of the
machine's speed meets them alike. It declares them without measuring anything, so that one row can
be had without the others. Seconds are medians over repetitions unless a bench says otherwise. A
peer that cannot be had is a row without seconds, with the reason.
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
"""Figures of one line of a benchmark by name, see `make_row`."""


def make_row(
    case: str,
    seconds: float | None = None,
    *,
    peer: str | None = None,
    ratio: float | None = None,
    sent: int | None = None,
    **more: Any,
) -> Row:
    """Return one line of a table: a case and its median seconds.

    Seconds are None where they could not be measured. `peer` is what `ratio` is against; `sent` are
    bytes on the wire, where that means something; `more` are further fields.
    """
    return {"case": case, "seconds": seconds, "peer": peer, "ratio": ratio, "bytes": sent, **more}


@dataclass(frozen=True)
class Group:
    """A group of cases that are measured together.

    `measure` goes from the names that are wanted to their rows, and measures these, what they are
    compared with, and nothing else.
    """

    cases: Sequence[str]
    measure: Callable[[Collection[str]], Iterable[Row]]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A bench of groups, by whether to be quick (stay under 30 seconds).

    Making the groups measures nothing. `ratio` says what that of its rows is; `fields` are further
    ones that are published.
    """

    groups: Callable[[bool], Sequence[Group]]
    ratio: str = "seconds over the peer's"
    fields: Sequence[str] = ()


def make_single_group(case: str, measure: Callable[..., Row], *arguments: Any) -> Group:
    """Return the group of one case, whose row `measure` makes of its name and these arguments."""
    return Group((case,), lambda _: [measure(case, *arguments)])


def interleave(
    cases: Mapping[str, Callable[[], object]],
    *,
    repetitions: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Run all cases in turn, several times; return the seconds of each by case.

    By `time.process_time` they are the processor's, whatever else the machine does.

    `repetitions`: how often each case is measured. `warm_up`: calls before the measured ones.
    `clock`: returns seconds.
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
    """Measure a call and its peer's in turns; return the row.

    `case`: its name in the table. `ours`: the call; `theirs`: the peer's. `repetitions`: how often
    each case is measured. `warm_up`: calls before the measured ones. `clock`: returns seconds.
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
    ours: bool = True,
    patience_s: float,
) -> Mapping[str, Any]:
    """Run a script of a bench and return what it prints last, read as JSON.

    If `ours`, it finds what this process finds. Raises RuntimeError: the end of what it complained
    of.

    `python`: interpreter; `patience_s`: seconds until it is ended.
    """
    environment = dict(os.environ)
    if ours:
        environment["PYTHONPATH"] = os.pathsep.join(
            str(Path(place).resolve()) for place in sys.path
        )
    # the interpreter is the user's own choice, the script is ours
    process = subprocess.run(  # noqa: S603
        [python, script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=patience_s,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(f"{'/'.join(map(str, arguments))} failed: {process.stderr[-2000:]}")
    result: Mapping[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return result


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median over the repetitions of ours / theirs, turn by turn.

    Raises as `divide_seconds`.
    """
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if a and b]
    return statistics.median(ratios) if ratios else divide_seconds(0.0, 0.0)


def divide_seconds(ours: float, theirs: float) -> float:
    """Divide seconds by seconds; RuntimeError: the clock stood still, as coarse ones do."""
    if not theirs:
        raise RuntimeError("the clock did not move while a turn was measured; measure again")
    return ours / theirs


def clock_step() -> float:
    """Measure the clock's least step in seconds: many milliseconds on some virtual machines."""
    steps = []
    for _ in range(5):
        began = now = time.perf_counter()
        while now == began:
            now = time.perf_counter()
        steps.append(now - began)
    return min(steps)


def find_crypten_error() -> str:
    """Return why CrypTen does not load here; empty if it loads."""
    try:
        load_crypten()
    except LocalProtocolError as error:
        return str(error)
    return ""
