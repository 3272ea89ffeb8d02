"""How parties exchange anything: envelope, codec, links, drivers, transcript, status."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from secure_apfed.exchange.agreement import Greeting, SignedContract, agree_on_contract
    from secure_apfed.exchange.codec import (
        TensorSpec,
        pack_tensors,
        unpack_own_tensors,
        unpack_tensors,
    )
    from secure_apfed.exchange.drivers import (
        BrokenLink,
        InMemoryNetwork,
        Transport,
        WaitObserver,
        run_role,
        run_script,
    )
    from secure_apfed.exchange.envelope import BEFORE_TRAINING, Envelope, Kind
    from secure_apfed.exchange.links import Awaited, Frame, LinkObserver, Links, Script
    from secure_apfed.exchange.status import PeerStatus, Status, StatusTracker, Waiting
    from secure_apfed.exchange.transcript import Flow, Transcript

__all__ = [
    "BEFORE_TRAINING",
    "Awaited",
    "BrokenLink",
    "Envelope",
    "Flow",
    "Frame",
    "Greeting",
    "InMemoryNetwork",
    "Kind",
    "LinkObserver",
    "Links",
    "PeerStatus",
    "Script",
    "SignedContract",
    "Status",
    "StatusTracker",
    "TensorSpec",
    "Transcript",
    "Transport",
    "WaitObserver",
    "Waiting",
    "agree_on_contract",
    "pack_tensors",
    "run_role",
    "run_script",
    "unpack_own_tensors",
    "unpack_tensors",
]

_NAMES: Mapping[str, tuple[str, ...]] = {
    "agreement": ("Greeting", "SignedContract", "agree_on_contract"),
    "codec": ("TensorSpec", "pack_tensors", "unpack_own_tensors", "unpack_tensors"),
    "drivers": (
        "BrokenLink",
        "InMemoryNetwork",
        "Transport",
        "WaitObserver",
        "run_role",
        "run_script",
    ),
    "envelope": ("BEFORE_TRAINING", "Envelope", "Kind"),
    "links": ("Awaited", "Frame", "LinkObserver", "Links", "Script"),
    "status": ("PeerStatus", "Status", "StatusTracker", "Waiting"),
    "transcript": ("Flow", "Transcript"),
}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used, so that importing one part does not load all."""
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
