"""The write-ahead log of releases: what may have been sent, whatever happens to the process.

Written by: the ledger, before each release. Holds row positions and digests, no
representation. Protects from: losing count, by a crash, a rolled-back checkpoint or a
damaged file. Against its own party editing it, it protects nothing: the log is that
party's own book.

One JSON object a line. The first names the mechanism; every other is one release with its
step, digest and rows, and a running hash over all lines so far. A line is complete once its
newline is on the disk, and the ledger allows the release only after that. So an incomplete
last line, left by a process that was killed, was never released and is cut off.
"""

import base64
import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secure_apfed.errors import CheckpointError

__all__ = ["Release", "ReleaseLog"]

_FORMAT = 1
_CHAIN_BYTES = 16


@dataclass(frozen=True)
class Release:
    """One batch that was sent: its step, the digest of its bytes, its sorted row positions."""

    step: int
    digest: bytes
    rows: NDArray[np.int64]

    @property
    def identity(self) -> bytes:
        """The same for the same bytes sent again at the same step."""
        return hashlib.blake2b(_json(self.fields()), digest_size=32).digest()

    def fields(self) -> dict[str, Any]:
        """What a line of the log says; rows as compressed differences."""
        steps = np.diff(self.rows, prepend=0).astype("<u4")
        packed = base64.b64encode(zlib.compress(steps.tobytes(), 1)).decode("ascii")
        return {
            "step": self.step, "digest": self.digest.hex(), "count": len(self.rows), "rows": packed
        }  # fmt: skip

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "Release":
        """Invert `fields`; raises ValueError, KeyError, TypeError or zlib.error."""
        steps = np.frombuffer(zlib.decompress(base64.b64decode(fields["rows"])), dtype="<u4")
        if len(steps) != fields["count"]:
            raise ValueError("another number of rows")
        return cls(
            int(fields["step"]), bytes.fromhex(fields["digest"]), np.cumsum(steps, dtype="i8")
        )


class ReleaseLog:
    """The log of one party's releases, opened or begun at `path`.

    Args:
        path: of the file; its folder is made if it is missing.
        about: facts that must be the same whenever the log is continued.

    Raises:
        CheckpointError: the file is damaged, or was begun about something else.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self._chain = b""
        path.parent.mkdir(parents=True, exist_ok=True)
        whole, _, torn = (path.read_bytes() if path.exists() else b"").rpartition(b"\n")
        self._size = len(whole) + bool(whole)
        if torn:
            os.truncate(path, self._size)
        lines = whole.split(b"\n") if whole else []
        header = {"format": _FORMAT, **about}
        if lines:
            self._check_header(self._read(lines[0], 1), header)
        else:
            self._append(header)
        self.releases = [self._release(line, n) for n, line in enumerate(lines[1:], start=2)]

    def append(self, release: Release) -> None:
        """Put one release on the disk."""
        self._append(release.fields())

    def _append(self, fields: Mapping[str, Any]) -> None:
        chain = self._next_chain(fields)
        line = _json({**fields, "chain": chain.hex()}) + b"\n"
        with self.path.open("ab", buffering=0) as file:
            if (size := file.seek(0, os.SEEK_END)) != self._size:
                raise CheckpointError(
                    f"{self.path} has {size} bytes, expected {self._size}: another process writes "
                    "to it; give each run a folder of its own"
                )
            try:
                if file.write(line) != len(line):
                    raise OSError(f"{self.path}: the disk took only part of a line")
                os.fsync(file.fileno())
            except OSError:
                file.truncate(self._size)
                raise
        self._size += len(line)
        self._chain = chain

    def _next_chain(self, fields: Mapping[str, Any]) -> bytes:
        return hashlib.blake2b(self._chain + _json(fields), digest_size=_CHAIN_BYTES).digest()

    def _read(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            fields = json.loads(line)
            chain = bytes.fromhex(fields.pop("chain"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._damaged(number) from error
        if chain != self._next_chain(fields):
            raise self._damaged(number)
        self._chain = chain
        return dict(fields)

    def _release(self, line: bytes, number: int) -> Release:
        fields = self._read(line, number)
        try:
            return Release.read(fields)
        except (ValueError, TypeError, KeyError, zlib.error) as error:
            raise self._damaged(number) from error

    def _check_header(self, found: dict[str, Any], expected: dict[str, Any]) -> None:
        if found != expected:
            raise CheckpointError(
                f"{self.path} is the log of another run: it says {found}, this run is {expected}; "
                "continue with the settings it was begun with, or use another folder"
            )

    def _damaged(self, number: int) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is damaged at line {number}, so it is unknown what was released; "
            "restore the file from a copy, or begin a new run in another folder"
        )


def _json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
