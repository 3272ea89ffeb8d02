"""The run that benches of training share: APFed-C on strips of Fashion-MNIST, or of MNIST."""

from typing import Any

from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import DataError

__all__ = ["image_run"]


def image_run(
    name: str, *, batch: int, secure_sum: dict[str, Any], views: int = 2
) -> tuple[Config, VerticalData, str]:
    """Return a run, its data, and which images they are.

    Where Fashion-MNIST is not installed, MNIST has the same shapes.

    Raises:
        DataError: neither is there; says what to run.
    """
    try:
        return _loaded(name, "fashion_mnist", batch, secure_sum, views)
    except DataError:
        return _loaded(name, "mnist", batch, secure_sum, views)


def _loaded(
    name: str, dataset: str, batch: int, secure_sum: dict[str, Any], views: int
) -> tuple[Config, VerticalData, str]:
    config = Config.model_validate(
        {
            "name": name,
            "method": "apfed_c",
            "data": {"dataset": dataset, "views": views, "limit": 4 * batch},
            "train": {"batch_size": batch, "device": "cpu"},
            "secure_sum": {**secure_sum, "allow_single_passive": True},
            "guard": {"mechanism": "none"},
        }
    )
    return config, load_data(config.data, seed=0), dataset
