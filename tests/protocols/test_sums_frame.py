"""Frames: any bytes are one, in one spelling, or an error; the sum without protection."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError, UnsafeChoiceWarning
from apfed_protocols.sums import PlainSum
from apfed_protocols.sums.frames import Frame, FrameKind
from tests.contracts.sum_parties import Parties, agreement, random_values

frames = st.builds(
    Frame,
    kind=st.sampled_from(FrameKind),
    name=st.sampled_from(["plain", "bfv + pairwise masks", "thirty-two letters, counted here"]),
    index_or_count=st.integers(0, 2**16 - 1),
    step=st.integers(0, 2**64 - 1),
    rows=st.integers(0, 2**15),
    columns=st.integers(0, 2**15),
    binding=st.binary(min_size=32, max_size=32),
    fingerprint=st.binary(min_size=32, max_size=32),
    blobs=st.lists(st.binary(max_size=20), max_size=4).map(tuple),
)


@given(frames)
def test_round_trip(frame: Frame) -> None:
    packed = frame.pack()
    assert Frame.parse(packed, sender="peer") == frame


@given(st.binary(max_size=300))
def test_any_bytes_parse_or_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Frame.parse(data, sender="peer")


@given(frames, st.data())
def test_changed_bytes_parse_canonically_or_are_refused(frame: Frame, data: st.DataObject) -> None:
    packed = bytearray(frame.pack())
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    changed = bytes(packed)
    try:
        parsed = Frame.parse(changed, sender="peer")
    except RemoteProtocolError:
        return
    assert parsed.pack() == changed


SAMPLE = Frame(
    kind=FrameKind.SUM,
    name="ckks",
    index_or_count=2,
    step=1,
    rows=2,
    columns=3,
    binding=bytes(32),
    fingerprint=bytes(32),
    blobs=(b"one", b"two"),
)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "has 0 bytes, its header alone 124", id="nothing"),
        pytest.param(b"X" + SAMPLE.pack()[1:], "no frame of version 1", id="no format"),
        pytest.param(
            SAMPLE.pack()[:5] + b"\x09" + SAMPLE.pack()[6:], "unknown kind", id="another kind"
        ),
        pytest.param(SAMPLE.pack()[:-1], "announces 138 bytes and has 137", id="cut"),
        pytest.param(SAMPLE.pack() + b"!", "it was cut or padded", id="padded"),
        pytest.param(
            SAMPLE.pack()[:120] + b"\xff\xff\xff\xff" + SAMPLE.pack()[124:],
            "4294967295 blobs in",
            id="too many blobs",
        ),
        pytest.param(
            SAMPLE.pack()[:8] + bytes(32) + SAMPLE.pack()[40:], "names no sum", id="no sum"
        ),
        pytest.param(
            SAMPLE.pack()[:9] + b"\0" + SAMPLE.pack()[10:], "names no sum", id="half a name"
        ),
    ],
)
def test_damage_is_named(data: bytes, message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"from peer .*{message}"):
        Frame.parse(data, sender="peer")


def test_blobs_are_not_in_repr() -> None:
    assert "one" not in repr(SAMPLE)


def test_a_field_out_of_range_is_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError, match="1 to 32 characters"):
        Frame(**{**vars(SAMPLE), "name": "much too long " * 3}).pack()
    with pytest.raises(LocalProtocolError, match="out of range"):
        Frame(**{**vars(SAMPLE), "index_or_count": 2**16}).pack()


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
    blobs = [
        Frame.parse(sent, sender=name).blobs
        for name, sent in played.contribute(values, played.next()).items()
    ]
    assert {tuple(map(len, each)) for each in blobs} == {(4 * 1000,)}
    total = played.add(values)
    assert total.dtype == np.float32
    assert np.array_equal(total, values[0] + values[1] + values[2])


def test_precisions_do_not_mix() -> None:
    values = random_values(3)
    values[1] = values[1].astype(np.float32)
    played = raw_parties()
    contributions = played.contribute(values, played.next())
    with pytest.raises(RemoteProtocolError, match="all must use one precision"):
        played.aggregator.combine(contributions)


def test_nan_and_overflow_from_a_peer_are_refused() -> None:
    played = raw_parties()
    bound = played.next()
    contributions = played.contribute([np.full((1, 1), 1e308)] * 3, bound)
    combined = played.aggregator.combine(contributions)
    with pytest.raises(RemoteProtocolError, match="aggregator sent values beyond"):
        played.receiver.decode(combined, (1, 1), bound)
    contributions = played.contribute([np.zeros((1, 1))] * 3, played.next())
    contributions["passive_2"] = contributions["passive_2"][:-8] + np.float64(np.nan).tobytes()
    with pytest.raises(RemoteProtocolError, match="passive_2 sent values beyond"):
        played.aggregator.combine(contributions)
