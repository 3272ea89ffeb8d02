"""What the audit log costs a party for each envelope, and a reader for each line.

Cases `log/BYTES`: one envelope of so many sealed bytes, hashed, chained and handed to the operating
system; the peer is SHA-256 of the same bytes alone. Cases `verify` and `resume` are for a line of
a log that exists. Frames are random bytes of the size that is named: no run's.
"""

import hashlib
import os
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from apfed_experiments.bench.rows import Bench, Group, Row, interleave, median_ratio, single
from apfed_protocols.seal import fresh_identity
from secure_apfed.audit_log import AuditLog, verify_log
from secure_apfed.exchange import Envelope, Kind
from secure_apfed.names import ReleaseFigure

__all__ = ["BENCH"]

_SIZES = (128, 2**17, 2**21)


class _NoReleases:
    """Of a party that releases nothing."""

    figure: ReleaseFigure = "epsilon_x"
    charges, epsilon = 0, 0.0


def _groups(quick: bool) -> Sequence[Group]:
    most, repetitions = (200, 5) if quick else (2000, 15)
    counts = {size: max(20, most * _SIZES[0] // size) for size in _SIZES}
    return [
        *(
            single(f"log/{size}", partial(_logged, size, count, repetitions))
            for size, count in counts.items()
        ),
        Group(("verify", "resume"), partial(_read, most, repetitions)),
    ]


BENCH = Bench(groups=_groups, fields=("line_bytes",))


@contextmanager
def _fresh_log() -> Iterator[tuple[Path, Callable[[], AuditLog]]]:
    """Where a log will be, and what opens it or goes on with it."""
    identity, peer = fresh_identity(), fresh_identity()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "audit.log")
        yield path, lambda: AuditLog(path, "here", identity, {"there": peer.public}, _NoReleases())


def _read(lines: int, repetitions: int, wanted: Collection[str]) -> Iterator[Row]:
    """Seconds of a line, of a log with so many."""
    with _fresh_log() as (path, opened):
        with opened() as log:
            _note(log, os.urandom(_SIZES[0]), lines)
        calls: dict[str, Callable[[], object]] = {
            "verify": lambda: verify_log(path),
            "resume": lambda: opened().close(),
        }
        seconds = interleave({case: calls[case] for case in wanted}, repetitions=repetitions)
        for case, each in seconds.items():
            yield Row(
                case=case, seconds=statistics.median(each) / lines,
                more={"line_bytes": path.stat().st_size // lines},
            )  # fmt: skip


def _note(log: AuditLog, frame: bytes, count: int) -> None:
    """So many envelopes of this frame."""
    envelope = Envelope(
        session="bench", step=0, kind=Kind.REPRESENTATIONS, sender="here", receiver="there",
        sequence=0, payload=b"",
    )  # fmt: skip
    for _ in range(count):
        log.sent(envelope, frame)


def _logged(size: int, count: int, repetitions: int) -> Row:
    """Seconds of one envelope, over so many."""
    frame = os.urandom(size)

    def hash_alone() -> None:
        for _ in range(count):
            hashlib.sha256(frame).digest()

    with _fresh_log() as (_, opened), opened() as log:
        seconds = interleave(
            {"log": lambda: _note(log, frame, count), "hash": hash_alone}, repetitions=repetitions
        )
    return Row(
        case=f"log/{size}",
        seconds=statistics.median(seconds["log"]) / count,
        peer="SHA-256 alone",
        ratio=median_ratio(seconds["log"], seconds["hash"]),
        bytes=size,
    )
