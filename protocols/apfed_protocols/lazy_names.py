"""Names that a package gives and loads when they are first used.

Run by: the `__init__` of a package, or a module that only gives names, so that importing one part
does not load all. Names that moved are still given at their old place, with a warning.
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
    homes: Mapping[str, Collection[str]],
    *,
    modules: Collection[str] = (),
    moved: Mapping[str, Collection[str]] | None = None,
    distribution: str = "",
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that loads its names when they are used.

    Args:
        package: its own name.
        names: its `__all__`.
        homes: by module the names that are loaded from it.
        modules: modules right below the package, which are names of it, too.
        moved: by module the names that the package used to give, and that module gives now. Each
            warns once in a process, with a `DeprecationWarning` that names the new place.
        distribution: whose version is `__version__`; empty: there is none.
    """
    home_of = {name: home for home, of_home in homes.items() for name in of_home}
    new_home_of = {name: home for home, of_home in (moved or {}).items() for name in of_home}
    warned: set[str] = set()

    def load_name(name: str) -> Any:
        """Return a public name of the package, loading its module on first use; a name that moved
        also warns. Raises AttributeError: the package has no such name.
        """
        if name == "__version__" and distribution:
            return version(distribution)
        if name in modules:
            return import_module(f"{package}.{name}")
        if name in new_home_of and name not in warned:
            warned.add(name)
            warnings.warn(
                f"{package}.{name} is now {new_home_of[name]}.{name}; import it from there, since "
                "the next minor version gives it there alone",
                DeprecationWarning,
                stacklevel=2,
            )
        home = home_of.get(name) or new_home_of.get(name)
        if home is None:
            raise AttributeError(f"{package} has no {name!r}; its names are {', '.join(names)}")
        return getattr(import_module(home), name)

    return load_name, lambda: [*names]


def make_former_name(former: str, name: str) -> property:
    """Return a property that reads the attribute `name` by its former name, with a warning.

    The warning is a `DeprecationWarning`: the next minor version gives the attribute by its new
    name alone.
    """

    def read_attribute(owner: Any) -> Any:
        warnings.warn(
            f"{type(owner).__name__}.{former} is now {type(owner).__name__}.{name}; read it by "
            "that name, since the next minor version has it alone",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(owner, name)

    return property(read_attribute)
