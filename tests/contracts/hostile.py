"""What hostile parties try and read: mutated messages, other keys, words, forks."""

import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.sums.frames import Frame
from apfed_protocols.sums.homomorphic import HomomorphicSum
from apfed_protocols.sums.seal_cipher import DEGREE, SMALL_DEGREE


def mutate_bytes(rng: random.Random, data: bytes, *, edge: int = 256) -> bytes:
    """These bytes with one to eight changes, most of them in the first `edge` bytes."""
    body = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(min(edge, len(body)) if rng.random() < 0.7 else len(body))
        kind = rng.randrange(6)
        if kind == 0:
            body[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            body[at] = rng.choice((0, 1, 127, 128, 255))
        elif kind == 2:
            del body[at : at + rng.choice((1, 4, len(body)))]
            body = body or bytearray(1)
        elif kind == 3:
            body[at:at] = rng.randbytes(rng.choice((1, 8, 5000)))
        elif kind == 4:
            body[at : at + 8] = rng.choice((b"\xff", b"\0")) * 8
        else:
            body[at : at + 3] = body[-3:]
    return bytes(body)


def alter_frame(frame: bytes, **changes: Any) -> bytes:
    return replace(Frame.parse(frame, sender="peer"), **changes).pack()


def looks_uniform(words: NDArray[np.unsignedinteger[Any]]) -> bool:
    """Each bit is set in half of the words, within 6 standard deviations."""
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(-1, words.itemsize)
    share = np.unpackbits(octets, axis=1).mean(axis=0)
    return bool((np.abs(share - 0.5) < 6 * 0.5 / np.sqrt(words.size)).all())


def run_in_fork(actions: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """The LocalProtocolError of each action in a forked copy of this process, or "done"."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        said = {}
        try:
            for name, action in actions.items():
                try:
                    action()
                    said[name] = "done"
                except LocalProtocolError as error:
                    said[name] = str(error)
        finally:
            os.write(writing, json.dumps(said).encode())
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:  # noqa: PTH123  # a descriptor has no path
        told: dict[str, str] = json.loads(pipe.read())
    os.wait()
    return told


def genuine_key(secure_sum: HomomorphicSum) -> bytes:
    cipher = secure_sum.cipher
    return cipher.pack_public_key(cipher.make_key_pair())


def residues_of(key: bytes) -> NDArray[np.uint64]:
    """One row for each polynomial modulo each prime, in the transformed form that SEAL keeps."""
    degree = SMALL_DEGREE if len(key) == 2 * 8 * SMALL_DEGREE else DEGREE
    return np.frombuffer(key, dtype="<u8").reshape(-1, degree).copy()


def pack_setup(secure_sum: HomomorphicSum, key: bytes) -> bytes:
    """Pack what a key holder sends whose public key is this one."""
    return secure_sum.make_frames(key).pack_setup(key)
