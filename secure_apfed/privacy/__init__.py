"""Protecting representations, and saying exactly what that gives.

Guards clip and add noise before anything is sent (table `GUARDS`); accountants turn what
was done into epsilon (table `ACCOUNTANTS`); the ledger is charged before each release.
Under DP-SGD the active's updates are private as well (`GradientGuard`, `WholeTraining`).
Label mechanisms answer for the active's training labels (table `LABEL_MECHANISMS`).
"""

from typing import TYPE_CHECKING

from secure_apfed.lazy import loads

if TYPE_CHECKING:
    from secure_apfed.privacy.accountants import (
        ACCOUNTANTS,
        EXACT,
        Accountant,
        GaussianRelease,
        Mechanism,
        NoPrivacy,
        calibrate_sigma,
    )
    from secure_apfed.privacy.dp_sgd import GradientGuard, WholeTraining, calibrate_updates
    from secure_apfed.privacy.guard import (
        GUARDS,
        FrozenGaussianGuard,
        GaussianGuard,
        NoGuard,
        RepresentationGuard,
        make_guard,
    )
    from secure_apfed.privacy.ledger import BudgetExhaustedError, PrivacyLedger, PrivacySpent
    from secure_apfed.privacy.randomised_response import (
        LABEL_MECHANISMS,
        LabelMechanism,
        LabelResponse,
        MultiStageResponse,
        NoLabelPrivacy,
        make_label_mechanism,
    )

__all__ = [
    "ACCOUNTANTS",
    "EXACT",
    "GUARDS",
    "LABEL_MECHANISMS",
    "Accountant",
    "BudgetExhaustedError",
    "FrozenGaussianGuard",
    "GaussianGuard",
    "GaussianRelease",
    "GradientGuard",
    "LabelMechanism",
    "LabelResponse",
    "Mechanism",
    "MultiStageResponse",
    "NoGuard",
    "NoLabelPrivacy",
    "NoPrivacy",
    "PrivacyLedger",
    "PrivacySpent",
    "RepresentationGuard",
    "WholeTraining",
    "calibrate_sigma",
    "calibrate_updates",
    "make_guard",
    "make_label_mechanism",
]

__getattr__ = loads(__name__, {
    "accountants": (
        "ACCOUNTANTS", "EXACT", "Accountant", "GaussianRelease", "Mechanism", "NoPrivacy",
        "calibrate_sigma",
    ),
    "dp_sgd": ("GradientGuard", "WholeTraining", "calibrate_updates"),
    "guard": (
        "GUARDS", "FrozenGaussianGuard", "GaussianGuard", "NoGuard", "RepresentationGuard",
        "make_guard",
    ),
    "ledger": ("BudgetExhaustedError", "PrivacyLedger", "PrivacySpent"),
    "randomised_response": (
        "LABEL_MECHANISMS", "LabelMechanism", "LabelResponse", "MultiStageResponse",
        "NoLabelPrivacy", "make_label_mechanism",
    ),
})  # fmt: skip
