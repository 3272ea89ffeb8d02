"""What a trade-off study compares: one base run, changed by defences at several strengths."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from apfed_attacks.run import expand
from apfed_experiments.study import Point
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings, load_config_text, load_settings_text
from secure_apfed.config.plain_yaml import read_text
from secure_apfed.errors import ConfigError
from secure_apfed.measures import ACCURACY
from secure_apfed.names import RunName
from secure_apfed.settings import Settings

__all__ = [
    "Defence", "DefencePoint", "TradeOff", "load_tradeoff", "points_of", "tradeoff_of",
]  # fmt: skip

Reference: TypeAlias = Literal["single_view", "centralised", "tvfl"]


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A reference: what a run changes in the undefended one."""

    label: str
    set: Mapping[str, Any]
    centralised: bool = False


_REFERENCES: Mapping[Reference, _Line] = {
    "single_view": _Line(label="SingleVL (the active alone)", set={"method": "single_view"}),
    "centralised": _Line(
        # One table has everybody's features of all the active's people.
        label="centralised (one table of all features)",
        set={"method": "single_view", "data.overlap": 1.0},
        centralised=True,
    ),
    "tvfl": _Line(label="TVFL (all parties predict)", set={"method": "tvfl"}),
}


class Defence(Settings):
    """One defence, at one or several strengths.

    Attributes:
        name: for people; unique in the study.
        set: settings of the run by dotted path, as in {guard: {mechanism: none}}.
        knob: dotted path of the setting that is the strength; null: there is one strength.
        values: of the knob, in the order of the curve.
        undefended: what the others are compared with; exactly one defence of a study is.
    """

    name: str = Field(min_length=1, max_length=40)
    set: dict[str, Any] = {}
    knob: str | None = None
    values: tuple[Any, ...] = ()
    undefended: bool = False

    @model_validator(mode="after")
    def _knob_has_values(self) -> Self:
        if (self.knob is None) != (not self.values):
            raise ValueError(
                f"defence {self.name!r}: knob and values go together; give both, or neither for a "
                "defence of one strength"
            )
        return self


class TradeOff(Settings):
    """A trade-off study.

    Attributes:
        name: of the study, and of its folder.
        base: the run that defences change: a file beside the study's, or the name of one that
            ships with `experiments`.
        set: settings that every run of the study changes in the base, by dotted path.
        seeds: runs of each point, with seeds 0, 1, ...
        references: what bounds the comparison, drawn as lines: the active alone, one table of
            all features (both trained as SingleVL), TVFL with all parties predicting.
        defences: what is compared.
    """

    name: RunName = Field(max_length=64)
    base: str
    set: dict[str, Any] = {}
    seeds: int = Field(5, ge=1)
    references: tuple[Reference, ...] = tuple(_REFERENCES)
    defences: tuple[Defence, ...] = Field(min_length=1)

    @field_validator("defences")
    @classmethod
    def _defences_fit(cls, defences: tuple[Defence, ...]) -> tuple[Defence, ...]:
        names = [defence.name for defence in defences]
        if len(set(names)) != len(names):
            raise ValueError(f"defences are all different, got {', '.join(names)}")
        undefended = [defence.name for defence in defences if defence.undefended]
        if len(undefended) != 1:
            raise ValueError(
                f"exactly one defence says undefended: true, got {', '.join(undefended) or 'none'}"
            )
        return defences


@dataclass(frozen=True, kw_only=True)
class DefencePoint(Point):
    """One defence at one strength.

    Attributes:
        strength: the knob's value in words; empty without a knob.
        reference: drawn as a line, takes no part in the comparison.
    """

    defence: str
    strength: str = ""
    undefended: bool = False
    reference: bool = False

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.defence}, {self.strength}" if self.strength else self.defence


def load_tradeoff(path: Path) -> TradeOff:
    """Read a study; its base becomes the text of the YAML that it names.

    Raises:
        ConfigError: a file that cannot be read, or a setting that is wrong.
    """
    study = load_settings_text(TradeOff, read_text(path), source=str(path))
    beside = path.parent / study.base
    shipped = files("apfed_experiments") / "configs" / study.base
    if not beside.is_file() and not shipped.is_file():
        raise ConfigError(
            f"{path}: base: there is no {study.base!r} beside the study or among the configs that "
            "ship with this package"
        )
    text = read_text(beside) if beside.is_file() else shipped.read_text(encoding="utf-8")
    return study.model_copy(update={"base": text})


def tradeoff_of(config: Config) -> TradeOff:
    """Return the study that a run's settings ask for, of that run.

    Raises:
        ConfigError: a setting that is wrong, or a name or a base, which are the run's.
    """
    if own := {"name", "base"} & set(config.tradeoff):
        raise ConfigError(f"tradeoff.{min(own)}: the study of a run has the run's; leave it out")
    base = dump_settings(config.model_copy(update={"tradeoff": {}}))
    study = {"name": f"{config.name}-tradeoff"[:64], "base": "", **config.tradeoff}
    read = load_settings_text(TradeOff, json.dumps(study), source="tradeoff")
    return read.model_copy(update={"base": base})


def points_of(tradeoff: TradeOff, folder: Path) -> list[DefencePoint]:
    """Return every point, references first; all configs and attacks are checked here.

    Raises:
        ConfigError: a change that no run accepts, an unknown attack, or two points alike.
    """
    every = list(_points(tradeoff, folder))
    past: dict[str, str] = {}
    for point in every:
        if point.name in past:
            raise ConfigError(
                f"study {tradeoff.name}: {past[point.name]!r} and {point.label!r} would share the "
                f"folder {point.trial(0).name}; give each strength once, and defences names that "
                "differ in their letters"
            )
        past[point.name] = point.label
        try:
            expand(point.config.attacks)
        except ConfigError as error:
            raise ConfigError(f"study {tradeoff.name}, {point.label}: {error}") from None
    return every


def _points(tradeoff: TradeOff, folder: Path) -> Iterator[DefencePoint]:
    undefended = next(defence for defence in tradeoff.defences if defence.undefended)
    for key in dict.fromkeys(tradeoff.references):
        line = _REFERENCES[key]
        config = _config(tradeoff, line.label, {**undefended.set, **line.set, "attacks": []})
        yield DefencePoint(
            config=config, folder=folder, centralised=line.centralised, defence=line.label,
            reference=True,
        )  # fmt: skip
    for defence in tradeoff.defences:
        for value in defence.values or (None,):
            changes = dict(defence.set)
            if defence.knob is not None:
                changes[defence.knob] = value
            strength = "" if value is None else f"{(defence.knob or '').rpartition('.')[2]} {value}"
            config = _config(tradeoff, f"{defence.name} {strength}".strip(), changes)
            yield DefencePoint(
                config=config, folder=folder, defence=defence.name, strength=strength,
                undefended=defence.undefended,
            )  # fmt: skip


def _config(tradeoff: TradeOff, label: str, changes: Mapping[str, Any]) -> Config:
    file_name = "".join(
        letter if letter.isascii() and letter.isalnum() else "-" for letter in label.lower()
    )
    name = f"{tradeoff.name}-{file_name}"
    # The longest name of a run of this point, so that it is checked here.
    settings = {**tradeoff.set, **changes, "name": f"{name}-seed{tradeoff.seeds - 1}"}
    overrides = [f"{path}={json.dumps(value)}" for path, value in settings.items()]
    try:
        config = load_config_text(tradeoff.base, source="base", overrides=overrides)
    except ConfigError as error:
        # The settings are of the study, not of a command line.
        message = str(error).replace("--set: ", "")
        raise ConfigError(f"study {tradeoff.name}, {label}: {message}") from None
    if config.measure != ACCURACY.name:
        raise ConfigError(
            f"study {tradeoff.name}, {label}: measure: a trade-off is of accuracy, got "
            f"{config.measure}; leave it out"
        )
    return config.model_copy(update={"name": name})
