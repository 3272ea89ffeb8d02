"""Settings of a run as flat names, `train__epochs`, as scikit-learn names nested parameters.

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
    "list_declared_names",
    "list_given",
    "list_settings",
    "name_nearest",
    "plain_values",
    "replace_setting",
]

_SEPARATOR = "__"
_METHOD = "method"
_NAME = "name"
_NOT_SET = ("data", "seed")
"""Sections that frames and the estimator's own parameter stand for."""


def list_settings(settings: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the effective value of every setting, by flat name.

    Args:
        settings: what the user set, nested as in a run's file; anything but a mapping counts as
            empty.
        defaults: values where the user set nothing, nested likewise; for other settings their
            declared default.
    """
    values = dict(_list_defaults(Config))
    nested = settings if isinstance(settings, Mapping) else {}
    method = nested.get(_METHOD, defaults.get(_METHOD))
    name = _find_method(method)
    if name in METHODS:
        values |= _list_defaults(METHODS[name].settings, (_METHOD,))
    values |= dict(_flatten_settings(defaults))
    values |= dict(_flatten_settings(nested))
    listed = {_SEPARATOR.join(path): value for path, value in values.items() if _is_set(path)}
    # A mapping and its parts would both be set.
    parents = {key.rpartition(_SEPARATOR)[0] for key in listed}
    return {key: listed[key] for key in listed if key not in parents or key == _METHOD}


def list_given(settings: Mapping[str, Any]) -> frozenset[str]:
    """Return the flat names of the settings that the user set."""
    return frozenset(_SEPARATOR.join(path) for path, _ in _flatten_settings(settings))


def replace_setting(nested: Any, key: str, value: Any) -> dict[str, Any]:
    """Return a copy of the settings with one of them set.

    Args:
        nested: as in a run's file, or None; it is not changed.
        key: flat name of the setting.

    Raises KeyError: there is no such setting; has the name.
    """
    settings = dict(nested) if isinstance(nested, Mapping) else {}
    path = tuple(key.split(_SEPARATOR))
    if not _is_known(path, settings):
        raise KeyError(key)
    section = settings
    for place, name in enumerate(path[:-1]):
        inner = section.get(name)
        if isinstance(inner, Settings):
            inner = inner.model_dump(exclude_unset=True)
        elif path[: place + 1] == (_METHOD,) and isinstance(inner, str):
            inner = {_NAME: inner}
        section[name] = dict(inner) if isinstance(inner, Mapping) else {}
        section = section[name]
    section[path[-1]] = value
    return settings


def list_declared_names() -> Iterator[str]:
    """Yield the flat name of every declared setting of a run without free keys."""
    for key in list_keys(Config):
        path = tuple(key.split("."))
        if "*" not in path and _is_set(path):
            yield _SEPARATOR.join(path)


def name_nearest(key: str, names: Sequence[str]) -> str:
    """Return the known name that is closest, by the whole name or else by its last part.

    `names`: the known names.
    """
    by_whole = get_close_matches(key, names, n=1, cutoff=0.8)
    if by_whole:
        return by_whole[0]
    last = key.rpartition(_SEPARATOR)[2]
    by_last = {name.rpartition(_SEPARATOR)[2]: name for name in reversed(names)}
    close = get_close_matches(last, list(by_last), n=1, cutoff=0.6)
    return by_last[close[0]] if close else ""


def plain_values(value: Any) -> Any:
    """Return the value with numpy's numbers, as searches draw them, as Python's."""
    if isinstance(value, Mapping):
        return {key: plain_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(inner) for inner in value]
    return value.item() if isinstance(value, np.generic) else value


def _list_defaults(
    kind: type[Settings], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and default of every setting that has one; for a section, of the
    settings in it.

    `prefix`: path of these settings.
    """
    for name, declared in kind.model_fields.items():
        if declared.is_required():
            continue
        default = declared.get_default(call_default_factory=True, validated_data={})
        if isinstance(default, Settings):
            yield from _list_defaults(type(default), (*prefix, name))
        else:
            yield (*prefix, name), default


def _flatten_settings(
    nested: Mapping[str, Any], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and value of every nested setting.

    `prefix`: path of these settings.
    """
    for name, value in nested.items():
        path = (*prefix, str(name))
        inner = value.model_dump(exclude_unset=True) if isinstance(value, Settings) else value
        if path == (_METHOD,):
            yield path, value
        if isinstance(inner, Mapping) and inner:
            yield from _flatten_settings(inner, path)
        elif path != (_METHOD,):
            yield path, value


def _find_method(method: Any) -> Any:
    """Return the method's name from its settings, a mapping or a name."""
    if isinstance(method, Settings):
        return getattr(method, _NAME, None)
    return method.get(_NAME) if isinstance(method, Mapping) else method


def _is_set(path: tuple[str, ...]) -> bool:
    return path[0] not in _NOT_SET and path != (_METHOD, _NAME)


def _is_known(path: tuple[str, ...], settings: Mapping[str, Any]) -> bool:
    """Return whether a path leads to a setting, by the declared keys, in which `*` is any name."""
    if not _is_set(path):
        return False
    keys = {tuple(key.split(".")) for key in list_keys(Config)}
    name = _find_method(settings.get(_METHOD))
    if name in METHODS:
        keys |= {(_METHOD, *key.split(".")) for key in list_keys(METHODS[name].settings)}
    return any(
        len(key) == len(path)
        and all(part in ("*", name_part) for part, name_part in zip(key, path, strict=True))
        for key in keys
    )
