"""Public keys that protect nothing, or that SEAL takes and then fails on: refused at the setup."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.sums import CkksSum
from apfed_protocols.sums.homomorphic import Encrypter, HomomorphicSum
from apfed_protocols.sums.seal_cipher import DEGREE, SealCipher, SealContext, coefficients
from tests.contracts.public_keys import genuine_key, residues_of, setup_with
from tests.contracts.sum_parties import agreement, binding, make

Residues = NDArray[np.uint64]

SUMS: dict[str, Callable[[], HomomorphicSum]] = {
    "ckks": lambda: _homomorphic("ckks"),
    "ckks, two primes": lambda: CkksSum(agreement(16)),
    "bfv": lambda: _homomorphic("bfv"),
}


def _homomorphic(choice: str) -> HomomorphicSum:
    described = make(choice, agreement())
    assert isinstance(described, HomomorphicSum)
    return described


@pytest.fixture(scope="module", params=SUMS)
def described(request: pytest.FixtureRequest) -> HomomorphicSum:
    return SUMS[request.param]()


def taken(described: HomomorphicSum, key: bytes | Residues) -> Encrypter:
    """A passive to which the active sent this key."""
    key = key if isinstance(key, bytes) else key.astype("<u8").tobytes()
    passive = Encrypter(described, "passive_1")
    passive.receive("active", setup_with(described, key))
    return passive


def filled(rows: slice, columns: slice = slice(None), like: Any = 0) -> Any:
    """A change of a key: these residues are one number, or others of the key."""

    def change(residues: Residues) -> Residues:
        residues[rows, columns] = like(residues) if callable(like) else like
        return residues

    return change


ALL, HALVES = slice(None), {4: (slice(2), slice(2, None)), 2: (slice(1), slice(1, None))}


def degenerate(rows: int, columns: int) -> dict[str, Callable[[Residues], Residues]]:
    """All-zero keys and the like, for so many rows of residues."""
    b, a = HALVES[rows]
    return {
        "zeroed": filled(ALL),
        "without a": filled(a),
        "without b": filled(b),
        "one modulus of a zero": filled(slice(-1, None)),
        "partly zero": filled(ALL, slice(columns // 8)),
        "constant": filled(ALL, ALL, lambda key: key[:, :1]),
        "few values": filled(ALL, slice(columns // 2), lambda key: key[:, columns // 2 :]),
        "equal": filled(a, ALL, lambda key: key[b]),
    }


def test_a_degenerate_public_key_is_refused(described: HomomorphicSum) -> None:
    """It would put a contribution on the wire with its noise alone over it."""
    key = genuine_key(described)
    two = len(described.cipher.moduli) == 2
    assert two == (described.parameters()["primes"] == [60, 49])
    for change in degenerate(*residues_of(key).shape).values():
        with pytest.raises(RemoteProtocolError, match=r"the public key from active is no RLWE key"):
            taken(described, change(residues_of(key)))


def test_a_genuine_key_is_taken(described: HomomorphicSum) -> None:
    """So the refusals are of what is in the keys, not of how the test sends them."""
    key = genuine_key(described)
    residues = residues_of(key)
    assert taken(described, residues).contribute(np.ones((2, 3)), binding(1))


def test_what_are_no_residues_is_refused(described: HomomorphicSum) -> None:
    cases: list[tuple[Callable[[Residues], Residues], str]] = [
        (lambda rows: rows[:-1], r"has \d+ bytes, expected \d+"),
        (lambda rows: np.append(rows, rows[-1:], axis=0), r"has \d+ bytes, expected \d+"),
        (lambda rows: rows + np.uint64(2**60), "holds numbers beyond the modulus"),
    ]
    for change, message in cases:
        residues = residues_of(genuine_key(described))
        with pytest.raises(RemoteProtocolError, match=f"the public key from active {message}"):
            taken(described, change(residues))


def test_what_seal_refuses_when_it_encrypts_shows_at_the_setup(
    described: HomomorphicSum, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(cipher: SealCipher, context: SealContext) -> None:
        raise RuntimeError("result ciphertext is transparent")

    key = genuine_key(described)
    monkeypatch.setattr(type(described.cipher), "zero", fails)
    with pytest.raises(RemoteProtocolError, match="SEAL refuses the public key from active"):
        taken(described, key)


@cache
def powers_of_x(degree: int, modulus: int) -> tuple[int, ...]:
    """X at SEAL's places: the odd powers of the smallest root of order 2N, bits reversed."""
    bits = degree.bit_length() - 1
    roots = (pow(base, (modulus - 1) // (2 * degree), modulus) for base in range(2, modulus))
    root = next(found for found in roots if pow(found, degree, modulus) == modulus - 1)
    smallest = min(pow(root, power, modulus) for power in range(1, 2 * degree, 2))
    odd = (2 * int(f"{place:0{bits}b}"[::-1], 2) + 1 for place in range(degree))
    return tuple(pow(smallest, power, modulus) for power in odd)


def transformed(terms: dict[int, int], degree: int, modulus: int) -> Residues:
    """The polynomial with these coefficients by power of X, as SEAL keeps it."""
    values = [
        sum(factor * pow(x, power, modulus) for power, factor in terms.items()) % modulus
        for x in powers_of_x(degree, modulus)
    ]
    return np.array(values, dtype=np.uint64)


@cache
def small(degree: int, modulus: int, *, bits: int, seed: int) -> Residues:
    """A polynomial with coefficients of a few bits, of either sign: by the transform's inverse.

    The inverse of the inverse: it is linear, so a basis of powers would do; this is quicker.
    """
    numbers = np.random.default_rng(seed).integers(-(2**bits), 2**bits, degree)
    values = np.array([int(number) % modulus for number in numbers], dtype=object)
    x = np.array(powers_of_x(degree, modulus), dtype=object)
    total = np.zeros(degree, dtype=object)
    for coefficient in values[::-1]:  # Horner
        total = (total * x + coefficient) % modulus
    return total.astype(np.uint64)


def test_coefficients_are_those_of_the_polynomial(described: HomomorphicSum) -> None:
    degree, modulus = DEGREE, described.cipher.moduli[0]
    terms = {0: 5, 3: modulus - 7, degree - 1: modulus // 3}
    found_PN = coefficients(np.stack([transformed(terms, degree, modulus)] * 2), modulus)
    assert (found_PN[0] == found_PN[1]).all()
    sizes = sorted(min(int(number), modulus - int(number)) for number in found_PN[0] if number)
    assert sizes == sorted(min(number, modulus - number) for number in terms.values())


HIDDEN: dict[str, Callable[[Residues, int], Residues]] = {
    "b = -a": lambda rows, q: np.stack([rows[0], (q - rows[0]) % q]),
    "b = -a + 1": lambda rows, q: np.stack([rows[0], (q + 1 - rows[0]) % q]),
    "counting": lambda rows, q: np.stack([np.arange(rows.shape[1]), rows[1]]).astype(np.uint64),
    "sparse b": lambda rows, q: np.stack([transformed({1: 1}, rows.shape[1], q), rows[1]]),
    "sparse a": lambda rows, q: np.stack([rows[0], transformed({3: 9, 5: 2}, rows.shape[1], q)]),
    "small b": lambda rows, q: np.stack([small(rows.shape[1], q, bits=20, seed=2), rows[1]]),
    "b = a + small": lambda rows, q: np.stack(
        [(rows[1] + small(rows.shape[1], q, bits=20, seed=2)) % np.uint64(q), rows[1]]
    ),
}


def test_a_key_of_different_residues_that_hides_nothing_is_refused() -> None:
    """Under b = a the difference of a ciphertext's halves is the message with its noise alone."""
    for change in HIDDEN:
        described = _homomorphic("bfv")
        (modulus,) = described.cipher.moduli
        key = genuine_key(described)
        broken = HIDDEN[change](residues_of(key), modulus)
        with pytest.raises(RemoteProtocolError, match=r"the public key from active is no RLWE key"):
            taken(described, broken)
