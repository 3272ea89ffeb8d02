"""Reading a run's YAML file into its `Config`, with errors that a person can act on.

Run by: whoever starts a run. Values are taken strictly (no text for numbers, no truth
values for counts), every problem of a file is listed at once, and each names the file, the
line, the key, what was expected and what was given. The same functions read any other
`Settings` from YAML, such as an experiment's.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from secure_apfed.config import Config
from secure_apfed.config.file import describe
from secure_apfed.config.plain_yaml import KeyPath, as_yaml, parse_yaml, read_text, yaml_value
from secure_apfed.errors import ConfigError
from secure_apfed.settings import Settings

__all__ = [
    "dump_config",
    "dump_settings",
    "load_config",
    "load_config_text",
    "load_settings_text",
    "read_text",
]

SettingsT = TypeVar("SettingsT", bound=Settings)


def load_config(path: str | Path, *, overrides: Sequence[str] = ()) -> Config:
    """Return the run that a YAML file describes.

    Args:
        path: of the file, UTF-8.
        overrides: settings that replace the file's, each as "train.epochs=3".

    Raises:
        ConfigError: the file cannot be read, is not YAML, or a setting is wrong.
    """
    return load_config_text(read_text(Path(path)), source=str(path), overrides=overrides)


def load_config_text(
    text: str, *, source: str = "the config", overrides: Sequence[str] = ()
) -> Config:
    """Return the run that a YAML text describes; `source` names it in errors."""
    return load_settings_text(Config, text, source=source, overrides=overrides)


def load_settings_text(
    cls: type[SettingsT], text: str, *, source: str, overrides: Sequence[str] = ()
) -> SettingsT:
    """Return any settings from a YAML text.

    Raises:
        ConfigError: not YAML, a repeated key, or settings that `cls` refuses; all of them
            are listed, one a line.
    """
    raw, lines = _parse(text, source)
    overridden = {_override(raw, override) for override in overrides}
    try:
        # JSON in pydantic's strict mode: lists may be tuples, nothing else is converted.
        return cls.model_validate_json(json.dumps(raw, default=str), strict=True)
    except ValidationError as error:
        problems = describe(cls, error, raw)
    listed = [
        f"{_place(source, path, lines, overridden)}: {'.'.join(map(str, path))}: {problem}"
        if path
        else f"{source}: {problem}"
        for path, problem in problems
    ]
    raise ConfigError("\n".join(listed)) from None


def dump_config(config: Config) -> str:
    """Return the complete YAML of a run, defaults included; it loads back equal."""
    return dump_settings(config)


def dump_settings(settings: Settings) -> str:
    """Return the complete YAML of any settings; it loads back equal."""
    return as_yaml(settings.model_dump(mode="json"))


def _parse(text: str, source: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Return the mapping that the text holds, and the line of each key."""
    raw, lines = parse_yaml(text, source)
    if raw is None:
        raise ConfigError(f"{source}: is empty; expected settings, at least name, method and data")
    if not isinstance(raw, dict):
        kind = "a list" if isinstance(raw, list) else f"the value {raw!r}"
        raise ConfigError(f"{source}: expected settings as 'key: value' lines, got {kind}")
    return raw, lines


def _override(raw: dict[str, Any], override: str) -> KeyPath:
    """Set one "key.path=value" in `raw`; return its path."""
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"--set {override}: expected key=value, as in train.epochs=3")
    value = yaml_value(text, given=f"--set {override}")
    path: list[str | int] = []
    holder: Any = raw
    for name in names[:-1]:
        path.append(_index(holder, name, override))
        if isinstance(holder, dict) and holder.get(name) is None:
            holder[name] = {}
        elif name == "method" and isinstance(holder, dict) and isinstance(holder[name], str):
            holder[name] = {"name": holder[name]}
        holder = holder[path[-1]]
    path.append(_index(holder, names[-1], override))
    holder[path[-1]] = value
    return tuple(path)


def _index(holder: Any, name: str, override: str) -> str | int:
    if isinstance(holder, dict):
        return name
    if isinstance(holder, list) and name.isdecimal() and int(name) < len(holder):
        return int(name)
    given = f"a list of {len(holder)}" if isinstance(holder, list) else repr(holder)
    raise ConfigError(f"--set {override}: there is no {name!r} to set in {given}")


def _place(
    source: str, path: KeyPath, lines: Mapping[KeyPath, int], overridden: set[KeyPath]
) -> str:
    """Say where a key was given: --set, or file and line (of the nearest key above it)."""
    if any(path[:end] in overridden for end in range(1, len(path) + 1)):
        return "--set"
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return f"{source}:{lines[path[:end]]}"
    below = any(given[: len(path)] == path for given in overridden)
    return "--set" if path and below else source
