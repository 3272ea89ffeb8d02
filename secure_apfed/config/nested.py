"""Settings of a run under flat names such as `train__epochs`, as scikit-learn names parameters.

Run by: an estimator, whose `get_params` lists every setting with the value that holds, and whose
`set_params` changes one. Values are checked where a run is made of them, and names here.
"""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np

from secure_apfed.config import Config
from secure_apfed.methods import METHODS
from secure_apfed.settings import Settings
from secure_apfed.settings.protection import list_keys

__all__ = [
    "convert_numpy_numbers",
    "find_nearest_name",
    "list_declared_names",
    "list_parameters",
    "list_set_names",
    "replace_setting",
]

_SEPARATOR = "__"
_METHOD = "method"
_NAME = "name"
_EXCLUDED_SECTIONS = ("data", "seed")
"""Sections that are no parameters: frames take the place of `data`, the estimator has a `seed`."""


def list_parameters(settings: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the effective value of every setting, by flat name.

    Args:
        settings: what the user set, nested as in a run's file; anything but a mapping counts as
            empty.
        defaults: the estimator's values where the user set nothing, nested in the same way.
            Elsewhere the declared defaults of the settings hold.
    """
    nested_settings = settings if isinstance(settings, Mapping) else {}
    method = nested_settings.get(_METHOD, defaults.get(_METHOD))
    method_name = _get_method_name(method)
    # Later values replace earlier ones.
    value_by_path = dict(_iter_defaults(Config))
    if method_name in METHODS:
        value_by_path |= _iter_defaults(METHODS[method_name].settings, (_METHOD,))
    value_by_path |= dict(_iter_set_values(defaults))
    value_by_path |= dict(_iter_set_values(nested_settings))
    value_by_name = {
        _SEPARATOR.join(path): value for path, value in value_by_path.items() if _is_parameter(path)
    }
    # A section is left out if its parts are listed, or a caller would set both.
    sections = {name.rpartition(_SEPARATOR)[0] for name in value_by_name}
    return {
        name: value
        for name, value in value_by_name.items()
        if name not in sections or name == _METHOD
    }


def list_set_names(settings: Mapping[str, Any]) -> frozenset[str]:
    """Return the flat names, such as train__epochs, of the settings in nested mappings."""
    return frozenset(_SEPARATOR.join(path) for path, _ in _iter_set_values(settings))


def replace_setting(nested_settings: Any, key: str, value: Any) -> dict[str, Any]:
    """Return a copy of nested settings in which one has a new value.

    Args:
        nested_settings: settings as in a run's file, which are not changed; None: no settings.
        key: flat name of the setting, such as "train__epochs".
        value: the new value.

    Raises KeyError: no setting has this name, which the error holds.
    """
    settings = dict(nested_settings) if isinstance(nested_settings, Mapping) else {}
    path = tuple(key.split(_SEPARATOR))
    if not _is_known(path, settings):
        raise KeyError(key)
    *section_names, name = path
    section = settings
    for depth, section_name in enumerate(section_names):
        is_method = depth == 0 and section_name == _METHOD
        section[section_name] = _copy_section(section.get(section_name), is_method=is_method)
        section = section[section_name]
    section[name] = value
    return settings


def _copy_section(section: Any, *, is_method: bool) -> dict[str, Any]:
    """Return a section's settings as a new mapping; empty if it holds none.

    `section`: a mapping, a settings object or, for `method`, a name alone.
    """
    if isinstance(section, Settings):
        return section.model_dump(exclude_unset=True)
    if is_method and isinstance(section, str):
        return {_NAME: section}
    return dict(section) if isinstance(section, Mapping) else {}


def list_declared_names() -> Iterator[str]:
    """Yield the flat name of every declared setting of a run, except those below keys that users
    choose, such as names of parties.
    """
    for key in list_keys(Config):
        path = tuple(key.split("."))
        if "*" not in path and _is_parameter(path):
            yield _SEPARATOR.join(path)


def find_nearest_name(key: str, names: Sequence[str]) -> str:
    """Return the known flat name that is closest to a misspelt one; "" if none is close.

    Whole names are compared first, then their last parts: a user may leave the section out, as in
    epoch for train__epochs.

    `key`: the misspelt name. `names`: the known names.
    """
    close_names = get_close_matches(key, names, n=1, cutoff=0.8)
    if close_names:
        return close_names[0]
    last_part = key.rpartition(_SEPARATOR)[2]
    # Reversed, so that the first of several names with one last part stays and is suggested.
    name_by_last_part = {name.rpartition(_SEPARATOR)[2]: name for name in reversed(names)}
    close_parts = get_close_matches(last_part, list(name_by_last_part), n=1, cutoff=0.6)
    return name_by_last_part[close_parts[0]] if close_parts else ""


def convert_numpy_numbers(value: Any) -> Any:
    """Return the value with Python's numbers in place of NumPy's, at any depth of mappings, lists
    and tuples.

    Searches over parameters draw numbers of NumPy, which settings would refuse.
    """
    if isinstance(value, Mapping):
        return {key: convert_numpy_numbers(inner_value) for key, inner_value in value.items()}
    if isinstance(value, list | tuple):
        return [convert_numpy_numbers(inner_value) for inner_value in value]
    return value.item() if isinstance(value, np.generic) else value


def _iter_defaults(
    settings_class: type[Settings], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and default of every setting that has a default, at any depth of sections.

    `settings_class`: class of the settings. `prefix`: path of its section in a run's settings.
    """
    for name, field in settings_class.model_fields.items():
        if field.is_required():
            continue
        default = field.get_default(call_default_factory=True, validated_data={})
        if isinstance(default, Settings):
            yield from _iter_defaults(type(default), (*prefix, name))
        else:
            yield (*prefix, name), default


def _iter_set_values(
    nested_settings: Mapping[str, Any], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and value of every setting in nested mappings or settings objects.

    The parts of a section are yielded in place of the section. An empty section is yielded itself,
    and so is `method`, besides its parts: it may be a name alone.

    `prefix`: path of `nested_settings` in a run's settings.
    """
    for name, value in nested_settings.items():
        path = (*prefix, str(name))
        is_method = path == (_METHOD,)
        section = value.model_dump(exclude_unset=True) if isinstance(value, Settings) else value
        has_own_settings = isinstance(section, Mapping) and bool(section)
        if is_method or not has_own_settings:
            yield path, value
        if has_own_settings:
            yield from _iter_set_values(section, path)


def _get_method_name(method: Any) -> Any:
    """Return the method's name, given its settings, a mapping, or the name itself."""
    if isinstance(method, Settings):
        return getattr(method, _NAME, None)
    return method.get(_NAME) if isinstance(method, Mapping) else method


def _is_parameter(path: tuple[str, ...]) -> bool:
    """Return whether the estimator has a parameter for the setting at this path."""
    return path[0] not in _EXCLUDED_SECTIONS and path != (_METHOD, _NAME)


def _is_known(path: tuple[str, ...], settings: Mapping[str, Any]) -> bool:
    """Return whether a run has a setting at this path, with the method that `settings` name.

    `settings`: the settings so far, nested as in a run's file; a method that they name adds its own
    keys.
    """
    if not _is_parameter(path):
        return False
    declared_paths = {tuple(key.split(".")) for key in list_keys(Config)}
    method = _get_method_name(settings.get(_METHOD))
    if method in METHODS:
        method_keys = list_keys(METHODS[method].settings)
        declared_paths |= {(_METHOD, *key.split(".")) for key in method_keys}

    def matches_path(declared_path: tuple[str, ...]) -> bool:
        """Return whether the declared path is `path`; its `*` is any name that users choose."""
        if len(declared_path) != len(path):
            return False
        return all(part in ("*", name) for part, name in zip(declared_path, path, strict=True))

    return any(map(matches_path, declared_paths))
