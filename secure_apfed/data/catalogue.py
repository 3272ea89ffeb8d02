"""The one table of data sets: source, licence, classes, and files with digests and addresses.

Adding a set is an entry in `image_sets` or `table_sets` and, for a new format, a reader. A user's
own files are `dataset: tables`.
"""

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from secure_apfed.data.image_sets import IMAGE_SETS
from secure_apfed.data.readers import DataSet
from secure_apfed.data.table_sets import TABLE_SETS
from secure_apfed.errors import ConfigError

__all__ = ["DATASETS", "TABLES", "describe", "find_dataset"]

TABLES = "tables"

DATASETS: Mapping[str, DataSet] = MappingProxyType(
    {entry.name: entry for entry in (*IMAGE_SETS, *TABLE_SETS)}
)


def find_dataset(name: str) -> DataSet:
    """Return the entry called `name`.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if name in DATASETS:
        return DATASETS[name]
    known = (*DATASETS, TABLES)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"dataset: {name!r} is unknown; {guess}Known are {', '.join(known)}")


def describe(dataset: DataSet) -> dict[str, str]:
    """Return what `secure-apfed data list` shows of a set."""
    return {
        "name": dataset.name,
        "title": dataset.title,
        "shape": dataset.shape,
        "classes": "numbers" if dataset.numeric_labels else str(len(dataset.classes)),
        "views": str(dataset.views),
        "split": "official" if dataset.split else "seeded",
        "licence": dataset.licence,
        "source": dataset.source,
        "citation": dataset.citation,
        "how": dataset.how,
    }
