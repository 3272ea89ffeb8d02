"""Reading a run's YAML file into its `Config`, with errors that a person can act on.

Run by: whoever starts a run. Values are taken strictly (no text for numbers, no truth
values for counts), every problem of a file is listed at once, and each names the file, the
line, the key, what was expected and what was given. The same functions read any other
`Settings` from YAML, such as an experiment's.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from secure_apfed.base.faults import format_value
from secure_apfed.base.files import PathLike
from secure_apfed.config import Config
from secure_apfed.config.plain_yaml import (
    KeyPath,
    format_yaml,
    load_text,
    parse_yaml,
    parse_yaml_value,
)
from secure_apfed.errors import ConfigError
from secure_apfed.settings import Settings, suggest_name
from secure_apfed.settings.plugins import reading_settings

SettingsT = TypeVar("SettingsT", bound=Settings)
_VALUE_LENGTH = 60
_MAX_PROBLEMS = 100
# What was expected, by pydantic's type of error; a type not listed keeps pydantic's sentence.
_EXPECTATION_BY_ERROR_TYPE: Mapping[str, str] = {
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
    settings_class: type[Settings], error: ValidationError, raw_settings: Any
) -> list[tuple[KeyPath, str]]:
    """Return key path and description of every problem that pydantic found.

    At most 100 are described, since each takes time. If there are more, a last entry with an empty
    path says so.

    Args:
        settings_class: the settings class that refused the settings.
        error: the error that the class raised.
        raw_settings: the settings as plain values from YAML.
    """
    # A union reports one error for each of its members, all at the same path.
    details_by_path: dict[KeyPath, list[ErrorDetails]] = {}
    are_too_many = False
    for detail in error.errors(include_url=False):
        path = (
            *_locate_error(detail, raw_settings),
            *_find_key_names(settings_class, detail, raw_settings),
        )
        if path not in details_by_path and len(details_by_path) == _MAX_PROBLEMS:
            are_too_many = True
            break
        details_by_path.setdefault(path, []).append(detail)
    descriptions: list[tuple[KeyPath, str]] = [
        (path, _describe_problem(settings_class, path, details, raw_settings))
        for path, details in details_by_path.items()
    ]
    if are_too_many:
        descriptions.append(((), f"has more problems than these {_MAX_PROBLEMS}; mend them first"))
    return descriptions


def _locate_error(detail: ErrorDetails, raw_settings: Any) -> KeyPath:
    """Return the key path of an error in the settings file.

    Pydantic's own location of the error also holds names of union members, which no file contains.
    Only names that lead to a value in the file are kept.

    `detail`: one of pydantic's errors. `raw_settings`: the settings as plain values from YAML.
    """
    names = list(detail["loc"])
    is_missing = detail["type"] == "missing"
    missing_key = [names.pop()] if is_missing else []  # not in `raw`, so added at the end
    path = []
    value = raw_settings
    for name in names:
        if isinstance(value, dict):
            # Pydantic read JSON, whose keys are texts; keys of YAML may be numbers.
            key_by_text = {str(key): key for key in value}
            if str(name) in key_by_text:
                value = value[key_by_text[str(name)]]
                path.append(name)
        elif isinstance(value, list) and isinstance(name, int) and name < len(value):
            value = value[name]
            path.append(name)
    if detail["type"] == "union_tag_invalid":
        # The key whose value chooses the union's member, as "kind".
        path.append(detail["ctx"]["discriminator"].strip("'()"))
    return (*path, *missing_key)


def _find_key_names(
    settings_class: type[Settings], detail: ErrorDetails, raw_settings: Any
) -> list[str]:
    """Return the key path with which a validator's message begins, as ["train", "patience"] of
    "train.patience: ...".

    Only validators of the settings classes write such messages; other errors give an empty list.
    The path continues the error's location: a validator of a whole section names the key in it.

    Args:
        settings_class: the settings class that refused the settings.
        detail: one of pydantic's errors.
        raw_settings: the settings as plain values from YAML.
    """
    if detail["type"] != "value_error":
        return []
    names = str(detail["ctx"]["error"]).partition(": ")[0].split(".")
    return (
        names if names[0] in _list_known_keys(settings_class, detail["loc"], raw_settings) else []
    )


def _describe_problem(
    settings_class: type[Settings], path: KeyPath, details: list[ErrorDetails], raw_settings: Any
) -> str:
    """Return one problem in words: an unknown or missing key, a validator's message, or what was
    expected and what was given.

    Args:
        settings_class: the settings class that refused the settings.
        path: key path of the problem in the file.
        details: pydantic's errors at `path`; of a union one for each member.
        raw_settings: the settings as plain values from YAML.
    """
    first_error = details[0]
    if first_error["type"] == "extra_forbidden":
        return _describe_unknown_key(settings_class, first_error, raw_settings)
    if first_error["type"] == "missing":
        return "is missing; it has no default"
    if first_error["type"] in ("value_error", "assertion_error"):
        message = str(first_error["ctx"]["error"])
        key_text, _, message_after_key = message.partition(": ")
        keys = tuple(key_text.split("."))
        begins_with_key = bool(message_after_key) and path[-len(keys) :] == keys
        return (
            message_after_key if begins_with_key else message
        )  # the error's place names the key already
    return _describe_wrong_value(settings_class, path, details)


def _describe_unknown_key(
    settings_class: type[Settings], detail: ErrorDetails, raw_settings: Any
) -> str:
    """Return the text about a key that no setting has, with the nearest key and all known ones.

    `settings_class`: the settings class that refused the key. `detail`: pydantic's error.
    `raw_settings`: the settings as plain values from YAML.
    """
    *parents, name = detail["loc"]
    known_keys = sorted(set(_list_known_keys(settings_class, tuple(parents), raw_settings)))
    suggestion = (
        _suggest_section(settings_class, str(name), value=detail["input"]) if not parents else ""
    )
    suggestion = suggestion or suggest_name(str(name), known_keys)
    hint = f"; {suggestion}" if suggestion else "."
    return f"is an unknown key{hint} Known here: {', '.join(known_keys)}"


def _describe_wrong_value(
    settings_class: type[Settings], path: KeyPath, details: list[ErrorDetails]
) -> str:
    """Return what was expected at a key path, what was given, and the nearest choice, if any.

    `settings_class`: the settings class that refused the value. `details`: pydantic's errors about
    it.
    """
    first_error = details[0]
    # Every member of a union reports what it expected; all are listed, each once.
    expectations = dict.fromkeys(_describe_expectation(detail) for detail in details)
    value = (
        first_error["ctx"]["tag"]
        if first_error["type"] == "union_tag_invalid"
        else first_error["input"]
    )
    hint = _suggest_choice(value, details)
    if not hint and len(path) == 1 and not isinstance(value, dict):
        suggestion = _suggest_section(settings_class, str(path[0]), value=value)
        hint = f"; {suggestion.removesuffix('.')}" if suggestion else ""
    return f"expected {' or '.join(expectations)}, got {_format_value(value)}{hint}"


def _suggest_section(settings_class: type[Settings], key: str, *, value: Any) -> str:
    """Return a hint for a key that was written at the top of a file and belongs into a section.

    For `epochs: 3` it is "a setting of train is written train: {epochs: 3}."; "" if no section has
    the key.
    """
    for section in ("train", "model", "data"):
        field = settings_class.model_fields.get(section)
        section_class = None if field is None else field.annotation
        if not isinstance(section_class, type) or not issubclass(section_class, Settings):
            continue
        if key in section_class.model_fields:
            return f"a setting of {section} is written {section}: {{{key}: {format_value(value)}}}."
    return ""


def _describe_expectation(detail: ErrorDetails) -> str:
    """Return what was expected, in words instead of pydantic's error type.

    `detail`: one of pydantic's errors.
    """
    if (expected := _EXPECTATION_BY_ERROR_TYPE.get(detail["type"])) is None:
        return detail["msg"].lower()
    context = detail.get("ctx", {})
    if "expected" in context:
        context = {**context, "expected": context["expected"].replace(" or ", ", ")}
    return expected.format_map(context)


def _suggest_choice(value: Any, details: list[ErrorDetails]) -> str:
    """Return a hint with the choice closest to a misspelt one; "" if none is close.

    Choices are read from pydantic's errors, where they are texts such as "'a', 'b' or 'c'".

    `value`: what was written. `details`: pydantic's errors about it.
    """
    choices = []
    for detail in details:
        for key in ("expected", "expected_tags"):
            choices_text = str(detail.get("ctx", {}).get(key, ""))
            choices += choices_text.replace(" or ", ",").split(",")
    names = filter(None, (choice.strip(" '") for choice in choices))
    suggestion = suggest_name(str(value), names, cutoff=0.7)
    return f"; {suggestion}" if suggestion else ""


def _format_value(value: Any) -> str:
    """Return the value as YAML writes it, shortened to `_VALUE_LENGTH` characters."""
    words = {None: "null", True: "true", False: "false"}
    is_word = value is None or isinstance(value, bool)
    text = words[value] if is_word else repr(value)
    return text if len(text) <= _VALUE_LENGTH else text[: _VALUE_LENGTH - 3] + "..."


def _list_known_keys(declared_type: Any, path: KeyPath, value: Any) -> Iterator[str]:
    """Yield the keys that the settings at `path` may have.

    `declared_type`: declared type of the whole settings. `value`: the whole as plain values; a name
    or kind in it chooses the class where several are possible.
    """
    for settings_class in _find_settings_classes_at(declared_type, path, value):
        yield from settings_class.model_fields


def _find_settings_classes_at(
    declared_type: Any, path: KeyPath, value: Any
) -> Iterator[type[BaseModel]]:
    """Yield the settings classes at `path` inside a declared type; several for a union.

    `declared_type`: the declared type. `value`: the plain value of this type; a name or kind in it
    chooses the class where several are possible.
    """
    for member in _list_union_members(declared_type):
        arguments = get_args(member)
        if isinstance(member, type) and issubclass(member, BaseModel):
            yield from _find_settings_classes_within(_find_named_class(member, value), path, value)
        elif path and get_origin(member) is dict:
            value_type = arguments[1]
            yield from _find_settings_classes_at(value_type, path[1:], _get_item(value, path[0]))
        elif path and get_origin(member) in (tuple, list):
            item_type = arguments[0]
            yield from _find_settings_classes_at(item_type, path[1:], _get_item(value, path[0]))


def _find_settings_classes_within(
    settings_class: type[BaseModel], path: KeyPath, value: Any
) -> Iterator[type[BaseModel]]:
    """Yield the settings classes at `path` inside a settings class.

    `path` may hold names or tags of union members, as pydantic's locations do; they are skipped.
    `settings_class`: the settings class. `value`: its settings as plain values.
    """
    if not path:
        yield settings_class
        return
    name = path[0]
    if name in settings_class.model_fields:
        field_type = settings_class.model_fields[str(name)].annotation
        yield from _find_settings_classes_at(field_type, path[1:], _get_item(value, name))
    elif name == settings_class.__name__ or name in _list_tags(settings_class):
        yield from _find_settings_classes_within(settings_class, path[1:], value)


def _get_item(value: Any, key: str | int) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _find_named_class(settings_class: type[BaseModel], value: Any) -> type[BaseModel]:
    """Return the class among `settings_class` and its subclasses, at any depth, that a value names.

    For example, the settings of a method are declared by their base class, and the value's name
    chooses the subclass. Returns `settings_class` if no class has the name.

    `value`: a mapping with `name`, or the name itself.
    """
    name = _get_item(value, "name") if isinstance(value, dict) else value
    if not isinstance(name, str) or name in _list_tags(settings_class):
        return settings_class
    for subclass in settings_class.__subclasses__():
        named_class = _find_named_class(subclass, value)
        if name in _list_tags(named_class):
            return named_class
    return settings_class


def _list_union_members(declared_type: Any) -> Iterator[Any]:
    """Yield the members of a union at any depth; any other type is its own only member.

    `declared_type`: the declared type of a field.
    """
    if get_origin(declared_type) is Annotated:
        yield from _list_union_members(get_args(declared_type)[0])
    elif get_origin(declared_type) in (Union, UnionType):
        for member in get_args(declared_type):
            yield from _list_union_members(member)
    else:
        yield declared_type


def _list_tags(settings_class: type[BaseModel]) -> Iterator[Any]:
    """Yield the names that choose this class among several settings classes: the literals of its
    fields, such as its `name` or `kind`, and the import path of a plug-in's class.
    """
    for field in settings_class.model_fields.values():
        if get_origin(field.annotation) is Literal:
            yield from get_args(field.annotation)
    yield from filter(None, [getattr(settings_class, "import_path", None)])


def load_config(path: PathLike, *, overrides: Sequence[str] = (), own: bool = False) -> Config:
    """Return the run that a YAML file describes.

    Args:
        path: path of the file, UTF-8.
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
    """Return the run that a YAML text describes.

    `source`: name of the text in errors. `overrides`: settings that replace the text's, each as
    "train.epochs=3". `own`: whether the text is the caller's own, which may name code.
    """
    return load_settings_text(Config, text, source=source, overrides=overrides, own=own)


def load_settings_text(
    cls: type[SettingsT],
    text: str,
    *,
    source: str,
    overrides: Sequence[str] = (),
    own: bool = False,
) -> SettingsT:
    """Return settings of any class from a YAML text.

    `source`: name of the text in errors. `overrides`: settings that replace the text's, each as
    "train.epochs=3". `own`: whether the text is the caller's own, which may name code.

    Raises ConfigError, with a line for each problem.
    """
    raw_settings, line_by_path = _parse_settings(text, source)
    overridden_paths = {_apply_override(raw_settings, override) for override in overrides}
    settings, problems = _validate(cls, raw_settings, own=own)
    if settings is not None:
        return settings
    messages = []
    for path, problem in problems:
        if path:
            place = _describe_source(source, path, line_by_path, overridden_paths)
            messages.append(f"{place}: {'.'.join(map(str, path))}: {problem}")
        else:
            messages.append(f"{source}: {problem}")
    raise ConfigError("\n".join(messages)) from None


def load_config_values(
    values: Mapping[str, Any], *, describe_place: Callable[[KeyPath], str | None]
) -> Config:
    """Return the run that a caller's values describe; they may name the caller's own code.

    Args:
        values: settings by name, nested as in a run's file.
        describe_place: returns how the caller gave the setting at a path, such as the name of an
            argument; "": no place is named; None: the caller did not give the setting, and its
            problem is left out.

    Raises ConfigError: settings are wrong; lists all problems, each by its place.
    """
    raw_settings, _ = _parse_settings(json.dumps(values, default=str), "the settings")
    settings, problems = _validate(Config, raw_settings, own=True)
    if settings is not None:
        return settings
    lines = []
    for path, problem in problems:
        place = describe_place(path)
        if place is not None:
            lines.append(f"{place}: {problem}" if place else problem)
    raise ConfigError("\n".join(dict.fromkeys(lines)))  # each line once


def _validate(
    cls: type[SettingsT], raw_settings: dict[str, Any], *, own: bool
) -> tuple[SettingsT | None, list[tuple[KeyPath, str]]]:
    """Return the settings, or None with the path and the text of each problem.

    `raw_settings`: the settings as YAML gives them, plain values. `own`: whether they are the
    caller's own, which may name code.
    """
    try:
        # JSON in pydantic's strict mode: lists may be tuples, nothing else is converted.
        with reading_settings(are_own=own):
            return cls.model_validate_json(json.dumps(raw_settings, default=str), strict=True), []
    except ValidationError as error:
        return None, describe_errors(cls, error, raw_settings)


def read_options(
    settings_class: type[SettingsT], options: Mapping[str, Any], *, key: str
) -> SettingsT:
    """Return a plug-in's options as the settings that its class declares, with strict types.

    Args:
        settings_class: class of the settings.
        options: plain values by name.
        key: dotted path of the options in the run's file, for errors.

    Raises ConfigError: an option is unknown, missing or out of range; names it, and the nearest.
    """
    raw_options = dict(options)
    try:
        return settings_class.model_validate_json(json.dumps(raw_options, default=str), strict=True)
    except ValidationError as error:
        problems = describe_errors(settings_class, error, raw_options)
    lines = (f"{'.'.join([key, *map(str, path)])}: {problem}" for path, problem in problems)
    raise ConfigError("\n".join(lines)) from None


def dump_settings(settings: Settings) -> str:
    """Return settings as YAML that can be read back, defaults included."""
    return format_yaml(settings.model_dump(mode="json"))


def _parse_settings(text: str, source: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Return the mapping in a YAML text, and the line of each key path.

    Raises ConfigError: the text is no YAML, empty, or no mapping.
    """
    raw_settings, lines = parse_yaml(text, source)
    if raw_settings is None:
        raise ConfigError(f"{source}: is empty; expected settings, at least name, method and data")
    if not isinstance(raw_settings, dict):
        kind = "a list" if isinstance(raw_settings, list) else f"the value {raw_settings!r}"
        raise ConfigError(f"{source}: expected settings as 'key: value' lines, got {kind}")
    return raw_settings, lines


def _apply_override(raw_settings: dict[str, Any], override: str) -> KeyPath:
    """Set one override, such as "train.epochs=3", in the raw settings; return its key path.

    `raw_settings`: the settings as plain values from YAML, which are changed; missing sections are
    made.

    Raises ConfigError: the override is malformed, or its path leads through a plain value.
    """
    key, equals, value_text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"--set {override}: expected key=value, as in train.epochs=3")
    value = parse_yaml_value(value_text, source=f"--set {override}")
    path: list[str | int] = []
    section: Any = raw_settings
    for name in names[:-1]:
        path.append(_parse_index(section, name, override))
        if isinstance(section, dict) and section.get(name) is None:
            section[name] = {}
        elif name == "method" and isinstance(section, dict) and isinstance(section[name], str):
            section[name] = {"name": section[name]}  # `method: votes` gives the name alone
        section = section[path[-1]]
    path.append(_parse_index(section, names[-1], override))
    section[path[-1]] = value
    return tuple(path)


def _parse_index(section: Any, name: str, override: str) -> str | int:
    """Return a part of an override's path as a key of a mapping or an index of a list.

    `section`: the mapping or list that the part leads into. `name`: the part. `override`: the whole
    override, for errors.

    Raises ConfigError: the list has no such index, or `section` is neither.
    """
    if isinstance(section, dict):
        return name
    if isinstance(section, list) and name.isdecimal() and int(name) < len(section):
        return int(name)
    section_text = f"a list of {len(section)}" if isinstance(section, list) else repr(section)
    raise ConfigError(f"--set {override}: there is no {name!r} to set in {section_text}")


def _describe_source(
    source: str,
    path: KeyPath,
    line_by_path: Mapping[KeyPath, int],
    overridden_paths: set[KeyPath],
) -> str:
    """Return where a key was given: "--set", or file and line of the key or its nearest parent.

    `source`: name of the file. `overridden_paths`: key paths that --set gave.
    """
    path_and_parents = [path[:end] for end in range(len(path), 0, -1)]  # the nearest first
    if any(parent in overridden_paths for parent in path_and_parents):
        return "--set"
    for parent in path_and_parents:
        if parent in line_by_path:
            return f"{source}:{line_by_path[parent]}"
    # A section that is not in the file, but that --set made by one of its keys.
    has_overridden_part = any(key_path[: len(path)] == path for key_path in overridden_paths)
    return "--set" if path and has_overridden_part else source
