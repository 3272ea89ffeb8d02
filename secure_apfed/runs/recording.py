"""What an experimenter holds after a run: everything, for attacks and reports. Not a party."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
from safetensors import SafetensorError
from torch import Tensor, nn

from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Transcript
from secure_apfed.files import read_bytes
from secure_apfed.methods import Session
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.keeper import load_tensors
from secure_apfed.runs.outcome import load_encoders
from secure_apfed.runs.solo import load_model

__all__ = ["Recording", "load_recording", "no_recording"]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A finished run.

    Attributes:
        alignment: by party, positions in its own table; position k is the same person at
            every party. Empty where nothing was aligned.
        transcript: every flow, and the payloads that were kept.
        model: the active's, which predicts alone, features -> class scores, on the CPU; None
            where the method has none.
        encoders: passive -> its network, where passives send or add representations.
    """

    config: Config
    data: VerticalData
    alignment: Mapping[str, Tensor]
    transcript: Transcript
    model: nn.Module | None = None
    encoders: Mapping[str, nn.Module] = field(default_factory=dict)

    @classmethod
    def so_far(cls, config: Config, data: VerticalData, session: Session) -> "Recording":
        """Of a session that goes on, without its networks."""
        return cls(
            config=config, data=data, alignment=session.alignment, transcript=session.transcript
        )


def load_recording(path: Path, *, data: VerticalData | None = None) -> Recording:
    """Load a finished run from its folder; the data is loaded anew from its configuration.

    Raises:
        CheckpointError: no finished run there, or a file that cannot be read as this version
            writes it.
        ModelError: the same of a model.
        DataError: the data is not there any more.
    """
    folder = RunFolder(path)
    if not folder.result.exists():
        raise CheckpointError(f"{path} holds no finished run: {folder.result.name} is missing")
    folder.check()
    config = folder.load_config()
    if not folder.transcript.exists():
        raise no_recording(path)
    transcript = Transcript(config.transcript)
    try:
        transcript.load_state_dict(
            msgpack.unpackb(read_bytes(folder.transcript), strict_map_key=False)
        )
        alignment = load_tensors(read_bytes(folder.alignment))
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError
    ) as error:  # fmt: skip
        raise CheckpointError(
            f"{path}: {folder.transcript.name} or {folder.alignment.name} cannot be read as this "
            f"version writes them ({error}); restore them from a copy"
        ) from error
    data = data or load_data(config.data, seed=config.seed)
    return Recording(
        config=config,
        data=data,
        alignment=alignment,
        transcript=transcript,
        model=load_model(path).network if folder.model.exists() else None,
        encoders=load_encoders(folder, config, data),
    )


def no_recording(path: Path | None) -> CheckpointError:
    """What to raise where an experimenter's record is asked for and there is none."""
    return CheckpointError(
        f"{path or 'this run'} has no record of what all parties sent: each ran in a process of "
        "its own, and none holds it; run it with --transport memory to mount attacks"
    )
