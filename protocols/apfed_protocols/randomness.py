"""The only source of key, mask, nonce and noise randomness in this project.

Run by: every role. Keys come from the operating system's generator through `secrets`;
long streams are AES-256 in counter mode under such a key. Nothing here takes a seed
from a configuration: seeded NumPy or torch generators never make a key or a mask.

What is used once must not be in a forked copy of its process (`ForkCheck`), which would use it a
second time.
"""

import hashlib
import os
import secrets  # noqa: TID251 - this is the one module
from collections.abc import Iterator

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError

KEY_BYTES = 32
_NONCE_BYTES = 16
_COUNTER = modes.CTR(bytes(_NONCE_BYTES))
_ZEROS = bytes(2**17)

_fork_count = 0  # forks between the first process and this one


def fresh_key() -> bytes:
    """Return 32 bytes from the operating system's generator."""
    return secrets.token_bytes(KEY_BYTES)


def derive_key(key: bytes, *context: bytes) -> bytes:
    """Return a 32-byte sub-key of `key` for one use, named by `context` (labels such as purpose,
    session and step).

    It is computed by keyed BLAKE2b (RFC 7693) as a PRF. Each part of `context` is preceded by its
    length, so that no two different contexts can collide by concatenation.
    """
    if len(key) != KEY_BYTES:
        raise LocalProtocolError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
    prf = hashlib.blake2b(key=key, digest_size=KEY_BYTES)
    for part in context:
        prf.update(len(part).to_bytes(8, "big"))
        prf.update(part)
    return prf.digest()


def keystream(key: bytes, *context: bytes, length: int) -> bytes:
    """Return `length` pseudo-random bytes: AES-256-CTR under a sub-key of `key` for `context`.

    The same key and context give the same stream, so a pair must be used once; callers put
    session, step and purpose into the context.
    """
    if length < 0:
        raise LocalProtocolError(f"a keystream has a length of at least 0, got {length}")
    cipher = Cipher(algorithms.AES(derive_key(key, *context)), _COUNTER)
    return cipher.encryptor().update(bytes(length))


def keystream_chunks(
    key: bytes, *context: bytes, length: int, chunk_bytes: int = len(_ZEROS)
) -> Iterator[memoryview]:
    """Yield the bytes of `keystream` in chunks. All chunks are in the same memory, so that a caller
    must use a chunk before it takes the next one.

    It is for long streams, since this memory stays in the processor's cache.

    Args:
        key, context: 32 secret bytes, and labels of one use; the same pair gives the same stream.
        length: bytes of the whole stream.
        chunk_bytes: bytes of one chunk, 128 KiB at most; the last chunk may have fewer.
    """
    cipher = Cipher(algorithms.AES(derive_key(key, *context)), _COUNTER)
    encryptor = cipher.encryptor()
    # `update_into` needs a spare block; `np.empty` does not clear the memory first.
    buffer = np.empty(min(length, chunk_bytes) + _NONCE_BYTES, dtype=np.uint8).data
    for start in range(0, length, chunk_bytes):
        current_bytes = min(chunk_bytes, length - start)
        encryptor.update_into(_ZEROS[:current_bytes], buffer)
        yield buffer[:current_bytes]


def random_permutation(count: int, *, key: bytes | None = None) -> NDArray[np.int64]:
    """Return a uniformly random permutation of 0..count - 1, (count,), by sorting 128-bit random
    numbers.

    `key`: 32 secret bytes, used for nothing else, which determine the permutation; None: a fresh
    key is drawn.
    """
    if count < 0:
        raise LocalProtocolError(f"a permutation has at least 0 items, got {count}")
    stream = keystream(fresh_key() if key is None else key, length=16 * count)
    sort_keys = np.frombuffer(stream, dtype=">u8").reshape(count, 2)
    return np.lexsort((sort_keys[:, 1], sort_keys[:, 0])).astype(np.int64)


def _count_fork() -> None:
    """Count a fork, in the child process."""
    global _fork_count
    _fork_count += 1


if hasattr(os, "register_at_fork"):  # where there are forks
    os.register_at_fork(after_in_child=_count_fork)


class ForkCheck:
    """A check that an object is used only in the process that made it, and in no forked copy."""

    def __init__(self, owner: str) -> None:
        """Store this process; `owner` names the object and is the subject of the error."""
        self._owner = owner
        # A child may get the ID of a process that ended, so the number of forks counts, too.
        self._process = (os.getpid(), _fork_count)

    def require_own_process(self) -> None:
        """Raise LocalProtocolError in any process but the one that made this check."""
        if (os.getpid(), _fork_count) != self._process:
            raise LocalProtocolError(
                f"{self._owner} belongs to the process that made it; a copy would use its keys, "
                "numbers and masks a second time. Make it in the process that uses it"
            )
