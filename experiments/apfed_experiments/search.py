"""A search for settings, every trial of which is charged or runs on public data.

Run by: whoever plays all parties in one process, or, on public data, by anybody. Trials are judged
on labelled rows that the active holds back (`apfed_experiments.who_helped.held_back`), never
on test rows. Optuna proposes what to try.

A trial is charged with its bound before it begins, in the study's file, and with its ledgers'
figures when it is finished: one that was stopped in between stays charged with the bound. So is the
final run, and one more where later trials were better. Releases of a row under Gaussian noise
compose as in its ledger: mu-GDP runs are together sqrt(sum of mu^2)-GDP (Dong, Roth and Su 2022,
Corollary 2; `privacy.accountants`). Labels, records in models, and persons at passives add epsilon
and delta, which always holds.
"""

import hashlib
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from apfed_experiments import words
from apfed_experiments.columns import Column, Table, write_text
from apfed_experiments.study import OnDone
from apfed_experiments.summary import Row
from apfed_experiments.who_helped import held_back
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings, load_config_text, load_settings_text
from secure_apfed.config.plain_yaml import read_text
from secure_apfed.data import files_digest, load_data
from secure_apfed.data.catalogue import party_names
from secure_apfed.errors import ApfedError, CheckpointError, ConfigError
from secure_apfed.files import make_private, to_json, write_atomically
from secure_apfed.measures import MEASURES
from secure_apfed.methods.terms import asked_of, planned_releases
from secure_apfed.privacy.accountants import compose, gdp_epsilon
from secure_apfed.privacy.guard import make_guard
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import RunResult, read_outcome
from secure_apfed.runs.run import run
from secure_apfed.seeds import derive_seed
from secure_apfed.settings import Settings
from secure_apfed.settings.data import DataSettings

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import BaseTrial

__all__ = [
    "Charge", "Choice", "Found", "Range", "SearchSpace", "bound_of", "charge_of", "load_space",
    "search",
]  # fmt: skip

# Trials that differ by these are judged on other rows, by another measure or at another promise.
_FIXED = ("data", "seed", "name", "measure", "attacks", "delta")
_JOURNAL, _BEST, _FINAL, _FINALS = "study.log", "best.yaml", "final", "finals"
_CHARGE, _BOUND, _WHY, _REFUSED = "charge", "bound", "why", "refused"
_Put: TypeAlias = Callable[[float, float], float]


@dataclass(frozen=True, kw_only=True)
class Charge:
    """What one run costs, or several together; infinite where nothing is promised.

    Attributes:
        mu: of Gaussian DP, of a row's representations, whose epsilon is told at `delta`.
        label, record, passives: epsilons of a training label, of a record in the model, and by
            passive of one person there; added_delta: of these, which add up.
    """

    delta: float
    mu: float = 0.0
    label: float = 0.0
    record: float = 0.0
    passives: Mapping[str, float] = field(default_factory=dict)
    added_delta: float = 0.0

    @property
    def epsilons(self) -> dict[str, float]:
        return {
            "a row's representations": gdp_epsilon(self.mu, self.delta),
            "a label": self.label,
            "a record in the model": self.record,
            **{f"a person at {name}": of for name, of in self.passives.items()},
        }

    def and_then(self, other: "Charge") -> "Charge":
        """Both, one after the other, on the same people."""
        return self._with(other, operator.add, math.hypot)

    def at_least(self, other: "Charge") -> "Charge":
        """What is enough for either, where not both are run."""
        return self._with(other, max, max)

    def _with(self, other: "Charge", put: _Put, put_mu: _Put) -> "Charge":
        mine, theirs = self.passives, other.passives
        passives = {
            name: put(mine.get(name, 0.0), theirs.get(name, 0.0)) for name in {**mine, **theirs}
        }
        return Charge(
            delta=self.delta, mu=put_mu(self.mu, other.mu), passives=passives,
            label=put(self.label, other.label), record=put(self.record, other.record),
            added_delta=put(self.added_delta, other.added_delta),
        )  # fmt: skip

    def promised(self) -> tuple[str, ...]:
        """What is protected with a finite epsilon that is above 0."""
        return tuple(what for what, epsilon in self.epsilons.items() if 0 < epsilon < math.inf)


def bound_of(config: Config, passives: Iterable[str]) -> Charge:
    """The most that a run of these settings can cost, before anything is sent."""
    noise = config.method.noise(config)
    # No noise is drawn here, so any key does.
    guard = make_guard(
        config.guard, delta=config.delta, releases=asked_of(config).releases, key=bytes(32)
    )
    releases = planned_releases(config, guard)
    mu = compose(guard.mechanism().mu, releases) if releases else 0.0
    if "tables are decomposed" in config.method.happens:
        mu = math.inf
    private = math.inf if config.dp_sgd is None else config.dp_sgd.epsilon or math.inf
    each = math.inf if noise is None or noise.epsilon is None else noise.epsilon
    label = min(private, config.labels.epsilon or math.inf)
    return Charge(
        delta=config.delta, mu=mu, label=label, record=private, added_delta=config.delta,
        passives=dict.fromkeys(passives, each),
    )  # fmt: skip


def charge_of(result: RunResult, bound: Charge) -> Charge:
    """What a finished run did cost: its ledgers' figures, where these are below the bound's."""
    spent, told = result.privacy, result.contributions
    passives = {
        name: float(told[name]["epsilon"]) if name in told else most
        for name, most in bound.passives.items()
    }
    return replace(
        bound, mu=min(spent.mu, bound.mu), label=min(spent.epsilon_y, bound.label),
        record=min(spent.epsilon_model, bound.record), passives=passives,
    )  # fmt: skip


class Range(Settings):
    """Numbers from `low` to `high`, both included; whole ones where both ends are.

    Attributes:
        log: whether they are drawn on a logarithmic scale.
    """

    low: int | float
    high: int | float
    log: bool = False

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low is below high, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError("log: low is above 0 then; leave one out")
        return self

    def draw(self, trial: "BaseTrial", key: str) -> str:
        """What the trial takes, as JSON."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            return json.dumps(trial.suggest_int(key, self.low, self.high, log=self.log))
        return json.dumps(trial.suggest_float(key, self.low, self.high, log=self.log))


class Choice(Settings):
    """One of these values, of any kind that a run's file may have."""

    choices: tuple[Any, ...] = Field(min_length=2)

    def draw(self, trial: "BaseTrial", key: str) -> str:
        return str(trial.suggest_categorical(key, [json.dumps(choice) for choice in self.choices]))


class SearchSpace(Settings):
    """The file of a search.

    Attributes:
        space: by setting, as in train.learning_rate, what it may be.
        public: data that belong to nobody, on which trials run at no cost to the parties; null:
            trials run on the run's own data, and are charged.
    """

    space: dict[str, Range | Choice] = Field(min_length=1)
    public: DataSettings | None = None

    @field_validator("space")
    @classmethod
    def _may_vary(cls, space: dict[str, Range | Choice]) -> dict[str, Range | Choice]:
        for key in space:
            named = key in ("method", "method.name")
            if named or key.split(".")[0] in _FIXED:
                raise ValueError(
                    f"{key}: trials that differ by it cannot be compared; leave it out, and search "
                    "again for each value"
                )
        return space

    def config_of(self, config: Config, trial: "BaseTrial") -> Config:
        """The trial's settings, on the run's own data; ConfigError where these do not fit."""
        drawn = [f"{key}={part.draw(trial, key)}" for key, part in self.space.items()]
        return load_config_text(dump_settings(config), source=config.name, overrides=drawn)


def load_space(path: Path) -> SearchSpace:
    return load_settings_text(SearchSpace, read_text(path), source=str(path))


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
        config: of the `best` trial, on the run's own data; trials: in their order, see `_row`.
        public: name of the public data that trials ran on; None: the run's own.
        spent: of all trials; total: with the final runs, one of each settings that were the best.
        final: what the final run reached on the test rows; None: not asked for. finals: how many.
    """

    config: Config
    trials: Sequence[Row]
    best: int
    public: str | None
    spent: Charge
    total: Charge
    final: Mapping[str, float] | None
    finals: int

    @property
    def notes(self) -> list[str]:
        finals = "the final run" if self.final else "one run more of the best settings"
        if self.finals > 1:
            finals = f"{self.finals} final runs, one of each of the best settings so far,"
        charged = sum(trial["charge"] is not None for trial in self.trials)
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
            in_all, by_trials = words.epsilon(total), words.epsilon(trials)
            lines.append(f"Epsilon of {what}: {in_all} in all, {by_trials} by trials.")
        lines.append(
            f"Delta: {self.total.delta:.2g} of representations, {self.total.added_delta:.2g} of "
            "the epsilons that add up."
        )
        return lines

    @property
    def table(self) -> Table:
        measure = MEASURES[self.config.measure]
        columns = (
            Column(name="number", title="trial"),
            Column(name="settings", title="settings",
                   form=lambda drawn: ", ".join(f"{key} {value}" for key, value in drawn.items())),
            Column(name="value", title="on labels held back", form=measure.text),
            Column(name="state"),
            Column(name="why"),
            Column(name="became", title="what became of it", keys=()),
            Column(name="epsilons", keys=("charge",)),
        )  # fmt: skip
        ranked = sorted(self.trials, key=lambda row: -measure.rank(row["value"]))
        return Table(columns, ranked)

    def as_json(self) -> dict[str, Any]:
        trials = sorted(self.table.plain(), key=lambda row: int(row["number"]))
        return {
            "best": self.best, "measure": self.config.measure, "public": self.public,
            "trials": trials, "epsilon_of_trials": self.spent.epsilons,
            "epsilon_in_all": self.total.epsilons, "delta": self.total.delta,
            "added_delta": self.total.added_delta,
            "final": None if self.final is None else dict(self.final),
        }  # fmt: skip

    def write(self, folder: Path) -> None:
        write_text(folder / "search.json", to_json(self.as_json()))
        write_text(folder / "search.md", self.table.markdown(self.notes))


def search(
    config: Config, space: SearchSpace, folder: Path, *, trials: int, share: float = 0.3,
    budget: float | None = None, final: bool = True, on_done: OnDone = lambda done, total: None,
) -> Found:  # fmt: skip
    """Try settings until there are so many trials in the folder's study, then run the best.

    `trials` counts refused and failed ones; `share` of the active's labelled rows is held back to
    judge; `budget` is the largest epsilon, of everything that the run promises, of all trials and
    the final run together; with `final` the best settings are run on all labels, and measured on
    the test rows. A stopped search goes on.

    Raises:
        ConfigError: nothing that a budget could hold, no trial that can be judged, settings that
            do not fit, or a budget below what earlier trials left for the final run; Optuna is
            not installed.
        CheckpointError: the folder's study is of other settings.
    """
    played = _Search(config, space, folder, share=share, budget=budget)
    played.go_on(trials, on_done)
    return played.found(final=final)


class _Search:
    def __init__(
        self, config: Config, space: SearchSpace, folder: Path, *, share: float,
        budget: float | None,
    ) -> None:  # fmt: skip
        self._config, self._space, self._folder = config, space, folder
        self._measure, self._budget = MEASURES[config.measure], budget
        of_trials = {} if space.public is None else {"data": space.public}
        self._judged = config.model_copy(update=of_trials)
        data = load_data(self._judged.data, seed=config.seed)
        self._data = held_back(data, share, seed=config.seed)
        self._passives = (
            [table.name for table in data.passives]
            if space.public is None
            else list(party_names(config.data)[1:])
        )
        self._own = bound_of(config, self._passives)
        if budget is not None and not self._own.promised():
            raise ConfigError(
                f"--budget {budget:g}: the run promises no epsilon that it could hold; add noise, "
                "as guard: {mechanism: gaussian, epsilon: 4} or method: {name: votes, epsilon: 4}, "
                "or leave out the budget"
            )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private(folder)
        read = [config.data, *([space.public] if space.public else ())]
        files = sorted({files_digest(data) for data in read} - {""})
        parts = (dump_settings(config), space.model_dump_json(), share, *files)
        settings = hashlib.sha256(repr(parts).encode()).hexdigest()
        self._study = _open(folder, settings, higher=self._measure.higher_is_better)

    def go_on(self, trials: int, on_done: OnDone) -> None:
        from optuna.samplers import TPESampler
        from optuna.trial import TrialState

        for past in self._study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            self._study.tell(past.number, state=TrialState.FAIL)
        while (done := len(self._study.get_trials(deepcopy=False))) < trials:
            # A sampler of its own for each, so that a resumed search draws as one in one go.
            seed = derive_seed(self._config.seed, "search", str(done)) % 2**32
            self._study.sampler = TPESampler(seed=seed)
            self._play(self._study.ask())
            on_done(done + 1, trials)

    def _play(self, trial: "Trial") -> None:
        from optuna.trial import TrialState

        try:
            config = self._space.config_of(self._config, trial)
            bound = self._bound(trial, config)
            if bound is None:
                self._study.tell(trial, state=TrialState.PRUNED)
                return
            config = config.model_copy(update={"data": self._judged.data, "attacks": ()})
            result = run(config, None, data=self._data)
        except ApfedError as error:
            trial.set_user_attr(_WHY, str(error))
            self._study.tell(trial, state=TrialState.FAIL)
            return
        if self._space.public is None:
            trial.set_user_attr(_CHARGE, asdict(charge_of(result, bound)))
        value = next(iter(result.scores.values()))
        if math.isnan(value):
            trial.set_user_attr(_WHY, f"{self._measure.title} is not defined")
            self._study.tell(trial, state=TrialState.FAIL)
            return
        self._study.tell(trial, value)

    def _bound(self, trial: "Trial", config: Config) -> Charge | None:
        """What the trial may cost, noted before it begins; None: it is refused."""
        bound, nothing = bound_of(config, self._passives), Charge(delta=config.delta)
        public = self._space.public is not None
        past = _charged(self._rows()) + _charges(self._finals())
        # A trial that stopped early cost less than the final run of its settings may.
        told = [past.user_attrs for past in self._study.get_trials(deepcopy=False)]
        bounds = [*(Charge(**of[_BOUND]) for of in told if _BOUND in of), bound]
        reserve = reduce(Charge.at_least, bounds)
        spent = _together([*past, nothing if public else bound], nothing)
        over = self._over(spent.and_then(reserve), bounds)
        if over is not None:
            trial.set_user_attr(_REFUSED, over)
            return None
        if not public:
            trial.set_user_attr(_BOUND, asdict(bound))
            trial.set_user_attr(_CHARGE, asdict(bound))
        return bound

    def _finals(self) -> list[dict[str, Any]]:
        """Of each final run that was begun: settings, folder, charge, and its scores or None."""
        return list(self._study.user_attrs.get(_FINALS, ()))

    def _over(self, total: Charge, bounds: Sequence[Charge]) -> str | None:
        """What of the run's promises, or of any of these, would exceed the budget, in words."""
        if self._budget is None:
            return None
        promised = [what for bound in (self._own, *bounds) for what in bound.promised()]
        for what in dict.fromkeys(promised):
            epsilon = total.epsilons[what]
            if epsilon > self._budget:
                return (
                    f"with a final run epsilon of {what} would be {epsilon:.3g}, the budget is "
                    f"{self._budget:g}"
                )
        return None

    def _rows(self) -> list[Row]:
        return [_row(trial) for trial in self._study.get_trials(deepcopy=False)]

    def found(self, *, final: bool) -> Found:
        rows = self._rows()
        judged = [row for row in rows if row["value"] is not None]
        if not judged:
            why = next((row["why"] for row in rows if row["why"]), "none was asked for")
            raise ConfigError(f"{self._folder}: no trial of {len(rows)} could be judged: {why}")
        best = max(judged, key=lambda row: self._measure.rank(row["value"]))["number"]
        frozen = self._study.get_trials(deepcopy=False)[best]
        config = self._space.config_of(self._config, frozen)  # it suggests what was drawn
        write_atomically(self._folder / _BEST, dump_settings(config).encode())
        nothing = Charge(delta=config.delta)
        spent = _together(_charged(rows), nothing)
        bound = bound_of(config, self._passives)
        reached = self._final(config, spent, bound) if final else None
        finals = self._finals()
        total = _together(_charges(finals), spent)
        if not any(run["settings"] == _digest(config) for run in finals):
            total = total.and_then(bound)
        found = Found(
            config=config, trials=rows, best=best,
            public=None if self._space.public is None else self._space.public.dataset,
            spent=spent, total=total, final=reached, finals=len(finals),
        )  # fmt: skip
        found.write(self._folder)
        return found

    def _final(self, config: Config, spent: Charge, bound: Charge) -> Mapping[str, float]:
        """On all labels; one that was stopped goes on, one that is finished stands.

        Raises ConfigError where the budget does not hold it.
        """
        settings, finals = _digest(config), self._finals()
        own = next((run for run in finals if run["settings"] == settings), None)
        if own is None:
            over = self._over(_together([*_charges(finals), bound], spent), [bound])
            if over is not None:
                raise ConfigError(
                    f"{self._folder}: the final run is not begun: {over}; give a larger budget, or "
                    "leave out the final run"
                )
            name = f"{_FINAL}-{len(finals) + 1}" if finals else _FINAL
            own = {"settings": settings, "folder": name, "charge": asdict(bound), "scores": None}
            finals.append(own)
            self._study.set_user_attr(_FINALS, finals)
        if own["scores"] is None:
            folder = RunFolder(self._folder / own["folder"])
            if folder.result.exists():  # it ended, and what noted it here was killed
                own |= {"scores": dict(read_outcome(folder).scores)}
            else:
                result = run(config, folder.path, resume=folder.config.exists())
                own |= {"charge": asdict(charge_of(result, bound)), "scores": dict(result.scores)}
            self._study.set_user_attr(_FINALS, finals)
        scores: Mapping[str, float] = own["scores"]
        return scores


def _digest(config: Config) -> str:
    return hashlib.sha256(dump_settings(config).encode()).hexdigest()


def _charges(finals: Sequence[Mapping[str, Any]]) -> list[Charge]:
    return [Charge(**run["charge"]) for run in finals]


def _charged(rows: Sequence[Row]) -> list[Charge]:
    return [row["charge"] for row in rows if row["charge"] is not None]


def _together(charges: Sequence[Charge], nothing: Charge) -> Charge:
    return reduce(Charge.and_then, charges, nothing)


def _row(trial: Any) -> Row:
    """What the study holds of a trial; its state is what Optuna calls it.

    number: from 0; settings: those that vary, as JSON texts; value: the measure on the rows held
    back, None: it has none; state: "finished", "refused", "failed" or "stopped"; why: where it is
    not finished; charge: what is counted for it, None: nothing was begun, or data were public.
    """
    told = trial.user_attrs
    names = {"COMPLETE": "finished", "PRUNED": "refused", "RUNNING": "running"}
    state = names.get(trial.state.name, "failed" if _WHY in told else "stopped")
    why = told.get(_REFUSED, told.get(_WHY, ""))
    charge = Charge(**told[_CHARGE]) if _CHARGE in told else None
    return {
        "number": trial.number, "settings": {key: str(of) for key, of in trial.params.items()},
        "value": trial.value if trial.state.name == "COMPLETE" else None, "state": state,
        "why": why, "became": f"{state}: {why}" if why else state,
        "charge": charge, "epsilons": charge and charge.epsilons,
    }  # fmt: skip


def _open(folder: Path, settings: str, *, higher: bool) -> "Study":
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a search needs {error.name}; pip install 'secure-apfed[search]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(folder / _JOURNAL))), study_name="search",
        direction="maximize" if higher else "minimize", load_if_exists=True,
    )  # fmt: skip
    if study.user_attrs.setdefault("settings", settings) != settings:
        raise CheckpointError(
            f"{folder} holds a search of other settings or data, or of another share held back; go "
            "on with these, or choose a new folder"
        )
    study.set_user_attr("settings", settings)
    return study
