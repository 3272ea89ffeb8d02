"""Secure active-passive federated learning: the everyday names.

Each part stands alone: another trainer can use a secure sum, an alignment, a guard with its
ledger, or a sealed link without this package's parties, configuration or command line. All other
public names are one dot further: `secure_apfed.sums`, `.psi`, `.privacy`, `.attacks`, `.exchange`
(conversations and links) and `.errors`.
Names are loaded when they are first used, so that importing one part does not load all.
The logger `secure_apfed` writes nothing unless its user gives it a handler (docs/python.md).
"""

import logging
from typing import TYPE_CHECKING

from apfed_protocols.lazy_names import give_names

if TYPE_CHECKING:
    from apfed_protocols import align, align_with, secure_sum
    from secure_apfed import attacks, errors, exchange, privacy, psi, sums
    from secure_apfed.config import Config
    from secure_apfed.config.file import load_config
    from secure_apfed.data.row_sources import ImageFiles
    from secure_apfed.errors import ApfedError, ConfigError, DataError
    from secure_apfed.exchange.peer_link import open_link
    from secure_apfed.interfaces.estimator import VerticalClassifier, VerticalRegressor
    from secure_apfed.interfaces.frames import run_frames
    from secure_apfed.interfaces.parties import (
        Active,
        Contrastive,
        FrozenGaussian,
        Gaussian,
        Passive,
        Reconstruction,
    )
    from secure_apfed.interfaces.training import train
    from secure_apfed.interfaces.training_result import TrainingResult
    from secure_apfed.networks.summed_layer import SummedLinear
    from secure_apfed.organisations.served import predict_jointly, serve_party
    from secure_apfed.privacy.release import PrivateContributions, PrivateLabels, PrivateRelease
    from secure_apfed.runs.active_model import load_model
    from secure_apfed.runs.run import run
    from secure_apfed.runs.worth import measure_worth

    __version__: str

__all__ = [
    "Active",
    "ApfedError",
    "Config",
    "ConfigError",
    "Contrastive",
    "DataError",
    "FrozenGaussian",
    "Gaussian",
    "ImageFiles",
    "Passive",
    "PrivateContributions",
    "PrivateLabels",
    "PrivateRelease",
    "Reconstruction",
    "SummedLinear",
    "TrainingResult",
    "VerticalClassifier",
    "VerticalRegressor",
    "__version__",
    "align",
    "align_with",
    "attacks",
    "errors",
    "exchange",
    "load_config",
    "load_model",
    "measure_worth",
    "open_link",
    "predict_jointly",
    "privacy",
    "psi",
    "run",
    "run_frames",
    "secure_sum",
    "serve_party",
    "sums",
    "train",
]

_MODULES = ("attacks", "errors", "exchange", "privacy", "psi", "sums")

_MOVED = {
    "secure_apfed.attacks": ("load_recording", "load_training_recording"),
    "secure_apfed.errors": (
        "CheckpointError",
        "ClippingWarning",
        "FewRowsWarning",
        "LocalProtocolError",
        "ModelError",
        "NarrowTableWarning",
        "NoHelpWarning",
        "PartyLeftError",
        "PromiseError",
        "RemoteProtocolError",
        "UnsafeChoiceWarning",
    ),
    "secure_apfed.exchange": (
        "Conversation",
        "Envelope",
        "Identity",
        "InMemoryNetwork",
        "LinkTransport",
        "Links",
        "LocalEnd",
        "Outgoing",
        "ResumableLink",
        "SealedLink",
        "Transcript",
        "converse",
        "fresh_identity",
        "fresh_run_key",
        "take_part",
    ),
    "secure_apfed.privacy": (
        "BudgetExhaustedError",
        "GaussianGuard",
        "LabelResponse",
        "NoGuard",
        "PrivacyLedger",
        "RepresentationGuard",
        "calibrate_sigma",
        "check_row_wise",
        "discrete_gaussian",
        "make_guard",
    ),
    "secure_apfed.psi": (
        "SET_INTERSECTIONS",
        "AlignmentHistory",
        "AlignmentSettings",
        "IdNormalisation",
        "IntersectionAgreement",
        "Output",
        "canonical_ids",
        "count_common",
        "encode_ids",
        "make_intersection",
        "share_membership",
    ),
    "secure_apfed.sums": (
        "SECURE_SUMS",
        "BfvSum",
        "InMemoryRoleLog",
        "CkksSum",
        "ClipAgreement",
        "CryptenSum",
        "Hub",
        "MaskedBfvSum",
        "MaskedSum",
        "PlainSum",
        "ReceivingAggregator",
        "RecoverableSum",
        "SecureSum",
        "StepBinding",
        "SumAgreement",
        "SumAggregator",
        "SumContributor",
        "SumReceiver",
        "SumSession",
        "answer_hub",
        "hub_pump",
        "join_sum",
        "resume_role",
        "suspend_role",
    ),
}
"""Names that this package gave, by the module that gives them now."""

logging.getLogger(__name__).addHandler(logging.NullHandler())

if not TYPE_CHECKING:  # type checkers read the imports above
    __getattr__, __dir__ = give_names(
        __name__,
        __all__,
        {
            "apfed_protocols": ("align", "align_with", "secure_sum"),
            "secure_apfed.config": ("Config",),
            "secure_apfed.config.file": ("load_config",),
            "secure_apfed.data.row_sources": ("ImageFiles",),
            "secure_apfed.errors": ("ApfedError", "ConfigError", "DataError"),
            "secure_apfed.exchange.peer_link": ("open_link",),
            "secure_apfed.interfaces.estimator": ("VerticalClassifier", "VerticalRegressor"),
            "secure_apfed.interfaces.frames": ("run_frames",),
            "secure_apfed.interfaces.parties": (
                "Active",
                "Contrastive",
                "FrozenGaussian",
                "Gaussian",
                "Passive",
                "Reconstruction",
            ),
            "secure_apfed.interfaces.training": ("train",),
            "secure_apfed.interfaces.training_result": ("TrainingResult",),
            "secure_apfed.networks.summed_layer": ("SummedLinear",),
            "secure_apfed.organisations.served": ("predict_jointly", "serve_party"),
            "secure_apfed.privacy.release": (
                "PrivateContributions",
                "PrivateLabels",
                "PrivateRelease",
            ),
            "secure_apfed.runs.run": ("run",),
            "secure_apfed.runs.active_model": ("load_model",),
            "secure_apfed.runs.worth": ("measure_worth",),
        },
        modules=_MODULES,
        moved_names_by_module=_MOVED,
        distribution="secure-apfed",
    )
