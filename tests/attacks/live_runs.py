"""Small live runs for tests of malicious attacks."""

from typing import Any

from secure_apfed.config import Config

__all__ = ["TWO_TABLES", "live_config"]

TWO_TABLES = {
    "dataset": "breast_cancer",
    "columns": {"active": list(range(10)), "passive-1": list(range(10, 20))},
    "overlap": 1.0,
}


def live_config(method: str, *, views: int = 4, **changes: dict[str, Any]) -> Config:
    """Digits of 240 people, in strips; a plain sum without clip. `data` changes as a whole."""
    base: dict[str, Any] = {
        "name": "live",
        "party_seeds": "shared_for_comparison",
        "method": method,
        "data": {"dataset": "digits", "views": views, "overlap": 1.0, "limit": 240},
        "model": {"hidden": [32], "representation": 32, "projection": 64, "dropout": 0.2},
        "train": {
            "batch_size": 64, "learning_rate": 0.1, "epochs": 8, "device": "cpu",
            "max_gradient_norm": 1.0,
        },
        "alignment": {"protocol": "ecdh"},
        "secure_sum": {"scheme": "plain", "clip": None, "allow_single_passive": True},
        "guard": {"mechanism": "none"},
    }  # fmt: skip
    merged = {
        key: value if key == "data" else {**base.get(key, {}), **value}
        for key, value in changes.items()
    }
    return Config.model_validate(base | merged)
