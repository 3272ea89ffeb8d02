"""The one form of every benchmark: rows of seconds and ratios, measured interleaved.

A bench is a function from `quick` to rows. Seconds are medians over repetitions in which
all cases take turns, so that a drift of the machine's speed meets them alike. A peer
that cannot be had is a row without seconds, with the reason.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Row", "interleave", "machine", "median_ratio"]


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
