"""Headers: canonical, bounded, typed; any bytes parse or raise RemoteProtocolError."""

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from secure_apfed.exchange import Envelope, Kind

USUAL = (1, "session", 3, "sum", "active", "passive", 7)

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64)


def envelope(**changes: Any) -> Envelope:
    usual: dict[str, Any] = {
        "session": "session", "step": 3, "kind": Kind.SUM, "sender": "active",
        "receiver": "passive", "sequence": 7, "payload": b"secret bytes",
    }  # fmt: skip
    return Envelope(**{**usual, **changes})


def packed(*fields: Any) -> bytes:
    header: bytes = msgpack.packb(fields)
    return header


@given(
    session=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=256),
    step=st.integers(-1, 2**63 - 1),
    kind=st.sampled_from(Kind),
    pair=st.tuples(names, names).filter(lambda pair: pair[0] != pair[1]),
    sequence=st.integers(0, 2**63 - 1),
)
def test_a_header_parses_back_without_its_payload(
    session: str, step: int, kind: Kind, pair: tuple[str, str], sequence: int
) -> None:
    sent = Envelope(
        session=session, step=step, kind=kind, sender=pair[0], receiver=pair[1],
        sequence=sequence, payload=b"body",
    )  # fmt: skip
    assert Envelope.parse_header(sent.header) == replace(sent, payload=b"")
    assert len(sent.header) <= 4096


def test_the_header_is_what_the_format_says() -> None:
    assert envelope().header == packed(*USUAL)


def test_the_payload_is_absent_from_repr() -> None:
    assert "secret" not in repr(envelope())
    assert "payload" not in repr(envelope())


BOUNDS: list[tuple[dict[str, Any], str]] = [
    ({"sender": ""}, "1 to 64 characters"),
    ({"receiver": "x" * 65}, "1 to 64 characters"),
    ({"receiver": "active"}, "cannot write to itself"),
    ({"step": -2}, "step -2 .* out of range"),
    ({"step": 2**63}, "out of range"),
    ({"sequence": -1}, "sequence -1 is out of range"),
    ({"sequence": 2**63}, "out of range"),
    ({"session": ""}, "session's name has 1 to 256 characters"),
    ({"session": "s" * 257}, "got 257"),
]


def test_bounds_are_ours_to_keep() -> None:
    for changes, message in BOUNDS:
        with pytest.raises(LocalProtocolError, match=message):
            envelope(**changes)


def with_field(position: int, value: Any) -> bytes:
    return packed(*USUAL[:position], value, *USUAL[position + 1 :])


def test_another_version_is_named() -> None:
    for version in (0, 2, -1):
        with pytest.raises(RemoteProtocolError, match=f"schema {version}, this party 1"):
            Envelope.parse_header(with_field(0, version))


OTHER_FIELDS: list[tuple[int, Any]] = [
    (0, True), (0, 1.0), (0, "1"), (0, [b"x" * 100]),
    (1, None), (1, b"session"), (1, ["session"]), (1, ""), (1, "s" * 257),
    (2, 3.0), (2, float("nan")), (2, True), (2, None), (2, -2), (2, 2**63), (2, [3]),
    (3, "unknown"), (3, b"sum"), (3, None), (3, ["sum"]), (3, {}),
    (4, b"active"), (4, ["active"]), (4, ""), (4, "x" * 65), (4, "passive"), (4, 5),
    (5, b"passive"), (5, None), (5, ""),
    (6, 7.0), (6, 0.0), (6, False), (6, -1), (6, 2**64 - 1), (6, "7"),
    (6, msgpack.Timestamp(1)),
]  # fmt: skip
NO_HEADERS = [
    b"",
    b"\xc1",
    packed(*USUAL)[:-1],
    packed(*USUAL) + b"\x00",
    packed(*USUAL[:-1]),
    packed(*USUAL, 0),
    packed(),
    msgpack.packb(5),
    msgpack.packb(None),
    msgpack.packb(dict.fromkeys(USUAL)),
    b"\xdc\x00\x07" + packed(*USUAL)[1:],  # the same seven fields, as array16
    packed(*USUAL).replace(b"\x03\xa3sum", b"\xcc\x03\xa3sum"),  # step 3 as uint8
    packed(*USUAL).replace(b"\xa3sum", b"\xd9\x03sum"),  # kind as str8
    b"\x91" * 2000,  # deep nesting
    b"\xdd\xff\xff\xff\xff",  # four billion fields announced
    b"\xdb\xff\xff\xff\xff",
    bytes(4097),
    packed(1, "s" * 5000, *USUAL[2:]),
    b"\x97\x01\xa2\xff\xfe" + packed(*USUAL)[10:],  # not UTF-8
]


def test_anything_but_a_canonical_header_is_malformed() -> None:
    for header in [*NO_HEADERS, *(with_field(*other) for other in OTHER_FIELDS)]:
        with pytest.raises(RemoteProtocolError, match="header is malformed"):
            Envelope.parse_header(header)


def parses_or_is_refused(header: bytes) -> None:
    try:
        parsed = Envelope.parse_header(header)
    except RemoteProtocolError:
        return
    assert parsed.header == header
    assert (type(parsed.step), type(parsed.sequence)) == (int, int)
    assert {type(parsed.session), type(parsed.sender), type(parsed.receiver)} == {str}


@settings(max_examples=200)
@given(at=st.integers(0, len(packed(*USUAL)) - 1), value=st.integers(0, 255))
def test_a_mutated_header_parses_or_is_refused(at: int, value: int) -> None:
    header = bytearray(packed(*USUAL))
    header[at] = value
    parses_or_is_refused(bytes(header))
