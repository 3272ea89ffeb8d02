"""Checkpoints: all that one party needs to go on as if nothing had happened, at an epoch's end.

Run by: each party in its own folder; nobody's checkpoint holds anything of another's. It has
private state (model, momenta, noise key, seed), so its owner alone reads it. Random generators need
no state (see `secure_apfed.seeds`); keys of links and sums are not kept: a resumed run is a new
session under a new contract. The active saves last, so whatever its newest checkpoint is, the
others hold one of the same step; they keep the one before, too.
Layout: msgpack, tensors as safetensors inside, and a SHA-256 of it all at the end.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import safetensors
from safetensors.torch import load, save
from torch import Tensor

from secure_apfed.config import Config
from secure_apfed.data import OwnData
from secure_apfed.errors import CheckpointError
from secure_apfed.methods import PartyState, Secrets
from secure_apfed.runs.folder import read_sealed, write_sealed

__all__ = [
    "Checkpoints",
    "Steps",
    "config_digest",
    "load_tensors",
    "save_tensors",
    "table_digest",
]

_VERSION = 4
_KEPT = 2


class Steps:
    """The newest files of one kind in a folder, one a step: `checkpoint-12.bin`."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind

    def found(self) -> list[int]:
        """Steps of which there is a file, ascending."""
        steps = [path.stem.removeprefix(f"{self._kind}-") for path in self._paths()]
        return sorted(int(step) for step in steps if step.isdecimal())

    def path(self, step: int) -> Path:
        """Of the file of this step."""
        return self._folder / f"{self._kind}-{step}.bin"

    def read(self, step: int) -> bytes:
        """What `write` wrote; see `read_sealed`."""
        return read_sealed(self.path(step))

    def write(self, step: int, content: bytes) -> None:
        """Write this step's in one move; then let go of all but the newest two, and of later ones.

        Later ones are of a session that was broken off and is played again.
        """
        write_sealed(self.path(step), content)
        found = self.found()
        at = found.index(step)
        for old in (*found[: max(0, at + 1 - _KEPT)], *found[at + 1 :]):
            self.path(old).unlink()

    def clear(self) -> None:
        """Remove all of them, and what a process left that was killed while it wrote one."""
        for path in (*self._paths(), *self._folder.glob(f".{self._kind}-*")):
            path.unlink()

    def _paths(self) -> list[Path]:
        return list(self._folder.glob(f"{self._kind}-*.bin"))


class Checkpoints:
    """One party's checkpoints, with its secrets.

    Args:
        steps: its files.
        name: of the party; config, data: of the run, its own.
        identity: its public key.
    """

    def __init__(
        self, steps: Steps, name: str, config: Config, data: OwnData, *, identity: bytes
    ) -> None:
        self.steps, self._identity = steps, identity
        self._name = name
        self._of_config, self._of_table = config_digest(config), table_digest(data)
        self._secrets: tuple[bytes, int] | None = None

    def secrets(self, fresh: Secrets) -> Secrets:
        """The same with the secrets of the newest checkpoint, where there is one.

        Raises: as `latest`.
        """
        content = self._content(None)
        if content:
            fresh = replace(fresh, noise_key=content["noise_key"], seed=content["seed"])
        self._secrets = fresh.noise_key, fresh.seed
        return fresh

    def latest(self, until: int | None = None) -> PartyState | None:
        """The newest state, or the newest that is not after this step; None: there is none.

        Raises:
            CheckpointError: truncated, altered, or of another run, table or version.
        """
        content = self._content(until)
        if content is None:
            return None
        return PartyState(
            run=content["run"],
            step=content["step"],
            rows=content["rows"],
            tensors=content["tensors"],
            ledgers=content["ledgers"],
            notes=content["notes"],
        )

    def save(self, state: PartyState) -> None:
        """Keep this state beside the party's secrets."""
        assert self._secrets is not None
        noise_key, seed = self._secrets
        content = {
            "version": _VERSION,
            "party": self._name,
            "identity": self._identity,
            "run": state.run,
            "config": self._of_config,
            "table": self._of_table,
            "noise_key": noise_key,
            "seed": seed,
            "step": state.step,
            "rows": save_tensors({"rows": state.rows}),
            "tensors": save_tensors(state.tensors),
            "ledgers": {name: save_tensors(one) for name, one in state.ledgers.items()},
            "notes": dict(state.notes),
        }
        self.steps.write(state.step, msgpack.packb(content))

    def _content(self, until: int | None) -> dict[str, Any] | None:
        """The newest file that is not after this step, read; None where there is none."""
        found = [step for step in self.steps.found() if until is None or step <= until]
        if not found:
            return None
        path = self.steps.path(found[-1])
        try:
            content = msgpack.unpackb(read_sealed(path), strict_map_key=False)
            if content["version"] != _VERSION:
                raise CheckpointError(f"{path} was written by another version of this library")
            content["rows"] = load_tensors(content["rows"])["rows"]
            content["tensors"] = load_tensors(content["tensors"])
            content["ledgers"] = {name: load(one) for name, one in content["ledgers"].items()}
            for name in ("noise_key", "seed", "step", "run", "notes"):
                content[name]
            self._check(path, content)
        except (ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path} is not a checkpoint of a run: {error}") from error
        checked: dict[str, Any] = content
        return checked

    def _check(self, path: Path, content: Mapping[str, Any]) -> None:
        """Refuse another party's, and to go on with other settings or people, or these elsewhere.

        Alignment, ledgers and frozen rows speak of positions: in another table they would be
        of other people, whose releases nobody would have counted.
        """
        if (content["party"], content["identity"]) != (self._name, self._identity):
            raise CheckpointError(
                f"{path} is of {content['party']!r} with another identity than that of "
                f"{self._name} here; put the party's own checkpoint and identity.pem back"
            )
        if content["config"] != self._of_config:
            raise CheckpointError(
                f"{path} belongs to a run with another configuration; resume with the "
                "config.yaml of that run"
            )
        if content["table"] != self._of_table:
            raise CheckpointError(
                f"the table of {self._name} is not the one that the run began with: its IDs, their "
                "order, its labels or the split into training and test rows are others, and "
                "the run counts by positions; put the table back, or begin a new run"
            )


def table_digest(data: OwnData) -> str:
    """SHA-256 (hex) of a party's IDs in order and, at the active, of labels and split.

    Features are left out: they may differ in the last bits on another machine, and steps that
    are played again with others are charged again.
    """
    labels: list[bytes] = []
    if data.table.labels is not None:
        split = {"train": data.train_rows, "test": data.test_rows}
        if data.labelled is not None:
            split["labelled"] = data.labelled
        kind = "<f4" if data.targets else "<i8"
        labels = [data.table.labels.numpy().astype(kind).tobytes(), save_tensors(split)]
    if data.targets is not None:
        labels.append(data.targets.model_dump_json().encode())
    return hashlib.sha256(msgpack.packb([data.table.ids, *labels])).hexdigest()


def config_digest(config: Config) -> str:
    """SHA-256 (hex) of everything that the run's result depends on."""
    # What may be other when the run is resumed is left out.
    other: dict[str, bool | dict[str, bool]] = {
        "attacks": True, "tradeoff": True, "checkpoint_every": True,
        "rules": {"refused_sums": True, "patience_s": True, "restarts": True},
    }  # fmt: skip
    content = config.model_dump_json(exclude=other)
    return hashlib.sha256(content.encode()).hexdigest()


def save_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors by name as safetensors."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(plain)


def load_tensors(body: bytes) -> dict[str, Tensor]:
    """Tensors by name."""
    return load(body)
