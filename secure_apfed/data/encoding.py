"""The two ways in which raw data become features, as one JSON-able type."""

from typing import Annotated, Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from secure_apfed.data.encoding import ColumnEncoding, ImageEncoding
from secure_apfed.errors import DataError

__all__ = ["FeatureEncoding", "RawFeatures", "parse_encoding"]

RawFeatures: TypeAlias = pd.DataFrame | NDArray[np.generic]

# As a field of a settings class it reads and writes itself; elsewhere it is the union.
FeatureEncoding: TypeAlias = Annotated[ImageEncoding | ColumnEncoding, Field(discriminator="kind")]

_ADAPTER: TypeAdapter[ImageEncoding | ColumnEncoding] = TypeAdapter(FeatureEncoding)


def parse_encoding(value: dict[str, Any]) -> ImageEncoding | ColumnEncoding:
    """Return the encoding whose `model_dump(mode="json")` is `value`.

    Raises:
        DataError: `value` is not one.
    """
    try:
        return _ADAPTER.validate_python(value)
    except ValidationError as error:
        raise DataError(f"not a feature encoding: {error}") from error
