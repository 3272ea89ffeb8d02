"""The one form of every benchmark: cases that are named before they are measured.

A bench is a list of groups: cases that one function measures in turns, so that a drift of the
machine's speed meets them alike. It declares them without measuring anything, so that one row can
be had without the others. Seconds are medians over repetitions unless a bench says otherwise. A
peer that cannot be had is a row without seconds, with the reason.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from apfed_protocols.crypten import load_crypten
from apfed_protocols.errors import LocalProtocolError
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import DataError

__all__ = [
    "Bench", "Group", "Row", "absent", "clock_step", "compared", "interleave", "machine",
    "median_ratio", "on_images", "played", "quotient", "single", "stolen_since", "why_no_crypten",
]  # fmt: skip

_LOOKS = 5


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a bench.

    Attributes:
        case: its name; seconds: median, None where it could not be measured.
        peer: the case that `ratio` is against; ratio: as the bench defines it.
        bytes: on the wire, where that means something.
        more: further fields of this bench.
    """

    case: str
    seconds: float | None
    peer: str | None = None
    ratio: float | None = None
    bytes: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        plain = {
            "case": self.case, "seconds": self.seconds, "peer": self.peer, "ratio": self.ratio,
            "bytes": self.bytes,
        }  # fmt: skip
        return {**plain, **self.more}


@dataclass(frozen=True)
class Group:
    """Cases that are measured together.

    Attributes:
        cases: their names.
        measure: from the names that are wanted to their rows. It measures these, what they are
            compared with, and nothing else; rows of other cases are left out.
        by_name: they are measured only where a case is named in full, as they take minutes or
            gigabytes.
    """

    cases: Sequence[str]
    measure: Callable[[Collection[str]], Iterable[Row]]
    by_name: bool = False


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What the table of benches holds.

    Attributes:
        groups: from whether to be quick (stay under 30 seconds) to all groups; measures nothing.
        ratio: what `ratio` of its rows is.
        fields: which further fields of its rows are published.
    """

    groups: Callable[[bool], Sequence[Group]]
    ratio: str = "seconds over the peer's"
    fields: Sequence[str] = ()


def single(case: str, measure: Callable[[], Row]) -> Group:
    return Group((case,), lambda _: [measure()])


def on_images(config_of: Callable[[str], Config]) -> tuple[Config, VerticalData, str]:
    """A run on Fashion-MNIST, or MNIST where it is not installed; its data, and which they are.

    Raises:
        DataError: neither set is there; says what to run.
    """
    try:
        config, images = config_of("fashion_mnist"), "fashion_mnist"
        return config, load_data(config.data, seed=0), images
    except DataError:
        config, images = config_of("mnist"), "mnist"
        return config, load_data(config.data, seed=0), images


def absent(case: str, reason: str, **more: Any) -> Row:
    return Row(case=case, seconds=None, more={"reason": reason, **more})


def interleave(
    cases: Mapping[str, Callable[[], object]], *, repetitions: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Run all cases in turn, several times; return the seconds of each by case."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repetition in range(-warm_up, repetitions):
        for name, call in cases.items():
            began = time.perf_counter()
            call()
            if repetition >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def compared(
    case: str, ours: Callable[[], object], theirs: Callable[[], object], *, peer: str,
    repetitions: int, warm_up: int = 1, each: int = 1, faster: bool = False,
    peer_seconds: bool = True, **more: Any,
) -> Row:  # fmt: skip
    """The row of a call beside its peer's, in turns.

    Args:
        case: its name.
        ours: what is called.
        theirs: what the peer does.
        peer: its name.
        repetitions: turns.
        warm_up: turns before, which are not counted.
        each: how many a call does, of which `seconds` tells one.
        faster: whether `ratio` is the peer's seconds over ours.
        peer_seconds: whether these stand in the row.
        more: further fields.
    """
    seconds = interleave({"ours": ours, "peer": theirs}, repetitions=repetitions, warm_up=warm_up)
    both = seconds["ours"], seconds["peer"]
    beside = {"peer_seconds": statistics.median(seconds["peer"])} if peer_seconds else {}
    return Row(
        case=case, seconds=statistics.median(seconds["ours"]) / each, peer=peer,
        ratio=median_ratio(*(both[::-1] if faster else both)), more={**beside, **more},
    )  # fmt: skip


def played(
    script: str, *arguments: object, python: str = sys.executable, ours: bool = True,
    patience_s: float, **environment: str,
) -> Mapping[str, Any]:  # fmt: skip
    """What a script of a bench prints last, run in an interpreter of its own.

    Args:
        script: its file.
        arguments: of it.
        python: the interpreter.
        ours: whether it finds what this process finds.
        patience_s: the longest that it may take.
        environment: beside this process's.

    Raises:
        RuntimeError: it failed; the end of what it complained of.
    """
    beside = {**os.environ, **environment}
    if ours:
        beside["PYTHONPATH"] = os.pathsep.join(str(Path(at).resolve()) for at in sys.path)
    # the interpreter is the user's own choice, the script is ours
    done = subprocess.run(  # noqa: S603
        [python, script, *map(str, arguments)], capture_output=True, text=True, env=beside,
        timeout=patience_s, check=False,
    )  # fmt: skip
    if done.returncode:
        named = "/".join(map(str, arguments))
        raise RuntimeError(f"{named} failed: {done.stderr[-2000:]}")
    found: Mapping[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over the repetitions of ours / theirs, taken turn by turn.

    Raises:
        RuntimeError: the clock stood still in every turn; see `quotient`.
    """
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if a and b]
    return statistics.median(ratios) if ratios else quotient(0.0, 0.0)


def quotient(ours: float, theirs: float) -> float:
    """Seconds over seconds.

    Raises:
        RuntimeError: the clock stood still, as coarse clocks of virtual machines do.
    """
    if not theirs:
        raise RuntimeError("the clock did not move while a turn was measured; measure again")
    return ours / theirs


def machine() -> dict[str, Any]:
    """What seconds were measured on; the same from one bench to the next."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def _processor() -> str | None:
    """Its model, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor()) or None


def clock_step() -> float:
    """Seconds by which the clock moves at least: many milliseconds on some virtual machines."""
    steps = []
    for _ in range(_LOOKS):
        began = now = time.perf_counter()
        while now == began:
            now = time.perf_counter()
        steps.append(now - began)
    return min(steps)


def stolen_since(before: tuple[int, int] | None = None) -> tuple[tuple[int, int] | None, float]:
    """Processor time that the host gave to others: ticks stolen and in all, and the share since.

    Where the system does not tell, None and 0.
    """
    try:
        first = Path("/proc/stat").read_text("ascii").splitlines()[0].split()
        ticks = [int(each) for each in first[1:9]]
    except (OSError, ValueError, IndexError):
        return None, 0.0
    now = (ticks[-1], sum(ticks))
    passed = now[1] - before[1] if before else 0
    return now, (now[0] - before[0]) / passed if before and passed else 0.0


def why_no_crypten() -> str:
    """Return what is wrong with CrypTen here; nothing if it loads."""
    try:
        load_crypten()
    except LocalProtocolError as error:
        return str(error)
    return ""
