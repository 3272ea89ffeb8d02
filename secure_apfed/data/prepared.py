"""One party's own rows as one file, as whoever prepares a trial hands them to a party.

Run by: the preparer, who holds all tables and writes each party's into its own folder; then that
party, which reads no other. Layout: safetensors; IDs, classes and encoding as JSON in its header.
"""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from secure_apfed.data.encoding import View, parse_encoding
from secure_apfed.data.labels import TargetScale
from secure_apfed.data.records import OwnData, PartyTable
from secure_apfed.errors import CheckpointError, DataError
from secure_apfed.files import read_bytes

__all__ = ["pack_own", "read_own"]

_ABOUT = "party"


def pack_own(data: OwnData) -> bytes:
    """The bytes of the file."""
    table = data.table
    tensors = {"features": table.features, "train_rows": data.train_rows,
               "test_rows": data.test_rows}  # fmt: skip
    if table.labels is not None:
        tensors["labels"] = table.labels
    if data.labelled is not None:
        tensors["labelled"] = data.labelled
    about = {
        "name": table.name,
        "ids": table.ids,
        "classes": data.classes,
        "targets": None if data.targets is None else data.targets.model_dump(),
        "encoding": table.encoding.model_dump(mode="json"),
        "views": {name: (one.first, one.end, one.sequence) for name, one in table.views.items()},
    }
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return save(plain, metadata={_ABOUT: json.dumps(about)})


def read_own(path: Path, name: str) -> OwnData:
    """Read the rows of the party of this name.

    Raises:
        DataError: missing, another party's, or no such file.
    """
    try:
        tensors = load(read_bytes(path))
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[_ABOUT])
        if about["name"] != name:
            raise DataError(
                f"{name}: {path} holds the rows of {about['name']}; give each party its own"
            )
        table = PartyTable(
            name,
            tuple(about["ids"]),
            tensors["features"],
            tensors.get("labels"),
            parse_encoding(about["encoding"]),
            {name: _view(*parts) for name, parts in about["views"].items()},
        )
        return OwnData(
            table=table,
            train_rows=tensors["train_rows"],
            test_rows=tensors["test_rows"],
            classes=tuple(about["classes"]),
            labelled=tensors.get("labelled"),
            targets=TargetScale.model_validate(scale) if (scale := about.get("targets")) else None,
        )
    except (
        CheckpointError, SafetensorError, KeyError, ValueError, TypeError, AttributeError
    ) as error:  # fmt: skip
        raise DataError(f"{name}: {path} holds no prepared rows ({error})") from error


def _view(first: int, end: int, sequence: list[int] | None) -> View:
    if sequence is None:
        return View(int(first), int(end))
    steps, channels = sequence
    return View(int(first), int(end), (int(steps), int(channels)))
