"""What is searched: the settings of a run that vary, and the data that trials run on."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, field_validator, model_validator

from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings, load_config_text, load_settings_text
from secure_apfed.config.plain_yaml import read_text
from secure_apfed.settings import Settings
from secure_apfed.settings.data import DataSettings

if TYPE_CHECKING:
    from optuna import Trial

__all__ = ["Choice", "Range", "SearchSpace", "load_space"]

# Trials that differ by these are judged on other rows, by another measure or at another promise.
_FIXED = ("data", "seed", "name", "measure", "attacks", "delta")


class Range(Settings):
    """Numbers from `low` to `high`, both included; whole ones where both ends are.

    Attributes:
        log: whether they are drawn on a logarithmic scale.
        step: between neighbours; null: any, or every whole one.
    """

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low is below high, got {self.low} and {self.high}")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log: low is above 0 then, and there is no step; leave one out")
        return self

    def draw(self, trial: "Trial", key: str) -> str:
        """What the trial takes, as JSON."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            step = int(self.step) if self.step else 1
            whole = trial.suggest_int(key, self.low, self.high, step=step, log=self.log)
            return json.dumps(whole)
        number = trial.suggest_float(key, self.low, self.high, step=self.step, log=self.log)
        return json.dumps(number)


class Choice(Settings):
    """One of these values, of any kind that a run's file may have."""

    choices: tuple[Any, ...] = Field(min_length=2)

    def draw(self, trial: "Trial", key: str) -> str:
        """What the trial takes, as JSON."""
        return str(trial.suggest_categorical(key, [json.dumps(one) for one in self.choices]))


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

    def config_of(self, config: Config, trial: "Trial") -> Config:
        """The trial's settings, on the run's own data.

        Raises:
            ConfigError: what was drawn is no setting, or does not fit the others.
        """
        drawn = [f"{key}={one.draw(trial, key)}" for key, one in self.space.items()]
        return load_config_text(dump_settings(config), source=config.name, overrides=drawn)


def load_space(path: Path) -> SearchSpace:
    """Read the file of a search.

    Raises:
        ConfigError: no such file, or its settings are wrong.
    """
    return load_settings_text(SearchSpace, read_text(path), source=str(path))
