"""The trials of a search, one after the other, in a study that a stopped search goes on with.

A trial is charged with its bound before it begins, in the study's file, and with its ledgers'
figures when it is finished: one that was stopped in between stays charged with the bound. So is the
final run, and one more where later trials were better.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apfed_experiments.search.charges import Charge, bound_of, charge_of
from apfed_experiments.search.found import Found, TrialLine
from apfed_experiments.search.space import SearchSpace
from apfed_experiments.study import OnDone
from apfed_experiments.who_helped.runs import held_back
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings
from secure_apfed.data import files_digest, load_data
from secure_apfed.data.catalogue import party_names
from secure_apfed.errors import ApfedError, CheckpointError, ConfigError
from secure_apfed.files import make_private
from secure_apfed.measures import MEASURES
from secure_apfed.runs.folder import RunFolder, write_atomically
from secure_apfed.runs.record import read_outcome
from secure_apfed.runs.run import run
from secure_apfed.seeds import derive_seed

if TYPE_CHECKING:
    from optuna import Study, Trial

__all__ = ["search"]

_JOURNAL, _BEST, _FINAL, _FINALS = "study.log", "best.yaml", "final", "finals"
_CHARGE, _BOUND, _WHY, _REFUSED = "charge", "bound", "why", "refused"


def search(
    config: Config, space: SearchSpace, folder: Path, *, trials: int, share: float = 0.3,
    budget: float | None = None, final: bool = True, on_done: OnDone = lambda done, total: None,
) -> Found:  # fmt: skip
    """Try settings until there are so many trials in the folder's study, then run the best.

    Args:
        config: of the run whose settings vary.
        space: which of them.
        folder: of the study; made where missing. A stopped search goes on there.
        trials: in all, refused and failed ones included.
        share: of the active's labelled rows that is held back to judge.
        budget: the largest epsilon, of everything that the run promises, of all trials and the
            final run together; a trial that would exceed it is refused.
        final: whether the best settings are run on all labels, and measured on the test rows.
        on_done: called after each trial.

    Raises:
        ConfigError: nothing that a budget could hold, no trial that can be judged, settings that
            do not fit, or a budget below what earlier trials left for the final run; Optuna is
            not installed.
        CheckpointError: the folder's study is of other settings.
    """
    one = _Search(config, space, folder, share=share, budget=budget)
    one.go_on(trials, on_done)
    return one.found(final=final)


class _Search:
    """A study, and what it is about."""

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
        settings = self._settings(share)
        self._study = _open(folder, settings, higher=self._measure.higher_is_better)

    def _settings(self, share: float) -> str:
        """SHA-256 of all that trials depend on."""
        read = [self._config.data, *([self._space.public] if self._space.public else ())]
        files = sorted({files_digest(one) for one in read} - {""})
        parts = (dump_settings(self._config), self._space.model_dump_json(), share, *files)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def go_on(self, trials: int, on_done: OnDone) -> None:
        """Play those that are missing."""
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
            trial.set_user_attr(_CHARGE, charge_of(result, bound).as_json())
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
        past = [one.charge for one in self._lines() if one.charge is not None]
        past += _charges(self._finals())
        # A trial that stopped early cost less than the final run of its settings may.
        bounds = [*self._bounds(), bound]
        reserve = reduce(Charge.at_least, bounds)
        spent = _together([*past, nothing if public else bound], nothing)
        over = self._over(spent.and_then(reserve), bounds)
        if over is not None:
            trial.set_user_attr(_REFUSED, over)
            return None
        if not public:
            trial.set_user_attr(_BOUND, bound.as_json())
            trial.set_user_attr(_CHARGE, bound.as_json())
        return bound

    def _bounds(self) -> list[Charge]:
        """Of the trials that began."""
        told = [one.user_attrs for one in self._study.get_trials(deepcopy=False)]
        return [Charge(**one[_BOUND]) for one in told if _BOUND in one]

    def _finals(self) -> list[dict[str, Any]]:
        """Of each final run that was begun: settings, folder, charge, and its scores or None."""
        return list(self._study.user_attrs.get(_FINALS, ()))

    def _over(self, total: Charge, bounds: Sequence[Charge]) -> str | None:
        """What of the run's promises, or of any of these, would exceed the budget, in words."""
        if self._budget is None:
            return None
        promised = [what for one in (self._own, *bounds) for what in one.promised()]
        for what in dict.fromkeys(promised):
            epsilon = total.epsilons[what]
            if epsilon > self._budget:
                return (
                    f"with a final run epsilon of {what} would be {epsilon:.3g}, the budget is "
                    f"{self._budget:g}"
                )
        return None

    def _lines(self) -> list[TrialLine]:
        return [_line(one) for one in self._study.get_trials(deepcopy=False)]

    def found(self, *, final: bool) -> Found:
        """The best, its file, and its final run."""
        lines = self._lines()
        judged = [one for one in lines if one.value is not None]
        if not judged:
            why = next((one.why for one in lines if one.why), "none was asked for")
            raise ConfigError(f"{self._folder}: no trial of {len(lines)} could be judged: {why}")
        best = max(judged, key=lambda one: self._measure.rank(one.value))
        frozen = self._study.get_trials(deepcopy=False)[best.number]
        config = self._space.config_of(self._config, _Fixed(frozen.params))  # type: ignore[arg-type]  # suggests what was drawn
        write_atomically(self._folder / _BEST, dump_settings(config).encode())
        nothing = Charge(delta=config.delta)
        spent = _together([one.charge for one in lines if one.charge is not None], nothing)
        bound = bound_of(config, self._passives)
        reached = self._final(config, spent, bound) if final else None
        finals = self._finals()
        total = _together(_charges(finals), spent)
        if not any(one["settings"] == _digest(config) for one in finals):
            total = total.and_then(bound)
        found = Found(
            config=config, trials=tuple(lines), best=best.number,
            public=None if self._space.public is None else self._space.public.dataset,
            spent=spent, total=total, final=reached, finals=len(finals),
        )  # fmt: skip
        found.write(self._folder)
        return found

    def _final(self, config: Config, spent: Charge, bound: Charge) -> Mapping[str, float]:
        """On all labels; one that was stopped goes on, and one that is finished stands.

        Raises:
            ConfigError: the budget does not hold it.
        """
        settings, finals = _digest(config), self._finals()
        own = next((one for one in finals if one["settings"] == settings), None)
        if own is None:
            over = self._over(_together([*_charges(finals), bound], spent), [bound])
            if over is not None:
                raise ConfigError(
                    f"{self._folder}: the final run is not begun: {over}; give a larger budget, or "
                    "leave out the final run"
                )
            name = f"{_FINAL}-{len(finals) + 1}" if finals else _FINAL
            own = {"settings": settings, "folder": name, "charge": bound.as_json(), "scores": None}
            finals.append(own)
            self._study.set_user_attr(_FINALS, finals)
        if own["scores"] is None:
            folder = RunFolder(self._folder / own["folder"])
            if folder.result.exists():  # it ended, and what noted it here was killed
                own |= {"scores": dict(read_outcome(folder).scores)}
            else:
                result = run(config, folder.path, resume=folder.config.exists())
                own |= {"charge": charge_of(result, bound).as_json(), "scores": dict(result.scores)}
            self._study.set_user_attr(_FINALS, finals)
        scores: Mapping[str, float] = own["scores"]
        return scores


def _digest(config: Config) -> str:
    return hashlib.sha256(dump_settings(config).encode()).hexdigest()


class _Fixed:
    """Stands for a trial whose values were drawn before."""

    def __init__(self, drawn: Mapping[str, Any]) -> None:
        self._drawn = drawn

    def suggest_int(self, key: str, *_: Any, **__: Any) -> Any:
        return self._drawn[key]

    suggest_float = suggest_categorical = suggest_int


def _charges(finals: Sequence[Mapping[str, Any]]) -> list[Charge]:
    return [Charge(**one["charge"]) for one in finals]


def _together(charges: Sequence[Charge], nothing: Charge) -> Charge:
    return reduce(Charge.and_then, charges, nothing)


def _line(trial: Any) -> TrialLine:
    """What the study holds of a trial; its state is what Optuna calls it."""
    told = trial.user_attrs
    names = {"COMPLETE": "finished", "PRUNED": "refused", "RUNNING": "running"}
    state = names.get(trial.state.name, "failed" if _WHY in told else "stopped")
    return TrialLine(
        number=trial.number, drawn={key: str(one) for key, one in trial.params.items()},
        value=trial.value if trial.state.name == "COMPLETE" else None, state=state,
        why=told.get(_REFUSED, told.get(_WHY, "")),
        charge=Charge(**told[_CHARGE]) if _CHARGE in told else None,
    )  # fmt: skip


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
