"""Secure computation between parties: sums, set intersection, sealed links. The everyday names.

Knows nothing of neural networks, opens no socket, reads no clock. Names are loaded when they are
first used, so that importing one part does not load all.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from apfed_protocols.conversation import Conversation, Outgoing, converse, take_part
    from apfed_protocols.errors import (
        ApfedError,
        ClippingWarning,
        DataError,
        LocalProtocolError,
        PartyLeftError,
        RemoteProtocolError,
        UnsafeChoiceWarning,
    )
    from apfed_protocols.ids import IdNormalisation, encode_ids
    from apfed_protocols.noise import discrete_gaussian
    from apfed_protocols.psi import (
        SET_INTERSECTIONS,
        align,
        align_with,
        count_common,
        share_membership,
    )
    from apfed_protocols.psi.interface import IntersectionAgreement, Output
    from apfed_protocols.seal import Identity, SealedLink, fresh_identity, fresh_run_key
    from apfed_protocols.sums import (
        SECURE_SUMS,
        BfvSum,
        CkksSum,
        CryptenSum,
        MaskedBfvSum,
        MaskedSum,
        PlainSum,
        RecoverableSum,
        SecureSum,
        StepBinding,
        SumAgreement,
        SumCombiner,
        SumContributor,
        SumReceiver,
        join_sum,
    )
    from apfed_protocols.sums.hub import Hub, answer_hub, hub_pump
    from apfed_protocols.sums.put_away import BookInMemory, resume_role, suspend_role
    from apfed_protocols.sums.roles import ReceivingCombiner
    from apfed_protocols.sums.short import ClipAgreement, SumSession, secure_sum

__all__ = [
    "SECURE_SUMS",
    "SET_INTERSECTIONS",
    "ApfedError",
    "BfvSum",
    "BookInMemory",
    "CkksSum",
    "ClipAgreement",
    "ClippingWarning",
    "Conversation",
    "CryptenSum",
    "DataError",
    "Hub",
    "IdNormalisation",
    "Identity",
    "IntersectionAgreement",
    "LocalProtocolError",
    "MaskedBfvSum",
    "MaskedSum",
    "Outgoing",
    "Output",
    "PartyLeftError",
    "PlainSum",
    "ReceivingCombiner",
    "RecoverableSum",
    "RemoteProtocolError",
    "SealedLink",
    "SecureSum",
    "StepBinding",
    "SumAgreement",
    "SumCombiner",
    "SumContributor",
    "SumReceiver",
    "SumSession",
    "UnsafeChoiceWarning",
    "__version__",
    "align",
    "align_with",
    "answer_hub",
    "converse",
    "count_common",
    "discrete_gaussian",
    "encode_ids",
    "fresh_identity",
    "fresh_run_key",
    "hub_pump",
    "join_sum",
    "resume_role",
    "secure_sum",
    "share_membership",
    "suspend_role",
    "take_part",
]

_HOME: dict[str, str] = {
    **dict.fromkeys(("Conversation", "Outgoing", "converse", "take_part"), "conversation"),
    **dict.fromkeys(
        (
            "ApfedError",
            "ClippingWarning",
            "DataError",
            "LocalProtocolError",
            "PartyLeftError",
            "RemoteProtocolError",
            "UnsafeChoiceWarning",
        ),
        "errors",
    ),
    **dict.fromkeys(("ClipAgreement", "SumSession", "secure_sum"), "sums.short"),
    **dict.fromkeys(("Hub", "answer_hub", "hub_pump"), "sums.hub"),
    **dict.fromkeys(("BookInMemory", "suspend_role", "resume_role"), "sums.put_away"),
    "ReceivingCombiner": "sums.roles",
    **dict.fromkeys(("IdNormalisation", "encode_ids"), "ids"),
    **dict.fromkeys(("IntersectionAgreement", "Output"), "psi.interface"),
    **dict.fromkeys(
        ("SET_INTERSECTIONS", "align", "align_with", "count_common", "share_membership"), "psi"
    ),
    **dict.fromkeys(("Identity", "SealedLink", "fresh_identity", "fresh_run_key"), "seal"),
    "discrete_gaussian": "noise",
}


def __getattr__(name: str) -> Any:
    """Load an everyday name from its home; those not listed above are of the sums."""
    if name == "__version__":
        return version("apfed-protocols")
    if name not in __all__:
        raise AttributeError(f"apfed_protocols has no {name!r}; its names are {', '.join(__all__)}")
    return getattr(import_module(f"apfed_protocols.{_HOME.get(name, 'sums')}"), name)


def __dir__() -> list[str]:
    return [*__all__]
