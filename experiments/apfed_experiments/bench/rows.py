"""The one form of every benchmark: cases that are named before they are measured.

A bench is a list of groups: cases that one function measures in turns, so that a drift of the
machine's speed meets them alike. It declares them without measuring anything, so that one row can
be had without the others. Seconds are medians over repetitions unless a bench says otherwise. A
peer that cannot be had is a row without seconds, with the reason.
"""

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Bench",
    "Group",
    "Row",
    "absent",
    "interleave",
    "median_ratio",
    "quotient",
    "single",
]


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
    """A group of one case."""
    return Group((case,), lambda _: [measure()])


def absent(case: str, reason: str, **more: Any) -> Row:
    """The row of what could not be measured."""
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
