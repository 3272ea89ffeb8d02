"""The run folder and a party's own, written so that a killed process harms nothing.

Every file is written under a temporary name in the same folder and then renamed. Only the owner may
enter the folder, since it contains labels, models and ledgers.
"""

import datetime as dt
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from apfed_protocols.seal import Identity, fresh_identity
from secure_apfed.base.files import (
    PAYLOADS,
    VERSIONS,
    describe_origin,
    load_bytes,
    load_json,
    load_text,
    make_private,
    open_plain,
    open_regular,
    own_subfolder,
    to_json,
    write_atomically,
)
from secure_apfed.base.formats import CONTRACT
from secure_apfed.base.names import own_file
from secure_apfed.config import Config
from secure_apfed.config.file import load_config_text
from secure_apfed.contract import Contract
from secure_apfed.errors import CheckpointError, ConfigError, DataError
from secure_apfed.measures.table import Scored

ContractT = TypeVar("ContractT")
_TESTED = "tested"  # name of a mask of rows in the file of test scores
_DIGEST_BYTES = 32
_MAX_KEY_BYTES = 4096  # largest size of a file with a private key
# Ledgers, counts of passives' contributions, audits, refused sums, digests of random labels.
_LOG_PATTERNS = (
    "ledger-*.jsonl",
    "answers-*.jsonl",
    "audits-*.jsonl",
    "refused-*.jsonl",
    "circles-*.jsonl",
    "labels-*.log",
)
_KEPT_FILE_COUNT = 2  # number of newest files that `StepFiles` does not delete
# Temporary names of `write_atomically`.
_TEMPORARY_NAME = re.compile(
    r"\.([\w-]+\.(bin|json|jsonl|msgpack|pem|safetensors|yaml)|SHA256SUMS)\.[a-z0-9_]{8}"
)


SEALED_PROJECT = "sealed.json"
"""Name of the file in a party's folder with the project that all parties signed."""
PROJECT_ENDED = "project-ended.json"
"""Name of the file in a party's folder that records its project's end and the deleted files."""


class FolderInUseError(CheckpointError):
    """The error for a folder in which another process runs."""


class ProjectEnd(BaseModel):
    """The contents of `project-ended.json`, which a party writes when it ends its project.

    Attributes:
        party: the party's name.
        at: time in seconds since 1970.
        deletes: names of the files that are deleted.
        is_complete: whether all of them are deleted, and the audit log states it.
        counters_are_as_noted: whether the party's counters had the state in its audit log when the
            project was ended; None: this was not checked.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    party: str
    at: float
    deletes: tuple[str, ...] = ()
    is_complete: bool
    counters_are_as_noted: bool | None = None


def load_project_end(folder: Path) -> ProjectEnd | None:
    """Return the record of the end of the project in a party's folder; None: it has not ended."""
    path = folder / PROJECT_ENDED
    # A link counts, too: `load_json` refuses it, so that it cannot make an ended project look open.
    return load_json(path, ProjectEnd) if os.path.lexists(path) else None


def require_open_project(folder: Path) -> None:
    """Raise CheckpointError if the project in a party's folder has ended, so nothing may start."""
    project_end = load_project_end(folder)
    if project_end is not None:
        day = dt.datetime.fromtimestamp(project_end.at, dt.UTC)
        raise CheckpointError(
            f"the project of {project_end.party} was ended in {folder} on {day:%Y-%m-%d} "
            f"({PROJECT_ENDED} says so), so nothing begins there any more; for another project, "
            "join in a new folder"
        )


class RunFolder:
    """The folder of one run: the paths of its files, and functions that read and write them."""

    def __init__(self, path: Path) -> None:
        """Name the paths of all files in this folder; nothing is read or created."""
        self.path = path
        self.config = path / "config.yaml"
        self.contract = path / "contract.json"
        self.seeds = path / "seeds.json"
        self.versions = path / VERSIONS
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.model = path / "model.safetensors"
        self.model_card = path / "model.json"
        self.encoders = path / "encoders.safetensors"
        self.alignment = path / "alignment.safetensors"
        self.transcript = path / "transcript.msgpack"
        self.message_flows = path / "transcript.json"
        self.common_people = path / "common.json"
        self.test_scores = path / "test-scores.safetensors"
        self.result = path / "result.json"
        self.local_models = path / "solo.json"
        self.baseline_predictions = path / "solo-scores.safetensors"
        self.who_helped = path / "who-helped.json"
        self.statements = path / "statements.json"
        self.accountants = path / "accountants.json"
        self.digests = path / "SHA256SUMS"
        self.parties = path / "parties"
        self.recordings = StepFiles(path, "recording")
        self.interrupted_totals = path / "broken-off.json"

    @contextmanager
    def open_for_run(self, config: Config, *, resume: bool) -> Iterator[None]:
        """Lock the folder for a run in the `with` block.

        Before a new run, files of a start that was broken off before training are deleted.

        `config`: settings of the run. `resume`: whether the run continues.

        Raises CheckpointError: another process runs here, or the run cannot start or resume here.
        """
        active = PartyFolder(self.get_party_path(config.data.active_name))
        if resume:
            self._require_resumable(active)
        with self._lock_folder():
            if not resume:
                self._make_room(active)
            own_subfolder(self.parties)
            yield

    @contextmanager
    def _lock_folder(self) -> Iterator[None]:
        """Make the folder private, lock it, and delete temporary files of a killed process."""
        make_private(self.path)
        path = self.path / ".lock"
        # Opening it here refuses a symbolic link in its place, which FileLock would follow.
        os.close(open_regular(path, create=True))
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise FolderInUseError(
                f"another process is running in {self.path}; wait for it, or choose another folder"
            ) from None
        try:
            for file in self.path.glob(".*"):
                if _TEMPORARY_NAME.fullmatch(file.name) and not file.is_dir():
                    file.unlink()
            yield
        finally:
            lock.release()

    def _require_resumable(self, active: "PartyFolder") -> None:
        """Raise CheckpointError if a run here is finished, or has no checkpoint to resume from.

        `active`: the active's folder below this one.
        """
        # An active in a process of its own may have finished before its result was copied here.
        # Resuming then only copies it.
        is_uncollected = active.result.exists() and not self.result.exists()
        if active.has_checkpoint or is_uncollected:
            return
        if self.result.exists():
            raise CheckpointError(f"nothing to do: {self.path} holds a finished run")
        raise make_no_checkpoint_error(active.path)

    def _make_room(self, active: "PartyFolder") -> None:
        """Delete files of an earlier start that was broken off before training.

        `active`: the active's folder below this one.

        Raises CheckpointError: the folder has a checkpoint, a result, or a log that counts
            releases.
        """
        if active.has_checkpoint:
            raise CheckpointError(
                f"resume the run (--resume), or choose another folder: {self.path} holds a run "
                "already"
            )
        if self.result.exists():
            raise CheckpointError(
                f"choose another folder: {self.path} holds a run already, which is finished"
            )
        folders = self.parties.iterdir() if self.parties.is_dir() else ()
        parties = [PartyFolder(party) for party in folders if not party.is_symlink()]
        for party in parties:
            party.require_no_releases()
        self.recordings.clear()
        self.interrupted_totals.unlink(missing_ok=True)
        for party in parties:
            party.checkpoints.clear()

    def list_ended_parties(self) -> tuple[Path, ...]:
        """Return the folders, below this one, of parties whose part of the run is over."""
        folders = sorted(self.parties.iterdir()) if self.parties.is_dir() else []
        return tuple(path for path in folders if PartyFolder(path).party_end.is_file())

    def get_party_path(self, name: str) -> Path:
        """Return the path of a party's folder below this one."""
        return own_file(self.parties, name)

    def write_json(self, path: Path, content: Any) -> None:
        """Write a file of JSON atomically."""
        write_atomically(path, _encode_json(content))

    def load_config(self) -> Config:
        """Return the run's settings.

        Raises ConfigError: they are not valid in this version; the error names the version that
            wrote them, if it is known.
        """
        try:
            return _parse_cached_config(load_text(self.config), str(self.config))
        except ConfigError as error:
            origin = describe_origin(self.config)
            if not origin:
                raise
            raise ConfigError(f"{error}\n{self.config}: {origin}") from error

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write digests of all files of the run, then `result.json`, which marks it as finished."""
        content = _encode_json(result)
        digests = {
            self._get_relative_name(file): _digest_file(file)
            for file in self._list_written_files()
            if file.exists()
        }
        digests[self.result.name] = hashlib.sha256(content).hexdigest()
        lines = [f"{digest}  {name}\n" for name, digest in digests.items()]
        write_atomically(self.digests, "".join(lines).encode())
        write_atomically(self.result, content)

    def check_digests(self, *files: Path) -> None:
        """Raise CheckpointError if one of these files changed since the run wrote it.

        Without files, all files of the run are checked. Nothing is checked if there is no file of
        digests, as in an unfinished run.
        """
        if not self.digests.exists():
            return
        try:
            lines = load_text(self.digests).splitlines()
            digests = {
                _require_inner_name(name): digest
                for digest, name in (line.split("  ") for line in lines)
            }
        except ValueError:
            raise CheckpointError(
                f"{self.digests} holds other lines than sha256sum writes; restore it "
                "from a copy, or remove it to go on without this check"
            ) from None
        names = [self._get_relative_name(file) for file in files] if files else list(digests)
        for name in names:
            if name in digests and _digest_file(self.path / name) != digests[name]:
                raise CheckpointError(
                    f"{self.path / name} is not as the run left it: its SHA-256 is not the one in "
                    f"{self.digests.name}; restore it from a copy, or, if you changed it on "
                    f"purpose, put the output of `sha256sum {name}` there"
                )

    def _get_relative_name(self, file: Path) -> str:
        """Return the name of a file relative to this folder, as the file of digests has it."""
        return file.relative_to(self.path).as_posix()

    def _list_written_files(self) -> tuple[Path, ...]:
        """Return the paths of the files that a run may write before its result."""
        return (
            self.config,
            self.contract,
            self.seeds,
            self.versions,
            self.metrics,
            self.model,
            self.model_card,
            self.encoders,
            self.alignment,
            self.transcript,
            self.message_flows,
            self.common_people,
            self.test_scores,
            self.statements,
            *sorted(self.path.glob(PAYLOADS)),
            *self.list_logs(),
        )

    def list_logs(self) -> tuple[Path, ...]:
        """Return the logs in all parties' folders below this one, or in this party's folder."""
        party_folders = sorted(self.parties.iterdir()) if self.parties.is_dir() else []
        return tuple(log for folder in (self.path, *party_folders) for log in _list_logs(folder))

    def append_metrics(self, record: Mapping[str, Any], *, is_durable: bool = True) -> None:
        """Append one JSON line to the metrics.

        `is_durable`: whether to wait until all lines are on the disk. It is needed before a
        checkpoint, as a resumed run expects a line for each epoch before its checkpoint.
        """
        with os.fdopen(open_regular(self.metrics, create=False), "a", encoding="utf-8") as lines:
            lines.write(to_json(record) + "\n")
            lines.flush()
            if is_durable:
                os.fsync(lines.fileno())

    def keep_metrics(self, count: int) -> None:
        """Delete the metrics of all epochs but the first `count`.

        Later lines were written by a killed session after its checkpoint, and these epochs will be
        repeated.

        Raises CheckpointError: there are fewer lines, or they are no JSON.
        """
        lines: list[bytes] = []
        if self.metrics.exists():
            lines = load_bytes(self.metrics).splitlines(keepends=True)[:count]
        try:
            is_complete = len([json.loads(line) for line in lines]) == count
        except (ValueError, RecursionError):
            is_complete = False
        if not is_complete:
            raise CheckpointError(
                f"restore {self.metrics} from a copy, or begin a new run in another folder: the "
                f"file lacks lines, of which the run needs one of JSON for each of {count} epochs"
            )
        write_atomically(self.metrics, b"".join(lines))


class PartyFolder(RunFolder):
    """A party's own folder: its identity, checkpoints, write-ahead logs, and the end of its part.

    Run by: each party, alone in its folder. Of other parties it contains only public facts (the
    contract, public identities). If one process simulates all parties, their folders `parties/NAME`
    lie below the run's, and each is used as if it were on a machine of its own. An active that runs
    in a process of its own also has the files of the run in its folder.
    """

    def __init__(self, path: Path) -> None:
        """Name the paths of this party's files."""
        super().__init__(path)
        self.party_end = path / "ended.json"
        self.joint_networks = path / "joint.safetensors"
        self.column_scores = path / "feature-scores.json"
        self.checkpoints = StepFiles(path, "checkpoint")
        self._identity_path = path / "identity.pem"

    @contextmanager
    def lock_for_run(
        self, *, resume: bool, list_nonzero_counters: Callable[[], Collection[str]] = frozenset
    ) -> Iterator[None]:
        """Lock the folder for a run in the `with` block; a new run deletes old logs first.

        Args:
            resume: whether the run continues.
            list_nonzero_counters: returns the names of logs that have counted something, as the
                audit log says; they must not be deleted. It is called once the folder is locked.

        Raises CheckpointError: another process runs here, the party's part is finished, or it was
            started and is not resumed.
        """
        with self._lock_folder():
            nonzero_counters = list_nonzero_counters()
            if self.party_end.exists():
                raise CheckpointError(
                    f"choose another folder: {self.path} holds a party's part of a finished run"
                )
            if not resume:
                self._clear_logs(nonzero_counters)
            yield

    @contextmanager
    def lock_exclusively(self) -> Iterator[None]:
        """Lock the folder in the `with` block, whatever it contains.

        Raises CheckpointError: another process runs here.
        """
        with self._lock_folder():
            yield

    @property
    def has_checkpoint(self) -> bool:
        """Whether the folder has a checkpoint."""
        return bool(self.checkpoints.list_steps())

    def load_identity(self) -> Identity:
        """Return the party's long-term key pair; create it and write its file at first use.

        Raises CheckpointError: the file is no Ed25519 private key.
        """
        if not self._identity_path.exists():
            private = Ed25519PrivateKey.from_private_bytes(fresh_identity().secret_bytes())
            pem = private.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            write_atomically(self._identity_path, pem, private=True)
        try:
            pem = load_bytes(self._identity_path, max_bytes=_MAX_KEY_BYTES)
            key = serialization.load_pem_private_key(pem, password=None)
            if not isinstance(key, Ed25519PrivateKey):
                raise TypeError("a key of another kind")
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise CheckpointError(
                f"{self._identity_path} holds no Ed25519 private key in PEM ({error}); put it "
                "back, or remove it and tell the others the new public identity"
            ) from error
        return Identity.from_secret_bytes(key.private_bytes_raw())

    def require_no_releases(self) -> None:
        """Raise CheckpointError if a log here counts releases, which a new run would forget."""
        # Imported here, since this module would otherwise be in a cycle of imports.
        from secure_apfed.privacy.ledger import holds_releases

        for log in _list_logs(self.path):
            if log.is_file() and not log.is_symlink() and holds_releases(log):
                raise _make_counts_error(log)

    def _clear_logs(self, nonzero_counters: Collection[str]) -> None:
        """Delete the logs before a new run.

        `nonzero_counters`: names of logs that have counted something and must not be deleted.

        Raises CheckpointError: the folder has such a log, a log that counts releases, or a
            checkpoint, so that the run must be resumed.
        """
        if self.has_checkpoint:
            raise CheckpointError(
                f"resume the run (--resume), or choose another folder: {self.path} holds a run "
                "already"
            )
        self.require_no_releases()
        for log in _list_logs(self.path):
            if log.name in nonzero_counters:
                raise _make_counts_error(log)
            try:
                log.unlink()
            except OSError as error:
                raise CheckpointError(
                    f"remove {log}, or choose another folder: it lies in the place of a log and "
                    f"cannot be removed here ({error.strerror})"
                ) from error


def _make_counts_error(log: Path) -> CheckpointError:
    """Return the error for a log that counts releases, while the checkpoint is missing."""
    return CheckpointError(
        f"put the party's newest checkpoint back and resume, or choose another folder: {log} "
        "counts what left its party in an earlier session, and the checkpoint to go on from is "
        "gone; begun anew, the run would forget what it spent"
    )


def can_resume(path: Path, config: Config) -> bool:
    """Return whether the run of this configuration in this folder can be resumed."""
    return PartyFolder(RunFolder(path).get_party_path(config.data.active_name)).has_checkpoint


@lru_cache(maxsize=16)
def _parse_cached_config(text: str, source: str) -> Config:
    """Return the settings in a YAML text; cached, since parsing takes 20 ms and is repeated.

    `source`: name of the file, for errors.
    """
    return load_config_text(text, source=source)


def _encode_json(content: Any) -> bytes:
    """Return the bytes of a file of JSON."""
    return to_json(content, indent=2).encode() + b"\n"


def _digest_file(file: Path) -> str:
    """Return the SHA-256 (hex) of a file."""
    with open_plain(file) as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _require_inner_name(name: str) -> str:
    """Return a relative name if it stays in a run's folder, or in parties/NAME below it.

    The names come from a file, which may come from somebody else.

    Raises ValueError: the name leads elsewhere.
    """
    parts = name.split("/")
    is_in_folder = len(parts) == 1
    is_of_party = len(parts) == 3 and parts[0] == "parties"
    if not (is_in_folder or is_of_party) or "\x00" in name:
        raise ValueError("no name of a file")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError("no name of a file")
    return name


def _list_logs(folder: Path) -> tuple[Path, ...]:
    """Return the existing logs in one party's folder."""
    return tuple(log for pattern in _LOG_PATTERNS for log in sorted(folder.glob(pattern)))


def describe_contract(contract: Contract, signatures: Mapping[str, bytes]) -> dict[str, Any]:
    """Return a contract with its digest and the parties' signatures as JSON values."""
    return {
        "document": contract.model_dump(mode="json"),
        "sha256": contract.digest.hex(),
        "signatures": {name: signature.hex() for name, signature in signatures.items()},
    }


def load_contract(path: Path, document_type: type[ContractT]) -> ContractT:
    """Read a file with the data that `describe_contract` returned, as a `document_type`.

    Raises CheckpointError: the file is missing, of another format, or not of this type.
    """
    # The format is checked first: a file of another format would fail with a less helpful error.
    CONTRACT.parse_format_number(path, load_json(path, dict[str, Any]).get("document"))
    return load_json(path, document_type)


def write_with_checksum(path: Path, content: bytes) -> None:
    """Write a private file that ends with its SHA-256, which detects damage, but not forgery."""
    write_atomically(path, content, hashlib.sha256(content).digest(), private=True)


def make_no_checkpoint_error(path: Path) -> CheckpointError:
    """Return the error for a run that is to be resumed without a checkpoint."""
    return CheckpointError(f"start the run without --resume: there is no checkpoint {path}")


def load_with_checksum(path: Path) -> bytes:
    """Return the content of a file of `write_with_checksum`, without its checksum.

    Raises CheckpointError: the file is missing or damaged.
    """
    if not path.exists():
        raise make_no_checkpoint_error(path)
    stored = load_bytes(path)
    content = stored[:-_DIGEST_BYTES]
    digest = stored[-_DIGEST_BYTES:]
    if len(stored) < _DIGEST_BYTES or hashlib.sha256(content).digest() != digest:
        raise CheckpointError(
            f"restore {path} from a copy, or start the run anew in another folder: the file is "
            f"truncated or altered, its {len(stored)} bytes do not match their checksum"
        )
    return content


class StepFiles:
    """The files of one kind in a folder, one for each of the newest steps: `checkpoint-12.bin`."""

    def __init__(self, folder: Path, kind: str) -> None:
        """Store the folder, and the first part of the files' names (`kind`)."""
        self._folder = folder
        self._kind = kind

    def list_steps(self) -> list[int]:
        """Return the steps that have a file, ascending."""
        steps = [path.stem.removeprefix(f"{self._kind}-") for path in self._list_paths()]
        return sorted(int(step) for step in steps if step.isdecimal())

    def get_path(self, step: int) -> Path:
        """Return the path of this step's file."""
        return self._folder / f"{self._kind}-{step}.bin"

    def load_step(self, step: int) -> bytes:
        """Return the content of this step's file. Raises CheckpointError: missing or damaged."""
        return load_with_checksum(self.get_path(step))

    def write_step(self, step: int, content: bytes) -> None:
        """Write this step's file atomically; delete all other files but that of the step before.

        Files of later steps belong to an interrupted session, whose steps are repeated now.
        """
        write_with_checksum(self.get_path(step), content)
        steps = self.list_steps()
        steps_so_far = steps[: steps.index(step) + 1]
        kept_steps = steps_so_far[-_KEPT_FILE_COUNT:]
        for other_step in steps:
            if other_step not in kept_steps:
                self.get_path(other_step).unlink()

    def clear(self) -> None:
        """Delete the files of all steps, and temporary files of a killed process."""
        for path in (*self._list_paths(), *self._folder.glob(f".{self._kind}-*")):
            path.unlink()

    def _list_paths(self) -> list[Path]:
        """Return the paths of the files of all steps, in any order."""
        return list(self._folder.glob(f"{self._kind}-*.bin"))


def save_tensors(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Return tensors by name as the bytes of a safetensors file, with these texts as metadata.

    Tensors that share memory, such as tied weights, are copied, since the format refuses them.
    """
    separate: dict[str, Tensor] = {}
    addresses = set[int]()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        address = value.untyped_storage().data_ptr()
        separate[name] = value.clone() if address in addresses else value
        addresses.add(address)
    return save(separate, metadata)


def save_scores(
    path: Path, scores: Mapping[str, Scored], *, is_tested: Tensor | None = None
) -> None:
    """Write test predictions to a file.

    `scores`: predictions with true labels, by inference variant or model. `is_tested`: whether each
    test row has a prediction; None: all have, or this is unknown.
    """
    tensors = {} if is_tested is None else {_TESTED: is_tested}
    for name, scored in scores.items():
        tensors[f"{name}/truth"] = torch.tensor(scored.truth)
        tensors[f"{name}/scores"] = torch.tensor(scored.scores)
        if scored.are_counts:
            tensors[f"{name}/counts"] = torch.tensor(True)
    write_atomically(path, save_tensors(tensors), private=True)


def load_scores(
    folder: RunFolder, variant: str, *, threshold: float | None, is_baseline: bool = False
) -> Scored | None:
    """Return the test predictions of one model of a finished run; None: the run stored none.

    Args:
        folder: folder of the run.
        variant: an inference variant, or a local baseline.
        threshold: probability from which the second class is predicted; None: the likeliest class
            is predicted.
        is_baseline: whether `variant` names a local baseline, whose predictions are in another
            file.

    Raises CheckpointError: the file was altered, or has no predictions of this model.
    """
    path = folder.baseline_predictions if is_baseline else folder.test_scores
    if not path.exists():
        return None
    folder.check_digests(path)
    return load_scores_file(path, variant, threshold=threshold)


def load_scores_file(path: Path, variant: str, *, threshold: float | None) -> Scored:
    """Return one model's test predictions from a file of `save_scores`.

    `variant`: the inference variant or model. `threshold`: probability from which the second class
    is predicted; None: the likeliest class is predicted.

    Raises CheckpointError: the file has no predictions of this model.
    """
    try:
        tensors = load(load_bytes(path))
        truth = tensors[f"{variant}/truth"]
        scores = tensors[f"{variant}/scores"]
        # Predicted numbers, or probabilities of a model that diverged (its measures are NaN), are
        # no valid probabilities, so they are not checked as such.
        are_numbers = scores.ndim == 1
        if are_numbers or not scores.isfinite().all():
            return Scored(
                truth=truth.numpy(),
                scores=scores.double().numpy(),
                threshold=None if are_numbers else threshold,
                are_counts=f"{variant}/counts" in tensors,
            )
        return Scored.from_probabilities(truth.numpy(), scores.numpy()).replace_threshold(threshold)
    except (KeyError, OverflowError, SafetensorError, DataError) as error:
        raise CheckpointError(
            f"{path} holds no scores of {variant}: {error}; restore it from a copy, or "
            "remove it to go on without"
        ) from error


def load_tested_rows(folder: RunFolder) -> Tensor | None:
    """Return whether the run's model predicts each of B test rows, (B,); None: not stored.

    Raises CheckpointError: the file of test scores is missing or was altered.
    """
    folder.check_digests(folder.test_scores)
    try:
        return load(load_bytes(folder.test_scores)).get(_TESTED)
    except SafetensorError as error:
        raise CheckpointError(
            f"{folder.test_scores} holds no scores: {error}; restore it from a copy"
        ) from error
