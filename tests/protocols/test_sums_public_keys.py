"""Public keys that protect nothing, or that SEAL takes and then fails on: refused at the setup."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from protocols.errors import RemoteProtocolError
from protocols.sums import CkksSum
from protocols.sums.homomorphic import Encrypter, HomomorphicSum
from protocols.sums.seal_scheme import SealContext, SealScheme
from tests.contracts.public_keys import genuine_key, residues_of, setup_with, with_residues
from tests.contracts.sum_parties import agreement, binding, make

Residues = NDArray[np.uint64]

SUMS: dict[str, Callable[[], HomomorphicSum]] = {
    "ckks": lambda: _homomorphic("ckks"),
    "ckks, two primes": lambda: CkksSum(agreement(), primes=(54, 55)),
    "ckks_fast": lambda: _homomorphic("ckks_fast"),
    "bfv": lambda: _homomorphic("bfv"),
}


def _homomorphic(choice: str) -> HomomorphicSum:
    described = make(choice, agreement())
    assert isinstance(described, HomomorphicSum)
    return described


@pytest.fixture(scope="module", params=SUMS)
def described(request: pytest.FixtureRequest) -> HomomorphicSum:
    return SUMS[request.param]()


def taken(described: HomomorphicSum, key: bytes) -> Encrypter:
    """A passive to which the active sent this key."""
    passive = Encrypter(described, "passive_1")
    passive.receive("active", setup_with(described, key))
    return passive


def zeroed(residues: Residues) -> Residues:
    return np.zeros_like(residues)


def without_a(residues: Residues) -> Residues:
    residues[len(residues) // 2 :] = 0
    return residues


def without_b(residues: Residues) -> Residues:
    residues[: len(residues) // 2] = 0
    return residues


def one_modulus_of_a_zero(residues: Residues) -> Residues:
    residues[-1] = 0
    return residues


def partly_zero(residues: Residues) -> Residues:
    residues[:, : residues.shape[1] // 8] = 0
    return residues


def constant(residues: Residues) -> Residues:
    residues[:] = residues[:, :1]
    return residues


def few_values(residues: Residues) -> Residues:
    return np.tile(residues[:, : residues.shape[1] // 2], 2)


DEGENERATE = [
    zeroed, without_a, without_b, one_modulus_of_a_zero, partly_zero, constant, few_values,
]  # fmt: skip


@pytest.mark.parametrize("change", DEGENERATE)
def test_a_degenerate_public_key_is_refused(
    described: HomomorphicSum, change: Callable[[Residues], Residues]
) -> None:
    """All-zero keys would put a contribution on the wire with its noise alone over it."""
    key = genuine_key(described)
    residues = residues_of(key, described.scheme.flavour.poly_degree)
    broken = with_residues(key, change(residues))
    with pytest.raises(RemoteProtocolError, match=r"the public key from active is no RLWE key"):
        taken(described, broken)


def test_the_sum_of_two_primes_uses_both() -> None:
    residues = residues_of(genuine_key(SUMS["ckks, two primes"]()), 4096)
    assert residues.shape == (4, 4096)


def test_a_genuine_key_that_was_written_anew_is_taken(described: HomomorphicSum) -> None:
    """So the refusals are of what is in the keys, not of how the test wrote them."""
    key = genuine_key(described)
    residues = residues_of(key, described.scheme.flavour.poly_degree)
    passive = taken(described, with_residues(key, residues))
    assert passive.contribute(np.ones((2, 3)), binding(1))


def test_genuine_keys_are_far_from_the_bound(described: HomomorphicSum) -> None:
    """Fewer than 2^-20 of the residues of a key repeat others on average; a 16th is refused."""
    for _ in range(20):
        rows = residues_of(genuine_key(described), described.scheme.flavour.poly_degree)
        assert all(len(np.unique(row)) >= len(row) - 2 for row in rows)


def test_what_seal_refuses_when_it_encrypts_shows_at_the_setup(
    described: HomomorphicSum, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(scheme: SealScheme, context: SealContext) -> None:
        raise RuntimeError("result ciphertext is transparent")

    key = genuine_key(described)
    monkeypatch.setattr(type(described.scheme), "zero", fails)
    with pytest.raises(RemoteProtocolError, match="SEAL refuses the public key from active"):
        taken(described, key)
