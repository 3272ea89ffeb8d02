"""The long work of this process, its progress, and an estimate of the time left.

Run by: each process for itself. Code reports each part of its long work with `report_work`; outside
`observing_work` that does nothing. The one estimate of the time left (`TimeLeft`) takes its clock
as an argument, so that displays, events and tests share it.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

__all__ = [
    "TimeLeft",
    "Work",
    "describe_time_left",
    "observing_work",
    "parse_work_event",
    "report_work",
    "working_on",
]

_MAX_MARKS = 512  # pairs of time and progress that are stored for an estimate


@dataclass(frozen=True, kw_only=True)
class Work:
    """The progress of a long computation.

    Attributes:
        name: what is computed, such as "alignment, buckets".
        done, total: number of its finished parts, and of all.
        part: the current part; empty: it has no name.
    """

    name: str
    done: int
    total: int
    part: str = ""

    @property
    def is_over(self) -> bool:
        """True once all parts are done."""
        return self.done >= self.total


class TimeLeft:
    """An estimate of the time left of a computation, from the times when its parts ended.

    The pace is measured over the later half of these times. So a slow first part (loading,
    compiling), or parts that were done before, soon stop to count. Nothing is estimated before two
    parts have ended.

    `clock`: returns seconds, as `time.monotonic`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Seconds of the clock, and how many parts were done then; oldest first.
        self._progress_marks: list[tuple[float, float]] = [(clock(), 0.0)]

    def note_progress(self, done: float) -> None:
        """Record that this number of parts are done now; a lower number restarts the estimate."""
        last_done = self._progress_marks[-1][1]
        if done < last_done:
            self._progress_marks = [(self._clock(), done)]
        elif done > last_done:
            self._progress_marks.append((self._clock(), done))
        if len(self._progress_marks) > _MAX_MARKS:
            # Drop every other mark to bound memory; the first and the last stay.
            del self._progress_marks[1:-1:2]

    def estimate_seconds(self, total: float) -> float | None:
        """Return an estimate of the seconds until all `total` parts are done.

        Returns None while fewer than two parts have ended, which is too early.
        """
        last_end, done = self._progress_marks[-1]
        remaining = total - done
        if remaining <= 0:
            return 0.0
        interval_count = len(self._progress_marks) - 1
        if interval_count < 2:
            return None
        middle_end, middle_done = self._progress_marks[interval_count // 2]
        seconds_per_part = (last_end - middle_end) / (done - middle_done)
        elapsed = self._clock() - last_end
        # The current part may be nearly over; those after it still need all their time.
        current_share = min(remaining, 1.0)
        current_seconds = max(seconds_per_part * current_share - elapsed, 0.0)
        return seconds_per_part * (remaining - current_share) + current_seconds


def describe_time_left(seconds: float | None) -> str:
    """Return an estimate as text; "" if there is none, or nothing remains.

    `seconds`: the estimate; None: there is none.
    """
    if seconds is None or not 0 < seconds < math.inf:
        return ""
    if seconds < 60:
        return f"about {math.ceil(seconds)} s left"
    minutes = math.ceil(seconds / 60)
    if minutes < 120:
        return f"about {minutes} min left"
    return f"about {minutes / 60:.1f} h left"


def parse_work_event(event: Mapping[str, Any]) -> tuple[str, Work]:
    """Return the party and its progress from an event that `WorkProgress.as_json` made."""
    name = str(event["name"])
    part = str(event["part"])
    work = Work(name=name, done=int(event["done"]), total=int(event["total"]), part=part)
    return str(event["party"]), work


_Observer = Callable[[Work], None]
_OBSERVER: ContextVar[_Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observing_work(observer: _Observer) -> Iterator[None]:
    """Call `observer` with the progress that is reported in this block (`report_work`)."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def report_work(name: str, done: int, total: int, part: str = "") -> None:
    """Report the progress of a computation to the observer of `observing_work`, if there is one.

    `name`: what is computed. `done`, `total`: number of its finished parts, and of all. `part`:
    name of the current part; "": it has none.
    """
    observer = _OBSERVER.get()
    if observer is not None:
        observer(Work(name=name, done=done, total=total, part=part))


@contextmanager
def working_on(name: str, part: str = "") -> Iterator[None]:
    """Report the `with` block as a computation of one part.

    It is reported as done even if the block fails, so that no display shows it for ever.
    """
    report_work(name, 0, 1, part)
    try:
        yield
    finally:
        report_work(name, 1, 1, part)
