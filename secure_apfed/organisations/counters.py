"""Counters of a party in files of its own, held against a second record of them.

Run by: every party that runs in a process of its own, for itself, when it opens its folder and
before each envelope leaves. Protects from: a counter that restarts because its file was lost,
restored from an older copy, or exchanged. Existence and running number of each counter are recorded
a second time in the party's audit log, and those of the audit log in `counters.json`. A counter
that is missing, counts less, or is another file is refused, unless the operator restarts it by name
(`secure-apfed audit-log restart-counter`), which the audit log records. Does not protect from a
folder that is restored as a whole from a snapshot; the audit logs of the other parties show that.
"""

import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from secure_apfed.base.files import load_json, open_plain, open_regular, to_json, write_atomically
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.runs.audit_log import (
    AUDIT_LOG_NAME,
    AuditLog,
    CounterName,
    LogSummary,
    RestartLine,
    summarise_log,
)
from secure_apfed.settings.promises import Promise

__all__ = [
    "ANSWER_LOG",
    "COUNTERS",
    "COUNTER_CHECKPOINT",
    "Count",
    "CounterFiles",
    "CounterKind",
    "NothingReleased",
    "Restart",
    "find_counter_kind",
    "list_nonzero_counters",
    "open_counters",
    "restart_and_log",
    "restart_counter",
]

ANSWER_LOG = "answered.sqlite"
"""The file in a passive's folder that counts its answers in joint predictions."""
COUNTER_CHECKPOINT = "counters.json"
"""The file in a party's folder with the last state of its audit log and its counters."""
_DIGEST_BYTES = 16
_NO_DIGEST = "0" * 2 * _DIGEST_BYTES
_InconsistencyKind: TypeAlias = Literal["missing", "lower", "of another run", "unreadable"]


@dataclass(frozen=True)
class Count:
    """The state of a counter, a file that counts what a party has released or answered.

    Attributes:
        number: number of releases, contributions or refusals so far; it never falls.
        origin: a digest, hex, that differs between the files of different runs and parties.
        digest: digest (hex) of all that was counted; equal to `origin` if the file does not store
            each count.
    """

    number: int
    origin: str
    digest: str


class _StoredCount(BaseModel):
    """A `Count` as stored in `counters.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    number: int = Field(ge=0)
    origin: str
    digest: str


class _CounterCheckpoint(BaseModel):
    """The contents of `counters.json`: the recorded state of a party's audit log and counters.

    The audit log records the counters, and this file records the log, so that a file that is lost
    or replaced by an older copy is noticed.

    Attributes:
        party: the party's name.
        lines: number of lines of its audit log.
        chain: hash of the log's last line, which depends on all lines before.
        counters: name of each counter's file -> its recorded count.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    party: str
    lines: int = Field(ge=0)
    chain: str = Field(pattern="^[0-9a-f]{64}$")
    counters: dict[CounterName, _StoredCount]


class _LineCounter:
    """A reader of a counter's file to which one line is appended for each count.

    A line counts once its end is written. Only what was appended since the last call is read.
    """

    def __init__(self, path: Path, *, header_line_count: int) -> None:
        """Start at the beginning of the file.

        `header_line_count`: how many lines at the beginning of the file do not count.
        """
        self._path = path
        self._header_line_count = header_line_count
        self._reset_count()

    def _reset_count(self) -> None:
        """Forget the count, so that the file is read again from its beginning."""
        self._read_bytes = 0  # bytes that were read
        self._line_count = 0
        self._origin = _NO_DIGEST  # digest of the first line
        self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)  # of all lines that were read

    def load_count(self) -> Count:
        """Return the file's current count; read only what was appended since the last call."""
        os.close(open_regular(self._path, create=False))  # raises an error for a link
        with open_plain(self._path) as file:
            if os.fstat(file.fileno()).st_size < self._read_bytes:
                self._reset_count()  # the file was shortened or replaced
            file.seek(self._read_bytes)
            for line in iter(file.readline, b""):
                if not line.endswith(b"\n"):
                    break
                self._read_bytes += len(line)
                self._add_line(line.strip())
        return self._make_count()

    def load_count_until(self, number: int) -> Count:
        """Return the count after `number` counted lines, or after all if there are fewer.

        Its digest is compared with the recorded one of the same number: the file may have grown
        since. A last line without its line break counts if its JSON is complete.
        """
        self._reset_count()
        with open_plain(self._path) as file:
            for line in file:
                if self._line_count - self._header_line_count >= number:
                    break
                if line.endswith(b"\n") or b"}" in line:
                    self._add_line(line.strip())
        count = self._make_count()
        self._reset_count()
        return count

    def _add_line(self, line: bytes) -> None:
        """Count a complete line; the first line of the file determines its origin."""
        if not line:
            return
        self._line_count += 1
        self._digest.update(line + b"\n")
        if self._line_count == 1:
            self._origin = self._digest.hexdigest()

    def _make_count(self) -> Count:
        """Return the count of the lines read so far, without the header lines."""
        number = max(0, self._line_count - self._header_line_count)
        return Count(number, self._origin, self._digest.hexdigest())


class _AnswerLogCounter:
    """A reader of a passive's answer book: the SQLite file that counts joint predictions.

    Such a file stores numbers by person instead of single counts. So the count is how often any of
    its numbers has changed, and the origin is a digest of the file's random key.
    """

    def __init__(self, path: Path) -> None:
        """Read the file at this path, at each call anew."""
        self._path = path

    def load_count(self) -> Count:
        """Return the current count. Raises CheckpointError: the file is no answer book."""
        # Opened for its errors: SQLite would follow a link, and create a missing file.
        os.close(open_regular(self._path, create=False))
        try:
            address = f"{self._path.resolve().as_uri()}?mode=rw"
            with closing(sqlite3.connect(address, uri=True)) as book:
                (key,) = book.execute("SELECT under FROM hashed").fetchone()
                (changes,) = book.execute("SELECT changes FROM running").fetchone()
                if type(key) is not bytes or type(changes) is not int or changes < 0:
                    raise TypeError("columns of another kind")
        except (sqlite3.Error, TypeError) as error:
            raise CheckpointError(f"{self._path} is no book of answers ({error})") from error
        origin = hashlib.blake2b(key, digest_size=_DIGEST_BYTES, person=b"answer book").hexdigest()
        return Count(changes, origin, origin)

    def load_count_until(self, number: int) -> Count:
        """Return the current count, since the file does not store earlier ones."""
        del number
        return self.load_count()


_Counter: TypeAlias = _LineCounter | _AnswerLogCounter


def _make_line_counter(path: Path) -> _LineCounter:
    """Return a reader of a counter's file all of whose lines count."""
    return _LineCounter(path, header_line_count=0)


def _make_ledger_counter(path: Path) -> _LineCounter:
    """Return a reader of a ledger, whose first line names its run and does not count."""
    return _LineCounter(path, header_line_count=1)


@dataclass(frozen=True)
class CounterKind:
    """A kind of counter in a party's folder.

    Attributes:
        file_pattern: glob pattern of the names of its files.
        counted_items: what it counts, in a few words.
        make_reader: makes a reader of such a file.
        is_read_at_checkpoints_only: whether its count is recorded only just before a checkpoint is
            stored; until then nothing that depends on the count has been sent.
    """

    file_pattern: str
    counted_items: str
    make_reader: Callable[[Path], _Counter]
    is_read_at_checkpoints_only: bool = False


COUNTERS: tuple[CounterKind, ...] = (
    CounterKind("ledger-*.jsonl", "releases", _make_ledger_counter),
    CounterKind("answers-*.jsonl", "answers in training", _make_ledger_counter),
    CounterKind("audits-*.jsonl", "failed audits", _make_line_counter),
    CounterKind("refused-*.jsonl", "refused sums", _make_line_counter),
    CounterKind("circles-*.jsonl", "steps answered among whom", _make_line_counter),
    CounterKind(
        "labels-*.log",
        "stages of answered labels",
        _make_line_counter,
        is_read_at_checkpoints_only=True,
    ),
    CounterKind(ANSWER_LOG, "changes of the book of answers", _AnswerLogCounter),
)
"""Every counter that a party keeps in a file; checkpoints repeat the ledgers."""


def find_counter_kind(name: str) -> CounterKind | None:
    """Return the kind of a counter's file by its name; None: the file is not a counter."""
    return next((kind for kind in COUNTERS if Path(name).match(kind.file_pattern)), None)


class CounterFiles:
    """The counters in one party's folder, whose changes the audit log records before a message.

    Args:
        folder: the party's folder.
        party: the party's name.
        recorded_count_by_file: the recorded counts, by file name.
        should_read_files: whether the files are read for new counts; otherwise `list_changes`
            yields the recorded counts.
    """

    def __init__(
        self,
        folder: Path,
        party: str,
        recorded_count_by_file: Mapping[str, Count] = {},
        *,
        should_read_files: bool = True,
    ) -> None:
        """Start from the recorded counts, without reading a file; see the class for arguments."""
        self._folder = folder
        self._party = party
        self._should_read_files = should_read_files
        self._recorded_count_by_file = dict(recorded_count_by_file)
        self._reader_by_file: dict[str, _Counter] = {}
        # By file name: time of change and size when the file was read last.
        self._version_by_file: dict[str, tuple[int, int]] = {}

    def list_changes(self, *, is_before_checkpoint: bool) -> Iterable[tuple[str, int, str, str]]:
        """Yield file name, number, origin and digest of each counter that changed since last time.

        If files are not read for new counts, all recorded counts are yielded.

        `is_before_checkpoint`: whether a checkpoint is about to be stored; some kinds are read only
        then.

        Raises CheckpointError: a counter is missing, or counts less than before.
        """
        if not self._should_read_files:
            for name, count in self._recorded_count_by_file.items():
                yield name, count.number, count.origin, count.digest
            return
        version_by_file = dict(self._list_versions())
        self._require_counted_files(version_by_file)
        for name, version in version_by_file.items():
            kind = find_counter_kind(name)
            if kind is None or version == self._version_by_file.get(name):
                continue
            if kind.is_read_at_checkpoints_only and not is_before_checkpoint:
                continue
            reader = self._reader_by_file.setdefault(name, kind.make_reader(self._folder / name))
            count = reader.load_count()
            self._version_by_file[name] = version
            recorded = self._recorded_count_by_file.get(name)
            if recorded is not None and count.number < recorded.number:
                raise CheckpointError(
                    f"restore {self._folder / name} from a copy: it counts {count.number} "
                    f"{kind.counted_items}, and counted {recorded.number} before, so another "
                    "process wrote to it"
                )
            if count != recorded:
                self._recorded_count_by_file[name] = count
                yield name, count.number, count.origin, count.digest

    def _require_counted_files(self, present_files: Collection[str]) -> None:
        """Raise CheckpointError if a file is gone whose recorded count is above zero."""
        for name, recorded in self._recorded_count_by_file.items():
            if recorded.number and name not in present_files:
                raise CheckpointError(
                    f"restore {self._folder / name} from a copy: it is gone, and this session "
                    "counted in it"
                )

    @property
    def nonzero_counters(self) -> frozenset[str]:
        """The names of the counters that are above zero."""
        return frozenset(
            name for name, count in self._recorded_count_by_file.items() if count.number
        )

    def exclude_counters(self, names: Collection[str]) -> "CounterFiles":
        """Return these counters without some whose files were deleted; files are not read."""
        remaining_count_by_file = {
            name: count for name, count in self._recorded_count_by_file.items() if name not in names
        }
        return CounterFiles(
            self._folder, self._party, remaining_count_by_file, should_read_files=False
        )

    def _list_versions(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the name of each counter's file, with its time of change and its size."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if find_counter_kind(entry.name) is not None:
                    status = entry.stat(follow_symlinks=False)
                    yield entry.name, (status.st_mtime_ns, status.st_size)

    def write_checkpoint(self, line_count: int, last_line_hash: str) -> None:
        """Write `counters.json`: the recorded counts, and how long the audit log is.

        So an audit log that is cut short is noticed.

        `line_count`: number of the log's lines. `last_line_hash`: hash of its last line.
        """
        count_fields_by_file = {
            name: asdict(count) for name, count in self._recorded_count_by_file.items()
        }
        content = {
            "party": self._party,
            "lines": line_count,
            "chain": last_line_hash,
            "counters": count_fields_by_file,
        }
        path = self._folder / COUNTER_CHECKPOINT
        write_atomically(path, to_json(content).encode() + b"\n", private=True)


@dataclass(frozen=True)
class _Inconsistency:
    """A difference between a counter's file, or the audit log, and what was recorded of it.

    Attributes:
        file_name: name of the file.
        kind: how the file differs.
        recorded: the recorded count, which the file should have at least.
        actual: the file's present count; None: it cannot be read.
        detail: what is wrong in more words, maybe "".
    """

    file_name: str
    kind: _InconsistencyKind
    recorded: Count
    actual: Count | None
    detail: str = ""


@dataclass
class _RecordedCounters:
    """The recorded counters of a folder.

    Attributes:
        count_by_file: by the name of each counter's file, its count as recorded in the audit log,
            or in `counters.json` if the log is inconsistent.
        log_summary: the audit log's summary; None: there is no log, or it is inconsistent.
        log_inconsistency: what is wrong with the audit log itself; None: nothing.
    """

    count_by_file: dict[str, Count]
    log_summary: LogSummary | None
    log_inconsistency: _Inconsistency | None


def _load_checkpoint(folder: Path, party: str) -> tuple[_CounterCheckpoint | None, str]:
    """Read `counters.json`; return its content, and why it cannot be used.

    Without such a file the result is (None, ""); if it cannot be used, None and the reason.
    """
    path = folder / COUNTER_CHECKPOINT
    if not os.path.lexists(path):
        return None, ""
    try:
        checkpoint = load_json(path, _CounterCheckpoint)
    except CheckpointError as error:
        return None, str(error)
    if checkpoint.party != party:
        return None, f"{path} is of {checkpoint.party}, this party is {party}"
    return checkpoint, ""


def _load_recorded_counters(folder: Path, party: str) -> _RecordedCounters:
    """Read a party's audit log and `counters.json`, and return the recorded counts of its counters.

    The two files are compared: `counters.json` has the length and the hash of the log. An
    inconsistent log is part of the result, and raises no error.
    """
    path = folder / AUDIT_LOG_NAME
    checkpoint, checkpoint_problem = _load_checkpoint(folder, party)
    has_checkpoint_file = checkpoint is not None or bool(checkpoint_problem)
    recorded_lines = Count(checkpoint.lines if checkpoint else 0, _NO_DIGEST, _NO_DIGEST)
    log_summary: LogSummary | None = None
    inconsistency: _Inconsistency | None = None
    if not os.path.lexists(path):
        if has_checkpoint_file or any(_list_signs_of_use(folder)):
            inconsistency = _Inconsistency(AUDIT_LOG_NAME, "missing", recorded_lines, None)
    else:
        try:
            os.close(open_regular(path, create=False))  # raises an error for a link
            if not path.stat().st_size and not has_checkpoint_file:
                # A process was killed before it wrote its first line.
                return _RecordedCounters({}, log_summary=None, log_inconsistency=None)
            log_summary, hash_at_checkpoint = _summarise_log_and_hash(path, recorded_lines.number)
        except (CheckpointError, OSError) as error:
            inconsistency = _Inconsistency(
                AUDIT_LOG_NAME, "unreadable", recorded_lines, None, str(error)
            )
        else:
            inconsistency = _find_log_inconsistency(
                log_summary, party, recorded_lines, checkpoint, hash_at_checkpoint
            )
            if inconsistency is not None and checkpoint_problem:
                inconsistency = replace(inconsistency, detail=checkpoint_problem)
    if log_summary is None or inconsistency is not None:
        stored_count_by_file = checkpoint.counters if checkpoint else {}
        count_by_file_in_checkpoint = {
            name: Count(**count.model_dump()) for name, count in stored_count_by_file.items()
        }
        return _RecordedCounters(
            count_by_file_in_checkpoint, log_summary=None, log_inconsistency=inconsistency
        )
    count_by_file_in_log = {
        name: Count(line.number, line.origin, line.digest)
        for name, line in log_summary.counters.items()
    }
    return _RecordedCounters(count_by_file_in_log, log_summary, log_inconsistency=None)


def _summarise_log_and_hash(path: Path, line_count: int) -> tuple[LogSummary, str | None]:
    """Return the summary of an audit log, and its hash after `line_count` lines.

    The hash is None if the log is shorter.

    Raises CheckpointError: the log is malformed.
    """
    hash_at_line_count: str | None = None

    def store_hash(line_number: int, line_hash: str) -> None:
        """Store the log's hash if so many lines were read."""
        nonlocal hash_at_line_count
        if line_number == line_count:
            hash_at_line_count = line_hash

    log_summary = summarise_log(path, on_line=store_hash)
    return log_summary, hash_at_line_count


def _find_log_inconsistency(
    log_summary: LogSummary,
    party: str,
    recorded_lines: Count,
    checkpoint: _CounterCheckpoint | None,
    hash_at_checkpoint: str | None,
) -> _Inconsistency | None:
    """Compare an intact audit log with `counters.json`; return how they differ, or None.

    Args:
        log_summary: the log's summary.
        party: the folder's party.
        recorded_lines: how many lines the log has according to `counters.json`.
        checkpoint: content of `counters.json`; None: there is no such file, or it cannot be used.
        hash_at_checkpoint: the log's hash after that many lines; None if the log is shorter.
    """
    if log_summary.party != party:
        detail = f"it is of {log_summary.party}, this party is {party}"
        return _Inconsistency(AUDIT_LOG_NAME, "of another run", recorded_lines, None, detail)
    if checkpoint is None:
        if not (log_summary.agreed or log_summary.counters):
            return None  # the process was killed before its first session
        checkpoint_path = log_summary.path.parent / COUNTER_CHECKPOINT
        detail = f"{checkpoint_path} is missing, which says how many lines it had"
        return _Inconsistency(AUDIT_LOG_NAME, "unreadable", recorded_lines, None, detail)
    if log_summary.lines < recorded_lines.number:
        return _Inconsistency(
            AUDIT_LOG_NAME,
            "lower",
            recorded_lines,
            Count(log_summary.lines, _NO_DIGEST, _NO_DIGEST),
        )
    if hash_at_checkpoint != checkpoint.chain:
        return _Inconsistency(AUDIT_LOG_NAME, "of another run", recorded_lines, None)
    return None


def _list_signs_of_use(folder: Path) -> Iterator[Path]:
    """Yield the files, besides the audit log, that show that a party ran in this folder before."""
    contract = folder / "contract.json"
    if contract.exists():
        yield contract
    for name, count in _load_counts(folder):
        if count is None or count.number:
            yield folder / name


def _load_counts(folder: Path) -> Iterator[tuple[str, Count | None]]:
    """Yield the name and count of each counter's file in a folder; None: the file is unreadable."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else ()
    for path in paths:
        kind = find_counter_kind(path.name)
        if kind is not None:
            try:
                yield path.name, kind.make_reader(path).load_count()
            except (CheckpointError, OSError):
                yield path.name, None


def _find_inconsistency(folder: Path, file_name: str, recorded: Count) -> _Inconsistency | None:
    """Compare one counter's file with its recorded count; return how they differ, or None.

    A file may count more than recorded. `file_name`: name of the file. `recorded`: the recorded
    count.
    """
    path = folder / file_name
    kind = find_counter_kind(file_name)
    if kind is None or not recorded.number:
        return None
    if not os.path.lexists(path):
        return _Inconsistency(file_name, "missing", recorded, None)
    try:
        actual = kind.make_reader(path).load_count_until(recorded.number)
        os.close(open_regular(path, create=False))
    except (CheckpointError, OSError) as error:
        return _Inconsistency(file_name, "unreadable", recorded, None, str(error))
    if actual.origin != recorded.origin:
        return _Inconsistency(file_name, "of another run", recorded, actual)
    if actual.number < recorded.number:
        return _Inconsistency(file_name, "lower", recorded, actual)
    is_same = actual.digest == recorded.digest
    return None if is_same else _Inconsistency(file_name, "of another run", recorded, actual)


def _describe_inconsistency(inconsistency: _Inconsistency) -> str:
    """Return in words how a file differs, to follow the file's name."""
    kind = find_counter_kind(inconsistency.file_name)
    # The file without a kind is the audit log.
    counted_items = kind.counted_items if kind else "lines"
    record_file = AUDIT_LOG_NAME if kind else COUNTER_CHECKPOINT
    recorded_text = f"{record_file} notes {inconsistency.recorded.number:,} {counted_items}"
    if inconsistency.kind == "missing":
        return f"is missing, and {recorded_text}"
    if inconsistency.kind == "lower":
        actual_number = inconsistency.actual.number if inconsistency.actual else 0
        return (
            f"holds {actual_number:,} {counted_items}, and {recorded_text}, so it is an older "
            "copy, or was shortened"
        )
    if inconsistency.kind == "unreadable":
        return f"cannot be relied on ({inconsistency.detail}), and {recorded_text}"
    detail = inconsistency.detail and f": {inconsistency.detail}"
    return f"is not the file of this run that {record_file} knows{detail}"


def _make_inconsistency_error(
    folder: Path, party: str, inconsistency: _Inconsistency
) -> CheckpointError:
    """Return the error for an inconsistent file, with its remedies: a copy, or a restart at 0."""
    return CheckpointError(
        f"put the newest copy of {folder / inconsistency.file_name} back: it "
        f"{_describe_inconsistency(inconsistency)}, and begun anew it would forget what {party} "
        "gave away. If there is no copy and it shall restart all the same, run: secure-apfed "
        f"audit-log restart-counter '{folder}' {inconsistency.file_name} --party {party}"
    )


def open_counters(folder: Path, party: str) -> CounterFiles:
    """Return the counters of a party's folder, after all were compared with the audit log.

    Counters are files that count what the party has released or answered. A lost count would let it
    release more than its limits allow.

    Raises CheckpointError: a counter, or the audit log itself, is missing, lower than recorded, of
        another run or party, or unreadable.
    """
    recorded_counters = _load_recorded_counters(folder, party)
    if recorded_counters.log_inconsistency is not None:
        raise _make_inconsistency_error(folder, party, recorded_counters.log_inconsistency)
    for file_name, recorded in recorded_counters.count_by_file.items():
        inconsistency = _find_inconsistency(folder, file_name, recorded)
        if inconsistency is not None:
            raise _make_inconsistency_error(folder, party, inconsistency)
    return CounterFiles(folder, party, recorded_counters.count_by_file)


def list_nonzero_counters(folder: Path, party: str) -> frozenset[str]:
    """Return the names of the counters that are above zero according to the audit log.

    Raises CheckpointError: a counter or the audit log is inconsistent; see `open_counters`.
    """
    return open_counters(folder, party).nonzero_counters


@dataclass(frozen=True)
class Restart:
    """The outcome of `restart_counter`.

    Attributes:
        log_entry: line to be added to the audit log.
        renamed_file: the new path of the counter's former file; None: there was none, or the
            counter continues from it.
        other_counters: the other counters as recorded.
        identity_by_peer: public identity (hex) of each peer in the audit log, by name.
    """

    log_entry: RestartLine
    renamed_file: Path | None
    other_counters: CounterFiles
    identity_by_peer: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """Return the restart as JSON values."""
        return {
            **self.log_entry.model_dump(mode="json"),
            "aside": self.renamed_file and str(self.renamed_file),
        }


def restart_counter(folder: Path, file_name: str, *, party: str, now: float) -> Restart:
    """Let a counter be used again although its file is not as recorded.

    If the file is an older copy, the counter continues from it. Any other file is renamed, and the
    counter restarts at zero. The caller adds the returned line to the audit log.

    Args:
        folder: the party's folder.
        file_name: name of the counter's file.
        party: the party's name.
        now: seconds since 1970.

    Raises:
        ConfigError: no counter has that name, or its file is as recorded.
        CheckpointError: the audit log has a fault, so that it must be restarted first.
    """
    _require_counter_name(file_name)
    recorded_counters = _load_recorded_counters(folder, party)
    inconsistency = recorded_counters.log_inconsistency
    other_count_by_file = dict(recorded_counters.count_by_file)
    if file_name != AUDIT_LOG_NAME:
        if inconsistency is not None:
            raise _make_inconsistency_error(folder, party, inconsistency)
        recorded_count = other_count_by_file.pop(file_name, None)
        if recorded_count is not None:
            inconsistency = _find_inconsistency(folder, file_name, recorded_count)
    if inconsistency is None:
        raise ConfigError(
            f"{folder / file_name} counts as noted, so there is nothing to restart; start the party"
        )
    is_older_copy = inconsistency.kind == "lower"
    renamed_file = None
    if not is_older_copy and os.path.lexists(folder / file_name):
        renamed_file = _find_free_name(folder, file_name)
        (folder / file_name).rename(renamed_file)
    continued_count = inconsistency.actual if is_older_copy else None
    log_entry = RestartLine(
        at=now,
        counter=file_name,
        why=inconsistency.kind,
        noted=inconsistency.recorded.number,
        number=continued_count.number if continued_count is not None else 0,
    )
    identity_by_peer = recorded_counters.log_summary.peers if recorded_counters.log_summary else {}
    other_counters = CounterFiles(folder, party, other_count_by_file, should_read_files=False)
    return Restart(log_entry, renamed_file, other_counters, identity_by_peer)


def _require_counter_name(file_name: str) -> None:
    """Raise ConfigError unless this is the audit log, or a file in the party's folder that counts.

    A counter's name has no folder in it.
    """
    if file_name == AUDIT_LOG_NAME:
        return
    has_folder = Path(file_name).name != file_name
    if has_folder or find_counter_kind(file_name) is None:
        known_patterns = ", ".join(kind.file_pattern for kind in COUNTERS)
        raise ConfigError(
            f"{file_name!r} is no counter; counters are {AUDIT_LOG_NAME}, {known_patterns}"
        )


def _find_free_name(folder: Path, file_name: str) -> Path:
    """Return an unused path in the same folder, to which the file can be renamed."""
    number = 1
    while os.path.lexists(folder / f"{file_name}.aside-{number}"):
        number += 1
    return folder / f"{file_name}.aside-{number}"


class NothingReleased:
    """A meter of privacy cost for a process that releases nothing."""

    charges = 0
    promise = Promise(figure="epsilon_x", epsilon=None)


def restart_and_log(folder: Path, file_name: str, *, party: str) -> Restart:
    """Restart a counter by `restart_counter`, and record this in the signed audit log.

    Raises:
        ConfigError: no counter has that name, or its file is as recorded.
        CheckpointError: the audit log has a fault, there is no such folder, or a process runs in
            it.
    """
    from secure_apfed.runs.folder import PartyFolder

    party_folder = PartyFolder(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; name that of {party}")
    with party_folder.lock_exclusively():
        restart = restart_counter(folder, file_name, party=party, now=time.time())
        identity_by_peer = {
            peer: bytes.fromhex(key) for peer, key in restart.identity_by_peer.items()
        }
        log = AuditLog(
            folder / AUDIT_LOG_NAME,
            party,
            party_folder.load_identity(),
            identity_by_peer,
            NothingReleased(),
            counters=restart.other_counters,
        )
        with closing(log):
            log.note_restart(restart.log_entry)
    return restart
