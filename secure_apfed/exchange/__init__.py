"""How parties exchange anything: envelope, codec, links, drivers, sockets, transcript, status."""

from secure_apfed.exchange.agreement import Agreement, Greeting, agree
from secure_apfed.exchange.codec import TensorSpec, pack, unpack
from secure_apfed.exchange.drivers import InMemory, Transport, WaitObserver, drive, play_one
from secure_apfed.exchange.envelope import BEFORE_TRAINING, Envelope, Kind
from secure_apfed.exchange.links import Awaited, Frame, LinkObserver, Links, Script
from secure_apfed.exchange.sockets import Sockets
from secure_apfed.exchange.status import PeerStatus, Status, StatusKeeper, Waiting
from secure_apfed.exchange.transcript import Flow, Transcript

__all__ = [
    "BEFORE_TRAINING",
    "Agreement",
    "Awaited",
    "Envelope",
    "Flow",
    "Frame",
    "Greeting",
    "InMemory",
    "Kind",
    "LinkObserver",
    "Links",
    "PeerStatus",
    "Script",
    "Sockets",
    "Status",
    "StatusKeeper",
    "TensorSpec",
    "Transcript",
    "Transport",
    "WaitObserver",
    "Waiting",
    "agree",
    "drive",
    "pack",
    "play_one",
    "unpack",
]
