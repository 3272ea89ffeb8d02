"""What a trade-off study compares: one base run, changed by defences at several strengths."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from secure_apfed.config import Config
from secure_apfed.config_file import load_config_text, load_settings_text, read_text
from secure_apfed.errors import ConfigError
from secure_apfed.settings import Settings

__all__ = ["Defence", "Point", "Study", "load_study", "points"]

_REFERENCES: dict[str, dict[str, Any]] = {
    "SingleVL (the active alone)": {"method": "single_view", "attacks": []},
    "TVFL (all parties predict)": {"method": "tvfl", "attacks": []},
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


class Study(Settings):
    """A trade-off study.

    Attributes:
        name: of the study, and of its folder.
        base: the run that defences change: a file beside the study's, or the name of one that
            ships with `experiments`.
        set: settings that every run of the study changes in the base, by dotted path.
        seeds: runs of each point, with seeds 0, 1, ...
        references: also run the active alone, and TVFL with all parties predicting, which see
            the least and the most features; drawn as lines.
        defences: what is compared.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=64)
    base: str
    set: dict[str, Any] = {}
    seeds: int = Field(5, ge=1)
    references: bool = True
    defences: tuple[Defence, ...] = Field(min_length=1)

    @field_validator("defences")
    @classmethod
    def _defences_fit(cls, defences: tuple[Defence, ...]) -> tuple[Defence, ...]:
        names = [one.name for one in defences]
        if len(set(names)) != len(names):
            raise ValueError(f"defences are all different, got {', '.join(names)}")
        undefended = [one.name for one in defences if one.undefended]
        if len(undefended) != 1:
            raise ValueError(
                f"exactly one defence says undefended: true, got {', '.join(undefended) or 'none'}"
            )
        return defences


@dataclass(frozen=True, kw_only=True)
class Point:
    """One defence at one strength, and its run of each seed.

    Attributes:
        strength: the knob's value in words; empty without a knob.
        reference: drawn as a line, takes no part in the comparison.
        configs: by seed.
    """

    defence: str
    strength: str
    undefended: bool
    reference: bool
    configs: tuple[Config, ...]

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.defence}, {self.strength}" if self.strength else self.defence


def load_study(path: Path) -> Study:
    """Read a study; its base becomes the text of the YAML that it names.

    Raises:
        ConfigError: a file that cannot be read, or a setting that is wrong.
    """
    study = load_settings_text(Study, read_text(path), source=str(path))
    beside = path.parent / study.base
    shipped = files("experiments") / "configs" / study.base
    if not beside.is_file() and not shipped.is_file():
        raise ConfigError(
            f"{path}: base: there is no {study.base!r} beside the study or among the configs that "
            "ship with this package"
        )
    text = read_text(beside) if beside.is_file() else shipped.read_text(encoding="utf-8")
    return study.model_copy(update={"base": text})


def points(study: Study) -> Iterator[Point]:
    """Yield every point, references first; all configs are checked here.

    Raises:
        ConfigError: a change that no run accepts.
    """
    if study.references:
        for name, changes in _REFERENCES.items():
            undefended = next(one for one in study.defences if one.undefended)
            yield _point(study, name, {**undefended.set, **changes}, reference=True)
    for defence in study.defences:
        for value in defence.values or (None,):
            changes = dict(defence.set)
            if defence.knob is not None:
                changes[defence.knob] = value
            strength = "" if value is None else f"{(defence.knob or '').rpartition('.')[2]} {value}"
            yield _point(
                study, defence.name, changes, strength=strength, undefended=defence.undefended
            )


def _point(
    study: Study,
    name: str,
    changes: dict[str, Any],
    *,
    strength: str = "",
    undefended: bool = False,
    reference: bool = False,
) -> Point:
    label = f"{name} {strength}".strip()
    file_name = "".join(letter if letter.isalnum() else "-" for letter in label.lower())
    overrides = [f"{path}={json.dumps(value)}" for path, value in {**study.set, **changes}.items()]
    try:
        configs = tuple(
            load_config_text(
                study.base,
                source="base",
                overrides=[*overrides, f"seed={seed}", f"name={study.name}-{file_name}-seed{seed}"],
            )
            for seed in range(study.seeds)
        )
    except ConfigError as error:
        raise ConfigError(f"study {study.name}, {label}: {error}") from None
    return Point(
        defence=name, strength=strength, undefended=undefended, reference=reference, configs=configs
    )
