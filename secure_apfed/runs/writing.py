"""Writing a run folder: configuration, contract, versions, metrics, model, transcript, result."""

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgpack
import torch
from safetensors.torch import save
from torch import nn

from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings
from secure_apfed.data import OwnData
from secure_apfed.errors import CheckpointError
from secure_apfed.files import make_private, own_subfolder
from secure_apfed.learning.compute import find_device
from secure_apfed.learning.networks import ActiveNetworks
from secure_apfed.methods import Session
from secure_apfed.privacy import PrivacySpent
from secure_apfed.runs.checkpoint import Steps, save_tensors
from secure_apfed.runs.encoders import save_encoders
from secure_apfed.runs.folder import RunFolder, no_checkpoint, remove_torn, signed, write_atomically
from secure_apfed.runs.judging import Judged
from secure_apfed.runs.party_folder import PartyFolder, only_here
from secure_apfed.runs.record import (
    AgreementOf,
    Attendance,
    Contributions,
    Outcome,
    Privacy,
    write_outcome,
)
from secure_apfed.runs.recording import Recording
from secure_apfed.runs.scored_rows import keep_scored
from secure_apfed.settings.training import ModelSettings

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["RunWriter", "versions"]

_CARD_VERSION = 1

_PACKAGES = (
    "secure-apfed", "torch", "numpy", "tenseal", "cryptography", "opacus", "scikit-learn",
)  # fmt: skip


def _board(folder: Path, epoch: int) -> "SummaryWriter | None":
    """Where curves go, from this epoch on; None without TensorBoard, an optional extra."""
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(own_subfolder(folder)), purge_step=epoch)


def versions(device: torch.device) -> dict[str, str]:
    """Versions of what a run's numbers depend on, the machine, and where there it computes."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {
        "python": platform.python_version(),
        **found,
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(device),
        "gpu": gpu,
    }


class RunWriter:
    """Writes one run's folder while it runs.

    Args:
        folder: of the run, or of the active where it runs apart from the others.
        config: of the run.
        apart: whether it does.
    """

    def __init__(self, folder: RunFolder, config: Config, *, apart: bool = False) -> None:
        self.folder, self._config, self._apart = folder, config, apart
        self._board: SummaryWriter | None = None

    @classmethod
    @contextmanager
    def open(cls, path: Path | None, config: Config, *, resume: bool) -> Iterator[Self | None]:
        """Hold the folder for one run; None where nothing is to be written.

        Raises:
            CheckpointError: nothing to resume from, a run lies there already, another
                process runs there, or others may read what lies there.
        """
        if path is None:
            if resume:
                raise CheckpointError("a run without a folder has no checkpoint to resume from")
            yield None
            return
        folder = RunFolder(path)
        active = PartyFolder(folder.party(config.data.active_name))
        if resume:
            _refuse_nothing_to_resume(folder, active)
        make_private(path)
        with only_here(path):
            remove_torn(path)
            if not resume:
                _clear(folder, active)
            own_subfolder(folder.parties)
            yield cls(folder, config)

    def begin(self, session: Session, contracts: Sequence[str], *, epoch: int) -> None:
        """Write what is known before training."""
        folder, config = self.folder, self._config
        write_atomically(folder.config, dump_settings(config).encode())
        folder.write_json(
            folder.contract,
            {**signed(session.contract, session.signatures), "sessions": list(contracts)},
        )
        folder.write_json(
            folder.seeds,
            {
                "seed": config.seed,
                "parties": config.party_seeds,
                "noise": config.guard.noise,
            },
        )
        folder.write_json(folder.versions, versions(find_device(config.train.device)))
        folder.keep_metrics(epoch)
        self._board = _board(folder.tensorboard, epoch + 1)

    def record(self, record: Mapping[str, Any]) -> None:
        """Add one epoch to the metrics, and to the TensorBoard file if there is one."""
        self.folder.append_metrics(record)
        if self._board is None:
            return
        scalars = {**record, **{f"accuracy/{k}": v for k, v in (record["accuracy"] or {}).items()}}
        for variant, values in (record["measures"] or {}).items():
            scalars |= {f"{name}/{variant}": value for name, value in values.items()}
        for name, value in scalars.items():
            if isinstance(value, int | float) and name != "epoch":
                self._board.add_scalar(name, value, record["epoch"])

    def finish(
        self,
        session: Session,
        *,
        data: OwnData,
        judged: Judged,
        privacy: PrivacySpent,
        guarantee: str,
        seconds: float,
    ) -> None:
        """Write the results; `result.json` comes last and marks the run as finished."""
        folder, transcript = self.folder, session.transcript
        if self._board is not None:
            self._board.close()
        folder.write_json(folder.flows, [asdict(flow) for flow in transcript.flows])
        aligned = session.alignment.get(session.active)
        outcome = Outcome(
            method=self._config.method.name,
            **judged.told,
            wire_bytes=transcript.wire_bytes,
            privacy=Privacy.of(privacy),
            contributions={
                passive: Contributions.model_validate(account)
                for passive, account in session.contributed.items()
            },
            seconds=seconds,
            aligned_rows=0 if aligned is None else len(aligned),
            train_rows=len(data.train_rows),
            labelled_rows=len(data.labelled_rows),
            test_rows=len(data.test_rows),
            sum=session.secure_sum,
            agreement=_agreement_in(session),
            attendance=Attendance.model_validate(session.attendance()),
            guarantee=guarantee,
            apart=self._apart,
        )
        card = self._card(session, data, outcome, judged)
        keep_scored(folder, judged.said)
        _save_model(folder, session.learner.solo(), card, self._config.model)
        write_outcome(folder, outcome)

    def _card(
        self, session: Session, data: OwnData, outcome: Outcome, judged: Judged
    ) -> dict[str, Any]:
        """What there is to know of the model."""
        privacy = outcome.privacy
        return {
            "method": self._config.method.name,
            "run": self._config.name,
            "dataset": self._config.data.dataset,
            "party": data.table.name,
            "task": self._config.task,
            "classes": list(data.classes),
            "targets": None if data.targets is None else data.targets.model_dump(),
            "encoding": data.table.encoding.model_dump(mode="json"),
            "accuracy": dict(outcome.accuracy),
            "measures": outcome.measures,
            "threshold": outcome.threshold,
            "scores_in_training":
                None if judged.ranges is None else judged.ranges.model_dump(mode="json"),
            "columns_in_training": judged.extremes,
            "guarantee": outcome.guarantee,
            "epsilon": {"representations": privacy.epsilon_x, "labels": privacy.epsilon_y,
                        "model": privacy.epsilon_model, "delta": privacy.delta,
                        "releases": privacy.releases},
            "contract": session.contract.digest.hex(),
        }  # fmt: skip

    def cross_check(self, accountants: Mapping[str, float | str]) -> None:
        """Write what other accountants say of epsilon_x; the run is finished already."""
        if accountants:
            self.folder.write_json(self.folder.accountants, dict(accountants))

    def keep(self, recording: Recording) -> None:
        """Write what only the experimenter holds, for attacks on the finished run."""
        folder, transcript = self.folder, msgpack.packb(recording.transcript.state_dict())
        save_encoders(folder, recording.encoders)
        write_atomically(folder.alignment, save_tensors(recording.alignment), private=True)
        write_atomically(folder.transcript, transcript, private=True)


def _refuse_nothing_to_resume(folder: RunFolder, active: PartyFolder) -> None:
    led = RunFolder(active.path).result.exists()  # apart from the others, and not gathered yet
    if active.steps.found() or (led and not folder.result.exists()):
        return
    if folder.result.exists():
        raise CheckpointError(f"{folder.path} holds a finished run; there is nothing to resume")
    raise no_checkpoint(active.path)


def _clear(folder: RunFolder, active: PartyFolder) -> None:
    """Make room for a new run; a run that trained has a checkpoint of the active, or a result."""
    if active.steps.found():
        raise CheckpointError(
            f"{folder.path} holds a run already; resume it, or choose another folder"
        )
    if folder.result.exists():
        raise CheckpointError(
            f"{folder.path} holds a run already, which is finished; choose another folder"
        )
    found = folder.parties.iterdir() if folder.parties.is_dir() else ()
    parties = [PartyFolder(party) for party in found if not party.is_symlink()]
    for party in parties:
        party.require_no_releases()
    Steps(folder.path, "recording").clear()
    for party in parties:
        party.steps.clear()  # of a start that was broken off before training


def _agreement_in(session: Session) -> dict[str, AgreementOf]:
    """How far votes agree, where each passive's are read."""
    agreement = session.learner.agreement
    return {name: AgreementOf.model_validate(asdict(one)) for name, one in agreement.items()}


def _save_model(
    folder: RunFolder, networks: ActiveNetworks | None, card: dict[str, Any], model: ModelSettings
) -> None:
    """Write the parameters and the card; without networks, a card that says why."""
    card = {"card_version": _CARD_VERSION, "model": model.model_dump(mode="json"), **card}
    card["predicts_alone"] = networks is not None
    if networks is not None:
        state = nn.ModuleDict({"encoder": networks.encoder, "head": networks.head}).state_dict()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        write_atomically(folder.model, save(tensors))
    folder.write_json(folder.card, card)
