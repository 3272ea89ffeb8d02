"""What a search found: its trials, the best of them, and what all of it cost."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apfed_experiments.columns import markdown, write_text
from apfed_experiments.search import Charge
from secure_apfed.config import Config
from secure_apfed.files import to_json
from secure_apfed.measures import MEASURES

__all__ = ["HEADER", "Found", "TrialLine"]

HEADER = ("trial", "settings", "on labels held back", "what became of it")


@dataclass(frozen=True, kw_only=True)
class TrialLine:
    """One trial.

    Attributes:
        number: from 0; drawn: its settings that vary, as JSON texts.
        value: the measure on the rows held back; None: it has none.
        state: "finished", "refused", "failed" or "stopped"; why: where it is not finished.
        charge: what is counted for it; None: nothing was begun, or data were public.
    """

    number: int
    drawn: Mapping[str, str]
    value: float | None
    state: str
    why: str
    charge: Charge | None


@dataclass(frozen=True, kw_only=True)
class Found:
    """Attributes:
    config: of the best trial, on the run's own data.
    trials: in their order; best: the number of the best.
    public: name of the public data that trials ran on; None: the run's own.
    spent: of all trials; total: with the final run, and those that were made of settings that
        were the best before.
    final: what that run reached on the test rows, by variant; None: it was not asked for.
    finals: how many final runs are counted.
    """

    config: Config
    trials: tuple[TrialLine, ...]
    best: int
    public: str | None
    spent: Charge
    total: Charge
    final: Mapping[str, float] | None
    finals: int

    @property
    def notes(self) -> list[str]:
        """On which data trials ran, and what they cost, in sentences."""
        finals = "the final run" if self.final else "one run more of the best settings"
        if self.finals > 1:
            finals = f"{self.finals} final runs, one of each of the best settings so far,"
        charged = sum(one.charge is not None for one in self.trials)
        if self.public is not None:
            said = (
                f"Trials ran on public data ({self.public}): no row of the parties' was used, and "
                f"nothing is charged for them. What follows is {finals} alone."
            )
        else:
            said = (
                f"Trials ran on the parties' own rows, and {charged} of {len(self.trials)} are "
                f"charged; what follows is of these and {finals} together. Which settings are best "
                "was chosen by true labels that the active holds back, which no epsilon counts."
            )
        lines = [said]
        for what, total in self.total.epsilons.items():
            trials = self.spent.epsilons.get(what, 0.0)
            lines.append(f"Epsilon of {what}: {_text(total)} in all, {_text(trials)} by trials.")
        lines.append(
            f"Delta: {self.total.delta:.2g} of representations, {self.total.added_delta:.2g} of "
            "the epsilons that add up."
        )
        return lines

    def cells(self) -> list[tuple[str, ...]]:
        """Texts in the order of `HEADER`, the best trial first."""
        measure = MEASURES[self.config.measure]
        ranked = sorted(self.trials, key=lambda one: -measure.rank(one.value))
        return [
            (str(one.number), ", ".join(f"{key} {value}" for key, value in one.drawn.items()),
             "" if one.value is None else measure.text(one.value),
             one.state + (f": {one.why}" if one.why else ""))
            for one in ranked
        ]  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "best": self.best, "measure": self.config.measure, "public": self.public,
            "trials": [
                {"number": one.number, "settings": dict(one.drawn), "value": one.value,
                 "state": one.state, "why": one.why,
                 "charge": None if one.charge is None else one.charge.epsilons}
                for one in self.trials
            ],
            "epsilon_of_trials": self.spent.epsilons, "epsilon_in_all": self.total.epsilons,
            "delta": self.total.delta, "added_delta": self.total.added_delta,
            "final": None if self.final is None else dict(self.final),
        }  # fmt: skip

    def write(self, folder: Path) -> None:
        """Write search.json and search.md."""
        write_text(folder / "search.json", to_json(self.as_json()))
        notes = "".join(f"\n{note}\n" for note in self.notes)
        write_text(folder / "search.md", markdown(HEADER, self.cells()) + notes)


def _text(epsilon: float) -> str:
    return "∞" if math.isinf(epsilon) else f"{epsilon:.3g}"
