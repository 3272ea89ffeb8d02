"""Departures of settings towards less protection, from the marks on their keys (`protects`).

Read by: the screens before a run (`project join`, `project new`, `project check`, `plan`), which
list every departure towards less from the default, and whoever holds a proposal against a party's
own limits. Every key that all parties sign, or that a proposal carries, has one of these marks
among its metadata; a test walks all keys. A key without a mark counts as one whose every change is
less.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

from pydantic.fields import FieldInfo

from secure_apfed.errors import ConfigError
from secure_apfed.settings import (
    EACH_ALONE,
    FollowsFrom,
    Protection,
    Settings,
    Unprotective,
    did_you_mean,
    protects,
)

__all__ = [
    "NO_DEFAULT",
    "Departure",
    "Key",
    "Limit",
    "find_departures",
    "find_key_types",
    "find_keys",
    "list_keys",
    "require_limits",
]

Limit: TypeAlias = bool | int | float | str
NO_DEFAULT = object()
"""Placeholder for the default of a key that must be set."""
_UNKNOWN = "nobody said whom this setting protects; ask who wrote the method"
# Settings that each party decides, and that all parties learn: they choose the intersection.
_SHARED_ALL_THE_SAME = frozenset({"dealer", "pairwise_overlaps"})
_MAX_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of given settings: its value, its default and its mark.

    Attributes:
        path: dotted; value, default: as the mark reads them.
        mark: None where the key has none.
    """

    path: str
    value: Any
    default: Any
    mark: Protection | Unprotective | None

    @property
    def departs(self) -> bool:
        """Whether its value protects less than the default or, without a default, than the
        strongest one.
        """
        if self.mark is None:
            return bool(self.value != self.default)
        if not isinstance(self.mark, Protection):
            return False
        if self.default is NO_DEFAULT:
            return self.mark.less == "other" and self.mark.compute_strength(self.value) < 0
        return self.mark.is_less(self.value, self.default)


_NO_DEFAULT = "no default"


@dataclass(frozen=True, kw_only=True)
class Departure:
    """A setting that protects less than by default, in words."""

    setting: str
    value: str
    default: str
    whom: str
    means: str

    @property
    def usual(self) -> str:
        """The default, as part of a sentence."""
        return f"by default {self.default}" if self.default != _NO_DEFAULT else "without a default"

    @property
    def row(self) -> tuple[str, str, str, str, str]:
        """The cells of its row in a table."""
        return self.setting, self.value, self.default, self.whom, self.means


def find_departures(settings: Settings) -> tuple[Departure, ...]:
    """Return every setting that protects less than by default, in the settings' order."""
    return tuple(
        Departure(
            setting=key.path,
            value=_format_value(key.value),
            default=_format_value(key.default),
            whom=key.mark.whom if isinstance(key.mark, Protection) else "not known",
            means=key.mark.means if isinstance(key.mark, Protection) else _UNKNOWN,
        )
        for key in find_keys(settings)
        if key.departs
    )


def find_keys(settings: Settings, default: Any = None, prefix: str = "") -> Iterator[Key]:
    """Yield every key of settings that all parties agree on, with its value, default and mark.

    A mark says whom the key's value protects. A section has keys of its own, unless it has a mark
    as a whole.

    Args:
        settings: the settings, or a section of them.
        default: settings of the same class, whose values count as the defaults; None: the class's
            own defaults.
        prefix: dotted path of these settings, with a dot at the end; "" at the top.
    """
    for name, declared in type(settings).model_fields.items():
        if _is_of_each_party(name, declared):
            continue
        path = f"{prefix}{name}"
        value = getattr(settings, name)
        if isinstance(default, type(settings)):
            default_value = getattr(default, name)
        else:
            default_value = _find_default(declared)
        mark = _get_protection_mark(declared)
        if mark is not None:
            yield _make_key(path, settings, default, value, default_value, mark)
        elif isinstance(value, Settings):
            yield from find_keys(value, default_value, f"{path}.")
        elif not _find_settings_classes(declared.annotation):
            yield Key(path=path, value=value, default=default_value, mark=None)
        elif isinstance(value, Mapping | tuple):
            # Settings by name, such as those of each passive, or a list of settings.
            parts = value.items() if isinstance(value, Mapping) else enumerate(value)
            for name_or_index, part in parts:
                yield from find_keys(part, None, f"{path}.{name_or_index}.")


def find_key_types(
    kind: type[Settings], prefix: str = ""
) -> Iterator[tuple[str, Protection | Unprotective | FollowsFrom | None]]:
    """Yield the dotted path and the mark of every key that settings of this class may have, except
    those that each party decides for itself.

    In a path, `*` stands for any name or index. `prefix`: path of these settings, with a dot at the
    end; "" at the top.
    """
    for name, declared in kind.model_fields.items():
        if _is_of_each_party(name, declared):
            continue
        mark = _get_protection_mark(declared)
        section_classes = _find_settings_classes(declared.annotation)
        if mark is not None or not section_classes:
            yield f"{prefix}{name}", mark
            continue
        is_collection = get_origin(_strip_annotations(declared.annotation)) in (dict, tuple)
        for section_class in section_classes:
            section_prefix = f"{prefix}{name}.{'*.' if is_collection else ''}"
            yield from find_key_types(section_class, section_prefix)


def list_keys(kind: type[Settings], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every key that settings of this class may have, sections and keys
    that each party decides for itself included.

    In a path, `*` stands for any name or index. `prefix`: path of these settings, with a dot at the
    end; "" at the top.
    """
    for name, declared in kind.model_fields.items():
        yield f"{prefix}{name}"
        is_collection = get_origin(_strip_annotations(declared.annotation)) in (dict, tuple)
        for section_class in _find_settings_classes(declared.annotation):
            section_prefix = f"{prefix}{name}.{'*.' if is_collection else ''}"
            yield from list_keys(section_class, section_prefix)


def require_limits(
    settings: Settings,
    minima: Mapping[str, Limit],
    maxima: Mapping[str, Limit],
    *,
    known: Mapping[str, Protection | Unprotective | FollowsFrom | None],
    party: str,
    file: str,
    ask: str,
) -> None:
    """Refuse settings that protect less than a party's own file allows.

    Args:
        settings: settings of the run.
        minima, maxima: the party's limits by dotted path, in which `*` is any name.
        known: path -> the mark of every possible key (`find_key_types`).
        party: name of the party that sets the limits.
        file: where they are written.
        ask: who may change the settings.

    Raises ConfigError: settings below a minimum or above a maximum, or a limit of an unknown key;
    names all of them, and what to change where.
    """
    keys = list(find_keys(settings))
    faults = list[str]()
    for side, limits in (("minima", minima), ("maxima", maxima)):
        for pattern, limit in limits.items():
            mark = _find_limited_mark(pattern, side, limit, known, file)
            # "other" marks a key whose values are names; those of all others are numbers.
            bound = _BOUND_WORDS[side] if mark.less != "other" else " or what protects more"
            matches = [key for key in keys if _is_match(pattern, key.path)]
            values = [(key.path, key.value) for key in matches] or [(pattern, None)]
            for path, value in values:
                # A limit of a number that the run does not have cannot be met.
                is_missing = value is None and mark.less != "other"
                if not is_missing and not mark.is_less(value, limit):
                    continue
                state = _format_value(value) if matches else "not set in this run"
                faults.append(
                    f"{party}: {path} is {state}, and {side}.{pattern} of {file} asks for "
                    f"{_format_value(limit)}{bound}: it protects {mark.whom} (less: {mark.means}); "
                    f"ask {ask} for other settings, or change {side}.{pattern} in {file}"
                )
    if faults:
        raise ConfigError("\n".join(faults))


_BOUND_WORDS = {"minima": " at least", "maxima": " at most"}


def _find_limited_mark(
    pattern: str, side: str, limit: Limit, known_marks: Mapping[str, Any], file: str
) -> Protection:
    """Return the protection mark of the key that a party's limit names, after checking the limit.

    Args:
        pattern: the limit's dotted path, in which `*` is any name.
        side: "minima" or "maxima".
        limit: value of the limit.
        known_marks: marks of all possible keys, by path.
        file: where the limit is written, for errors.

    Raises:
        ConfigError: there is no such key, or it cannot be limited on this side or by this value.
    """
    place = f"{file}: {side}.{pattern}"
    marks = [
        mark for path, mark in known_marks.items() if _is_match(path, pattern) or path == pattern
    ]
    if not marks:
        guess = did_you_mean(pattern, known_marks)
        raise ConfigError(f"{place}: no setting has that name{f'; {guess}' if guess else ''}")
    mark = marks[0]
    if not isinstance(mark, Protection):
        raise ConfigError(f"{place}: this setting protects nobody; leave it out")
    right_side = "maxima" if mark.less == "higher" else "minima"
    if side != right_side:
        direction = "more" if mark.less == "higher" else "less"
        raise ConfigError(f"{place}: {direction} of it protects less; say it under {right_side}")
    if mark.less == "other":
        names = [name for group in mark.order for name in group if name is not None]
        if limit not in names:
            raise ConfigError(
                f"{place}: expected one of {', '.join(map(_format_value, names))}, got "
                f"{_format_value(limit)}"
            )
    elif isinstance(limit, bool | str):
        raise ConfigError(f"{place}: expected a number, got {_format_value(limit)}")
    return mark


def _is_match(pattern: str, path: str) -> bool:
    """Return whether a path matches a pattern, in which `*` is any one name."""
    pattern_names = pattern.split(".")
    path_names = path.split(".")
    are_same = (
        expected in ("*", actual)
        for expected, actual in zip(pattern_names, path_names, strict=False)
    )
    return len(pattern_names) == len(path_names) and all(are_same)


def _make_key(
    path: str, settings: Settings, default: Any, value: Any, default_value: Any, mark: Any
) -> Key:
    """Return a key with its value and default.

    A mark may compare another value than the key's own, which it reads from the whole section: the
    protocol of an intersection, for example, follows from several keys.

    Args:
        path: dotted path of the key.
        settings: the section that has the key.
        default: settings of the same class, whose values count as defaults; None: the class's own.
        value, default_value: the key's own value and default.
        mark: the key's mark.
    """
    read_value = mark.read if isinstance(mark, Protection) else None
    if read_value is None:
        return Key(path=path, value=value, default=default_value, mark=mark)
    default_settings = default if isinstance(default, type(settings)) else type(settings)()
    return Key(
        path=path, value=read_value(settings), default=read_value(default_settings), mark=mark
    )


def _find_default(declared: FieldInfo) -> Any:
    """Return the default of a settings key; `NO_DEFAULT` if it must be set."""
    return NO_DEFAULT if declared.is_required() else declared.get_default(call_default_factory=True)


def _is_of_each_party(name: str, declared: FieldInfo) -> bool:
    """Return whether each party decides this settings key for itself, unknown to the others."""
    return EACH_ALONE in declared.metadata and name not in _SHARED_ALL_THE_SAME


def _get_protection_mark(declared: FieldInfo) -> Any:
    """Return the mark in a field's metadata that says whom it protects; None: there is none.

    A field with a single possible value has the mark `protects("nobody")`.
    """
    kinds = (Protection, Unprotective, FollowsFrom)
    marks = [mark for mark in declared.metadata if isinstance(mark, kinds)]
    if marks:
        return marks[0]
    values = get_args(declared.annotation) if get_origin(declared.annotation) is Literal else ()
    return protects("nobody") if len(values) == 1 else None


def _strip_annotations(annotation: Any) -> Any:
    """Return the declared type inside any number of `Annotated`."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _find_settings_classes(annotation: Any) -> list[type[Settings]]:
    """Return the settings classes that a value of this declared type is or contains, such as the
    members of a union or the class of a list's items.
    """
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    parts: Sequence[Any] = get_args(_strip_annotations(annotation))
    return [kind for part in parts for kind in _find_settings_classes(part)]


def _format_value(value: Any) -> str:
    """Return a value as it is written in a settings file, shortened; for messages."""
    if value is NO_DEFAULT:
        return _NO_DEFAULT
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    if isinstance(value, tuple | list):
        text = ", ".join(map(str, value)) or "none"
    else:
        text = f"{value:,}" if isinstance(value, int) else str(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
