"""Settings that protect less than by default, found by the protection of their keys (`protects`).

Read by: the screens before a run (`project join`, `project new`, `project check`, `plan`), which
list every weakened setting, and whoever holds a proposal against a party's own limits. Every key
that all parties sign, or that a proposal carries, has a protection among its metadata; a test walks
all keys. Of a key without one, every change counts as a weakening.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

from pydantic.fields import FieldInfo

from secure_apfed.errors import ConfigError
from secure_apfed.settings import (
    EACH_ALONE,
    FollowsFrom,
    NoProtection,
    Protection,
    Settings,
    protects,
    suggest_name,
)

__all__ = [
    "NO_DEFAULT",
    "Limit",
    "SettingsKey",
    "WeakenedSetting",
    "find_keys",
    "find_weakened_settings",
    "list_key_protections",
    "list_keys",
    "require_limits",
]

Limit: TypeAlias = bool | int | float | str
NO_DEFAULT = object()
"""Placeholder for the default of a key that must be set."""
_UNKNOWN_CONSEQUENCE = "nobody said whom this setting protects; ask who wrote the method"
# Settings that each party decides, and that all parties learn: they choose the intersection.
_CHOICES_SEEN_BY_ALL = frozenset({"dealer", "pairwise_overlaps"})
_MAX_VALUE_CHARACTERS = 60


@dataclass(frozen=True, kw_only=True)
class SettingsKey:
    """A key of given settings: its value, its default, and whom the value protects.

    Attributes:
        path: dotted path of the key.
        value, default: the two values that are compared, as `Protection.read_value` makes them.
        protection: whom the value protects; None: nobody has declared it.
    """

    path: str
    value: Any
    default: Any
    protection: Protection | NoProtection | None

    @property
    def is_weakened(self) -> bool:
        """Whether the value protects less than the default or, without a default, than the
        strongest one, whose strength is 0.
        """
        if self.protection is None:
            return bool(self.value != self.default)
        if not isinstance(self.protection, Protection):
            return False
        if self.default is NO_DEFAULT:
            return (
                self.protection.weaker_values == "other"
                and self.protection.compute_strength(self.value) < 0
            )
        return self.protection.is_weaker(self.value, self.default)


_NO_DEFAULT_TEXT = "no default"


@dataclass(frozen=True, kw_only=True)
class WeakenedSetting:
    """A setting that protects less than by default, in words."""

    setting: str
    value: str
    default: str
    whom: str
    means: str

    @property
    def default_phrase(self) -> str:
        """The default, as part of a sentence."""
        if self.default == _NO_DEFAULT_TEXT:
            return "without a default"
        return f"by default {self.default}"

    @property
    def table_row(self) -> tuple[str, str, str, str, str]:
        """The cells of its row in a table."""
        return self.setting, self.value, self.default, self.whom, self.means


def find_weakened_settings(settings: Settings) -> tuple[WeakenedSetting, ...]:
    """Return every setting that protects less than by default, in the settings' order."""
    return tuple(_describe_weakened(key) for key in find_keys(settings) if key.is_weakened)


def _describe_weakened(key: SettingsKey) -> WeakenedSetting:
    """Return a weakened settings key in words, with whom it protects less and the consequence."""
    protected_parties = "not known"
    consequence = _UNKNOWN_CONSEQUENCE
    if isinstance(key.protection, Protection):
        protected_parties = key.protection.protected_parties
        consequence = key.protection.consequence
    return WeakenedSetting(
        setting=key.path,
        value=_format_value(key.value),
        default=_format_value(key.default),
        whom=protected_parties,
        means=consequence,
    )


def find_keys(
    settings: Settings, default_settings: Any = None, prefix: str = ""
) -> Iterator[SettingsKey]:
    """Yield every key of settings that all parties agree on, with its value, its default and whom
    the value protects.

    A section has keys of its own, unless it has a protection as a whole.

    Args:
        settings: the settings, or a section of them.
        default_settings: settings of the same class, whose values count as the defaults; None: the
            class's own defaults.
        prefix: dotted path of these settings, with a dot at the end; "" at the top.
    """
    for name, field in type(settings).model_fields.items():
        if _is_private_choice(name, field):
            continue
        path = f"{prefix}{name}"
        value = getattr(settings, name)
        if isinstance(default_settings, type(settings)):
            default_value = getattr(default_settings, name)
        else:
            default_value = _find_default(field)
        protection = _find_protection(field)
        if protection is not None:
            yield _make_key(path, settings, default_settings, value, default_value, protection)
        elif isinstance(value, Settings):
            yield from find_keys(value, default_value, f"{path}.")
        elif not _find_settings_classes(field.annotation):
            yield SettingsKey(path=path, value=value, default=default_value, protection=None)
        elif isinstance(value, Mapping | tuple):
            # Settings by name, such as those of each passive, or a list of settings.
            section_by_name_or_index = (
                value.items() if isinstance(value, Mapping) else enumerate(value)
            )
            for name_or_index, section in section_by_name_or_index:
                yield from find_keys(section, None, f"{path}.{name_or_index}.")


def list_key_protections(
    settings_class: type[Settings], prefix: str = ""
) -> Iterator[tuple[str, Protection | NoProtection | FollowsFrom | None]]:
    """Yield the dotted path of every key that settings of this class may have, and whom its value
    protects, except keys that each party decides for itself.

    In a path, `*` stands for any name or index. `prefix`: path of these settings, with a dot at the
    end; "" at the top.
    """
    for name, field in settings_class.model_fields.items():
        if _is_private_choice(name, field):
            continue
        protection = _find_protection(field)
        section_classes = _find_settings_classes(field.annotation)
        if protection is not None or not section_classes:
            yield f"{prefix}{name}", protection
            continue
        is_collection = get_origin(_strip_annotated(field.annotation)) in (dict, tuple)
        for section_class in section_classes:
            section_prefix = f"{prefix}{name}.{'*.' if is_collection else ''}"
            yield from list_key_protections(section_class, section_prefix)


def list_keys(settings_class: type[Settings], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every key that settings of this class may have, sections and keys
    that each party decides for itself included.

    In a path, `*` stands for any name or index. `prefix`: path of these settings, with a dot at the
    end; "" at the top.
    """
    for name, field in settings_class.model_fields.items():
        yield f"{prefix}{name}"
        is_collection = get_origin(_strip_annotated(field.annotation)) in (dict, tuple)
        for section_class in _find_settings_classes(field.annotation):
            section_prefix = f"{prefix}{name}.{'*.' if is_collection else ''}"
            yield from list_keys(section_class, section_prefix)


def require_limits(
    settings: Settings,
    minima: Mapping[str, Limit],
    maxima: Mapping[str, Limit],
    *,
    protection_by_path: Mapping[str, Protection | NoProtection | FollowsFrom | None],
    party: str,
    file: str,
    settings_author: str,
) -> None:
    """Refuse settings that protect less than a party's own file allows.

    Args:
        settings: settings of the run.
        minima, maxima: the party's limits by dotted path, in which `*` is any name.
        protection_by_path: path -> protection of every possible key (`list_key_protections`).
        party: name of the party that sets the limits.
        file: where they are written.
        settings_author: who may change the settings.

    Raises ConfigError: settings below a minimum or above a maximum, or a limit of an unknown key;
    names all of them, and what to change where.
    """
    keys = list(find_keys(settings))
    problems = list[str]()
    for limit_section, limits in (("minima", minima), ("maxima", maxima)):
        for pattern, limit in limits.items():
            protection = _check_limit(pattern, limit_section, limit, protection_by_path, file)
            limit_path = f"{limit_section}.{pattern}"
            is_number = protection.weaker_values != "other"
            bound_text = _BOUND_WORDS[limit_section] if is_number else " or what protects more"
            matches = [key for key in keys if _is_match(pattern, key.path)]
            value_by_path = [(key.path, key.value) for key in matches] or [(pattern, None)]
            for path, value in value_by_path:
                # A limit of a number that the run does not have cannot be met.
                is_missing = value is None and is_number
                if not is_missing and not protection.is_weaker(value, limit):
                    continue
                value_text = _format_value(value) if matches else "not set in this run"
                problems.append(
                    f"{party}: {path} is {value_text}, and {limit_path} of {file} asks for "
                    f"{_format_value(limit)}{bound_text}: it protects "
                    f"{protection.protected_parties} (less: {protection.consequence}); "
                    f"ask {settings_author} for other settings, or change {limit_path} in {file}"
                )
    if problems:
        raise ConfigError("\n".join(problems))


_BOUND_WORDS = {"minima": " at least", "maxima": " at most"}


def _check_limit(
    pattern: str, limit_section: str, limit: Limit, protection_by_path: Mapping[str, Any], file: str
) -> Protection:
    """Return the protection of the key that a party's limit names, after checking the limit.

    Args:
        pattern: the limit's dotted path, in which `*` is any name.
        limit_section: "minima" or "maxima".
        limit: value of the limit.
        protection_by_path: path -> protection of every possible key.
        file: where the limit is written, for errors.

    Raises:
        ConfigError: there is no such key, or it cannot be limited in this section or by this value.
    """
    limit_path = f"{file}: {limit_section}.{pattern}"
    matching_paths = [
        path for path in protection_by_path if _is_match(path, pattern) or path == pattern
    ]
    if not matching_paths:
        guess = suggest_name(pattern, protection_by_path)
        raise ConfigError(f"{limit_path}: no setting has that name{f'; {guess}' if guess else ''}")
    protection = protection_by_path[matching_paths[0]]
    if not isinstance(protection, Protection):
        raise ConfigError(f"{limit_path}: this setting protects nobody; leave it out")
    right_section = "maxima" if protection.weaker_values == "higher" else "minima"
    if limit_section != right_section:
        weaker_direction = "more" if protection.weaker_values == "higher" else "less"
        raise ConfigError(
            f"{limit_path}: {weaker_direction} of it protects less; say it under {right_section}"
        )
    if protection.weaker_values == "other":
        names = [
            name for group in protection.names_by_strength for name in group if name is not None
        ]
        if limit not in names:
            raise ConfigError(
                f"{limit_path}: expected one of {', '.join(map(_format_value, names))}, got "
                f"{_format_value(limit)}"
            )
    elif isinstance(limit, bool | str):
        raise ConfigError(f"{limit_path}: expected a number, got {_format_value(limit)}")
    return protection


def _is_match(pattern: str, path: str) -> bool:
    """Return whether a path matches a pattern, in which `*` is any one name."""
    pattern_names = pattern.split(".")
    path_names = path.split(".")
    name_matches = (
        expected in ("*", actual)
        for expected, actual in zip(pattern_names, path_names, strict=False)
    )
    return len(pattern_names) == len(path_names) and all(name_matches)


def _make_key(
    path: str,
    section: Settings,
    default_section: Any,
    value: Any,
    default_value: Any,
    protection: Any,
) -> SettingsKey:
    """Return a key with its value and default.

    A protection may compare another value than the key's own, which it reads from the whole
    section: the protocol of an intersection, for example, follows from several keys.

    Args:
        path: dotted path of the key.
        section: the section that has the key.
        default_section: settings of the same class, whose values count as defaults; None: the
            class's own.
        value, default_value: the key's own value and default.
        protection: whom the key's value protects.
    """
    read_from_section = protection.read_value if isinstance(protection, Protection) else None
    if read_from_section is None:
        return SettingsKey(path=path, value=value, default=default_value, protection=protection)
    default_settings = (
        default_section if isinstance(default_section, type(section)) else type(section)()
    )
    return SettingsKey(
        path=path,
        value=read_from_section(section),
        default=read_from_section(default_settings),
        protection=protection,
    )


def _find_default(field: FieldInfo) -> Any:
    """Return the default of a settings key; `NO_DEFAULT` if it must be set."""
    return NO_DEFAULT if field.is_required() else field.get_default(call_default_factory=True)


def _is_private_choice(name: str, field: FieldInfo) -> bool:
    """Return whether each party decides this settings key for itself, unknown to the others."""
    return EACH_ALONE in field.metadata and name not in _CHOICES_SEEN_BY_ALL


def _find_protection(field: FieldInfo) -> Any:
    """Return the protection in a field's metadata, which says whom it protects; None: there is
    none.

    A field with a single possible value protects nobody.
    """
    protection_classes = (Protection, NoProtection, FollowsFrom)
    protections = [mark for mark in field.metadata if isinstance(mark, protection_classes)]
    if protections:
        return protections[0]
    single_values = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return protects("nobody") if len(single_values) == 1 else None


def _strip_annotated(annotation: Any) -> Any:
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
    type_arguments: Sequence[Any] = get_args(_strip_annotated(annotation))
    return [
        settings_class
        for type_argument in type_arguments
        for settings_class in _find_settings_classes(type_argument)
    ]


def _format_value(value: Any) -> str:
    """Return a value as it is written in a settings file, shortened; for messages."""
    if value is NO_DEFAULT:
        return _NO_DEFAULT_TEXT
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    if isinstance(value, tuple | list):
        text = ", ".join(map(str, value)) or "none"
    else:
        text = f"{value:,}" if isinstance(value, int) else str(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else text[: _MAX_VALUE_CHARACTERS - 3] + "..."
