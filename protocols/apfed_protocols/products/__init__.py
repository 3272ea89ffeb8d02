"""Sums of products with private labels: the active learns sum_p A_p Y, in one round trip.

Y are bits of the active, encrypted; A_p are numbers of the passives, one row a person.
"""

from apfed_protocols.products import (
    ProductCombiner,
    ProductContributor,
    ProductReceiver,
    SumOfProducts,
)
from apfed_protocols.products.ring import ProductAgreement

__all__ = [
    "ProductAgreement",
    "ProductCombiner",
    "ProductContributor",
    "ProductReceiver",
    "SumOfProducts",
]
