"""The leaderboard of a study: accuracy, leakage and DCS of every point, with intervals."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd

from apfed_experiments.columns import markdown, p_text
from apfed_experiments.study import Failure, Results
from apfed_experiments.summary import Gain, Interval, Leakage, Summary, holm
from apfed_experiments.tradeoff import DefencePoint
from secure_apfed.files import to_csv

__all__ = ["BETA", "Board", "Entry", "dcs", "on_the_front"]

BETA = 0.5
"""Weight of accuracy against leakage in DCS."""


def dcs(*, attack: float, ideal: float, accuracy: float, undefended: float) -> float:
    """Defence capability score, one-sided: 1 / (1 + sqrt((1 - b) dAP^2 + b dMP^2)), b = BETA.

    Args:
        attack: the attack's score under this defence, AP; negative ones (R^2) count as 0.
        ideal: the score AP* that a perfect defence would leave: 0 in VFLAIR's code
            (`dcs_vflair`), the best same-knowledge baseline in ours (`dcs_baseline`).
        accuracy: of the task, MP.
        undefended: the same without a defence, MP*.

    Only a leak above the ideal and a loss of accuracy count (Zou et al., 2023, VFLAIR).
    """
    leak = max(0.0, max(attack, 0.0) - max(ideal, 0.0))
    loss = max(0.0, undefended - accuracy)
    return 1 / (1 + math.sqrt((1 - BETA) * leak**2 + BETA * loss**2))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One point of a finished study.

    Attributes:
        dcs_vflair, dcs_baseline: defence capability scores, 0 to 1, higher is better, on the
            target on which the point does worst; None where no attack applies. See `dcs`.
        p_holm: of the gain, adjusted for the number of points.
    """

    point: DefencePoint
    summary: Summary
    dcs_vflair: float | None = None
    dcs_baseline: float | None = None
    p_holm: float = math.nan

    @classmethod
    def of(cls, point: DefencePoint, summary: Summary, *, undefended: Interval) -> "Entry":
        """Score the point against the accuracy of the undefended one."""
        if not summary.leakage or point.reference:
            return cls(point=point, summary=summary)

        def worst(ideal_of: Callable[[Leakage], float]) -> float:
            return min(
                dcs(
                    attack=leak.score, ideal=ideal_of(leak), accuracy=summary.accuracy.mean,
                    undefended=undefended.mean,
                )
                for leak in summary.leakage.values()
            )  # fmt: skip

        return cls(
            point=point,
            summary=summary,
            dcs_vflair=worst(lambda leak: 0.0),
            dcs_baseline=worst(lambda leak: leak.baseline),
        )

    @property
    def accuracy(self) -> Interval:
        return self.summary.accuracy

    @property
    def epsilon(self) -> float:
        """See `Summary.epsilon_of`."""
        return self.summary.epsilon_of(self.point.config.method)

    @property
    def alone(self) -> tuple[str, float] | None:
        """The best solo baseline on the same data, and its mean accuracy; None: not measured."""
        gain = self.summary.gain
        return None if gain is None else (gain.baseline, gain.solo)

    @property
    def leakage(self) -> Mapping[str, Leakage]:
        return self.summary.leakage

    def as_json(self) -> dict[str, Any]:
        """Plain values, without the runs' settings."""
        point, summary = self.point, self.summary
        return {
            "defence": point.defence, "strength": point.strength, "undefended": point.undefended,
            "reference": point.reference, "seeds": summary.seeds,
            "accuracy": asdict(self.accuracy),
            "gain": asdict(summary.gain) if summary.gain else None,
            "p_holm": self.p_holm, "epsilon_x": summary.epsilon_x,
            "epsilon_y": summary.epsilon_y, "epsilon_passives": summary.epsilon_passives,
            "releases": summary.releases,
            "leakage": {target: leak.as_json() for target, leak in self.leakage.items()},
            "dcs_vflair": self.dcs_vflair, "dcs_baseline": self.dcs_baseline,
        }  # fmt: skip


def on_the_front(entries: Iterable[Entry], target: str) -> list[Entry]:
    """Return the points that no other beats in both accuracy and advantage, least leaking first."""
    shown = [entry for entry in entries if target in entry.leakage and not entry.point.reference]
    shown.sort(key=lambda entry: (entry.leakage[target].advantage.mean, -entry.accuracy.mean))
    front: list[Entry] = []
    for entry in shown:
        if not front or entry.accuracy.mean > front[-1].accuracy.mean:
            front.append(entry)
    return front


@dataclass(frozen=True)
class Board:
    """All points of a finished study, references first, the others by `dcs_baseline`.

    Attributes:
        failures: trials that ended with an error; their points are left out.
    """

    entries: tuple[Entry, ...]
    failures: tuple[Failure, ...] = ()

    @classmethod
    def of(cls, points: Sequence[DefencePoint], results: Results) -> "Board":
        """Average over the seeds, compare with the undefended point, and rank."""
        failed = {failure.point for failure in results.failures}
        whole = [
            (point, Summary.of(results.of(point))) for point in points if point.name not in failed
        ]
        undefended = next(summary.accuracy for point, summary in whole if point.undefended)
        entries = [Entry.of(point, summary, undefended=undefended) for point, summary in whole]
        found = [entry.summary.gain for entry in entries]
        gains = [None if gain is None else gain.over_chosen for gain in found]
        adjusted = holm(gains, [entry.summary.seeds for entry in entries])
        entries = [replace(one, p_holm=p) for one, p in zip(entries, adjusted, strict=True)]
        entries.sort(key=lambda entry: (not entry.point.reference, -(entry.dcs_baseline or 0.0)))
        return cls(tuple(entries), results.failures)

    @property
    def targets(self) -> tuple[str, ...]:
        """What attacks that applied were after."""
        return tuple(dict.fromkeys(t for entry in self.entries for t in sorted(entry.leakage)))

    @property
    def header(self) -> tuple[str, ...]:
        """Of `cells`."""
        leaks = (f"advantage on {target}" for target in self.targets)
        return (
            "defence", "accuracy %", "gain, points", "p, Holm", *leaks, "ε_x", "ε_y", "T",
            "dcs_baseline", "dcs_vflair",
        )  # fmt: skip

    def cells(self) -> list[tuple[str, ...]]:
        """Texts, one row an entry."""
        return [
            (
                entry.point.label,
                entry.accuracy.text(scale=100),
                _gain(entry.summary.gain),
                p_text(entry.p_holm),
                *(_leak(entry.leakage.get(target)) for target in self.targets),
                _epsilon(entry.epsilon),
                _epsilon(entry.summary.epsilon_y),
                str(entry.summary.releases),
                _score(entry.dcs_baseline),
                _score(entry.dcs_vflair),
            )
            for entry in self.entries
        ]

    def summary(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and rows of means, narrow enough for a terminal."""
        header = ("defence", "accuracy %", *self.targets, "ε_x", "T", "dcs_baseline")
        rows = [
            (
                entry.point.label,
                f"{100 * entry.accuracy.mean:.1f}",
                *(
                    f"{entry.leakage[target].advantage.mean:+.3f}"
                    if target in entry.leakage else "-"
                    for target in self.targets
                ),
                _epsilon(entry.epsilon),
                str(entry.summary.releases),
                _score(entry.dcs_baseline),
            )
            for entry in self.entries
        ]  # fmt: skip
        return header, rows

    def as_json(self) -> list[dict[str, Any]]:
        return [entry.as_json() for entry in self.entries]

    def as_markdown(self) -> str:
        """The leaderboard as a Markdown table."""
        table = markdown(self.header, self.cells())
        failed = "".join(f"- {failure.trial}: {failure.message}\n" for failure in self.failures)
        return f"{table}\nFailed, and their points left out:\n\n{failed}" if failed else table

    def as_csv(self) -> str:
        """The leaderboard with plain numbers, nested names joined by dots."""
        return to_csv(pd.json_normalize(self.as_json()))


def _gain(gain: Gain | None) -> str:
    return "-" if gain is None else gain.over_chosen.text(scale=100, form="+.1f")


def _leak(leak: Leakage | None) -> str:
    if leak is None:
        return "not applicable"
    return f"{leak.advantage.text(form='.3f')} {leak.name}"


def _epsilon(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.3g}"


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
