"""Payloads: what was packed comes back; anything else raises RemoteProtocolError and no more."""

import json
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.exchange import TensorSpec, pack, unpack

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
ROWS = TensorSpec(torch.int64, (None,))
Z = TensorSpec(torch.float32, (None, 3))
EXPECTED = {"rows": ROWS, "z": Z}
UNPARSABLE = "passive sent a payload that cannot be parsed"


def batch() -> dict[str, Tensor]:
    return {"rows": torch.arange(2), "z": torch.linspace(0, 1, 6).reshape(2, 3)}


def framed(meta: bytes, tensors: bytes) -> bytes:
    return len(meta).to_bytes(4, "big") + meta + tensors


def handmade(header: Any, body: bytes = b"", meta: Any = None) -> bytes:
    """A payload with safetensors bytes that no honest writer makes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return framed(msgpack.packb(meta or {}), len(text).to_bytes(8, "little") + text + body)


def one(dtype: str, shape: list[int], size: int) -> bytes:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}
    return handmade({"z": entry}, bytes(size))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4, 5)], ids=str)
def test_tensors_and_metadata_come_back(shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        sent = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 10).to(dtype)
        meta = {"learn": True, "list": [1, "two", b"three", None], "inner": {"x": 0.5}}
        tensors, got = unpack(pack({"t": sent}, meta), {"t": TensorSpec(dtype, shape)}, sender="p")
        assert got == meta
        assert tensors["t"].dtype == dtype
        assert torch.equal(tensors["t"], sent)


def test_tensors_in_any_layout_come_back_plain() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    graph = torch.ones(4, 3, requires_grad=True) * 2
    for odd in (whole.T, whole[:, ::2], torch.ones(1, 3).expand(4, 3), graph):
        spec = TensorSpec(odd.dtype, tuple(odd.shape))
        got, _ = unpack(pack({"t": odd}), {"t": spec}, sender="p")
        assert torch.equal(got["t"], odd)
        assert not got["t"].requires_grad


def test_special_numbers_keep_their_bits() -> None:
    sent = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    got, _ = unpack(pack({"t": sent}), {"t": TensorSpec(torch.float32, (4,))}, sender="p")
    assert got["t"].view(torch.int32).tolist() == sent.view(torch.int32).tolist()


def test_equal_content_has_equal_bytes_in_any_order() -> None:
    tensors = batch()
    backwards = dict(reversed(tensors.items()))
    assert pack(tensors, {"a": 1}) == pack(backwards, {"a": 1})


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
        unpack(pack(tensors), EXPECTED, sender="passive")


NO_MAPPINGS = [
    msgpack.packb([1, 2]), msgpack.packb(None), msgpack.packb(7), msgpack.packb("x"),
    b"", b"\xc1", b"\x81", msgpack.packb({1: 2}), msgpack.packb({"a": 1}) + b"\x00",
    b"\xdf\xff\xff\xff\xff", b"\x91" * 3000, b"\x81\xa1x" * 3000,
    msgpack.packb({"a": "x" * 66000}),
]  # fmt: skip


def test_metadata_that_is_no_mapping_or_too_long_is_refused() -> None:
    body = pack({})[5:]
    for meta in ({}, {"a": 1}, {"a": "x" * 65000}):
        assert unpack(framed(msgpack.packb(meta), body), {}, sender="passive") == ({}, meta)
    for packed in NO_MAPPINGS:
        with pytest.raises(RemoteProtocolError, match=UNPARSABLE):
            unpack(framed(packed, body), {}, sender="passive")


NO_PAYLOADS = [
    b"", b"\x00", b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\xff\xff\xff\xff" + bytes(100),
    framed(msgpack.packb({}), b""),
    framed(msgpack.packb({}), b"\xff" * 8),
    framed(msgpack.packb({}), (2**62).to_bytes(8, "little") + b"{}"),
    framed(msgpack.packb({}), (10**8).to_bytes(8, "little") + b"{}"),
    handmade(b"[" * 5000), handmade(b"{" * 100), handmade(b"null"), handmade(b"[]"),
    handmade({"z": 5}), handmade({"z": {"dtype": "F32"}}), handmade(b"{}", b"left over"),
    one("F32", [2**40, 2**40], 4), one("F32", [2**61], 4), one("F32", [3], 8),
    one("F32", [0, 2**63], 0), one("F32", [0, 2**62, 2**62], 0), one("F32", [-1], 0),
    one("F4", [2], 1), one("F8_E8M0", [1], 1), one("F6_E2M3", [4], 3), one("X", [1], 1),
    handmade({"z": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**62]}}, bytes(4)),
    handmade({"z": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, bytes(4)),
    handmade({"z": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
    handmade(
        {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "yz"},
        bytes(4),
    ),
]  # fmt: skip
UNUSUAL = [one("C64", [1], 8), one("U16", [1], 2), one("F8_E5M2", [1], 1)]


@pytest.mark.parametrize(
    ("payloads", "says"), [(NO_PAYLOADS, UNPARSABLE), (UNUSUAL, "sent 'z' as")]
)
def test_bytes_that_are_no_payload_are_refused(payloads: list[bytes], says: str) -> None:
    for payload in payloads:
        with pytest.raises(RemoteProtocolError, match=says):
            unpack(payload, {"z": TensorSpec(torch.float32, (None,))}, sender="passive")


def test_every_truncation_is_refused() -> None:
    payload = pack(batch(), {"learn": True})
    for length in range(len(payload)):
        with pytest.raises(RemoteProtocolError):
            unpack(payload[:length], EXPECTED, sender="passive")
    with pytest.raises(RemoteProtocolError):
        unpack(payload + b"\x00", EXPECTED, sender="passive")


def opens_or_is_refused(payload: bytes) -> None:
    try:
        tensors, meta = unpack(payload, EXPECTED, sender="passive")
    except RemoteProtocolError:
        return
    assert ROWS.fits(tensors["rows"])
    assert Z.fits(tensors["z"])
    assert isinstance(meta, dict)


sizes = st.lists(st.sampled_from([0, 1, 2, 3, 2**31, 2**62, 2**63 - 1, 2**64 - 1]), max_size=4)
kinds = st.sampled_from(["F32", "I64", "F4", "F8_E8M0", "F6_E3M2", "C64", "BOOL", "BF16", "?"])


@settings(max_examples=200)
@given(shape=sizes, dtype=kinds, size=st.integers(0, 24))
def test_any_declared_tensor_opens_or_is_refused(shape: list[int], dtype: str, size: int) -> None:
    opens_or_is_refused(one(dtype, shape, size))
