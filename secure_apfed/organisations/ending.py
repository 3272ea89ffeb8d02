"""The end of a project in a party's folder: what is deleted and kept, and a signed statement.

Run by: each party, in its own folder, once joint predictions are over. From then on nothing can be
started in that folder. Protects from: secrets, prepared tables and joint networks that remain long
after they are needed. Does not protect from: copies elsewhere, a disk that keeps deleted data, and
the files of the other parties.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secure_apfed.base.files import open_plain, to_json, write_atomically
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.organisations.counters import (
    ANSWER_LOG,
    COUNTER_CHECKPOINT,
    CounterFiles,
    NothingReleased,
    open_counters,
)
from secure_apfed.organisations.party import PARTY_FILE, PartyFile
from secure_apfed.runs.audit_log import AUDIT_LOG_NAME, AuditLog, ProjectEndLine, summarise_log
from secure_apfed.runs.folder import (
    PROJECT_ENDED,
    FolderInUseError,
    PartyFolder,
    ProjectEnd,
    load_project_end,
)

__all__ = [
    "KEPT_REASON_BY_PATTERN",
    "LEFTOVERS",
    "EndPlan",
    "Leftover",
    "Owner",
    "end_project",
    "find_owner",
    "plan_end",
]


@dataclass(frozen=True)
class Leftover:
    """A kind of file that is deleted when a project ends.

    Attributes:
        file_pattern: glob pattern of the names of such files.
        content: what the file contains, in words.
    """

    file_pattern: str
    content: str


LEFTOVERS: tuple[Leftover, ...] = (
    Leftover("joint.safetensors", "the network of joint predictions"),
    Leftover(f"{ANSWER_LOG}*", "the book of what was answered in joint predictions"),
    Leftover("checkpoint-*.bin", "secrets of a training: parameters, noise key, seed"),
    Leftover("recording-*.bin", "what all parties sent, where one process played them"),
    Leftover("transcript.msgpack", "what all parties sent, where one process played them"),
    Leftover("transcript-*.bin", "what all parties sent, where one process played them"),
    Leftover("alignment", "an intersection under way, with its secret"),
    Leftover("alignment.safetensors", "which rows are of one person, in all tables"),
    Leftover("encoders.safetensors", "networks of other parties"),
    Leftover("table.safetensors", "a prepared table"),
    Leftover("next-key.pem", "the key of a certificate that was asked for"),
    Leftover("key.pem", "the key of TLS"),
    Leftover("relay-key.pem", "the key of the relay's TLS"),
    Leftover("authority-key.pem", "the key of the project's authority"),
)
"""Kinds of files to delete, in this order: first what answers requests, last the keys for peers."""

KEPT_REASON_BY_PATTERN: Mapping[str, str] = {
    "contract.json": "what was agreed, with everybody's signature",
    AUDIT_LOG_NAME: "what was sent and received, signed",
    COUNTER_CHECKPOINT: "how far the audit log and the counters were",
    "statements.json": "what each party signed that it charged",
    "model.safetensors": "the model of the active, which still predicts alone",
    "model.json": "the card of the model",
    "result.json": "what the run gave",
    "config.yaml": "the settings of the run",
    "ended.json": "what this party spent",
    "sealed.json": "the project as all parties sealed it",
    "identity.pem": "the identity; keep a copy elsewhere, and show it to nobody",
    "ledger-*.jsonl": "releases, on which the epsilon rests",
    "answers-*.jsonl": "answers in training, on which the epsilon rests",
}
"""The files to keep, and why; all other files stay where they are, too."""


@dataclass(frozen=True)
class Owner:
    """The party that owns a folder of a project.

    Attributes:
        folder: the party's folder.
        party: the party's name.
        identity_by_peer: the other parties' public identities (32 bytes each), by name.
        settings_file: the party's settings file; None: there is none.
    """

    folder: Path
    party: str
    identity_by_peer: Mapping[str, bytes]
    settings_file: Path | None


def find_owner(folder: Path | None, config: Path | None) -> Owner:
    """Find which party owns a folder, from the party's settings file or the folder's audit log.

    Exactly one argument is given: `folder`, the party's folder, or `config`, the party's settings
    file.

    Raises ConfigError: neither or both are given, or the owner cannot be found.
    """
    if (folder is None) == (config is None):
        raise ConfigError("project end: name the party's folder, or its file with --config")
    if folder is None:
        assert config is not None
        return _load_owner_from_settings(config)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name that of the party")
    settings_path = folder / PARTY_FILE
    if settings_path.exists():
        return _load_owner_from_settings(settings_path)
    if not (folder / AUDIT_LOG_NAME).exists():
        raise ConfigError(
            f"{folder} holds neither {PARTY_FILE} nor {AUDIT_LOG_NAME}, so nothing says whose it "
            "is; name the party's file with --config"
        )
    log = summarise_log(folder / AUDIT_LOG_NAME)
    identity_by_peer = {name: bytes.fromhex(key) for name, key in log.peers.items()}
    return Owner(folder, log.party, identity_by_peer, None)


def _load_owner_from_settings(path: Path) -> Owner:
    """Return the owner that a party's settings file names.

    Raises ConfigError: the party's folder does not exist.
    """
    file = PartyFile.from_file(path)
    if not file.folder.is_dir():
        raise ConfigError(f"{path}: {file.folder} is no folder; nothing of {file.party} is there")
    identity_by_peer = {name: bytes.fromhex(peer.identity) for name, peer in file.peers.items()}
    return Owner(file.folder, file.party, identity_by_peer, path)


@dataclass(frozen=True, kw_only=True)
class EndPlan:
    """A plan of which files are deleted and kept when a project ends in a party's folder.

    Attributes:
        owner: owner of the folder.
        files_to_delete: name, content in words and bytes of each file to delete, in order.
        kept_reason_by_file: by the name of each known file to keep, why it is kept.
        ended_at: when the project was ended here, seconds since 1970; None: it was not.
    """

    owner: Owner
    files_to_delete: Sequence[tuple[str, str, int]]
    kept_reason_by_file: Mapping[str, str]
    ended_at: float | None

    @property
    def is_done(self) -> bool:
        """True if the project has ended before, and nothing remains to be deleted."""
        return self.ended_at is not None and not self.files_to_delete

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        deletes = [
            {"file": name, "why": reason, "bytes": size}
            for name, reason, size in self.files_to_delete
        ]
        return {
            "party": self.owner.party,
            "folder": self.owner.folder,
            "deletes": deletes,
            "keeps": dict(self.kept_reason_by_file),
            "ended_at": self.ended_at,
        }


def plan_end(owner: Owner) -> EndPlan:
    """Return which files of the owner's folder the end of a project deletes; change nothing."""
    files_to_delete = [
        (path.name, kind.content, _measure_size(path))
        for kind in LEFTOVERS
        for path in sorted(owner.folder.glob(kind.file_pattern))
    ]
    kept_reason_by_file = {
        path.name: reason
        for pattern, reason in KEPT_REASON_BY_PATTERN.items()
        for path in sorted(owner.folder.glob(pattern))
    }
    earlier_ending = load_project_end(owner.folder)
    ended_at = (
        earlier_ending.at if earlier_ending is not None and earlier_ending.is_complete else None
    )
    return EndPlan(
        owner=owner,
        files_to_delete=files_to_delete,
        kept_reason_by_file=kept_reason_by_file,
        ended_at=ended_at,
    )


def _measure_size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; a link counts without its target."""
    if path.is_dir() and not path.is_symlink():
        return sum(_measure_size(inner) for inner in path.iterdir())
    return path.lstat().st_size


def end_project(owner: Owner, *, now: float) -> EndPlan:
    """End the project in this folder; return what was deleted and what stays.

    First a file is written, the marker, which forbids to start anything in the folder. Then files
    are deleted, and the audit log gets a signed line. If the process is killed meanwhile, the same
    call completes the end.

    `now`: seconds since 1970.

    Raises CheckpointError: a process runs in the folder, its audit log was altered, or its key of
        signatures is missing. If the process is `serve`, it ends after its session, as the marker
        is written all the same.
    """
    folder = PartyFolder(owner.folder)
    log_path = owner.folder / AUDIT_LOG_NAME
    if log_path.exists() and log_path.stat().st_size:
        summarise_log(log_path)  # an altered log is refused before anything is deleted
    if not (owner.folder / "identity.pem").is_file():
        raise CheckpointError(
            f"{owner.folder} holds no identity.pem, which signs the end; put it back from its copy"
        )
    try:
        with folder.lock_exclusively():
            return _delete_and_sign(owner, folder, now)
    except FolderInUseError:
        raise _mark_while_running(owner, folder, now) from None


def _mark_while_running(owner: Owner, folder: PartyFolder, now: float) -> CheckpointError:
    """Return the error that a project cannot end in a folder in which a process runs.

    A process that serves joint predictions gets a marker in the folder, so that it ends after its
    session. A training is left unchanged.

    `folder`: the owner's folder. `now`: seconds since 1970.
    """
    remedy = "end it (Ctrl-C, SIGTERM, or `systemctl stop` of its unit), and say this command again"
    if not folder.party_end.exists():
        return CheckpointError(
            f"a run of {owner.party} is under way in {owner.folder}, so nothing was ended: wait "
            f"until it is over, or {remedy}"
        )
    # The training has ended, so the process that holds the folder's lock serves or predicts.
    if load_project_end(owner.folder) is None:
        _write_marker(owner, (), now, is_complete=False)
    return CheckpointError(
        f"{owner.party} serves or predicts in {owner.folder}, so nothing was deleted: it ends by "
        f"itself after its session, and nothing else begins there; or {remedy}"
    )


def _write_marker(
    owner: Owner,
    deleted_names: Sequence[str],
    now: float,
    *,
    is_complete: bool,
    counters_are_as_recorded: bool | None = None,
) -> None:
    """Write the marker `project-ended.json`, which forbids to start anything in the folder.

    Args:
        owner: owner of the folder.
        deleted_names: names of the files to delete.
        now: seconds since 1970.
        is_complete: whether these files are deleted already.
        counters_are_as_recorded: whether the files that count releases and answers agreed with the
            audit log before anything was deleted; None: not checked yet.
    """
    ending = ProjectEnd(
        party=owner.party,
        at=now,
        deletes=tuple(deleted_names),
        is_complete=is_complete,
        counters_are_as_noted=counters_are_as_recorded,
    )
    content = to_json(ending.model_dump(mode="json"), indent=1).encode() + b"\n"
    write_atomically(owner.folder / PROJECT_ENDED, content)


def _delete_and_sign(owner: Owner, folder: PartyFolder, now: float) -> EndPlan:
    """Delete the planned files, and record the end in the signed audit log; return the plan.

    If an earlier call was interrupted, the record includes the files that it deleted, and whether
    counters agreed with the audit log then: now some of them may be deleted.

    `folder`: the owner's folder, locked. `now`: seconds since 1970.
    """
    plan = plan_end(owner)
    if plan.is_done:
        return plan
    earlier_end = load_project_end(owner.folder)
    planned_names = [name for name, _, _ in plan.files_to_delete]
    deleted_names = planned_names
    counters, counters_are_as_recorded = _compare_counters(owner)
    if earlier_end is not None and not earlier_end.is_complete and earlier_end.deletes:
        deleted_names = [*earlier_end.deletes, *planned_names]
        if earlier_end.counters_are_as_noted is not None:
            counters_are_as_recorded = earlier_end.counters_are_as_noted
    deleted_names = list(dict.fromkeys(deleted_names))  # each once
    _write_marker(
        owner,
        deleted_names,
        now,
        is_complete=False,
        counters_are_as_recorded=counters_are_as_recorded,
    )
    for name in planned_names:
        _delete_path(owner.folder / name)
    _sync_folder(owner.folder)
    digest_by_kept_file = _digest_kept_files(owner.folder, plan.kept_reason_by_file)
    log = AuditLog(
        owner.folder / AUDIT_LOG_NAME,
        owner.party,
        folder.load_identity(),
        owner.identity_by_peer,
        NothingReleased(),
        clock=lambda: now,
        counters=counters.exclude_counters(deleted_names),
    )
    with closing(log):
        log.note_end(
            ProjectEndLine(
                at=now,
                deleted=tuple(deleted_names),
                kept=digest_by_kept_file,
                counters_are_as_noted=counters_are_as_recorded,
            )
        )
    _write_marker(
        owner,
        deleted_names,
        now,
        is_complete=True,
        counters_are_as_recorded=counters_are_as_recorded,
    )
    return EndPlan(
        owner=owner,
        files_to_delete=plan.files_to_delete,
        kept_reason_by_file=plan.kept_reason_by_file,
        ended_at=now,
    )


def _digest_kept_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the digest of each kept file that has one.

    The audit log and its second record have none, since they change when the end is recorded. The
    secret key has none, since others read the log that the digests are written to.
    """
    names_without_digest = (AUDIT_LOG_NAME, COUNTER_CHECKPOINT, "identity.pem")
    return {name: _digest_file(folder / name) for name in names if name not in names_without_digest}


def _compare_counters(owner: Owner) -> tuple[CounterFiles, bool]:
    """Return the folder's counters, and whether all are as the audit log records them.

    Counters are files that count releases and answers. If one differs, none is returned.
    """
    try:
        return open_counters(owner.folder, owner.party), True
    except CheckpointError:
        return CounterFiles(owner.folder, owner.party), False


def _delete_path(path: Path) -> None:
    """Delete a file, a folder with its content, or a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Wait until the deletions in a folder are on the disk (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest_file(path: Path) -> str:
    """Return the SHA-256 of a file, hex."""
    with open_plain(path) as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
