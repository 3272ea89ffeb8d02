"""Protecting representations, and saying exactly what that gives.

Guards clip and add noise before anything is sent (table `GUARDS`); accountants turn what
was done into epsilon (table `ACCOUNTANTS`); the ledger is charged before each release.
Under DP-SGD the active's updates are private as well (`GradientGuard`, `WholeTraining`).
Label mechanisms answer for the active's training labels (table `LABEL_MECHANISMS`).
"""

from typing import TYPE_CHECKING

from secure_apfed.lazy import loads

if TYPE_CHECKING:
    from secure_apfed.privacy.accountants import ACCOUNTANTS, EXACT, Accountant
    from secure_apfed.privacy.gaussian_guard import FrozenGaussianGuard, GaussianGuard
    from secure_apfed.privacy.gdp import GaussianRelease, Mechanism, NoPrivacy, calibrate_sigma
    from secure_apfed.privacy.gradient_guard import GradientGuard
    from secure_apfed.privacy.guard import NoGuard, RepresentationGuard
    from secure_apfed.privacy.label_mechanism import LabelMechanism, LabelResponse, NoLabelPrivacy
    from secure_apfed.privacy.label_stages import MultiStageResponse
    from secure_apfed.privacy.ledger import BudgetExhaustedError, PrivacyLedger, PrivacySpent
    from secure_apfed.privacy.tables import (
        GUARDS,
        LABEL_MECHANISMS,
        make_guard,
        make_label_mechanism,
    )
    from secure_apfed.privacy.whole_training import WholeTraining, calibrate_updates

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
    "accountants": ("ACCOUNTANTS", "EXACT", "Accountant"),
    "gaussian_guard": ("FrozenGaussianGuard", "GaussianGuard"),
    "gdp": ("GaussianRelease", "Mechanism", "NoPrivacy", "calibrate_sigma"),
    "gradient_guard": ("GradientGuard",),
    "guard": ("NoGuard", "RepresentationGuard"),
    "label_mechanism": ("LabelMechanism", "LabelResponse", "NoLabelPrivacy"),
    "label_stages": ("MultiStageResponse",),
    "ledger": ("BudgetExhaustedError", "PrivacyLedger", "PrivacySpent"),
    "tables": ("GUARDS", "LABEL_MECHANISMS", "make_guard", "make_label_mechanism"),
    "whole_training": ("WholeTraining", "calibrate_updates"),
})  # fmt: skip
