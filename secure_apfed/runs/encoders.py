"""The passives' encoders after training, for attacks by an adversary that is told a network.

Kept by: the experimenter, who plays all parties; no real party holds another's network. In the
run folder they lie in a file that its owner alone can read.
"""

import copy
from collections.abc import Mapping

import safetensors
from safetensors.torch import load
from torch import Tensor, nn

from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.errors import CheckpointError
from secure_apfed.files import read_bytes, write_atomically
from secure_apfed.learning.descent import prefixed, without_prefix
from secure_apfed.methods import METHODS, Session
from secure_apfed.runs.folder import RunFolder, save_tensors

__all__ = ["encoders_of", "load_encoders", "save_encoders"]


def encoders_of(session: Session) -> Mapping[str, nn.Module]:
    """Copies on the CPU of the networks whose output passives send; empty where none do."""
    return {name: copy.deepcopy(one).cpu().eval() for name, one in session.networks().items()}


def save_encoders(folder: RunFolder, encoders: Mapping[str, nn.Module]) -> None:
    """Write them, if there are any."""
    if encoders:
        state: dict[str, Tensor] = {}
        for name, encoder in encoders.items():
            state |= prefixed(name, encoder.state_dict())
        write_atomically(folder.encoders, save_tensors(state), private=True)


def load_encoders(folder: RunFolder, config: Config, data: VerticalData) -> Mapping[str, nn.Module]:
    """Return what `save_encoders` wrote; empty where it wrote nothing.

    Raises:
        CheckpointError: other tensors than those of the run.
    """
    if not folder.encoders.exists():
        return {}
    try:
        tensors = load(read_bytes(folder.encoders))
        encoders = {}
        for table in data.passives:
            features = tuple(table.features.shape[1:])
            encoder = METHODS[config.method.name].sent_network(config, table.name, features)
            state = without_prefix(table.name, tensors)
            encoder.to(next(iter(state.values())).dtype).load_state_dict(state)
            encoders[table.name] = encoder.eval()
    except (RuntimeError, StopIteration, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{folder.encoders} does not hold the encoders: {error}") from error
    return encoders
