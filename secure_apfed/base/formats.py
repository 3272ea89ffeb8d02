"""The formats of files that survive an upgrade, with their names and version numbers.

Run by: readers of a model, a run or a party's folder that another version may have written. A
format that this version cannot read is refused by its name, with a remedy. The number of a format
rises when new files cannot be read like old ones: a field has another meaning, or a new field is
required. `tests/data/formats` holds a file of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from apfed_protocols.installing import install_checkout
from secure_apfed.base.peer_text import check_version, quote_text
from secure_apfed.errors import CheckpointError

__all__ = [
    "AUDIT_LOG",
    "CHECKPOINT",
    "CONTRACT",
    "FORMATS",
    "JOINT_NETWORK",
    "MODEL_CARD",
    "RECORDING",
    "RUN_RESULT",
    "STATEMENT",
    "FileFormat",
    "find_installed_version",
    "find_writer",
]

_DISTRIBUTION = "secure-apfed"


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """A versioned format of a file that people keep.

    Attributes:
        title: name of the file in messages.
        number_key: the field with the number of its format.
        current_number: the format that this version writes.
        oldest_readable: the oldest format that this version reads.
        number_if_missing: the format of a file without the field; None: every file has it.
        remedy: what to do with a file that is too old to be read.
    """

    title: str
    number_key: str
    current_number: int
    oldest_readable: int
    number_if_missing: int | None = None
    remedy: str

    def parse_format_number(self, path: Path | str, content: Any) -> int:
        """Return the format number of a file's content.

        Args:
            path: path of the file, for messages.
            content: fields of the file by name.

        Raises CheckpointError: a newer format, one that is too old, or no number.
        """
        fields = content if isinstance(content, Mapping) else {}
        number = fields.get(self.number_key, self.number_if_missing)
        # In Python a bool is an int, too; here it is refused.
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise CheckpointError(
                f"{path}: {self.number_key} of a {self.title}: expected a whole number from 1 to "
                f"{self.current_number}, got {quote_text(number)}; restore the file from a copy"
            )
        if number > self.current_number:
            raise CheckpointError(
                f"{path}: {self.title} of format {number}, written by a newer version of "
                f"{_DISTRIBUTION} than this one ({find_installed_version()}), which reads "
                f"{self._readable}; install the newer version, in a checkout of it: "
                f"{install_checkout()}"
            )
        if number < self.oldest_readable:
            raise CheckpointError(
                f"{path}: {self.title} of format {number}, written by an earlier version of "
                f"{_DISTRIBUTION} than this one ({find_installed_version()}), which reads "
                f"{self._readable}; {self.remedy}"
            )
        return number

    def describe_misfit(self, number: int) -> str:
        """Return advice for a file of a supported format whose content is not valid in it.

        A file of this version's own format is damaged. An older one may come from a version that
        can still read it.

        `number`: the file's format number.
        """
        if number == self.current_number:
            return "restore it from a copy"
        return (
            f"it is a {self.title} of format {number} (this version writes {self.current_number}), "
            f"and not as any version wrote it that this one can read: {self.remedy}, or restore it "
            "from a copy"
        )

    @property
    def _readable(self) -> str:
        """The supported formats in words."""
        if self.oldest_readable == self.current_number:
            return f"format {self.current_number}"
        return f"formats {self.oldest_readable} to {self.current_number}"


MODEL_CARD = FileFormat(
    title="model card",
    number_key="card_version",
    current_number=2,
    oldest_readable=1,
    remedy="predict with the version that versions.json beside it names, or train anew",
)
"""model.json; format 1 has no `promises`."""

RUN_RESULT = FileFormat(
    title="run result",
    number_key="format",
    current_number=2,
    oldest_readable=1,
    number_if_missing=1,
    remedy="read the run with the version that its versions.json names, or play it anew",
)
"""result.json; format 1 has no number, no `promises`, and bytes of the last session alone where
parties ran apart."""

CONTRACT = FileFormat(
    title="contract",
    number_key="schema_version",
    current_number=2,
    oldest_readable=2,
    remedy="read it with the version that signed it",
)
"""contract.json, under `document`."""

STATEMENT = FileFormat(
    title="statement",
    number_key="format",
    current_number=1,
    oldest_readable=1,
    number_if_missing=1,
    remedy="verify it with the version that signed it",
)
"""An entry of statements.json."""

CHECKPOINT = FileFormat(
    title="checkpoint",
    number_key="version",
    current_number=6,
    oldest_readable=6,
    remedy="finish the run with the version that began it (versions.json in the run folder names "
    "it), or begin a new run in another folder",
)
"""checkpoint-STEP.bin; since format 6 it says which settings there were."""

RECORDING = FileFormat(
    title="recording",
    number_key="format",
    current_number=1,
    oldest_readable=1,
    number_if_missing=1,
    remedy="attack the run with the version that played it, or play it anew",
)
"""transcript.msgpack, and recording-STEP.bin of a run under way."""

JOINT_NETWORK = FileFormat(
    title="joint network",
    number_key="format",
    current_number=1,
    oldest_readable=1,
    number_if_missing=1,
    remedy="serve it with the version that trained it, or train anew",
)
"""joint.safetensors, in its header."""

AUDIT_LOG = FileFormat(
    title="audit log",
    number_key="format",
    current_number=1,
    oldest_readable=1,
    remedy="verify it with the version that wrote it",
)
"""audit.log, in the line `opened`."""

FORMATS: Mapping[str, FileFormat] = {
    "model.json": MODEL_CARD,
    "result.json": RUN_RESULT,
    "contract.json": CONTRACT,
    "statements.json": STATEMENT,
    "checkpoint-STEP.bin": CHECKPOINT,
    "transcript.msgpack": RECORDING,
    "joint.safetensors": JOINT_NETWORK,
    "audit.log": AUDIT_LOG,
}
"""Format of each versioned file, by the file's name."""


def find_installed_version() -> str:
    """Return the version of this library; "unknown" for sources that are not installed."""
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def find_writer(versions: Any) -> str:
    """Return which other version of this library wrote a run.

    Returns "" if this version did, or if the content names no valid version.

    Args:
        versions: the untrusted content of versions.json.
    """
    version = versions.get(_DISTRIBUTION) if isinstance(versions, Mapping) else None
    if not isinstance(version, str):
        return ""
    try:
        return "" if check_version(version) == find_installed_version() else version
    except ValueError:
        return ""
