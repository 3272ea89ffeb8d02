"""Names of plug-in code in settings, and tables that import the code behind such a name.

Run by: the party that names code, which alone may: in a run's file of its own, on its command line
or in its program. Whatever else is read (a proposal, a file that all parties share, a run's folder,
a stored model) is read by `are_own=False`, and a name of code in it is refused before anything is
imported. `SECURE_APFED_CODE`, names with commas between, lets them be read.

A name of code is `package.module:Name`. An installed package may declare shorter ones by entry
points of `ENTRY_POINT_GROUPS`; the owner's settings take them, and hold the code that they stand
for.

Examples:
    >>> with reading_settings(are_own=False):
    ...     require_trusted_code("my_methods:Mine", setting="method")
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
from secure_apfed.settings import describe_unknown_name, suggest_name

__all__ = [
    "ENTRY_POINT_GROUPS",
    "IMPORT_PATH",
    "ImportPath",
    "PluginKind",
    "PluginTable",
    "expand_name",
    "find_import_path",
    "import_callable",
    "import_object",
    "list_installed_plugins",
    "list_trusted_code",
    "reading_settings",
    "require_class",
    "require_import_path",
    "require_trusted_code",
    "trust_own_code",
]

_DOTTED_PATH = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
IMPORT_PATH = re.compile(f"{_DOTTED_PATH}:{_DOTTED_PATH}")
"""Pattern of the import path of a user's own code, package.module:Name."""


def require_import_path(name: str) -> str:
    """Return the text unchanged if it is an import path, package.module:Name. Raises ValueError:
    another form.
    """
    if not IMPORT_PATH.fullmatch(name):
        raise ValueError(
            "code of one's own is named as package.module:Name, such as my_nets:resnet; got "
            f"{name!r}"
        )
    return name


ImportPath = Annotated[str, Field(max_length=200), AfterValidator(require_import_path)]

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
ENTRY_POINT_GROUPS: Mapping[PluginKind, str] = {
    kind: f"secure_apfed.{kind}" for kind in get_args(PluginKind)
}
"""The group of entry points under which an installed package declares plug-ins of a kind."""

_TRUSTED_CODE_VARIABLE = "SECURE_APFED_CODE"
_MAX_LISTED = 10  # names of a module, in an error
_EntryT = TypeVar("_EntryT")
# Whether the settings that are being read are the party's own.
_are_own_settings: ContextVar[bool] = ContextVar("is_own", default=True)
_trusted_import_paths: set[str] = set()
"""Import paths that this party's own settings have named, to be imported later."""


@contextmanager
def reading_settings(*, are_own: bool) -> Iterator[None]:
    """Mark the settings that are read in this block as the party's own, which may name code, or as
    another party's, which may not.
    """
    token = _are_own_settings.set(are_own)
    try:
        yield
    finally:
        _are_own_settings.reset(token)


def trust_own_code(import_path: str) -> None:
    """Trust an import path from now on, if the settings that are being read are the party's own.

    The code itself is imported later, such as an attack's after the run.
    """
    if _are_own_settings.get():
        _trusted_import_paths.add(import_path)


def list_trusted_code() -> tuple[str, ...]:
    """Return the import paths that the party's own settings have named in this process, sorted."""
    return tuple(sorted(_trusted_import_paths))


def require_trusted_code(
    import_path: str, *, setting: str, only_earlier_settings: bool = False
) -> None:
    """Raise ConfigError unless the party itself named this code, or trusts it by the environment.

    Args:
        import_path: import path of the code.
        setting: the setting that names it, for the error.
        only_earlier_settings: True: only code that settings named before is trusted
            (`trust_own_code`); False: also code that the settings which are being read name, if
            they are the party's own.
    """
    trusted_by_environment = {
        name.strip() for name in os.environ.get(_TRUSTED_CODE_VARIABLE, "").split(",")
    }
    if import_path in trusted_by_environment or import_path in _trusted_import_paths:
        return
    if only_earlier_settings or not _are_own_settings.get():
        raise ConfigError(
            f"{setting}: {import_path!r} names code, and only the party that runs code may name "
            "it; read your own file by load_config(path, own=True), or, if you trust another's, "
            f"set the environment variable {_TRUSTED_CODE_VARIABLE}={import_path}"
        )


def list_installed_plugins(plugin_kind: PluginKind) -> dict[str, str]:
    """Return what installed packages declare as plug-ins: name -> package.module:Name."""
    return _read_entry_points(ENTRY_POINT_GROUPS[plugin_kind], tuple(sys.path))


@lru_cache(maxsize=64)
def _read_entry_points(group: str, search_path: tuple[str, ...]) -> dict[str, str]:
    """Return the entry points of a group, name -> import path.

    Cached, since every installed package is inspected. `search_path`: `sys.path`, which decides
    what is installed.
    """
    del search_path  # it is only part of the cache's key
    return {entry.name: entry.value for entry in entry_points(group=group)}


def find_import_path(name: str, plugin_kind: PluginKind) -> str | None:
    """Return the import path of the code that a name stands for; nothing is imported.

    The name is an import path itself, or one that an installed package declares for a plug-in of
    this kind. None: neither, as for a built-in entry.
    """
    if IMPORT_PATH.fullmatch(name):
        return name
    return list_installed_plugins(plugin_kind).get(name)


def expand_name(name: str, plugin_kind: PluginKind) -> str:
    """Return the import path that an installed package declares under a name; any other name
    unchanged.

    Nothing is imported. Raises ValueError: the settings that are being read are another party's,
    and may not name code.
    """
    import_path = find_import_path(name, plugin_kind)
    if import_path is None or import_path == name:
        return name
    try:
        require_trusted_code(import_path, setting=repr(name))
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return import_path


class PluginTable(dict[str, _EntryT]):
    """A table of built-in entries by name, and of the plug-ins that this process has imported.

    Only `import_entry` imports code; a lookup never does.

    Args:
        built_in_entries: the built-in entries by name.
        plugin_kind: kind of the plug-ins.
        make_entry: maps an imported object and its import path to the entry, or raises TypeError
            with what was expected.
    """

    def __init__(
        self,
        built_in_entries: Mapping[str, _EntryT],
        *,
        plugin_kind: PluginKind,
        make_entry: Callable[[Any, str], _EntryT],
    ) -> None:
        """Start with the built-in entries."""
        super().__init__(built_in_entries)
        self.built_in_names = tuple(built_in_entries)
        self._plugin_kind: PluginKind = plugin_kind
        self._make_entry = make_entry

    def list_names(self) -> tuple[str, ...]:
        """Return every name that settings may use on this machine: the built-in ones, then those
        that installed packages declare.
        """
        declared = sorted(set(list_installed_plugins(self._plugin_kind)) - set(self.built_in_names))
        return (*self.built_in_names, *declared)

    def import_entry(self, name: str, *, setting: str) -> str:
        """Return the table's key of the entry with this name; a plug-in is imported and added.

        The key of a plug-in is its import path.

        Args:
            name: name of a built-in entry, a name that an installed package declares, or an import
                path, package.module:Name.
            setting: the setting that names it, for errors.

        Raises ConfigError: there is no such entry, it is of another kind, or another party named
        its code (`require_trusted_code`).
        """
        if name in self:
            return name
        import_path = find_import_path(name, self._plugin_kind)
        if import_path is None:
            raise ConfigError(f"{setting}: {describe_unknown_name(name, self.list_names())}")
        if import_path not in self:
            require_trusted_code(import_path, setting=setting)
            imported_object = import_object(import_path, setting=setting)
            try:
                self[import_path] = self._make_entry(imported_object, import_path)
            except TypeError as error:
                raise ConfigError(
                    f"{setting}: {import_path} is no plug-in of {self._plugin_kind}: {error}"
                ) from None
        return import_path


def require_class(candidate: Any, base_class: type) -> Any:
    """Return the candidate, an imported object, if it is a subclass of `base_class` without
    abstract methods.

    Raises TypeError: it is not such a class; says what is missing.
    """
    base_name = f"{base_class.__module__}.{base_class.__name__}"
    if not (isinstance(candidate, type) and issubclass(candidate, base_class)):
        candidate_name = (
            candidate.__name__ if isinstance(candidate, type) else type(candidate).__name__
        )
        raise TypeError(f"expected a subclass of {base_name}, got {candidate_name}")
    abstract_methods = sorted(getattr(candidate, "__abstractmethods__", ()))
    if abstract_methods:
        raise TypeError(f"{candidate.__name__} lacks {', '.join(abstract_methods)} of {base_name}")
    return candidate


def import_callable(import_path: str, *, setting: str, code_folder: Path | None = None) -> Any:
    """Return the class, function or other callable that `package.module:Name` names.

    `setting`: the setting that names it, for errors. `code_folder`: folder whose modules may be
    named; None: the working directory. Raises ConfigError: nothing has this name, or nothing
    callable.
    """
    imported_object = import_object(import_path, setting=setting, code_folder=code_folder)
    if not callable(imported_object):
        raise ConfigError(
            f"{setting}: {import_path} is of type {type(imported_object).__name__}; expected a "
            "class, a function or a module"
        )
    return imported_object


def import_object(import_path: str, *, setting: str, code_folder: Path | None = None) -> Any:
    """Return the object that `package.module:Name` names.

    Args:
        import_path: import path of the object.
        setting: the setting that names it, for errors.
        code_folder: a folder whose modules may be named, besides installed ones; None: the working
            directory.

    Raises ConfigError: malformed, or there is no such module or name, or its import fails.
    """
    if not IMPORT_PATH.fullmatch(import_path):
        raise ConfigError(f"{setting}: expected code as package.module:Name, got {import_path!r}")
    module_name, _, attribute_path = import_path.partition(":")
    folder = (code_folder or Path()).absolute()
    try:
        with _importing_from(folder):
            imported_object: Any = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and _is_module_or_parent(error.name, module_name):
            raise ConfigError(_describe_missing_module(module_name, setting, folder)) from error
        raise ConfigError(
            f"{setting}: {module_name} cannot be imported: {_describe_import_error(error)}"
        ) from error
    for attribute in attribute_path.split("."):
        if not hasattr(imported_object, attribute):
            advice = _suggest_attribute(imported_object, attribute)
            raise ConfigError(f"{setting}: {module_name} has no {attribute_path!r}{advice}")
        imported_object = getattr(imported_object, attribute)
    return imported_object


def _suggest_attribute(module_or_class: Any, attribute: str) -> str:
    """Return the end of an error about a missing attribute: the nearest public name, or the first
    ones; "": there are none.
    """
    public_names = _list_public_names(module_or_class)
    if not public_names:
        return ""
    first_names = ", ".join(public_names[:_MAX_LISTED])
    return f"; {suggest_name(attribute, public_names) or f'it has {first_names}'}"


def _list_public_names(module_or_class: Any) -> list[str]:
    """Return the public names of a module or class that are defined there, not imported."""
    defining_module = getattr(module_or_class, "__name__", "")
    return [
        name
        for name, value in vars(module_or_class).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", defining_module) == defining_module
    ]


def _is_module_or_parent(missing_module: str | None, module_name: str) -> bool:
    """Return whether the module that was not found is the wanted one, or a package that holds it.

    Otherwise the wanted module exists, and a module that it imports is missing. `missing_module`:
    name of the module that was not found.
    """
    return missing_module is not None and f"{module_name}.".startswith(f"{missing_module}.")


def _describe_missing_module(module_name: str, setting: str, folder: Path) -> str:
    """Return the error's text for a module that was not found, with advice.

    `setting`: the setting that names it. `folder`: the folder that was searched first.
    """
    top_package, _, submodule = module_name.partition(".")
    if submodule == "py":
        return (
            f"{setting}: a module is named without .py: write {top_package}:NAME, not "
            f"{module_name}:NAME"
        )
    return (
        f"{setting}: there is no module {module_name!r}; put {top_package}.py into {folder}, or "
        "install its package"
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
