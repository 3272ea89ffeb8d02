"""Secure active-passive federated learning: the everyday names.

Each part stands alone: another trainer can use a secure sum, an alignment, a guard with its
ledger, or a sealed link without this package's parties, configuration or command line.
Names are loaded when they are first used, so that importing one part does not load all.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import apfed_protocols

if TYPE_CHECKING:
    from apfed_protocols import *  # noqa: F403
    from secure_apfed.alignment import canonical_ids, make_intersection
    from secure_apfed.alignment.records import AlignmentHistory
    from secure_apfed.config import Config
    from secure_apfed.config.file import load_config
    from secure_apfed.data.row_sources import ImageFiles
    from secure_apfed.errors import (
        CheckpointError,
        ConfigError,
        FewRowsWarning,
        ModelError,
        NarrowTableWarning,
        NoHelpWarning,
        PromiseError,
    )
    from secure_apfed.exchange import Envelope, InMemoryNetwork, Links, Transcript
    from secure_apfed.exchange.peer_link import open_link
    from secure_apfed.exchange.resumable_link import LinkTransport, ResumableLink
    from secure_apfed.exchange.sealed_connection import LocalEnd
    from secure_apfed.interfaces.estimator import VerticalClassifier, VerticalRegressor
    from secure_apfed.interfaces.frames import run_frames
    from secure_apfed.interfaces.training import (
        Active,
        Contrastive,
        FrozenGaussian,
        Gaussian,
        Passive,
        Reconstruction,
        TrainingResult,
        load_training_recording,
        train,
    )
    from secure_apfed.networks.summed_layer import SummedLinear
    from secure_apfed.organisations.served import predict_jointly, serve_party
    from secure_apfed.privacy.accountants import calibrate_sigma
    from secure_apfed.privacy.guard import GaussianGuard, NoGuard, RepresentationGuard, make_guard
    from secure_apfed.privacy.ledger import BudgetExhaustedError, PrivacyLedger
    from secure_apfed.privacy.measured import check_row_wise
    from secure_apfed.privacy.randomised_response import LabelResponse
    from secure_apfed.privacy.release import PrivateContributions, PrivateLabels, PrivateRelease
    from secure_apfed.runs.outcome import load_recording
    from secure_apfed.runs.run import run
    from secure_apfed.runs.solo import load_model
    from secure_apfed.runs.worth import measure_worth
    from secure_apfed.settings.alignment import AlignmentSettings

__all__ = [
    "Active",
    "AlignmentHistory",
    "AlignmentSettings",
    "BudgetExhaustedError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Contrastive",
    "Envelope",
    "FewRowsWarning",
    "FrozenGaussian",
    "Gaussian",
    "GaussianGuard",
    "ImageFiles",
    "InMemoryNetwork",
    "LabelResponse",
    "LinkTransport",
    "Links",
    "LocalEnd",
    "ModelError",
    "NarrowTableWarning",
    "NoGuard",
    "NoHelpWarning",
    "Passive",
    "PrivacyLedger",
    "PrivateContributions",
    "PrivateLabels",
    "PrivateRelease",
    "PromiseError",
    "Reconstruction",
    "RepresentationGuard",
    "ResumableLink",
    "SummedLinear",
    "TrainingResult",
    "Transcript",
    "VerticalClassifier",
    "VerticalRegressor",
    "calibrate_sigma",
    "canonical_ids",
    "check_row_wise",
    "load_config",
    "load_model",
    "load_recording",
    "load_training_recording",
    "make_guard",
    "make_intersection",
    "measure_worth",
    "open_link",
    "predict_jointly",
    "run",
    "run_frames",
    "serve_party",
    "train",
]
__all__ += apfed_protocols.__all__

_HOME: dict[str, str] = {
    **dict.fromkeys(
        (
            "CheckpointError",
            "ConfigError",
            "FewRowsWarning",
            "ModelError",
            "NarrowTableWarning",
            "NoHelpWarning",
            "PromiseError",
        ),
        "errors",
    ),
    **dict.fromkeys(("canonical_ids", "make_intersection"), "alignment"),
    "AlignmentHistory": "alignment.records",
    "LabelResponse": "privacy.randomised_response",
    **dict.fromkeys(("VerticalClassifier", "VerticalRegressor"), "interfaces.estimator"),
    "make_guard": "privacy.guard",
    "AlignmentSettings": "settings.alignment",
    "Config": "config",
    "load_config": "config.file",
    **dict.fromkeys(("Envelope", "InMemoryNetwork", "Links", "Transcript"), "exchange"),
    **dict.fromkeys(("LinkTransport", "ResumableLink"), "exchange.resumable_link"),
    "LocalEnd": "exchange.sealed_connection",
    "open_link": "exchange.peer_link",
    **dict.fromkeys(("GaussianGuard", "NoGuard", "RepresentationGuard"), "privacy.guard"),
    **dict.fromkeys(("BudgetExhaustedError", "PrivacyLedger"), "privacy.ledger"),
    **dict.fromkeys(("PrivateContributions", "PrivateLabels", "PrivateRelease"), "privacy.release"),
    "SummedLinear": "networks.summed_layer",
    "calibrate_sigma": "privacy.accountants",
    "check_row_wise": "privacy.measured",
    "run_frames": "interfaces.frames",
    **dict.fromkeys(
        (
            "Active",
            "Contrastive",
            "FrozenGaussian",
            "Gaussian",
            "Passive",
            "Reconstruction",
            "TrainingResult",
            "load_training_recording",
            "train",
        ),
        "interfaces.training",
    ),
    "ImageFiles": "data.row_sources",
    "load_model": "runs.solo",
    "load_recording": "runs.outcome",
    "measure_worth": "runs.worth",
    "run": "runs.run",
    **dict.fromkeys(("predict_jointly", "serve_party"), "organisations.served"),
}


def __getattr__(name: str) -> Any:
    """Load an everyday name from its module; other names are those of `apfed_protocols`."""
    if name == "__version__":
        return version("secure-apfed")
    if name not in __all__:
        raise AttributeError(f"secure_apfed has no {name!r}; its names are {', '.join(__all__)}")
    home = _HOME.get(name)
    return getattr(import_module(f"secure_apfed.{home}") if home else apfed_protocols, name)


def __dir__() -> list[str]:
    return [*__all__]
