"""Sums of products with private labels: the active learns sum_p A_p Y, in one round trip.

Y are bits of the active, encrypted; A_p are numbers of the passives, one row a person.
"""

from apfed_protocols.products.agreement import ProductAgreement
from apfed_protocols.products.roles import (
    ProductCombiner,
    ProductContributor,
    ProductReceiver,
    SumOfProducts,
)

__all__ = [
    "ProductAgreement",
    "ProductCombiner",
    "ProductContributor",
    "ProductReceiver",
    "SumOfProducts",
]
