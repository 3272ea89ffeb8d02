"""Reading a run's YAML file into its `Config`, with errors that a person can act on.

Run by: whoever starts a run. Values are taken strictly (no text for numbers, no truth
values for counts), every problem of a file is listed at once, and each names the file, the
line, the key, what was expected and what was given. The same functions read any other
`Settings` from YAML, such as an experiment's.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from secure_apfed.base.files import PathLike
from secure_apfed.config import Config
from secure_apfed.config.plain_yaml import KeyPath, as_yaml, load_text, parse_yaml, yaml_value
from secure_apfed.errors import ConfigError
from secure_apfed.settings import Settings, did_you_mean
from secure_apfed.settings.plugins import reading_settings

SettingsT = TypeVar("SettingsT", bound=Settings)
_SHOWN = 60
_MOST = 100
# What was expected, by pydantic's type of error; a type not listed keeps pydantic's sentence.
_EXPECTED: Mapping[str, str] = {
    "bool_type": "true or false",
    **dict.fromkeys(("int_type", "int_from_float"), "a whole number"),
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "string_too_short": "a text of at least {min_length} character(s)",
    "string_too_long": "a text of at most {max_length} characters",
    "string_pattern_mismatch": "a text of the form {pattern}",
    "path_type": "a path",
    "none_required": "null",
    **dict.fromkeys(("literal_error", "enum"), "one of {expected}"),
    "greater_than": "a number > {gt:g}",
    "greater_than_equal": "a number >= {ge:g}",
    "less_than": "a number < {lt:g}",
    "less_than_equal": "a number <= {le:g}",
    "multiple_of": "a multiple of {multiple_of}",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "keys and values"),
    **dict.fromkeys(("tuple_type", "list_type", "set_type", "frozen_set_type"), "a list"),
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
    "union_tag_invalid": "one of {expected_tags}",
    "union_tag_not_found": "a key {discriminator} that says which one it is",
}


def describe_errors(
    cls: type[Settings], error: ValidationError, raw: Any
) -> list[tuple[KeyPath, str]]:
    """Return key path in `raw` and problem for everything that `cls` refused.

    At most a hundred problems, since each takes time; a last one without key says if there are
    more.
    """
    problems: dict[KeyPath, list[ErrorDetails]] = {}
    overflow: list[tuple[KeyPath, str]] = []
    for detail in error.errors(include_url=False):
        path = (*_locate_error(detail, raw), *_find_key_names(cls, detail, raw))
        if path not in problems and len(problems) == _MOST:
            overflow = [((), f"has more problems than these {_MOST}; mend them first")]
            break
        problems.setdefault(path, []).append(detail)
    return [
        *((path, _describe_problem(cls, path, details, raw)) for path, details in problems.items()),
        *overflow,
    ]


def _locate_error(detail: ErrorDetails, raw: Any) -> KeyPath:
    """Return the error's key path without names of union members, which no file contains.

    `raw`: the settings as YAML gives them, plain values.
    """
    names = list(detail["loc"])
    path = []
    value = raw
    missing = names.pop() if detail["type"] == "missing" else None
    for name in names:
        if isinstance(value, dict):
            # JSON keys are texts, those of YAML may be numbers.
            keys = {str(key): key for key in value}
            if str(name) in keys:
                value = value[keys[str(name)]]
                path.append(name)
        elif isinstance(value, list) and isinstance(name, int) and name < len(value):
            value = value[name]
            path.append(name)
    if detail["type"] == "union_tag_invalid":
        path.append(detail["ctx"]["discriminator"].strip("'()"))
    return (*path, *(() if missing is None else (missing,)))


def _find_key_names(cls: type[Settings], detail: ErrorDetails, raw: Any) -> list[str]:
    """Return the keys at the beginning of a message, such as "train.patience: ...".

    They are relative to the error's location, which for a field's own validator ends in that field
    already.

    `raw`: the settings as YAML gives them, plain values.
    """
    if detail["type"] != "value_error":
        return []
    names = str(detail["ctx"]["error"]).partition(": ")[0].split(".")
    return names if names[0] in _list_known_keys(cls, detail["loc"], raw) else []


def _describe_problem(
    cls: type[Settings], path: KeyPath, details: list[ErrorDetails], raw: Any
) -> str:
    """Return one problem in words: unknown or missing key, our own message, or expectation and
    value.

    `raw`: the settings as YAML gives them, plain values.
    """
    first = details[0]
    if first["type"] == "extra_forbidden":
        *above, name = first["loc"]
        names = sorted(set(_list_known_keys(cls, tuple(above), raw)))
        guess = did_you_mean(str(name), names)
        return f"is an unknown key{f'; {guess}' if guess else '.'} Known here: {', '.join(names)}"
    if first["type"] == "missing":
        return "is missing; it has no default"
    if first["type"] in ("value_error", "assertion_error"):
        # Validators may name their field, which the path names already.
        message = str(first["ctx"]["error"])
        keys, _, rest = message.partition(": ")
        return rest if rest and path[-len(keys.split(".")) :] == tuple(keys.split(".")) else message
    # The error of a union member for another kind of value is irrelevant for this value.
    expected = dict.fromkeys(_describe_expectation(detail) for detail in details)
    value = first["input"]
    if first["type"] == "union_tag_invalid":
        value = first["ctx"]["tag"]
    expectation = " or ".join(expected)
    nearest = _suggest_choice(value, details)
    return f"expected {expectation}, got {_format_value(value)}{nearest}"


def _describe_expectation(detail: ErrorDetails) -> str:
    """Return what was expected, in words instead of pydantic's error type."""
    if (expected := _EXPECTED.get(detail["type"])) is None:
        return detail["msg"].lower()
    context = detail.get("ctx", {})
    if "expected" in context:
        context = {**context, "expected": context["expected"].replace(" or ", ", ")}
    return expected.format_map(context)


def _suggest_choice(value: Any, details: list[ErrorDetails]) -> str:
    """Return a hint with the choice closest to a misspelt one; "" if none is close."""
    choices = [
        choice.strip(" '")
        for detail in details
        for key in ("expected", "expected_tags")
        for choice in str(detail.get("ctx", {}).get(key, "")).replace(" or ", ",").split(",")
    ]
    guess = did_you_mean(str(value), filter(None, choices), cutoff=0.7)
    return f"; {guess}" if guess else ""


def _format_value(value: Any) -> str:
    """Return the value as the file would write it, shortened."""
    words = {None: "null", True: "true", False: "false"}
    is_word = value is None or isinstance(value, bool)
    text = words[value] if is_word else repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _list_known_keys(annotation: Any, path: KeyPath, value: Any) -> Iterator[str]:
    """Yield the keys that settings at `path` inside `annotation` may have, for this value."""
    for model in _find_models_at(annotation, path, value):
        yield from model.model_fields


def _find_models_at(annotation: Any, path: KeyPath, value: Any) -> Iterator[type[BaseModel]]:
    """Yield the settings classes at `path` inside a type annotation."""
    for option in _list_union_members(annotation):
        arguments = get_args(option)
        if isinstance(option, type) and issubclass(option, BaseModel):
            yield from _find_models_within(_find_named_class(option, value), path, value)
        elif path and get_origin(option) is dict:
            yield from _find_models_at(arguments[1], path[1:], _get_item(value, path[0]))
        elif path and get_origin(option) in (tuple, list):
            yield from _find_models_at(arguments[0], path[1:], _get_item(value, path[0]))


def _find_models_within(
    model: type[BaseModel], path: KeyPath, value: Any
) -> Iterator[type[BaseModel]]:
    """Yield the settings classes at `path` inside a settings class."""
    if not path:
        yield model
    elif path[0] in model.model_fields:
        inner = model.model_fields[str(path[0])].annotation
        yield from _find_models_at(inner, path[1:], _get_item(value, path[0]))
    elif path[0] == model.__name__ or path[0] in _list_tags(model):
        yield from _find_models_within(model, path[1:], value)


def _get_item(value: Any, key: str | int) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _find_named_class(model: type[BaseModel], value: Any) -> type[BaseModel]:
    """Return the class with the given name, if the annotated class stands for its subclasses."""
    name = _get_item(value, "name") if isinstance(value, dict) else value
    if isinstance(name, str) and name in _list_tags(model):
        return model
    classes = (_find_named_class(kind, value) for kind in model.__subclasses__())
    return next(
        (kind for kind in classes if isinstance(name, str) and name in _list_tags(kind)), model
    )


def _list_union_members(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union at any depth; any other type is its own only member.

    `annotation`: the declared type of a field.
    """
    if get_origin(annotation) is Annotated:
        yield from _list_union_members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _list_union_members(member)
    else:
        yield annotation


def _list_tags(model: type[BaseModel]) -> Iterator[Any]:
    """Yield the literals that distinguish this member of a tagged union."""
    for field in model.model_fields.values():
        if get_origin(field.annotation) is Literal:
            yield from get_args(field.annotation)
    yield from filter(None, [getattr(model, "code", None)])


def load_config(path: PathLike, *, overrides: Sequence[str] = (), own: bool = False) -> Config:
    """Return the run that a YAML file describes.

    Args:
        path: of the file, UTF-8.
        overrides: settings that replace the file's, each as "train.epochs=3".
        own: whether the file is the caller's own, which may name code
            (`secure_apfed.settings.plugins`); False if others share it, or another run wrote it.

    Raises ConfigError: the file cannot be read, is not YAML, or a setting is wrong.

    Examples:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from secure_apfed import load_config
        >>> text = "{name: first, method: votes, data: {dataset: digits}, guard: {mechanism: none}}"
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "run.yaml")
        ...     _ = path.write_text(text)
        ...     config = load_config(path, overrides=["train.epochs=3"])
        >>> config.name, config.train.epochs
        ('first', 3)
    """
    text = load_text(Path(path))
    return load_config_text(text, source=str(path), overrides=overrides, own=own)


def load_config_text(
    text: str, *, source: str = "the config", overrides: Sequence[str] = (), own: bool = False
) -> Config:
    """Return the run that a YAML text describes; `own`: see `load_config`."""
    return load_settings_text(Config, text, source=source, overrides=overrides, own=own)


def load_settings_text(
    cls: type[SettingsT],
    text: str,
    *,
    source: str,
    overrides: Sequence[str] = (),
    own: bool = False,
) -> SettingsT:
    """Return any settings from a YAML text; `own`: see `load_config`.

    `overrides`: settings that replace the text's, such as train.epochs=3.
    """
    raw, lines = _parse_settings(text, source)
    overridden = {_apply_override(raw, override) for override in overrides}
    try:
        # JSON in pydantic's strict mode: lists may be tuples, nothing else is converted.
        with reading_settings(own=own):
            return cls.model_validate_json(json.dumps(raw, default=str), strict=True)
    except ValidationError as error:
        problems = describe_errors(cls, error, raw)
    listed = [
        f"{_describe_place(source, path, lines, overridden)}: {'.'.join(map(str, path))}: {problem}"
        if path
        else f"{source}: {problem}"
        for path, problem in problems
    ]
    raise ConfigError("\n".join(listed)) from None


def read_options(kind: type[SettingsT], options: Mapping[str, Any], *, key: str) -> SettingsT:
    """Return a plug-in's options as the settings that its class declares, with strict types.

    Args:
        key: where they are written, for errors.

    Raises ConfigError: an option is unknown, missing or out of range; names it, and the nearest.
    """
    raw = dict(options)
    try:
        return kind.model_validate_json(json.dumps(raw, default=str), strict=True)
    except ValidationError as error:
        problems = describe_errors(kind, error, raw)
    lines = (f"{'.'.join([key, *map(str, path)])}: {problem}" for path, problem in problems)
    raise ConfigError("\n".join(lines)) from None


def dump_settings(settings: Settings) -> str:
    return as_yaml(settings.model_dump(mode="json"))


def _parse_settings(text: str, source: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Return the mapping in a YAML text, and the line of each key. Raises ConfigError."""
    raw, lines = parse_yaml(text, source)
    if raw is None:
        raise ConfigError(f"{source}: is empty; expected settings, at least name, method and data")
    if not isinstance(raw, dict):
        kind = "a list" if isinstance(raw, list) else f"the value {raw!r}"
        raise ConfigError(f"{source}: expected settings as 'key: value' lines, got {kind}")
    return raw, lines


def _apply_override(raw: dict[str, Any], override: str) -> KeyPath:
    """Set one "key=value" in the raw settings; return the key's path. Raises ConfigError.

    `override`: such as train.epochs=3.
    """
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"--set {override}: expected key=value, as in train.epochs=3")
    value = yaml_value(text, given=f"--set {override}")
    path: list[str | int] = []
    holder: Any = raw
    for name in names[:-1]:
        path.append(_parse_index(holder, name, override))
        if isinstance(holder, dict) and holder.get(name) is None:
            holder[name] = {}
        elif name == "method" and isinstance(holder, dict) and isinstance(holder[name], str):
            holder[name] = {"name": holder[name]}
        holder = holder[path[-1]]
    path.append(_parse_index(holder, names[-1], override))
    holder[path[-1]] = value
    return tuple(path)


def _parse_index(holder: Any, name: str, override: str) -> str | int:
    """Return a name as a mapping's key or a list's index. Raises ConfigError: there is none.

    `holder`: mapping or list that the name leads into. `override`: such as train.epochs=3.
    """
    if isinstance(holder, dict):
        return name
    if isinstance(holder, list) and name.isdecimal() and int(name) < len(holder):
        return int(name)
    holder_text = f"a list of {len(holder)}" if isinstance(holder, list) else repr(holder)
    raise ConfigError(f"--set {override}: there is no {name!r} to set in {holder_text}")


def _describe_place(
    source: str, path: KeyPath, lines: Mapping[KeyPath, int], overridden: set[KeyPath]
) -> str:
    """Return where a key was given: --set, or file and line (of the nearest key above it).

    `lines`: line of each key path in the file.
    """
    if any(path[:end] in overridden for end in range(1, len(path) + 1)):
        return "--set"
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return f"{source}:{lines[path[:end]]}"
    below = any(key_path[: len(path)] == path for key_path in overridden)
    return "--set" if path and below else source
