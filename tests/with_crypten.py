"""Entries of tables that need CrypTen, an optional extra, are tested where it is installed."""

import importlib.util
from collections.abc import Iterable

import pytest

__all__ = ["installed", "usable"]

_HERE = importlib.util.find_spec("crypten") is not None

installed = pytest.mark.skipif(not _HERE, reason="crypten is absent")


def usable(names: Iterable[str]) -> list[str]:
    """The sorted names of a table, those on CrypTen only if it is installed."""
    return sorted(name for name in names if _HERE or "crypten" not in name)
