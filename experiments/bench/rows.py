"""The one form of every benchmark: rows of seconds and ratios, measured interleaved.

A bench is a function from `quick` to rows. Seconds are medians over repetitions in which
all cases take turns, so that a drift of the machine's speed meets them alike. A peer
that cannot be had is a row without seconds, with the reason.
"""

import fnmatch
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["Row", "interleave", "machine", "median_ratio", "only", "stolen_since", "wanted"]

_ONLY: ContextVar[str] = ContextVar("glob of cases", default="*")


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
        """All fields in one flat object."""
        plain = {
            "case": self.case,
            "seconds": self.seconds,
            "peer": self.peer,
            "ratio": self.ratio,
            "bytes": self.bytes,
        }
        return {**plain, **self.more}


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


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over the repetitions of ours / theirs, taken turn by turn."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


@contextmanager
def only(cases: str) -> Iterator[None]:
    """Measure those cases alone that this glob names, while the block runs, where a bench can."""
    before = _ONLY.set(cases)
    try:
        yield
    finally:
        _ONLY.reset(before)


def wanted(case: str) -> bool:
    """Whether this case is to be measured; what it is compared with is measured with it."""
    return fnmatch.fnmatchcase(case, _ONLY.get())


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


def machine() -> dict[str, Any]:
    """What the seconds were measured on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }
