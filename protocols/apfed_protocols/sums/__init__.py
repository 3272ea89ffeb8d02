"""Adding private vectors so that the active learns the sum only: a scheme, and masks under it.

A scheme says what becomes of the numbers: nothing (`plain`), encryption under the active's key
(`ckks`, `bfv`), or additive shares (`crypten`). Masks are added to them before: none, `pairwise`
ones that cancel in the sum, or `recoverable` ones, under which a passive may fall silent.
"""

from collections.abc import Mapping

from apfed_protocols.sums.crypten_sum import CryptenSum
from apfed_protocols.sums.homomorphic import BfvSum, CkksSum, MaskedBfvSum
from apfed_protocols.sums.interface import StepBinding, SumAgreement, format_sum_name
from apfed_protocols.sums.masked import MaskedSum
from apfed_protocols.sums.plain import PlainSum
from apfed_protocols.sums.recoverable import RecoverableSum
from apfed_protocols.sums.roles import (
    SecureSum,
    SumAggregator,
    SumContributor,
    SumReceiver,
    join_sum,
)

__all__ = [
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
    "SumAggregator",
    "SumAgreement",
    "SumContributor",
    "SumReceiver",
    "format_sum_name",
    "join_sum",
]

# The pairs that there are: scheme, masks; each class states the facts of its pair.
SECURE_SUMS: Mapping[str, type[SecureSum]] = {
    format_sum_name("plain", "none"): PlainSum,
    format_sum_name("plain", "pairwise"): MaskedSum,
    format_sum_name("plain", "recoverable"): RecoverableSum,
    format_sum_name("ckks", "none"): CkksSum,
    format_sum_name("bfv", "none"): BfvSum,
    format_sum_name("bfv", "pairwise"): MaskedBfvSum,
    format_sum_name("crypten", "none"): CryptenSum,
}
