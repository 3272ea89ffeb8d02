"""Secure computation between parties: sums, set intersection, sealed links. The everyday names.

Knows nothing of neural networks, opens no socket, reads no clock. Names are loaded when they are
first used, so that importing one part does not load all.
"""

import logging
from typing import TYPE_CHECKING

from apfed_protocols.lazy_names import give_names

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
        IntersectionName,
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
        SumAggregator,
        SumAgreement,
        SumContributor,
        SumReceiver,
        join_sum,
    )
    from apfed_protocols.sums.hub import Hub, answer_hub, hub_pump
    from apfed_protocols.sums.roles import ReceivingAggregator
    from apfed_protocols.sums.short import ClipAgreement, SumName, SumSession, secure_sum
    from apfed_protocols.sums.suspended_roles import InMemoryRoleLog, resume_role, suspend_role

__all__ = [
    "SECURE_SUMS",
    "SET_INTERSECTIONS",
    "ApfedError",
    "BfvSum",
    "CkksSum",
    "ClipAgreement",
    "ClippingWarning",
    "Conversation",
    "CryptenSum",
    "DataError",
    "Hub",
    "IdNormalisation",
    "Identity",
    "InMemoryRoleLog",
    "IntersectionAgreement",
    "IntersectionName",
    "LocalProtocolError",
    "MaskedBfvSum",
    "MaskedSum",
    "Outgoing",
    "Output",
    "PartyLeftError",
    "PlainSum",
    "ReceivingAggregator",
    "RecoverableSum",
    "RemoteProtocolError",
    "SealedLink",
    "SecureSum",
    "StepBinding",
    "SumAggregator",
    "SumAgreement",
    "SumContributor",
    "SumName",
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

logging.getLogger(__name__).addHandler(logging.NullHandler())

if not TYPE_CHECKING:  # type checkers read the imports above
    __getattr__, __dir__ = give_names(
        __name__,
        __all__,
        {
            "apfed_protocols.conversation": ("Conversation", "Outgoing", "converse", "take_part"),
            "apfed_protocols.errors": (
                "ApfedError",
                "ClippingWarning",
                "DataError",
                "LocalProtocolError",
                "PartyLeftError",
                "RemoteProtocolError",
                "UnsafeChoiceWarning",
            ),
            "apfed_protocols.ids": ("IdNormalisation", "encode_ids"),
            "apfed_protocols.noise": ("discrete_gaussian",),
            "apfed_protocols.psi": (
                "SET_INTERSECTIONS",
                "IntersectionName",
                "align",
                "align_with",
                "count_common",
                "share_membership",
            ),
            "apfed_protocols.psi.interface": ("IntersectionAgreement", "Output"),
            "apfed_protocols.seal": ("Identity", "SealedLink", "fresh_identity", "fresh_run_key"),
            "apfed_protocols.sums": (
                "SECURE_SUMS",
                "BfvSum",
                "CkksSum",
                "CryptenSum",
                "MaskedBfvSum",
                "MaskedSum",
                "PlainSum",
                "RecoverableSum",
                "SecureSum",
                "StepBinding",
                "SumAgreement",
                "SumAggregator",
                "SumContributor",
                "SumReceiver",
                "join_sum",
            ),
            "apfed_protocols.sums.hub": ("Hub", "answer_hub", "hub_pump"),
            "apfed_protocols.sums.suspended_roles": (
                "InMemoryRoleLog",
                "resume_role",
                "suspend_role",
            ),
            "apfed_protocols.sums.roles": ("ReceivingAggregator",),
            "apfed_protocols.sums.short": (
                "ClipAgreement",
                "SumName",
                "SumSession",
                "secure_sum",
            ),
        },
        distribution="apfed-protocols",
    )
