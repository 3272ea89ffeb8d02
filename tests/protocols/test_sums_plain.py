"""The unprotected sum: exact where it must be, and loud about what it is."""

import warnings

import numpy as np
import pytest

from apfed_protocols.errors import RemoteProtocolError, UnsafeChoiceWarning
from apfed_protocols.sums import PlainSum
from apfed_protocols.sums.frames import frame_bytes
from tests.contracts.sum_parties import Parties, agreement, random_values


def raw_parties() -> Parties:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        return Parties(PlainSum(agreement(), clip=False))


def test_it_warns_once_on_construction() -> None:
    with pytest.warns(UnsafeChoiceWarning, match="aggregator reads each contribution") as caught:
        PlainSum(agreement())
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert PlainSum.unsafe


def test_float64_is_added_bit_by_bit_in_the_order_of_the_agreement() -> None:
    values = [value * 10.0**k for k, value in enumerate(random_values(3, (40, 7)))]
    total = raw_parties().add(values)
    assert total.dtype == np.float64
    assert np.array_equal(total, (values[0] + values[1]) + values[2])
    assert not np.array_equal(total, values[0] + (values[1] + values[2]))


def test_float32_travels_as_float32() -> None:
    values = [value.astype(np.float32) for value in random_values(3, (100, 10))]
    played = raw_parties()
    sizes = [len(frame) for frame in played.contribute(values, played.next()).values()]
    assert set(sizes) == {frame_bytes((4 * 1000,))}
    total = played.add(values)
    assert total.dtype == np.float32
    assert np.array_equal(total, values[0] + values[1] + values[2])


def test_precisions_do_not_mix() -> None:
    values = random_values(3)
    values[1] = values[1].astype(np.float32)
    played = raw_parties()
    contributions = played.contribute(values, played.next())
    with pytest.raises(RemoteProtocolError, match="all must use one precision"):
        played.combiner.combine(contributions)


def test_nan_and_overflow_from_a_peer_are_refused() -> None:
    played = raw_parties()
    bound = played.next()
    contributions = played.contribute([np.full((1, 1), 1e308)] * 3, bound)
    combined = played.combiner.combine(contributions)
    with pytest.raises(RemoteProtocolError, match="aggregator sent values beyond"):
        played.receiver.decode(combined, (1, 1), bound)
    contributions = played.contribute([np.zeros((1, 1))] * 3, played.next())
    contributions["passive_2"] = contributions["passive_2"][:-8] + np.float64(np.nan).tobytes()
    with pytest.raises(RemoteProtocolError, match="passive_2 sent values beyond"):
        played.combiner.combine(contributions)
