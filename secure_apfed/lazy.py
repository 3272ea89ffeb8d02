"""Packages that load a name when it is first used, so that importing one part does not load all."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["loads"]


def loads(package: str, names: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that gives the names of these modules of it.

    Args:
        package: its `__name__`.
        names: module within it -> names that it gives.
    """
    home = {name: module for module, of_module in names.items() for name in of_module}

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home[name]}"), name)

    return find
