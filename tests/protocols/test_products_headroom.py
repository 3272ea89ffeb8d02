"""Parameters are secure and hold the worst noise; what does not fit says so."""

import itertools
from typing import Any

import numpy as np
import pytest

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.noise import largest_noise
from apfed_protocols.products.ring import LARGEST_ERROR, Digits, row_limit, solve_products
from apfed_protocols.sums.fixed_point import SECURE_MODULUS_BITS
from tests.contracts.product_parties import ProductParties, agreement, matrices

CASES: list[dict[str, Any]] = [
    {"bits": bits, "labelled": n, "columns": K, "people": U, "passives": M, "noise": noise}
    for bits, n, K, U, M, noise in itertools.product(
        (2, 16, 20), (1, 50, 1000), (1, 10, 200), (1, 10**6), (2, 64), (None, 10**4)
    )
] + [{"bits": 16, "labelled": 50, "columns": K, "people": 10**5, "passives": 3, "noise": None,
      "candidates": 20} for K in (1, 2, 10, 64)]  # fmt: skip


def test_parameters_hold_the_bounds() -> None:
    for case in CASES:
        agreed = agreement(**case)
        found, passives = solve_products(agreed), case["passives"]
        assert found.modulus_bits <= SECURE_MODULUS_BITS[found.degree]
        assert sum(found.widths) == found.modulus_bits
        assert found.kept_bits in {sum(found.widths[place:]) for place in range(len(found.widths))}
        assert found.folds == (2 if agreed.candidates else 1)
        assert found.stride >= found.folds * agreed.columns
        limit = passives * (row_limit(agreed) + largest_noise(agreed.noise or 0))
        assert 2 ** (found.plain_bits - 1) > limit
        assert 2**found.plain_bits <= 4 * limit + 1  # no larger than it must be
        own = found.folds * LARGEST_ERROR * (found.rows * row_limit(agreed) + 2 * found.degree)
        values = passives * agreed.people * agreed.columns
        assert own * values * 2**agreed.security <= 2**found.smudging_bits
        noise = (
            passives
            * (own + 2 ** (found.smudging_bits - 1))
            / 2 ** (found.modulus_bits - found.kept_bits)
        )
        tail = 6 * np.sqrt(passives * (found.folds * found.degree + 1) / 4)
        assert noise + tail < found.noise_bound < 2 ** (found.kept_bits - found.plain_bits - 1)


def test_the_published_parameters() -> None:
    found = solve_products(agreement(3, people=100_000, columns=10, labelled=50))
    assert (found.degree, found.modulus_bits, found.kept_bits) == (4096, 109, 32)
    assert (found.plain_bits, found.smudging_bits, found.rows) == (18, 89, 256)
    found = solve_products(agreement(3, people=10**6, columns=10, labelled=200))
    assert (found.degree, found.modulus_bits, found.kept_bits) == (8192, 117, 32)


def test_what_does_not_fit_says_so() -> None:
    agreed = agreement(
        1000, people=2**28, columns=512, security=64, noise=2**24, bits=24, labelled=50
    )
    with pytest.raises(LocalProtocolError, match="take fewer bits"):
        solve_products(agreed)


@pytest.mark.parametrize("candidates", [None, 2])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("opens", [True, False])
def test_the_bound_of_the_noise_is_real(
    opens: bool, sign: int, candidates: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest smudging noise at all passives opens; a sixth beyond the bound does not."""
    agreed = agreement(3, people=100_000, columns=10, labelled=2, candidates=candidates)
    played = ProductParties(agreed)
    found, ring = played.sum.headroom, played.sum.ring

    def largest(c0: Digits) -> None:
        if opens:
            ring.add_at(c0, found.smudging_bits - 1, sign)
        else:
            dropped = found.modulus_bits - found.kept_bits
            ring.add_at(c0, dropped, sign * 7 * found.noise_bound // 18)

    for role in played.contributors.values():
        monkeypatch.setattr(role, "_smudge", largest)
    rows = matrices(agreed)
    combined = played.combiner.combine(0, played.answers(0, rows))
    if opens:
        people = played.sum.people_of(0)
        expected = played.integers(rows)[people.start : people.stop]
        opened = played.receiver.open(0, combined) * played.sum.fixed_point.levels
        assert np.array_equal(np.rint(opened), expected)
    else:
        with pytest.raises(RemoteProtocolError, match="beyond the range"):
            played.receiver.open(0, combined)
