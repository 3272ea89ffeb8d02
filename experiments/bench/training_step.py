"""A training step to compare costs with: APFed-C on Fashion-MNIST, batches of 128, plain sum."""

import itertools
import warnings
from collections.abc import Callable

from protocols.errors import UnsafeChoiceWarning
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import DataError
from secure_apfed.methods import METHODS, Start, noise_key

__all__ = ["training_step"]

_BATCH = 128


def training_step() -> tuple[Callable[[], float], str]:
    """One step of all parties, and which images: MNIST where Fashion-MNIST is not installed."""
    config, data, images = _setting()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        names = (data.active.name, *(table.name for table in data.passives))
        keys = {name: noise_key(config, name) for name in names}
        method = METHODS[config.method](Start(config=config, data=data, noise_keys=keys))
    rows = method.training_rows[:_BATCH]
    steps = itertools.count()
    method.transcript.begin_epoch(0)
    return lambda: method.step(next(steps), rows), images


def _setting() -> tuple[Config, VerticalData, str]:
    try:
        return _loaded("fashion_mnist")
    except DataError:
        return _loaded("mnist")


def _loaded(dataset: str) -> tuple[Config, VerticalData, str]:
    config = Config.model_validate(
        {
            "name": "bench-secure-sum",
            "method": "apfed_c",
            "data": {"dataset": dataset, "views": 2, "limit": 4 * _BATCH},
            "train": {"batch_size": _BATCH, "device": "cpu"},
            "secure_sum": {"protocol": "plain", "allow_single_passive": True},
            "guard": {"mechanism": "none"},
        }
    )
    return config, load_data(config.data, seed=0), dataset
