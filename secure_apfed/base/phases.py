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
_PROCESS_START = time.perf_counter()  # the interpreter's own start, before it, is not measured


@dataclass
class Phase:
    """The cost of a phase.

    Attributes:
        seconds: by the wall clock.
        processor_seconds: on all processor cores together.
        peak_bytes: peak memory of the process from its start to the end of the phase.
    """

    seconds: float = 0.0
    processor_seconds: float = 0.0
    peak_bytes: int = 0


def peak_memory() -> int:
    """Return the peak memory of this process so far, in bytes.

    On Linux it is VmHWM of /proc, since `ru_maxrss` would include the parent process's memory.
    Elsewhere it is `ru_maxrss`, which macOS counts in bytes and other systems in KiB.
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
        """Begin with the phase `start`, which began with the process."""
        super().__init__()
        self._phase_name: PhaseName = "start"
        self._last_seconds = _PROCESS_START
        self._last_processor_seconds = 0.0

    def end_phase(self) -> None:
        """Add what the process used since the last call of this method to the current phase."""
        seconds = time.perf_counter()
        # User and system time, of this process and of children that were waited for.
        processor_seconds = sum(os.times()[:4])
        phase = self.setdefault(self._phase_name, Phase())
        phase.seconds += seconds - self._last_seconds
        phase.processor_seconds += processor_seconds - self._last_processor_seconds
        # A peak since the process's start is never below that of an earlier phase.
        phase.peak_bytes = max(peak_memory(), *(other.peak_bytes for other in self.values()))
        self._last_seconds = seconds
        self._last_processor_seconds = processor_seconds

    def begin_phase(self, name: PhaseName) -> None:
        """End the current phase, and start this one or continue it."""
        self.end_phase()
        self._phase_name = name


_CURRENT_PHASES: ContextVar[Phases | None] = ContextVar("phases", default=None)


@contextmanager
def profile_phases() -> Iterator[Phases]:
    """Measure the cost of the phases that `begin_phase` reports in this block.

    Yields their costs, which are complete once the block ends. The first phase began with the
    process.
    """
    phases = Phases()
    token = _CURRENT_PHASES.set(phases)
    try:
        yield phases
    finally:
        phases.end_phase()
        _CURRENT_PHASES.reset(token)


def begin_phase(name: PhaseName) -> None:
    """Report that this phase begins here; outside `profile_phases` it is only logged."""
    _LOGGER.debug("phase begins: %s", name)
    if (phases := _CURRENT_PHASES.get()) is not None:
        phases.begin_phase(name)
