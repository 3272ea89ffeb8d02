"""What the audit log costs a party for each envelope, and a reader for each line.

Cases `log/BYTES`: one envelope of so many sealed bytes, hashed, chained and handed to the operating
system; the peer is SHA-256 of the same bytes alone. Cases `verify` and `resume` are for a line of
a log that exists. Frames are random bytes of the size that is named: no run's.
"""

import hashlib
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from experiments.bench.rows import Row, interleave, median_ratio
from protocols.identity import fresh_identity
from secure_apfed.audit_log import AuditLog, verify_log
from secure_apfed.exchange import Envelope, Kind

__all__ = ["bench"]

_SIZES = (128, 2**17, 2**21)


class _NoReleases:
    """Of a party that releases nothing."""

    charges, epsilon = 0, 0.0


def bench(quick: bool) -> Iterator[Row]:
    """Seconds an envelope or a line, and bytes of a line."""
    identity, peer = fresh_identity(), fresh_identity()
    repetitions = 5 if quick else 15
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "audit.log")

        def opened() -> AuditLog:
            return AuditLog(path, "here", identity, {"there": peer.public}, _NoReleases())

        with opened() as log:
            for size in _SIZES:
                count = max(20, (200 if quick else 2000) * _SIZES[0] // size)
                yield _logged(log, os.urandom(size), count, repetitions)
        lines = verify_log(path).lines
        cases: dict[str, Callable[[], object]] = {
            "verify": lambda: verify_log(path),
            "resume": lambda: opened().close(),
        }
        for case, seconds in interleave(cases, repetitions=repetitions).items():
            yield Row(
                case=case, seconds=statistics.median(seconds) / lines,
                more={"line_bytes": path.stat().st_size // lines},
            )  # fmt: skip


def _logged(log: AuditLog, frame: bytes, count: int, repetitions: int) -> Row:
    """One envelope of this frame, over so many."""
    envelope = Envelope(
        session="bench", step=0, kind=Kind.REPRESENTATIONS, sender="here", receiver="there",
        sequence=0, payload=b"",
    )  # fmt: skip

    def note() -> None:
        for _ in range(count):
            log.sent(envelope, frame)

    def hash_alone() -> None:
        for _ in range(count):
            hashlib.sha256(frame).digest()

    seconds = interleave({"log": note, "hash": hash_alone}, repetitions=repetitions)
    return Row(
        case=f"log/{len(frame)}",
        seconds=statistics.median(seconds["log"]) / count,
        peer="SHA-256 alone",
        ratio=median_ratio(seconds["log"], seconds["hash"]),
        bytes=len(frame),
    )
