"""Adding private vectors so that the active learns the sum only; one file a backend."""

from collections.abc import Mapping

from protocols.sums.agreement import StepBinding, SumAgreement
from protocols.sums.bfv import BfvSum
from protocols.sums.ckks import CkksSum
from protocols.sums.ckks_fast import CkksFastSum
from protocols.sums.crypten_sum import CryptenSum
from protocols.sums.interface import SecureSum, SumCombiner, SumContributor, SumReceiver
from protocols.sums.joining import join_sum
from protocols.sums.masked import MaskedSum
from protocols.sums.masked_recovery import MaskedRecoverySum
from protocols.sums.plain import PlainSum

__all__ = [
    "SECURE_SUMS",
    "BfvSum",
    "CkksFastSum",
    "CkksSum",
    "CryptenSum",
    "MaskedRecoverySum",
    "MaskedSum",
    "PlainSum",
    "SecureSum",
    "StepBinding",
    "SumAgreement",
    "SumCombiner",
    "SumContributor",
    "SumReceiver",
    "join_sum",
]

SECURE_SUMS: Mapping[str, type[SecureSum]] = {
    "plain": PlainSum,
    "ckks": CkksSum,
    "ckks_fast": CkksFastSum,
    "bfv": BfvSum,
    "masked": MaskedSum,
    "masked_recovery": MaskedRecoverySum,
    "crypten": CryptenSum,
}
