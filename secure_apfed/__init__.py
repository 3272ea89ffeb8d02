"""Secure active-passive federated learning: the everyday names.

Each part stands alone: another trainer can use a secure sum, an alignment, a guard with its
ledger, or a sealed link without this package's parties, configuration or command line.
Names are loaded when they are first used, so that importing one part does not load all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apfed_protocols.conversation import converse
    from apfed_protocols.ids import IdNormalisation
    from apfed_protocols.psi import align
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
        SumAgreement,
        join_sum,
    )
    from secure_apfed.config import Config
    from secure_apfed.config.file import load_config
    from secure_apfed.exchange import Envelope, InMemory, Links, Transcript
    from secure_apfed.exchange.resumable_link import Linked, ResumableLink
    from secure_apfed.exchange.sealed_connection import LocalEnd
    from secure_apfed.frames import run_frames
    from secure_apfed.privacy.accountants import calibrate_sigma
    from secure_apfed.privacy.guard import GaussianGuard, NoGuard, RepresentationGuard
    from secure_apfed.privacy.ledger import PrivacyLedger
    from secure_apfed.runs.outcome import load_recording
    from secure_apfed.runs.run import run
    from secure_apfed.runs.solo import load_model
    from secure_apfed.settings.alignment import AlignmentSettings

__all__ = [
    "SECURE_SUMS",
    "AlignmentSettings",
    "BfvSum",
    "CkksSum",
    "Config",
    "CryptenSum",
    "Envelope",
    "GaussianGuard",
    "IdNormalisation",
    "Identity",
    "InMemory",
    "Linked",
    "Links",
    "LocalEnd",
    "MaskedBfvSum",
    "MaskedSum",
    "NoGuard",
    "PlainSum",
    "PrivacyLedger",
    "RecoverableSum",
    "RepresentationGuard",
    "ResumableLink",
    "SealedLink",
    "SecureSum",
    "StepBinding",
    "SumAgreement",
    "Transcript",
    "align",
    "calibrate_sigma",
    "converse",
    "fresh_identity",
    "fresh_run_key",
    "join_sum",
    "load_config",
    "load_model",
    "load_recording",
    "run",
    "run_frames",
]

_HOME: dict[str, str] = {
    **dict.fromkeys(("converse",), "apfed_protocols.conversation"),
    **dict.fromkeys(
        ("Identity", "SealedLink", "fresh_identity", "fresh_run_key"), "apfed_protocols.seal"
    ),
    **dict.fromkeys(
        (
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
            "join_sum",
        ),
        "apfed_protocols.sums",
    ),
    "AlignmentSettings": "secure_apfed.settings.alignment",
    "IdNormalisation": "apfed_protocols.ids",
    "align": "apfed_protocols.psi",
    "Config": "secure_apfed.config",
    "load_config": "secure_apfed.config.file",
    **dict.fromkeys(("Envelope", "InMemory", "Links", "Transcript"), "secure_apfed.exchange"),
    "Linked": "secure_apfed.exchange.resumable_link",
    "LocalEnd": "secure_apfed.exchange.sealed_connection",
    "ResumableLink": "secure_apfed.exchange.resumable_link",
    **dict.fromkeys(
        ("GaussianGuard", "NoGuard", "RepresentationGuard"), "secure_apfed.privacy.guard"
    ),
    "PrivacyLedger": "secure_apfed.privacy.ledger",
    "calibrate_sigma": "secure_apfed.privacy.accountants",
    "run_frames": "secure_apfed.frames",
    "load_model": "secure_apfed.runs.solo",
    "load_recording": "secure_apfed.runs.outcome",
    "run": "secure_apfed.runs.run",
}


def __getattr__(name: str) -> Any:
    """Load an everyday name from its home."""
    if name not in _HOME:
        raise AttributeError(f"secure_apfed has no {name!r}; its names are {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__]
