"""Lazy loading: public names of a package that are imported when they are first used.

Run by: the `__init__` of a package, or a module that only re-exports names, so that importing one
part does not load all. Names that moved can still be imported from their old place, with a warning.
"""

import warnings
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any

__all__ = ["give_names", "make_former_name"]


def give_names(
    package: str,
    names: Collection[str],
    names_by_module: Mapping[str, Collection[str]],
    *,
    modules: Collection[str] = (),
    moved_names_by_module: Mapping[str, Collection[str]] | None = None,
    distribution: str = "",
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of a package that loads its names lazily,
    each when it is first used.

    Args:
        package: the package's name.
        names: public names of the package, its `__all__`.
        names_by_module: the names that each module defines, by module.
        modules: submodules of the package that are public names, too.
        moved_names_by_module: former names of the package that a module defines now, by module.
            Each name warns once in a process, with a `DeprecationWarning` that says where it is
            now.
        distribution: the distribution whose version is `__version__`; empty: there is no version.
    """
    module_by_name = {name: module for module, group in names_by_module.items() for name in group}
    new_module_by_name = {
        name: module for module, group in (moved_names_by_module or {}).items() for name in group
    }
    warned_names: set[str] = set()

    def load_name(name: str) -> Any:
        """Return the object with this public name, importing its module on first use; a name that
        moved also warns. Raises AttributeError: the package has no such name.
        """
        if name == "__version__" and distribution:
            return version(distribution)
        if name in modules:
            return import_module(f"{package}.{name}")
        if name in new_module_by_name and name not in warned_names:
            warned_names.add(name)
            warnings.warn(
                f"{package}.{name} is now {new_module_by_name[name]}.{name}; import it from "
                "there, since the next minor version gives it there alone",
                DeprecationWarning,
                stacklevel=2,
            )
        module = module_by_name.get(name) or new_module_by_name.get(name)
        if module is None:
            raise AttributeError(f"{package} has no {name!r}; its names are {', '.join(names)}")
        return getattr(import_module(module), name)

    return load_name, lambda: [*names]


def make_former_name(former_name: str, current_name: str) -> property:
    """Return a property for an attribute that was renamed from `former_name` to `current_name`: it
    is to be called `former_name`, warns (DeprecationWarning), and returns the attribute
    `current_name`.
    """

    def read_attribute(owner: Any) -> Any:
        """Warn of the former name and return the attribute."""
        warnings.warn(
            f"{type(owner).__name__}.{former_name} is now {type(owner).__name__}.{current_name}; "
            "read it by that name, since the next minor version has it alone",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(owner, current_name)

    return property(read_attribute)
