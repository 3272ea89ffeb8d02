"""What travels: payloads and headers come back as they were; anything else raises
RemoteProtocolError and no more, also of thousands of mutated bytes in a process of their own.
"""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from secure_apfed.exchange import Envelope, Kind, TensorSpec, pack_tensors, unpack_tensors

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
ROWS = TensorSpec(torch.int64, (None,))
Z = TensorSpec(torch.float32, (None, 3))
EXPECTED = {"rows": ROWS, "z": Z}
UNPARSABLE = "passive sent a payload that cannot be parsed"


def batch() -> dict[str, Tensor]:
    return {"rows": torch.arange(2), "z": torch.linspace(0, 1, 6).reshape(2, 3)}


def pack_frame(meta: bytes, tensors: bytes) -> bytes:
    return len(meta).to_bytes(4, "big") + meta + tensors


def handmade(header: Any, body: bytes = b"", meta: Any = None) -> bytes:
    """A payload with safetensors bytes that no honest writer makes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return pack_frame(msgpack.packb(meta or {}), len(text).to_bytes(8, "little") + text + body)


def one(dtype: str, shape: list[int], size: int) -> bytes:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}
    return handmade({"z": entry}, bytes(size))


def name_bytes(content: bytes) -> str:
    """Name a case by its length and its first bytes."""
    return f"{len(content)} bytes {content[:24].hex()}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4, 5)], ids=str)
def test_tensors_and_metadata_come_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    sent = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 10).to(dtype)
    meta = {"learn": True, "list": [1, "two", b"three", None], "inner": {"x": 0.5}}
    tensors, got = unpack_tensors(
        pack_tensors({"t": sent}, meta), {"t": TensorSpec(dtype, shape)}, sender="p"
    )
    assert got == meta
    assert tensors["t"].dtype == dtype
    assert torch.equal(tensors["t"], sent)


@pytest.mark.parametrize(
    "odd",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.ones(1, 3).expand(4, 3),
        torch.ones(4, 3, requires_grad=True) * 2,
    ],
    ids=["transposed", "every other column", "expanded", "in a graph"],
)
def test_tensors_in_any_layout_come_back_plain(odd: Tensor) -> None:
    spec = TensorSpec(odd.dtype, tuple(odd.shape))
    got, _ = unpack_tensors(pack_tensors({"t": odd}), {"t": spec}, sender="p")
    assert torch.equal(got["t"], odd)
    assert not got["t"].requires_grad


@pytest.mark.parametrize(
    "meta", [{}, {"a": 1}, {"a": "x" * 65000}], ids=["empty", "a number", "long"]
)
def test_metadata_up_to_its_bound_is_read(meta: dict[str, Any]) -> None:
    payload = pack_frame(msgpack.packb(meta), pack_tensors({})[5:])
    assert unpack_tensors(payload, {}, sender="passive") == ({}, meta)


def test_special_numbers_keep_their_bits_and_equal_content_has_equal_bytes() -> None:
    sent = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    got, _ = unpack_tensors(
        pack_tensors({"t": sent}), {"t": TensorSpec(torch.float32, (4,))}, sender="p"
    )
    assert got["t"].view(torch.int32).tolist() == sent.view(torch.int32).tolist()
    backwards = dict(reversed(batch().items()))
    assert pack_tensors(batch(), {"a": 1}) == pack_tensors(backwards, {"a": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z": None}, r"tensors \['rows'\], expected \['rows', 'z'\]"),
        ({"rows": None, "z": None}, r"tensors \[\], expected"),
        ({"extra": torch.ones(1)}, r"tensors \['extra', 'rows', 'z'\], expected"),
        ({"z": torch.ones(2, 3).double()}, r"'z' as torch.float64 \(2, 3\), expected .*float32"),
        ({"z": torch.ones(2, 3).bfloat16()}, "torch.bfloat16"),
        ({"z": torch.ones(2, 4)}, r"\(2, 4\), expected .* \(None, 3\)"),
        ({"z": torch.ones(2, 3, 1)}, r"\(2, 3, 1\), expected"),
        ({"z": torch.tensor(1.0)}, r"torch.float32 \(\), expected"),
        ({"rows": torch.arange(2).int()}, "torch.int32"),
        ({"rows": torch.zeros(2)}, "'rows' as torch.float32"),
    ],
)
def test_other_tensors_are_refused_by_name(change: dict[str, Tensor | None], message: str) -> None:
    tensors = {key: value for key, value in {**batch(), **change}.items() if value is not None}
    with pytest.raises(RemoteProtocolError, match=message):
        unpack_tensors(pack_tensors(tensors), EXPECTED, sender="passive")


NO_MAPPINGS = [
    msgpack.packb([1, 2]),
    msgpack.packb(None),
    msgpack.packb(7),
    msgpack.packb("x"),
    b"",
    b"\xc1",
    b"\x81",
    msgpack.packb({1: 2}),
    msgpack.packb({"a": 1}) + b"\x00",
    b"\xdf\xff\xff\xff\xff",
    b"\x91" * 3000,
    b"\x81\xa1x" * 3000,
    msgpack.packb({"a": "x" * 66000}),
]


@pytest.mark.parametrize("packed", NO_MAPPINGS, ids=name_bytes)
def test_metadata_that_is_no_mapping_or_too_long_is_refused(packed: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=UNPARSABLE):
        unpack_tensors(pack_frame(packed, pack_tensors({})[5:]), {}, sender="passive")


NO_PAYLOADS = [
    b"",
    b"\x00",
    b"\x00\x00\x00\x00",
    b"\xff\xff\xff\xff",
    b"\xff\xff\xff\xff" + bytes(100),
    pack_frame(msgpack.packb({}), b""),
    pack_frame(msgpack.packb({}), b"\xff" * 8),
    pack_frame(msgpack.packb({}), (2**62).to_bytes(8, "little") + b"{}"),
    pack_frame(msgpack.packb({}), (10**8).to_bytes(8, "little") + b"{}"),
    handmade(b"[" * 5000),
    handmade(b"{" * 100),
    handmade(b"null"),
    handmade(b"[]"),
    handmade({"z": 5}),
    handmade({"z": {"dtype": "F32"}}),
    handmade(b"{}", b"left over"),
    one("F32", [2**40, 2**40], 4),
    one("F32", [2**61], 4),
    one("F32", [3], 8),
    one("F32", [0, 2**63], 0),
    one("F32", [0, 2**62, 2**62], 0),
    one("F32", [-1], 0),
    one("F4", [2], 1),
    one("F8_E8M0", [1], 1),
    one("F6_E2M3", [4], 3),
    one("X", [1], 1),
    handmade({"z": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**62]}}, bytes(4)),
    handmade({"z": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, bytes(4)),
    handmade({"z": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
    handmade(
        {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "yz"},
        bytes(4),
    ),
]
UNUSUAL = [one("C64", [1], 8), one("U16", [1], 2), one("F8_E5M2", [1], 1)]


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        *((payload, UNPARSABLE) for payload in NO_PAYLOADS),
        *((payload, "sent 'z' as") for payload in UNUSUAL),
    ],
    ids=map(name_bytes, [*NO_PAYLOADS, *UNUSUAL]),
)
def test_bytes_that_are_no_payload_are_refused(payload: bytes, says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        unpack_tensors(payload, {"z": TensorSpec(torch.float32, (None,))}, sender="passive")


# Headers

USUAL = (1, "session", 3, "sum", "active", "passive", 7)

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64)


def envelope(**changes: Any) -> Envelope:
    usual: dict[str, Any] = {
        "session": "session",
        "step": 3,
        "kind": Kind.SUM,
        "sender": "active",
        "receiver": "passive",
        "sequence": 7,
        "payload": b"secret bytes",
    }
    return Envelope(**{**usual, **changes})


def pack_fields(*fields: Any) -> bytes:
    header: bytes = msgpack.packb(fields)
    return header


@given(
    ends=st.tuples(names, names).filter(lambda ends: ends[0] != ends[1]),
    fields=st.fixed_dictionaries(
        {
            "session": st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=256),
            "step": st.integers(-1, 2**63 - 1),
            "kind": st.sampled_from(Kind),
            "sequence": st.integers(0, 2**63 - 1),
        }
    ),
)
def test_a_header_parses_back_without_its_payload(
    ends: tuple[str, str], fields: dict[str, Any]
) -> None:
    sent = envelope(sender=ends[0], receiver=ends[1], **fields)
    assert Envelope.parse_header(sent.header) == replace(sent, payload=b"")
    assert len(sent.header) <= 4096


def test_the_header_is_what_the_format_says_and_shows_no_payload() -> None:
    assert envelope().header == pack_fields(*USUAL)
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


@pytest.mark.parametrize(("changes", "message"), BOUNDS)
def test_bounds_are_ours_to_keep(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LocalProtocolError, match=message):
        envelope(**changes)


@pytest.mark.parametrize("version", [0, 2, -1])
def test_a_header_of_another_version_is_refused(version: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"schema {version}, this party 1"):
        Envelope.parse_header(replace_field(0, version))


def replace_field(position: int, value: Any) -> bytes:
    return pack_fields(*USUAL[:position], value, *USUAL[position + 1 :])


OTHER_FIELDS: list[tuple[int, Any]] = [
    (0, True),
    (0, 1.0),
    (0, "1"),
    (0, [b"x" * 100]),
    (1, None),
    (1, b"session"),
    (1, ["session"]),
    (1, ""),
    (1, "s" * 257),
    (2, 3.0),
    (2, float("nan")),
    (2, True),
    (2, None),
    (2, -2),
    (2, 2**63),
    (2, [3]),
    (3, "unknown"),
    (3, b"sum"),
    (3, None),
    (3, ["sum"]),
    (3, {}),
    (4, b"active"),
    (4, ["active"]),
    (4, ""),
    (4, "x" * 65),
    (4, "passive"),
    (4, 5),
    (5, b"passive"),
    (5, None),
    (5, ""),
    (6, 7.0),
    (6, 0.0),
    (6, False),
    (6, -1),
    (6, 2**64 - 1),
    (6, "7"),
    (6, msgpack.Timestamp(1)),
]
NO_HEADERS = [
    *(
        b"",
        b"\xc1",
        pack_fields(*USUAL)[:-1],
        pack_fields(*USUAL) + b"\x00",
        pack_fields(*USUAL[:-1]),
    ),
    *(pack_fields(*USUAL, 0), pack_fields(), *map(msgpack.packb, (5, None, dict.fromkeys(USUAL)))),
    b"\xdc\x00\x07" + pack_fields(*USUAL)[1:],  # the same seven fields, as array16
    pack_fields(*USUAL).replace(b"\x03\xa3sum", b"\xcc\x03\xa3sum"),  # step 3 as uint8
    pack_fields(*USUAL).replace(b"\xa3sum", b"\xd9\x03sum"),  # kind as str8
    b"\x91" * 2000,  # deep nesting
    b"\xdd\xff\xff\xff\xff",  # four billion fields announced
    b"\xdb\xff\xff\xff\xff",
    bytes(4097),
    pack_fields(1, "s" * 5000, *USUAL[2:]),
    b"\x97\x01\xa2\xff\xfe" + pack_fields(*USUAL)[10:],  # not UTF-8
]


@pytest.mark.parametrize(
    "header", [*NO_HEADERS, *(replace_field(*other) for other in OTHER_FIELDS)], ids=name_bytes
)
def test_anything_but_a_canonical_header_is_refused(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="header is malformed"):
        Envelope.parse_header(header)


# Parsed by native code, which could take the whole test run down with it.
FUZZ = """
import random
import resource

import torch

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.seal import SealedLink, fresh_run_key
from secure_apfed.exchange import Kind, Links, TensorSpec, pack_tensors, unpack_tensors
from tests.contracts.hostile import mutate_bytes

chance = random.Random(11)
expected = {"rows": TensorSpec(torch.int64, (None,)), "z": TensorSpec(torch.float32, (None, 8))}
payload = pack_tensors({"rows": torch.arange(4), "z": torch.ones(4, 8)}, {"learn": True})
ends = {("active", "p1"): fresh_run_key(), ("p1", "active"): fresh_run_key()}
seals = [
    SealedLink(me=me, peer=peer, run_key=key, contract_hash=bytes(32))
    for (me, peer), key in ends.items()
]
frames, links = [], [Links(me, [peer], lambda to, frame: frames.append(frame)) for me, peer in ends]
for link, own, other, key in zip(links, seals, seals[::-1], [*ends.values()][::-1]):
    own.agree(key.public, other.hello)
    link.seal("s", {own.peer: own})
links[0].send("p1", Kind.REPRESENTATIONS, 0, payload)
(frame,) = frames


def payload_refused(data: bytes) -> bool:
    try:
        unpack_tensors(data, expected, sender="active")
    except RemoteProtocolError:
        return True
    return False


def frame_refused(data: bytes) -> bool:
    script = links[1].receive("active", Kind.REPRESENTATIONS, step=0)
    script.send(None)
    try:
        script.send(("active", data))
    except StopIteration:
        return False
    except RemoteProtocolError:
        return True


before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
refused = sum(payload_refused(mutate_bytes(chance, payload)) for _ in range(4_000))
bad_frames = [bad for bad in (mutate_bytes(chance, frame) for _ in range(4_000)) if bad != frame]
refused_frames = sum(frame_refused(bad) for bad in bad_frames)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert not payload_refused(payload)
assert not frame_refused(frame)
print(refused, len(bad_frames) - refused_frames, grown // 1024)
"""


@pytest.mark.slow
def test_mutated_bytes_crash_nothing_and_hold_no_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FUZZ], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    refused, frames_let_through, grown_mib = map(int, done.stdout.split())
    assert refused > 2000  # a changed number or key of the metadata may still be a payload
    assert frames_let_through == 0
    assert grown_mib < 100
