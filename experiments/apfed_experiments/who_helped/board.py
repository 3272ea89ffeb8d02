"""All coalitions over all seeds, and what they say of each passive: table, picture, page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from numpy.typing import NDArray

from apfed_experiments.columns import markdown, write_text
from apfed_experiments.drawing import ATTACK, OTHER, OURS, Picture, drawing
from apfed_experiments.report.page import Part, write_comparison
from apfed_experiments.study import OnDone
from apfed_experiments.summary import Interval, shared_share
from apfed_experiments.who_helped import (
    Coalition,
    CoalitionRun,
    Game,
    Measured,
    measure,
    players_of,
)
from secure_apfed.config import Config
from secure_apfed.data import files_digest, load_data
from secure_apfed.files import to_json

__all__ = ["HEADER", "READING", "Board", "PassiveRow", "measure_passives"]

HEADER = (
    "passive", "Shapley value, millinats", "left out, millinats", "Shapley value, points",
    "left out, points", "least of all in", "epsilon charged",
)  # fmt: skip
READING = (
    "Worth: of the active's own model, on labels that it holds back; in millinats of cross-entropy "
    "gained, and in points of accuracy. Shapley value: what a passive adds to those before it, "
    "over the orders in which they enter. Left out: what all lose without it. Means over the seeds "
    "with 95 % intervals (corrected resampled t); of one seed whose orders were drawn, over the "
    "orders. The "
    "values add up to the total. Epsilon charged: of one person there, those of all coalitions "
    "that were asked and hold the passive, added, at the sum of their deltas."
)
_MEASURES = ("loss", "accuracy")
_SCALES = {"loss": 1000.0, "accuracy": 100.0}


@dataclass(frozen=True, kw_only=True)
class PassiveRow:
    """What one passive added; by measure, "loss" (in nats gained) or "accuracy" (a share).

    Attributes:
        shapley, left_out: see `Game`; None where the others are too few to be asked.
        least: seeds in which no passive's Shapley value by loss is smaller.
        epsilon: what a person there is charged for all coalitions of a seed, at most; inf: no
            noise, so nothing is promised.
    """

    name: str
    shapley: Mapping[str, Interval]
    left_out: Mapping[str, Interval | None]
    least: int
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class Board:
    """What a study of contributions found.

    Attributes:
        config, game: of it; seeds: one run of each coalition for each.
        rows: of each passive, the most helpful by loss first.
        gain: of all over the active alone, by measure.
        worst_gap: the largest difference, over seeds and measures, between that gain and the sum of
            the Shapley values; rounding alone.
        wire_bytes: of all coalitions of a seed, mean; None: simulated.
        runs: of a seed.
        epsilon_x, epsilon_y: charged to the active, of all coalitions of a seed.
        delta: of every epsilon that is charged, at most.
    """

    config: Config
    game: Game
    seeds: Sequence[int]
    rows: tuple[PassiveRow, ...]
    gain: Mapping[str, Interval]
    worst_gap: float
    wire_bytes: float | None
    runs: int
    epsilon_x: float
    epsilon_y: float
    delta: float

    @property
    def title(self) -> str:
        """What was asked, in a line."""
        data, count = self.config.data, len(self.seeds)
        orders = "all orders" if self.game.exact else f"{len(self.game.orders)} drawn orders"
        return (
            f"{self.config.method.title} on {data.dataset}: {len(self.game.players)} passives, "
            f"{orders}, {count} seed{'' if count == 1 else 's'}"
        )

    @property
    def notes(self) -> list[str]:
        """What was charged, and what could not be asked, in sentences."""
        sent = (
            "nothing was sent, since the runs were simulated"
            if self.wire_bytes is None
            else f"{self.wire_bytes / 1e6:.1f} MB sent"
        )
        charged = (
            f"Charged for the {self.runs} coalitions of a seed, added up: {sent}; epsilon of a row "
            f"that the active released {_epsilon(self.epsilon_x)}, of one of its labels "
            f"{_epsilon(self.epsilon_y)}, at delta {self.delta:.2g}."
        )
        told = [charged]
        if self.config.labels_are_private:
            told.append(
                "Worth compares with true labels that the active holds back, of other rows with "
                "each seed, which no epsilon counts."
            )
        if never := self.game.never_asked:
            names = "; ".join(", ".join(sorted(one)) for one in never[:10])
            more = f" and {len(never) - 10} more" if len(never) > 10 else ""
            told.append(
                f"Not asked, since sums need {self.game.minimum} passives: {names}{more}. The "
                f"first {self.game.minimum} of an order enter together and share equally what they "
                "add, so these are not Shapley's own values."
            )
        return told

    def cells(self) -> list[tuple[str, ...]]:
        """Texts in the order of `HEADER`; the last row is the total."""
        lines = [
            (row.name, *(_cell(of[one], one) for one in _MEASURES
                         for of in (row.shapley, row.left_out)),
             f"{row.least} of {len(self.seeds)}", _epsilon(row.epsilon))
            for row in self.rows
        ]  # fmt: skip
        total = (_cell(self.gain["loss"], "loss"), "", _cell(self.gain["accuracy"], "accuracy"))
        return [*lines, ("all, over the active alone", *total, "", "", "")]

    def as_json(self) -> dict[str, Any]:
        """Plain values: nats, shares, bytes."""
        return {
            "title": self.title, "exact": self.game.exact, "minimum": self.game.minimum,
            "seeds": list(self.seeds), "runs": self.runs,
            "never_asked": [sorted(one) for one in self.game.never_asked],
            "passives": [asdict(row) for row in self.rows],
            "gain": {name: asdict(one) for name, one in self.gain.items()},
            "worst_gap": self.worst_gap, "wire_bytes": self.wire_bytes,
            "epsilon_x": self.epsilon_x, "epsilon_y": self.epsilon_y, "delta": self.delta,
        }  # fmt: skip


def measure_passives(
    config: Config, folder: Path, *, seeds: Sequence[int], jobs: int = 1, share: float = 0.3,
    drawn: int | None = None, noise: Sequence[str] = (), simulated: bool = True,
    on_done: OnDone = lambda done, total: None,
) -> Board:  # fmt: skip
    """Run the coalitions that are missing, and write what all of them say.

    Args:
        config: of the run whose passives are told apart; built-in data or all parties' tables.
        folder: of the study; made where missing.
        seeds: each coalition runs once for each.
        jobs: processes, one thread each.
        share: of the active's labelled rows that it holds back to measure.
        drawn: orders to draw for each seed; None: all where there are few passives.
        noise: passives whose features are replaced by noise, a check of the measure.
        simulated: whether runs that can be simulated are; their bytes are not counted then.
        on_done: called after each run.

    Raises:
        ConfigError: the method, the contract or the data leave nothing to tell apart.
        ApfedError: as `secure_apfed.run`.
    """
    data = load_data(config.data, seed=seeds[0])
    players = players_of(config, data.active.name, [table.name for table in data.passives])
    content = files_digest(config.data)
    games = {
        seed: Game.of(players.names, minimum=players.minimum, seed=seed, drawn=drawn)
        for seed in seeds
    }
    trials = [
        CoalitionRun(config=config, folder=folder / "coalitions", coalition=coalition, seed=seed,
                     share=share, data=content, noise=tuple(noise), simulated=simulated)
        for seed, game in games.items() for coalition in game.coalitions
    ]  # fmt: skip
    found: dict[tuple[int, Coalition], Measured] = {}
    finished = Parallel(n_jobs=jobs, return_as="generator")(delayed(measure)(one) for one in trials)
    for one, measured in zip(trials, finished, strict=True):
        found[one.seed, one.coalition] = measured
        on_done(len(found), len(trials))
    labelled = len(data.labelled_rows)
    back = round(share * labelled)
    alike = shared_share(
        None, train=len(data.train_rows) - back, labelled=labelled - back, test=back
    )
    board = _board(config, games, found, shared=alike)
    _write(board, folder)
    return board


_Added = Mapping[int, NDArray[np.float64]]
"""By seed, what each passive adds in each order, (orders, passives)."""

_Worth = dict[str, dict[int, dict[Coalition, float]]]
"""By measure, seed and coalition."""


def _board(
    config: Config, games: Mapping[int, Game], found: Mapping[tuple[int, Coalition], Measured], *,
    shared: float,
) -> Board:  # fmt: skip
    seeds = list(games)
    by_seed = {seed: [one for (of, _), one in found.items() if of == seed] for seed in seeds}
    worth = {name: {seed: _worth(found, seed, name) for seed in seeds} for name in _MEASURES}
    added = {
        name: {seed: games[seed].shapley(worth[name][seed]) for seed in seeds} for name in _MEASURES
    }
    gains = {name: [games[one].gain(worth[name][one]) for one in seeds] for name in _MEASURES}
    gaps = [
        abs(of_seed.sum(1).mean() - gain)
        for name in _MEASURES
        for of_seed, gain in zip(added[name].values(), gains[name], strict=True)
    ]
    charged = {
        passive: max(
            sum(one.passives.get(passive, 0.0) for one in of_seed) for of_seed in by_seed.values()
        )
        for passive in games[seeds[0]].players
    }
    sent = [one.wire_bytes for one in found.values()]
    return Board(
        config=config,
        game=games[seeds[0]],
        seeds=seeds,
        rows=_rows(games[seeds[0]], worth, added, charged, shared=shared),
        gain={name: Interval.of(gains[name], shared=shared) for name in _MEASURES},
        worst_gap=float(max(gaps)),
        wire_bytes=None if None in sent else sum(each or 0 for each in sent) / len(seeds),
        runs=len(by_seed[seeds[0]]),
        **{
            name: max(sum(getattr(one, name) for one in of_seed) for of_seed in by_seed.values())
            for name in ("epsilon_x", "epsilon_y", "delta")
        },
    )


def _rows(
    game: Game, worth: _Worth, added: Mapping[str, _Added], charged: Mapping[str, float], *,
    shared: float,
) -> tuple[PassiveRow, ...]:  # fmt: skip
    """One of each passive, the most helpful by loss first."""
    least = [int(one.mean(0).argmin()) for one in added["loss"].values()]
    lost = {name: [game.leave_one_out(one) for one in worth[name].values()] for name in _MEASURES}
    rows = [
        PassiveRow(
            name=passive,
            shapley={
                name: _over(added[name], at, exact=game.exact, shared=shared) for name in _MEASURES
            },
            left_out={
                name: _known([one[passive] for one in lost[name]], shared) for name in _MEASURES
            },
            least=least.count(at),
            epsilon=charged[passive],
        )
        for at, passive in enumerate(game.players)
    ]
    return tuple(sorted(rows, key=lambda row: -row.shapley["loss"].mean))


def _worth(
    found: Mapping[tuple[int, Coalition], Measured], seed: int, measure: str
) -> dict[Coalition, float]:
    """Of each coalition of a seed; more is better."""
    sign = -1.0 if measure == "loss" else 1.0
    return {
        coalition: sign * float(getattr(one, measure))
        for (of, coalition), one in found.items()
        if of == seed
    }


def _over(added: _Added, at: int, *, exact: bool, shared: float) -> Interval:
    """Over the seeds; of one seed, over its orders, where these were drawn."""
    orders = [one[:, at] for one in added.values()]
    if len(orders) == 1 and not exact:
        return Interval.of(orders[0].tolist())
    return Interval.of([float(one.mean()) for one in orders], shared=shared)


def _known(values: Sequence[float | None], shared: float) -> Interval | None:
    known = [value for value in values if value is not None]
    return Interval.of(known, shared=shared) if known else None


def _cell(interval: Interval | None, measure: str) -> str:
    if interval is None:
        return "not asked"
    return interval.text(scale=_SCALES[measure], form="+.1f")


def _epsilon(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.3g}"


def _write(board: Board, folder: Path) -> None:
    """The table as JSON and Markdown, the picture, and a page of both."""
    write_text(folder / "contributions.json", to_json(board.as_json()))
    notes = "".join(f"\n{note}\n" for note in board.notes)
    write_text(folder / "contributions.md", markdown(HEADER, board.cells()) + notes)
    picture = _draw(folder / "contributions.png", board)
    write_comparison(
        folder, title="Who helped", reading=" ".join([READING, *board.notes]), header=HEADER,
        parts=[Part(title=board.title, picture=picture, rows=board.cells())],
    )  # fmt: skip


def _draw(path: Path, board: Board) -> Picture:
    """A bar of each passive's Shapley value by loss, and what leaving it out costs."""
    rows = board.rows[::-1]
    with drawing(path, (7.5, 1.2 + 0.55 * len(rows))) as figure:
        axes = figure.subplots()
        for at, row in enumerate(rows):
            for shift, colour, of in ((0.18, OURS, row.shapley), (-0.18, ATTACK, row.left_out)):
                found = of["loss"]
                if found is not None:
                    axes.barh(
                        at + shift, 1000 * found.mean, height=0.34, color=colour,
                        xerr=found.arms(1000), capsize=2.5,
                    )  # fmt: skip
        axes.axvline(0, color=OTHER, linewidth=1)
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.set_xlabel("millinats of cross-entropy gained; blue: Shapley value, red: left out")
    return Picture(
        path=path, title=board.title,
        caption="What each passive adds to the active's own model, by loss on labels held back: "
        "its Shapley value, and what all lose without it; 95 % intervals.",
    )  # fmt: skip
