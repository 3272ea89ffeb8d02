"""Secure sums: sessions, schemes, roles, and the hub of a sum.

The names of `apfed_protocols` that are about sums, and the layer that adds under one. Roles of one
process are played by `secure_apfed.exchange.converse`, one of them by `take_part` there.
"""

from typing import TYPE_CHECKING

from apfed_protocols.lazy_names import give_names

if TYPE_CHECKING:
    from apfed_protocols import (
        SECURE_SUMS,
        BfvSum,
        CkksSum,
        ClipAgreement,
        CryptenSum,
        Hub,
        InMemoryRoleLog,
        MaskedBfvSum,
        MaskedSum,
        PlainSum,
        ReceivingAggregator,
        RecoverableSum,
        SecureSum,
        StepBinding,
        SumAggregator,
        SumAgreement,
        SumContributor,
        SumName,
        SumReceiver,
        SumSession,
        answer_hub,
        hub_pump,
        join_sum,
        resume_role,
        secure_sum,
        suspend_role,
    )
    from secure_apfed.networks.summed_layer import SummedLinear

__all__ = [
    "SECURE_SUMS",
    "BfvSum",
    "CkksSum",
    "ClipAgreement",
    "CryptenSum",
    "Hub",
    "InMemoryRoleLog",
    "MaskedBfvSum",
    "MaskedSum",
    "PlainSum",
    "ReceivingAggregator",
    "RecoverableSum",
    "SecureSum",
    "StepBinding",
    "SumAggregator",
    "SumAgreement",
    "SumContributor",
    "SumName",
    "SumReceiver",
    "SumSession",
    "SummedLinear",
    "answer_hub",
    "hub_pump",
    "join_sum",
    "resume_role",
    "secure_sum",
    "suspend_role",
]

_OWN = ("SummedLinear",)

if not TYPE_CHECKING:  # type checkers read the imports above
    __getattr__, __dir__ = give_names(
        __name__,
        __all__,
        {
            "apfed_protocols": [name for name in __all__ if name not in _OWN],
            "secure_apfed.networks.summed_layer": _OWN,
        },
    )
