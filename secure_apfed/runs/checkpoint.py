"""Checkpoints: all that a run needs to go on as if nothing had happened, at an epoch's end.

Holds private state of all simulated parties (models, momenta, noise keys), so the file is
readable by its owner only. Random generators need no state (see `secure_apfed.seeds`);
keys of links and sums are not kept: a resumed run is a new session under a new contract.
Layout: msgpack, tensors as safetensors inside, and a SHA-256 of it all at the end.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import safetensors
from safetensors.torch import load, save
from torch import Tensor

from secure_apfed.config import Config
from secure_apfed.data import PartyTable, VerticalData
from secure_apfed.errors import CheckpointError
from secure_apfed.methods import PartyTensors
from secure_apfed.runs.folder import read_sealed, write_sealed

__all__ = ["Checkpoint", "config_digest", "load_tensors", "save_tensors", "table_digests"]

_VERSION = 3


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """State after a whole number of epochs.

    Attributes:
        config: digest of the run's configuration; another one is refused.
        tables: by party, digest of who stands in which row; others are refused.
        epoch, step: the next ones.
        noise_keys: by party; secrets.
        parties: tensors by party; alignment: positions by party.
        ledgers: state by party; transcript: its state.
        seconds: of training so far; contracts: digests (hex) of the sessions so far.
    """

    config: str
    tables: Mapping[str, str]
    epoch: int
    step: int
    noise_keys: Mapping[str, bytes] = field(repr=False)
    parties: PartyTensors = field(repr=False)
    alignment: Mapping[str, Tensor] = field(repr=False)
    ledgers: Mapping[str, Any] = field(repr=False)
    transcript: Mapping[str, Any] = field(repr=False)
    seconds: float
    contracts: tuple[str, ...]

    def write(self, path: Path) -> None:
        """Replace the checkpoint at `path` in one step."""
        content = {
            "version": _VERSION,
            **{name: getattr(self, name) for name in ("config", "epoch", "step", "seconds")},
            "tables": dict(self.tables),
            "noise_keys": dict(self.noise_keys),
            "parties": {name: save_tensors(tensors) for name, tensors in self.parties.items()},
            "alignment": save_tensors(self.alignment),
            "ledgers": dict(self.ledgers),
            "transcript": dict(self.transcript),
            "contracts": list(self.contracts),
        }
        write_sealed(path, msgpack.packb(content))

    @classmethod
    def read(cls, path: Path, config: Config) -> "Checkpoint":
        """Read the checkpoint of a run with this configuration.

        Raises:
            CheckpointError: missing, truncated, altered, or of another run or version.
        """
        try:
            content = msgpack.unpackb(read_sealed(path), strict_map_key=False)
            if content.pop("version") != _VERSION:
                raise CheckpointError(f"{path} was written by another version of this library")
            content["parties"] = {
                name: load_tensors(body) for name, body in content["parties"].items()
            }
            content["alignment"] = load_tensors(content["alignment"])
            content["contracts"] = tuple(content["contracts"])
            checkpoint = cls(**content)
        except (ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path} is not a checkpoint of a run: {error}") from error
        if checkpoint.config != config_digest(config):
            raise CheckpointError(
                f"{path} belongs to a run with another configuration; resume with the "
                "config.yaml that lies beside it"
            )
        return checkpoint

    def check_tables(self, data: VerticalData) -> None:
        """Refuse to go on with other people, or the same in other places.

        Alignment, ledgers and frozen rows speak of positions: in another table they would be
        of other people, whose releases nobody would have counted.

        Raises:
            CheckpointError: names the party.
        """
        for name, digest in table_digests(data).items():
            if self.tables.get(name) != digest:
                raise CheckpointError(
                    f"the table of {name} is not the one that the run began with: its IDs, their "
                    "order, its labels or the split into training and test rows are others, and "
                    "the run counts by positions; put the table back, or begin a new run"
                )


def table_digests(data: VerticalData) -> dict[str, str]:
    """SHA-256 (hex) by party of its IDs in order and, at the active, of labels and split.

    Features are left out: they may differ in the last bits on another machine, and steps that
    are played again with others are charged again.
    """
    split = save_tensors({"train": data.train_rows, "test": data.test_rows})
    return {table.name: _digest_of(table, split) for table in data.tables}


def _digest_of(table: PartyTable, split: bytes) -> str:
    labels = [] if table.labels is None else [table.labels.numpy().astype("<i8").tobytes(), split]
    return hashlib.sha256(msgpack.packb([table.ids, *labels])).hexdigest()


def config_digest(config: Config) -> str:
    """SHA-256 (hex) of everything that the run's result depends on."""
    # What may be other when the run is resumed is left out.
    content = config.model_dump_json(exclude={"attacks": True, "rules": {"refused_sums"}})
    return hashlib.sha256(content.encode()).hexdigest()


def save_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors by name as safetensors."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(plain)


def load_tensors(body: bytes) -> dict[str, Tensor]:
    """Tensors by name."""
    return load(body)
