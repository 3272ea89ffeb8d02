"""Modules that a test takes away, and that come back whole when it ends."""

import sys

import pytest


def forget_modules(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    """Forget every imported module of this package until the test ends.

    A module that is imported again meanwhile becomes the attribute of its package, too. Both places
    are restored: otherwise later tests replace names in one module and call those of the other.
    """
    names = [name for name in sys.modules if name == prefix or name.startswith(prefix + ".")]
    for name in names:
        package, _, leaf = name.rpartition(".")
        if hasattr(sys.modules.get(package), leaf):
            monkeypatch.setattr(sys.modules[package], leaf, sys.modules[name])
    for name in names:
        monkeypatch.delitem(sys.modules, name)
