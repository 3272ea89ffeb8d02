"""How parties exchange anything: envelope, codec, links, drivers, transcript, status."""

from typing import TYPE_CHECKING

from secure_apfed.lazy import loads

if TYPE_CHECKING:
    from secure_apfed.exchange.agreement import Agreement, Greeting, agree
    from secure_apfed.exchange.codec import TensorSpec, pack, unpack
    from secure_apfed.exchange.drivers import InMemory, Transport, WaitObserver, drive, play_one
    from secure_apfed.exchange.envelope import BEFORE_TRAINING, Envelope, Kind
    from secure_apfed.exchange.links import Awaited, Frame, LinkObserver, Links, Script
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

__getattr__ = loads(__name__, {
    "agreement": ("Agreement", "Greeting", "agree"),
    "codec": ("TensorSpec", "pack", "unpack"),
    "drivers": ("InMemory", "Transport", "WaitObserver", "drive", "play_one"),
    "envelope": ("BEFORE_TRAINING", "Envelope", "Kind"),
    "links": ("Awaited", "Frame", "LinkObserver", "Links", "Script"),
    "status": ("PeerStatus", "Status", "StatusKeeper", "Waiting"),
    "transcript": ("Flow", "Transcript"),
})  # fmt: skip
