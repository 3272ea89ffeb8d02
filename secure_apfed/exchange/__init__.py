"""How parties exchange anything: envelope, codec, links, drivers, transcript, status."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from secure_apfed.exchange.agreement import Agreement, Greeting, agree
    from secure_apfed.exchange.codec import TensorSpec, pack, unpack, unpack_own
    from secure_apfed.exchange.drivers import (
        BrokenLink,
        InMemory,
        Transport,
        WaitObserver,
        drive,
        play_one,
    )
    from secure_apfed.exchange.envelope import BEFORE_TRAINING, Envelope, Kind
    from secure_apfed.exchange.links import Awaited, Frame, LinkObserver, Links, Script
    from secure_apfed.exchange.status import PeerStatus, Status, StatusKeeper, Waiting
    from secure_apfed.exchange.transcript import Flow, Transcript

__all__ = [
    "BEFORE_TRAINING",
    "Agreement",
    "Awaited",
    "BrokenLink",
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
    "unpack_own",
]

_NAMES: Mapping[str, tuple[str, ...]] = {
    "agreement": ("Agreement", "Greeting", "agree"),
    "codec": ("TensorSpec", "pack", "unpack", "unpack_own"),
    "drivers": ("BrokenLink", "InMemory", "Transport", "WaitObserver", "drive", "play_one"),
    "envelope": ("BEFORE_TRAINING", "Envelope", "Kind"),
    "links": ("Awaited", "Frame", "LinkObserver", "Links", "Script"),
    "status": ("PeerStatus", "Status", "StatusKeeper", "Waiting"),
    "transcript": ("Flow", "Transcript"),
}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used, so that importing one part does not load all."""
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
