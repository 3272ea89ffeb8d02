"""The cost of each phase of a run: seconds, processor time and memory.

Run by: a simulation of all parties in one process. Code reports the start of a phase; outside of
`profile_phases` this does nothing. A phase lasts until the next one starts, and repeated phases add
up. Peak memory is the maximum of the process up to the end of the phase.
"""

import logging
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

_LOGGER = logging.getLogger(__name__)
PhaseName: TypeAlias = Literal[
    "start", "read", "agree", "align", "train", "baselines", "attacks", "report"
]
_STARTED = time.perf_counter()  # the start of the interpreter itself is not measured


@dataclass
class Phase:
    """The cost of a phase: seconds by the clock, seconds of all processors, and bytes."""

    seconds: float = 0.0
    processor_seconds: float = 0.0
    peak_bytes: int = 0


def peak_memory() -> int:
    """Return the most bytes that this process has used.

    On Linux `ru_maxrss` would include the parent process's memory, so it is not used.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class Phases(dict[PhaseName, Phase]):
    """The phases in the order in which they began."""

    def __init__(self) -> None:
        """Start with the phase from the process's start on."""
        super().__init__()
        self._name: PhaseName = "start"
        self._started_at = (_STARTED, 0.0)

    def end_phase(self) -> None:
        """Add the cost since the last call to the current phase."""
        times = os.times()
        peak = peak_memory()
        current = time.perf_counter(), sum(times[:4])  # of children that were waited for, too
        phase = self.setdefault(self._name, Phase())
        phase.seconds += current[0] - self._started_at[0]
        phase.processor_seconds += current[1] - self._started_at[1]
        phase.peak_bytes = max(peak, *(phase_so_far.peak_bytes for phase_so_far in self.values()))
        self._started_at = current

    def begin_phase(self, name: PhaseName) -> None:
        self.end_phase()
        self._name = name


_PHASES: ContextVar[Phases | None] = ContextVar("phases", default=None)


@contextmanager
def profile_phases() -> Iterator[Phases]:
    """Measure the phases of this block; the first began with the process."""
    phases = Phases()
    token = _PHASES.set(phases)
    try:
        yield phases
    finally:
        phases.end_phase()
        _PHASES.reset(token)


def begin_phase(name: PhaseName) -> None:
    """Report that this phase begins here."""
    _LOGGER.debug("phase begins: %s", name)
    if (phases := _PHASES.get()) is not None:
        phases.begin_phase(name)
