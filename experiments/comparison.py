"""The table of a comparison: means over seeds with 95 % intervals, as rows for any format."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from experiments import tables
from experiments.trials import TrialResult, Variant
from secure_apfed.plain_csv import cell

__all__ = ["HEADER", "Line", "Spread", "as_csv", "as_markdown", "compare"]

HEADER = ("method", "protection", "accuracy %", "bytes", "epsilon", "attack advantage")
_CONFIDENCE = 0.95

# Inference variants of TVFL, in the paper's words; the others have one, named by the method.
_INFERENCE: Mapping[str, str] = {
    "tvfl": "TVFL, all parties",
    "tvfl_0": "TVFL-0",
    "tvfl_a": "TVFL-A",
    "tvfl_r": "TVFL-R",
}


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and the half-width of its 95 % interval (Student's t)."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value; one alone has no interval (NaN)."""
        mean = sum(values) / len(values)
        if len(values) < 2:
            return cls(mean, math.nan)
        error = stats.sem(values)
        return cls(mean, float(error * stats.t.ppf((1 + _CONFIDENCE) / 2, len(values) - 1)))

    def text(self, *, scale: float = 1.0, digits: int = 1) -> str:
        """Such as "95.2 ± 0.4"."""
        mean = f"{self.mean * scale:.{digits}f}"
        if math.isnan(self.half_width):
            return mean
        return f"{mean} ± {self.half_width * scale:.{digits}f}"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table.

    Attributes:
        protection: "none", or what stood between the parties; "nothing is sent" for SingleVL.
        accuracy: on the test rows; advantage: of the attack by one adversary that gains most on
            average over the seeds; None where none applies. attacked: to how many of the seeds
            it applies.
        wire_bytes: mean over seeds; epsilon: the largest over seeds.
    """

    method: str
    variant: Variant
    protection: str
    accuracy: Spread
    wire_bytes: float
    epsilon: float
    advantage: Spread | None
    attacked: int
    seeds: int

    def cells(self) -> tuple[str, ...]:
        """Texts in the order of `HEADER`."""
        return (
            self.method,
            self.protection,
            self.accuracy.text(scale=100),
            _bytes(self.wire_bytes),
            "∞" if math.isinf(self.epsilon) else f"{self.epsilon:.3g}",
            self._advantage_told(),
        )

    def _advantage_told(self) -> str:
        if self.advantage is None:
            return "not applicable"
        part = "" if self.attacked == self.seeds else f" ({self.attacked} of {self.seeds} seeds)"
        return f"{self.advantage.text(digits=3)}{part}"


def compare(results: Sequence[TrialResult]) -> list[Line]:
    """Lines in the order of the variants, one for each inference variant."""
    lines = []
    for variant in dict.fromkeys(result.variant for result in results):
        of_variant = [result for result in results if result.variant == variant]
        lines += [_line(variant, key, of_variant) for key in of_variant[0].accuracy]
    return lines


def _line(variant: Variant, key: str, results: Sequence[TrialResult]) -> Line:
    worst = _worst(results)
    return Line(
        method=_INFERENCE.get(key, variant.label),
        variant=variant,
        protection=_protection(variant),
        accuracy=Spread.of([result.accuracy[key] for result in results]),
        wire_bytes=sum(result.wire_bytes for result in results) / len(results),
        epsilon=max(result.epsilon for result in results),
        advantage=None if worst is None else worst[0],
        attacked=0 if worst is None else worst[1],
        seeds=len(results),
    )


def _worst(results: Sequence[TrialResult]) -> tuple[Spread, int] | None:
    """The advantage of the attack by one adversary that gains most on average.

    Over the runs to which it applies, and how many these are: one run without it must not hide it.
    """
    gains: dict[str, list[float]] = {}
    for result in results:
        for setting, advantage in result.advantages.items():
            if math.isfinite(advantage):
                gains.setdefault(setting, []).append(advantage)
    found = [(Spread.of(of), len(of)) for of in gains.values()]
    return max(found, key=lambda one: one[0].mean, default=None)


def _protection(variant: Variant) -> str:
    if variant.protected is None:
        return "nothing is sent"
    if not variant.protected:
        return "none"
    return "guard" if variant.method == "tvfl" else "guard + secure sum"


def _bytes(count: float) -> str:
    return "0" if not count else f"{count / 1e6:.1f} MB"


def as_markdown(lines: Sequence[Line]) -> str:
    """The table in Markdown."""
    return tables.markdown(HEADER, [line.cells() for line in lines])


def as_csv(lines: Sequence[Line]) -> str:
    """The table as CSV, with plain numbers."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ("method", "protection", "accuracy", "accuracy_95", "bytes", "epsilon",
         "advantage", "advantage_95")
    )  # fmt: skip
    for line in lines:
        advantage = line.advantage or Spread(math.nan, math.nan)
        writer.writerow(
            (cell(line.method), cell(line.protection), line.accuracy.mean, line.accuracy.half_width,
             line.wire_bytes, line.epsilon, advantage.mean, advantage.half_width)
        )  # fmt: skip
    return text.getvalue()
