"""Messages between parties: envelope, codec, links, drivers, transcript, status."""

from typing import TYPE_CHECKING

from apfed_protocols.lazy_names import give_names

if TYPE_CHECKING:
    from apfed_protocols.conversation import Conversation, Outgoing, converse, take_part
    from apfed_protocols.seal import Identity, SealedLink, fresh_identity, fresh_run_key
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
    from secure_apfed.exchange.peer_link import open_link
    from secure_apfed.exchange.resumable_link import LinkTransport, ResumableLink
    from secure_apfed.exchange.sealed_connection import LocalEnd
    from secure_apfed.exchange.status import PeerStatus, Status, StatusTracker, Waiting
    from secure_apfed.exchange.transcript import Flow, Transcript

__all__ = [
    "BEFORE_TRAINING",
    "Awaited",
    "BrokenLink",
    "Conversation",
    "Envelope",
    "Flow",
    "Frame",
    "Greeting",
    "Identity",
    "InMemoryNetwork",
    "Kind",
    "LinkObserver",
    "LinkTransport",
    "Links",
    "LocalEnd",
    "Outgoing",
    "PeerStatus",
    "ResumableLink",
    "Script",
    "SealedLink",
    "SignedContract",
    "Status",
    "StatusTracker",
    "TensorSpec",
    "Transcript",
    "Transport",
    "WaitObserver",
    "Waiting",
    "agree_on_contract",
    "converse",
    "fresh_identity",
    "fresh_run_key",
    "open_link",
    "pack_tensors",
    "run_role",
    "run_script",
    "take_part",
    "unpack_own_tensors",
    "unpack_tensors",
]

if not TYPE_CHECKING:  # type checkers read the imports above
    __getattr__, __dir__ = give_names(
        __name__,
        __all__,
        {
            "apfed_protocols.conversation": ("Conversation", "Outgoing", "converse", "take_part"),
            "apfed_protocols.seal": ("Identity", "SealedLink", "fresh_identity", "fresh_run_key"),
            "secure_apfed.exchange.agreement": ("Greeting", "SignedContract", "agree_on_contract"),
            "secure_apfed.exchange.codec": (
                "TensorSpec",
                "pack_tensors",
                "unpack_own_tensors",
                "unpack_tensors",
            ),
            "secure_apfed.exchange.drivers": (
                "BrokenLink",
                "InMemoryNetwork",
                "Transport",
                "WaitObserver",
                "run_role",
                "run_script",
            ),
            "secure_apfed.exchange.envelope": ("BEFORE_TRAINING", "Envelope", "Kind"),
            "secure_apfed.exchange.links": ("Awaited", "Frame", "LinkObserver", "Links", "Script"),
            "secure_apfed.exchange.peer_link": ("open_link",),
            "secure_apfed.exchange.resumable_link": ("LinkTransport", "ResumableLink"),
            "secure_apfed.exchange.sealed_connection": ("LocalEnd",),
            "secure_apfed.exchange.status": ("PeerStatus", "Status", "StatusTracker", "Waiting"),
            "secure_apfed.exchange.transcript": ("Flow", "Transcript"),
        },
    )
