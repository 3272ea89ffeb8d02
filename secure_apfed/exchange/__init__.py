"""How parties exchange anything: envelope, codec, links, drivers, transcript."""

from secure_apfed.exchange.codec import TensorSpec, pack, unpack
from secure_apfed.exchange.drivers import InMemory
from secure_apfed.exchange.envelope import Envelope, Kind
from secure_apfed.exchange.links import BEFORE_TRAINING, Awaited, Links, Script
from secure_apfed.exchange.transcript import Flow, Transcript, TranscriptSettings

__all__ = [
    "BEFORE_TRAINING",
    "Awaited",
    "Envelope",
    "Flow",
    "InMemory",
    "Kind",
    "Links",
    "Script",
    "TensorSpec",
    "Transcript",
    "TranscriptSettings",
    "pack",
    "unpack",
]
