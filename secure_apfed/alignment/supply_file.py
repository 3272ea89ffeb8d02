"""Triples dealt ahead, kept on the disk until the intersection, and taken from there once.

Kept by: hub and members of a `circuit` intersection, each in a folder that nobody else reads. A
supply that is used for two intersections shows the exclusive or of what it masked. So taking it
first makes a marker beside it that stays, and that only one process can make; then the file is
deleted. A copy that is put back into the folder, say from a backup, finds the marker there.
Protects from nothing where a copy is used in another folder or on another machine.

Example:
    >>> from tempfile import TemporaryDirectory
    >>> supply = Supply(bytes(32), "shop", [b"what the dealer sent"])
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder) / "December"
    ...     store_supply(supply, file)
    ...     copy = file.read_bytes()
    ...     taken = take_supply(file)
    ...     _ = file.write_bytes(copy)
    ...     take_supply(file)
    Traceback (most recent call last):
    apfed_protocols.errors.DataError: the supply in ... was taken before; ...
"""

import contextlib
import hashlib
import os
from pathlib import Path

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.psi.supply import Supply
from secure_apfed.errors import DataError

__all__ = ["store_supply", "take_supply"]

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def store_supply(supply: Supply, path: Path) -> None:
    """Write a supply into a new file that its owner alone can read.

    Raises:
        DataError: there is a file already; the supply is not stored.
        LocalProtocolError: the supply is in use, or was stored before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, _NEW, 0o600)
    except FileExistsError:
        raise DataError(f"{path} exists already; store each supply in a file of its own") from None
    with os.fdopen(handle, "wb") as file:
        try:
            file.write(supply.to_bytes())
        except LocalProtocolError:
            path.unlink()
            raise
        file.flush()
        os.fsync(file.fileno())


def take_supply(path: Path) -> Supply:
    """Read a supply, and leave a marker in place of its file.

    Raises:
        DataError: there is no such file, or what is in it was taken before.
        LocalProtocolError: the file was cut off or altered; it stays as it is.
    """
    try:
        stored = path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"there is no supply in {path}; it was taken, or was never stored"
        ) from None
    supply = Supply.from_bytes(stored)
    marker = path.with_name(f"{hashlib.sha256(stored).hexdigest()}.taken")
    try:
        handle = os.open(marker, _NEW, 0o600)
    except FileExistsError:
        raise DataError(
            f"the supply in {path} was taken before; have another dealt under a new session"
        ) from None
    os.fsync(handle)
    os.close(handle)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return supply
