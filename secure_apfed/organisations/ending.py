"""The end of a project in a party's folder: what is deleted and kept, and a signed statement.

Run by: each party, in its own folder, once joint predictions are over. From then on nothing can be
started in that folder. Protects from: secrets, prepared tables and joint networks that remain long
after they are needed. Does not protect from: copies elsewhere, a disk that keeps deleted data, and
the files of the other parties.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secure_apfed.base.files import open_plain, to_json, write_atomically
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.organisations.counters import (
    ANSWER_BOOK,
    WITNESS,
    CounterFiles,
    NothingReleased,
    open_counters,
)
from secure_apfed.organisations.party import PARTY_FILE, PartyFile
from secure_apfed.runs.audit_log import FILE_NAME, AuditLog, Ended, summarise_log
from secure_apfed.runs.folder import (
    PROJECT_ENDED,
    FolderInUseError,
    PartyFolder,
    ProjectEnd,
    load_project_end,
)

__all__ = [
    "DELETED",
    "KEPT",
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
        pattern: glob pattern of the names of such files.
        why: what the file contains, in words.
    """

    pattern: str
    why: str


DELETED: tuple[Leftover, ...] = (
    Leftover("joint.safetensors", "the network of joint predictions"),
    Leftover(f"{ANSWER_BOOK}*", "the book of what was answered in joint predictions"),
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

KEPT: Mapping[str, str] = {
    "contract.json": "what was agreed, with everybody's signature",
    FILE_NAME: "what was sent and received, signed",
    WITNESS: "how far the audit log and the counters were",
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
        peers: the other parties' public identities (32 bytes each), by name.
        file: the party's settings file; None: there is none.
    """

    folder: Path
    party: str
    peers: Mapping[str, bytes]
    file: Path | None


def find_owner(folder: Path | None, config: Path | None) -> Owner:
    """Find which party owns a folder, from the party's settings file or the folder's audit log.

    Exactly one argument is given: `folder`, the party's folder, or `config`, the party's settings
    file.

    Raises ConfigError: neither or both are given, or the owner cannot be found.
    """
    if (folder is None) == (config is None):
        raise ConfigError("project end: name the party's folder, or its file with --config")
    if config is None and folder is not None:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; name that of the party")
        config = folder / PARTY_FILE
    assert config is not None
    if config.exists() or folder is None:
        file = PartyFile.from_file(config)
        if not file.folder.is_dir():
            raise ConfigError(
                f"{config}: {file.folder} is no folder; nothing of {file.party} is there"
            )
        peers = {name: bytes.fromhex(peer.identity) for name, peer in file.peers.items()}
        return Owner(file.folder, file.party, peers, config)
    if not (folder / FILE_NAME).exists():
        raise ConfigError(
            f"{folder} holds neither {PARTY_FILE} nor {FILE_NAME}, so nothing says whose it is; "
            "name the party's file with --config"
        )
    log = summarise_log(folder / FILE_NAME)
    peers = {name: bytes.fromhex(key) for name, key in log.peers.items()}
    return Owner(folder, log.party, peers, None)


@dataclass(frozen=True, kw_only=True)
class EndPlan:
    """A plan of which files are deleted and kept when a project ends in a party's folder.

    Attributes:
        owner: owner of the folder.
        deletes: name, content in words and bytes of each file to delete, in order.
        keeps: by the name of each known file to keep, why it is kept.
        ended_at: when the project was ended here, seconds since 1970; None: it was not.
    """

    owner: Owner
    deletes: Sequence[tuple[str, str, int]]
    keeps: Mapping[str, str]
    ended_at: float | None

    @property
    def is_done(self) -> bool:
        """True if the project has ended before, and nothing remains to be deleted."""
        return self.ended_at is not None and not self.deletes

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        deletes = [
            {"file": name, "why": reason, "bytes": size} for name, reason, size in self.deletes
        ]
        return {
            "party": self.owner.party,
            "folder": self.owner.folder,
            "deletes": deletes,
            "keeps": dict(self.keeps),
            "ended_at": self.ended_at,
        }


def plan_end(owner: Owner) -> EndPlan:
    """Return which files of the owner's folder the end of a project deletes; change nothing."""
    deletes = [
        (path.name, kind.why, _measure_size(path))
        for kind in DELETED
        for path in sorted(owner.folder.glob(kind.pattern))
    ]
    keeps = {
        path.name: reason
        for pattern, reason in KEPT.items()
        for path in sorted(owner.folder.glob(pattern))
    }
    marker = load_project_end(owner.folder)
    ended_at = marker.at if marker is not None and marker.is_complete else None
    return EndPlan(owner=owner, deletes=deletes, keeps=keeps, ended_at=ended_at)


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
    log_path = owner.folder / FILE_NAME
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
    deletes: Sequence[str],
    now: float,
    *,
    is_complete: bool,
    counters_are_as_noted: bool | None = None,
) -> None:
    """Write the marker `project-ended.json`, which forbids to start anything in the folder.

    Args:
        owner: owner of the folder.
        deletes: names of the files to delete.
        now: seconds since 1970.
        is_complete: whether these files are deleted already.
        counters_are_as_noted: whether the files that count releases and answers agreed with the
            audit log before anything was deleted; None: not checked yet.
    """
    ending = ProjectEnd(
        party=owner.party,
        at=now,
        deletes=tuple(deletes),
        is_complete=is_complete,
        counters_are_as_noted=counters_are_as_noted,
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
    marker = load_project_end(owner.folder)
    interrupted_end = marker if marker is not None and not marker.is_complete else None
    names = [name for name, _, _ in plan.deletes]
    counters, are_as_noted = _compare_counters(owner)
    if interrupted_end is not None and interrupted_end.deletes:
        names = [*interrupted_end.deletes, *names]
        if interrupted_end.counters_are_as_noted is not None:
            are_as_noted = interrupted_end.counters_are_as_noted
    names = list(dict.fromkeys(names))  # each once
    _write_marker(owner, names, now, is_complete=False, counters_are_as_noted=are_as_noted)
    for name, _, _ in plan.deletes:
        _delete_path(owner.folder / name)
    _sync_folder(owner.folder)
    # Without a digest: the audit log and its second record, which change now, and the secret key,
    # since others read the log.
    undigested = (FILE_NAME, WITNESS, "identity.pem")
    kept_digests = {
        name: _digest_file(owner.folder / name) for name in plan.keeps if name not in undigested
    }
    log = AuditLog(
        owner.folder / FILE_NAME,
        owner.party,
        folder.load_identity(),
        owner.peers,
        NothingReleased(),
        clock=lambda: now,
        counters=counters.exclude_counters(names),
    )
    with closing(log):
        log.note_end(
            Ended(
                at=now,
                deleted=tuple(names),
                kept=kept_digests,
                counters_are_as_noted=are_as_noted,
            )
        )
    _write_marker(owner, names, now, is_complete=True, counters_are_as_noted=are_as_noted)
    return EndPlan(owner=owner, deletes=plan.deletes, keeps=plan.keeps, ended_at=now)


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
