"""Data: built-in sets, the parties' own tables, and the vertical partition between parties.

Names are loaded when they are first used, so that the code of an unlabelled row does not load the
readers of tables.
"""

from typing import TYPE_CHECKING

from apfed_protocols.lazy_names import give_names

if TYPE_CHECKING:
    from secure_apfed.data.catalogue import (
        DATASETS,
        describe_dataset,
        fetch_dataset,
        find_dataset,
    )
    from secure_apfed.data.encoding import ColumnEncoding, FeatureEncoding, ImageEncoding
    from secure_apfed.data.inputs import load_blocks
    from secure_apfed.data.labels import UNLABELLED, TargetScale
    from secure_apfed.data.loading import load_data
    from secure_apfed.data.records import OwnData, PartyTable, VerticalData, load_own, pack_own
    from secure_apfed.data.tables import compute_files_digest, load_own_tables

__all__ = [
    "DATASETS",
    "UNLABELLED",
    "ColumnEncoding",
    "FeatureEncoding",
    "ImageEncoding",
    "OwnData",
    "PartyTable",
    "TargetScale",
    "VerticalData",
    "compute_files_digest",
    "describe_dataset",
    "fetch_dataset",
    "find_dataset",
    "load_blocks",
    "load_data",
    "load_own",
    "load_own_tables",
    "pack_own",
]

if not TYPE_CHECKING:  # type checkers read the imports above
    __getattr__, __dir__ = give_names(
        __name__,
        __all__,
        {
            "secure_apfed.data.catalogue": (
                "DATASETS",
                "describe_dataset",
                "fetch_dataset",
                "find_dataset",
            ),
            "secure_apfed.data.encoding": ("ColumnEncoding", "FeatureEncoding", "ImageEncoding"),
            "secure_apfed.data.inputs": ("load_blocks",),
            "secure_apfed.data.labels": ("UNLABELLED", "TargetScale"),
            "secure_apfed.data.loading": ("load_data",),
            "secure_apfed.data.records": (
                "OwnData",
                "PartyTable",
                "VerticalData",
                "load_own",
                "pack_own",
            ),
            "secure_apfed.data.tables": ("compute_files_digest", "load_own_tables"),
        },
    )
