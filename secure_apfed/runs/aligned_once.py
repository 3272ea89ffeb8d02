"""One alignment for all runs on the same tables, as organisations have it that train often.

Run by: the experimenter who plays many runs in one process, as a study does. The first run of some
data, seed and intersection aligns, by the protocol of its settings; those after it go on
from its rows, and count what it sent as theirs: each line of a table costs what it would cost
alone. Runs outside `aligned_once` share nothing, and no alignment leaves the process.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from weakref import ReferenceType, ref

from torch import Tensor

from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.exchange import Flow, Kind
from secure_apfed.methods import Simulation
from secure_apfed.methods.alignment import needs_dealer

__all__ = ["PastAlignment", "Sharing", "aligned_once"]


@dataclass(frozen=True, eq=False)
class PastAlignment:
    """What an alignment left.

    Attributes:
        rows: by party and position; flows: what was sent for it.
        tables: those that were aligned, where somebody brought them; None: the run loaded them.
    """

    rows: Mapping[str, Tensor]
    flows: tuple[Flow, ...]
    tables: "ReferenceType[VerticalData] | None"

    def is_of(self, tables: VerticalData | None) -> bool:
        """Whether these are the tables."""
        if self.tables is None:
            return tables is None
        return tables is not None and self.tables() is tables


_PAST: ContextVar[dict[str, PastAlignment] | None] = ContextVar("alignments", default=None)


@contextmanager
def aligned_once(past: dict[str, PastAlignment]) -> Iterator[None]:
    """Let runs in this block share alignments, those in `past` too, which new ones are added to."""
    before = _PAST.set(past)
    try:
        yield
    finally:
        _PAST.reset(before)


@dataclass(frozen=True, eq=False)
class Sharing:
    """One run, where runs share alignments.

    Attributes:
        config: of the run.
        tables: what somebody brought, which must be the very same in each run; None: those that
            the settings name.
    """

    config: Config
    tables: VerticalData | None

    def past(self) -> PastAlignment | None:
        """What an earlier run on the same tables left, if runs share it and there was one."""
        past = _PAST.get()
        if past is None or not self.config.method.aligns:
            return None
        found = past.get(_settings(self.config))
        return found if found is not None and found.is_of(self.tables) else None

    def keep(self, session: Simulation) -> None:
        """Let later runs share what this session aligned, where runs share alignments.

        A dealer's messages are of more kinds than the alignment's, so that its runs share none.
        """
        past, config = _PAST.get(), self.config
        aligns = config.method.aligns and bool(session.contract.passives)
        if past is None or not aligns or needs_dealer(config.alignment):
            return
        flows = tuple(flow for flow in session.transcript.flows if flow.kind is Kind.ALIGNMENT)
        tables = None if self.tables is None else ref(self.tables)
        past[_settings(config)] = PastAlignment(dict(session.alignment), flows, tables)


def _settings(config: Config) -> str:
    """All that tables and intersection depend on."""
    return f"{config.data.model_dump_json()} {config.alignment.model_dump_json()} {config.seed}"
