"""The public names of `secure_apfed`: the everyday ones, and those of modules one dot further."""

from importlib import import_module
from types import ModuleType
from typing import Any

import secure_apfed

GROUPS = ("sums", "psi", "privacy", "attacks")
"""Modules whose names are all public; of `errors` and `exchange` those are that stand below."""

MOVED = {
    "attacks": "load_recording load_training_recording",
    "errors": (
        "CheckpointError ClippingWarning FewRowsWarning LocalProtocolError ModelError "
        "NarrowTableWarning NoHelpWarning PartyLeftError PromiseError RemoteProtocolError "
        "UnsafeChoiceWarning"
    ),
    "exchange": (
        "Conversation Envelope Identity InMemoryNetwork LinkTransport Links LocalEnd Outgoing "
        "ResumableLink SealedLink Transcript converse fresh_identity fresh_run_key take_part"
    ),
    "privacy": (
        "BudgetExhaustedError GaussianGuard LabelResponse NoGuard PrivacyLedger "
        "RepresentationGuard calibrate_sigma check_row_wise discrete_gaussian make_guard"
    ),
    "psi": (
        "SET_INTERSECTIONS AlignmentHistory AlignmentSettings IdNormalisation "
        "IntersectionAgreement Output canonical_ids count_common encode_ids make_intersection "
        "share_membership"
    ),
    "sums": (
        "SECURE_SUMS BfvSum InMemoryRoleLog CkksSum ClipAgreement CryptenSum Hub MaskedBfvSum "
        "MaskedSum PlainSum ReceivingAggregator RecoverableSum SecureSum StepBinding SumAgreement "
        "SumAggregator SumContributor SumReceiver SumSession answer_hub hub_pump join_sum "
        "resume_role suspend_role"
    ),
}
"""Names that `secure_apfed` itself gave, by the module below it that gives them now."""

EVERYDAY_NAMES = [
    name
    for name in secure_apfed.__all__
    if name != "__version__" and name not in (*GROUPS, "errors", "exchange")
]
"""The thirty names of `secure_apfed` itself: no module, and not the version."""

MOVES = [(name, module) for module, names in MOVED.items() for name in names.split()]


def load_public_names() -> dict[str, Any]:
    """Return every public name of `secure_apfed`, with what it is."""
    own = {name: getattr(secure_apfed, name) for name in secure_apfed.__all__}
    names = {name: value for name, value in own.items() if not isinstance(value, ModuleType)}
    for group in GROUPS:
        module = import_module(f"secure_apfed.{group}")
        names |= {name: getattr(module, name) for name in module.__all__}
    for name, group in MOVES:
        names[name] = getattr(import_module(f"secure_apfed.{group}"), name)
    return names
