"""Keys, streams and permutations: the right length, the right distribution, no collisions."""

import hashlib
from collections import Counter

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st

from apfed_protocols import randomness
from apfed_protocols.errors import LocalProtocolError

KEY = bytes(range(32))


def test_fresh_keys_differ_and_have_32_bytes() -> None:
    keys = {randomness.fresh_key() for _ in range(100)}
    assert len(keys) == 100
    assert {len(key) for key in keys} == {randomness.KEY_BYTES} == {32}


def test_a_derived_key_is_keyed_blake2b_of_the_framed_context() -> None:
    framed = (1).to_bytes(8, "big") + b"a" + (2).to_bytes(8, "big") + b"bc"
    expected = hashlib.blake2b(framed, key=KEY, digest_size=32).digest()
    assert randomness.derive_key(KEY, b"a", b"bc") == expected


@given(one=st.lists(st.binary(max_size=4)), two=st.lists(st.binary(max_size=4)))
def test_different_contexts_never_share_a_key(one: list[bytes], two: list[bytes]) -> None:
    assert (randomness.derive_key(KEY, *one) == randomness.derive_key(KEY, *two)) == (one == two)


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_a_key_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(LocalProtocolError, match=f"a key has 32 bytes, got {length}"):
        randomness.derive_key(bytes(length), b"a")
    with pytest.raises(LocalProtocolError, match=f"a key has 32 bytes, got {length}"):
        randomness.keystream(bytes(length), b"a", length=1)


def test_a_keystream_is_aes_256_counter_mode_from_zero() -> None:
    block = Cipher(algorithms.AES(randomness.derive_key(KEY, b"use")), modes.ECB()).encryptor()
    expected = b"".join(block.update(n.to_bytes(16, "big")) for n in range(3))
    assert randomness.keystream(KEY, b"use", length=40) == expected[:40]


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="at least 0, got -1"):
        randomness.keystream(KEY, length=-1)
    with pytest.raises(LocalProtocolError, match="at least 0 items, got -1"):
        randomness.random_permutation(-1)


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_a_permutation_holds_every_item_once(count: int) -> None:
    order = randomness.random_permutation(count)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(count))


def test_permutations_are_uniform() -> None:
    trials = 6000
    counts = Counter(tuple(randomness.random_permutation(3).tolist()) for _ in range(trials))
    assert len(counts) == 6
    # Chi-square with 5 degrees of freedom passes 40 once in seven million runs.
    assert sum((seen - trials / 6) ** 2 / (trials / 6) for seen in counts.values()) < 40
