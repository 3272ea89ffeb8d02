"""Any bytes parse to a frame or raise RemoteProtocolError; what parses is canonical."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums.frames import Frame, FrameKind, frame_bytes

frames = st.builds(
    Frame,
    kind=st.sampled_from(FrameKind),
    name=st.sampled_from(["plain", "bfv + pairwise masks", "thirty-two letters, counted here"]),
    party=st.integers(0, 2**16 - 1),
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
    assert len(packed) == frame_bytes(tuple(map(len, frame.blobs)))


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
    kind=FrameKind.SUM, name="ckks", party=2, step=1, rows=2, columns=3,
    binding=bytes(32), fingerprint=bytes(32), blobs=(b"one", b"two"),
)  # fmt: skip


def test_damage_is_named() -> None:
    cases: list[tuple[bytes, str]] = [
        (b"", "has 0 bytes, its header alone 124"),
        (b"X" + SAMPLE.pack()[1:], "no frame of version 1"),
        (SAMPLE.pack()[:5] + b"\x09" + SAMPLE.pack()[6:], "unknown kind"),
        (SAMPLE.pack()[:-1], "announces 138 bytes and has 137"),
        (SAMPLE.pack() + b"!", "it was cut or padded"),
        (SAMPLE.pack()[:120] + b"\xff\xff\xff\xff" + SAMPLE.pack()[124:], "4294967295 blobs in"),
        (SAMPLE.pack()[:8] + bytes(32) + SAMPLE.pack()[40:], "names no sum"),
        (SAMPLE.pack()[:9] + b"\0" + SAMPLE.pack()[10:], "names no sum"),
    ]
    for data, message in cases:
        with pytest.raises(RemoteProtocolError, match=f"from peer .*{message}"):
            Frame.parse(data, sender="peer")


def test_blobs_are_not_in_repr() -> None:
    assert "one" not in repr(SAMPLE)


def test_a_field_out_of_range_is_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError, match="1 to 32 characters"):
        Frame(**{**vars(SAMPLE), "name": "much too long " * 3}).pack()
    with pytest.raises(LocalProtocolError, match="out of range"):
        Frame(**{**vars(SAMPLE), "party": 2**16}).pack()
