"""Sums with fixed secrets, so that a vector holds every byte of them.

The secrets in these vectors protect nothing: they are published here. To record them anew, where a
format changes on purpose: `python -m tests.vectors.recorded NAME ...`, with names of `SECURE_SUMS`
and `recovered`.
"""

import base64
import hashlib
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import tenseal.sealapi as seal
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from apfed_protocols.conversation import converse
from apfed_protocols.errors import UnsafeChoiceWarning
from apfed_protocols.seal import RunKey
from apfed_protocols.sums import SECURE_SUMS, SecureSum, StepBinding, SumAgreement
from apfed_protocols.sums.homomorphic import HomomorphicSum, KeyHolder
from apfed_protocols.sums.masked import PairwiseSeeds
from apfed_protocols.sums.roles import OneRoundAggregator
from apfed_protocols.sums.seal_cipher import SealContext, open_scratch_file

AGREEMENT: dict[str, Any] = {
    "session": "vectors",
    "receiver": "active",
    "aggregator": "aggregator",
    "contributors": ("passive_1", "passive_2", "passive_3"),
    "clip_norm": 1.0,
    "bits": 16,
}
SHAPE = (2, 3)
VALUES: dict[str, list[list[float]]] = {
    "passive_1": [[0.5, -0.25, 0.125], [1e6, 0.0, 0.0]],
    "passive_2": [[0.1, 0.2, 0.3], [-0.0, 1e-9, -0.5]],
    "passive_3": [[-0.6, 0.0, 0.6], [-1e6, -1e6, -1e6]],
}
DECODED_LEVELS = [[1, -1639, 33586], [13849, -18918, -35302]]
"""What the sums decode to, in steps of 1 / 32767, computed from VALUES by hand."""


RECOVERABLE = "plain + recoverable masks"
RECOVERED = {"threshold": 2}
"""What the agreement says besides, where passive_3 falls silent before it contributes."""
RECOVERED_LEVELS = [[19661, -1639, 13926], [32767, 0, -16384]]
"""What the sum of the other two decodes to, by hand."""


def backend(name: str, **changes: Any) -> SecureSum:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        lacks = "threshold" in changes
        return SECURE_SUMS[name](SumAgreement(**AGREEMENT, **changes), allow_single_reader=lacks)


def binding(step: int = 7) -> StepBinding:
    return StepBinding.from_contents("vectors", step, rows=b"rows", message=b"representations")


def matrix(name: str) -> NDArray[np.float64]:
    return np.array(VALUES[name])


def make_fixed_key(party: str) -> RunKey:
    private = X25519PrivateKey.from_private_bytes(hashlib.sha256(party.encode()).digest())
    return RunKey(private.public_key().public_bytes_raw(), private)


DRAWING = (
    "seal",
    "sums.recoverable",
    "sums.crypten_sum",
    "sums.homomorphic",
    "products",
    "products.ring",
)


@contextmanager
def fix_randomness() -> Iterator[None]:
    """Keys, seeds and polynomials that are the same in every run."""
    numbers = count()

    def block(length: int = 32) -> bytes:
        return hashlib.sha256(b"vector %d" % next(numbers)).digest()[:length]

    def run_key() -> RunKey:
        return RunKey.from_secret_bytes(block())

    with ExitStack() as stack:
        for module in DRAWING:
            stack.enter_context(patch(f"apfed_protocols.{module}.fresh_key", block))
        for module in ("masked", "recoverable"):
            stack.enter_context(patch(f"apfed_protocols.sums.{module}.fresh_run_key", run_key))
        yield


def combine_frames(roles: Mapping[str, Any], frames: Mapping[str, bytes], digest: bytes) -> bytes:
    """The sum of these contributions, with a second round where the sum has one."""
    aggregator = roles["aggregator"]
    bodies = frames
    if not isinstance(aggregator, OneRoundAggregator):
        requests = aggregator.ask(frames, digest)
        bodies = {me: roles[me].answer(request) for me, request in requests.items()}
    total: bytes = aggregator.combine(bodies, digest)
    return total


def make_seeded_roles(name: str, **changes: Any) -> dict[str, Any]:
    """All roles of a sum without encryption after setup; mask keys are fixed.

    Under `fix_randomness` where more than one key of a role is drawn.
    """
    described = backend(name, **changes)
    roles: dict[str, Any] = {
        "active": described.make_receiver(),
        "aggregator": described.make_aggregator(),
    }
    roles |= {me: described.make_contributor(me) for me in described.agreement.contributors}
    for party, role in roles.items():
        seeds = vars(role).get("_setup")
        if isinstance(seeds, PairwiseSeeds) and name != RECOVERABLE:
            vars(seeds)["_own_key"] = make_fixed_key(party)
    converse(roles)
    return roles


def key_holder(name: str, secret: bytes, fingerprint: bytes) -> KeyHolder:
    """The active's end of a homomorphic sum whose secret key was recorded."""
    described = backend(name)
    assert isinstance(described, HomomorphicSum)
    cipher = described.cipher
    parameters = vars(cipher)["_seal"]
    key = seal.SecretKey()
    with open_scratch_file() as scratch:
        scratch.load(key, parameters, secret)
    context = SealContext(None, None, seal.Decryptor(parameters, key))
    holder = described.make_receiver()
    vars(holder)["_key_context"] = context
    vars(holder)["_frames"].fingerprint = fingerprint
    return holder


def load_recorded_keys(name: str) -> tuple[KeyHolder, bytes]:
    """A key holder of a homomorphic sum, and its secret key in bytes."""
    described = backend(name)
    assert isinstance(described, HomomorphicSum)
    holder = described.make_receiver()
    cipher = described.cipher
    parameters = vars(cipher)["_seal"]
    generator = seal.KeyGenerator(parameters)
    public = seal.PublicKey()
    generator.create_public_key(public)
    with open_scratch_file() as scratch:
        secret = scratch.save(generator.secret_key())
    context = SealContext(
        public,
        seal.Encryptor(parameters, public),
        seal.Decryptor(parameters, generator.secret_key()),
    )
    key = cipher.pack_public_key(context)
    vars(holder).update(_context=context, _public_key=key, _frames=described.make_frames(key))
    return holder, secret


def vector_path(name: str) -> Path:
    short = name.replace(" + ", "_").removesuffix(" masks")
    return Path(__file__).parent / f"sum_{short}.json"


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def raw(encoded: str) -> bytes:
    return base64.b64decode(encoded)


def tamper_bytes(good: bytes, change: Mapping[str, Any]) -> bytes:
    """`good` with `xor` applied at `at`, then cut to `length` bytes."""
    mask = bytes.fromhex(change.get("xor", ""))
    changed = bytearray(good)
    for offset, bits in enumerate(mask):
        changed[change["at"] + offset] ^= bits
    return bytes(changed[: change.get("length", len(good))])


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
        {"at": 10046, "xor": "01", "error": "decrypt|beyond the"},
    ],
}


def record_seeded_sum(name: str) -> dict[str, Any]:
    if name == "recovered":
        return record_recovery()
    roles = make_seeded_roles(name)
    bound = binding()
    names = [party for party in roles if party.startswith("passive")]
    frames = {party: roles[party].contribute(matrix(party), bound) for party in names}
    total = combine_frames(roles, frames, bound.digest)
    return {
        "contributions": {party: text(frame) for party, frame in frames.items()},
        "sum": text(total),
        "tampered": SUM_CHANGES + BLOB_CHANGES[name],
    }


def record_recovery() -> dict[str, Any]:
    """A step in which passive_3 falls silent before it contributes."""
    roles = make_seeded_roles(RECOVERABLE, **RECOVERED)
    bound = binding()
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


def record_homomorphic_sum(name: str) -> dict[str, Any]:
    holder, secret = load_recorded_keys(name)
    described = backend(name)
    bound = binding()
    passives = {me: described.make_contributor(me) for me in described.agreement.contributors}
    aggregator = described.make_aggregator()
    converse({"active": holder, "aggregator": aggregator, **passives})
    frames = {me: role.contribute(matrix(me), bound) for me, role in passives.items()}
    total = aggregator.combine(frames, bound.digest)
    holder.decode(total, SHAPE, bound)
    return {
        "secret_key": text(secret),
        "fingerprint": vars(holder)["_frames"].fingerprint.hex(),
        "sum": text(total),
        "tampered": SUM_CHANGES + BLOB_CHANGES["homomorphic"],
    }


def main(names: list[str]) -> None:
    for name in names:
        record = record_seeded_sum if name in (*SEEDED, "recovered") else record_homomorphic_sum
        path = vector_path(name)
        with fix_randomness():
            path.write_text(json.dumps(record(name), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
