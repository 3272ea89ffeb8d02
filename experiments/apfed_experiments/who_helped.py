"""Who helped: what each passive adds to the active's model, by runs of coalitions of passives.

Run by: whoever plays all parties in one process. No passive's part is opened: a coalition's worth
is what the active measures on labels that it holds back, of a model trained with sums to which the
whole coalition adds. Retrainings tell more than one run does, so their bytes and epsilons are added
up, and coalitions that the contract's sums do not allow are never asked (`rules.py`).
"""

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from apfed_experiments.columns import EPSILON, Column, Table, plain, within, write_text
from apfed_experiments.drawing import ATTACK, OTHER, OURS, Picture, drawing
from apfed_experiments.report.page import Part, write_comparison
from apfed_experiments.solo import taught_alone
from apfed_experiments.study import Kept, OnDone, in_processes, measured_once
from apfed_experiments.summary import Interval, Row, shared_share
from apfed_experiments.words import epsilon
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, files_digest, load_data
from secure_apfed.data.partition import choose_labelled
from secure_apfed.errors import ConfigError
from secure_apfed.files import to_json
from secure_apfed.learning.descent import predictor_of
from secure_apfed.methods import ALONE
from secure_apfed.methods.terms import make_sum, settings_of
from secure_apfed.runs.outcome import Epsilon
from secure_apfed.runs.run import run
from secure_apfed.secure_sums import sum_kind
from secure_apfed.seeds import derive_seed
from secure_apfed.settings.privacy import GuardSettings, LabelSettings
from secure_apfed.simulation import begin, finish, train, why_not
from secure_apfed.tasks import Classification

__all__ = [
    "EXACT", "READING", "Board", "Coalition", "CoalitionRun", "Game", "Measured", "held_back",
    "measure", "measure_passives", "players_of", "with_noise",
]  # fmt: skip

Coalition: TypeAlias = frozenset[str]
"""Passives that train with the active; the empty one: it trains alone."""
EXACT = 6
"""Of so many passives or fewer all orders are taken: 720 orders of 64 coalitions."""
READING = (
    "Worth: of the active's own model, on labels that it holds back; in millinats of cross-entropy "
    "gained, and in points of accuracy. Shapley value: what a passive adds to those before it, "
    "over the orders in which they enter. Left out: what all lose without it. Means over the seeds "
    "with 95 % intervals (corrected resampled t); of one seed whose orders were drawn, over the "
    "orders. The values add up to the total. Epsilon charged: of one person there, those of all "
    "coalitions that were asked and hold the passive, added, at the sum of their deltas."
)
_MEASURES = {"loss": 1000.0, "accuracy": 100.0}  # and their scales for people


# The arithmetic of who helped: Shapley values and leave-one-out, of coalitions that may be asked.
#
# Shapley (1953): what a player adds to those before it, averaged over the orders in which players
# enter. A contract does not allow sums of fewer than `minimum` passives, so the first `minimum` of
# an order enter together here, and share what they add equally; with a minimum of 1 these are
# Shapley's own values. In every order what all add telescopes to the worth of all minus that of
# nobody, so the values sum to the total gain whether all orders are taken or some are drawn.


@dataclass(frozen=True, kw_only=True)
class Game:
    """Who plays, at least one passive more than the `minimum` of contributors below which no sum is
    opened, and in which orders they enter; `exact`: these are all that there are.
    """

    players: tuple[str, ...]
    minimum: int
    orders: tuple[tuple[str, ...], ...]
    exact: bool

    @classmethod
    def of(
        cls, players: Sequence[str], *, minimum: int, seed: int, drawn: int | None = None
    ) -> "Game":
        """All orders of up to `EXACT` players; of more, or if so many are asked for, drawn ones."""
        if drawn is None and len(players) <= EXACT:
            orders = tuple(itertools.permutations(players))
            return cls(players=tuple(players), minimum=minimum, orders=orders, exact=True)
        draw = np.random.default_rng(derive_seed(seed, "orders of passives"))
        orders = tuple(tuple(map(str, draw.permutation(players))) for _ in range(drawn or 32))
        return cls(players=tuple(players), minimum=minimum, orders=orders, exact=False)

    @property
    def everybody(self) -> Coalition:
        return frozenset(self.players)

    @property
    def coalitions(self) -> tuple[Coalition, ...]:
        """Whose worth is needed, for Shapley values and leave-one-out; smaller ones first."""
        needed = {frozenset[str](), self.everybody}
        needed |= {rest for rest in map(self._without, self.players) if len(rest) >= self.minimum}
        for order in self.orders:
            needed |= {frozenset(order[:size]) for size in range(self.minimum, len(order))}
        return tuple(sorted(needed, key=lambda of: (len(of), sorted(of))))

    @property
    def never_asked(self) -> tuple[Coalition, ...]:
        sizes = range(1, self.minimum)
        few = (itertools.combinations(self.players, size) for size in sizes)
        return tuple(map(frozenset, itertools.chain(*few)))

    def shapley(self, worth: Mapping[Coalition, float]) -> NDArray[np.float64]:
        """What each player adds in each order, (orders, players); values are means over orders."""
        place = {name: at for at, name in enumerate(self.players)}
        added = np.zeros((len(self.orders), len(self.players)))
        for line, order in zip(added, self.orders, strict=True):
            before = worth[frozenset()]
            for size in range(self.minimum, len(order) + 1):
                entering = order[:size] if size == self.minimum else order[size - 1 : size]
                after = worth[frozenset(order[:size])]
                line[[place[name] for name in entering]] = (after - before) / len(entering)
                before = after
        return added

    def leave_one_out(self, worth: Mapping[Coalition, float]) -> dict[str, float | None]:
        """What all lose without each; None where the others alone are too few for a sum."""
        lost = {name: worth.get(self._without(name)) for name in self.players}
        every = worth[self.everybody]
        return {name: None if rest is None else every - rest for name, rest in lost.items()}

    def gain(self, worth: Mapping[Coalition, float]) -> float:
        return worth[self.everybody] - worth[frozenset()]

    def _without(self, name: str) -> Coalition:
        return self.everybody - {name}


def players_of(config: Config, active: str, passives: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Passives that add anything, and the fewest of them whose sum may be opened.

    Raises ConfigError where the method has no sum or vote of passives beside a model of the
    active's own; too few passives to tell any apart; or sums of several coalitions would open a
    passive's votes, which a difference of two sums without noise is.
    """
    happens, settings = config.method.happens, config.secure_sum
    helps = {"gradients are summed", "passives vote"} & happens
    if not (helps and "the active predicts alone" in happens):
        raise ConfigError(
            f"method {config.method.name}: contributions are of passives that add gradients or "
            "votes to a model which predicts alone; take apfed_c, votes or one of their kin"
        )
    if config.task != Classification.name:
        raise ConfigError(
            f"task: contributions are told in cross-entropy and accuracy, and task is "
            f"{config.task}; take {Classification.name}"
        )
    names = tuple(name for name in passives if settings_of(config, name).weight > 0)
    minimum = _minimum(config, active, names)
    if len(names) <= minimum:
        raise ConfigError(
            f"{len(names)} passives help, and the contract's sums need {minimum} or more of them, "
            "so no coalition but all may be asked and nobody can be told apart; take more "
            "passives, or say secure_sum.allow_single_passive: true if that is acceptable"
        )
    repeats = "passives vote" in happens and config.method.noise(config) is None
    if repeats and not settings.allow_single_passive:
        raise ConfigError(
            "method.epsilon: votes without noise are the same in every coalition, so the sums of "
            "two that differ by one passive open its votes; say how much a vote may cost, as "
            "method: {name: votes, epsilon: 4}, or secure_sum.allow_single_passive: true if "
            "single votes may be read"
        )
    return names, minimum


def _minimum(config: Config, active: str, passives: tuple[str, ...]) -> int:
    """1 where single answers are read anyway; else 2 or what thresholds and colluders ask for."""
    happens, least = config.method.happens, 1 + config.colluders
    if "votes are answered singly" in happens:
        return least
    if not config.secure_sum.allow_single_passive:
        least = max(least, 2)
    summed = "contributions are summed" in happens
    if summed and not sum_kind(config.secure_sum).needs_all and len(passives) > 1:
        agreed = make_sum(config, "who helped", active, passives)
        threshold = agreed.parameters().get("threshold")
        # A threshold of all says that nobody may fall silent, not how many hide each other.
        if isinstance(threshold, int) and threshold < len(passives):
            least = max(least, threshold)
    return least


# What one coalition is worth: the active's model after training with it, on labels held back.
#
# Each is a run of its own with new networks, from the same rows and the same seed; test rows of the
# configuration take no part. A run that can be simulated is, where its bytes need not be counted.
# Figures of each run are kept in a file, so that a stopped study goes on.


class Measured(Kept):
    """The file of one coalition's run.

    Attributes:
        loss: mean cross-entropy on the labels held back, nats; accuracy: on the same rows.
        wire_bytes: of all links; None: simulated, nothing was sent.
        epsilon_x, epsilon_y: what the active spent; passives: what a person cost each, inf without
            noise; delta: of these.
    """

    loss: float
    accuracy: float
    wire_bytes: int | None = None
    epsilon_x: Epsilon = 0.0
    epsilon_y: Epsilon = 0.0
    passives: Mapping[str, Epsilon] = {}
    delta: float = 0.0
    seconds: float = 0.0

    def worth(self, measure: str) -> float:
        return -self.loss if measure == "loss" else self.accuracy


@dataclass(frozen=True, kw_only=True)
class CoalitionRun:
    """One coalition under one seed, of rows, weights and what is held back.

    Attributes:
        config: of all runs; folder: of their figures; data: digest of own tables.
        share: of the active's labelled rows that is held back.
        noise: passives whose features are replaced by noise; a check of the measure.
    """

    config: Config
    folder: Path
    coalition: Coalition
    seed: int
    share: float
    data: str
    noise: tuple[str, ...] = ()

    @property
    def settings(self) -> str:
        own = self.config.model_dump_json(exclude={"name", "seed", "party_seeds", "attacks"})
        files = (self.data,) if self.data else ()
        coalition = sorted(self.coalition)
        parts = (own, *files, coalition, self.seed, self.share, self.noise)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def path(self) -> Path:
        return self.folder / f"coalition-{self.settings[:16]}.json"


def measure(run_of: CoalitionRun) -> Measured:
    """Train with this coalition on one thread, unless its figures are kept, and measure.

    Raises CheckpointError where its place holds something else, and as a run does.
    """
    return measured_once(run_of.path, Measured, run_of.settings, partial(_measured, run_of))


def _measured(run_of: CoalitionRun) -> dict[str, Any]:
    began, seed, coalition = time.monotonic(), run_of.seed, run_of.coalition
    config = _config_of(run_of)
    data = held_back(load_data(config.data, seed=seed), run_of.share, seed=seed)
    data = with_noise(data, run_of.noise, seed=seed)
    passives = tuple(table for table in data.passives if table.name in coalition)
    data = replace(data, passives=passives)
    spent, trained = _trained(config, data)
    assert data.active.labels is not None
    assert trained is not None
    features_VF, labels_V = (
        of[data.test_rows] for of in (data.active.features, data.active.labels)
    )
    with torch.no_grad():
        scores_VK = trained(features_VF.to(next(trained.parameters()).dtype)).double()
    loss = float(F.cross_entropy(scores_VK, labels_V))
    accuracy = float((scores_VK.argmax(1) == labels_V).double().mean())
    if not math.isfinite(loss):
        raise ConfigError(
            f"training with {', '.join(sorted(coalition)) or 'nobody'} under seed {seed} "
            "diverged, so that nobody can be told apart; lower train.learning_rate"
        )
    return {**spent, "loss": loss, "accuracy": accuracy, "seconds": time.monotonic() - began}


def held_back(data: VerticalData, share: float, *, seed: int) -> VerticalData:
    """Put labelled training rows, drawn by class, in the place of the test rows.

    Raises ConfigError where there are too few labels to hold any back.
    """
    assert data.active.labels is not None
    labelled = data.labelled_rows
    labels_n = data.active.labels[labelled].numpy()
    if data.targets is not None:  # numbers are drawn alike
        labels_n = np.zeros(len(labels_n), np.int64)
    learnt, classes = round((1 - share) * len(labelled)), len(np.unique(labels_n))
    if not classes <= learnt < len(labelled):
        raise ConfigError(
            f"{data.active.name} has {len(labelled)} labelled rows of {classes} classes; with "
            f"{share:g} of them held back {learnt} are left to learn from, and each class needs "
            "one there and at least one row is to be held back; label more, or hold back another "
            "share"
        )
    draw = derive_seed(seed, "held back for contributions")
    kept = choose_labelled(labels_n, float(learnt), seed=draw)
    chosen = torch.zeros(len(labelled), dtype=torch.bool)
    chosen[torch.from_numpy(kept)] = True
    back = labelled[~chosen]
    train = data.train_rows[~torch.isin(data.train_rows, back)]
    return replace(data, train_rows=train, test_rows=back, labelled=labelled[chosen])


def with_noise(data: VerticalData, names: tuple[str, ...], *, seed: int) -> VerticalData:
    """Replace these passives' features by normal noise of their own means and deviations."""
    known = [table.name for table in data.passives]
    if unknown := sorted(set(names) - set(known)):
        raise ConfigError(f"no passive is called {unknown[0]}; there are {', '.join(known)}")

    def noisy(features_N: Tensor, name: str) -> Tensor:
        draw = torch.Generator().manual_seed(derive_seed(seed, "noise in place of", name))
        noise_N = torch.randn(features_N.shape, generator=draw)
        return features_N.mean(0) + features_N.std(0) * noise_N

    return replace(data, passives=tuple(
        replace(table, features=noisy(table.features, table.name)) if table.name in names else table
        for table in data.passives
    ))  # fmt: skip


def _config_of(run_of: CoalitionRun) -> Config:
    """With settings of the coalition's passives alone."""
    config, coalition = run_of.config, run_of.coalition
    own: dict[str, Any] = {"seed": run_of.seed, "party_seeds": "shared_for_comparison"}
    own["passives"] = {
        name: of for name, of in config.passives.items() if name in {*coalition, "default"}
    }
    if config.secure_sum.threshold is not None:  # of all: each coalition asks as many as it has
        threshold = min(config.secure_sum.threshold, max(1, len(coalition)))
        own["secure_sum"] = config.secure_sum.model_copy(update={"threshold": threshold})
    return config.model_copy(update=own)


def _trained(config: Config, data: VerticalData) -> tuple[dict[str, Any], nn.Module | None]:
    """What was spent, by attributes of `Measured`, and the active's model."""
    names = sorted(table.name for table in data.passives)
    if not names:
        return {"wire_bytes": 0}, _alone(config, data)
    if not why_not(config):
        unprotected = dict.fromkeys(names, math.inf)
        spent = {"epsilon_x": math.inf, "epsilon_y": math.inf, "passives": unprotected}
        return spent, _simulated(config, data)
    result = run(config, None, data=data)
    accounts, privacy = result.contributions, result.privacy
    each = {name: accounts[name]["epsilon"] if name in accounts else math.inf for name in names}
    return {
        "wire_bytes": result.wire_bytes, "passives": each,
        "epsilon_x": privacy.epsilon_x, "epsilon_y": privacy.epsilon_y,
        "delta": max([privacy.delta, *(account["delta"] for account in accounts.values())]),
    }, result.recording.model  # fmt: skip


def _alone(config: Config, data: VerticalData) -> nn.Module | None:
    """The active without anybody: nothing leaves it, so nothing is protected.

    Where passives vote, the student of votes that say nothing: it learns what the active believes.
    """
    if "passives vote" in config.method.happens:
        return predictor_of(taught_alone(config, data).networks)
    without = {
        "method": ALONE, "guard": GuardSettings(mechanism="none"), "defences": (),
        "labels": LabelSettings(), "dp_sgd": None,
    }  # fmt: skip
    own_config = config.model_copy(update=without)
    if why_not(own_config):
        return run(own_config, None, data=data).recording.model
    return _simulated(own_config, data)


def _simulated(config: Config, data: VerticalData) -> nn.Module | None:
    session = begin(config, data)
    finish(session, step=train(session, config))
    return predictor_of(session.learner.solo())


@dataclass(frozen=True, kw_only=True)
class Board:
    """What a study of contributions found, one run of each coalition for each seed.

    Attributes:
        table: a row of each passive, the most helpful by loss first, and one of all.
        found: gain: of all over the active alone, by measure; worst_gap: the largest difference,
            over seeds and measures, from the sum of the Shapley values, rounding alone; runs: of a
            seed; wire_bytes: of all of these, mean, None: simulated; epsilon_x, epsilon_y: charged
            to the active for these; delta: of every epsilon that is charged, at most.
    """

    config: Config
    game: Game
    seeds: Sequence[int]
    table: Table
    found: Mapping[str, Any]

    @property
    def notes(self) -> list[str]:
        found = self.found
        sent = (
            "nothing was sent, since the runs were simulated"
            if found["wire_bytes"] is None
            else f"{found['wire_bytes'] / 1e6:.1f} MB sent"
        )
        charged = (
            f"Charged for the {found['runs']} coalitions of a seed, added up: {sent}; epsilon of a "
            f"row that the active released {epsilon(found['epsilon_x'])}, of one of its labels "
            f"{epsilon(found['epsilon_y'])}, at delta {found['delta']:.2g}."
        )
        told = [charged]
        if self.config.labels_are_private:
            told.append(
                "Worth compares with true labels that the active holds back, of other rows with "
                "each seed, which no epsilon counts."
            )
        if never := self.game.never_asked:
            names = "; ".join(", ".join(sorted(of)) for of in never[:10])
            more = f" and {len(never) - 10} more" if len(never) > 10 else ""
            told.append(
                f"Not asked, since sums need {self.game.minimum} passives: {names}{more}. The "
                f"first {self.game.minimum} of an order enter together and share equally what they "
                "add, so these are not Shapley's own values."
            )
        return told

    def as_json(self) -> dict[str, Any]:
        *passives, _total = self.table.plain()
        return {
            "title": self.table.title, "exact": self.game.exact, "minimum": self.game.minimum,
            "seeds": list(self.seeds), "passives": passives,
            "never_asked": [sorted(of) for of in self.game.never_asked], **plain(self.found),
        }  # fmt: skip


def measure_passives(
    config: Config, folder: Path, *, seeds: Sequence[int], jobs: int = 1, share: float = 0.3,
    drawn: int | None = None, noise: Sequence[str] = (),
    on_done: OnDone = lambda done, total: None,
) -> Board:  # fmt: skip
    """Run the coalitions that are missing, and write what all of them say.

    `share` of the active's labelled rows is held back to measure; `drawn` are orders for each seed
    (None: all where there are few passives); the features of `noise` passives are replaced, a check
    of the measure. Raises ConfigError where nothing is left to tell apart, and as a run does.
    """
    data = load_data(config.data, seed=seeds[0])
    names, minimum = players_of(config, data.active.name, [table.name for table in data.passives])
    content = files_digest(config.data)
    games = {seed: Game.of(names, minimum=minimum, seed=seed, drawn=drawn) for seed in seeds}
    trials = [
        CoalitionRun(config=config, folder=folder / "coalitions", coalition=coalition, seed=seed,
                     share=share, data=content, noise=tuple(noise))
        for seed, game in games.items() for coalition in game.coalitions
    ]  # fmt: skip
    tasks = [(trial.path.stem, partial(measure, trial)) for trial in trials]
    measured = in_processes(tasks, len(tasks), jobs=jobs, on_done=on_done)
    found: dict[int, dict[Coalition, Measured]] = {seed: {} for seed in games}
    for trial in trials:
        found[trial.seed][trial.coalition] = measured[trial.path.stem]
    labelled = len(data.labelled_rows)
    back = round(share * labelled)
    alike = shared_share(
        None, train=len(data.train_rows) - back, labelled=labelled - back, test=back
    )
    board = _board(config, games, found, shared=alike)
    write_text(folder / "contributions.json", to_json(board.as_json()))
    write_text(folder / "contributions.md", board.table.markdown(board.notes))
    picture = _draw(folder / "contributions.png", board.table)
    reading, part = " ".join([READING, *board.notes]), Part(table=board.table, picture=picture)
    write_comparison(folder, title="Who helped", reading=reading, parts=[part])
    return board


def _board(
    config: Config, games: Mapping[int, Game], found: Mapping[int, Mapping[Coalition, Measured]], *,
    shared: float,
) -> Board:  # fmt: skip
    """Of a passive's row, shapley and left_out: by measure, "loss" (in nats gained) or "accuracy"
    (a share), see `Game`; None where the others are too few to be asked. least: seeds in which no
    passive's Shapley value by loss is smaller. epsilon: what a person there is charged for all
    coalitions of a seed, at most; inf: no noise, so nothing is promised.
    """
    game, every = next(iter(games.values())), list(found.values())

    def charged(spent: Callable[[Measured], float]) -> float:
        """For all coalitions of a seed, at most."""
        return max(sum(map(spent, of_seed.values())) for of_seed in every)

    rows: list[Row] = [
        {"name": name, "shapley": {}, "left_out": {},
         "epsilon": charged(lambda run: run.passives.get(name, 0.0))}  # noqa: B023 - called at once
        for name in game.players
    ]  # fmt: skip
    gain, gaps = dict[str, Interval](), list[float]()
    for measure in _MEASURES:
        worth = [{of: run.worth(measure) for of, run in of_seed.items()} for of_seed in every]
        # By seed, what each passive adds in each order, (orders, passives).
        added = [of.shapley(known) for of, known in zip(games.values(), worth, strict=True)]
        gains = [game.gain(of_seed) for of_seed in worth]
        gain[measure] = Interval.of(gains, shared=shared)
        gaps += [abs(of.sum(1).mean() - all_) for of, all_ in zip(added, gains, strict=True)]
        for at, row in enumerate(rows):
            # Over the seeds; of one seed, over its orders, where these were drawn.
            drawn = len(added) == 1 and not game.exact
            orders = [of[:, at] for of in added]
            values = orders[0].tolist() if drawn else [float(of.mean()) for of in orders]
            row["shapley"][measure] = Interval.of(values, shared=0.0 if drawn else shared)
            lost = [game.leave_one_out(of_seed)[row["name"]] for of_seed in worth]
            asked = [difference for difference in lost if difference is not None]
            row["left_out"][measure] = Interval.of(asked, shared=shared) if asked else None
            if measure == "loss":
                row["least"] = sum(int(of.mean(0).argmin()) == at for of in added)
    rows.sort(key=lambda row: -float(row["shapley"]["loss"].mean))
    rows.append({"name": "all, over the active alone", "shapley": gain})
    told = "all orders" if game.exact else f"{len(game.orders)} drawn orders"
    seeds = f"{len(every)} seed{'' if len(every) == 1 else 's'}"
    title = (
        f"{config.method.title} on {config.data.dataset}: {len(game.players)} passives, {told}, "
        f"{seeds}"
    )
    sent = [run.wire_bytes for of_seed in every for run in of_seed.values()]
    return Board(
        config=config, game=game, seeds=list(games), table=Table(_columns(len(every)), rows, title),
        found={
            "gain": gain, "worst_gap": float(max(gaps)), "runs": len(every[0]),
            "wire_bytes": None if None in sent else sum(of or 0 for of in sent) / len(every),
            "epsilon_x": charged(lambda run: run.epsilon_x),
            "epsilon_y": charged(lambda run: run.epsilon_y),
            "delta": charged(lambda run: run.delta),
        },
    )  # fmt: skip


def _columns(seeds: int) -> list[Column]:
    def cell(name: str, title: str, measure: str) -> Column:
        text = within("+.1f", scale=_MEASURES[measure])
        return Column(
            name=name, title=title, keys=(),
            form=lambda by: "not asked" if by[measure] is None else text(by[measure]),
        )  # fmt: skip

    return [
        Column(name="name", title="passive"),
        cell("shapley", "Shapley value, millinats", "loss"),
        cell("left_out", "left out, millinats", "loss"),
        cell("shapley", "Shapley value, points", "accuracy"),
        cell("left_out", "left out, points", "accuracy"),
        Column(name="shapley"),
        Column(name="left_out"),
        Column(name="least", title="least of all in", form=lambda times: f"{times} of {seeds}"),
        replace(EPSILON, title="epsilon charged"),
    ]


def _draw(path: Path, table: Table) -> Picture:
    rows = table.rows[-2::-1]
    with drawing(path, (7.5, 1.2 + 0.55 * len(rows))) as figure:
        axes = figure.subplots()
        for at, row in enumerate(rows):
            for shift, colour, name in ((0.18, OURS, "shapley"), (-0.18, ATTACK, "left_out")):
                found = row[name]["loss"]
                if found is not None:
                    axes.barh(
                        at + shift, 1000 * found.mean, height=0.34, color=colour,
                        xerr=found.arms(1000), capsize=2.5,
                    )  # fmt: skip
        axes.axvline(0, color=OTHER, linewidth=1)
        axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
        axes.set_xlabel("millinats of cross-entropy gained; blue: Shapley value, red: left out")
    return Picture(
        path=path, title=table.title,
        caption="What each passive adds to the active's own model, by loss on labels held back: "
        "its Shapley value, and what all lose without it; 95 % intervals.",
    )  # fmt: skip
