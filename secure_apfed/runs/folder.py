"""The run folder: where everything of a run lies, written so that a killed process harms nothing.

Every file is written beside its place and moved there in one step.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from secure_apfed.errors import CheckpointError
from secure_apfed.plain_json import to_json

__all__ = ["RunFolder", "read_sealed", "write_atomically", "write_sealed"]

_DIGEST_BYTES = 32


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
        self.result = path / "result.json"
        self.lock = path / ".lock"
        self.checkpoint = path / "checkpoint.bin"

    def write_json(self, path: Path, content: Any) -> None:
        """Write JSON that people can read."""
        write_atomically(path, to_json(content, indent=2).encode() + b"\n")

    def read_json(self, path: Path) -> Any:
        """Read JSON.

        Raises:
            CheckpointError: missing or damaged.
        """
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing; is {self.path} the folder of a finished run?"
            ) from None
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged: it is not JSON ({error})") from error

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one line to the metrics."""
        with self.metrics.open("a") as lines:
            lines.write(to_json(record) + "\n")

    def keep_metrics(self, count: int) -> None:
        """Drop what a killed session wrote after its last checkpoint."""
        if self.metrics.exists():
            lines = self.metrics.read_bytes().splitlines(keepends=True)[:count]
            write_atomically(self.metrics, b"".join(lines))


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Replace `path` in one step; `private` files are readable by their owner only."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o600 if private else 0o644)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


def write_sealed(path: Path, content: bytes) -> None:
    """Write a private file that ends in its SHA-256, so that damage is seen."""
    write_atomically(path, content + hashlib.sha256(content).digest(), private=True)


def read_sealed(path: Path) -> bytes:
    """Read what `write_sealed` wrote.

    Raises:
        CheckpointError: missing, truncated or altered.
    """
    try:
        sealed = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no checkpoint {path}; start the run without --resume"
        ) from None
    content, digest = sealed[:-_DIGEST_BYTES], sealed[-_DIGEST_BYTES:]
    if len(sealed) < _DIGEST_BYTES or hashlib.sha256(content).digest() != digest:
        raise CheckpointError(
            f"{path} is truncated or altered: its {len(sealed)} bytes do not match their checksum; "
            "restore it from a copy, or start the run anew in another folder"
        )
    return content
