"""Errors drawn in bulk: their distributions are SEAL's, and SEAL decrypts what they hide."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols.sums.homomorphic import BfvCipher, centred_binomial, ternary
from apfed_protocols.sums.seal_cipher import SealCipher, SealContext, scratch_file

COUNT = 400_000
RECIPE = 4096, (60,), 46


class SealsErrors(BfvCipher):
    """The same cipher, with the errors that SEAL draws."""

    def zero(self, context: SealContext) -> Any:
        return SealCipher.zero(self, context)

    def encrypt(
        self, context: SealContext, slots_VS: NDArray[np.int64], zeros: Sequence[Any] = ()
    ) -> list[bytes]:
        return SealCipher.encrypt(self, context, slots_VS, zeros)


def fits_binomial(numbers: NDArray[np.int64], pairs: int) -> bool:
    """Every value is as frequent as in the difference of two sums of `pairs` bits, to 6 sigma."""
    values = np.arange(-pairs, pairs + 1)
    chances = np.array([math.comb(2 * pairs, pairs + int(value)) / 4**pairs for value in values])
    counts = np.array([np.count_nonzero(numbers == value) for value in values])
    if counts.sum() != numbers.size:
        return False
    expected = numbers.size * chances
    return bool((np.abs(counts - expected) <= 6 * np.sqrt(expected) + 6).all())


def test_errors_are_centred_binomial_of_21_pairs_and_of_no_other() -> None:
    drawn = centred_binomial(COUNT)
    assert fits_binomial(drawn, 21)
    assert not fits_binomial(drawn, 14)  # 2/3 of the variance
    assert not fits_binomial(drawn, 31)  # 3/2 of it
    assert not fits_binomial(drawn + 1, 21)
    assert drawn.var() == pytest.approx(10.5, rel=0.02)


def test_u_is_uniform_on_three_values_of_independent_neighbours() -> None:
    drawn = ternary(COUNT)
    assert drawn.size == COUNT
    for numbers, cells in ((drawn, 3), (3 * drawn[::2] + drawn[1::2], 9)):
        counts = np.unique(numbers, return_counts=True)[1]
        assert len(counts) == cells
        share = numbers.size / cells
        assert np.abs(counts - share).max() < 6 * math.sqrt(share)
    assert not np.array_equal(ternary(64), ternary(64))
    assert not np.array_equal(centred_binomial(64), centred_binomial(64))


def test_few_accepted_bytes_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = iter([b"\xff" * 40, b"\x00\x01\x02" + b"\xff" * 37, bytes(40)])
    monkeypatch.setattr(
        "apfed_protocols.sums.homomorphic.keystream", lambda *_, **__: next(streams)
    )
    assert ternary(5).tolist() == [-1, 0, 1, -1, -1]


@pytest.mark.parametrize("kind", [SealsErrors, BfvCipher])
def test_the_noise_is_as_large_as_seals(kind: type[BfvCipher]) -> None:
    """SEAL's own meter: bits between the noise of a ciphertext and its limit."""
    cipher = kind(*RECIPE)
    keys = cipher.key_pair()
    budgets = []
    for _ in range(8):
        blobs = cipher.encrypt(keys, np.zeros((1, 4096), dtype=np.int64))
        loaded = cipher.load(blobs, 1, sender="the test")[0]
        budgets.append(keys.decryptor.invariant_noise_budget(loaded))
    # q / 2t over 4 to 6 deviations of sqrt(10.5 (1 + 4N/3)), in whole bits.
    deviation = math.sqrt(10.5 * (1 + 4 * 4096 / 3))
    most, least = (60 - 1 - 46 - math.log2(factor * deviation) for factor in (3, 7))
    assert math.floor(least) <= min(budgets) <= max(budgets) <= math.ceil(most)


def in_coefficients(cipher: BfvCipher, ciphertext: Any) -> NDArray[np.int64]:
    """The two polynomials of a ciphertext that is a product in SEAL's transformed form."""
    vars(cipher)["_evaluator"].transform_from_ntt_inplace(ciphertext)
    with scratch_file() as scratch:
        numbers = cipher.ciphertext_form.numbers(ciphertext, scratch)
    return numbers.reshape(2, -1).astype(np.int64)


def times_ternary(a_N: NDArray[np.int64], u_N: NDArray[np.int64], q: int) -> NDArray[np.int64]:
    """The product modulo X^N + 1 and q, term by term."""
    product_N = np.zeros_like(a_N)
    for power in np.flatnonzero(u_N):
        shifted_N = np.concatenate((-a_N[len(a_N) - power :], a_N[: len(a_N) - power]))
        product_N = (product_N + u_N[power] * shifted_N) % q
    return product_N


@pytest.mark.parametrize("pooled", [False, True])
def test_ciphertexts_are_the_public_key_times_u_and_two_errors(
    monkeypatch: pytest.MonkeyPatch, pooled: bool
) -> None:
    """c0 = b u + e0 and c1 = a u + e1: no draw is left out, halved or used for two ciphertexts."""
    drawn: dict[str, list[NDArray[np.int64]]] = {"ternary": [], "centred_binomial": []}
    for name, draw in (("ternary", ternary), ("centred_binomial", centred_binomial)):

        def recorded(count: int, name: str = name, draw: Any = draw) -> NDArray[np.int64]:
            drawn[name].append(draw(count))
            return drawn[name][-1].copy()

        monkeypatch.setattr(f"apfed_protocols.sums.homomorphic.{name}", recorded)
    cipher = BfvCipher(*RECIPE)
    keys, q = cipher.key_pair(), cipher.residues.modulus
    assert cipher.ciphertext_form.count == 8192
    for numbers in drawn.values():
        numbers.clear()
    zeros = [cipher.zero(keys) for _ in range(3)] if pooled else []
    blobs = cipher.encrypt(keys, np.zeros((3, 4096), dtype=np.int64), zeros)
    u_VN = np.concatenate(drawn["ternary"]).reshape(3, 4096)
    e_V2N = np.concatenate(drawn["centred_binomial"]).reshape(3, 2, 4096)
    assert len(np.unique(u_VN, axis=0)) == 3
    assert len(np.unique(e_V2N.reshape(6, 4096), axis=0)) == 6
    key_2N = in_coefficients(cipher, keys.public_key.data())
    for blob, u_N, e_2N in zip(blobs, u_VN, e_V2N, strict=True):
        sent_2N = cipher.residues.parse(blob, sender="the test").reshape(2, -1)
        expected_2N = [(times_ternary(half, u_N, q) + e_N) % q
                       for half, e_N in zip(key_2N, e_2N, strict=True)]  # fmt: skip
        assert np.array_equal(sent_2N.astype(np.int64), expected_2N)


def test_a_ciphertext_looks_uniform_and_hides_what_it_holds() -> None:
    cipher = BfvCipher(*RECIPE)
    keys = cipher.key_pair()
    modulus, halves = cipher.residues.modulus, []
    for value in (0, 0, 2**45 - 1):
        (blob,) = cipher.encrypt(keys, np.full((1, 4096), value))
        numbers = cipher.residues.parse(blob, sender="the test") / modulus
        assert abs(numbers.mean() - 0.5) < 6 / math.sqrt(12 * 8192)
        assert abs(numbers.var() - 1 / 12) < 6 * math.sqrt(1 / 180 / 8192)
        halves.append(numbers[4096:])
    assert len(np.unique(np.concatenate(halves))) > 3 * 4096 - 3


def test_seal_decrypts_every_residue_of_the_plain_modulus() -> None:
    for pooled in [0, 1, 3]:
        cipher = BfvCipher(*RECIPE)
        keys, half = cipher.key_pair(), 2**45
        rng = np.random.default_rng(0)
        slots = rng.integers(-half, half, (3, 4096))
        slots[0, :6] = (-half, half - 1, 0, -1, 1, 2)
        zeros = [cipher.zero(keys) for _ in range(pooled)]
        blobs = cipher.encrypt(keys, slots, zeros)
        assert np.array_equal(cipher.decrypt(keys, blobs, 3, sender="t").reshape(3, -1), slots)


def test_seal_and_bulk_ciphertexts_add_up() -> None:
    bulk, plain = BfvCipher(*RECIPE), SealsErrors(*RECIPE)
    keys = bulk.key_pair()
    public = plain.public_context(bulk.public_key(keys), sender="the test")
    slots = np.arange(-2048, 2048)[None]
    parts = {"a": bulk.encrypt(keys, slots), "b": plain.encrypt(public, slots)}
    assert np.array_equal(bulk.decrypt(keys, bulk.add(parts, 1), 1, sender="t"), 2 * slots[0])
