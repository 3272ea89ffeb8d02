"""How parties exchange anything: envelope, codec, links, drivers, transcript."""

from secure_apfed.exchange.agreement import Agreement, Greeting, agree
from secure_apfed.exchange.codec import TensorSpec, pack, unpack
from secure_apfed.exchange.drivers import InMemory
from secure_apfed.exchange.envelope import BEFORE_TRAINING, Envelope, Kind
from secure_apfed.exchange.links import Awaited, Links, Script
from secure_apfed.exchange.transcript import Flow, Transcript, TranscriptSettings

__all__ = [
    "BEFORE_TRAINING",
    "Agreement",
    "Awaited",
    "Envelope",
    "Flow",
    "Greeting",
    "InMemory",
    "Kind",
    "Links",
    "Script",
    "TensorSpec",
    "Transcript",
    "TranscriptSettings",
    "agree",
    "pack",
    "unpack",
]
