"""Pair seeds and the streams that they give."""

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.randomness import keystream
from apfed_protocols.sums import MaskedSum, StepBinding
from apfed_protocols.sums.masked import PairwiseSeeds, add_keystream
from tests.contracts.sum_parties import agreement, binding


def stream(
    end: PairwiseSeeds, peer: str, bound: StepBinding, shape: tuple[int, int], length: int
) -> bytes:
    """The bytes that two ends share, from the definition: AES-CTR under a sub-key of the seed."""
    sizes = b"".join(size.to_bytes(8, "big") for size in shape)
    return keystream(vars(end)["_seeds"][peer], b"mask", bound.digest, sizes, length=length)


def added(
    end: PairwiseSeeds, peer: str, bound: StepBinding, shape: tuple[int, int]
) -> NDArray[np.uint64]:
    total = np.zeros(shape, dtype=np.uint64)
    end.add_stream(peer, bound, total, sign=1)
    return total.reshape(-1)


def paired() -> list[PairwiseSeeds]:
    described = MaskedSum(agreement())
    ends = [PairwiseSeeds(*names, described.frames()) for names in (("a", ["b"]), ("b", ["a"]))]
    for sender, receiver in (ends, ends[::-1]):
        (message,) = sender.start()
        receiver.receive(sender.me, message.body)
    return ends


def test_both_ends_of_a_pair_have_one_stream_for_a_step_and_shape() -> None:
    ends, bound = paired(), binding(3)
    same = added(ends[0], "b", bound, (2, 3))
    assert np.array_equal(same, added(ends[1], "a", bound, (2, 3)))
    for other in (
        added(ends[0], "b", binding(4), (2, 3)),
        added(ends[0], "b", binding(3, message=1), (2, 3)),
        added(ends[0], "b", bound, (3, 2)),
    ):
        assert not np.array_equal(other, same)


def test_a_stream_added_in_pieces_is_the_whole_stream() -> None:
    ends, bound = paired(), binding(5)
    for word, shape in product(("<u4", "<u8"), ((1, 1), (128, 128), (128, 129), (700, 100))):
        total = np.full(shape, 7, dtype=word)
        ends[0].add_stream("b", bound, total, sign=1)
        whole = np.frombuffer(stream(ends[1], "a", bound, shape, total.nbytes), word)
        assert np.array_equal(total - np.dtype(word).type(7), whole.reshape(shape))
        ends[1].add_stream("a", bound, total, sign=-1)
        assert (total == 7).all()


def test_a_mask_never_falls_on_a_copy() -> None:
    for total in [np.zeros((3, 4), order="F", dtype="<u4"), np.zeros((6, 4), dtype="<u4")[::2]]:
        with pytest.raises(LocalProtocolError, match="rows that follow each other in memory"):
            add_keystream(total, bytes(32), bytes(32), sign=1)
        assert not total.any()
