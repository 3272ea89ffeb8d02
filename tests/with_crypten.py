"""Entries of tables that need CrypTen, an optional extra, are tested where it is installed."""

import importlib.util
from collections.abc import Iterable

import pytest

from apfed_protocols.sums import SECURE_SUMS

_HERE = importlib.util.find_spec("crypten") is not None

installed = pytest.mark.skipif(not _HERE, reason="crypten is absent")


def usable(names: Iterable[str]) -> list[str]:
    """The sorted names of a table, those on CrypTen only if it is installed."""
    return sorted(name for name in names if _HERE or "crypten" not in name)


def pair_of(name: str) -> dict[str, str]:
    """The settings that ask for a sum of the table."""
    return {"scheme": SECURE_SUMS[name].scheme, "masks": SECURE_SUMS[name].masks}


def usable_secure_sums() -> list[str]:
    """The names of the sums that protect something, as `usable`."""
    return usable(name for name, kind in SECURE_SUMS.items() if not kind.unsafe)
