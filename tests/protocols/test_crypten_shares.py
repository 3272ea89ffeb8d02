"""Additive and binary sharing with CrypTen's tensors, all parties as threads of this process."""

import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("crypten") is None:
    pytest.skip("crypten is absent", allow_module_level=True)

from apfed_protocols.crypten import add_shares, compute_last_share, draw_share, reconstruct_sum
from apfed_protocols.crypten.tensors import DealtTriples
from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.psi.hashing import TripleShares
from apfed_protocols.randomness import fresh_key

INT64 = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=60)
@given(st.lists(INT64, min_size=1, max_size=6), st.integers(1, 6))
def test_shares_give_back_their_numbers(numbers: list[int], parties: int) -> None:
    values = np.array(numbers, np.int64)
    drawn = [draw_share(fresh_key(), values.shape) for _ in range(parties - 1)]
    assert (reconstruct_sum([compute_last_share(values, drawn), *drawn]) == values).all()


@settings(max_examples=60)
@given(st.lists(st.lists(INT64, min_size=3, max_size=3), min_size=1, max_size=5))
def test_crypten_adds_as_the_ring_does(numbers: list[list[int]]) -> None:
    shares = [np.array(row, np.int64).view(np.uint64) for row in numbers]
    exact = [sum(int(row[k]) for row in numbers) % 2**64 for k in range(3)]
    assert add_shares(shares).tolist() == exact
    assert [row.view(np.int64).tolist() for row in shares] == numbers, "its input is untouched"


def test_drawn_shares_are_fresh_and_uniform() -> None:
    one, other = (draw_share(fresh_key(), (100, 100)) for _ in range(2))
    assert (one != other).all()
    ones = np.bitwise_count(np.stack([one, other])).mean() / 64
    assert abs(ones - 0.5) < 0.005
    key = fresh_key()
    assert (draw_share(key, (4, 2)) == draw_share(key, (8,)).reshape(4, 2)).all()


def test_a_dealer_deals_bits_of_equal_shapes_only() -> None:
    provider = DealtTriples(TripleShares.from_seed(fresh_key(), 8).take_triple)
    with pytest.raises(LocalProtocolError, match="for equal shapes on the processor"):
        provider.generate_binary_triple((2, 3), (3, 2))
    with pytest.raises(LocalProtocolError, match="for equal shapes on the processor"):
        provider.generate_binary_triple((2,), (2,), device="cuda")
    with pytest.raises(LocalProtocolError, match="asks its provider for generate_additive_triple"):
        _ = provider.generate_additive_triple
