"""Pair seeds and masks modulo t."""

import numpy as np
import pytest

from protocols.errors import LocalProtocolError
from protocols.sums import MaskedSum
from protocols.sums.pairwise import PairwiseSeeds, add_masks
from tests.contracts.sum_parties import agreement, binding

MODULI = [1, 2, 3, 40961, 2**36 + 1, 2**42 - 1]


def test_both_ends_of_a_pair_have_one_stream_for_a_step_and_shape() -> None:
    described = MaskedSum(agreement())
    ends = [PairwiseSeeds(*names, described.frames()) for names in (("a", ["b"]), ("b", ["a"]))]
    for sender, receiver in (ends, ends[::-1]):
        (message,) = sender.start()
        receiver.receive(sender.me, message.body)
    bound = binding(3)
    same = ends[0].stream("b", bound, (2, 3), 64)
    assert same == ends[1].stream("a", bound, (2, 3), 64)
    for other in (
        ends[0].stream("b", binding(4), (2, 3), 64),
        ends[0].stream("b", binding(3, message=1), (2, 3), 64),
        ends[0].stream("b", bound, (3, 2), 64),
    ):
        assert other != same


@pytest.mark.parametrize("modulus", MODULI)
def test_one_mask_is_uniform(modulus: int) -> None:
    count = 20_000
    stream = np.random.default_rng(0).bytes(16 * count)
    numbers = add_masks(np.zeros(count, dtype=np.int64), modulus, [(1, stream)])
    assert numbers.min() >= -(modulus // 2)
    assert numbers.max() < modulus - modulus // 2
    centre = (modulus - 1) / 2 - modulus // 2
    deviation = np.sqrt((modulus**2 - 1) / 12 / count)
    assert abs(numbers.mean() - centre) <= 6 * deviation


@pytest.mark.parametrize("modulus", MODULI)
def test_masks_are_the_residues_of_104_bits(modulus: int) -> None:
    rng = np.random.default_rng(1)
    streams = [(sign, rng.bytes(16 * 6)) for sign in (1, -1, -1)]
    values = np.array([[0, 1, -1], [2**58, -(2**58), 7]])
    masked = add_masks(values, modulus, streams).reshape(-1)
    for k, value in enumerate(values.reshape(-1).tolist()):
        total = value
        for sign, stream in streams:
            words = [int.from_bytes(stream[8 * j : 8 * j + 8], "little") for j in range(12)]
            total += sign * (words[k] << 40 | words[6 + k] % 2**40)
        assert (int(masked[k]) - total) % modulus == 0


def test_a_thousand_masks_cancel() -> None:
    rng = np.random.default_rng(2)
    streams = [rng.bytes(16 * 4) for _ in range(512)]
    values = np.array([-3, 0, 5, 2**40])
    both = [(1, stream) for stream in streams] + [(-1, stream) for stream in streams]
    assert np.array_equal(add_masks(values, 2**42 - 11, both), values)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="at most 42 bits, got 43"):
        add_masks(np.zeros(1, dtype=np.int64), 2**42, [])
    with pytest.raises(LocalProtocolError, match="2 masks take 32 bytes, got 31"):
        add_masks(np.zeros(2, dtype=np.int64), 5, [(1, bytes(31))])


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (128, 129), (700, 100)])
@pytest.mark.parametrize("word", ["<u4", "<u8"])
def test_a_stream_added_in_pieces_is_the_whole_stream(shape: tuple[int, int], word: str) -> None:
    described = MaskedSum(agreement())
    ends = [PairwiseSeeds(*names, described.frames()) for names in (("a", ["b"]), ("b", ["a"]))]
    ends[0].receive("b", ends[1].start()[0].body)
    ends[1].receive("a", ends[0].start()[0].body)
    bound = binding(5)
    total = np.full(shape, 7, dtype=word)
    ends[0].add_stream("b", bound, total, sign=1)
    whole = ends[1].stream("a", bound, shape, total.nbytes)
    assert np.array_equal(total - np.dtype(word).type(7), np.frombuffer(whole, word).reshape(shape))
    ends[1].add_stream("a", bound, total, sign=-1)
    assert (total == 7).all()
