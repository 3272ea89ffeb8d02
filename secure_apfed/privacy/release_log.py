"""How often each row left its party, over all sessions of a run: counted, and logged, before.

Run by: each party, for its own ledger and for what it answers at most. The write-ahead log is
the truth: what it holds counts, whatever checkpoint is loaded. The very same bytes again at the
same step tell nobody anything new and count once.

The log holds row positions and digests, no
representation. Protects from: losing count, by a crash or a rolled-back checkpoint; and from
going on after a change that its hashes show, which are changed, missing or swapped lines before
the last. It does not see whole lines missing at its end, unless a checkpoint counts them. Nor
does it protect from its own party editing it: the log is that party's own book.

One JSON object a line. The first names the mechanism; every other is one release with its
step, digest and rows, and a running hash over all lines so far. The ledger allows a release
only after the operating system has taken the whole line. So the mere beginning of a last line,
left by a process that was killed, was never released and is cut off, once all before it has
been read and found sound. A whole last line counts, whether its newline is there or not.

A machine that loses power may lose lines that the operating system had not written yet: at
most those since `sync`, which the ledger calls for every checkpoint. Resuming from that
checkpoint finds none missing; the steps after it are played again, and where that gives the
same bytes, as it does on one kind of machine, counting them once is right. Waiting for the disk
at every step closes the rest of the gap, at 3 to 8 ms a step: passives do so for answers that leave
their process, and for noise under a sum, which no later session draws again.
"""

import base64
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.files import open_regular

__all__ = ["Release", "ReleaseCounts", "ReleaseLog", "holds_releases"]

_FORMAT = 1
_CHAIN_BYTES = 16
_LINE = b'{"chain":"'  # how each begins: keys are sorted


@dataclass(frozen=True)
class Release:
    """One batch that was sent: its step, the digest of its bytes, its sorted row positions."""

    step: int
    digest: bytes
    rows: NDArray[np.int64]

    @cached_property
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
    def read(cls, fields: Mapping[str, Any], *, total: int) -> "Release":
        """Invert `fields`, whoever wrote them; `total` is how many rows there are.

        Raises:
            ValueError, OverflowError, KeyError, TypeError, zlib.error: not a release of them.
        """
        # Compressed rows may stand for a thousand times their size, so they are inflated to
        # the size of all rows and no further.
        inflating = zlib.decompressobj()
        content = inflating.decompress(base64.b64decode(fields["rows"]), 4 * total + 1)
        steps = np.frombuffer(content, dtype="<u4")
        if not inflating.eof or len(steps) != fields["count"]:
            raise ValueError("another number of rows")
        rows = np.cumsum(steps, dtype="i8")
        if len(rows) and rows[-1] >= total:
            raise ValueError("rows that there are not")
        return cls(int(fields["step"]), bytes.fromhex(fields["digest"]), rows)


class ReleaseLog:
    """The log of one party's releases, open for more; `open` makes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._chain, self._size = b"", 0

    @classmethod
    def open(
        cls, path: Path, about: Mapping[str, Any], *, total: int, visit: Callable[[Release], None]
    ) -> "ReleaseLog":
        """Continue the log at `path`, or begin it; its releases are visited one by one.

        Args:
            path: of the file; its folder is made if it is missing.
            about: facts that must be the same whenever the log is continued.
            total: how many rows there are.
            visit: called with each release that the log holds, the oldest first.

        Raises:
            CheckpointError: what lies there is no file, no log, a log that was begun about
                something else, or one that was altered; it is left as it is.
        """
        log = cls(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {"format": _FORMAT, **about}
        with log._opened(create=True) as file:
            content = file.readall()
            lines, torn = _lines_of(content)
            if lines:
                log._check_header(log._read(lines[0], 1), header)
            for number, line in enumerate(lines[1:], start=2):
                visit(log._release(line, number, total))
            log._check_torn(torn, header if not lines else None, number=len(lines) + 1)
            log._size = len(content) - len(torn)
            if torn:
                file.truncate(log._size)
            if lines and not torn and not content.endswith(b"\n"):
                log._size += file.write(b"\n")
        if not lines:
            log._append(header)
        return log

    def append(self, release: Release) -> None:
        """Hand one release over to the operating system, whole or not at all."""
        self._append(release.fields())

    def sync(self) -> None:
        """Return once everything appended is on the disk."""
        with self._opened() as file:
            os.fsync(file.fileno())

    def _opened(self, *, create: bool = False) -> FileIO:
        return FileIO(open_regular(self.path, create=create), "r+")

    def _append(self, fields: Mapping[str, Any]) -> None:
        chain = self._next_chain(fields)
        line = _json({**fields, "chain": chain.hex()}) + b"\n"
        with self._opened() as file:
            if (size := file.seek(0, os.SEEK_END)) != self._size:
                raise CheckpointError(
                    f"{self.path} has {size} bytes, expected {self._size}: another process writes "
                    "to it; give each run a folder of its own"
                )
            try:
                if file.write(line) != len(line):
                    raise OSError(f"{self.path}: the disk took only part of a line")
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
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._altered(number) from error
        if chain != self._next_chain(fields):
            raise self._altered(number)
        self._chain = chain
        return dict(fields)

    def _release(self, line: bytes, number: int, total: int) -> Release:
        fields = self._read(line, number)
        try:
            return Release.read(fields, total=total)
        except (ValueError, OverflowError, TypeError, KeyError, zlib.error) as error:
            raise self._altered(number) from error

    def _check_torn(self, torn: bytes, header: Mapping[str, Any] | None, *, number: int) -> None:
        """Refuse a torn line that is not the beginning of one; of `header`, where that is next."""
        begun = (
            _LINE if header is None else _json({**header, "chain": self._next_chain(header).hex()})
        )
        if not (begun.startswith(torn) or (header is None and torn.startswith(begun))):
            raise self._altered(number)

    def _check_header(self, found: dict[str, Any], expected: dict[str, Any]) -> None:
        if found != expected:
            raise CheckpointError(
                f"{self.path} is the log of another run: it says {found}, this run is {expected}; "
                "continue with the settings it was begun with, or use another folder"
            )

    def _altered(self, number: int) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is not as a ledger wrote it from line {number} on, so it is unknown what "
            "was released; restore the file from a copy, or begin a new run in another folder"
        )


def holds_releases(path: Path) -> bool:
    """Whether a log there holds more than its first line, whole or torn."""
    if not os.path.lexists(path):
        return False
    with FileIO(open_regular(path, create=False), "r") as file:
        return bool(file.readline()) and bool(file.readline())


def _lines_of(content: bytes) -> tuple[list[bytes], bytes]:
    """Return the whole lines, and the beginning of one at the end, if there is one.

    A line is one JSON object without objects inside, so it is no mere beginning with a "}".
    """
    *lines, last = content.split(b"\n")
    return ([*lines, last], b"") if b"}" in last else (lines, last)


def _json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


class ReleaseCounts:
    """Releases by row.

    Args:
        rows: N, how many rows there are; positions are 0..N-1.
        log: file of the write-ahead log, readable by its owner only. None keeps the counts in
            memory and checkpoints only, so that a rolled-back checkpoint forgets what was sent
            since; for simulations.
        about: facts that must be the same whenever the log is continued.

    Raises:
        ConfigError: a negative number of rows.
        CheckpointError: the log was altered, or is of another run.
    """

    def __init__(self, *, rows: int, log: Path | None, about: Mapping[str, Any]) -> None:
        if rows < 0:
            raise ConfigError(f"a ledger counts at least 0 rows, got {rows}")
        self.of_row_N = np.zeros(rows, dtype=np.int64)
        self.most = 0
        self.steps: set[int] = set()
        self.step_repeated = False
        self._seen: set[bytes] = set()
        self._log: ReleaseLog | None = None
        if log is not None:
            self._log = ReleaseLog.open(log, {**about, "rows": rows}, total=rows, visit=self._count)

    def knows(self, release: Release) -> bool:
        """Whether these bytes left at this step before."""
        return release.identity in self._seen

    def after(self, release: Release) -> int:
        """The most releases of one row once this one is made too."""
        different, times = np.unique(release.rows, return_counts=True)
        return max(self.most, int((self.of_row_N[different] + times).max(initial=0)))

    def add(self, release: Release) -> None:
        """Count a release before it is made; on return the operating system holds it.

        Raises:
            LocalProtocolError: more rows than there are.
        """
        if len(release.rows) > len(self.of_row_N):
            raise LocalProtocolError(
                f"a release names {len(release.rows)} rows of {len(self.of_row_N)}"
            )
        if self.knows(release):
            return
        if self._log:
            self._log.append(release)
        self._count(release)

    def sync(self) -> None:
        """Return once all that was counted is on the disk."""
        if self._log:
            self._log.sync()

    def _count(self, release: Release) -> None:
        """`steps` are those that released any row; `step_repeated`: one did so twice."""
        if self.knows(release):
            return
        self._seen.add(release.identity)
        if len(release.rows):
            self.step_repeated |= release.step in self.steps
            self.steps.add(release.step)
        np.add.at(self.of_row_N, release.rows, 1)
        self.most = max(self.most, int(self.of_row_N[release.rows].max(initial=0)))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the counts for a checkpoint, (N,) int64; sync the log."""
        self.sync()
        return {"counts": torch.from_numpy(self.of_row_N.copy())}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a checkpoint; what is counted already, here or in the log, stays so.

        Raises:
            CheckpointError: of another number of rows, or it counts releases that the log misses.
        """
        counts = state.get("counts")
        if counts is None or counts.dtype != torch.int64 or counts.shape != self.of_row_N.shape:
            raise CheckpointError(
                f"the checkpoint does not count {len(self.of_row_N)} rows; it is of another run"
            )
        if self._log and bool((counts.numpy() > self.of_row_N).any()):
            raise CheckpointError(
                f"{self._log.path} misses releases that the checkpoint counts; it was deleted "
                "or replaced: restore it, or begin a new run"
            )
        self.of_row_N = np.maximum(self.of_row_N, counts.numpy())
        self.most = int(self.of_row_N.max(initial=0))
