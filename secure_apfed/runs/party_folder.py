"""One party's own folder: its identity, checkpoints, write-ahead logs, and how its part ended.

Run by: each party, alone in its folder. Nothing in it is another party's but what is public (the
contract, public identities). Where one process plays all parties, the folders lie below the
run's, `parties/NAME`, and each is used as if it were on a machine of its own.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from filelock import FileLock, Timeout
from torch import Tensor

from apfed_protocols.seal import Identity, fresh_identity
from secure_apfed.audit_log import FILE_NAME, AuditLog
from secure_apfed.config import Config
from secure_apfed.contract import Contract
from secure_apfed.data import OwnData
from secure_apfed.errors import CheckpointError
from secure_apfed.files import make_private, open_regular, read_bytes, read_json
from secure_apfed.methods import PartyState, Role, Secrets, fresh_secrets
from secure_apfed.methods.alignment import forget_alignment
from secure_apfed.privacy import PrivacyLedger
from secure_apfed.privacy.release_log import holds_releases
from secure_apfed.runs.checkpoint import Checkpoints, Steps, save_tensors
from secure_apfed.runs.folder import (
    RunFolder,
    logs_in,
    readable,
    remove_torn,
    signed,
    write_atomically,
)
from secure_apfed.runs.record import Contributions, Privacy, Written
from secure_apfed.runs.spending import ReleaseMeter, worst_of

__all__ = ["PartyEnd", "PartyFolder", "PartyKeeper", "only_here", "resumable"]

_KEY_BYTES_AT_MOST = 4096
_BY_POSITION = ("allowance.", "guard.", "pseudo_labels.")


class PartyEnd(Written):
    """How a party's part of a run ended.

    Attributes:
        party: its name; contract: digest of its last session's, hex.
        model_sha256: of its parameters, hex.
        privacy: what it spent on representations; null where it sent none.
        contributions: what its noisy contributions to sums cost; null where there were none.
    """

    party: str
    contract: str
    model_sha256: str
    privacy: Privacy | None
    contributions: Contributions | None


class PartyFolder:
    """Paths of one party's files.

    Attributes:
        path: of the folder; contract: of its last session, with everybody's signature; ended:
            written when its part is over; audit: its audit log, where it runs apart.
        steps: its checkpoints.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ended, self.contract = path / "ended.json", path / "contract.json"
        self.audit = path / FILE_NAME
        self.steps = Steps(path, "checkpoint")
        self._key = path / "identity.pem"

    @classmethod
    @contextmanager
    def open(cls, path: Path, *, resume: bool) -> Iterator[Self]:
        """Hold the folder for one session.

        Raises:
            CheckpointError: a run lies there that is not resumed, or is over, or whose checkpoints
                are gone; another process is in it; or others may read what lies there.
        """
        folder = cls(path)
        make_private(path)
        with only_here(path):
            if folder.ended.exists():
                raise CheckpointError(
                    f"{path} holds a party's part of a finished run; choose another folder"
                )
            remove_torn(path)
            if not resume:
                folder._clear()
            yield folder

    @property
    def holds_steps(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return bool(self.steps.found())

    def identity(self) -> Identity:
        """The party's long-term key pair; made where there is none yet.

        Raises:
            CheckpointError: the file holds no Ed25519 private key.
        """
        if not self._key.exists():
            private = Ed25519PrivateKey.from_private_bytes(fresh_identity().secret_bytes())
            pem = private.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            write_atomically(self._key, pem, private=True)
        try:
            pem = read_bytes(self._key, most=_KEY_BYTES_AT_MOST)
            key = serialization.load_pem_private_key(pem, password=None)
            if not isinstance(key, Ed25519PrivateKey):
                raise TypeError("a key of another kind")
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise CheckpointError(
                f"{self._key} holds no Ed25519 private key in PEM ({error}); put it back, or "
                "remove it and tell the others the new public identity"
            ) from error
        return Identity.restored(key.private_bytes_raw())

    def read_end(self) -> PartyEnd:
        """How its part ended.

        Raises:
            CheckpointError: missing, or not as this version writes it.
        """
        return read_json(self.ended, PartyEnd)

    def require_no_releases(self) -> None:
        """Refuse to forget what was released.

        Raises:
            CheckpointError: a log holds more than its beginning.
        """
        for log in logs_in(self.path):
            if log.is_file() and not log.is_symlink() and holds_releases(log):
                raise CheckpointError(
                    f"{log} counts what left its party in an earlier session, and the checkpoint "
                    "to go on from is gone; put it back and resume, or choose another folder: "
                    "begun anew, the run would forget what it spent"
                )

    def _clear(self) -> None:
        """Make room for a new part; a party that was asked anything has a checkpoint."""
        if self.steps.found():
            raise CheckpointError(
                f"{self.path} holds a run already; resume it, or choose another folder"
            )
        self.require_no_releases()
        for log in logs_in(self.path):
            try:
                log.unlink()
            except OSError as error:
                raise CheckpointError(
                    f"{log} lies in the place of a log and cannot be removed ({error.strerror}); "
                    "remove it, or choose another folder"
                ) from error


def resumable(path: Path, config: Config) -> bool:
    """Whether the run of this configuration in this folder can be gone on with."""
    return bool(PartyFolder(RunFolder(path).party(config.data.active_name)).steps.found())


class PartyKeeper:
    """A party in its folder; see `secure_apfed.methods.Keeper`.

    Args:
        folder: of the party, held.
        name: of the party; config: of the run; data: what the party holds of it.

    Attributes:
        secrets: keys and seed: fresh, or as at its newest checkpoint.
        before_save: told of the step whose state is about to be saved.
        meter: of what it releases in this session.
        audit: notes what it agrees to, and is on the disk with each checkpoint; None: nothing.

    Raises:
        CheckpointError: a checkpoint that is damaged, or of another run or table.
    """

    def __init__(
        self, folder: PartyFolder, name: str, config: Config, data: OwnData | None
    ) -> None:
        self._folder, self._name = folder, name
        identity = folder.identity()
        fresh = fresh_secrets(config, name, identity=identity, keeper=self, logs=folder.path)
        self._kept = (
            Checkpoints(folder.steps, name, config, data, identity=identity.public)
            if data
            else None
        )
        self.secrets: Secrets = self._kept.secrets(fresh) if self._kept else fresh
        self.before_save: Callable[[int], None] = lambda step: None
        self.meter = ReleaseMeter()
        self.audit: AuditLog | None = None

    def opened(self, name: str, ledger: PrivacyLedger) -> None:
        """See `Keeper`."""
        self.meter.add(name, ledger)

    def agreed(self, contract: Contract, signatures: Mapping[str, bytes]) -> None:
        """See `Keeper`."""
        if self.audit:
            self.audit.agreed(contract)
        write_atomically(self._folder.contract, readable(signed(contract, signatures)))

    def latest(self, until: int | None = None) -> PartyState | None:
        """See `Keeper`.

        Raises:
            CheckpointError: truncated, altered, or of another run, table or version.
        """
        return self._kept.latest(until) if self._kept else None

    def steps(self) -> tuple[int, ...]:
        """See `Keeper`."""
        return tuple(self._folder.steps.found())

    def save(self, state: PartyState) -> None:
        """See `Keeper`; a party without data has nothing to go on from."""
        self.before_save(state.step)
        if self.audit:
            self.audit.sync()
        if self._kept:
            self._kept.save(state)
        if state.step > 0:  # all others are as far
            forget_alignment(self._folder.path)

    def ended(self, contract: Contract, role: Role) -> None:
        """See `Keeper`; the secrets of the checkpoints should not outlive the run."""
        spent = worst_of(one for one in role.ledgers.values() if one is not role.contributions)
        end = PartyEnd(
            party=self._name,
            contract=contract.digest.hex(),
            model_sha256=_model_digest(role.tensors()),
            privacy=Privacy.of(spent) if spent else None,
            contributions=Contributions.model_validate(role.contributions.account())
            if role.contributions
            else None,
        )
        write_atomically(self._folder.ended, readable(end.model_dump(mode="python")))
        self._folder.steps.clear()
        forget_alignment(self._folder.path)


def _model_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) of a role's parameters, without what counts by position of the alignment,
    whose order is another one in each run.
    """
    model = {name: one for name, one in tensors.items() if not name.startswith(_BY_POSITION)}
    return hashlib.sha256(save_tensors(model)).hexdigest()


@contextmanager
def only_here(folder: Path) -> Iterator[None]:
    """Keep other processes out of the folder.

    Raises:
        CheckpointError: another process is in it, or no regular file lies in the lock's place.
    """
    path = folder / ".lock"
    os.close(open_regular(path, create=True))
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise CheckpointError(
            f"another process is running in {folder}; wait for it, or choose another folder"
        ) from None
    try:
        yield
    finally:
        lock.release()
