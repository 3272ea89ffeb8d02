"""Protecting representations, labels and updates, with an exact account of the guarantee.

Guards clip representations and add noise before these are sent (`guard.GUARDS`); accountants turn
what was done into epsilon (`accountants.ACCOUNTANTS`); the `ledger` records the privacy cost of
each release before it happens. Under DP-SGD the active's updates are private as well (`dp_sgd`),
`contributions` has discrete noise under a sum. Label mechanisms randomise the active's training
labels (`randomised_response.LABEL_MECHANISMS`). The names below are the public ones.
"""

from typing import TYPE_CHECKING

from apfed_protocols.lazy_names import give_names

if TYPE_CHECKING:
    from apfed_protocols.noise import discrete_gaussian
    from secure_apfed.privacy.accountants import calibrate_sigma
    from secure_apfed.privacy.guard import GaussianGuard, NoGuard, RepresentationGuard, make_guard
    from secure_apfed.privacy.ledger import BudgetExhaustedError, PrivacyLedger
    from secure_apfed.privacy.measured import check_row_wise
    from secure_apfed.privacy.randomised_response import LabelResponse
    from secure_apfed.privacy.release import PrivateContributions, PrivateLabels, PrivateRelease

__all__ = [
    "BudgetExhaustedError",
    "GaussianGuard",
    "LabelResponse",
    "NoGuard",
    "PrivacyLedger",
    "PrivateContributions",
    "PrivateLabels",
    "PrivateRelease",
    "RepresentationGuard",
    "calibrate_sigma",
    "check_row_wise",
    "discrete_gaussian",
    "make_guard",
]

if not TYPE_CHECKING:  # type checkers read the imports above
    __getattr__, __dir__ = give_names(
        __name__,
        __all__,
        {
            "apfed_protocols.noise": ("discrete_gaussian",),
            "secure_apfed.privacy.accountants": ("calibrate_sigma",),
            "secure_apfed.privacy.guard": (
                "GaussianGuard",
                "NoGuard",
                "RepresentationGuard",
                "make_guard",
            ),
            "secure_apfed.privacy.ledger": ("BudgetExhaustedError", "PrivacyLedger"),
            "secure_apfed.privacy.measured": ("check_row_wise",),
            "secure_apfed.privacy.randomised_response": ("LabelResponse",),
            "secure_apfed.privacy.release": (
                "PrivateContributions",
                "PrivateLabels",
                "PrivateRelease",
            ),
        },
    )
