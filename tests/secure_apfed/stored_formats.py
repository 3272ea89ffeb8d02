"""Files of each released format, as the version wrote them that had it.

`tests/data/formats/1` was written by the last commit before cards told promises, `2` by the first
with format 2. A new format gets a folder of its own; none of these is ever written anew.
"""

import json
from pathlib import Path
from typing import Any

import msgpack

from secure_apfed.base.formats import FORMATS

STORED = Path(__file__).parents[1] / "data" / "formats"
NUMBERS = tuple(sorted(int(path.name) for path in STORED.iterdir()))
FILES = {
    "model.json": "finished/model.json",
    "result.json": "finished/result.json",
    "contract.json": "finished/contract.json",
    "statements.json": "apart/statements.json",
    "checkpoint-STEP.bin": "checkpoint.bin",
    "transcript.msgpack": "finished/transcript.msgpack",
    "joint.safetensors": "joint.safetensors",
    "audit.log": "apart/parties/lab/audit.log",
}
_DIGEST_BYTES = 32


def fields_of(name: str, path: Path) -> dict[str, Any]:
    """Return the fields of a stored file in which its format stands."""
    content = path.read_bytes()
    if name == "checkpoint-STEP.bin":
        fields = msgpack.unpackb(content[:-_DIGEST_BYTES], strict_map_key=False)
    elif name == "transcript.msgpack":
        fields = msgpack.unpackb(content, strict_map_key=False)
    elif name == "joint.safetensors":
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        fields = json.loads(header["__metadata__"]["joint"])
    elif name == "audit.log":
        fields = json.loads(content.splitlines()[0])
    else:
        fields = json.loads(content)
        if name == "contract.json":
            fields = fields["document"]
        if name == "statements.json":
            fields = fields["lab"]
    assert isinstance(fields, dict)
    return fields


def format_of(name: str, number: int) -> int:
    """Return the format of the file of this name that lies in the folder of this number."""
    kind = FORMATS[name]
    found = fields_of(name, STORED / str(number) / FILES[name]).get(
        kind.number_key, kind.number_if_missing
    )
    assert isinstance(found, int)
    return found
