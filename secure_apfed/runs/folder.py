"""The run folder: where everything of a run lies, written so that a killed process harms nothing.

Every file is written beside its place and moved there in one step. The folder is its owner's
alone: labels, models and ledgers lie in it, so no other local user may enter.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from secure_apfed.config import Config
from secure_apfed.config.file import load_config_text
from secure_apfed.contract import Contract
from secure_apfed.errors import CheckpointError, DataError
from secure_apfed.files import (
    open_plain,
    open_regular,
    read_bytes,
    read_text,
    to_json,
    write_atomically,
)
from secure_apfed.measures import Scored
from secure_apfed.names import own_file

__all__ = [
    "RunFolder",
    "Steps",
    "keep_scored",
    "load_tensors",
    "logs_in",
    "no_checkpoint",
    "read_scored",
    "read_sealed",
    "readable",
    "remove_torn",
    "save_tensors",
    "signed",
    "write_atomically",
    "write_sealed",
]

_DIGEST_BYTES = 32
_KEPT = 2
# Names under which `write_atomically` writes.
_TORN = re.compile(
    r"\.([\w-]+\.(bin|json|jsonl|msgpack|pem|safetensors|yaml)|SHA256SUMS)\.[a-z0-9_]{8}"
)


class RunFolder:
    """Paths of one run's files, and their plain readers and writers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.contract = path / "contract.json"
        self.seeds = path / "seeds.json"
        self.versions = path / "versions.json"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.model = path / "model.safetensors"
        self.card = path / "model.json"
        self.encoders = path / "encoders.safetensors"
        self.alignment = path / "alignment.safetensors"
        self.transcript = path / "transcript.msgpack"
        self.flows = path / "transcript.json"
        self.scored = path / "test-scores.safetensors"
        self.result = path / "result.json"
        self.solo = path / "solo.json"
        self.accountants = path / "accountants.json"
        self.digests = path / "SHA256SUMS"
        self.parties = path / "parties"

    def party(self, name: str) -> Path:
        """The folder of one party, where all parties' lie below this one."""
        return own_file(self.parties, name)

    def write_json(self, path: Path, content: Any) -> None:
        """Write JSON that people can read."""
        write_atomically(path, readable(content))

    def load_config(self) -> Config:
        """Read the configuration.

        Raises:
            CheckpointError: missing, too large, or no text.
            ConfigError: no configuration.
        """
        return _config_of(read_text(self.config), str(self.config))

    def finish(self, result: Mapping[str, Any]) -> None:
        """Note digests of what the run wrote, then write `result.json`: the run is finished."""
        content = readable(result)
        noted = {self._name(file): _digest(file) for file in self._written() if file.exists()}
        noted[self.result.name] = hashlib.sha256(content).hexdigest()
        lines = [f"{digest}  {name}\n" for name, digest in noted.items()]
        write_atomically(self.digests, "".join(lines).encode())
        write_atomically(self.result, content)

    def check(self, *files: Path) -> None:
        """Refuse files that are not as the run left them; all that it wrote unless given.

        What the run did not write is not checked, nor a folder without digests.

        Raises:
            CheckpointError: a file is missing or altered, or the digests cannot be read.
        """
        if not self.digests.exists():
            return
        try:
            lines = read_text(self.digests).splitlines()
            noted = {_inside(name): digest for digest, name in (line.split("  ") for line in lines)}
        except ValueError:
            raise CheckpointError(
                f"{self.digests} holds other lines than sha256sum writes; restore it "
                "from a copy, or remove it to go on without this check"
            ) from None
        for name in map(self._name, files) if files else noted:
            if name in noted and _digest(self.path / name) != noted[name]:
                raise CheckpointError(
                    f"{self.path / name} is not as the run left it: its SHA-256 is not the one in "
                    f"{self.digests.name}; restore it from a copy, or, if you changed it on "
                    f"purpose, put the output of `sha256sum {name}` there"
                )

    def _name(self, file: Path) -> str:
        return file.relative_to(self.path).as_posix()

    def _written(self) -> tuple[Path, ...]:
        """What a run writes before its result, where it writes it at all."""
        return (
            self.config, self.contract, self.seeds, self.versions, self.metrics, self.model,
            self.card, self.encoders, self.alignment, self.transcript, self.flows, self.scored,
            *self.logs(),
        )  # fmt: skip

    def logs(self) -> tuple[Path, ...]:
        """The logs of all parties whose folders lie here, or of the one whose folder this is."""
        below = sorted(self.parties.iterdir()) if self.parties.is_dir() else []
        return tuple(log for folder in (self.path, *below) for log in logs_in(folder))

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one line to the metrics."""
        with os.fdopen(open_regular(self.metrics, create=False), "a", encoding="utf-8") as lines:
            lines.write(to_json(record) + "\n")
            lines.flush()
            os.fsync(lines.fileno())  # a checkpoint that counts this line follows

    def keep_metrics(self, count: int) -> None:
        """Drop what a killed session wrote after its last checkpoint, of `count` epochs.

        Raises:
            CheckpointError: lines of earlier epochs are missing, or not JSON.
        """
        found = read_bytes(self.metrics).splitlines(keepends=True) if self.metrics.exists() else []
        lines = found[:count]
        try:
            whole = len([json.loads(line) for line in lines]) == count
        except (ValueError, RecursionError):
            whole = False
        if not whole:
            raise CheckpointError(
                f"{self.metrics} lacks lines: the run needs one of JSON for each of {count} "
                "epochs; restore it from a copy, or begin a new run in another folder"
            )
        write_atomically(self.metrics, b"".join(lines))


@lru_cache(maxsize=16)
def _config_of(text: str, source: str) -> Config:
    """Parsed once: attacks, report and table of a run read it again, which takes 20 ms each."""
    return load_config_text(text, source=source)


def readable(content: Any) -> bytes:
    """JSON that people can read."""
    return to_json(content, indent=2).encode() + b"\n"


def _digest(file: Path) -> str:
    """SHA-256 (hex) of a file, without holding it in memory."""
    with open_plain(file) as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _inside(name: str) -> str:
    """The name of a file in the folder or in a party's; ValueError for a path that leads out."""
    *above, file = name.split("/")
    if (above and (len(above) != 2 or above[0] != "parties")) or "\x00" in name:
        raise ValueError("no name of a file")
    if any(part in ("", ".", "..") for part in (*above, file)):
        raise ValueError("no name of a file")
    return name


def logs_in(folder: Path) -> tuple[Path, ...]:
    """Ledgers, counts of what passives answered, audits, refused sums, digests of label answers."""
    kinds = (
        "ledger-*.jsonl", "answers-*.jsonl", "audits-*.jsonl", "refused-*.jsonl", "labels-*.log",
    )  # fmt: skip
    return tuple(log for kind in kinds for log in sorted(folder.glob(kind)))


def signed(contract: Contract, signatures: Mapping[str, bytes]) -> dict[str, Any]:
    """A contract and who signed it, for JSON."""
    return {
        "document": contract.model_dump(mode="json"),
        "sha256": contract.digest.hex(),
        "signatures": {name: one.hex() for name, one in signatures.items()},
    }


def remove_torn(folder: Path) -> None:
    """Remove what a process left that was killed while it wrote; the caller holds the folder."""
    for path in folder.glob(".*"):
        if _TORN.fullmatch(path.name) and not path.is_dir():
            path.unlink()


def write_sealed(path: Path, content: bytes) -> None:
    """Write a private file that ends in its SHA-256: a check against damage, not forgery."""
    write_atomically(path, content + hashlib.sha256(content).digest(), private=True)


def no_checkpoint(path: Path) -> CheckpointError:
    """What to raise where a run should be resumed and there is nothing to resume it from."""
    return CheckpointError(f"there is no checkpoint {path}; start the run without --resume")


def read_sealed(path: Path) -> bytes:
    """Read what `write_sealed` wrote.

    Raises:
        CheckpointError: missing, no plain file, truncated or altered.
    """
    if not path.exists():
        raise no_checkpoint(path)
    sealed = read_bytes(path)
    content, digest = sealed[:-_DIGEST_BYTES], sealed[-_DIGEST_BYTES:]
    if len(sealed) < _DIGEST_BYTES or hashlib.sha256(content).digest() != digest:
        raise CheckpointError(
            f"{path} is truncated or altered: its {len(sealed)} bytes do not match their checksum; "
            "restore it from a copy, or start the run anew in another folder"
        )
    return content


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


def save_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors by name as safetensors."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(plain)


def load_tensors(body: bytes) -> dict[str, Tensor]:
    """Tensors by name."""
    return load(body)


# What the active's model said of its test rows, kept beside the model for intervals and curves.
#
# Run by: the active, or whoever plays it. The file holds test labels and is its owner's alone.


def keep_scored(folder: RunFolder, said: Mapping[str, Scored]) -> None:
    """Write truth and scores of each inference variant."""
    tensors = {}
    for name, scored in said.items():
        tensors[f"{name}/truth"] = torch.from_numpy(scored.truth)
        tensors[f"{name}/scores"] = torch.from_numpy(scored.scores)
    write_atomically(folder.scored, save_tensors(tensors), private=True)


def read_scored(folder: RunFolder, variant: str, *, threshold: float | None) -> Scored | None:
    """Read what one variant said, decided at a threshold; None where nobody kept it.

    Raises:
        CheckpointError: the file is not as a run left it.
    """
    if not folder.scored.exists():
        return None
    folder.check(folder.scored)
    try:
        tensors = load(read_bytes(folder.scored))
        truth, scores = tensors[f"{variant}/truth"], tensors[f"{variant}/scores"]
        if scores.ndim == 1:
            return Scored(truth=truth.numpy(), scores=scores.double().numpy())
        if not scores.isfinite().all():  # the training diverged, and its measures are NaN
            return Scored(truth=truth.numpy(), scores=scores.double().numpy(), threshold=threshold)
        return Scored.of_classes(truth.numpy(), scores.numpy()).at(threshold)
    except (KeyError, OverflowError, SafetensorError, DataError) as error:
        raise CheckpointError(
            f"{folder.scored} holds no scores of {variant}: {error}; restore it from a copy, or "
            "remove it to go on without"
        ) from error
