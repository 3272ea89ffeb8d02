"""Payloads: named tensors as safetensors and plain metadata as msgpack; no pickle, ever.

Layout: 4 bytes big-endian length of the metadata, the metadata, the tensors. All bytes from a peer
are hostile: `unpack_tensors` returns exactly the expected names, types and shapes, or raises
`RemoteProtocolError`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import safetensors
import torch
from safetensors.torch import load, save
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.base.peer_text import quote_text
from secure_apfed.base.transfers import fetch_tensors

_LENGTH_BYTES = 4
_META_LIMIT = 1 << 16
_MALFORMED = (
    ValueError,
    TypeError,
    KeyError,  # a dtype that safetensors knows and torch does not (F4, F8_E8M0)
    RuntimeError,  # an empty tensor whose other sizes overflow torch's strides
    msgpack.UnpackException,
    safetensors.SafetensorError,
)


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and shape that a received tensor must have; None in the shape is any size."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]

    def fits(self, tensor: Tensor) -> bool:
        """Return whether a tensor has this dtype and shape."""
        if tensor.dtype != self.dtype or tensor.dim() != len(self.shape):
            return False
        sizes = zip(self.shape, tensor.shape, strict=True)
        return all(accepted is None or accepted == size for accepted, size in sizes)


def pack_tensors(tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None) -> bytes:
    """Encode named tensors and metadata as bytes; `unpack_tensors` reads them.

    Tensors on a GPU are copied to the CPU together, with one wait for all.

    `meta`: metadata by name, of types that msgpack has (numbers, text, bytes, lists, mappings).
    """
    packed_meta: bytes = msgpack.packb(dict(meta or {}))
    copies = zip(tensors, fetch_tensors(*tensors.values()), strict=True)
    packed_tensors = save({name: tensor.contiguous() for name, tensor in copies})
    return len(packed_meta).to_bytes(_LENGTH_BYTES, "big") + packed_meta + packed_tensors


def unpack_own_tensors(payload: bytes) -> dict[str, Tensor]:
    """Return the tensors, by name, of a payload that this party packed itself, without checks."""
    meta_bytes = int.from_bytes(payload[:_LENGTH_BYTES], "big")
    return load(payload[_LENGTH_BYTES + meta_bytes :])


def unpack_tensors(
    payload: bytes, expected: Mapping[str, TensorSpec], *, sender: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Parse a payload from a peer; return its tensors by name, and its metadata.

    Args:
        payload: the untrusted bytes.
        expected: dtype and shape by name; the payload must have exactly these tensors.
        sender: the peer's name, for errors.

    Raises RemoteProtocolError: malformed bytes, missing or extra tensors, wrong dtype or shape.
    """
    try:
        meta_bytes = int.from_bytes(payload[:_LENGTH_BYTES], "big")
        tensors_start = _LENGTH_BYTES + meta_bytes
        if len(payload) < tensors_start or meta_bytes > _META_LIMIT:
            raise ValueError("metadata is longer than allowed or than the payload")
        meta = msgpack.unpackb(payload[_LENGTH_BYTES:tensors_start])
        if not isinstance(meta, dict):
            raise TypeError("metadata is not a mapping")
        tensors = load(payload[tensors_start:])
    except _MALFORMED as error:
        raise RemoteProtocolError(f"{sender} sent a payload that cannot be parsed") from error
    if tensors.keys() != expected.keys():
        raise RemoteProtocolError(
            f"{sender} sent the tensors {quote_text(sorted(tensors))}, expected {sorted(expected)}"
        )
    for name, spec in expected.items():
        tensor = tensors[name]
        if not spec.fits(tensor):
            raise RemoteProtocolError(
                f"{sender} sent {name!r} as {tensor.dtype} {tuple(tensor.shape)}, "
                f"expected {spec.dtype} {spec.shape}"
            )
    return tensors, meta
