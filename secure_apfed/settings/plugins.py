"""Names of plug-in code in settings, and tables that import the code behind such a name.

Run by: the party that names code, which alone may: in a run's file of its own, on its command line
or in its program. Whatever else is read (a proposal, a file that all parties share, a run's folder,
a stored model) is read by `own=False`, and a name of code in it is refused before anything is
imported. `SECURE_APFED_CODE`, names with commas between, lets them be read.

A name of code is `package.module:Name`. An installed package may declare shorter ones by entry
points of `GROUPS`; the owner's settings take them, and hold the code that they stand for.

Examples:
    >>> with reading_settings(own=False):
    ...     require_owner("my_methods:Mine", key="method")
    Traceback (most recent call last):
    secure_apfed.errors.ConfigError: method: 'my_methods:Mine' names code, ...
"""

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args

from pydantic import AfterValidator, Field

from secure_apfed.base.failures import find_failed_line
from secure_apfed.errors import ConfigError
from secure_apfed.settings import did_you_mean, unknown_name

__all__ = [
    "CODE_NAME",
    "GROUPS",
    "CodeName",
    "PluginKind",
    "PluginTable",
    "expand_name",
    "find_code_name",
    "import_code",
    "import_name",
    "list_declared",
    "list_noted_code",
    "note_code",
    "reading_settings",
    "require_class",
    "require_code_name",
    "require_owner",
]

_DOTTED_PATH = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
CODE_NAME = re.compile(f"{_DOTTED_PATH}:{_DOTTED_PATH}")
"""Pattern of the import path of a user's own code, package.module:Name."""


def require_code_name(name: str) -> str:
    """Return the text unchanged if it is an import path, package.module:Name. Raises ValueError:
    another form.
    """
    if not CODE_NAME.fullmatch(name):
        raise ValueError(
            "code of one's own is named as package.module:Name, such as my_nets:resnet; got "
            f"{name!r}"
        )
    return name


CodeName = Annotated[str, Field(max_length=200), AfterValidator(require_code_name)]

PluginKind: TypeAlias = Literal[
    "attacks",
    "datasets",
    "defences",
    "guards",
    "labellers",
    "methods",
    "networks",
    "objectives",
    "tasks",
]
GROUPS: Mapping[PluginKind, str] = {kind: f"secure_apfed.{kind}" for kind in get_args(PluginKind)}
"""The group of entry points under which an installed package declares plug-ins of a kind."""

_VARIABLE = "SECURE_APFED_CODE"
_MAX_LISTED = 10  # names of a module, in an error
_EntryT = TypeVar("_EntryT")
# Whether the settings that are being read are the party's own.
_is_own: ContextVar[bool] = ContextVar("is_own", default=True)
_noted_code: set[str] = set()
"""Import paths that this party's own settings have named, to be imported later."""


@contextmanager
def reading_settings(*, own: bool) -> Iterator[None]:
    """Mark the settings that are read in this block as the party's own, which may name code, or as
    another party's, which may not.
    """
    token = _is_own.set(own)
    try:
        yield
    finally:
        _is_own.reset(token)


def note_code(code: str) -> None:
    """Trust an import path from now on, if the settings that are being read are the party's own.

    The code itself is imported later, such as an attack's after the run.
    """
    if _is_own.get():
        _noted_code.add(code)


def list_noted_code() -> tuple[str, ...]:
    """Return the import paths that the party's own settings have named in this process, sorted."""
    return tuple(sorted(_noted_code))


def require_owner(code: str, *, key: str, noted: bool = False) -> None:
    """Raise ConfigError unless the party itself named this code, or trusts it by the environment.

    Args:
        code: import path of the code.
        key: the setting that names it, for the error.
        noted: True: only code that settings named before is trusted (`note_code`); False: also
            code that the settings which are being read name, if they are the party's own.
    """
    trusted_by_environment = {name.strip() for name in os.environ.get(_VARIABLE, "").split(",")}
    if code in trusted_by_environment or code in _noted_code:
        return
    if noted or not _is_own.get():
        raise ConfigError(
            f"{key}: {code!r} names code, and only the party that runs code may name it; read "
            "your own file by load_config(path, own=True), or, if you trust another's, set the "
            f"environment variable {_VARIABLE}={code}"
        )


def list_declared(kind: PluginKind) -> dict[str, str]:
    """Return what installed packages declare as plug-ins: name -> package.module:Name."""
    return _read_entry_points(GROUPS[kind], tuple(sys.path))


@lru_cache(maxsize=64)
def _read_entry_points(group: str, path: tuple[str, ...]) -> dict[str, str]:
    """Return the entry points of a group, name -> import path.

    Cached, since every installed package is inspected. `path`: `sys.path`, which decides what is
    installed.
    """
    del path  # it is only part of the cache's key
    return {entry.name: entry.value for entry in entry_points(group=group)}


def find_code_name(name: str, kind: PluginKind) -> str | None:
    """Return the import path of the code that a name stands for; nothing is imported.

    The name is an import path itself, or one that an installed package declares for a plug-in of
    this kind. None: neither, as for a built-in entry.
    """
    if CODE_NAME.fullmatch(name):
        return name
    return list_declared(kind).get(name)


def expand_name(name: str, kind: PluginKind) -> str:
    """Return the import path that an installed package declares under a name; any other name
    unchanged.

    Nothing is imported. Raises ValueError: the settings that are being read are another party's,
    and may not name code.
    """
    code = find_code_name(name, kind)
    if code is None or code == name:
        return name
    try:
        require_owner(code, key=repr(name))
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return code


class PluginTable(dict[str, _EntryT]):
    """A table of built-in entries by name, and of the plug-ins that this process has imported.

    Only `take_name` imports code; a lookup never does.

    Args:
        ours: the built-in entries by name. As an attribute it has their names.
        kind: kind of the plug-ins.
        prepare: maps an imported object and its import path to the entry, or raises TypeError with
            what was expected.
    """

    def __init__(
        self,
        ours: Mapping[str, _EntryT],
        *,
        kind: PluginKind,
        prepare: Callable[[Any, str], _EntryT],
    ) -> None:
        """Start with the built-in entries."""
        super().__init__(ours)
        self.ours = tuple(ours)
        self._kind: PluginKind = kind
        self._prepare = prepare

    def list_names(self) -> tuple[str, ...]:
        """Return every name that settings may use on this machine: the built-in ones, then those
        that installed packages declare.
        """
        declared = sorted(set(list_declared(self._kind)) - set(self.ours))
        return (*self.ours, *declared)

    def take_name(self, name: str, *, key: str) -> str:
        """Return the table's key of the entry with this name; a plug-in is imported and added.

        The key of a plug-in is its import path.

        Args:
            name: name of a built-in entry, a name that an installed package declares, or an import
                path, package.module:Name.
            key: the setting that names it, for errors.

        Raises ConfigError: there is no such entry, it is of another kind, or another party named
        its code (`require_owner`).
        """
        if name in self:
            return name
        code = find_code_name(name, self._kind)
        if code is None:
            raise ConfigError(f"{key}: {unknown_name(name, self.list_names())}")
        if code not in self:
            require_owner(code, key=key)
            code_object = import_name(code, key=key)
            try:
                self[code] = self._prepare(code_object, code)
            except TypeError as error:
                raise ConfigError(f"{key}: {code} is no plug-in of {self._kind}: {error}") from None
        return code


def require_class(candidate: Any, base: type) -> Any:
    """Return the candidate, an imported object, if it is a subclass of `base` without abstract
    methods.

    Raises TypeError: it is not such a class; says what is missing.
    """
    base_name = f"{base.__module__}.{base.__name__}"
    if not (isinstance(candidate, type) and issubclass(candidate, base)):
        kind = candidate.__name__ if isinstance(candidate, type) else type(candidate).__name__
        raise TypeError(f"expected a subclass of {base_name}, got {kind}")
    missing = sorted(getattr(candidate, "__abstractmethods__", ()))
    if missing:
        raise TypeError(f"{candidate.__name__} lacks {', '.join(missing)} of {base_name}")
    return candidate


def import_code(name: str, *, key: str, code_folder: Path | None = None) -> Any:
    """Return the class, function or other callable that `package.module:Name` names.

    `key`: the setting that names it, for errors. `code_folder`: folder whose modules may be named;
    None: the working directory. Raises ConfigError: nothing has this name, or nothing callable.
    """
    code_object = import_name(name, key=key, code_folder=code_folder)
    if not callable(code_object):
        raise ConfigError(
            f"{key}: {name} is of type {type(code_object).__name__}; expected a class, a function "
            "or a module"
        )
    return code_object


def import_name(name: str, *, key: str, code_folder: Path | None = None) -> Any:
    """Return the object that `package.module:Name` names.

    Args:
        name: import path of the object.
        key: the setting that names it, for errors.
        code_folder: a folder whose modules may be named, besides installed ones; None: the working
            directory.

    Raises ConfigError: malformed, or there is no such module or name, or its import fails.
    """
    if not CODE_NAME.fullmatch(name):
        raise ConfigError(f"{key}: expected code as package.module:Name, got {name!r}")
    module_name, _, attribute = name.partition(":")
    folder = (code_folder or Path()).absolute()
    try:
        with _importing_from(folder):
            code_object: Any = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and _is_part_of(error.name, module_name):
            raise ConfigError(_describe_missing_module(module_name, key, folder)) from error
        raise ConfigError(
            f"{key}: {module_name} cannot be imported: {_describe_import_error(error)}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(code_object, part):
            known = _list_own_names(code_object)
            guess = did_you_mean(part, known) or f"it has {', '.join(known[:_MAX_LISTED])}"
            raise ConfigError(
                f"{key}: {module_name} has no {attribute!r}{f'; {guess}' if known else ''}"
            )
        code_object = getattr(code_object, part)
    return code_object


def _list_own_names(code_object: Any) -> list[str]:
    """Return the public names of a module or class that are defined there, not imported.

    An error suggests them in place of a misspelt name.
    """
    own_module = getattr(code_object, "__name__", "")
    return [
        name
        for name, value in vars(code_object).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", own_module) == own_module
    ]


def _is_part_of(missing: str | None, module_name: str) -> bool:
    """Return whether the module that was not found is the wanted one, or a package that holds it.

    Otherwise the wanted module exists, and a module that it imports is missing. `missing`: name of
    the module that was not found.
    """
    return missing is not None and f"{module_name}.".startswith(f"{missing}.")


def _describe_missing_module(module_name: str, key: str, folder: Path) -> str:
    """Return the error's text for a module that was not found, with advice.

    `key`: the setting that names it. `folder`: the folder that was searched first.
    """
    first, _, rest = module_name.partition(".")
    if rest == "py":
        return f"{key}: a module is named without .py: write {first}:NAME, not {module_name}:NAME"
    return (
        f"{key}: there is no module {module_name!r}; put {first}.py into {folder}, or install its "
        "package"
    )


def _describe_import_error(error: Exception) -> str:
    """Return the type and text of an error that a user's module raised when it was imported, with
    the line.
    """
    line = find_failed_line(error)
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}{f' ({line})' if line else ''}"


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Put a folder first in Python's search path for modules, in this block."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
