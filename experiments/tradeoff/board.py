"""The leaderboard of a study: accuracy, leakage and DCS of every point, with intervals."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from experiments import tables
from experiments.intervals import Interval
from experiments.tradeoff.outcome import Leak, Outcome
from experiments.tradeoff.study import Point
from experiments.tradeoff.trial import Failure
from secure_apfed.plain_csv import to_csv

__all__ = ["BETA", "Board", "Entry", "Leakage", "dcs", "on_the_front"]

BETA = 0.5
"""Weight of accuracy against leakage in DCS."""


@dataclass(frozen=True, kw_only=True)
class Leakage:
    """The attack that gained most on one target, averaged over the seeds.

    Attributes:
        attack: its setting: name, knowledge, adversary; metric: what it is measured in.
        advantage: over the best baseline with the same knowledge.
        score, baseline: the metric itself, means.
    """

    target: str
    attack: str
    metric: str
    advantage: Interval
    score: float
    baseline: float


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One point of a finished study.

    Attributes:
        epsilon_x, epsilon_y: the largest over the seeds; inf: nothing is promised.
        releases: T, the most releases of one row.
        leakage: by target, of the worst attack, over the seeds to which it applied; a target
            that no attack applied to is absent.
        dcs_vflair, dcs_baseline: defence capability scores, 0 to 1, higher is better; None where
            no attack applies. See `dcs`.
    """

    point: Point
    accuracy: Interval
    epsilon_x: float
    epsilon_y: float
    releases: int
    leakage: Mapping[str, Leakage]
    dcs_vflair: float | None = None
    dcs_baseline: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values, without the runs' settings."""
        return {
            "defence": self.point.defence,
            "strength": self.point.strength,
            "undefended": self.point.undefended,
            "reference": self.point.reference,
            "seeds": len(self.point.configs),
            "accuracy": asdict(self.accuracy),
            "epsilon_x": self.epsilon_x,
            "epsilon_y": self.epsilon_y,
            "releases": self.releases,
            "leakage": {target: asdict(leak) for target, leak in self.leakage.items()},
            "dcs_vflair": self.dcs_vflair,
            "dcs_baseline": self.dcs_baseline,
        }


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


def _entry(point: Point, outcomes: Sequence[Outcome]) -> Entry:
    return Entry(
        point=point,
        accuracy=Interval.of([one.accuracy for one in outcomes]),
        epsilon_x=max(one.epsilon_x for one in outcomes),
        epsilon_y=max(one.epsilon_y for one in outcomes),
        releases=max(one.releases for one in outcomes),
        leakage=dict(_worst_leaks(outcomes)),
    )


def _worst_leaks(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, Leakage]]:
    """Per target the attack with the highest mean advantage; chosen by means, not per seed.

    Over the seeds to which it applied, which its name counts where some are missing.
    """
    found: dict[str, dict[str, list[Leak]]] = {}
    for one in outcomes:
        for (target, attack), leak in one.leaks.items():
            found.setdefault(target, {}).setdefault(attack, []).append(leak)
    for target, candidates in found.items():
        attack, leaks = max(
            candidates.items(), key=lambda one: np.mean([leak.advantage for leak in one[1]])
        )
        some = "" if len(leaks) == len(outcomes) else f", {len(leaks)} of {len(outcomes)} seeds"
        yield (
            target,
            Leakage(
                target=target,
                attack=f"{attack}{some}",
                metric=leaks[0].metric,
                advantage=Interval.of([leak.advantage for leak in leaks]),
                score=float(np.mean([leak.score for leak in leaks])),
                baseline=float(np.mean([leak.baseline for leak in leaks])),
            ),
        )


def on_the_front(entries: Iterable[Entry], target: str) -> list[Entry]:
    """Return the points that no other beats in both accuracy and advantage, least leaking first."""
    shown = [one for one in entries if target in one.leakage and not one.point.reference]
    shown.sort(key=lambda one: (one.leakage[target].advantage.mean, -one.accuracy.mean))
    front: list[Entry] = []
    for one in shown:
        if not front or one.accuracy.mean > front[-1].accuracy.mean:
            front.append(one)
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
    def of(
        cls,
        results: Sequence[tuple[Point, Sequence[Outcome]]],
        failures: Sequence[Failure] = (),
    ) -> "Board":
        """Average over the seeds, compare with the undefended point, and rank."""
        entries = [_entry(point, outcomes) for point, outcomes in results]
        undefended = next(one for one in entries if one.point.undefended)
        scored = [_with_dcs(one, undefended.accuracy.mean) for one in entries]
        scored.sort(key=lambda one: (not one.point.reference, -(one.dcs_baseline or 0.0)))
        return cls(tuple(scored), tuple(failures))

    @property
    def targets(self) -> tuple[str, ...]:
        """What attacks that applied were after."""
        return tuple(dict.fromkeys(t for entry in self.entries for t in sorted(entry.leakage)))

    @property
    def header(self) -> tuple[str, ...]:
        """Of `cells`."""
        leaks = (f"advantage on {target}" for target in self.targets)
        return ("defence", "accuracy %", *leaks, "ε_x", "ε_y", "T", "dcs_baseline", "dcs_vflair")

    def cells(self) -> list[tuple[str, ...]]:
        """Texts, one row an entry."""
        return [
            (
                entry.point.label,
                entry.accuracy.text(scale=100),
                *(_leak_text(entry.leakage.get(target)) for target in self.targets),
                _epsilon(entry.epsilon_x),
                _epsilon(entry.epsilon_y),
                str(entry.releases),
                *("-" if v is None else f"{v:.3f}" for v in (entry.dcs_baseline, entry.dcs_vflair)),
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
                *(_mean_text(entry.leakage.get(target)) for target in self.targets),
                _epsilon(entry.epsilon_x),
                str(entry.releases),
                "-" if entry.dcs_baseline is None else f"{entry.dcs_baseline:.3f}",
            )
            for entry in self.entries
        ]
        return header, rows

    def as_json(self) -> list[dict[str, Any]]:
        """Plain values."""
        return [entry.as_json() for entry in self.entries]

    def as_markdown(self) -> str:
        """The leaderboard as a Markdown table."""
        table = tables.markdown(self.header, self.cells())
        failed = "".join(f"- {one.trial}: {one.message}\n" for one in self.failures)
        return f"{table}\nFailed, and their points left out:\n\n{failed}" if failed else table

    def as_csv(self) -> str:
        """The leaderboard with plain numbers, nested names joined by dots."""
        return to_csv(pd.json_normalize(self.as_json()))


def _with_dcs(entry: Entry, undefended: float) -> Entry:
    """Score the target on which the point does worst."""
    if not entry.leakage or entry.point.reference:
        return entry
    accuracy = entry.accuracy.mean
    leaks = entry.leakage.values()
    given = {name: value for name, value in vars(entry).items() if not name.startswith("dcs")}
    return Entry(
        **given,
        dcs_vflair=min(
            dcs(attack=leak.score, ideal=0.0, accuracy=accuracy, undefended=undefended)
            for leak in leaks
        ),
        dcs_baseline=min(
            dcs(attack=leak.score, ideal=leak.baseline, accuracy=accuracy, undefended=undefended)
            for leak in leaks
        ),
    )


def _leak_text(leak: Leakage | None) -> str:
    if leak is None:
        return "not applicable"
    return f"{leak.advantage.text(form='.3f')} {leak.attack}"


def _mean_text(leak: Leakage | None) -> str:
    return "-" if leak is None else f"{leak.advantage.mean:+.3f}"


def _epsilon(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.3g}"
