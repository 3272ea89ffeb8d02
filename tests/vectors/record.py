"""Record vectors anew: `python -m tests.vectors.record NAME ...`, with names of `SECURE_SUMS` and
`recovered`; needed when a format changes on purpose."""

import json
import sys
from typing import Any

from apfed_protocols.conversation import converse
from tests.vectors.recorded import (
    RECOVERABLE,
    RECOVERED,
    SHAPE,
    backend,
    binding,
    combined,
    fixed_randomness,
    matrix,
    recorded_keys,
    seeded_roles,
    text,
    vector_path,
)

SEEDED = ("plain", "plain + pairwise masks", "plain + recoverable masks", "crypten")
SUM_CHANGES: list[dict[str, Any]] = [
    {"at": 0, "xor": "ff", "error": "no frame of version"},
    {"at": 5, "xor": "01", "error": "of .*, expected a sum"},
    {"at": 47, "xor": "01", "error": "for another message than the one"},
    {"at": 51, "xor": "01", "error": "a sum of shape"},
    {"at": 56, "xor": "80", "error": "for another message than the one"},
    {"at": 88, "xor": "80", "error": "uses other parameters or another public key"},
    {"length": 123, "error": "its header alone 124"},
    {"length": 136, "error": "it was cut or padded"},
]
BLOB_CHANGES: dict[str, list[dict[str, Any]]] = {
    "plain": [{"at": 142, "xor": "5040", "error": "beyond the agreed range"}],
    "plain + pairwise masks": [
        {"at": 131, "xor": "40", "error": "beyond the range of its contributions"}
    ],
    "plain + recoverable masks": [
        {"at": 135, "xor": "40", "error": "beyond the range of its contributions"},
        {"at": 47, "xor": "01", "error": "for another message than the one"},
        {"at": 9, "xor": "00", "length": 156, "error": "it was cut or padded"},
        {"at": 7, "xor": "01", "error": "sent a sum of 2 contributions, expected 3 to 3"},
        {"at": 157, "xor": "01", "error": "named a set of contributors"},
        {"at": 161, "xor": "03", "error": "named a set of contributors"},
    ],
    "crypten": [
        {"at": 136, "xor": "01", "error": "does not authenticate: it was altered"},
        {"at": 327, "xor": "80", "error": "does not authenticate: it was altered"},
        {"at": 7, "xor": "01", "error": "sent a sum of 2 contributions, expected 3"},
        {"at": 123, "xor": "01", "error": "it was cut or padded|announces"},
    ],
    "homomorphic": [
        {"at": 139, "xor": "ff" * 29, "error": "numbers beyond the modulus|beyond the range"},
        {"at": 127, "xor": "01", "error": "it was cut or padded"},
        {"at": 40006, "xor": "01", "error": "decrypt|beyond the"},
    ],
}


def record_seeded(name: str) -> dict[str, Any]:
    if name == "recovered":
        return record_recovered()
    roles, bound = seeded_roles(name), binding()
    names = [party for party in roles if party.startswith("passive")]
    frames = {party: roles[party].contribute(matrix(party), bound) for party in names}
    total = combined(roles, frames, bound.digest)
    return {
        "contributions": {party: text(frame) for party, frame in frames.items()},
        "sum": text(total),
        "tampered": SUM_CHANGES + BLOB_CHANGES[name],
    }


def record_recovered() -> dict[str, Any]:
    """A step in which passive_3 falls silent before it contributes."""
    roles, bound = seeded_roles(RECOVERABLE, **RECOVERED), binding()
    frames = {me: roles[me].contribute(matrix(me), bound) for me in ("passive_1", "passive_2")}
    requests = roles["aggregator"].ask(frames, bound.digest)
    answers = {me: roles[me].answer(requests[me]) for me in requests}
    return {
        "contributions": {me: text(frame) for me, frame in frames.items()},
        "requests": {me: text(request) for me, request in requests.items()},
        "answers": {me: text(answer) for me, answer in answers.items()},
        "sum": text(roles["aggregator"].combine(answers, bound.digest)),
        "tampered": [
            {"at": 136, "xor": "01", "error": "passive_1's secret do not give"},
            {"at": 152, "xor": "80", "error": "passive_2's secret do not give"},
            {"at": 168, "xor": "40", "error": "passive_3's secret do not give"},
        ],
    }


def record_keyed(name: str) -> dict[str, Any]:
    holder, secret = recorded_keys(name)
    described, bound = backend(name), binding()
    passives = {me: described.contributor(me) for me in described.agreement.contributors}
    combiner = described.combiner()
    converse({"active": holder, "aggregator": combiner, **passives})
    frames = {me: role.contribute(matrix(me), bound) for me, role in passives.items()}
    total = combiner.combine(frames, bound.digest)
    holder.decode(total, SHAPE, bound)
    return {
        "secret_key": text(secret),
        "fingerprint": vars(holder)["_frames"].fingerprint.hex(),
        "sum": text(total),
        "tampered": SUM_CHANGES + BLOB_CHANGES["homomorphic"],
    }


def main(names: list[str]) -> None:
    for name in names:
        record = record_seeded if name in (*SEEDED, "recovered") else record_keyed
        path = vector_path(name)
        with fixed_randomness():
            path.write_text(json.dumps(record(name), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
