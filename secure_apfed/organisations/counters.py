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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from secure_apfed.base.files import load_json, open_plain, open_regular, to_json, write_atomically
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.runs.audit_log import (
    FILE_NAME,
    AuditLog,
    CounterName,
    Restarted,
    Summary,
    summarise_log,
)
from secure_apfed.settings.promises import Promise

__all__ = [
    "ANSWER_BOOK",
    "COUNTERS",
    "WITNESS",
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

ANSWER_BOOK = "answered.sqlite"
"""The file in a passive's folder that counts its answers in joint predictions."""
WITNESS = "counters.json"
"""The file in a party's folder with the last state of its audit log and its counters."""
_DIGEST_BYTES = 16
_NO_DIGEST = "0" * 2 * _DIGEST_BYTES
_FaultReason: TypeAlias = Literal["missing", "lower", "of another run", "unreadable"]


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


class _NotedCount(BaseModel):
    """A `Count` as stored in `counters.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    number: int = Field(ge=0)
    origin: str
    digest: str


class _Witness(BaseModel):
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
    counters: dict[CounterName, _NotedCount]


class _LineCounter:
    """A reader of a counter's file to which one line is appended for each count.

    A line counts once its end is written. Only what was appended since the last call is read.
    """

    def __init__(self, path: Path, *, headers: int) -> None:
        """Start at the beginning of the file.

        `headers`: how many lines at the beginning of the file do not count.
        """
        self._path = path
        self._headers = headers
        self._reset_count()

    def _reset_count(self) -> None:
        """Forget the count, so that the file is read again from its beginning."""
        self._offset = 0  # bytes that were read
        self._lines = 0
        self._origin = _NO_DIGEST  # digest of the first line
        self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)  # of all lines that were read

    def load_count(self) -> Count:
        """Return the file's current count; read only what was appended since the last call."""
        os.close(open_regular(self._path, create=False))  # raises an error for a link
        with open_plain(self._path) as file:
            if os.fstat(file.fileno()).st_size < self._offset:
                self._reset_count()  # the file was shortened or replaced
            file.seek(self._offset)
            for line in iter(file.readline, b""):
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
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
                if self._lines - self._headers >= number:
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
        self._lines += 1
        self._digest.update(line + b"\n")
        if self._lines == 1:
            self._origin = self._digest.hexdigest()

    def _make_count(self) -> Count:
        """Return the count of the lines read so far, without the header lines."""
        number = max(0, self._lines - self._headers)
        return Count(number, self._origin, self._digest.hexdigest())


class _BookCounter:
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


_Counter: TypeAlias = _LineCounter | _BookCounter


def _make_line_counter(path: Path) -> _LineCounter:
    """Return a reader of a counter's file all of whose lines count."""
    return _LineCounter(path, headers=0)


def _make_ledger_counter(path: Path) -> _LineCounter:
    """Return a reader of a ledger, whose first line names its run and does not count."""
    return _LineCounter(path, headers=1)


@dataclass(frozen=True)
class CounterKind:
    """A kind of counter in a party's folder.

    Attributes:
        pattern: glob pattern of the names of its files.
        counts: what it counts, in a few words.
        make: makes a reader of such a file.
        when_saved: whether its count is recorded only just before a checkpoint is stored; until
            then nothing that depends on the count has been sent.
    """

    pattern: str
    counts: str
    make: Callable[[Path], _Counter]
    when_saved: bool = False


COUNTERS: tuple[CounterKind, ...] = (
    CounterKind("ledger-*.jsonl", "releases", _make_ledger_counter),
    CounterKind("answers-*.jsonl", "answers in training", _make_ledger_counter),
    CounterKind("audits-*.jsonl", "failed audits", _make_line_counter),
    CounterKind("refused-*.jsonl", "refused sums", _make_line_counter),
    CounterKind("circles-*.jsonl", "steps answered among whom", _make_line_counter),
    CounterKind("labels-*.log", "stages of answered labels", _make_line_counter, when_saved=True),
    CounterKind(ANSWER_BOOK, "changes of the book of answers", _BookCounter),
)
"""Every counter that a party keeps in a file; checkpoints repeat the ledgers."""


def find_counter_kind(name: str) -> CounterKind | None:
    """Return the kind of a counter's file by its name; None: the file is not a counter."""
    return next((kind for kind in COUNTERS if Path(name).match(kind.pattern)), None)


class CounterFiles:
    """The counters in one party's folder, whose changes the audit log records before a message.

    Args:
        folder: the party's folder.
        party: the party's name.
        noted: the recorded counts, by file name.
        watches: whether the files are read for new counts; otherwise `list_changes` yields the
            recorded counts.
    """

    def __init__(
        self, folder: Path, party: str, noted: Mapping[str, Count] = {}, *, watches: bool = True
    ) -> None:
        """Start from the recorded counts, without reading a file; see the class for arguments."""
        self._folder = folder
        self._party = party
        self._reads_files = watches
        self._recorded_counts = dict(noted)
        self._readers: dict[str, _Counter] = {}
        # By file name: time of change and size when the file was read last.
        self._versions: dict[str, tuple[int, int]] = {}

    def list_changes(self, *, saved: bool) -> Iterable[tuple[str, int, str, str]]:
        """Yield file name, number, origin and digest of each counter that changed since last time.

        If files are not watched, all recorded counts are yielded.

        `saved`: whether a checkpoint is about to be stored; some kinds are read only then.

        Raises CheckpointError: a counter is missing, or counts less than before.
        """
        if not self._reads_files:
            for name, count in self._recorded_counts.items():
                yield name, count.number, count.origin, count.digest
            return
        versions = dict(self._list_versions())
        for name, recorded in self._recorded_counts.items():
            if recorded.number and name not in versions:
                raise CheckpointError(
                    f"restore {self._folder / name} from a copy: it is gone, and this session "
                    "counted in it"
                )
        for name, version in versions.items():
            kind = find_counter_kind(name)
            if kind is None or version == self._versions.get(name):
                continue
            if kind.when_saved and not saved:
                continue
            reader = self._readers.setdefault(name, kind.make(self._folder / name))
            count = reader.load_count()
            self._versions[name] = version
            recorded = self._recorded_counts.get(name, Count(0, count.origin, count.digest))
            if count.number < recorded.number:
                raise CheckpointError(
                    f"restore {self._folder / name} from a copy: it counts {count.number} "
                    f"{kind.counts}, and counted {recorded.number} before, so another process "
                    "wrote to it"
                )
            if count != self._recorded_counts.get(name):
                self._recorded_counts[name] = count
                yield name, count.number, count.origin, count.digest

    @property
    def counting(self) -> frozenset[str]:
        """The names of the counters that are above zero."""
        return frozenset(name for name, count in self._recorded_counts.items() if count.number)

    def exclude_counters(self, names: Collection[str]) -> "CounterFiles":
        """Return these counters without some whose files were deleted; files are not watched."""
        noted = {name: count for name, count in self._recorded_counts.items() if name not in names}
        return CounterFiles(self._folder, self._party, noted, watches=False)

    def _list_versions(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the name of each counter's file, with its time of change and its size."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if find_counter_kind(entry.name) is not None:
                    status = entry.stat(follow_symlinks=False)
                    yield entry.name, (status.st_mtime_ns, status.st_size)

    def write_witness(self, lines: int, head: str) -> None:
        """Write `counters.json`: the recorded counts, and how long the audit log is.

        So an audit log that is cut short is noticed.

        `lines`: number of the log's lines. `head`: hash of its last line.
        """
        counters = {name: asdict(count) for name, count in self._recorded_counts.items()}
        content = {"party": self._party, "lines": lines, "chain": head, "counters": counters}
        path = self._folder / WITNESS
        write_atomically(path, to_json(content).encode() + b"\n", private=True)


@dataclass(frozen=True)
class _Fault:
    """A fault of a counter's file, or of the audit log.

    Attributes:
        name: name of the file.
        why: the kind of fault.
        noted: the recorded count, which the file should have at least.
        actual: the file's present count; None: it cannot be read.
        detail: what is wrong in more words, maybe "".
    """

    name: str
    why: _FaultReason
    noted: Count
    actual: Count | None
    detail: str = ""


@dataclass
class _Record:
    """The recorded counters of a folder.

    Attributes:
        noted: by the name of each counter's file, its count as recorded in the audit log, or in
            `counters.json` if the log has a fault.
        log: the audit log's summary; None: there is no log, or it has a fault.
        fault: the fault of the audit log itself; None: it has none.
    """

    noted: dict[str, Count]
    log: Summary | None
    fault: _Fault | None


def _load_witness(folder: Path, party: str) -> tuple[_Witness | None, str]:
    """Read `counters.json`; return its content, and why it cannot be used.

    Without such a file the result is (None, ""); if it cannot be used, None and the reason.
    """
    path = folder / WITNESS
    if not os.path.lexists(path):
        return None, ""
    try:
        witness = load_json(path, _Witness)
    except CheckpointError as error:
        return None, str(error)
    if witness.party != party:
        return None, f"{path} is of {witness.party}, this party is {party}"
    return witness, ""


def _load_record(folder: Path, party: str) -> _Record:
    """Read a party's audit log and `counters.json`, and return the recorded counts of its counters.

    The two files are compared: `counters.json` has the length and the hash of the log. A fault of
    the log is part of the result, and not raised.
    """
    path = folder / FILE_NAME
    # The witness is the content of `counters.json`.
    witness, witness_fault = _load_witness(folder, party)
    counters = witness.counters if witness else {}
    counts_of_witness = {name: Count(**count.model_dump()) for name, count in counters.items()}
    was_in_use = witness is not None or bool(witness_fault)
    noted = Count(witness.lines if witness else 0, _NO_DIGEST, _NO_DIGEST)
    if not os.path.lexists(path):
        is_lost = was_in_use or any(_list_traces(folder))
        fault = _Fault(FILE_NAME, "missing", noted, None) if is_lost else None
        return _Record(counts_of_witness, log=None, fault=fault)
    chain_at_noted: list[str] = []  # the log's hash after the recorded number of lines

    def note_chain(number: int, chain: str) -> None:
        """Store the log's hash after the recorded number of lines."""
        if number == noted.number:
            chain_at_noted.append(chain)

    try:
        os.close(open_regular(path, create=False))  # raises an error for a link
        if not path.stat().st_size and not was_in_use:
            # A process was killed before it wrote its first line.
            return _Record({}, log=None, fault=None)
        log = summarise_log(path, on_line=note_chain)
    except (CheckpointError, OSError) as error:
        fault = _Fault(FILE_NAME, "unreadable", noted, None, str(error))
        return _Record(counts_of_witness, log=None, fault=fault)
    fault = _find_log_fault(log, party, noted, witness, chain_at_noted)
    if fault is not None and witness_fault:
        fault = replace(fault, detail=witness_fault)
    if fault is not None:
        return _Record(counts_of_witness, log=None, fault=fault)
    logged_counts = {
        name: Count(line.number, line.origin, line.digest) for name, line in log.counters.items()
    }
    return _Record(logged_counts, log, fault=None)


def _find_log_fault(
    log: Summary, party: str, noted: Count, witness: _Witness | None, chain_at_noted: Sequence[str]
) -> _Fault | None:
    """Compare an intact audit log with `counters.json`; return the log's fault, or None.

    Args:
        log: the log's summary.
        party: the folder's party.
        noted: how many lines the log has according to `counters.json`.
        witness: content of `counters.json`; None: there is no such file, or it cannot be used.
        chain_at_noted: the log's hash after that many lines; empty if the log is shorter.
    """
    if log.party != party:
        detail = f"it is of {log.party}, this party is {party}"
        return _Fault(FILE_NAME, "of another run", noted, None, detail)
    if witness is None:
        if not (log.agreed or log.counters):
            return None  # the process was killed before its first session
        detail = f"{log.path.parent / WITNESS} is missing, which says how many lines it had"
        return _Fault(FILE_NAME, "unreadable", noted, None, detail)
    if log.lines < noted.number:
        return _Fault(FILE_NAME, "lower", noted, Count(log.lines, _NO_DIGEST, _NO_DIGEST))
    is_same = [*chain_at_noted] == [witness.chain]
    return None if is_same else _Fault(FILE_NAME, "of another run", noted, None)


def _list_traces(folder: Path) -> Iterator[Path]:
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
                yield path.name, kind.make(path).load_count()
            except (CheckpointError, OSError):
                yield path.name, None


def _find_fault(folder: Path, name: str, noted: Count) -> _Fault | None:
    """Compare one counter's file with its recorded count; return the file's fault, or None.

    A file may count more than recorded. `name`: name of the file. `noted`: the recorded count.
    """
    path = folder / name
    kind = find_counter_kind(name)
    if kind is None or not noted.number:
        return None
    if not os.path.lexists(path):
        return _Fault(name, "missing", noted, None)
    try:
        actual = kind.make(path).load_count_until(noted.number)
        os.close(open_regular(path, create=False))
    except (CheckpointError, OSError) as error:
        return _Fault(name, "unreadable", noted, None, str(error))
    if actual.origin != noted.origin:
        return _Fault(name, "of another run", noted, actual)
    if actual.number < noted.number:
        return _Fault(name, "lower", noted, actual)
    is_same = actual.digest == noted.digest
    return None if is_same else _Fault(name, "of another run", noted, actual)


def _describe_fault(fault: _Fault) -> str:
    """Return a fault in words that follow the name of the file."""
    kind = find_counter_kind(fault.name)
    counts = kind.counts if kind else "lines"  # the file without a kind is the audit log
    record_file = FILE_NAME if kind else WITNESS
    noted_text = f"{record_file} notes {fault.noted.number:,} {counts}"
    if fault.why == "missing":
        return f"is missing, and {noted_text}"
    if fault.why == "lower":
        number = fault.actual.number if fault.actual else 0
        return (
            f"holds {number:,} {counts}, and {noted_text}, so it is an older copy, or was shortened"
        )
    if fault.why == "unreadable":
        return f"cannot be relied on ({fault.detail}), and {noted_text}"
    detail = fault.detail and f": {fault.detail}"
    return f"is not the file of this run that {record_file} knows{detail}"


def _make_fault_error(folder: Path, party: str, fault: _Fault) -> CheckpointError:
    """Return the error for a file's fault, with both remedies: a copy, or a restart at zero."""
    return CheckpointError(
        f"put the newest copy of {folder / fault.name} back: it {_describe_fault(fault)}, and "
        f"begun anew it would forget what {party} gave away. If there is no copy and it shall "
        f"restart all the same, run: secure-apfed audit-log restart-counter '{folder}' "
        f"{fault.name} --party {party}"
    )


def open_counters(folder: Path, party: str) -> CounterFiles:
    """Return the counters of a party's folder, after all were compared with the audit log.

    Counters are files that count what the party has released or answered. A lost count would let it
    release more than its limits allow.

    Raises CheckpointError: a counter, or the audit log itself, is missing, lower than recorded, of
        another run or party, or unreadable.
    """
    record = _load_record(folder, party)
    if record.fault is not None:
        raise _make_fault_error(folder, party, record.fault)
    for name, noted in record.noted.items():
        fault = _find_fault(folder, name, noted)
        if fault is not None:
            raise _make_fault_error(folder, party, fault)
    return CounterFiles(folder, party, record.noted)


def list_nonzero_counters(folder: Path, party: str) -> frozenset[str]:
    """Return the names of the counters that are above zero according to the audit log.

    Raises CheckpointError: a counter or the audit log has a fault; see `open_counters`.
    """
    return open_counters(folder, party).counting


@dataclass(frozen=True)
class Restart:
    """The outcome of `restart_counter`.

    Attributes:
        line: line to be added to the audit log.
        aside: the new path of the counter's former file; None: there was none, or the counter
            continues from it.
        files: the other counters as recorded.
        peers: public identity (hex) of each peer in the audit log, by name.
    """

    line: Restarted
    aside: Path | None
    files: CounterFiles
    peers: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """Return the restart as JSON values."""
        return {**self.line.model_dump(mode="json"), "aside": self.aside and str(self.aside)}


def restart_counter(folder: Path, name: str, *, party: str, now: float) -> Restart:
    """Let a counter be used again although its file is not as recorded.

    If the file is an older copy, the counter continues from it. Any other file is renamed, and the
    counter restarts at zero. The caller adds the returned line to the audit log.

    Args:
        folder: the party's folder.
        name: name of the counter's file.
        party: the party's name.
        now: seconds since 1970.

    Raises:
        ConfigError: no counter has that name, or its file is as recorded.
        CheckpointError: the audit log has a fault, so that it must be restarted first.
    """
    if name != FILE_NAME and (find_counter_kind(name) is None or Path(name).name != name):
        patterns = ", ".join(kind.pattern for kind in COUNTERS)
        raise ConfigError(f"{name!r} is no counter; counters are {FILE_NAME}, {patterns}")
    record = _load_record(folder, party)
    fault = record.fault
    noted = record.noted
    if name != FILE_NAME:
        if fault is not None:
            raise _make_fault_error(folder, party, fault)
        count = noted.get(name)
        fault = _find_fault(folder, name, count) if count else None
        noted = {other: count for other, count in noted.items() if other != name}
    if fault is None:
        raise ConfigError(
            f"{folder / name} counts as noted, so there is nothing to restart; start the party"
        )
    is_older_copy = fault.why == "lower"
    aside = None
    if not is_older_copy and os.path.lexists(folder / name):
        aside = _find_free_name(folder, name)
        (folder / name).rename(aside)
    line = Restarted(
        at=now,
        counter=name,
        why=fault.why,
        noted=fault.noted.number,
        number=fault.actual.number if is_older_copy and fault.actual else 0,
    )
    peers = record.log.peers if record.log else {}
    watched = CounterFiles(folder, party, noted, watches=False)
    return Restart(line, aside, watched, peers)


def _find_free_name(folder: Path, name: str) -> Path:
    """Return an unused path in the same folder, to which the file can be renamed."""
    number = 1
    while os.path.lexists(folder / f"{name}.aside-{number}"):
        number += 1
    return folder / f"{name}.aside-{number}"


class NothingReleased:
    """A meter of privacy cost for a process that releases nothing."""

    charges = 0
    promise = Promise(figure="epsilon_x", epsilon=None)


def restart_and_log(folder: Path, name: str, *, party: str) -> Restart:
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
        restart = restart_counter(folder, name, party=party, now=time.time())
        peers = {peer: bytes.fromhex(key) for peer, key in restart.peers.items()}
        log = AuditLog(
            folder / FILE_NAME,
            party,
            party_folder.load_identity(),
            peers,
            NothingReleased(),
            counters=restart.files,
        )
        with closing(log):
            log.note_restart(restart.line)
    return restart
