"""How parties exchange anything: envelope, codec, transport, transcript."""

from secure_apfed.exchange.codec import TensorSpec, pack, unpack
from secure_apfed.exchange.envelope import Envelope, Kind
from secure_apfed.exchange.transcript import Flow, Transcript, TranscriptSettings
from secure_apfed.exchange.transport import InMemoryTransport, Transport

__all__ = [
    "Envelope",
    "Flow",
    "InMemoryTransport",
    "Kind",
    "TensorSpec",
    "Transcript",
    "TranscriptSettings",
    "Transport",
    "pack",
    "unpack",
]
